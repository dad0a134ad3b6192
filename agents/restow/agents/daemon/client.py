"""An engine's side of the daemon: the interface of `Agent`, with the work done elsewhere."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from types import TracebackType
from typing import Self

import grpc

from restow.agents.errors import AgentClosedError, DaemonUnreachableError
from restow.agents.link.fences import DeviceEvent, KeptFences, PendingFences
from restow.agents.link.kept_stream import KeptStream
from restow.agents.memory.cuda_ipc import CudaRegion
from restow.agents.memory.regions import SharedRegion
from restow.agents.memory.shared_regions import region_to_proto
from restow.broker.client.credentials import Credentials
from restow.broker.client.errors import BrokerUnreachableError
from restow.broker.client.loop_thread import LoopThread
from restow.v1 import broker_pb2, daemon_pb2_grpc
from restow.v1 import daemon_pb2 as pb

_Stream = KeptStream[pb.DaemonMessage, pb.ServeRequest, pb.ServeResponse]


class _Attachment:
    """The stream to the daemon. Belongs to one event loop."""

    def __init__(self, address: str, attach: pb.Attach) -> None:
        self._attach = attach
        self._fences = KeptFences()
        self.pending = PendingFences(self._fence)
        # The socket's mode is its protection.
        self.stream: _Stream = KeptStream(address, self, "restow.daemon_client", Credentials())
        self.agent_name = ""

    def call(
        self, channel: grpc.aio.Channel
    ) -> grpc.aio.StreamStreamCall[pb.ServeRequest, pb.ServeResponse]:
        return daemon_pb2_grpc.AgentDaemonStub(channel).Serve()

    async def opening(self) -> pb.ServeRequest:
        return self.batch([pb.DaemonMessage(attach=self._attach)])

    def batch(self, messages: Sequence[pb.DaemonMessage]) -> pb.ServeRequest:
        return pb.ServeRequest(messages=messages)

    def hear(self, response: pb.ServeResponse, stream: _Stream) -> None:
        if response.HasField("attached"):
            self.agent_name = response.attached.agent_name
            stream.opened()
            for handoff_id in self._fences.kept():
                stream.send(_fence(handoff_id))
        for handoff_id in response.unfenced:
            self._fences.forget(handoff_id)

    def _fence(self, handoff_id: str) -> None:
        self._fences.add(handoff_id)
        self.stream.send(_fence(handoff_id))


class DaemonAgent:
    """Has a daemon serve one rank whose memory is shared. Its methods suit any thread.

    ``regions`` are those of the rank's layout, in its order. The engine owns the shared memory (for
    a GPU: the allocations, `CudaRegion.of`), and keeps its size; when the daemon starts anew, the
    rank is attached again.
    """

    def __init__(
        self,
        socket: str | Path,
        engine_id: str,
        incarnation: str,
        rank: int,
        regions: Sequence[SharedRegion | CudaRegion],
    ) -> None:
        """Prepare; `start` or ``with`` attaches."""
        self._socket = Path(socket)
        self._rank = rank
        self._attach = pb.Attach(
            engine=broker_pb2.EngineRef(engine_id=engine_id, incarnation=incarnation),
            rank=rank,
            regions=[region_to_proto(region) for region in regions],
        )
        self._thread: LoopThread | None = None
        self._attachment: _Attachment | None = None

    @property
    def name(self) -> str:
        """The NIXL name under which the rank's memory is read; empty before `start`."""
        return self._attachment.agent_name if self._attachment is not None else ""

    def start(self, timeout_s: float = 30.0) -> None:
        """Attach, and wait until the broker knows the rank's agent.

        Raises `DaemonUnreachableError`, and `BrokerCallError` with the reason of the daemon or the
        broker if one of them refuses.
        """
        self._thread = LoopThread(f"restow-daemon-client-{self._rank}", self._closed)
        try:
            self._attachment = self._thread.run(self._open())
            self._thread.run(self._attachment.stream.start(timeout_s))
        except BrokerUnreachableError as error:
            self.close()
            raise DaemonUnreachableError(
                f"no daemon serves {self._socket}: start one with `restow agent --socket "
                f"{self._socket}` ({error.message})",
                socket=self._socket,
            ) from None
        except BaseException:
            self.close()
            raise

    def fence(self, handoff_id: str, event: DeviceEvent | None = None) -> None:
        """Say that the rank's part of a handoff is complete in memory.

        That is once ``event`` has come to pass; this returns at once. Raises `AgentClosedError`
        before `start` and after `close`.
        """
        thread, attachment = self._thread, self._attachment
        if thread is None or attachment is None:
            raise self._closed()
        thread.call_soon(attachment.pending.fence, handoff_id, event)

    def close(self) -> None:
        """Detach. May be repeated."""
        thread, attachment = self._thread, self._attachment
        self._thread = self._attachment = None
        if thread is not None:
            if attachment is not None:
                thread.call_soon(attachment.pending.cancel)
                thread.run(attachment.stream.close())
            thread.close()

    def __enter__(self) -> Self:
        """Start."""
        self.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        """Close."""
        self.close()

    def _closed(self) -> AgentClosedError:
        words = f"rank {self._rank} has no agent: it was not started, or closed"
        return AgentClosedError(words)

    async def _open(self) -> _Attachment:
        return _Attachment(f"unix:{self._socket.absolute()}", self._attach)


def _fence(handoff_id: str) -> pb.DaemonMessage:
    return pb.DaemonMessage(fence=pb.Fence(handoff_id=handoff_id))
