"""Run prompts through a broker, and compare with an engine that kept its state to itself."""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path

import torch
from transformers import NemotronHForCausalLM

from restow.agents.demo.answers import Answer, Progress, answer_prompts
from restow.agents.demo.options import DemoOptions
from restow.agents.demo.processes import running_broker_process, running_daemon
from restow.agents.demo.sabotage import Sabotage, swap_b_and_c
from restow.agents.engines.common.fork_server import ForkServer
from restow.agents.engines.recall.model import load_model
from restow.agents.engines.recall.task import Prompt, make_prompts
from restow.agents.engines.transformers import Engine, EngineOptions, StoredTypes
from restow.agents.engines.transformers.decode import Decoded
from restow.broker.families import EngineSettings
from restow.broker.layout import Layout


@dataclass(frozen=True, slots=True)
class Outcome:
    """All answers of a demo, and the layouts between which they travelled."""

    answers: tuple[Answer, ...]
    sabotaged: dict[Sabotage, tuple[Answer, ...]]
    p_layout: Layout
    d_layout: Layout


class Experiment:
    """A broker, a P and a D that live for the length of a ``with``."""

    def __init__(self, options: DemoOptions, progress: Progress) -> None:
        """Prepare."""
        self._options = options
        self._progress = progress

    def run(self) -> Outcome:
        """Answer all prompts the right way, then the wrong ways."""
        # One thread: the order of additions, so the last bit, does not depend on the machine.
        torch.set_num_threads(1)
        options = self._options
        with (
            ForkServer() as forks,
            running_broker_process(options.strategy, options.allow_narrowing) as broker,
            ExitStack() as stack,
        ):
            model = load_model()
            prompts = make_prompts(options.prompts, options.seed)
            p = stack.enter_context(
                self._engine(model, "P", options.p, options.p_stored, broker, forks)
            )
            d = stack.enter_context(
                self._engine(model, "D", options.d, options.d_stored, broker, forks)
            )
            alone = []
            for index, prompt in enumerate(prompts):
                self._progress("standalone", index, len(prompts))
                alone.append(d.decode_alone(prompt.token_ids, options.steps, options.p_stored))
            answers = self._answer(p, d, prompts, alone)
            sabotaged = {}
            for sabotage in Sabotage if options.sabotage else ():
                lie = swap_b_and_c if sabotage is Sabotage.SWAPPED_B_C else None
                if lie is None:
                    sabotaged[sabotage] = self._answer(p, d, prompts, alone, sabotage)
                else:
                    with self._engine(
                        model, "P-lies", options.p, options.p_stored, broker, forks, lie
                    ) as liar:
                        sabotaged[sabotage] = self._answer(liar, d, prompts, alone, sabotage)
            return Outcome(answers, sabotaged, p.layout, d.layout)

    def _answer(
        self,
        p: Engine,
        d: Engine,
        prompts: Sequence[Prompt],
        alone: Sequence[Decoded],
        sabotage: Sabotage | None = None,
    ) -> tuple[Answer, ...]:
        return answer_prompts(
            sabotage or "restow",
            p,
            d,
            prompts,
            alone,
            self._options.steps,
            sabotage,
            self._progress,
        )

    @contextmanager
    def _engine(
        self,
        model: NemotronHForCausalLM,
        name: str,
        settings: EngineSettings,
        stored: StoredTypes,
        broker: str,
        forks: ForkServer,
        announce: Callable[[Layout], Layout] | None = None,
    ) -> Iterator[Engine]:
        """An engine with a worker process, or a daemon, for each of its ranks."""
        with ExitStack() as stack:
            homes: tuple[ForkServer | Path, ...] = (forks,) * settings.tp
            if self._options.daemon:
                folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="restow-")))
                self._progress(f"starting daemons of {name}", 0, settings.tp)
                homes = tuple(
                    stack.enter_context(running_daemon(broker, folder / f"{rank}.sock"))
                    for rank in range(settings.tp)
                )
            self._progress(f"starting {name}, {settings.tp} ranks", 0, settings.tp)
            options = EngineOptions(name, broker, settings, homes, stored=stored)
            yield stack.enter_context(Engine(model, options, announce or _as_it_is))


def _as_it_is(layout: Layout) -> Layout:
    return layout
