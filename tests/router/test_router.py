"""What the router tells engines and clients, and what it does when engines fail."""

from __future__ import annotations

import asyncio
import json
import zlib
from typing import Any

import pytest
from aiohttp import ClientSession, web

from agent_harness.waiting import until
from forked.ports import free_port
from restow.broker.router.bodies import ONE_TOKEN
from restow.broker.router.routing import MAX_BODY_BYTES
from router.fake_engine import (
    COMPLETIONS,
    DONE,
    END,
    NO_STATE,
    RESPONSES,
    TOKEN,
    Answer,
    FakeEngine,
    breaks,
    computes,
    fails,
    fake_engine,
    house,
    never,
    says,
    streams,
    well,
)

SOON_S = 20
EARLY: dict[str, Any] = {"type": "response.created", "response": {"usage": None}}
"""Said by D at once, before its first token."""


@pytest.mark.parametrize("path", ONE_TOKEN)
async def test_both_are_asked_at_once_for_one_handoff(path: str) -> None:
    async with house([never], [well]) as one:
        for body in ({"prompt": "who?", "seed": 5}, {}):
            found = await one.ask(body, path)
            assert found == (200, {"url": one.d[0].url, "path": path})
            assert one.d[0].bodies[-1].items() >= body.items()
        assert one.d[0].ids == one.p[0].ids
        assert len(set(one.p[0].ids)) == 2


async def test_a_d_that_needs_the_whole_prompt_is_asked_alone() -> None:
    async with house([well], [well]) as one:
        assert (await one.ask({"prompt_logprobs": 0, "kv_transfer_params": {}}))[0] == 200
        assert (one.p[0].bodies, one.d[0].bodies) == ([], [{"prompt_logprobs": 0}])


async def test_few_headers_go_on_and_none_comes_back() -> None:
    async def bakes(engine: FakeEngine, request: web.Request) -> web.StreamResponse:
        more = {"Set-Cookie": "session=mine", "X-Internal": "1"}
        return web.json_response({}, headers=more)

    passed = {"authorization": "Bearer k", "traceparent": "00-0af7-b7ad-01", "x-request-id": "r1"}
    others = {
        "Cookie": "a=b",
        "Proxy-Authorization": "x",
        "X-Secret": "y",
        "Connection": "X-Secret",
    }
    # By name: aiohttp keeps no cookies of an IP address.
    async with fake_engine(bakes) as d:
        by_name = d.url.replace("127.0.0.1", "localhost")
        async with house([bakes], [], more_d=(by_name,)) as one:
            for _ in range(2):
                async with one.http.post(
                    one.url + COMPLETIONS, json={}, headers={**passed, **others}
                ) as response:
                    assert response.status == 200
                    assert not {"Set-Cookie", "X-Internal"} & set(response.headers)
            for headers in (*one.p[0].headers, *d.headers):
                assert headers.items() >= passed.items()
                assert not {"cookie", "proxy-authorization", "x-secret"} & set(headers)
                assert headers["host"].startswith(("127.0.0.1:", "localhost:"))


async def test_models_and_health_are_those_of_a_d() -> None:
    gone = f"http://127.0.0.1:{free_port()}"
    async with house([well], [well], more_d=(gone,)) as one:
        for path in ("/v1/models", "/health"):
            for _ in range(4):
                async with one.http.get(one.url + path) as response:
                    assert await response.json() == {"url": one.d[0].url, "path": path}
        assert not one.p[0].bodies
    async with house([well], [], more_d=(gone,)) as one, one.http.get(one.url + "/health") as told:
        assert (told.status, gone in await told.text()) == (502, True)


async def test_what_the_client_does_wrong_is_told_as_json() -> None:
    deep = b"[" * 100_000
    cases: list[tuple[str, bytes, dict[str, str], int]] = [
        *((COMPLETIONS, words, {}, 400) for words in (b"{", b"[]", b"\xff", b"1" * 5000, deep)),
        (COMPLETIONS, b"{}", {"Content-Type": "text/plain"}, 415),
        (COMPLETIONS, b" " * (MAX_BODY_BYTES + 1), {}, 413),
        (COMPLETIONS, zlib.compress(b" " * (1 << 28)), {"Content-Encoding": "deflate"}, 413),
        ("/v1/nothing", b"{}", {}, 404),
        ("/v1/models", b"{}", {}, 405),
        (COMPLETIONS, b"{}", {"Host": "page.example"}, 421),
    ]
    async with house([well], [well]) as one:
        for path, words, more, status in cases:
            headers = {"Content-Type": "application/json", **more}
            async with one.http.post(one.url + path, data=words, headers=headers) as response:
                error = (await response.json())["error"]
                assert (response.status, error["code"]) == (status, status), (words[:20], more)
                assert error["type"] == "invalid_request_error"
                assert error["message"]
        assert not one.p[0].bodies
        for host in ("localhost:1", "[::1]"):
            assert (await one.ask(Host=host))[0] == 200
        # As deep as can be read: what can't be written again is the client's fault, too.
        for depth in range(900, 1000, 3):
            words = b'{"a":' * depth + b"1" + b"}" * depth
            headers = {"Content-Type": "application/json"}
            async with one.http.post(one.url + COMPLETIONS, data=words, headers=headers) as told:
                assert told.status in (200, 400), await told.text()


async def test_equals_are_drawn_by_lot_on_each_side() -> None:
    async with house([well, well], [well, well]) as one:
        for _ in range(40):
            assert (await one.ask())[0] == 200
        pairs = {(p.url, d.url) for p in one.p for d in one.d if set(p.ids) & set(d.ids)}
        assert len(pairs) == 4


async def test_the_engine_with_less_in_flight_is_asked() -> None:
    async with house([well], [never, well]) as one:
        waiting = [asyncio.create_task(one.ask()) for _ in range(2)]
        await until(one.d[0].came.is_set)
        for _ in range(10):
            await asyncio.wait_for(one.ask(), SOON_S)
        assert len(one.d[0].bodies) == 1
        for task in waiting:
            task.cancel()
        await asyncio.gather(*waiting, return_exceptions=True)


def with_state_of(p: FakeEngine) -> Answer:
    """Answer as a D that waits until P was asked for the same handoff."""

    async def answer(engine: FakeEngine, request: web.Request) -> web.StreamResponse:
        handoff_id = engine.ids[-1]
        await until(lambda: handoff_id in p.ids)
        return await well(engine, request)

    return answer


@pytest.mark.parametrize("failure", ["gone", "500", "error"])
async def test_a_p_that_fails_costs_no_request_and_comes_last(failure: str) -> None:
    failing = {"gone": breaks, "500": fails(500), "error": says(NO_STATE)}[failure]
    async with house([failing, well], [well]) as one:
        one.d[0].answer = with_state_of(one.p[1])
        for _ in range(12):
            assert (await asyncio.wait_for(one.ask(), SOON_S))[0] == 200
        assert len(one.p[0].bodies) == 1
        assert len(set(one.d[0].ids)) == len(one.d[0].ids), "each attempt is a handoff of its own"
        assert set(one.p[0].ids).isdisjoint(one.p[1].ids)


async def test_with_all_p_gone_d_computes_by_itself() -> None:
    async with house([breaks, fails(503)], [computes]) as one:
        for _ in range(4):
            assert (await asyncio.wait_for(one.ask(), SOON_S))[0] == 200
        assert [len(p.bodies) for p in one.p] == [1, 1]
        assert one.d[0].bodies[2:] == [{"prompt": "who?"}] * 4


ABORT = {"choices": [{"text": "", "finish_reason": "abort"}]}
D_FAILS = {
    "gone": breaks,
    "500": fails(500),
    "aborted": says(ABORT),
    "empty stream": streams(),
    "stream without a token": streams(EARLY),
    "stream of an end": streams(DONE),
    "stream of an error": streams(EARLY, {"error": {"message": "out of memory"}}, DONE),
    "aborted stream": streams(ABORT, DONE),
}


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("failure", D_FAILS)
async def test_another_d_answers_where_one_fails_before_its_first_token(
    failure: str, stream: bool
) -> None:
    async with house([well, well], [D_FAILS[failure], well]) as one:
        while not one.d[0].bodies:
            if stream:
                assert await one.stream() == [TOKEN, END, DONE]
            else:
                assert (await one.ask())[0] == 200
        asked = [body.get("kv_transfer_params") for body in (*one.d[0].bodies, *one.d[1].bodies)]
        ids = [params["handoff_id"] for params in asked if params]
        assert len(set(ids)) == len(ids)


async def test_a_p_that_gave_no_state_comes_last_and_not_the_d_that_says_so() -> None:
    async with house([well, well], [well]) as one:

        async def answer(engine: FakeEngine, request: web.Request) -> web.StreamResponse:
            handoff_id = engine.ids[-1]
            await until(lambda: any(handoff_id in p.ids for p in one.p))
            lost = handoff_id in one.p[0].ids
            return await (says(NO_STATE, 500) if lost else well)(engine, request)

        one.d[0].answer = answer
        for _ in range(12):
            assert (await one.ask())[0] == 200
        assert len(one.p[0].bodies) <= 1


async def test_a_d_that_gets_no_state_computes_the_prompt_in_the_end() -> None:
    async def answer(engine: FakeEngine, request: web.Request) -> web.StreamResponse:
        handed = "kv_transfer_params" in engine.bodies[-1]
        return await (streams(EARLY, NO_STATE, DONE) if handed else well)(engine, request)

    async with house([well, well, well], [answer]) as one:
        assert (await one.ask())[0] == 200
        assert one.d[0].bodies[2:] == [{"prompt": "who?"}]
        assert sorted(len(p.bodies) for p in one.p) == [0, 1, 1]


async def test_where_nobody_answers_the_client_is_told() -> None:
    async with house([breaks], [breaks, breaks]) as one:
        status, body = await asyncio.wait_for(one.ask(), SOON_S)
        assert (status, body["error"]["code"], body["error"]["type"]) == (502, 502, "engine_failed")
        assert any(d.url in body["error"]["message"] for d in one.d)
    async with house([well], [fails(503)]) as one:
        assert await one.ask() == (503, {"error": {"message": "from 503"}})


@pytest.mark.parametrize("refuses", ["p", "d"])
@pytest.mark.parametrize("status", [400, 422])
async def test_what_an_engine_refuses_is_told_once(refuses: str, status: int) -> None:
    p, d = (fails(status), never) if refuses == "p" else (never, fails(status))
    async with house([p], [d]) as one:
        assert await one.ask() == (status, {"error": {"message": f"from {status}"}})
        await until((one.d if refuses == "p" else one.p)[0].left.is_set)
        assert [len(engine.bodies) for engine in (*one.p, *one.d)] == [1, 1]


async def test_an_engine_that_has_too_much_to_do_is_no_reason_to_fail() -> None:
    async with house([fails(429)], [fails(429), computes]) as one:
        for _ in range(8):
            status, body = await one.ask()
            assert (status, body["url"]) == (200, one.d[1].url)
        one.d[1].answer = fails(429)
        assert await one.ask() == (429, {"error": {"message": "from 429"}})


async def test_no_redirect_is_followed() -> None:
    async with fake_engine(well) as third:

        async def sends_on(*_: Any) -> web.StreamResponse:
            return web.Response(status=307, headers={"Location": third.url + COMPLETIONS})

        async with house([sends_on], [sends_on, computes]) as one:
            for _ in range(8):
                status, body = await one.ask(Authorization="Bearer k")
                assert (status, body["url"]) == (200, one.d[1].url)
            one.d[1].answer = sends_on
            assert (await one.ask())[0] == 502
        assert not third.headers


async def test_a_stream_begins_with_the_first_token_and_p_may_compute_until_its_end() -> None:
    go_on, computed = asyncio.Event(), asyncio.Event()

    async def compute(engine: FakeEngine, request: web.Request) -> web.StreamResponse:
        await go_on.wait()
        computed.set()
        return await well(engine, request)

    async def rest(engine: FakeEngine, request: web.Request) -> web.StreamResponse:
        await computed.wait()
        return web.Response()

    event = b"event: response.created\ndata: " + json.dumps(EARLY).encode() + b"\n\n"
    async with (
        house([compute], [streams(EARLY, TOKEN, then=rest)]) as one,
        one.http.post(one.url + RESPONSES, json={"stream": True}) as response,
    ):
        assert await response.content.readexactly(len(event)) == event
        await until(one.p[0].came.is_set)
        assert not one.p[0].left.is_set()
        go_on.set()
        assert b"stone" in await asyncio.wait_for(response.read(), SOON_S)


BREAKS = {
    "ended too early": streams(TOKEN),
    "ClientPayloadError": streams(TOKEN, then=breaks),
    "Timeout": streams(TOKEN, then=never),
    "no state": streams(TOKEN, NO_STATE, DONE),
}


@pytest.mark.parametrize("words", BREAKS)
async def test_a_stream_that_breaks_ends_with_an_error(words: str) -> None:
    async with house([well], [BREAKS[words]], silence_s=1.0) as one:
        token, error = await asyncio.wait_for(one.stream(), SOON_S)
        assert token == TOKEN
        assert words in error["error"]["message"]
        assert error == NO_STATE or error["error"]["type"] == "engine_failed"


@pytest.mark.parametrize("answer", ["never", "stream"])
async def test_a_client_that_leaves_takes_its_requests_with_it(answer: str) -> None:
    d = never if answer == "never" else streams(TOKEN, then=never)
    async with house([never], [d]) as one:

        async def ask() -> None:
            async with http.post(one.url + COMPLETIONS, json={}) as response:
                await response.read()

        async with ClientSession() as http:
            task = asyncio.create_task(ask())
            await until(lambda: one.p[0].came.is_set() and one.d[0].came.is_set())
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)
        await until(lambda: one.p[0].left.is_set() and one.d[0].left.is_set())
