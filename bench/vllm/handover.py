"""Handing over between real vLLM engines through Restow, beside vLLM's own NixlConnector.

The pairs of engines are measured in succession with the same prompts. ``routed``: D is asked when P
has answered, as routers do for vLLM's connectors. ``early``: both are asked at the same moment.
``sampled``: both are asked at once, and P samples the first token. ``alone``: an engine like D
serves by itself.

vLLM's processes wait for each other by `sched_yield`, so on two processors they keep each other
from running, with any connector. In this benchmark all of them sleep there for half a millisecond.
"""

from __future__ import annotations

import asyncio
import os
import statistics
import tempfile
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import AsyncExitStack
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from bench.model_sizes import tiny_hybrid
from bench.report import Put, Row, compared
from restow.agents.engines.common.blocks import Group
from restow.agents.engines.common.prefill_decode import Scheduled
from restow.agents.engines.common.registration import ConnectorSettings
from restow.agents.engines.vllm.scheduler.scheduler_side import SchedulerSide
from restow.broker.client import BlockingSession
from restow.broker.server.base.settings import BrokerSettings
from restow.broker.server.serve import running_broker
from restow.demo.recall.model import checkpoint_folder
from restow.demo.recall.task import Prompt, make_prompts
from vllm_harness.engine import Answer, Options, VllmEngine, vllm_engine

SUITE = "vllm-handover"
PAIRS = ((1, 1), (1, 2))
WARM_UP, AT_ONCE = 6, 64
CLIENTS = {1: 20, 8: 5, 32: 5}
"""Requests of each client in succession, by the number of clients."""
SAMPLES_PER_REPEAT = 3
STEP_BUDGET_S = 50e-6
STEPS = 2000
NIXL, ALONE = "NixlConnector", "alone"
FIRST_PORT = 5600
FIRST_BUDGET_S = 3e-3
SAMPLED = "sampled"
WAYS = {"routed": (False, {}), "early": (True, {}), SAMPLED: (True, {"sampled_token": True})}
"""By name: whether both sides are asked at once, and further parameters for both."""
WAITING = ("routed", "early")
"""Ways in which D's first token waits for the whole state."""
PATIENCE_S = 30.0
"""A handoff that takes longer has failed."""
MAX_FAILURES = 3
"""After this many failures a way is skipped until the next case."""


@dataclass(frozen=True)
class Taken:
    """What a way took, in seconds.

    ``first_s`` and ``second_s`` count from P's answer to D's first and second token, ``asked_s``
    from the question to both. ``note`` says how many replies were right.
    """

    first_s: list[float]
    second_s: list[float]
    asked_s: list[tuple[float, float]]
    note: str


Measured = dict[str, Taken]
"""By the name of the way."""


@dataclass
class PairTimes:
    """All measurements of a pair of engines.

    ``in_succession`` has requests one after another; ``at_once`` has all of them at the same time,
    with their total in ``first_s``; ``clients`` has those of several clients, by their number.
    """

    in_succession: Measured = field(default_factory=dict)
    at_once: Measured = field(default_factory=dict)
    clients: dict[int, Measured] = field(default_factory=dict)

    def add(self, other: PairTimes) -> None:
        """Take over the ways that another pair was measured in."""
        self.in_succession |= other.in_succession
        self.at_once |= other.at_once
        for count, measured in other.clients.items():
            self.clients[count] = self.clients.get(count, {}) | measured


@dataclass
class Way:
    """A way to hand over between P and D, or an engine that serves alone, and its times."""

    name: str
    engines: Sequence[VllmEngine]
    early: bool
    more: dict[str, Any] = field(default_factory=dict)
    first_s: list[float] = field(default_factory=list)
    second_s: list[float] = field(default_factory=list)
    asked_s: list[tuple[float, float]] = field(default_factory=list)
    right: int = 0
    failed: int = 0
    asked: int = 0

    async def hand_over(self, prompt: Prompt, handoff_id: str) -> None:
        """Hand a prompt over and check the reply; a failure gets no time."""
        if self.failed >= MAX_FAILURES:
            return
        self.asked += 1
        try:
            async with asyncio.timeout(PATIENCE_S):
                await self._hand_over(prompt, handoff_id)
        except TimeoutError:
            self.failed += 1

    async def _hand_over(self, prompt: Prompt, handoff_id: str) -> None:
        ids, (*others, decode) = list(prompt.token_ids), self.engines
        began_s = time.monotonic()
        if not others:
            first = answer = await decode.ask(ids, len(prompt.answer_ids))
        elif self.early:
            params = {"handoff_id": handoff_id, **self.more}
            number = others[0].begin(ids, 1, params)
            answer = await decode.ask(ids, len(prompt.answer_ids), params)
            first = await others[0].answer(number)
        else:
            first = await others[0].ask(ids, 1, {"do_remote_decode": True})
            answer = await decode.ask(ids, len(prompt.answer_ids), first.params)
        self._look_at(prompt, began_s, first, answer)

    def _look_at(self, prompt: Prompt, began_s: float, first: Answer, answer: Answer) -> None:
        self.right += answer.tokens == prompt.answer_ids
        if not answer.tokens:
            self.failed += 1
            return
        self.first_s.append(answer.first_s - first.done_s)
        self.second_s.append(answer.second_s - first.done_s)
        self.asked_s.append((answer.first_s - began_s, answer.second_s - began_s))

    def take(self) -> Taken:
        """Return what was measured since the last call."""
        note = f"{self.right} of {self.asked} right"
        note += f", {self.failed} failed" if self.failed else ""
        taken = Taken(self.first_s, self.second_s, self.asked_s, note)
        self.first_s, self.second_s, self.asked_s = [], [], []
        self.right, self.failed, self.asked = 0, 0, 0
        return taken


def run(put: Put, repeats: int) -> None:
    """Measure every pair; RESTOW_VLLM_PYTHON names the interpreter of vLLM's environment."""
    put(_step())
    python = Path(os.environ["RESTOW_VLLM_PYTHON"])
    for groups in (2, 1):
        for prefill_tp, decode_tp in PAIRS:
            case = f"P{prefill_tp} to D{decode_tp}, groups {groups}"
            model = Options(checkpoint_folder(groups), conv_layout="DS")
            pair = replace(model, tp=prefill_tp), replace(model, tp=decode_tp)
            for row in asyncio.run(_measure(python, case, *pair, repeats)):
                put(row)


async def _measure(
    python: Path, case: str, prefill: Options, decode: Options, repeats: int
) -> list[Row]:
    """Measure the connectors one after another, so that each has the machine for itself."""
    async with running_broker(BrokerSettings(listen="127.0.0.1:0")) as broker:
        restow = [replace(options, broker=broker.address) for options in (prefill, decode)]
        times = await _measured(python, restow, WAYS, repeats)
        ended = broker.hub.directory.ledger.ended.values()
        why = Counter(handoff.failure.reason for handoff in ended if handoff.failure is not None)
    nixl = [
        replace(options, connector=NIXL, environment={"VLLM_NIXL_SIDE_CHANNEL_PORT": str(port)})
        for options, port in ((prefill, FIRST_PORT), (decode, FIRST_PORT + 100))
    ]
    times.add(await _measured(python, nixl, {NIXL: (False, {})}, repeats))
    times.add(await _measured(python, [decode], {ALONE: (False, {})}, repeats))
    return [
        *_rows(
            f"{case}: from P's finish to D's first token", times.in_succession, WAITING, 1.0, why
        ),
        *_sampled(case, times.in_succession),
        *_rows(f"{case}: {AT_ONCE} requests at once", times.at_once, tuple(WAYS), None, why),
        *(row for count in CLIENTS for row in _of_clients(case, count, times.clients[count])),
    ]


async def _measured(
    python: Path,
    wanted: Sequence[Options],
    settings: dict[str, tuple[bool, dict[str, Any]]],
    repeats: int,
) -> PairTimes:
    """Measure each way between two engines, or a single engine alone."""
    asked = (count * asked_by_each for count, asked_by_each in CLIENTS.items())
    most = max(AT_ONCE, SAMPLES_PER_REPEAT * repeats, *asked)
    prompts = make_prompts(WARM_UP + most, seed=1_000_003)
    warm_up, prompts = prompts[:WARM_UP], prompts[WARM_UP:]
    roles = ("kv_producer", "kv_consumer") if len(wanted) > 1 else ("",)
    with tempfile.TemporaryDirectory() as logs:
        async with AsyncExitStack() as stack:
            engines = await asyncio.gather(
                *(
                    stack.enter_async_context(
                        vllm_engine(python, replace(options, role=role), Path(logs) / f"log{role}")
                    )
                    for options, role in zip(wanted, roles, strict=True)
                )
            )
            ways = [Way(name, engines, *setting) for name, setting in settings.items()]
            for number, prompt in enumerate(warm_up):
                for way in ways:
                    await way.hand_over(prompt, f"{way.name}/warm-up/{number}")
            for way in ways:
                way.take()
            for number, prompt in enumerate(prompts[: SAMPLES_PER_REPEAT * repeats]):
                for way in ways:
                    await way.hand_over(prompt, f"{way.name}/one/{number}")
            times = PairTimes({way.name: way.take() for way in ways})
            for count in CLIENTS:
                times.clients[count] = {}
                for way in ways:
                    await asyncio.gather(*(_client(way, prompts, n, count) for n in range(count)))
                    times.clients[count][way.name] = way.take()
            # This comes last, because a failure may disturb all measurements after it.
            for way in ways:
                began_s = time.monotonic()
                await asyncio.gather(
                    *(
                        way.hand_over(prompt, f"{way.name}/at once/{number}")
                        for number, prompt in enumerate(prompts[:AT_ONCE])
                    )
                )
                elapsed_s = time.monotonic() - began_s
                times.at_once[way.name] = replace(way.take(), first_s=[elapsed_s])
    return times


async def _client(way: Way, prompts: Sequence[Prompt], number: int, count: int) -> None:
    for turn in range(CLIENTS[count]):
        prompt = prompts[turn * count + number]
        await way.hand_over(prompt, f"{way.name}/{count} clients/{number}/{turn}")


def _rows(
    what: str, measured: Measured, ways: Sequence[str], goal: float | None, why: Counter[str]
) -> Iterator[Row]:
    """Compare ways with NixlConnector; ``why`` counts the broker's reasons of failed handoffs."""
    theirs = measured[NIXL]
    reasons = "".join(f", {count} x {reason}" for reason, count in why.items())
    for name in ways:
        ours = measured[name]
        if ours.first_s and theirs.first_s:
            failures = reasons if "failed" in ours.note else ""
            yield compared(
                SUITE,
                f"{what}, {name}",
                ours.first_s,
                NIXL,
                theirs.first_s,
                goal=goal,
                note=f"{ours.note}{failures}; {NIXL}: {theirs.note}",
            )


def _sampled(case: str, measured: Measured) -> Iterator[Row]:
    """Compare the first and the second token with those that D samples."""
    by_p, by_d = measured[SAMPLED], measured["early"]
    if by_p.first_s and by_d.first_s:
        # D's client may have P's token before P's own answer, so a ratio of waits means nothing.
        first_s = [first_s for first_s, _ in by_p.asked_s]
        answered_s = [
            token_s - later_s for token_s, later_s in zip(first_s, by_p.first_s, strict=True)
        ]
        later_ms = 1e3 * statistics.median(by_p.first_s)
        note = f"{later_ms:+.2f} ms after it (goal: {1e3 * FIRST_BUDGET_S:g}), {by_p.note}"
        first = f"{case}: to the first token, P samples it"
        yield compared(SUITE, first, first_s, "P's own answer", answered_s, note=note)
        sides = by_p.second_s, "D samples", by_d.second_s
        second = f"{case}: from P's finish to the second token, P samples the first"
        yield compared(SUITE, second, *sides, goal=2.0, note=by_p.note)


def _of_clients(case: str, count: int, measured: Measured) -> Iterator[Row]:
    """Compare the times from the question to the first and to the second token."""
    for index, what in enumerate(("first", "second")):
        seconds = {
            name: [waits_s[index] for waits_s in taken.asked_s] for name, taken in measured.items()
        }
        for name in (*WAYS, ALONE):
            if seconds[name] and seconds[NIXL]:
                yield compared(
                    SUITE,
                    f"{case}, {count} clients: to the {what} token, {name}",
                    seconds[name],
                    NIXL,
                    seconds[NIXL],
                    goal=1.0 if name == SAMPLED else None,
                    note=measured[name].note,
                )


def _step() -> Row:
    """Measure the scheduler's side in a step of an engine that hands nothing over."""
    session = BlockingSession("idle", "life", tiny_hybrid(1))
    groups = (Group("group.0", 128), Group("group.1", 128, 0))
    side = SchedulerSide("idle", "life", "kv_both", groups, 0, session, ConnectorSettings())
    running = [Scheduled(f"request {number}", 100, {}) for number in range(256)]
    samples = [_timed(side, running) for _ in range(STEPS)]
    return compared(
        SUITE,
        "a scheduler's step without a handoff, 256 requests",
        samples,
        "budget",
        [STEP_BUDGET_S],
        goal=1.0,
    )


def _timed(side: SchedulerSide, running: Sequence[Scheduled]) -> float:
    began_s = time.perf_counter()
    for part in running:
        side.decides(part.request_id)
    side.step(running)
    return time.perf_counter() - began_s
