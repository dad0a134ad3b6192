"""One rank's agent on an event loop: the link, the executor, and the memory between them."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Coroutine, Sequence
from dataclasses import asdict
from typing import Any

from restow.agents.copying.copier import Copier
from restow.agents.errors import (
    AgentBusyError,
    AgentError,
    OrderInvalidError,
    TransportFailedError,
)
from restow.agents.execute.executor import Executor
from restow.agents.figures import AgentFigures
from restow.agents.link import orders
from restow.agents.link.agent_link import Link
from restow.agents.link.fences import DeviceEvent, Fences
from restow.agents.memory.regions import RegionMemory
from restow.agents.probing.peer_trial import PeerTrial
from restow.agents.reading.host_memory import host_name
from restow.agents.reading.reader import Reader
from restow.agents.reading.ticker import Ticker
from restow.agents.served_memory import ServedMemory
from restow.agents.settings import AgentSettings
from restow.broker.client.channel import broker_address
from restow.broker.client.credentials import Credentials
from restow.broker.client.own_process import OWN_PROCESS
from restow.broker.errors import RestowError
from restow.broker.logs import get_logger
from restow.broker.rpc import wire_program
from restow.broker.rpc.status import cut
from restow.broker.versions import own_version
from restow.v1 import agent_link_pb2 as pb
from restow.v1 import broker_pb2, program_pb2

MAX_ORDERS = 4096


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
        credentials: Credentials | None = None,
        on_lost: Callable[[RestowError], object] = lambda _: None,
        on_unfenced: Callable[[str], object] = lambda _: None,
    ) -> None:
        """Set NIXL up and register the memory; ``credentials`` None: those of the environment.

        ``on_lost`` hears on the event loop why the memory can be read no more, as long as this
        process lives; ``on_unfenced`` of each handoff whose fence is of no use any more.

        Raises `AddressInvalidError`, `TransportFailedError`, `CudaUnavailableError`, a `TrustError`
        of credentials, and like all methods `ForkedError` in a process that was forked after the
        first agent, session or client.
        """
        OWN_PROCESS.check()
        link = Link(broker_address(broker), self, credentials)
        self._settings = settings or AgentSettings()
        self._engine = broker_pb2.EngineRef(engine_id=engine_id, incarnation=incarnation)
        self._rank = rank
        self._regions = tuple(regions)
        label = f"{engine_id}.{rank}"
        memory = self._memory = ServedMemory(label, self._regions, self._settings)
        self._on_lost = on_lost
        self._on_unfenced = on_unfenced
        self._trial = PeerTrial(memory.metadata(), self._settings.try_metadata)
        quarantine_s = self._settings.quarantine_s
        self._reader = Reader(memory.open_lane, quarantine_s, try_peer=self._trial.load)
        self._copier = Copier()
        self._executor = Executor(
            rank, self._regions, memory.gather, memory.scatter, self._reader, self._copier
        )
        self._link = link
        self._tasks: dict[tuple[str, int, int], asyncio.Task[None]] = {}
        self._fences = Fences(self._say_fence)
        self._ticker = Ticker(self._progress)
        self._log = get_logger("restow.agent").bind(engine=engine_id, rank=rank)

    @property
    def name(self) -> str:
        """The NIXL name under which the rank's memory is read."""
        return self._memory.name

    @property
    def refusal(self) -> RestowError | None:
        """Why the broker does not know the agent, as far as it has said."""
        return self._link.refusal

    @property
    def figures(self) -> AgentFigures:
        """What is in use at the moment, and what was read so far."""
        gather, scatter = self._executor.staging
        reader = self._reader
        return AgentFigures(
            1,
            int(self._link.is_open),
            gather,
            scatter,
            reader.lanes,
            reader.lanes_given_up,
            reader.counts,
        )

    def begin(self) -> None:
        """Connect, without waiting: the engine may be registered later."""
        OWN_PROCESS.check()
        self._ticker.start()
        self._trial.begin()
        self._link.begin()

    async def start(self, timeout_s: float = 30.0) -> None:
        """Wait until the broker knows the agent. Raises like `KeptStream.start`."""
        OWN_PROCESS.check()
        self._ticker.start()
        self._trial.begin()
        await self._link.start(timeout_s)
        self._log.info("agent is served", agent=self.name)

    def fence(self, handoff_id: str, event: DeviceEvent | None = None) -> None:
        """The rank's part of a handoff is complete in memory, once ``event`` has come to pass.

        Said again to a broker that forgot it, until the handoff has ended.
        """
        OWN_PROCESS.check()
        self._fences.fence(handoff_id, event)

    async def close(self) -> None:
        """Leave the broker, end all reads, and give the memory back. May be repeated."""
        OWN_PROCESS.check()
        self._fences.cancel()
        self._memory.wipe_mark()
        await self._link.close()
        self._reader.close()
        await self._drain("stage", "hold", "measure", "execute")
        self._copier.close()
        await self._trial.close()
        self._ticker.stop()
        self._memory.close()

    # -- what the link hears ----------------------------------------------------------------------

    async def hello(self) -> pb.Hello:
        """Introduce the agent, when nothing of an earlier stream reads or gathers any more."""
        await self._drain("stage", "hold")
        self._executor.reset()
        return pb.Hello(
            engine=self._engine,
            rank=self._rank,
            agent_name=self.name,
            nixl_metadata=self._memory.metadata(),
            regions=[orders.region_to_proto(region) for region in self._regions],
            staging_bytes=self._settings.staging_bytes,
            host=host_name(),
            host_memory=self._memory.shown(),
            program_form=wire_program.PROGRAM_FORM,
            version=own_version(),
        )

    def welcomed(self, broker_epoch: str) -> None:
        """Say the fences of handoffs that have not ended again."""
        self._log.info("welcomed", broker_epoch=broker_epoch)
        self._fences.say_again()

    def take(self, order: pb.AgentOrder) -> None:
        """Do what the broker says."""
        body = order.WhichOneof("body")
        try:
            if body == "program":
                self._load(order.program)
            elif body == "peer":
                self._executor.add_peer(orders.peer_from_proto(order.peer))
            elif body == "forget":
                self._executor.forget_peer(order.forget.agent_name)
            elif body == "stage":
                stage = order.stage
                first = stage.parts[0].dst_rank if stage.parts else 0
                self._begin(("stage", stage.handoff, first), self._stage(stage))
            elif body == "execute":
                execute = order.execute
                self._begin(("execute", execute.handoff, 0), self._execute(execute))
            elif body == "unstage":
                self._unstage(order.unstage.handoff)
            elif body == "probe":
                probe = order.probe
                kind = "measure" if probe.agent_name else "hold"
                self._begin((kind, probe.number, 0), self._probe(probe))
            elif body == "unprobe":
                self._unprobe(order.unprobe.number)
            elif body == "unfence":
                self._fences.forget(order.unfence.handoff_id)
                self._on_unfenced(order.unfence.handoff_id)
            else:
                raise OrderInvalidError(f"an order without a known body: {body}")
        except RestowError as error:
            # Orders that need what could not be taken are refused when they come.
            self._log.error("order refused", order=body, reason=error.reason, detail=error.message)

    # -- inside -----------------------------------------------------------------------------------

    def _load(self, message: program_pb2.Program) -> None:
        try:
            program = wire_program.program_from_proto(message)
        except RestowError as error:
            self._executor.refuse(message.program_id, error)
            raise
        self._executor.load(program)

    def _say_fence(self, handoff_id: str) -> None:
        self._ticker.expect_work()
        self._link.send(pb.AgentMessage(fenced=pb.Fenced(handoff_id=handoff_id)))

    def _begin(self, key: tuple[str, int, int], work: Coroutine[Any, Any, None]) -> None:
        """Work on an order beside the others; one that is being worked on changes nothing."""
        if key in self._tasks:
            work.close()
            return
        task = self._tasks[key] = asyncio.create_task(work)
        task.add_done_callback(lambda _: self._tasks.pop(key, None))

    async def _stage(self, message: pb.Stage) -> None:
        self._ticker.expect_work()
        try:
            self._check_load()
            runs = await self._executor.stage(orders.stage_from_proto(message))
            answers = [orders.staged_to_proto(message.handoff, run) for run in runs]
        except RestowError as error:
            answers = [
                pb.Staged(handoff=message.handoff, dst_rank=dst_rank)
                for dst_rank in dict.fromkeys(part.dst_rank for part in message.parts)
            ]
            for answer in answers:
                self._refuse(answer, error, message.handoff)
        for answer in answers:
            self._link.send(pb.AgentMessage(staged=answer))

    async def _execute(self, message: pb.Execute) -> None:
        settled = pb.Settled(handoff=message.handoff)
        began_s = time.monotonic()
        try:
            self._check_load()
            report = await self._executor.execute(orders.execute_from_proto(message))
            settled.bytes, settled.compared = report.bytes_read, report.compared
        except RestowError as error:
            self._refuse(settled, error, message.handoff)
        settled.elapsed_us = int((time.monotonic() - began_s) * 1e6)
        self._link.send(pb.AgentMessage(settled=settled))

    async def _probe(self, message: pb.Probe) -> None:
        began_s = time.monotonic()
        probed = pb.Probed(number=message.number)
        self._ticker.expect_work()
        try:
            self._check_load()
            order = orders.probe_from_proto(message)
            if order.name_transport:
                probed.transport, probed.method = await self._executor.name_transport(order)
            elif order.agent_name:
                copying, reading = await self._executor.measure(order)
                probed.reading.CopyFrom(pb.ReadCosts(**asdict(reading)))
                probed.copying.CopyFrom(pb.CopyCosts(**asdict(copying)))
            else:
                probed.address, probed.bytes, copying = await self._executor.hold(order)
                probed.copying.CopyFrom(pb.CopyCosts(**asdict(copying)))
        except RestowError as error:
            self._refuse(probed, error, message.number)
        probed.elapsed_us = int((time.monotonic() - began_s) * 1e6)
        self._link.send(pb.AgentMessage(probed=probed))

    def _unprobe(self, number: int) -> None:
        # A measurement that reads ends by itself: what it lands in must not be given away before.
        self._cancel("hold", number=number)
        self._executor.let_go(number)

    def _check_load(self) -> None:
        if len(self._tasks) > MAX_ORDERS:
            raise AgentBusyError(f"rank {self._rank} works on {MAX_ORDERS} orders already")

    def _refuse(
        self, answer: pb.Staged | pb.Settled | pb.Probed, error: RestowError, handoff: int
    ) -> None:
        answer.reason, answer.detail = error.reason, cut(error.message)
        if isinstance(answer, pb.Probed):  # costs nobody anything: a peer may leave meanwhile
            self._log.info("measuring failed", reason=error.reason, detail=error.message)
            return
        log = self._log.warning if isinstance(error, AgentError) else self._log.error
        log("order failed", handoff=handoff, reason=error.reason, detail=error.message)

    def _unstage(self, handoff: int) -> None:
        self._cancel("stage", number=handoff)
        self._executor.unstage(handoff)

    def _cancel(self, *kinds: str, number: int | None = None) -> None:
        """Cancel the work on these kinds of orders, of all handoffs and probes or of one."""
        for (kind, of, _), task in list(self._tasks.items()):
            if kind in kinds and number in (None, of):
                task.cancel()

    async def _drain(self, *kinds: str) -> None:
        """Cancel the work on these kinds of orders, and wait for all."""
        self._cancel(*kinds)
        if self._tasks:
            await asyncio.gather(*self._tasks.values(), return_exceptions=True)

    def _progress(self) -> None:
        try:
            self._memory.progress()
        except TransportFailedError as error:
            self._lose(error)
            return
        self._reader.progress()

    def _lose(self, error: RestowError) -> None:
        """Leave the broker for good: it tells everybody else."""
        self._log.error("memory can be read no more", reason=error.reason, detail=error.message)
        self._ticker.stop()
        self._memory.close()
        self._link.give_up(error)
        self._on_lost(error)
