"""An engine's side of the daemon: the interface of `Agent`, with the work done in the daemon."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import grpc

from restow.agents.execute.fences import DeviceEvent, Fences, WriteMarks
from restow.agents.link.threaded_agent import ThreadedAgent
from restow.agents.memory.cuda import CudaRegion
from restow.agents.memory.errors import DaemonUnreachableError
from restow.agents.memory.shared_memory import SharedRegion, region_to_proto
from restow.broker.client.connection.channel import Credentials
from restow.broker.client.connection.errors import BrokerUnreachableError
from restow.broker.client.connection.kept_stream import KeptStream
from restow.v1 import broker_pb2, daemon_pb2_grpc
from restow.v1 import daemon_pb2 as pb


class DaemonLink(KeptStream[pb.DaemonMessage, pb.ServeRequest, pb.ServeResponse]):
    """The stream to the daemon. Belongs to one event loop."""

    def __init__(self, socket: Path, attach: pb.Attach) -> None:
        """Prepare; `start` attaches."""
        # The socket's mode protects it, so there are no credentials.
        super().__init__(f"unix:{socket.absolute()}", "restow.daemon_client", Credentials())
        self._attach = attach
        self._fences = Fences(self._say)
        self._writes = WriteMarks(self._say_writes)
        self.name = ""

    def fence(self, handoff_id: str, event: DeviceEvent | None, tokens: int = 0) -> None:
        """Announce the fence once ``event`` has passed."""
        self._fences.fence(handoff_id, event, tokens)

    def writes_done(self, mark: int, event: DeviceEvent | None) -> None:
        """Announce the mark once ``event`` has passed."""
        self._writes.done(mark, event)

    async def close(self) -> None:
        """End the stream. May be called again."""
        self._fences.cancel()
        self._writes.cancel()
        await super().close()

    def call(
        self, channel: grpc.aio.Channel
    ) -> grpc.aio.StreamStreamCall[pb.ServeRequest, pb.ServeResponse]:
        """Begin the call."""
        return daemon_pb2_grpc.AgentDaemonStub(channel).Serve()

    async def opening(self) -> pb.ServeRequest:
        """Return a batch with Attach."""
        return self.batch([pb.DaemonMessage(attach=self._attach)])

    def batch(self, messages: Sequence[pb.DaemonMessage]) -> pb.ServeRequest:
        """Return a batch of fences and marks."""
        return pb.ServeRequest(messages=messages)

    def hear(self, response: pb.ServeResponse) -> None:
        """Repeat fences to a daemon that has started again; forget those of ended handoffs."""
        if response.HasField("attached"):
            self.name = response.attached.agent_name
            self.opened()
            self._fences.say_again(anew=False)
            if self._writes.reached:
                self._say_writes(self._writes.reached)
        for handoff_id in response.unfenced:
            self._fences.forget(handoff_id)

    def _say(self, handoff_id: str, tokens: int) -> None:
        self.send(pb.DaemonMessage(fence=pb.Fence(handoff_id=handoff_id, tokens=tokens)))

    def _say_writes(self, mark: int) -> None:
        self.send(pb.DaemonMessage(writes_done=pb.WritesDone(write_mark=mark)))


class DaemonAgent(ThreadedAgent[DaemonLink]):
    """Lets a daemon serve one rank whose memory is shared; use it as a context manager.

    Its methods may be called from any thread. The engine owns the shared memory (for a GPU the
    allocations, `CudaRegion.of`) and must not resize it. If the daemon restarts, the rank is
    attached again.
    """

    def __init__(
        self,
        socket: str | Path,
        engine_id: str,
        incarnation: str,
        rank: int,
        regions: Sequence[SharedRegion | CudaRegion],
    ) -> None:
        """Prepare; `start` or ``with`` attaches.

        ``socket`` is the path on which `restow agent` listens. ``engine_id`` and ``incarnation``
        are those of the engine's session. ``rank`` and ``regions`` are those of the rank in its
        layout, with regions in the layout's order.
        """
        self._socket = Path(socket)
        attach = pb.Attach(
            engine=broker_pb2.EngineRef(engine_id=engine_id, incarnation=incarnation),
            rank=rank,
            regions=[region_to_proto(region) for region in regions],
        )
        super().__init__(rank, lambda: DaemonLink(self._socket, attach))

    def start(self, timeout_s: float = 30.0) -> None:
        """Attach, and wait up to ``timeout_s`` until the broker knows the rank's agent.

        Raises `DaemonUnreachableError`, and `BrokerCallError` with the reason of the daemon or the
        broker if either refuses.
        """
        try:
            super().start(timeout_s)
        except BrokerUnreachableError as error:
            raise DaemonUnreachableError(
                f"no daemon serves {self._socket}: start a daemon with `restow agent --socket "
                f"{self._socket}` ({error.message})",
                socket=self._socket,
            ) from None
