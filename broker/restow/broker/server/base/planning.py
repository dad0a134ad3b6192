"""Planning beside the broker's loop: small pairs on a thread, large pairs in another process.

A thread that plans holds the interpreter for 5 ms at every turn, and for 150 ms in a large step of
numpy, and the loop waits. Another tenant's handoff needs dozens of turns.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import threading
from collections import defaultdict
from collections.abc import Callable, Sequence
from multiprocessing.connection import Connection
from multiprocessing.context import SpawnProcess

from restow.broker.core.common.pair import PairOutcome, PairPlan, PairRefused
from restow.broker.errors import (
    PlanError,
    RestowError,
    StrategyRefusedError,
    TooManyPiecesError,
)
from restow.broker.layout import Layout
from restow.broker.planner import (
    CostModel,
    Plan,
    Program,
    Strategy,
    check_exact,
    compile_programs,
    early_plan,
    make_plan,
)
from restow.broker.rpc import wire
from restow.broker.rpc.sizes import MAX_FROM_BROKER_BYTES
from restow.v1 import layout_pb2

MAX_PROGRAM_BYTES = MAX_FROM_BROKER_BYTES - (8 << 20)
"""Most bytes of a program's rows; a larger program would end its agent's stream again and again."""
LARGE_SHARDS = 2000
"""Shards of both layouts together; pairs with fewer are planned in about 30 ms."""
NICENESS = 10

PlanPair = Callable[[Layout, Layout, Strategy, bool, CostModel | None], PairOutcome]


def plan_pair(
    source: Layout,
    destination: Layout,
    strategy: Strategy,
    allow_narrowing: bool = False,
    costs: CostModel | None = None,
) -> PairOutcome:
    """Plan between two layouts, or return why that is impossible."""
    try:
        plan = make_plan(source, destination, any_revision=True)
        if not allow_narrowing:
            check_exact(plan)
        programs = compile_programs(plan, strategy, costs)
        part = early_plan(plan)
        early = programs if part is plan else _early_programs(part, strategy, costs)
        for program in (*programs, *early):
            if program.size_bytes > MAX_PROGRAM_BYTES:
                raise TooManyPiecesError(
                    f"the program of D's rank {program.dst_rank} has {program.size_bytes} bytes, "
                    f"but at most {MAX_PROGRAM_BYTES} can be sent: make the page layouts of the "
                    f"two engines more alike",
                    rank=program.dst_rank,
                )
        return PairPlan.of(programs, early)
    except RestowError as error:
        return PairRefused(error)


def _early_programs(
    part: Plan | None, strategy: Strategy, costs: CostModel | None
) -> Sequence[Program]:
    """Return programs for early reads; none if nothing may be read early in that way."""
    try:
        return () if part is None else compile_programs(part, strategy, costs)
    except StrategyRefusedError:
        return ()


class Planner:
    """Plans the pairs of each tenant in turn. Belongs to one event loop."""

    def __init__(self) -> None:
        """Begin without a process."""
        self._turns: defaultdict[str, asyncio.Lock] = defaultdict(asyncio.Lock)
        self._process_turn = asyncio.Lock()
        self._process = PlanningProcess()
        self._starting: asyncio.Task[None] | None = None
        self._ahead: PlanningProcess | None = None
        self._closed = False

    def expect(self, layout: Layout) -> None:
        """Start the process if an engine's layout is so large that it may be needed."""
        if self._starting is None and layout.encoded and 2 * _shards(layout) > LARGE_SHARDS:
            self._starting = asyncio.create_task(asyncio.to_thread(self._process.start))

    async def plan(
        self,
        tenant: str,
        in_thread: PlanPair,
        source: Layout,
        destination: Layout,
        strategy: Strategy,
        allow_narrowing: bool,
        costs: CostModel | None,
        ahead: bool = False,
    ) -> PairOutcome:
        """Plan a pair of a tenant; a small pair by ``in_thread``.

        ``ahead`` plans before any handoff, one pair at a time, without delaying pairs that are
        needed now.
        """
        how = (strategy, allow_narrowing, costs)
        encoded = source.encoded and destination.encoded
        small = not encoded or _shards(source) + _shards(destination) <= LARGE_SHARDS
        if ahead:
            if small:
                return await asyncio.to_thread(in_thread, source, destination, *how)
            return await self._plan_ahead(source, destination, *how)
        turn = self._turns[tenant]
        try:
            async with turn:
                if small:
                    return await asyncio.to_thread(in_thread, source, destination, *how)
                async with self._process_turn:
                    work = self._process.plan
                    return await asyncio.to_thread(work, source.encoded, destination.encoded, *how)
        finally:
            if not turn.locked():
                self._turns.pop(tenant, None)

    async def _plan_ahead(self, source: Layout, destination: Layout, *how: object) -> PairOutcome:
        """Plan in a process of its own, because the other process serves handoffs."""
        # Made before waiting for a thread, so that `close` always closes it.
        process = self._ahead = PlanningProcess()
        if self._closed:
            process.close()

        def work() -> PairOutcome:
            try:
                return process.plan(source.encoded, destination.encoded, *how)
            finally:
                process.close()

        return await asyncio.to_thread(work)

    def close(self) -> None:
        """End the processes, even during work."""
        self._closed = True
        self._process.close()
        if self._ahead is not None:
            self._ahead.close()


class PlanningProcess:
    """A process that plans, started when needed; it ends with this process. Thread-safe."""

    def __init__(self) -> None:
        """Begin without the process."""
        self._lock = threading.Lock()
        self._process: SpawnProcess | None = None
        self._connection: Connection | None = None
        self._closed = False

    def start(self) -> None:
        """Start the process if it is not running. Raises `PlanError` after `close`."""
        self._started()

    def _started(self) -> Connection:
        # Imported here, so that a broker that plans no large pair starts sooner.
        from multiprocessing import get_context

        with self._lock:
            if self._closed:
                raise PlanError("the broker is stopping and plans no more pairs")
            if self._connection is None:
                spawn = get_context("spawn")
                self._connection, theirs = spawn.Pipe()
                self._process = spawn.Process(target=_work, args=(theirs,), daemon=True)
                self._process.start()
                theirs.close()
            return self._connection

    def plan(self, source: bytes, destination: bytes, *how: object) -> PairOutcome:
        """Let the process plan, and wait. One call at a time."""
        try:
            connection = self._started()
            connection.send((source, destination, how))
            said = connection.recv()
            if isinstance(said, RestowError):
                return PairRefused(said)
            # One at a time, because receiving a large program holds the interpreter.
            programs, early = ([connection.recv() for _ in range(count)] for count in said)
            return PairPlan.of(programs, early)
        except PlanError as error:
            return PairRefused(error)
        except (EOFError, OSError) as error:
            self._end()
            return PairRefused(PlanError(f"the planning process has ended: {error!r}"))

    def close(self) -> None:
        """End the process for good."""
        with self._lock:
            self._closed = True
        self._end()

    def _end(self) -> None:
        with self._lock:
            process, self._process = self._process, None
            connection, self._connection = self._connection, None
        if process is not None:
            process.kill()
            process.join()
        if connection is not None:
            connection.close()


def _work(connection: Connection) -> None:
    """Plan the pairs that arrive, until the connection ends."""
    os.nice(NICENESS)
    with contextlib.suppress(EOFError, OSError, KeyboardInterrupt):
        while True:
            source, destination, how = connection.recv()
            outcome = plan_pair(_decoded(source), _decoded(destination), *how)
            del source, destination
            if isinstance(outcome, PairRefused):
                connection.send(outcome.error)
                continue
            early = () if outcome.early is None else outcome.early.programs.values()
            programs = [*outcome.programs.values(), *early]
            connection.send((len(outcome.programs), len(early)))
            for program in programs:
                connection.send(program)
            del outcome, programs, early


def _decoded(data: bytes) -> Layout:
    return wire.layout_from_proto(layout_pb2.Layout.FromString(data))


def _shards(layout: Layout) -> int:
    return sum(len(rank.shards) for rank in layout.ranks)
