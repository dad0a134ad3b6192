"""Run prompts through a broker, and compare with an engine that kept its state to itself.

D answers prompts from states that P prefilled: the right way, and in three ways that are broken on
purpose and must be detected. Broker and daemons are processes of their own.
"""

from __future__ import annotations

import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from enum import StrEnum
from pathlib import Path

import torch
from torch import Tensor

from restow.broker.errors import RestowError
from restow.broker.families import EngineSettings
from restow.broker.layout import Layout
from restow.broker.planner import Strategy
from restow.broker.words import Worded
from restow.demo.recall.model import load_model
from restow.demo.recall.task import Prompt, make_prompts
from restow.demo.transformers.engine import Engine, EngineOptions
from restow.demo.transformers.generation import AS_COMPUTED, Decoded, StoredTypes
from restow.demo.transformers.rank_processes import ForkServer

SEED = 26
"""The seed of the prompts. With most seeds a swap of B and C shows in the logits of every prompt
but in the words of none, because it spoils only the next three tokens; with this seed it shows in
the words of two prompts."""
STEPS = 6
"""Tokens that are decoded for each answer."""
START_TIMEOUT_S = 60.0


@dataclass(frozen=True, slots=True)
class DemoOptions(Worded):
    """The options of a run: both engines, the strategy between them, and the prompts."""

    p: EngineSettings
    d: EngineSettings
    p_stored: StoredTypes = AS_COMPUTED
    d_stored: StoredTypes = AS_COMPUTED
    allow_narrowing: bool = False
    strategy: Strategy = Strategy.AUTO
    daemon: bool = False
    prompts: int = 16
    sabotage: bool = True


State = Mapping[str, Tensor]
_OTHER = {"B": "C", "C": "B"}


class Sabotage(StrEnum):
    """A way to break a handoff."""

    NO_N_MINUS_1 = "no_n_minus_1"
    """P absorbs all N tokens, and D absorbs the last token again."""
    SWAPPED_B_C = "swapped_b_c"
    """P tells the broker that B and C lie in each other's places. Where it keeps the inputs of its
    mixers, it tells them in reverse order."""
    STALE_SSM = "stale_ssm"
    """The SSM part of the page still holds what another request left there."""


def swap_b_and_c(layout: Layout) -> Layout:
    """Return the layout with the places of B and C exchanged, and inputs in reverse order."""
    ranks = tuple(
        replace(
            rank,
            shards=tuple(replace(s, field=_other_letter(s.field)) for s in rank.shards),
            inputs=tuple(
                replace(mixer_input, field=opposite.field)
                for mixer_input, opposite in zip(rank.inputs, reversed(rank.inputs), strict=True)
            ),
        )
        for rank in layout.ranks
    )
    return replace(layout, ranks=ranks)


def _other_letter(field: str) -> str:
    stem, _, letter = field.rpartition(".")
    return f"{stem}.{_OTHER.get(letter, letter)}"


def with_ssm_of(other: State) -> Callable[[State], State]:
    """Exchange the SSM states of a request for those of another request."""

    def exchange(state: State) -> State:
        return {name: other[name] if name.endswith(".ssm") else state[name] for name in state}

    return exchange


Progress = Callable[[str, int, int], None]
"""A function of what is under way, how much of it is done, and of how much."""


@dataclass(frozen=True, slots=True)
class PromptAnswer:
    """A prompt answered alone and through a handoff."""

    prompt: Prompt
    alone: Decoded
    through: Decoded
    bytes: int
    transfer_us: int

    @property
    def tokens_equal(self) -> bool:
        """Whether the same tokens came out."""
        return self.alone.token_ids == self.through.token_ids

    @property
    def logit_diff(self) -> float:
        """The largest difference of the first token's logits."""
        difference: Tensor = (self.alone.first_logits - self.through.first_logits).abs().max()
        return float(difference)

    @property
    def logits_equal(self) -> bool:
        """Whether the first token's logits are equal bit for bit."""
        return torch.equal(self.alone.first_logits, self.through.first_logits)

    @property
    def exact(self) -> bool:
        """Whether the same tokens came out of logits that are equal bit for bit at every step."""
        return self.tokens_equal and torch.equal(self.alone.logits, self.through.logits)

    @property
    def right_alone(self) -> bool:
        """Whether the reference gives the answer that the prompt determines."""
        return self._right(self.alone)

    @property
    def right_through(self) -> bool:
        """Whether the answer through the handoff is the answer that the prompt determines."""
        return self._right(self.through)

    def _right(self, decoded: Decoded) -> bool:
        return decoded.token_ids == self.prompt.answer_ids[: len(decoded.token_ids)]


def answer_prompts(
    run: str,
    p: Engine,
    d: Engine,
    prompts: Sequence[Prompt],
    references: Sequence[Decoded],
    steps: int,
    sabotage: Sabotage | None = None,
    progress: Progress = lambda what, done, of: None,
) -> tuple[PromptAnswer, ...]:
    """Hand every prompt's state from ``p`` to ``d`` and decode ``steps`` tokens there.

    ``run`` makes the handoffs' ids unique. D asks for every second prompt before P has begun it.
    For `Sabotage.SWAPPED_B_C` the caller gives a ``p`` that announced a false layout.
    """
    answers = []
    for index, (prompt, reference) in enumerate(zip(prompts, references, strict=True)):
        progress(run, index, len(prompts))
        handoff_id = f"{run}-{index}"
        # If both sides named the content, the broker would refuse most of the broken runs.
        named = sabotage is None
        asked = d.ask(handoff_id, prompt.token_ids, named=named) if index % 2 else None
        if sabotage is Sabotage.NO_N_MINUS_1:
            p.prefill(handoff_id, prompt.token_ids, position=len(prompt.token_ids))
        elif sabotage is Sabotage.STALE_SSM:
            other = prompts[index - 1].token_ids
            left_behind = with_ssm_of(p.state_at(other, len(other) - 1))
            p.prefill(handoff_id, prompt.token_ids, alter=left_behind)
        else:
            p.prefill(handoff_id, prompt.token_ids)
        asked = asked or d.ask(handoff_id, prompt.token_ids, named=named)
        through = d.decode(asked, steps)
        ended = asked.end.result()
        answers.append(PromptAnswer(prompt, reference, through, ended.bytes, ended.transfer_us))
    progress(run, len(prompts), len(prompts))
    return tuple(answers)


class StartFailedError(RestowError, status="UNAVAILABLE", reason="START_FAILED"):
    """A process of the demo ended or did not start in time; its error is printed above."""


@contextmanager
def errors_as_lines() -> Iterator[None]:
    """End this process at a typed error, and print the error in one line."""
    try:
        yield
    except RestowError as error:
        print(f"{error.reason}: {error.message}", file=sys.stderr)
        sys.exit(1)


@contextmanager
def started(arguments: list[str]) -> Iterator[subprocess.Popen[str]]:
    """Run ``restow`` with arguments, as a process that ends with the ``with``."""
    process = subprocess.Popen(  # noqa: S603 - our own command
        [sys.executable, "-m", "restow.broker.cli.main", *arguments],
        stdout=subprocess.PIPE,
        text=True,
    )
    try:
        yield process
    finally:
        process.terminate()
        try:
            process.wait(10)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()


@contextmanager
def running_broker_process(strategy: Strategy, allow_narrowing: bool = False) -> Iterator[str]:
    """Run a broker on a free port of this host, and yield its address."""
    narrowing = ["--allow-narrowing"] if allow_narrowing else []
    with started(
        ["serve", "--listen", "127.0.0.1:0", "--strategy", strategy, *narrowing]
    ) as process:
        line = process.stdout.readline() if process.stdout else ""
        if "listening on" not in line:
            raise StartFailedError(f"the broker did not start: {line.strip()}")
        yield line.rsplit(maxsplit=1)[-1]


@contextmanager
def running_daemon(broker: str, socket: Path) -> Iterator[Path]:
    """Run an agent daemon behind ``socket``."""
    with started(["agent", "--broker", broker, "--socket", str(socket)]) as process:
        deadline_s = time.monotonic() + START_TIMEOUT_S
        while not socket.exists():
            if process.poll() is not None or time.monotonic() > deadline_s:
                raise StartFailedError(f"the agent daemon at {socket} did not start")
            time.sleep(0.05)
        yield socket


@dataclass(frozen=True, slots=True)
class Outcome:
    """All answers of a demo."""

    answers: tuple[PromptAnswer, ...]
    sabotaged: dict[Sabotage, tuple[PromptAnswer, ...]]


def run_experiment(options: DemoOptions, progress: Progress) -> Outcome:
    """Start a broker, a P and a D; answer all prompts the right way, then the wrong ways."""
    # With one thread the order of additions, and so the last bit, depends on no machine.
    torch.set_num_threads(1)
    with ExitStack() as stack:
        forks = stack.enter_context(ForkServer())
        broker = stack.enter_context(
            running_broker_process(options.strategy, options.allow_narrowing)
        )
        model = load_model()
        prompts = make_prompts(options.prompts, SEED)

        def engine(
            name: str,
            settings: EngineSettings,
            stored: StoredTypes,
            announce: Callable[[Layout], Layout] = lambda layout: layout,
        ) -> Engine:
            """Start an engine with a worker process, or a daemon, for each of its ranks."""
            homes: tuple[ForkServer | Path, ...] = (forks,) * settings.tp
            if options.daemon:
                folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="restow-")))
                progress(f"starting daemons of {name}", 0, settings.tp)
                homes = tuple(
                    stack.enter_context(running_daemon(broker, folder / f"{rank}.sock"))
                    for rank in range(settings.tp)
                )
            progress(f"starting {name}, {settings.tp} ranks", 0, settings.tp)
            how = EngineOptions(name, broker, settings, homes, stored=stored)
            return stack.enter_context(Engine(model, how, announce))

        p = engine("P", options.p, options.p_stored)
        d = engine("D", options.d, options.d_stored)
        alone = []
        for index, prompt in enumerate(prompts):
            progress("standalone", index, len(prompts))
            alone.append(d.decode_alone(prompt.token_ids, STEPS, options.p_stored))
        answers = answer_prompts("restow", p, d, prompts, alone, STEPS, progress=progress)
        sabotaged = {}
        for sabotage in Sabotage if options.sabotage else ():
            source = p
            if sabotage is Sabotage.SWAPPED_B_C:
                source = engine("P-lies", options.p, options.p_stored, swap_b_and_c)
            sabotaged[sabotage] = answer_prompts(
                sabotage, source, d, prompts, alone, STEPS, sabotage, progress
            )
        return Outcome(answers, sabotaged)
