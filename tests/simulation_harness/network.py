"""Calls between simulated processes: the real stubs and services, over wires that break.

As over TCP what is sent on one call arrives in order, late, or not at all; calls overtake each
other. A cut network is noticed by keepalive alone.
"""

from __future__ import annotations

import asyncio
import time
from collections import deque
from collections.abc import AsyncIterator, Callable
from contextvars import Context
from dataclasses import dataclass, field
from random import Random
from typing import Any, NamedTuple

import grpc

from restow.broker.client import Credentials
from restow.broker.rpc.sizes import SEVERAL_ANSWER_S, SEVERAL_EVERY_S
from restow.broker.server.base.logging import BoundedLog
from restow.broker.server.serve import interceptors_of
from simulation_harness.virtual_loop import CURRENT, Process, VirtualLoop

KEEPALIVE_S = 15.0
PAUSED_S = 13.0
"""After which a client knows that nobody answers its pings."""
NOTICED_S = SEVERAL_EVERY_S + SEVERAL_ANSWER_S
"""The same of one of several brokers, cut off or paused."""
FIRST_RECONNECT_S = 0.2
LAST_RECONNECT_S = 2.0
CONNECT_S = 2.0
Put = Callable[[object], None]
Metadata = tuple[tuple[str, str], ...]
_NOBODY = Context()
"""The network's own work belongs to no process."""


class _Abort(Exception):
    def __init__(self, code: grpc.StatusCode, details: str, trailing: Any) -> None:
        super().__init__(details)
        self.error = failure(code, details, trailing)


def failure(code: grpc.StatusCode, details: str, trailing: Any = ()) -> grpc.aio.AioRpcError:
    return grpc.aio.AioRpcError(
        code, grpc.aio.Metadata(), grpc.aio.Metadata(*trailing), details=details
    )


def _unavailable(details: str) -> grpc.aio.AioRpcError:
    return failure(grpc.StatusCode.UNAVAILABLE, details)


@dataclass
class Listener:
    """A process that serves calls."""

    process: Process
    handlers: dict[str, Any] = field(default_factory=dict)

    def add_generic_rpc_handlers(self, handlers: Any) -> None:
        """Do nothing: generated code also calls `add_registered_method_handlers`."""

    def add_registered_method_handlers(self, service: str, handlers: dict[str, Any]) -> None:
        for name, handler in handlers.items():
            self.handlers[f"/{service}/{name}"] = handler

    async def intercept(self) -> None:
        """Put the real interceptors in front of all."""
        for interceptor in reversed(interceptors_of(None, BoundedLog(lambda: 0.0), lambda _: None)):
            for name, handler in self.handlers.items():

                async def found(details: object, handler: Any = handler) -> Any:
                    return handler

                self.handlers[name] = await interceptor.intercept_service(found, _Details(name))  # type: ignore[arg-type]


class Network:
    """All hosts, and what lies between them."""

    def __init__(self, loop: VirtualLoop, rng: Random) -> None:
        self.loop, self.rng = loop, rng
        self.delivered = 0
        self.on_delivery: Callable[[int], None] = lambda count: None
        self.on_said: Callable[[Process, Any], None] = lambda process, batch: None
        """Hears of each batch that leaves a process that serves calls."""
        self.loses: Callable[[_Call, Any], bool] = lambda call, batch: False
        """Tells of each such batch whether it is lost on the way out."""
        self.listeners: dict[str, Listener] = {}
        self._cut: dict[frozenset[str], int] = {}
        self._cuts = 0
        self._calls: list[_Call] = []

    # -- what goes wrong --------------------------------------------------------------------------

    def cut(self, host: str, other: str) -> None:
        """Cut two hosts off from each other."""
        self._cuts += 1
        self._cut[frozenset((host, other))] = self._cuts
        for call in self._calls:
            call.was_cut()

    def heal(self, host: str, other: str) -> None:
        """Connect two hosts again."""
        self._cut.pop(frozenset((host, other)), None)
        for call in self._calls:
            call.was_healed()

    def heal_all(self) -> None:
        """Connect all hosts again."""
        for hosts in list(self._cut):
            self.heal(*hosts)

    def is_cut(self, host: str, other: str) -> int:
        """Return the number of the cut between two hosts; 0: there is none."""
        return self._cut.get(frozenset((host, other)), 0)

    def lost(self, process: Process) -> None:
        """Close the connections of a process that was killed, as its system does."""
        for call in self._calls:
            call.lost(process)

    def pause(self, process: Process) -> None:
        """Pause a process, of which its callers learn by keepalive."""
        process.pause()
        for call in self._calls:
            call.was_paused(process)

    def own_time(self, _: int = 0) -> float:
        """Return the time by the clock of the process that asks."""
        process = CURRENT.get()
        return self.loop.time() * (1.0 if process is None else process.pace)

    def break_one(self) -> None:
        """Break a connection for both sides."""
        calls = [call for call in self._calls if call.is_open]
        if calls:
            call = self.rng.choice(calls)
            call.end_client(_unavailable("connection reset"), self.delay_s())
            call.end_server(self.delay_s())

    def delay_s(self) -> float:
        """Draw how long a message takes."""
        draw = self.rng.random()
        if draw < 0.96:
            return self.rng.uniform(0.0001, 0.003)
        return self.rng.uniform(0.003, 0.3) if draw < 0.995 else self.rng.uniform(0.3, 4.0)

    # -- calls ------------------------------------------------------------------------------------

    def open_channel(
        self, address: str, credentials: Credentials, several: bool = False
    ) -> Channel:
        """Open a channel, in place of `restow.broker.client.connection.channel.open_channel`."""
        process = CURRENT.get()
        if process is None:
            raise RuntimeError("a channel outside of a process")
        return Channel(self, process, address, several)

    def begin(self, call: _Call) -> None:
        self._calls.append(call)

    def count(self) -> None:
        """Count a delivery, and tell that it happened."""
        self.delivered += 1
        self.loop.call_soon(self.on_delivery, self.delivered, context=_NOBODY.copy())


class Wire:
    """One direction of a call."""

    def __init__(self, network: Network, sender: Process, receiver: Process, put: Put) -> None:
        self._network, self._put = network, put
        self._sender, self._receiver = sender, receiver
        self._last_s = 0.0
        self._held: deque[object] = deque()

    def send(self, item: object) -> None:
        network = self._network
        # Timers of one moment would run in any order.
        self._last_s = max(self._last_s + 1e-6, network.loop.time() + network.delay_s())
        network.loop.call_at(self._last_s, self._arrive, item, context=_NOBODY.copy())

    def _arrive(self, item: object) -> None:
        if self._held or self._network.is_cut(self._sender.host, self._receiver.host):
            self._held.append(item)
            return
        self._network.count()
        self._receiver.soon(self._put, item)

    def flush(self) -> None:
        """Send on what was held back, if the hosts are connected again."""
        while self._held and not self._network.is_cut(self._sender.host, self._receiver.host):
            self._network.count()
            self._receiver.soon(self._put, self._held.popleft())


class _Details(NamedTuple):
    """Of a call, what interceptors look at."""

    method: str


class _Context:
    """What a handler knows of its call."""

    def __init__(
        self,
        metadata: Metadata,
        requests: AsyncIterator[Any] | None = None,
        timeout_s: float | None = None,
    ) -> None:
        self._metadata, self._requests = metadata, requests
        self._until_s = None if timeout_s is None else time.monotonic() + timeout_s

    def time_remaining(self) -> float | None:
        return None if self._until_s is None else self._until_s - time.monotonic()

    async def read(self) -> Any:
        return grpc.aio.EOF if self._requests is None else await anext(self._requests, grpc.aio.EOF)

    def invocation_metadata(self) -> Metadata:
        return self._metadata

    def peer(self) -> str:
        return "nowhere"

    async def abort(self, code: grpc.StatusCode, details: str = "", trailing: Any = ()) -> None:
        raise _Abort(code, details, trailing)


_END = object()
_BROKEN = object()


class _Call:
    """One call: a connection of its own between a client and a listener."""

    def __init__(
        self,
        channel: Channel,
        method: str,
        encode: Any,
        decode: Any,
        metadata: Metadata,
        timeout_s: float | None = None,
    ) -> None:
        self._network = network = channel.network
        self._metadata, self._timeout_s = metadata, timeout_s
        self._client, self._several = channel.process, channel.several
        self._encode, self._decode = encode, decode
        self._inbox: asyncio.Queue[object] = asyncio.Queue()
        self._outcome: BaseException | None = None
        self._listener = network.listeners.get(channel.address)
        self._task: asyncio.Task[None] | None = None
        self._requests: asyncio.Queue[object] = asyncio.Queue()
        listener = self._listener
        if listener is None or not listener.process.alive:
            self._listener = None
            self.end_client(_unavailable("nobody listens"), network.delay_s())
            return
        network.begin(self)
        self._server = listener.process
        self._handler = listener.handlers[method]
        self._up = Wire(network, self._client, self._server, self._heard)
        self._down = Wire(network, self._server, self._client, self._inbox.put_nowait)
        if network.is_cut(self._client.host, self._server.host):
            self.end_client(_unavailable("not connected"), CONNECT_S)
        elif self._server.paused:
            self.was_paused(self._server)

    # -- the client's side ------------------------------------------------------------------------

    async def wait_for_connection(self) -> None:
        """Return at once: a caller that reads hears of what fails."""

    async def write(self, message: Any) -> None:
        if self._outcome is not None:
            raise self._outcome
        if self._listener is not None:
            self._up.send(self._encode(message))
        await asyncio.sleep(0)

    def done_writing(self) -> None:
        self._up.send(_END)

    def __aiter__(self) -> AsyncIterator[Any]:
        return self

    async def __anext__(self) -> Any:
        if self._outcome is not None:
            raise self._outcome
        item = await self._inbox.get()
        if item is _END:
            self._close(asyncio.InvalidStateError("the call is over"))
            raise StopAsyncIteration
        if isinstance(item, grpc.aio.AioRpcError):
            self._close(item)
            raise item
        return self._decode(item)

    def cancel(self) -> None:
        self._close(asyncio.CancelledError())
        if self._listener is not None:
            self._up.send(_BROKEN)

    @property
    def server(self) -> Process:
        return self._server

    @property
    def is_open(self) -> bool:
        return self._outcome is None and self._listener is not None

    def _close(self, outcome: BaseException) -> None:
        if self._outcome is None:
            self._outcome = outcome

    # -- the server's side ------------------------------------------------------------------------

    def _heard(self, item: object) -> None:
        if item is _BROKEN:
            self._end_task()
        if self._listener is None:
            return
        if self._task is None:
            self._task = self._server.spawn(self._serve())
        self._requests.put_nowait(item)

    async def _serve(self) -> None:
        handler = self._handler
        try:
            if handler.unary_unary is not None:
                how = _Context(self._metadata, timeout_s=self._timeout_s)
                response = await handler.unary_unary(await self._requests.get(), how)
                self._down.send(handler.response_serializer(response))
            else:
                requests = self._each()
                how = _Context(self._metadata, requests)
                async for response in handler.stream_stream(requests, how):
                    if self._network.loses(self, response):
                        continue
                    self._network.on_said(self._server, response)
                    self._down.send(handler.response_serializer(response))
            self._down.send(_END)
        except _Abort as abort:
            self._down.send(abort.error)
        except asyncio.CancelledError:
            self._down.send(failure(grpc.StatusCode.CANCELLED, "cancelled by the server"))
        except Exception as error:  # noqa: BLE001 - the history ends with it
            context = {"message": "a handler of the broker failed", "exception": error}
            asyncio.get_running_loop().call_exception_handler(context)

    async def _each(self) -> AsyncIterator[Any]:
        while (item := await self._requests.get()) is not _END:
            yield item

    # -- what goes wrong --------------------------------------------------------------------------

    def end_client(self, error: grpc.aio.AioRpcError, delay_s: float) -> None:
        self._client.later(delay_s, self._inbox.put_nowait, error)

    def end_server(self, delay_s: float) -> None:
        if self._listener is not None:
            self._server.later(delay_s, self._end_task)

    def _end_task(self) -> None:
        if self._listener is None:
            return
        self._listener = None
        if self._task is not None:
            self._task.cancel()
        # Should the client not have noticed, it will when something passes again.
        self._down.send(_unavailable("connection reset"))

    def lost(self, process: Process) -> None:
        """Tell the other side that a process was killed; behind a cut keepalive tells it."""
        if self._listener is None:
            return
        cut = self._network.is_cut(self._client.host, self._server.host)
        delay_s = self._network.delay_s()
        if process is self._client:
            self.end_server(KEEPALIVE_S if cut else delay_s)
        elif process is self._server:
            delay_s = self._noticed_s(KEEPALIVE_S) if cut else delay_s
            self.end_client(_unavailable("connection reset"), delay_s)

    def _noticed_s(self, alone_s: float) -> float:
        """Return when the client notices a dead wire; ``alone_s`` with a single broker."""
        return NOTICED_S if self._several else alone_s

    def was_cut(self) -> None:
        if self._listener is None:
            return
        cut = self._network.is_cut(self._client.host, self._server.host)
        if cut:
            loop, rng = self._network.loop, self._network.rng
            for end, noticed_s in (
                (self._client_gives_up, self._noticed_s(KEEPALIVE_S)),
                (self._server_gives_up, KEEPALIVE_S),
            ):
                loop.call_later(noticed_s + rng.random(), end, cut, context=_NOBODY.copy())

    def was_paused(self, process: Process) -> None:
        if self._listener is None or process is not self._server:
            return
        pause = process.pauses
        self._network.loop.call_later(
            self._noticed_s(PAUSED_S), self._client_gives_up_paused, pause, context=_NOBODY.copy()
        )

    def _client_gives_up_paused(self, pause: int) -> None:
        if self._server.paused and self._server.pauses == pause:
            self.end_client(_unavailable("keepalive"), 0.0)
            self._up.send(_BROKEN)

    def _client_gives_up(self, cut: int) -> None:
        if self._network.is_cut(self._client.host, self._server.host) == cut:
            self.end_client(_unavailable("keepalive"), 0.0)
            self._up.send(_BROKEN)

    def _server_gives_up(self, cut: int) -> None:
        if self._network.is_cut(self._client.host, self._server.host) == cut:
            self.end_server(0.0)

    def was_healed(self) -> None:
        self._up.flush()
        self._down.flush()


class Channel:
    """As much of `grpc.aio.Channel` as the stubs and their callers use."""

    def __init__(self, network: Network, process: Process, address: str, several: bool) -> None:
        self.network, self.process, self.address = network, process, address
        self.several = several
        self._look_s = FIRST_RECONNECT_S

    def unary_unary(self, method: str, **how: Any) -> Callable[..., Any]:
        async def call(
            request: Any,
            timeout: float | None = None,  # noqa: ASYNC109
            metadata: Metadata = (),
        ) -> Any:
            coders = (how["request_serializer"], how["response_deserializer"])
            made = _Call(self, method, *coders, metadata, timeout)
            try:
                async with asyncio.timeout(timeout):
                    await made.write(request)
                    return await anext(made)
            except TimeoutError:
                made.cancel()
                raise failure(grpc.StatusCode.DEADLINE_EXCEEDED, "no answer in time") from None

        return call

    def stream_stream(self, method: str, **how: Any) -> Callable[..., _Call]:
        coders = (how["request_serializer"], how["response_deserializer"])
        return lambda metadata=(): _Call(self, method, *coders, metadata)

    def unary_stream(self, method: str, **how: Any) -> Callable[..., _Call]:
        """Return a call of a method that no history calls."""
        return self.stream_stream(method, **how)

    def get_state(self, try_to_connect: bool = False) -> grpc.ChannelConnectivity:
        """Return the channel's state; while nothing comes back, it is connecting."""
        listener = self.network.listeners.get(self.address)
        if listener is None or not listener.process.alive:
            return grpc.ChannelConnectivity.TRANSIENT_FAILURE
        cut = self.network.is_cut(self.process.host, listener.process.host)
        if cut or listener.process.paused:
            return grpc.ChannelConnectivity.CONNECTING
        return grpc.ChannelConnectivity.READY

    async def wait_for_state_change(self, last: grpc.ChannelConnectivity) -> None:
        """Try again and again to connect, as a channel does."""
        while self.get_state() is last:
            await asyncio.sleep(self._look_s)
            self._look_s = min(2 * self._look_s, LAST_RECONNECT_S)
        self._look_s = FIRST_RECONNECT_S

    async def close(self, grace: float | None = None) -> None:
        """Do nothing: calls are cancelled by those who made them."""
