"""What the router takes for an answer, and what it tells the client of it."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import pytest
from aiohttp import web

from router.fake_engine import Answer, FakeEngine, House, house, streams, well

COMPLETIONS, CHAT, RESPONSES = "/v1/completions", "/v1/chat/completions", "/v1/responses"
DONE = "[DONE]"
BEFORE: dict[str, list[Any]] = {
    COMPLETIONS: [{"choices": [{"text": "", "finish_reason": None}]}],
    CHAT: [{"choices": [{"delta": {"role": "assistant", "content": ""}, "finish_reason": None}]}],
    RESPONSES: [
        {"type": "response.created", "response": {"status": "in_progress", "usage": None}},
        {"type": "response.in_progress", "response": {"status": "in_progress", "usage": None}},
    ],
}
"""What vLLM says in a stream before its first token."""
TOKEN: dict[str, Any] = {
    COMPLETIONS: {"choices": [{"text": "stone", "finish_reason": None}]},
    CHAT: {"choices": [{"delta": {"content": "stone"}, "finish_reason": None}]},
    RESPONSES: {"type": "response.output_text.delta", "delta": "stone"},
}


def usage(path: str, cached: int | None, generated: int = 1) -> dict[str, Any]:
    """A usage in which so many tokens of the prompt were cached."""
    side = "input" if path == RESPONSES else "prompt"
    said = "output" if path == RESPONSES else "completion"
    details = None if cached is None else {"cached_tokens": cached}
    return {f"{side}_tokens": 9, f"{said}_tokens": generated, f"{side}_tokens_details": details}


def last(path: str, cached: int | None = 8) -> list[Any]:
    """How a stream ends, with the usage of it."""
    if path != RESPONSES:
        ends = {**TOKEN[path]["choices"][0], "text": "", "delta": {}, "finish_reason": "stop"}
        return [{"choices": [ends]}, {"choices": [], "usage": usage(path, cached)}, DONE]
    response = {"status": "completed", "usage": usage(path, cached)}
    return [{"type": "response.completed", "response": response}]


def aborted(path: str) -> list[Any]:
    """How vLLM ends a stream when it is told to end itself."""
    if path != RESPONSES:
        return [{"choices": [{"text": "", "delta": {}, "finish_reason": "abort"}]}, DONE]
    response = {"status": "completed", "output": [], "usage": usage(path, 0, generated=0)}
    return [{"type": "response.completed", "response": response}]


def whole(path: str, cached: int | None = 8, reason: str = "stop") -> dict[str, Any]:
    """An answer that is not streamed."""
    if path == RESPONSES:
        generated = 0 if reason == "abort" else 1
        return {
            "object": "response",
            "status": "completed",
            "usage": usage(path, cached, generated),
        }
    return {"choices": [{"text": "", "finish_reason": reason}], "usage": usage(path, cached)}


def gives(body: Any) -> Answer:
    async def answer(engine: FakeEngine, request: web.Request) -> web.StreamResponse:
        return web.json_response(body)

    return answer


async def streamed(one: House, path: str) -> list[Any]:
    """The data of a stream's events."""
    async with one.http.post(one.router + path, json={"stream": True}) as response:
        assert response.status == 200, await response.text()
        text = (await response.read()).decode()
    said = [line.removeprefix("data: ") for line in text.splitlines() if line.startswith("data: ")]
    return [words if words == DONE else json.loads(words) for words in said]


@pytest.mark.parametrize("path", [COMPLETIONS, CHAT, RESPONSES])
async def test_p_is_let_compute_until_d_has_said_a_token(path: str) -> None:
    waits, computed = asyncio.Event(), asyncio.Event()

    async def compute(engine: FakeEngine, request: web.Request) -> web.StreamResponse:
        await waits.wait()
        for _ in range(5):  # looks at the router's health: it has had turns to cancel this
            await one.health()
        computed.set()
        return await well(engine, request)

    async def decode(engine: FakeEngine, request: web.Request) -> web.StreamResponse:
        out = web.StreamResponse(headers={"Content-Type": "text/event-stream"})
        await out.prepare(request)
        for event in BEFORE[path]:
            await out.write(f"data: {json.dumps(event)}\n\n".encode())
        waits.set()
        await computed.wait()
        for event in (TOKEN[path], *last(path)):
            words = event if event == DONE else json.dumps(event)
            await out.write(f"data: {words}\n\n".encode())
        return out

    async with house([compute], [decode]) as one:
        found = await asyncio.wait_for(streamed(one, path), 10)
    assert TOKEN[path] in found
    assert found[: len(BEFORE[path])] == BEFORE[path]


@pytest.mark.parametrize("path", [COMPLETIONS, CHAT, RESPONSES])
@pytest.mark.parametrize("ends", ["aborted", "silently", "by an error", "done"])
async def test_a_stream_without_a_token_is_asked_of_another_d(path: str, ends: str) -> None:
    failing = {
        "aborted": aborted(path),
        "silently": [],
        "by an error": [{"error": {"message": "no state"}}, DONE],
        "done": [DONE],
    }[ends]
    answers = [streams(*BEFORE[path], *failing), streams(TOKEN[path], *last(path))]
    async with house([well], answers, aside_s=0.0) as one:
        while not one.d[0].bodies:
            found = await asyncio.wait_for(streamed(one, path), 10)
            assert found[0] == TOKEN[path]
            assert found[-1] == DONE or found[-1]["type"] == "response.completed"


@pytest.mark.parametrize("path", [COMPLETIONS, CHAT, RESPONSES])
async def test_an_aborted_answer_is_none_though_it_says_200(path: str) -> None:
    answers = [gives(whole(path, reason="abort")), gives(whole(path, None))]
    async with house([well], answers, aside_s=0.0) as one:
        while not one.d[0].bodies:
            assert await one.ask({}, path) == (200, whole(path, None))


@pytest.mark.parametrize("path", [COMPLETIONS, CHAT])
async def test_an_abort_after_a_token_is_told_as_an_error(path: str) -> None:
    async with house([well], [streams(TOKEN[path], *aborted(path))]) as one:
        found = await streamed(one, path)
        assert found[0] == TOKEN[path]
        assert found[1]["error"]["type"] == "engine_failed"
        assert len(found) == 2


@pytest.mark.parametrize("path", [COMPLETIONS, CHAT, RESPONSES])
async def test_a_stream_that_stops_in_its_midst_is_told_as_an_error(path: str) -> None:
    async with house([well], [streams(*BEFORE[path], TOKEN[path])]) as one:
        found = await streamed(one, path)
        assert found[:-1] == [*BEFORE[path], TOKEN[path]]
        assert found[-1]["error"]["type"] == "engine_failed"


async def test_an_engine_s_own_error_event_is_handed_on() -> None:
    error = {"error": {"message": "no state", "handoff": {"reason": "AGENT_LOST"}}}
    async with house([well], [streams(TOKEN[CHAT], error, DONE)]) as one:
        assert await streamed(one, CHAT) == [TOKEN[CHAT], error]


@pytest.mark.parametrize("path", [COMPLETIONS, CHAT, RESPONSES])
@pytest.mark.parametrize("of_p", [None, 3])
async def test_the_client_is_told_what_p_had_cached(path: str, of_p: int | None) -> None:
    """To D all is cached that P computed."""
    p, d = gives(whole(path, of_p)), gives(whole(path, 8))
    async with house([p], [d]) as one:
        assert await one.ask({}, path) == (200, whole(path, of_p))
        one.d[0].answer = streams(TOKEN[path], *last(path, 8))
        assert await streamed(one, path) == [TOKEN[path], *last(path, of_p)]


@pytest.mark.parametrize("path", [COMPLETIONS, CHAT, RESPONSES])
async def test_d_alone_says_itself_what_it_had_cached(path: str) -> None:
    async with house([well], [gives(whole(path, 8))]) as one:
        assert await one.ask({"prompt_logprobs": 0}, path) == (200, whole(path, 8))
        assert not one.p[0].bodies
