"""The daemon's server, which serves ranks of this host's engines from shared memory."""

from __future__ import annotations

import asyncio
import contextlib
import os
import stat
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from pathlib import Path

import grpc

from restow.agents.copying.copier import completed
from restow.agents.link.async_agent import AsyncAgent
from restow.agents.link.settings import AgentFigures, AgentSettings, past, together
from restow.agents.memory.errors import AgentClosedError, AgentError
from restow.agents.memory.shared_memory import OpenedRegions, remove_left
from restow.broker.client.connection.channel import OWN_PROCESS, Credentials
from restow.broker.errors import ListenError, RequestError, RestowError
from restow.broker.logs import get_logger
from restow.broker.rpc.sizes import MAX_TO_BROKER_BYTES, SERVER_PINGS
from restow.broker.rpc.status import ErrorInterceptor, ParsingInterceptor
from restow.v1 import daemon_pb2 as pb
from restow.v1 import daemon_pb2_grpc

WELCOME_S = 30.0
SWEEP_S = 5.0
"""Interval of looking for memory of dead engines; some die after their stream has ended."""
STOP_GRACE_S = 1.0
MAX_PATH_BYTES = 107
"""Longest path of a Unix socket (`sockaddr_un` of Linux)."""
SERVER_OPTIONS = (("grpc.max_receive_message_length", MAX_TO_BROKER_BYTES), *SERVER_PINGS)


class SocketInUseError(AgentError, status="ALREADY_EXISTS", reason="SOCKET_IN_USE"):
    """Another daemon listens on the socket, or its path is not a socket."""


class AgentDaemon(daemon_pb2_grpc.AgentDaemonServicer):
    """Listens on a Unix socket that only its own user may open, with a stream for each rank."""

    def __init__(
        self,
        broker: str | None,
        socket_path: str | Path,
        settings: AgentSettings | None = None,
        credentials: Credentials | None = None,
        on_lost: Callable[[RestowError], object] = lambda _: None,
    ) -> None:
        """Prepare; `start` listens. ``credentials`` None means those of the environment.

        ``on_lost`` is called with the reason why memory can no longer be read in the life of this
        process. Raises a `TrustError` of the credentials.
        """
        self._broker = broker
        self._path = Path(socket_path)
        self._settings = settings or AgentSettings()
        self._credentials = credentials or Credentials.of()
        self._on_lost = on_lost
        self._stopping = asyncio.Event()
        self._gone = asyncio.Event()
        """Set when a rank's stream has ended."""
        self._agents: set[AsyncAgent] = set()
        self._past = AgentFigures()
        """Counts of agents that are gone."""
        self._sweeper: asyncio.Task[None] | None = None
        self._server: grpc.aio.Server | None = None

    @property
    def figures(self) -> AgentFigures:
        """Memory in use and reads so far, summed over all agents."""
        return together([self._past, *(agent.figures for agent in self._agents)])

    async def start(self) -> None:
        """Listen on the socket.

        Raises `SocketInUseError`, `ListenError`, and `ForkedError` in a process that was forked too
        late.
        """
        OWN_PROCESS.check()
        try:
            await self._take_path()
        except OSError as error:
            raise self._unusable(error.strerror or str(error)) from None
        interceptors = [ErrorInterceptor(), ParsingInterceptor()]
        server = grpc.aio.server(options=SERVER_OPTIONS, interceptors=interceptors)
        daemon_pb2_grpc.add_AgentDaemonServicer_to_server(self, server)
        # The socket's mode is its only protection, so it must never exist with another mode.
        before = os.umask(0o177)
        try:
            server.add_insecure_port(f"unix:{self._path}")
            await server.start()
        except RuntimeError as error:
            raise self._unusable(str(error)) from None
        finally:
            os.umask(before)
        self._server = server
        self._sweeper = asyncio.create_task(self._sweep())

    async def _sweep(self) -> None:
        """Remove the shared memory of engines that are gone, while the daemon lives."""
        log = get_logger("restow.daemon")
        while True:
            try:
                # Releasing many gigabytes takes a while, so a thread does it.
                if removed := await asyncio.to_thread(remove_left):
                    log.info("removed shared memory of engines that are gone", names=removed)
            except OSError as error:
                log.warning("shared memory can't be searched", detail=str(error))
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(SWEEP_S):
                    await self._gone.wait()
            self._gone.clear()

    async def close(self) -> None:
        """Stop serving all ranks, and stop listening. May be called again."""
        OWN_PROCESS.check()
        self._stopping.set()
        sweeper, self._sweeper = self._sweeper, None
        if sweeper is not None:
            sweeper.cancel()
            await asyncio.gather(sweeper, return_exceptions=True)
        server, self._server = self._server, None
        if server is not None:
            await server.stop(STOP_GRACE_S)
            self._path.unlink(missing_ok=True)

    async def Serve(
        self,
        request_iterator: AsyncIterator[pb.ServeRequest],
        context: grpc.aio.ServicerContext[pb.ServeRequest, pb.ServeResponse],
    ) -> AsyncIterator[pb.ServeResponse]:
        """Serve a rank until its stream or the daemon ends."""
        first = await anext(request_iterator, pb.ServeRequest())
        if not first.messages or first.messages[0].WhichOneof("body") != "attach":
            raise RequestError("the first message of a rank must be Attach")
        attach = first.messages[0].attach
        unfenced: asyncio.Queue[str | None] = asyncio.Queue()
        with self._sweeping_afterwards(), OpenedRegions(attach.regions) as regions:
            agent = AsyncAgent(
                self._broker,
                attach.engine.engine_id,
                attach.engine.incarnation,
                attach.rank,
                regions,
                self._settings,
                self._credentials,
                self._on_lost,
                unfenced.put_nowait,
            )
            self._agents.add(agent)
            try:
                await agent.start(WELCOME_S)
                _take(agent, first.messages[1:])
                yield pb.ServeResponse(attached=pb.Attached(agent_name=agent.name))
                over = asyncio.create_task(self._until_over(agent, request_iterator))
                over.add_done_callback(lambda _: unfenced.put_nowait(None))
                async for handoffs in _batches(unfenced):
                    yield pb.ServeResponse(unfenced=handoffs)
                await over
            finally:
                try:
                    # gRPC cancels the call of a client that leaves while its rank is being closed.
                    # The memory is unmapped next, so closing must not be interrupted.
                    await completed(asyncio.create_task(agent.close()))
                finally:
                    self._agents.discard(agent)
                    self._past = together([self._past, past(agent.figures)])
        if self._stopping.is_set():
            raise AgentClosedError("the daemon is ending")

    @contextlib.contextmanager
    def _sweeping_afterwards(self) -> Iterator[None]:
        """Make the sweeper look for abandoned memory when a rank has left."""
        try:
            yield
        finally:
            self._gone.set()

    async def _until_over(
        self, agent: AsyncAgent, requests: AsyncIterator[pb.ServeRequest]
    ) -> None:
        listening = asyncio.create_task(_listen(agent, requests))
        stopping = asyncio.create_task(self._stopping.wait())
        try:
            await asyncio.wait({listening, stopping}, return_when=asyncio.FIRST_COMPLETED)
            if listening.done():
                listening.result()
        finally:
            listening.cancel()
            stopping.cancel()
            await asyncio.gather(listening, stopping, return_exceptions=True)

    def _unusable(self, why: str) -> ListenError:
        return ListenError(
            f"can't listen on socket {self._path}: its folder must exist, this user must be "
            f"allowed to write there, and the path may have at most {MAX_PATH_BYTES} bytes ({why})",
            socket=self._path,
        )

    async def _take_path(self) -> None:
        """Remove the socket of a daemon that has ended."""
        try:
            is_socket = stat.S_ISSOCK(self._path.lstat().st_mode)
        except FileNotFoundError:
            return
        if is_socket:
            try:
                _, writer = await asyncio.open_unix_connection(self._path)
            except ConnectionRefusedError:
                self._path.unlink(missing_ok=True)
                return
            writer.close()
        raise SocketInUseError(
            f"{self._path} is {'served by another daemon' if is_socket else 'not a socket'}: "
            f"choose another path with --socket",
            socket=self._path,
        )


async def _batches(queue: asyncio.Queue[str | None]) -> AsyncIterator[list[str]]:
    """Yield what has arrived in the meantime, until None arrives."""
    is_over = False
    while not is_over:
        arrived = [await queue.get()]
        while not queue.empty():
            arrived.append(queue.get_nowait())
        is_over = None in arrived
        if batch := [handoff for handoff in arrived if handoff is not None]:
            yield batch


async def _listen(agent: AsyncAgent, requests: AsyncIterator[pb.ServeRequest]) -> None:
    async for request in requests:
        _take(agent, request.messages)


def _take(agent: AsyncAgent, messages: Sequence[pb.DaemonMessage]) -> None:
    for message in messages:
        body = message.WhichOneof("body")
        if body == "fence":
            agent.fence(message.fence.handoff_id, tokens=message.fence.tokens)
        elif body == "writes_done":
            agent.writes_done(message.writes_done.write_mark)
        else:
            raise RequestError("an attached rank may send only Fence and WritesDone")
