"""Middleware for vLLM's HTTP server that puts the reasons of failed handoffs into its answers.

vLLM answers "Internal server error" when a state could not be loaded. The middleware asks the
broker what happened to the handoff that the request named, and puts that into the answer. It
refuses requests whose ``kv_transfer_params`` are invalid before an engine gets them.

    vllm serve ... --middleware restow.agents.engines.vllm.failure_reasons.FailureReasons
"""

from __future__ import annotations

import asyncio
import itertools
import json
import sys
from collections.abc import Awaitable, Callable, MutableMapping
from dataclasses import asdict, dataclass
from typing import Any

from restow.agents.engines.common.adapter_errors import ParametersError, SettingsError
from restow.agents.engines.common.registration import ConnectorSettings
from restow.agents.engines.vllm.scheduler.requests import (
    HANDOFF_ID,
    AnswerIndex,
    marks_of,
    parameters_of,
)
from restow.broker.client.admin import AdminClient
from restow.broker.errors import RestowError
from restow.v1 import admin_pb2, broker_pb2

Message = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[Message]]
Send = Callable[[Message], Awaitable[None]]
App = Callable[[Message, Receive, Send], Awaitable[None]]

ASK_S = 2.0
MOST_ASKED = 16
"""Handoffs that the broker is asked about for a request with many prompts or answers."""
AFTER_REFUSAL = ("", "DECLINED", "NOT_ASKED_FOR", "LEASE_EXPIRED")
"""Reasons of ends that only follow from the refusal of the request's demand."""
STREAM_MARK = b'data: {"error"'
"""The beginning of an error that vLLM sends within a stream."""


@dataclass(frozen=True, slots=True)
class HandoffFailure:
    """A handoff's failure; ``reason`` is the broker's, or the reason why it could not be asked."""

    handoff_id: str
    state: str
    reason: str
    detail: str


Ask = Callable[[ConnectorSettings, str], HandoffFailure | None]
"""A function of the engine's settings and a handoff's id; None: the handoff has not failed."""


def ask_broker(settings: ConnectorSettings, handoff_id: str) -> HandoffFailure | None:
    """Ask the broker whether a handoff has failed, and why. Takes up to `ASK_S`."""
    try:
        credentials = settings.credentials()
        with AdminClient(settings.broker or None, ASK_S, credentials=credentials) as client:
            answer = client.handoff(handoff_id)
    except RestowError as error:
        return HandoffFailure(handoff_id, "UNKNOWN", error.reason, error.message)
    # Each delivery of a publication for several readers has a timeline of its own.
    failures = (_failure_of(handoff_id, part) for part in (answer, *reversed(answer.deliveries)))
    return next((failure for failure in failures if failure is not None), None)


def _failure_of(handoff_id: str, answer: admin_pb2.GetHandoffResponse) -> HandoffFailure | None:
    """Return why a handoff or a delivery has failed, or its last demand was refused."""
    handoff = answer.handoff
    refused = [entry for entry in answer.timeline if entry.event == "refused"]
    if not (handoff.reason or refused):
        return None
    state = broker_pb2.HandoffState.Name(handoff.state).removeprefix("HANDOFF_STATE_")
    if refused and (handoff.reason in AFTER_REFUSAL or answer.timeline[-1].event == "refused"):
        # This request was refused: another request has the handoff, or P's state does not fit it.
        reason_and_engine, _, words = refused[-1].detail.partition(": ")
        return HandoffFailure(handoff_id, state, reason_and_engine.partition(" ")[0], words)
    return HandoffFailure(handoff_id, state, handoff.reason, handoff.detail)


@dataclass(frozen=True, slots=True)
class HttpRequest:
    """The parts of a client's HTTP request that concern handoffs."""

    params: object
    prompts: int
    choices: int
    beams: bool

    @classmethod
    def of(cls, body: bytes) -> HttpRequest | None:
        """Read a request's body; None: it has no ``kv_transfer_params``.

        vLLM itself refuses a body that is no JSON.
        """
        try:
            read = json.loads(body)
        except ValueError:
            return None
        if not isinstance(read, dict) or not read.get("kv_transfer_params"):
            return None
        prompt, choices = read.get("prompt"), read.get("n")
        # A list of numbers is one prompt, in tokens.
        prompts = prompt if isinstance(prompt, list) else []
        return cls(
            read["kv_transfer_params"],
            1 if all(isinstance(element, int) for element in prompts) else len(prompts),
            choices if isinstance(choices, int) and choices > 0 else 1,
            bool(read.get("use_beam_search")),
        )

    def check(self, kv_role: str) -> None:
        """Refuse a request whose handoff or marks are invalid. Raises `ParametersError`."""
        if isinstance(self.params, dict):
            marks_of(self.params, sys.maxsize)  # the engine knows how long its prompt is
        last = AnswerIndex(max(self.prompts - 1, 0))
        if parameters_of(self.params, kv_role, "made by P", last) is not None and self.beams:
            raise ParametersError(
                "beam search cannot begin with another engine's state: ask without "
                "kv_transfer_params"
            )

    def handoff_ids(self, most: int) -> list[str]:
        """Return the first ``most`` handoffs of the request; empty if it names none."""
        given = self.params.get(HANDOFF_ID) if isinstance(self.params, dict) else None
        if not isinstance(given, str):
            return []
        pairs = itertools.product(range(self.prompts), range(self.choices))
        return [AnswerIndex(*pair).handoff_id(given) for pair in itertools.islice(pairs, most)]


class FailureReasons:
    """ASGI middleware; answers without errors pass through unchanged."""

    def __init__(self, app: App, ask: Ask = ask_broker) -> None:
        """Stand before ``app``."""
        self._app = app
        self._ask = ask

    async def __call__(self, scope: Message, receive: Receive, send: Send) -> None:
        """Serve a request."""
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
    """An answer on its way to a client."""

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
        """Add reasons to the errors among the events of a stream."""
        lines = chunk.split(b"\n")
        for number, line in enumerate(lines):
            if line.startswith(STREAM_MARK):
                lines[number] = b"data: " + await self._told(line.removeprefix(b"data: "))
        return b"\n".join(lines)

    async def _told(self, answer: bytes) -> bytes:
        """Return an error of vLLM's, with the reason of the handoff's failure if it failed."""
        ids = [] if self._asked is None else self._asked.handoff_ids(MOST_ASKED)
        for handoff_id in ids:
            failure = await asyncio.to_thread(self._ask, self._settings, handoff_id)
            if failure is not None:
                return with_failure(answer, failure)
        return answer


async def _whole(receive: Receive) -> tuple[bytes, list[Message]]:
    """Read a request's body; return it and the messages that brought it."""
    heard: list[Message] = []
    while not heard or heard[-1].get("more_body", False):
        heard.append(await receive())
    return b"".join(message.get("body", b"") for message in heard), heard


def _again(heard: list[Message], receive: Receive) -> Receive:
    """Return a function that receives the messages ``heard`` already, and then further messages."""

    async def next_message() -> Message:
        return heard.pop(0) if heard else await receive()

    return next_message


async def _refuse(send: Send, error: ParametersError) -> None:
    """Refuse a request as vLLM refuses a client's mistake."""
    fault = {
        "message": f"{error.reason}: {error.message}",
        "type": "BadRequestError",
        "param": "kv_transfer_params",
        "code": 400,
    }
    headers = [(b"content-type", b"application/json")]
    begin = {"type": "http.response.start", "status": 400, "headers": headers}
    await _send_whole(send, begin, json.dumps({"error": fault}).encode())


async def _send_whole(send: Send, begin: Message, body: bytes) -> None:
    """Send an answer with its body, and correct the length in its headers."""
    headers = [(k, v) for k, v in begin.get("headers", ()) if k.lower() != b"content-length"]
    headers.append((b"content-length", str(len(body)).encode()))
    await send({**begin, "headers": headers})
    await send({"type": "http.response.body", "body": body})


def with_failure(answer: bytes, failure: HandoffFailure) -> bytes:
    """Return an answer ``{"error": {"message": ...}}`` with a handoff's failure in it.

    Any other answer is returned unchanged.
    """
    try:
        document = json.loads(answer)
        error = document["error"]
        error["message"] = f"no state was handed over: {failure.reason}: {failure.detail}"
    except (ValueError, KeyError, TypeError):
        return answer
    error["handoff"] = asdict(failure)
    return json.dumps(document).encode()


def _engine_of(scope: Message) -> tuple[ConnectorSettings, str]:
    """Return the settings and the role of the engine's connector, from vLLM's arguments."""
    arguments = getattr(getattr(scope.get("app"), "state", None), "args", None)
    config = getattr(arguments, "kv_transfer_config", None)
    extra = getattr(config, "kv_connector_extra_config", None) or {}
    kv_role = getattr(config, "kv_role", None) or "kv_consumer"
    try:
        return ConnectorSettings.of(extra), kv_role
    except SettingsError:
        return ConnectorSettings(), kv_role
