"""Why no state came, in vLLM's HTTP answer.

To its clients vLLM says "Internal server error" of every state that could not be loaded. This
middleware asks the broker what became of the handoff that the request named, and says that:

    vllm serve ... --middleware restow.agents.engines.vllm.failure_reasons.FailureReasons
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Awaitable, Callable, MutableMapping
from dataclasses import asdict, dataclass
from typing import Any

from restow.agents.engines.vllm.errors import SettingsError
from restow.agents.engines.vllm.settings import ConnectorSettings
from restow.broker.client.admin import AdminClient
from restow.broker.errors import RestowError
from restow.v1 import broker_pb2

Message = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[Message]]
Send = Callable[[Message], Awaitable[None]]
App = Callable[[Message, Receive, Send], Awaitable[None]]

ASK_S = 2.0
STREAM_MARK = b'data: {"error"'
"""How vLLM begins an error in the midst of a stream."""


@dataclass(frozen=True, slots=True)
class Fate:
    """What became of a handoff. ``reason`` is the broker's, or why it could not be asked."""

    handoff_id: str
    state: str
    reason: str
    detail: str


Ask = Callable[[ConnectorSettings, str], Fate | None]
"""(how the engine reaches the broker; handoff id) -> its fate, None if all is well."""


def ask_broker(settings: ConnectorSettings, handoff_id: str) -> Fate | None:
    """Ask what became of a handoff. Takes up to `ASK_S`."""
    try:
        credentials = settings.credentials()
        with AdminClient(settings.broker or None, ASK_S, credentials=credentials) as client:
            found = client.handoff(handoff_id).handoff
    except RestowError as error:
        return Fate(handoff_id, "UNKNOWN", error.reason, error.message)
    if not found.reason:
        return None
    state = broker_pb2.HandoffState.Name(found.state).removeprefix("HANDOFF_STATE_")
    return Fate(handoff_id, state, found.reason, found.detail)


class FailureReasons:
    """ASGI middleware; answers that are no errors pass through as they are."""

    def __init__(self, app: App, ask: Ask = ask_broker) -> None:
        """Stand before ``app``."""
        self._app = app
        self._ask = ask

    async def __call__(self, scope: Message, receive: Receive, send: Send) -> None:
        """Serve one request."""
        if scope["type"] != "http" or scope["method"] != "POST":
            await self._app(scope, receive, send)
            return
        exchange = _Exchange(receive, send, _settings_of(scope), self._ask)
        await self._app(scope, exchange.receive, exchange.send)


class _Exchange:
    """One request and its answer."""

    def __init__(self, receive: Receive, send: Send, settings: ConnectorSettings, ask: Ask) -> None:
        self._receive, self._send = receive, send
        self._settings, self._ask = settings, ask
        self._body = bytearray()
        self._streams = False
        self._begin: Message | None = None
        """The beginning of an answer of failure, kept until all of it is known."""
        self._failure = bytearray()

    async def receive(self) -> Message:
        message = await self._receive()
        if message["type"] == "http.request":
            self._body += message.get("body", b"")
        return message

    async def send(self, message: Message) -> None:
        if message["type"] == "http.response.start":
            kind = dict(message.get("headers", ())).get(b"content-type", b"")
            self._streams = kind.startswith(b"text/event-stream")
            if message["status"] >= 500 and kind.startswith(b"application/json"):
                self._begin = message
                return
        elif message["type"] == "http.response.body":
            if self._begin is not None:
                self._failure += message.get("body", b"")
                if not message.get("more_body", False):
                    await self._send_failure(self._begin)
                return
            if self._streams and STREAM_MARK in message.get("body", b""):
                message = {**message, "body": await self._events(message["body"])}
        await self._send(message)

    async def _send_failure(self, begin: Message) -> None:
        body = await self._told(bytes(self._failure))
        headers = [(k, v) for k, v in begin.get("headers", ()) if k.lower() != b"content-length"]
        headers.append((b"content-length", str(len(body)).encode()))
        await self._send({**begin, "headers": headers})
        await self._send({"type": "http.response.body", "body": body})

    async def _events(self, chunk: bytes) -> bytes:
        """Events of a stream, errors among them."""
        lines = chunk.split(b"\n")
        for number, line in enumerate(lines):
            if line.startswith(STREAM_MARK):
                lines[number] = b"data: " + await self._told(line.removeprefix(b"data: "))
        return b"\n".join(lines)

    async def _told(self, answer: bytes) -> bytes:
        """An error of vLLM's, with the handoff's fate if it had one."""
        handoff_id = handoff_of(bytes(self._body))
        if handoff_id is None:
            return answer
        fate = await asyncio.to_thread(self._ask, self._settings, handoff_id)
        return answer if fate is None else with_fate(answer, fate)


def handoff_of(body: bytes) -> str | None:
    """The handoff that a request names, if it names one."""
    try:
        params = json.loads(body)["kv_transfer_params"]
        handoff_id = params["handoff_id"]
    except (ValueError, KeyError, TypeError):
        return None
    return handoff_id if isinstance(handoff_id, str) else None


def with_fate(answer: bytes, fate: Fate) -> bytes:
    """Say a handoff's fate in an answer ``{"error": {"message": ...}}``; else leave it as it is."""
    try:
        told = json.loads(answer)
        error = told["error"]
        error["message"] = f"no state was handed over: {fate.reason}: {fate.detail}"
    except (ValueError, KeyError, TypeError):
        return answer
    error["handoff"] = asdict(fate)
    return json.dumps(told).encode()


def _settings_of(scope: Message) -> ConnectorSettings:
    """Those of the engine's own connector, by the arguments that vLLM was started with."""
    arguments = getattr(getattr(scope.get("app"), "state", None), "args", None)
    config = getattr(arguments, "kv_transfer_config", None)
    extra = getattr(config, "kv_connector_extra_config", None) or {}
    try:
        return ConnectorSettings.of(extra)
    except SettingsError:
        return ConnectorSettings()
