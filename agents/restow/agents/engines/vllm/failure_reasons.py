"""This middleware says in vLLM's HTTP answers why no state came.

To its clients vLLM says "Internal server error" of every state that could not be loaded. So the
middleware asks the broker what became of the handoff that the request named, and says that. A
request whose ``kv_transfer_params`` are no use is refused before an engine has it.

    vllm serve ... --middleware restow.agents.engines.vllm.failure_reasons.FailureReasons
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Awaitable, Callable, MutableMapping
from dataclasses import asdict, dataclass
from typing import Any

from restow.agents.engines.vllm.errors import ParametersError, SettingsError
from restow.agents.engines.vllm.http_request import HttpRequest
from restow.agents.engines.vllm.settings import ConnectorSettings
from restow.broker.client.admin import AdminClient
from restow.broker.errors import RestowError
from restow.v1 import admin_pb2, broker_pb2

Message = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[Message]]
Send = Callable[[Message], Awaitable[None]]
App = Callable[[Message, Receive, Send], Awaitable[None]]

ASK_S = 2.0
MOST_ASKED = 16
"""Of a request with many prompts or answers."""
AFTER_REFUSAL = ("", "DECLINED", "NOT_ASKED_FOR", "LEASE_EXPIRED")
"""Reasons of ends that only follow from the refusal of the request's demand."""
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
            told = client.handoff(handoff_id)
    except RestowError as error:
        return Fate(handoff_id, "UNKNOWN", error.reason, error.message)
    # Of a publication for several readers each delivery has a story of its own.
    fates = (_fate(handoff_id, one) for one in (told, *reversed(told.deliveries)))
    return next((one for one in fates if one is not None), None)


def _fate(handoff_id: str, told: admin_pb2.GetHandoffResponse) -> Fate | None:
    """Return why a handoff or a delivery has failed, or its last demand was refused."""
    found = told.handoff
    refused = [one for one in told.timeline if one.event == "refused"]
    if not (found.reason or refused):
        return None
    state = broker_pb2.HandoffState.Name(found.state).removeprefix("HANDOFF_STATE_")
    if refused and (found.reason in AFTER_REFUSAL or told.timeline[-1].event == "refused"):
        # This request was refused: another had the handoff, or what P has does not fit it.
        reason_and_engine, _, words = refused[-1].detail.partition(": ")
        return Fate(handoff_id, state, reason_and_engine.partition(" ")[0], words)
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
        body, heard = await _whole(receive)
        asked, (settings, kv_role) = HttpRequest.of(body), _engine_of(scope)
        try:
            if asked is not None:
                asked.check(kv_role)
        except ParametersError as error:
            await _refuse(send, error)
            return
        exchange = _Exchange(send, settings, self._ask, asked)
        await self._app(scope, _again(heard, receive), exchange.send)


class _Exchange:
    """One answer."""

    def __init__(
        self, send: Send, settings: ConnectorSettings, ask: Ask, asked: HttpRequest | None
    ) -> None:
        self._send, self._settings, self._ask, self._asked = send, settings, ask, asked
        self._streams = False
        self._begin: Message | None = None
        """The beginning of an answer of failure, kept until all of it is known."""
        self._failure = bytearray()

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
        await _send_whole(self._send, begin, await self._told(bytes(self._failure)))

    async def _events(self, chunk: bytes) -> bytes:
        """Events of a stream, errors among them."""
        lines = chunk.split(b"\n")
        for number, line in enumerate(lines):
            if line.startswith(STREAM_MARK):
                lines[number] = b"data: " + await self._told(line.removeprefix(b"data: "))
        return b"\n".join(lines)

    async def _told(self, answer: bytes) -> bytes:
        """An error of vLLM's, with the handoff's fate if it had one."""
        ids = [] if self._asked is None else self._asked.handoff_ids(MOST_ASKED)
        for handoff_id in ids:
            fate = await asyncio.to_thread(self._ask, self._settings, handoff_id)
            if fate is not None:
                return with_fate(answer, fate)
        return answer


async def _whole(receive: Receive) -> tuple[bytes, list[Message]]:
    """A request's body, and the messages that brought it."""
    heard: list[Message] = []
    while not heard or heard[-1].get("more_body", False):
        heard.append(await receive())
    return b"".join(one.get("body", b"") for one in heard), heard


def _again(heard: list[Message], receive: Receive) -> Receive:
    """What was heard already, and then what comes."""

    async def next_one() -> Message:
        return heard.pop(0) if heard else await receive()

    return next_one


async def _refuse(send: Send, error: ParametersError) -> None:
    """As vLLM refuses what the client did wrong."""
    said = {
        "message": f"{error.reason}: {error.message}",
        "type": "BadRequestError",
        "param": "kv_transfer_params",
        "code": 400,
    }
    headers = [(b"content-type", b"application/json")]
    begin = {"type": "http.response.start", "status": 400, "headers": headers}
    await _send_whole(send, begin, json.dumps({"error": said}).encode())


async def _send_whole(send: Send, begin: Message, body: bytes) -> None:
    """Send an answer whose body is known, whatever length its beginning says."""
    headers = [(k, v) for k, v in begin.get("headers", ()) if k.lower() != b"content-length"]
    headers.append((b"content-length", str(len(body)).encode()))
    await send({**begin, "headers": headers})
    await send({"type": "http.response.body", "body": body})


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


def _engine_of(scope: Message) -> tuple[ConnectorSettings, str]:
    """Settings and role of the engine's own connector, by the arguments that vLLM was given."""
    arguments = getattr(getattr(scope.get("app"), "state", None), "args", None)
    config = getattr(arguments, "kv_transfer_config", None)
    extra = getattr(config, "kv_connector_extra_config", None) or {}
    kv_role = getattr(config, "kv_role", None) or "kv_consumer"
    try:
        return ConnectorSettings.of(extra), kv_role
    except SettingsError:
        return ConnectorSettings(), kv_role
