"""A reply goes on at another engine when its engine leaves, and its client sees one reply.

The prompt of a chat is the same tokens as that of a completion: an engine tells them, and takes
them with the tokens of a reply in place of the messages.
"""

from __future__ import annotations

import json
from typing import Any

import pytest
from aiohttp import web

from restow.broker.router.bodies import MOVED
from router.fake_engine import DONE, Answer, FakeEngine, House, fails, house, says, streams, well

PROMPT = [1, 2, 3]
REPLY = list(range(10, 18))


def computes_on(stop_after: int | None = None, last: str = "length") -> Answer:
    """Answer with the tokens of `REPLY` behind a prompt, and leave after ``stop_after`` of them."""

    async def answer(engine: FakeEngine, request: web.Request) -> web.StreamResponse:
        body = engine.bodies[-1]
        prompt = prompt_of(body)
        said = len(prompt) - len(PROMPT)
        wanted = body["max_tokens"] if stop_after is None else min(stop_after, body["max_tokens"])
        tokens = REPLY[said : said + wanted]
        moves = wanted < body["max_tokens"]
        usage = {"prompt_tokens": len(prompt), "completion_tokens": len(tokens)}
        ends: dict[str, Any] = {"finish_reason": "length" if moves else last}
        ends["stop_reason"] = MOVED if moves else None
        name: dict[str, Any] = {"id": f"cmpl {engine.url}", "created": len(prompt)}
        ids: dict[str, Any] = {"prompt_token_ids": prompt}
        of_chat = {}
        if "messages" in body:
            of_chat, ids = ids, {}
        if not body.get("stream"):
            choice = {"token_ids": tokens, **ids, **ends}
            choice |= {"message": saying(tokens)} if of_chat else {"text": text(tokens)}
            whole = {**name, **of_chat, "choices": [choice], "usage": usage}
            return await says(whole)(engine, request)
        events: list[Any] = [
            {
                **name,
                "choices": [
                    {"token_ids": [one], **ids}
                    | ({"delta": {"content": text([one])}} if of_chat else {"text": text([one])})
                ],
            }
            for one in tokens
        ]
        if of_chat:
            events.insert(0, {**name, **of_chat, "choices": [{"delta": saying([])}]})
        events[-1]["choices"][0] |= ends
        return await streams(*events, {**name, "choices": [], "usage": usage}, DONE)(
            engine, request
        )

    return answer


def prompt_of(body: dict[str, Any]) -> list[int]:
    """Return the tokens of a request's prompt."""
    if "messages" in body:
        return list(body["kv_transfer_params"].get("prompt_token_ids", PROMPT))
    return list(body["prompt"])


def saying(tokens: list[int]) -> dict[str, Any]:
    """Return a message of a chat."""
    return {"role": "assistant", "content": text(tokens)}


def in_order(one: House) -> None:
    """Have the router ask the first engine first, and then the next."""
    for index, engine in enumerate(one.routed_d):
        engine.in_flight = 10 * index


def text(tokens: list[int]) -> str:
    return "".join(f" {one}" for one in tokens)


COMPLETION, CHAT = "/v1/completions", "/v1/chat/completions"


def asked(stream: bool, path: str = COMPLETION, **more: Any) -> dict[str, Any]:
    prompt: dict[str, Any] = {"prompt": PROMPT}
    if path == CHAT:
        prompt = {"messages": [{"role": "user", "content": "one two three"}]}
    return {**prompt, "max_tokens": len(REPLY), "stream": stream, **more}


def words_of(choice: dict[str, Any]) -> str:
    """Return the text of a choice in an answer or an event."""
    place = choice.get("delta") or choice.get("message") or {"content": choice.get("text")}
    return str(place["content"])


async def answered(
    one: House, stream: bool, path: str = COMPLETION, **more: Any
) -> tuple[str, list[Any]]:
    """Ask the router; return the whole text, and the events or the answer."""
    async with one.http.post(one.url + path, json=asked(stream, path, **more)) as response:
        assert response.status == 200, await response.text()
        if not stream:
            whole = await response.json()
            return words_of(whole["choices"][0]), [whole]
        lines = (await response.text()).splitlines()
    said = [line.removeprefix("data: ") for line in lines if line.startswith("data: ")]
    events = [one if one == DONE else json.loads(one) for one in said]
    choices = [choice for event in events if event != DONE for choice in event.get("choices", ())]
    return "".join(map(words_of, choices)), events


@pytest.mark.parametrize("path", [COMPLETION, CHAT])
@pytest.mark.parametrize("stream", [True, False])
@pytest.mark.parametrize("leaves", [(3,), (1,), (7,), (3, 2)])
async def test_a_reply_that_moves_is_one_reply(
    stream: bool, leaves: tuple[int, ...], path: str
) -> None:
    engines = [computes_on(after) for after in leaves]
    async with house([well], [*engines, computes_on()]) as one:
        in_order(one)
        words, events = await answered(one, stream, path)
        assert words == text(REPLY)
        last = events[-2] if stream else events[-1]
        assert last["usage"] == {
            "prompt_tokens": len(PROMPT),
            "completion_tokens": len(REPLY),
            "total_tokens": len(PROMPT) + len(REPLY),
        }
        whole = json.dumps(events)
        assert MOVED not in whole
        assert "token_ids" not in whole
        assert len({event["id"] for event in events if event != DONE}) == 1
        assert whole.count('"length"') == 1
        assert whole.count('"role"') == (path == CHAT)
        assert (events[-1] == DONE) == stream
        begun = 0
        for engine, after in zip(one.d, (*leaves, None), strict=True):
            (body,) = engine.bodies
            assert prompt_of(body) == [*PROMPT, *REPLY[:begun]]
            assert body["max_tokens"] == len(REPLY) - begun
            assert body["kv_transfer_params"].get("moved") == (True if begun else None)
            begun += after or 0


async def test_an_engine_that_begins_a_reply_anew_is_not_believed() -> None:
    whole = computes_on()

    async def begins_anew(engine: FakeEngine, request: web.Request) -> web.StreamResponse:
        engine.bodies[-1]["kv_transfer_params"].pop("prompt_token_ids", None)
        engine.bodies[-1]["max_tokens"] = len(REPLY)
        return await whole(engine, request)

    async with house([well], [computes_on(3), begins_anew, computes_on()]) as one:
        in_order(one)
        assert (await answered(one, True, CHAT))[0] == text(REPLY)
        assert [len(engine.bodies) for engine in one.d] == [1, 1, 1]


async def test_a_failure_of_the_next_engine_is_not_the_clients() -> None:
    async with house([well], [computes_on(3), fails(500), computes_on()]) as one:
        in_order(one)
        words, _ = await answered(one, True)
        assert words == text(REPLY)
        assert [len(engine.bodies) for engine in one.d] == [1, 1, 1]


async def test_the_engine_that_was_to_leave_goes_on_if_no_other_can() -> None:
    async with house([well], [computes_on(3), fails(500)]) as one:
        in_order(one)
        assert (await answered(one, True))[0] == text(REPLY)
        assert [len(engine.bodies) for engine in one.d] == [3, 1]


async def test_a_stream_ends_with_an_error_if_no_engine_goes_on() -> None:
    leaves, broken = computes_on(3), fails(500)

    async def breaks_later(engine: FakeEngine, request: web.Request) -> web.StreamResponse:
        return await (leaves if len(engine.bodies) == 1 else broken)(engine, request)

    async with house([well], [breaks_later, fails(500)]) as one:
        in_order(one)
        words, events = await answered(one, True)
        assert words == text(REPLY[:3])
        assert "error" in events[-1]


OTHERS: list[tuple[str, dict[str, Any]]] = [
    (COMPLETION, {"n": 2}),
    (COMPLETION, {"logprobs": 1}),
    (COMPLETION, {"echo": True}),
    (COMPLETION, {"prompt": [["a"]]}),
    (CHAT, {"tools": [{"type": "function"}]}),
    (CHAT, {"messages": [{"role": "user", "content": [{"type": "image_url"}]}]}),
    (CHAT, {"messages": "a"}),
]


async def test_what_another_engine_can_not_go_on_with_stays() -> None:
    for path, more in OTHERS:
        async with house([well], [computes_on(), computes_on()]) as one:
            async with one.http.post(one.url + path, json=asked(True, path, **more)) as response:
                await response.read()
            bodies = [body for engine in one.d for body in engine.bodies]
            assert bodies
            assert not any("movable" in body.get("kv_transfer_params", {}) for body in bodies)


@pytest.mark.parametrize("path", [COMPLETION, CHAT])
@pytest.mark.parametrize("stream", [True, False])
async def test_a_client_that_wants_token_ids_gets_them(stream: bool, path: str) -> None:
    async with house([well], [computes_on(3), computes_on()]) as one:
        in_order(one)
        _, events = await answered(one, stream, path, return_token_ids=True)
        events = [event for event in events if event != DONE]
        choices = [choice for event in events for choice in event["choices"]]
        assert [token for choice in choices for token in choice.get("token_ids", ())] == REPLY
        places = choices if path == COMPLETION else events[:1]
        assert all(place["prompt_token_ids"] == PROMPT for place in places)
