"""An agent on an event loop: it registers a rank's memory, serves it to peers, and reads."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import ExitStack

from restow.agents.copying.copier import Copier, prepare
from restow.agents.execute import orders
from restow.agents.execute.executor import Executor
from restow.agents.execute.fences import DeviceEvent, Fences, WriteMarks
from restow.agents.link.broker_link import Link
from restow.agents.link.order_desk import OrderDesk, OrderTasks
from restow.agents.link.settings import AgentFigures, AgentSettings
from restow.agents.link.transports import ServedMemory
from restow.agents.memory.errors import TransportFailedError
from restow.agents.memory.regions import (
    RegionMemory,
    address_spaces,
)
from restow.agents.probing.peer_trial import PeerTrial
from restow.agents.reading.host_memory import host_name
from restow.agents.reading.lane import Ticker
from restow.agents.reading.reader import Reader
from restow.broker.client.connection.channel import OWN_PROCESS, Credentials, broker_address
from restow.broker.errors import RestowError
from restow.broker.logs import get_logger
from restow.broker.rpc import wire_program
from restow.broker.versions import own_version
from restow.v1 import agent_link_pb2 as pb
from restow.v1 import broker_pb2


class AsyncAgent:
    """Serves one rank of an engine on the engine's event loop: peers read its memory, and it reads.

    All methods belong to one loop, best run by uvloop. Unlike with `Agent`, no other thread has to
    wake up for a handoff, but the engine's own work on the loop delays it. The memory belongs to
    the engine and must stay allocated until `close` has returned.
    """

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
        """Start NIXL, register the memory and compile the kernels; `start` or `begin` connects.

        ``broker`` is HOST:PORT or any address that gRPC accepts; None means RESTOW_BROKER or the
        default. ``engine_id`` and ``incarnation`` are those of the engine's session. ``rank`` and
        ``regions`` are those of the rank in its layout, with regions in the layout's order.
        ``settings`` None means the defaults of `AgentSettings`; ``credentials`` None means those of
        the environment. ``on_lost`` is called on the event loop with the reason why the memory can
        no longer be read in the life of this process. ``on_unfenced`` is called with each handoff
        whose fence is no longer needed.

        Raises `AddressInvalidError`, `RegionInvalidError` if regions lie at several places,
        `TransportFailedError`, `CudaUnavailableError`, `CopyFailedError` if the device has no room,
        a `TrustError` of credentials, and like all methods `ForkedError` in a process that was
        forked after the first agent, session or client.
        """
        OWN_PROCESS.check()
        link = Link(broker_address(broker), self, credentials)
        self._settings = settings or AgentSettings()
        self._engine = broker_pb2.EngineRef(engine_id=engine_id, incarnation=incarnation)
        self._rank = rank
        self._regions = tuple(regions)
        self._spaces = address_spaces(self._regions)
        label = f"{engine_id}.{rank}"
        with ExitStack() as undone:
            memory = self._memory = ServedMemory(label, self._regions, self._settings)
            undone.callback(memory.close)
            # `begin` would be too late: an engine may already be capturing CUDA graphs then.
            prepare(memory.place.device)
            self._trial = PeerTrial(memory.metadata(), self._settings.try_metadata)
            quarantine_s = self._settings.quarantine_s
            self._reader = Reader(memory.open_lane, quarantine_s, try_peer=self._trial.load)
            undone.callback(self._reader.close)
            self._copier = Copier(memory.place.device)
            self._writes = WriteMarks()
            work = self._reader, self._copier, self._writes
            self._executor = Executor(rank, self._regions, memory.gather, memory.scatter, *work)
            undone.pop_all()
        self._on_lost = on_lost
        self._on_unfenced = on_unfenced
        self._link = link
        self._ticker = Ticker(self._progress)
        self._fences = Fences(self._say_fence)
        self._broker_epoch = ""
        self._tasks = OrderTasks(rank)
        self._log = get_logger("restow.agent").bind(engine=engine_id, rank=rank)
        self._desk = OrderDesk(
            self._executor,
            self._tasks,
            self._send,
            self._ticker.expect_work,
            self._unfence,
            self._log,
        )

    @property
    def name(self) -> str:
        """The NIXL name under which the rank's memory is read."""
        return self._memory.name

    @property
    def refusal(self) -> RestowError | None:
        """Why the broker refuses the agent, or None if it has not refused it."""
        return self._link.refusal

    @property
    def figures(self) -> AgentFigures:
        """Memory in use now, and reads so far."""
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
        """Connect, without waiting: the engine may register later.

        `refusal` has the reason if the broker refuses the agent.
        """
        OWN_PROCESS.check()
        self._ticker.start()
        self._trial.begin()
        self._link.begin()

    async def start(self, timeout_s: float = 30.0) -> None:
        """Connect, and wait up to ``timeout_s`` until the broker knows the agent.

        Raises `BrokerCallError` with the broker's reason if it refuses, `BrokerUnreachableError` if
        nobody answers, `NoWelcomeError` if the engine does not register in time, a `TrustError` for
        unusable credentials, and `MessageTooLargeError` for more regions than a message can hold.
        """
        OWN_PROCESS.check()
        self._ticker.start()
        self._trial.begin()
        await self._link.start(timeout_s)
        self._log.info("agent is served", agent=self.name)

    def fence(self, handoff_id: str, event: DeviceEvent | None = None, tokens: int = 0) -> None:
        """Announce that the rank's part of handoff ``handoff_id`` is complete, as `Agent.fence`.

        A broker that lost the fence is told again, until the handoff has ended. Raises
        `MessageTooLargeError`.
        """
        OWN_PROCESS.check()
        self._fences.fence(handoff_id, event, tokens)

    def writes_done(self, mark: int, event: DeviceEvent | None = None) -> None:
        """Announce that the engine's own writes are done, as `Agent.writes_done`."""
        OWN_PROCESS.check()
        self._writes.done(mark, event)

    async def close(self) -> None:
        """Leave the broker, end all reads, and release the memory. May be called again."""
        OWN_PROCESS.check()
        self._fences.cancel()
        self._writes.cancel()
        self._memory.wipe_mark()
        await self._link.close()
        self._reader.close()
        await self._tasks.drain("stage", "hold", "measure", "execute")
        self._copier.close()
        await self._trial.close()
        self._ticker.stop()
        self._memory.close()

    # -- what the link hears ----------------------------------------------------------------------

    async def hello(self) -> pb.Hello:
        """Introduce the agent, once no order of an earlier stream reads or gathers any more.

        The agent's link calls it.
        """
        self._writes.release()
        await self._tasks.drain("stage", "hold")
        self._executor.reset()
        return pb.Hello(
            engine=self._engine,
            rank=self._rank,
            agent_name=self.name,
            nixl_metadata=self._memory.metadata(),
            regions=list(map(orders.region_to_proto, self._regions, self._spaces)),
            staging_bytes=self._settings.staging_bytes,
            host=host_name(),
            host_memory=self._memory.shown(),
            program_form=wire_program.PROGRAM_FORM,
            version=own_version(),
        )

    def welcomed(self, broker_epoch: str) -> None:
        """Announce the fences of open handoffs again to the broker with ``broker_epoch``.

        The agent's link calls it.
        """
        self._log.info("welcomed", broker_epoch=broker_epoch)
        anew, self._broker_epoch = broker_epoch != self._broker_epoch, broker_epoch
        self._fences.say_again(anew)

    def take(self, order: pb.AgentOrder) -> None:
        """Carry out the broker's ``order``. The agent's link calls it."""
        self._desk.take(order)

    # -- inside -----------------------------------------------------------------------------------

    def _send(self, message: pb.AgentMessage) -> None:
        self._link.send(message)

    def _unfence(self, handoff_id: str) -> None:
        self._fences.forget(handoff_id)
        self._on_unfenced(handoff_id)

    def _say_fence(self, handoff_id: str, tokens: int) -> None:
        self._ticker.expect_work()
        self._send(pb.AgentMessage(fenced=pb.Fenced(handoff_id=handoff_id, tokens=tokens)))

    def _progress(self) -> None:
        try:
            self._memory.progress()
        except TransportFailedError as error:
            self._lose(error)
            return
        self._reader.progress()

    def _lose(self, error: RestowError) -> None:
        """Leave the broker for good; the broker tells everybody else."""
        self._log.error("memory can no longer be read", reason=error.reason, detail=error.message)
        self._ticker.stop()
        self._memory.close()
        self._link.give_up(error)
        self._on_lost(error)
