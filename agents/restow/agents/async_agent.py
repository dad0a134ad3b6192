"""One rank's agent on an event loop: the link, the executor, and the memory between them."""

from __future__ import annotations

import asyncio
import os
import time
from collections.abc import Coroutine, Sequence
from dataclasses import dataclass, field
from typing import Any

import structlog

from restow.agents import orders
from restow.agents.errors import AgentBusyError, AgentError, OrderInvalidError
from restow.agents.executor import Executor
from restow.agents.fences import RecentFences
from restow.agents.link import Link
from restow.agents.memory import RegionMemory, Staging, staging_at, staging_place
from restow.agents.reader import Reader
from restow.agents.ticker import Ticker
from restow.agents.transport import NixlTransport, TransportSettings
from restow.broker import wire
from restow.broker.client.channel import broker_address
from restow.broker.errors import RestowError
from restow.v1 import agent_link_pb2 as pb
from restow.v1 import broker_pb2

MAX_ORDERS = 4096


def _read_threads() -> int:
    return min(2, len(os.sched_getaffinity(0)))


@dataclass(frozen=True, slots=True)
class AgentSettings:
    """How an agent works."""

    staging_bytes: int = 64 << 20
    """Size of the pool for gathering, and of the one for scattering. 0: neither can be done."""
    quarantine_s: float = 6.0
    """How long a read that failed may take to end by itself."""
    read_threads: int = field(default_factory=_read_threads)
    """Threads that copy a large read between processes of one host: two, or as many as cores."""
    transport: TransportSettings = field(default_factory=TransportSettings)


class AsyncAgent:
    """Serves one rank of an engine: its memory can be read, and it reads. One event loop."""

    def __init__(
        self,
        broker: str | None,
        engine_id: str,
        incarnation: str,
        rank: int,
        regions: Sequence[RegionMemory],
        settings: AgentSettings | None = None,
    ) -> None:
        """Set NIXL up and register the memory. Raises `TransportFailedError`."""
        self._settings = settings or AgentSettings()
        self._engine = broker_pb2.EngineRef(engine_id=engine_id, incarnation=incarnation)
        self._rank = rank
        self._regions = tuple(regions)
        self._label = f"{engine_id}.{rank}"
        place = staging_place([region.place for region in regions])
        self._gather = staging_at(place, self._settings.staging_bytes)
        self._scatter = staging_at(place, self._settings.staging_bytes)
        self._serving = self._open_transport(self._gather)
        self._reader = Reader(
            lambda: self._open_transport(self._scatter),
            self._settings.quarantine_s,
            threads=self._settings.read_threads,
        )
        self._executor = Executor(rank, self._regions, self._gather, self._scatter, self._reader)
        self._link = Link(broker_address(broker), self)
        self._tasks: dict[tuple[str, int, int], asyncio.Task[None]] = {}
        self._fences = RecentFences()
        self._ticker = Ticker(self._progress)
        self._log = structlog.get_logger("restow.agent").bind(engine=engine_id, rank=rank)

    @property
    def name(self) -> str:
        """The NIXL name under which the rank's memory is read."""
        return self._serving.name

    async def start(self, timeout_s: float = 30.0) -> None:
        """Wait until the broker knows the agent. Raises like `KeptStream.start`."""
        self._ticker.start()
        await self._link.start(timeout_s)
        self._log.info("agent is served", agent=self.name)

    def fence(self, handoff_id: str) -> None:
        """The rank's part of a handoff is complete in memory.

        Said again to a broker that forgot it, for as long as a lease commonly lasts.
        """
        self._fences.add(handoff_id)
        self._ticker.expect_work()
        self._link.send(_fenced(handoff_id))

    async def close(self) -> None:
        """Leave the broker, end all reads, and give the memory back. May be repeated."""
        await self._link.close()
        self._reader.close()
        await self._drain(kinds=("stage", "execute"))
        self._ticker.stop()
        self._serving.close()

    # -- what the link hears ----------------------------------------------------------------------

    async def hello(self) -> pb.Hello:
        """Introduce the agent, when nothing of an earlier stream reads or gathers any more."""
        await self._drain(kinds=("stage",))
        self._executor.reset()
        return pb.Hello(
            engine=self._engine,
            rank=self._rank,
            agent_name=self._serving.name,
            nixl_metadata=self._serving.metadata(),
            regions=[orders.region_to_proto(region) for region in self._regions],
            staging_bytes=self._settings.staging_bytes,
        )

    def welcomed(self, broker_epoch: str) -> None:
        """Say the recent fences again."""
        self._log.info("welcomed", broker_epoch=broker_epoch)
        for handoff_id in self._fences.recent():
            self._link.send(_fenced(handoff_id))

    def take(self, order: pb.AgentOrder) -> None:
        """Do what the broker says."""
        body = order.WhichOneof("body")
        try:
            if body == "program":
                self._executor.load(wire.program_from_proto(order.program))
            elif body == "peer":
                self._executor.add_peer(orders.peer_from_proto(order.peer))
            elif body == "forget":
                self._executor.forget_peer(order.forget.agent_name)
            elif body == "stage":
                stage = order.stage
                self._begin(("stage", stage.handoff, stage.dst_rank), self._stage(stage))
            elif body == "execute":
                execute = order.execute
                self._begin(("execute", execute.handoff, 0), self._execute(execute))
            elif body == "unstage":
                self._unstage(order.unstage.handoff)
            else:
                raise OrderInvalidError(f"an order without a known body: {body}")
        except RestowError as error:
            # Orders that need what could not be taken are refused when they come.
            self._log.error("order refused", order=body, reason=error.reason, detail=error.message)

    # -- inside -----------------------------------------------------------------------------------

    def _open_transport(self, staging: Staging) -> NixlTransport:
        transport = NixlTransport(self._label, self._settings.transport)
        for region in self._regions:
            if region.private:
                continue
            transport.register(region.base_address, region.length_bytes, region.place)
        if staging.size_bytes:
            place = staging_place([region.place for region in self._regions])
            transport.register(staging.address, staging.size_bytes, place)
        return transport

    def _begin(self, key: tuple[str, int, int], work: Coroutine[Any, Any, None]) -> None:
        """Work on an order beside the others; one that is being worked on changes nothing."""
        if key in self._tasks:
            work.close()
            return
        task = self._tasks[key] = asyncio.create_task(work)
        task.add_done_callback(lambda _: self._tasks.pop(key, None))

    async def _stage(self, message: pb.Stage) -> None:
        staged = pb.Staged(handoff=message.handoff, dst_rank=message.dst_rank)
        self._ticker.expect_work()
        try:
            self._check_load()
            staged.address, staged.bytes = await self._executor.stage(
                orders.stage_from_proto(message)
            )
        except RestowError as error:
            self._refuse(staged, error, message.handoff)
        self._link.send(pb.AgentMessage(staged=staged))

    async def _execute(self, message: pb.Execute) -> None:
        settled = pb.Settled(handoff=message.handoff)
        began_s = time.monotonic()
        try:
            self._check_load()
            report = await self._executor.execute(orders.execute_from_proto(message))
            settled.bytes = report.bytes_read
        except RestowError as error:
            self._refuse(settled, error, message.handoff)
        settled.elapsed_us = int((time.monotonic() - began_s) * 1e6)
        self._link.send(pb.AgentMessage(settled=settled))

    def _check_load(self) -> None:
        if len(self._tasks) > MAX_ORDERS:
            raise AgentBusyError(f"rank {self._rank} works on {MAX_ORDERS} orders already")

    def _refuse(self, answer: pb.Staged | pb.Settled, error: RestowError, handoff: int) -> None:
        answer.reason, answer.detail = error.reason, error.message
        log = self._log.warning if isinstance(error, AgentError) else self._log.error
        log("order failed", handoff=handoff, reason=error.reason, detail=error.message)

    def _unstage(self, handoff: int) -> None:
        for key, task in list(self._tasks.items()):
            if key[:2] == ("stage", handoff):
                task.cancel()
        self._executor.unstage(handoff)

    async def _drain(self, kinds: tuple[str, ...]) -> None:
        """Cancel the work on these kinds of orders, and wait for all."""
        for key, task in list(self._tasks.items()):
            if key[0] in kinds:
                task.cancel()
        if self._tasks:
            await asyncio.gather(*self._tasks.values(), return_exceptions=True)

    def _progress(self) -> None:
        self._serving.progress()
        self._reader.progress()


def _fenced(handoff_id: str) -> pb.AgentMessage:
    return pb.AgentMessage(fenced=pb.Fenced(handoff_id=handoff_id))
