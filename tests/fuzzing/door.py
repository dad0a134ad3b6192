"""The real services without a network: bytes in, bytes out, and what must hold is checked."""

from __future__ import annotations

import asyncio
import re
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass
from typing import Any
from urllib.parse import quote

import grpc
from google.protobuf import descriptor_pool
from google.protobuf.descriptor import MethodDescriptor
from google.protobuf.message import Message
from google.rpc import error_details_pb2, status_pb2

from fuzzing.messages import message_type
from restow.broker.rpc.status import ERROR_DOMAIN, REASON_KEY
from restow.broker.server.base.hub import Hub
from restow.broker.server.serve import SERVER_OPTIONS, SERVICES, add_services
from simulation_harness.network import Listener
from simulation_harness.virtual_loop import Process, VirtualLoop

MAX_METADATA_BYTES = 8 << 10
"""From here on gRPC may drop the end of a call, and with it the reason."""
MAX_RESPONSE_BYTES = dict(SERVER_OPTIONS)["grpc.max_send_message_length"]
REASON = re.compile(r"[A-Z][A-Z0-9_]{2,63}")


class Violation(AssertionError):
    """Something that must hold does not."""


def methods() -> dict[str, MethodDescriptor]:
    """Return every RPC that a broker serves, by path, from its contract."""
    pool = descriptor_pool.Default()
    services = [pool.FindServiceByName(name) for name in SERVICES]
    return {f"/{one.full_name}/{rpc.name}": rpc for one in services for rpc in one.methods}


@dataclass(frozen=True, slots=True)
class Answer:
    """How a call ended; ``reason`` is empty if it went well."""

    reason: str = ""
    status: str = "OK"
    details: str = ""
    response: Message | None = None


class _Abort(Exception):
    def __init__(self, answer: Answer) -> None:
        super().__init__(answer.reason)
        self.answer = answer


class _Context:
    """What a handler knows of its call."""

    def __init__(self, tenant: str, requests: AsyncIterator[Any] | None = None) -> None:
        self._tenant, self._requests = tenant, requests

    async def read(self) -> Any:
        return grpc.aio.EOF if self._requests is None else await anext(self._requests, grpc.aio.EOF)

    def invocation_metadata(self) -> tuple[tuple[str, str], ...]:
        return (("restow-tenant", self._tenant),)

    def time_remaining(self) -> float | None:
        return None

    def peer(self) -> str:
        return "nowhere"

    async def abort(self, code: grpc.StatusCode, details: str = "", trailing: Any = ()) -> None:
        raise _Abort(read_refusal(code, details, trailing))


def read_refusal(code: grpc.StatusCode, details: str, trailing: Any) -> Answer:
    """Return the refusal that a client would read. Raises `Violation` if it has no reason."""
    size = len(quote(details)) + sum(len(key) + len(value) for key, value in trailing)
    if size > MAX_METADATA_BYTES:
        raise Violation(f"a refusal of {size} bytes, which gRPC may drop: {details[:80]!r}")
    rich = status_pb2.Status()
    for key, value in trailing:
        if key == "grpc-status-details-bin":
            rich.ParseFromString(value)
    info = error_details_pb2.ErrorInfo()
    if not any(detail.Unpack(info) for detail in rich.details):
        raise Violation(f"{code.name} without a reason: {details[:80]!r}")
    if (rich.code, rich.message) != (code.value[0], details):
        raise Violation(f"a refusal in two versions: {rich} and {code.name} {details[:80]!r}")
    if info.domain != ERROR_DOMAIN or not REASON.fullmatch(info.reason):
        raise Violation(f"{info.reason!r} of {info.domain!r} is no reason")
    if (plain := dict(trailing).get(REASON_KEY)) != info.reason:
        raise Violation(f"metadata says {plain!r}, the status {info.reason!r}")
    if code in (grpc.StatusCode.UNKNOWN, grpc.StatusCode.INTERNAL, grpc.StatusCode.OK):
        raise Violation(f"{code.name} {info.reason}: {details}")
    return Answer(info.reason, code.name, details)


class Door:
    """Handlers by path, behind the real interceptors, registered as with a server."""

    def __init__(self, hub: Hub, loop: VirtualLoop) -> None:
        self.loop, self.hub = loop, hub
        self._listener = Listener(Process(loop, "broker", "its host"))
        add_services(hub, self._listener)  # type: ignore[arg-type]
        self._handlers = self._listener.handlers
        self.methods = methods()
        missing = self._handlers.keys() ^ self.methods.keys()
        if missing:
            raise Violation(f"served and contracted differ: {sorted(missing)}")

    async def open(self) -> None:
        """Put the real interceptors in front of all."""
        await self._listener.intercept()

    async def call(self, path: str, request: bytes, tenant: str) -> Answer:
        """Make one unary call. Raises what no handler may raise."""
        handler = self._handlers[path]
        try:
            response = await handler.unary_unary(request, _Context(tenant))
        except _Abort as abort:
            return abort.answer
        return Answer(response=self._read(path, handler.response_serializer(response)))

    def stream(self, path: str, tenant: str) -> Stream:
        """Begin a stream."""
        return Stream(self, self._handlers[path], path, tenant)

    def _read(self, path: str, data: bytes) -> Message:
        if len(data) > MAX_RESPONSE_BYTES:
            raise Violation(f"{path} answers with {len(data)} bytes")
        return message_type(self.methods[path].output_type).FromString(data)


class Stream:
    """One stream of a client. ``hear`` is called with every response that it reads."""

    def __init__(self, door: Door, handler: Any, path: str, tenant: str) -> None:
        self.path, self.tenant = path, tenant
        self.answer: Answer | None = None
        """How it ended, once it has."""
        self.hear: Callable[[Any], None] = lambda response: None
        self.reads = asyncio.Event()
        """Clear it, and nothing is read."""
        self.reads.set()
        self._door, self._handler = door, handler
        self._requests: asyncio.Queue[bytes | None] = asyncio.Queue()
        self._task = door.loop.create_task(self._serve())

    @property
    def over(self) -> bool:
        """Return whether the stream has ended. Raises what no handler may raise."""
        if self._task.done() and not self._task.cancelled():
            self._task.result()
        return self._task.done()

    def say(self, request: Message | bytes) -> None:
        """Write a request to the stream."""
        data = request if isinstance(request, bytes) else request.SerializeToString()
        self._requests.put_nowait(data)

    def end(self) -> None:
        """Say that no more requests follow. A call that sends a single one is given up."""
        if self._handler.unary_stream is not None:
            self.cut()
        self._requests.put_nowait(None)

    def cut(self) -> None:
        """Break the stream, as a dead client does."""
        self._task.cancel()

    async def _serve(self) -> None:
        try:
            requests = self._each()
            context = _Context(self.tenant, requests)
            one = self._handler.unary_stream
            sent = requests if one is None else await anext(requests)
            # No name keeps the generator: it ends when the stream is cut.
            async for response in (one or self._handler.stream_stream)(sent, context):
                self.hear(self._door._read(self.path, self._handler.response_serializer(response)))
                await self.reads.wait()
            self.answer = Answer()
        except _Abort as abort:
            self.answer = abort.answer

    async def _each(self) -> AsyncIterator[Any]:
        while (data := await self._requests.get()) is not None:
            yield data
