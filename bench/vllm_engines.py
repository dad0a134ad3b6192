"""A real vLLM: handing over through Restow, beside vLLM's own NixlConnector.

One pair of engines after the other, the same prompts. `routed`: P is asked, and D when P has
answered, as routers do for vLLM's connectors. `early`: both are asked in the same moment.
`sampled`: so too, and P samples the first token.
"""

from __future__ import annotations

import asyncio
import os
import tempfile
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import AsyncExitStack
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from rows import Row, Yield, compared
from simulated import small_layout

from restow.agents.engines.common.groups import Group
from restow.agents.engines.recall.model import checkpoint_folder
from restow.agents.engines.recall.task import Prompt, make_prompts
from restow.agents.engines.vllm.scheduler.scheduler_side import SchedulerSide
from restow.agents.engines.vllm.settings import ConnectorSettings
from restow.broker.client import BlockingSession
from restow.broker.server.serve import running_broker
from restow.broker.server.settings import BrokerSettings
from vllm_harness.engine import Answer, Options, VllmEngine, vllm_engine

SUITE = "vllm"
PAIRS = ((1, 1), (1, 2))
WARM_UP, AT_ONCE = 6, 64
PATIENCE_S = 30.0
"""What takes longer has failed."""
MOST_FAILURES = 3
"""After so many, a way is asked no more until the next case."""
SAMPLES_PER_REPEAT = 3
STEP_BUDGET_S = 50e-6
STEPS = 2000
NIXL = "NixlConnector"
FIRST_PORT = 5600

FIRST_BUDGET_S = 3e-3
SAMPLED = "sampled"
WAYS = {"routed": (False, {}), "early": (True, {}), SAMPLED: (True, {"sampled_token": True})}
"""By name: whether both sides are asked at once, and what both are told besides."""


@dataclass(frozen=True)
class Taken:
    """Seconds from P's answer to D's first token and to its second, and how right replies were."""

    first_s: list[float]
    second_s: list[float]
    note: str


Measured = dict[str, Taken]
"""By way."""


@dataclass
class Way:
    """One way to hand over, and what came of it."""

    name: str
    prefill: VllmEngine
    decode: VllmEngine
    early: bool
    more: dict[str, Any] = field(default_factory=dict)
    first_s: list[float] = field(default_factory=list)
    second_s: list[float] = field(default_factory=list)
    right: int = 0
    failed: int = 0
    asked: int = 0

    async def hand_over(self, prompt: Prompt, handoff_id: str) -> None:
        """One prompt; the reply is looked at, and a failure has no time."""
        if self.failed >= MOST_FAILURES:
            return
        self.asked += 1
        try:
            async with asyncio.timeout(PATIENCE_S):
                await self._hand_over(prompt, handoff_id)
        except TimeoutError:
            self.failed += 1

    async def _hand_over(self, prompt: Prompt, handoff_id: str) -> None:
        ids = list(prompt.token_ids)
        if self.early:
            params = {"handoff_id": handoff_id, **self.more}
            number = self.prefill.begin(ids, 1, params)
            answer = await self.decode.ask(ids, len(prompt.answer_ids), params)
            first = await self.prefill.answer(number)
        else:
            first = await self.prefill.ask(ids, 1, {"do_remote_decode": True})
            answer = await self.decode.ask(ids, len(prompt.answer_ids), first.params)
        self._look_at(prompt, first, answer)

    def _look_at(self, prompt: Prompt, first: Answer, answer: Answer) -> None:
        self.right += answer.tokens == prompt.answer_ids
        if not answer.tokens:
            self.failed += 1
            return
        self.first_s.append(answer.first_s - first.done_s)
        self.second_s.append(answer.second_s - first.done_s)

    def take(self) -> Taken:
        """What was measured since the last call."""
        note = f"{self.right} of {self.asked} right"
        note += f", {self.failed} failed" if self.failed else ""
        found = Taken(self.first_s, self.second_s, note)
        self.first_s, self.second_s = [], []
        self.right, self.failed, self.asked = 0, 0, 0
        return found


def run(put: Yield, repeats: int) -> None:
    """Needs the interpreter of vLLM's environment in RESTOW_VLLM_PYTHON."""
    put(_step())
    python = Path(os.environ["RESTOW_VLLM_PYTHON"])
    for groups in (2, 1):
        for prefill_tp, decode_tp in PAIRS:
            case = f"P{prefill_tp} to D{decode_tp}, groups {groups}"
            model = Options(checkpoint_folder(groups), conv_layout="DS", resting=False)
            pair = replace(model, tp=prefill_tp), replace(model, tp=decode_tp)
            for row in asyncio.run(_measure(python, case, *pair, repeats)):
                put(row)


async def _measure(
    python: Path, case: str, prefill: Options, decode: Options, repeats: int
) -> list[Row]:
    """Each connector has the machine for itself: idle engines do not rest on few cores."""
    async with running_broker(BrokerSettings(listen="127.0.0.1:0")) as broker:
        restow = [replace(one, broker=broker.address) for one in (prefill, decode)]
        ours = await _measured(python, restow, WAYS, repeats)
        ended = broker.hub.directory.ledger.ended.values()
        why = Counter(one.failure.reason for one in ended if one.failure is not None)
    nixl = [
        replace(one, connector=NIXL, environment={"VLLM_NIXL_SIDE_CHANNEL_PORT": str(port)})
        for one, port in ((prefill, FIRST_PORT), (decode, FIRST_PORT + 100))
    ]
    theirs = await _measured(python, nixl, {NIXL: (False, {})}, repeats)
    waits, at_once = ({**one, **other} for one, other in zip(ours, theirs, strict=True))
    return [
        *_rows(f"{case}: from P's finish to D's first token", waits, 1.0, why),
        *_sampled(case, waits),
        *_rows(f"{case}: {AT_ONCE} requests at once", at_once, None, why),
    ]


async def _measured(
    python: Path,
    engines: Sequence[Options],
    said: dict[str, tuple[bool, dict[str, Any]]],
    repeats: int,
) -> tuple[Measured, Measured]:
    """Of each way between two engines: seconds of single requests, and of all at once."""
    prompts = make_prompts(WARM_UP + max(AT_ONCE, SAMPLES_PER_REPEAT * repeats), seed=1_000_003)
    warm_up, prompts = prompts[:WARM_UP], prompts[WARM_UP:]
    with tempfile.TemporaryDirectory() as logs:
        async with AsyncExitStack() as stack:
            prefill, decode = await asyncio.gather(
                *(
                    stack.enter_async_context(
                        vllm_engine(python, replace(one, role=role), Path(logs) / role)
                    )
                    for one, role in zip(engines, ("kv_producer", "kv_consumer"), strict=True)
                )
            )
            ways = [Way(name, prefill, decode, *one) for name, one in said.items()]
            for number, prompt in enumerate(warm_up):
                for way in ways:
                    await way.hand_over(prompt, f"{way.name}/warm-up/{number}")
            for way in ways:
                way.take()
            for number, prompt in enumerate(prompts[: SAMPLES_PER_REPEAT * repeats]):
                for way in ways:
                    await way.hand_over(prompt, f"{way.name}/one/{number}")
            waits = {way.name: way.take() for way in ways}
            at_once: Measured = {}
            for way in ways:
                began_s = time.monotonic()
                await asyncio.gather(
                    *(
                        way.hand_over(one, f"{way.name}/at once/{number}")
                        for number, one in enumerate(prompts[:AT_ONCE])
                    )
                )
                elapsed_s = time.monotonic() - began_s
                at_once[way.name] = replace(way.take(), first_s=[elapsed_s])
    return waits, at_once


def _rows(what: str, measured: Measured, goal: float | None, why: Counter[str]) -> Iterator[Row]:
    """``why``: reasons of all of the pair's handoffs that failed, as the broker has them."""
    theirs = measured[NIXL]
    reasons = "".join(f", {count} x {reason}" for reason, count in why.items())
    for name in WAYS:
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
    """What it is worth that P samples: the first token, and the next."""
    by_p, by_d = measured[SAMPLED], measured["early"]
    if by_p.first_s and by_d.first_s:
        what = f"{case}: from P's finish"
        budget = f"budget of {1e3 * FIRST_BUDGET_S:g} ms", [FIRST_BUDGET_S]
        first = f"{what} to the first token, P samples it"
        yield compared(SUITE, first, by_p.first_s, *budget, goal=1.0, note=by_p.note)
        sides = by_p.second_s, "D samples", by_d.second_s
        second = f"{what} to the second token, P samples the first"
        yield compared(SUITE, second, *sides, goal=0.5, note=by_p.note)


def _step() -> Row:
    """What the scheduler's side does in a step of an engine that hands nothing over."""
    session = BlockingSession("idle", "life", small_layout())
    groups = (Group("group.0", 128), Group("group.1", 128, 0))
    side = SchedulerSide("idle", "life", "kv_both", groups, 0, session, ConnectorSettings())
    running = [(f"request {number}", 100) for number in range(256)]
    samples = [_timed(side, running) for _ in range(STEPS)]
    return compared(
        SUITE,
        "a scheduler's step without a handoff, 256 requests",
        samples,
        "budget",
        [STEP_BUDGET_S],
        goal=1.0,
    )


def _timed(side: SchedulerSide, running: Sequence[tuple[str, int]]) -> float:
    began_s = time.perf_counter()
    for request_id, _ in running:
        side.decides(request_id)
    side.step(iter(running))
    return time.perf_counter() - began_s
