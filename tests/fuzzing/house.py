"""A broker as it is, on a virtual clock, with good engines in the midst of hostile ones."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import secrets
from collections.abc import Callable, Coroutine, Iterator
from functools import lru_cache
from typing import Any, TypeVar
from unittest.mock import patch

from google.protobuf.message import DecodeError

from broker.fakes import P_BLOCKS, UnusedBlocks, model_layout
from fuzzing.door import Answer, Door, Violation
from fuzzing.good_engine import GoodEngine, ask_by_content, hand_over
from restow.broker.core.audit import audit
from restow.broker.core.common.keys import EngineKey
from restow.broker.core.common.limits import Limits
from restow.broker.core.common.pair import Digests, PairRefused
from restow.broker.planner import Strategy
from restow.broker.server.base import hub as hubs
from restow.broker.server.base import planning
from restow.broker.server.base.hub import Hub
from restow.v1 import admin_pb2
from simulation_harness.virtual_loop import VirtualLoop

T = TypeVar("T")

TENANTS = ("default", "other")
LAYOUTS = {tp: model_layout(tp) for tp in (1, 2)}
PROBE_PAIR = "/restow.v1.Admin/ProbePair"
VICTIM = "victim"
"""A handoff of the good engines that is being read all the while."""
LIMITS = Limits(
    lease_s=5.0,
    timeout_s=5.0,
    max_lease_s=240.0,
    grant_s=230.0,
    settle_grace_s=1.0,
    agent_wait_s=2.0,
    engine_idle_s=240.0,
    max_live=40,
    max_ended=30,
    max_engines=12,
    max_pairs=20,
)
MAX_QUEUE = 600
FOREVER_S = 490.0
"""Longer than any lease with its grant."""

_plan_once = lru_cache(512)(planning.plan_pair)


@contextlib.contextmanager
def quiet() -> Iterator[None]:
    """Run with fewer ticks, without chance and logs, and make every plan once."""
    log = logging.getLogger("restow")
    level = log.level
    log.setLevel(logging.CRITICAL)
    with contextlib.ExitStack() as stack:
        for target, name, value in (
            (hubs, "TICK_S", 0.5),
            (hubs, "plan_pair", _plan_once),
            (secrets, "randbits", lambda bits: 7),
            (secrets, "token_hex", lambda size: "e" * size),
        ):
            stack.enter_context(patch.object(target, name, value))
        try:
            yield
        finally:
            log.setLevel(level)


class House:
    """The broker, the good engines of one tenant, and all that must hold."""

    def __init__(
        self,
        strategy: Strategy = Strategy.AUTO,
        limits: Limits = LIMITS,
        digests: Digests | None = None,
    ) -> None:
        self.loop = VirtualLoop()
        self.hub = Hub(limits, strategy, MAX_QUEUE, self.loop.time, digests=digests)
        self.door = Door(self.hub, self.loop)
        self._clock = self.loop.create_task(self.hub.run_clock())
        self._calls: list[asyncio.Task[Answer]] = []
        self.p = GoodEngine(self.door, TENANTS[0], "good-p", LAYOUTS[2], P_BLOCKS)
        self.d = GoodEngine(self.door, TENANTS[0], "good-d", LAYOUTS[1], dict(UnusedBlocks()))
        self.p.friend = self.d
        self.p.friends = self.d.friends = self.p.friends | self.d.friends
        self._handed_over = 0
        self.run(self._start())

    async def _start(self) -> None:
        await self.door.open()
        for engine in (self.p, self.d):
            await engine.start()
        await asyncio.sleep(0.01)
        self.d.waits = True
        self.p.publish(VICTIM)
        self.d.request(VICTIM)
        await asyncio.sleep(0.5)
        self.d.go_on()  # what costs were measured
        self.d.waits = True
        await asyncio.sleep(0.5)
        if not self.d.numbers:
            raise Violation("the good engines have nothing to do")

    def run(self, work: Coroutine[Any, Any, T]) -> T:
        """Do some work, and all that follows from it at once."""
        found = self.loop.run_until_complete(work)
        self.wait(0.001)
        return found

    def wait(self, seconds: float) -> None:
        """Let time pass."""
        self.loop.run_until_complete(asyncio.sleep(seconds))

    def call(self, path: str, request: bytes, tenant: str) -> Answer | None:
        """Make one call; None: it is not answered at once. A refused call must change nothing."""
        self.wait(0.001)
        if path == PROBE_PAIR:
            self._let_examine(request, tenant)
        before = self.state()
        task = self.loop.create_task(self.door.call(path, request, tenant))
        self.wait(0.001)
        if not task.done():
            self._calls.append(task)
            return None
        answer = task.result()
        # A publication that is refused ends its handoff: who waits for it is told.
        ends = path.endswith("/Publish")
        if answer.reason and not ends and self.state() != before:
            raise Violation(f"{path} was refused with {answer.reason}, and changed something")
        return answer

    def _let_examine(self, request: bytes, tenant: str) -> None:
        """Note from whom good engines may read because an operator of their tenant asks for it."""
        asked = admin_pb2.ProbePairRequest()
        with contextlib.suppress(DecodeError):
            asked.ParseFromString(request)
        source = self.hub.directory.members.engines.get(EngineKey(tenant, asked.source_engine))
        for engine in (self.p, self.d):
            if source and (tenant, asked.destination_engine) == (TENANTS[0], engine.ref.engine_id):
                engine.examined |= {agent.agent_name for agent in source.agents.values()}

    def state(self) -> object:
        """Return all that a refused call must leave as it was."""
        directory = self.hub.directory
        return (
            [
                (key, one.incarnation, one.layout_digest, sorted(one.handoffs), one.admitted)
                for key, one in directory.members.engines.items()
            ],
            set(directory.connections.names),
            [
                (key, one.number, one.state, one.publication.final, one.lease.until_s)
                for key, one in directory.ledger.live.items()
            ],
            dict(directory.ledger.statistics.by_state),
            len(directory.ledger.quarantine),
        )

    def check(self) -> None:
        """Check that nothing is wrong. Raises `Violation`."""
        directory, limits = self.hub.directory, self.hub.directory.limits
        if found := audit(directory):
            raise Violation(f"the audit finds {found}")
        if self._clock.done():
            self._clock.result()
        for broken in self.loop.broken:
            raise Violation(f"in the background: {broken}") from broken["exception"]
        for task in self._calls:
            if task.done():
                task.result()
        for engine in (self.p, self.d):
            engine.check()
        for pair, outcome in directory.plans.known.items():
            if isinstance(outcome, PairRefused) and "planner failed" in outcome.error.message:
                raise Violation(f"{pair}: {outcome.error.message}")
        names, probing = directory.connections.names, directory.probing
        for what, size, bound in (
            ("sessions", len(self.hub.engines), limits.max_engines),
            ("agents", len(self.hub.agents), len(names)),
            ("live and quarantined", len(directory.ledger.quarantine), limits.max_live),
            ("pairs of hosts", len(probing.known), limits.max_pairs),
            ("longest word of a failure", _longest_word(self.hub), 1024),
        ):
            if size > bound:
                raise Violation(f"{size} {what}, more than {bound}")

    def show(self) -> None:
        """Check that operators can see everything at any time."""
        for path in self.door.methods:
            name = path.removeprefix("/restow.v1.Admin/")
            of_one = name in ("GetHandoff", "GetLayout")
            if name.startswith(("Get", "List", "Audit")) and not of_one:
                for tenant in TENANTS:
                    answer = self.call(path, b"", tenant)
                    if answer is None or answer.reason:
                        raise Violation(f"{path}: {answer}")

    def hand_over(self) -> None:
        """Run another handoff of the good engines from end to end, beside all that goes on."""
        self._beside_all(hand_over)

    def ask_by_content(self) -> None:
        """Run a handoff by content of the good engines, beside all that goes on."""
        self._beside_all(ask_by_content)

    def _beside_all(self, begin: Callable[..., Coroutine[Any, Any, None]]) -> None:
        self._handed_over += 1
        if self.hub.directory.granting.draining:  # an operator, too, says what it likes
            self.hub.perform(self.hub.directory.granting.drain(False, self.hub.now_s()))
        waits, self.d.waits = self.d.waits, False
        self.run(begin(self.p, self.d, f"not guessed {self._handed_over}"))
        self.d.waits = waits

    @contextlib.contextmanager
    def lives(self) -> Iterator[House]:
        """Run the broker until the end of the ``with``."""
        try:
            yield self
        finally:
            self.close()

    def close(self) -> None:
        """Stop the broker, whatever goes on."""
        self._clock.cancel()
        for task in self._calls:
            task.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            self.loop.run_until_complete(self._clock)
        self.loop.close()

    def end_well(self) -> None:
        """Check that what was begun ends well, and nothing is left of parties that were cut off."""
        self.check()
        self.d.go_on()
        self.wait(0.01)
        for engine in (self.p, self.d):
            ended = engine.ended.get(VICTIM)
            if ended is None or ended.reason:
                raise Violation(f"{VICTIM} did not end well: {ended}")
        self.hand_over()
        self.ask_by_content()
        self.wait(FOREVER_S)
        self.check()
        directory, hub = self.hub.directory, self.hub
        good = {(TENANTS[0], engine.ref.engine_id) for engine in (self.p, self.d)}
        friends = self.p.friends
        for what, left in (
            ("handoffs", set(directory.ledger.live)),
            ("engines", directory.members.engines.keys() - good),
            ("agents", directory.connections.names.keys() - {(TENANTS[0], one) for one in friends}),
            ("sessions", hub.engines.keys() - good),
            ("agents' streams", {key for key in hub.agents if key.engine not in good}),
            ("calls that wait", set(hub.waiting._waiting)),
            ("plans under way", set(directory.plans.planning)),
            ("calls", {task for task in self._calls if not task.done()}),
        ):
            if left:
                raise Violation(f"{what} that never end: {left}")
        self.hand_over()


def _longest_word(hub: Hub) -> int:
    """Return the length of the longest hostile text that the broker keeps."""
    directory = hub.directory
    words = [one.failure for one in directory.probing.known.values()]
    words += [one.failure.detail for one in directory.ledger.ended.values() if one.failure]
    return max(map(len, words), default=0)
