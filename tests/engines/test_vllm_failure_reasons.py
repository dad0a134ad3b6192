"""The reason of a failure in vLLM's HTTP answer. No vLLM is needed: ASGI on both sides."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from broker.fakes import D_BLOCKS, P_BLOCKS, POSITION, broker, heard, pair
from restow.agents.engines.common.registration import ConnectorSettings
from restow.agents.engines.vllm.failure_reasons import (
    FailureReasons,
    HandoffFailure,
    Message,
    Receive,
    Send,
    ask_broker,
)
from restow.broker.client import BrokerCallError

ERROR = {"error": {"message": "Internal server error", "type": "InternalServerError", "code": 500}}
FATE = HandoffFailure(
    "h1", "EXPIRED", "NOT_PUBLISHED", "D's request timed out: nobody published it"
)
NAMED = json.dumps({"prompt": "x", "kv_transfer_params": {"handoff_id": "h1"}}).encode()


class Engine:
    """An application that answers what it is told to, in chunks."""

    def __init__(self, status: int, kind: str, *chunks: bytes) -> None:
        self.status, self.kind, self.chunks = status, kind, chunks
        self.heard = b""

    async def __call__(self, scope: Message, receive: Receive, send: Send) -> None:
        more = True
        while more:
            message = await receive()
            self.heard += message.get("body", b"")
            more = message.get("more_body", False)
        length = sum(len(chunk) for chunk in self.chunks)
        headers = [(b"content-type", self.kind.encode()), (b"content-length", b"%d" % length)]
        await send({"type": "http.response.start", "status": self.status, "headers": headers})
        for number, chunk in enumerate(self.chunks, 1):
            more = number < len(self.chunks)
            await send({"type": "http.response.body", "body": chunk, "more_body": more})


class Asked:
    """Knows one fate, and who was asked for which."""

    def __init__(self, fate: HandoffFailure | None = FATE) -> None:
        self.fate, self.calls = fate, list[tuple[ConnectorSettings, str]]()

    def __call__(self, settings: ConnectorSettings, handoff_id: str) -> HandoffFailure | None:
        self.calls.append((settings, handoff_id))
        return self.fate


def post(
    engine: Engine, ask: Any, *body: bytes, app: object = None, method: str = "POST"
) -> tuple[int, dict[bytes, bytes], bytes]:
    """Post a body in these chunks; return the status, headers and body that the client hears."""
    chunks = list(body)
    sent: list[Message] = []

    async def receive() -> Message:
        chunk = chunks.pop(0)
        return {"type": "http.request", "body": chunk, "more_body": bool(chunks)}

    async def send(message: Message) -> None:
        sent.append(message)

    scope = {"type": "http", "method": method, "path": "/v1/completions", "app": app}
    asyncio.run(_call(FailureReasons(engine, ask), scope, receive, send))
    assert [one["type"] for one in sent[:2]] == ["http.response.start", "http.response.body"]
    assert not sent[-1].get("more_body", False)
    whole = b"".join(one["body"] for one in sent[1:])
    return sent[0]["status"], dict(sent[0]["headers"]), whole


async def _call(middleware: Any, *arguments: Any) -> None:
    await middleware(*arguments)


def test_the_reason_is_in_the_answer() -> None:
    text = json.dumps(ERROR).encode()
    engine, ask = Engine(500, "application/json", text[:10], text[10:]), Asked()
    status, headers, body = post(engine, ask, NAMED[:7], NAMED[7:])
    assert engine.heard == NAMED
    assert ask.calls == [(ConnectorSettings(), "h1")]
    assert status == 500
    assert int(headers[b"content-length"]) == len(body)
    error = json.loads(body)["error"]
    assert error["message"] == (
        "no state was handed over: NOT_PUBLISHED: D's request timed out: nobody published it"
    )
    assert (error["type"], error["code"]) == ("InternalServerError", 500)
    assert error["handoff"] == {
        "handoff_id": "h1",
        "state": "EXPIRED",
        "reason": "NOT_PUBLISHED",
        "detail": FATE.detail,
    }


def test_a_stream_that_breaks_says_why() -> None:
    first = b'data: {"choices": []}\n\n'
    failed = b"data: " + json.dumps(ERROR).encode() + b"\n\ndata: [DONE]\n\n"
    engine = Engine(200, "text/event-stream; charset=utf-8", first, failed)
    _, _, body = post(engine, Asked(), NAMED)
    lines = body.decode().split("\n\n")
    assert lines[0] == 'data: {"choices": []}'
    assert "NOT_PUBLISHED" in json.loads(lines[1].removeprefix("data: "))["error"]["message"]
    assert lines[2:] == ["data: [DONE]", ""]


@pytest.mark.parametrize(
    ("engine", "fate", "request_body"),
    [
        (Engine(200, "application/json", b'{"ok": 1}'), FATE, NAMED),
        (Engine(400, "application/json", json.dumps(ERROR).encode()), FATE, NAMED),
        (Engine(500, "application/json", json.dumps(ERROR).encode()), None, NAMED),
        (Engine(500, "application/json", json.dumps(ERROR).encode()), FATE, b'{"prompt": "x"}'),
        (Engine(500, "application/json", json.dumps(ERROR).encode()), FATE, b"no json"),
        (Engine(500, "application/json", json.dumps(ERROR).encode()), FATE, b'{"kv_transfer_par'),
        (Engine(500, "application/json", b"no json"), FATE, NAMED),
        (Engine(500, "application/json", b'["error"]'), FATE, NAMED),
        (Engine(500, "text/plain", json.dumps(ERROR).encode()), FATE, NAMED),
    ],
    ids=[
        "no error",
        "the client's own fault",
        "the handoff went well",
        "no handoff",
        "a body that is no JSON",
        "half a body",
        "an answer that is no JSON",
        "an answer without an error",
        "an answer in text",
    ],
)
def test_other_answers_stay_as_they_are(
    engine: Engine, fate: HandoffFailure | None, request_body: bytes
) -> None:
    status, _, body = post(engine, Asked(fate), request_body)
    assert (status, body) == (engine.status, b"".join(engine.chunks))


def test_the_broker_is_the_connectors_and_so_is_what_is_shown_to_it() -> None:
    extra = {"broker": "10.0.0.7:7350", "tls_ca": "/tls/ca.pem", "token_file": "/tls/token"}
    config = SimpleNamespace(kv_connector_extra_config=extra)
    args = SimpleNamespace(kv_transfer_config=config)
    ask = Asked()
    engine = Engine(500, "application/json", json.dumps(ERROR).encode())
    post(engine, ask, NAMED, app=SimpleNamespace(state=SimpleNamespace(args=args)))
    assert ask.calls == [(ConnectorSettings.of(extra), "h1")]
    shown = ask.calls[0][0].credentials()
    assert (shown.tls_ca, shown.token_file) == (Path("/tls/ca.pem"), Path("/tls/token"))


def of_role(kv_role: str) -> SimpleNamespace:
    """Return an application like vLLM's, started with a role."""
    config = SimpleNamespace(kv_connector_extra_config={}, kv_role=kv_role)
    args = SimpleNamespace(kv_transfer_config=config)
    return SimpleNamespace(state=SimpleNamespace(args=args))


@pytest.mark.parametrize(
    ("kv_role", "said", "words"),
    [
        ("kv_consumer", {"handoff_id": 7}, "handoff_id is 7"),
        ("kv_consumer", {"do_remote_prefill": True}, "without handoff_id"),
        ("kv_producer", {"do_remote_prefill": True, "remote_block_ids": [1]}, "without handoff_id"),
        ("kv_both", {"handoff_id": "h"}, "both P and D"),
        ("kv_producer", {"do_remote_decode": True, "choices": -1}, "choices is -1"),
    ],
)
def test_parameters_that_are_no_use_reach_no_engine(
    kv_role: str, said: dict[str, Any], words: str
) -> None:
    engine = Engine(200, "application/json", b"{}")
    body = json.dumps({"prompt": "x", "kv_transfer_params": said}).encode()
    status, headers, answer = post(engine, Asked(), body[:9], body[9:], app=of_role(kv_role))
    assert (status, engine.heard) == (400, b"")
    assert int(headers[b"content-length"]) == len(answer)
    error = json.loads(answer)["error"]
    assert (error["param"], error["code"]) == ("kv_transfer_params", 400)
    assert error["message"].startswith("PARAMETERS_INVALID: ")
    assert words in error["message"]


def test_what_no_handoff_can_be_had_for_is_refused() -> None:
    engine = Engine(200, "application/json", b"{}")
    made_by_p = {"kv_transfer_params": {"do_remote_decode": True}}
    named = {"kv_transfer_params": {"do_remote_decode": True, "handoff_id": "h"}}
    for more, status in (
        ({"prompt": ["x", "y"], **made_by_p}, 400),
        ({"prompt": [[1], [2, 3]], **made_by_p}, 400),
        ({"prompt": "x", "use_beam_search": True, **named}, 400),
        ({"prompt": ["x", "y"], **named}, 200),
        ({"prompt": ["x"], **made_by_p}, 200),
        ({"prompt": [1, 2], **made_by_p}, 200),
        ({"prompt": "x", "n": 3, **made_by_p}, 200),
        ({"prompt": ["x", "y"], "use_beam_search": True}, 200),
    ):
        body = json.dumps(more).encode()
        assert post(engine, Asked(None), body, app=of_role("kv_producer"))[0] == status, more


def test_of_many_handoffs_the_one_that_failed_is_told() -> None:
    asked = []

    def ask(settings: ConnectorSettings, handoff_id: str) -> HandoffFailure | None:
        asked.append(handoff_id)
        return FATE if handoff_id == "h/prompt1" else None

    body = {"prompt": ["x", "y"], "n": 2, "kv_transfer_params": {"handoff_id": "h"}}
    engine = Engine(500, "application/json", json.dumps(ERROR).encode())
    _, _, answer = post(engine, ask, json.dumps(body).encode(), app=of_role("kv_consumer"))
    assert asked == ["h", "h/choice1", "h/prompt1"]
    assert "NOT_PUBLISHED" in json.loads(answer)["error"]["message"]
    asked.clear()
    body |= {"n": 1_000_000}
    post(
        engine, lambda s, h: asked.append(h), json.dumps(body).encode(), app=of_role("kv_consumer")
    )
    assert len(asked) == 16


async def test_a_real_broker_is_asked() -> None:
    """Check state and reason of handoffs that a broker tells of; None: the handoff went well."""
    others = {"attention": [21, 22, 23], "state": [24]}
    wanted = {
        "left": ("CANCELLED", "CANCELLED"),
        "well": None,
        "nowhere": ("UNKNOWN", "HANDOFF_UNKNOWN"),
        "twice": ("DONE", "HANDOFF_CONFLICT"),
        "early": ("CANCELLED", "HANDOFF_CONFLICT"),
        "shared": ("DONE", "HANDOFF_CONFLICT"),
        "elsewhere": ("READY", "POSITION_MISMATCH"),
        "misplaced": ("FAILED", "POSITION_MISMATCH"),
        "other": ("WAITING", "CONTENT_MISMATCH"),
    }
    async with broker() as running, pair(running.address) as both:

        async def publish(handoff_id: str, readers: int = 0) -> None:
            both.p.publish(handoff_id, P_BLOCKS, POSITION, readers=readers)
            for agent in both.p_agents:
                await agent.fence(handoff_id)

        async def ask(handoff_id: str) -> HandoffFailure | None:
            settings = ConnectorSettings(broker=running.address)
            return await asyncio.to_thread(ask_broker, settings, handoff_id)

        for name in ("early", "left"):
            ended = both.d.request(name, D_BLOCKS)
            both.d.cancel(name, "the client left")
            await ended
        await both.hand_over("well")
        await both.hand_over("twice")
        await publish("shared", readers=2)
        await both.d.request("shared", D_BLOCKS, readers=2)
        for name in ("twice", "early", "shared"):
            with pytest.raises(BrokerCallError):
                await both.d.request(name, others)
        await publish("misplaced", readers=2)
        await both.d.request("misplaced", D_BLOCKS, position_tokens=POSITION - 1, readers=2)
        await publish("elsewhere")
        await both.d.request("elsewhere", D_BLOCKS, position_tokens=POSITION - 1)
        both.p.publish("other", P_BLOCKS, POSITION, content=b"p" * 32)
        await heard(running, "other")
        with pytest.raises(BrokerCallError):
            await both.d.request("other", D_BLOCKS, position_tokens=POSITION, content=b"d" * 32)
        fates = {name: await ask(name) for name in wanted}
        await both.d.decline("other")
        declined = await ask("other")
    assert {n: one and (one.state, one.reason) for n, one in fates.items()} == wanted
    details = {name: one.detail for name, one in fates.items() if one is not None}
    assert details["elsewhere"].startswith("P's state is at position ")
    assert "the client left" in details["left"]
    assert declined is not None
    assert declined.reason == "CONTENT_MISMATCH"
    gone = await ask("early")
    assert gone is not None
    assert (gone.state, gone.reason) == ("UNKNOWN", "BROKER_UNREACHABLE")
