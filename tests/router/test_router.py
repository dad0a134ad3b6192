"""What the router tells engines and clients, and what it does when engines fail."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import pytest
from aiohttp import ClientSession, web

from agent_harness.waiting import until
from restow.broker.router.bodies import (
    MAX_CHOICES,
    ONE_TOKEN,
    decode_body,
    needs_whole_prompt,
    prefill_body,
)
from router.fake_engine import (
    END,
    EVENTS,
    FATE,
    FakeEngine,
    breaks,
    events,
    house,
    never,
    says,
    well,
)

TRACE = "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"


@pytest.mark.parametrize("path", ONE_TOKEN)
async def test_both_are_told_one_handoff_and_d_what_the_client_said(path: str) -> None:
    asked = {"prompt": "who?", "n": 3, "min_tokens": 4, "max_tokens": 9, "logprobs": 1, "seed": 5}
    async with house([well], [well]) as one:
        status, body = await one.ask(asked, path)
        assert (status, body) == (200, {"base": one.d[0].base, "path": path})
        (told_p,), (told_d,) = one.p[0].bodies, one.d[0].bodies
    id_ = told_d.pop("kv_transfer_params")["handoff_id"]
    assert told_d == asked
    params = {"do_remote_decode": True, "handoff_id": id_, "choices": 3}
    rest = {**ONE_TOKEN[path], "stream": False, "kv_transfer_params": params}
    assert told_p == {"prompt": "who?", "max_tokens": 9, "seed": 5} | rest


async def test_an_empty_request_is_handed_over_too() -> None:
    async with house([well], [well]) as one:
        assert (await one.ask({}))[0] == 200
        assert one.d[0].ids == one.p[0].ids


def test_p_is_told_nothing_that_contradicts_one_token() -> None:
    body = {"prompt": "x", "stream": True, "stream_options": {"include_usage": True}, "echo": True}
    told = prefill_body("/v1/completions", {**body, "min_tokens": 7, "n": 2.5}, "h")
    params = {"do_remote_decode": True, "handoff_id": "h"}
    assert told == {"prompt": "x", "max_tokens": 1, "stream": False, "kv_transfer_params": params}


@pytest.mark.parametrize(
    ("more", "by_p"),
    [
        ({}, True),
        ({"stream": True, "logprobs": False, "n": 1, "min_tokens": 0, "seed": 5}, True),
        *(({key: 2}, False) for key in ("n", "best_of", "min_tokens", "logprobs", "top_logprobs")),
        ({"logprobs": 0}, False),
        ({"logprobs": True}, False),
    ],
)
def test_both_are_asked_alike_for_the_first_token(more: dict[str, Any], by_p: bool) -> None:
    body = {"prompt": "x", **more}
    for told in (prefill_body("/v1/completions", body, "h"), decode_body(body, "h")):
        assert told["kv_transfer_params"].get("sampled_token", False) == by_p


@pytest.mark.parametrize(
    "more",
    [
        {"prompt_logprobs": 0},
        {"echo": True, "logprobs": 0},
        {"use_beam_search": True},
        {"previous_response_id": "r"},
        {"background": True},
        {"n": MAX_CHOICES + 1},
    ],
)
async def test_what_needs_the_whole_prompt_is_d_s_alone(more: dict[str, Any]) -> None:
    assert not needs_whole_prompt({"echo": True, "logprobs": None, "prompt_logprobs": None})
    assert not needs_whole_prompt({"n": MAX_CHOICES})
    async with house([well], [well]) as one:
        assert (await one.ask({"prompt": "x", **more, "kv_transfer_params": {}}))[0] == 200
        assert one.p[0].bodies == []
        assert one.d[0].bodies == [{"prompt": "x", **more}]


async def test_headers_go_on_to_both_and_the_request_s_id_comes_back() -> None:
    sent = {"Authorization": "Bearer k", "traceparent": TRACE, "X-Request-Id": "r1"}
    async with house([well], [well]) as one:
        url = one.router + "/v1/completions"
        async with one.http.post(url, json={}, headers=sent) as response:
            assert response.headers["X-Request-Id"] == "r1"
        async with one.http.post(url, json={}) as response:
            made = response.headers["X-Request-Id"]
        for engine in (one.p[0], one.d[0]):
            first, second = engine.headers
            assert {key: first[key.lower()] for key in sent} == sent
            assert second["x-request-id"] == made
            assert first["host"] == engine.base.removeprefix("http://")


async def test_models_health_and_errors_of_the_router_s_own() -> None:
    async with house([well], [well]) as one:
        async with one.http.get(one.router + "/v1/models") as response:
            assert await response.json() == {"base": one.d[0].base, "path": "/v1/models"}
        assert (await one.health())[0] == 200
        one.p[0].healthy = False
        await one.sees(one.p[0])
        said = {"prefill": {one.p[0].base: False}, "decode": {one.d[0].base: True}}
        assert await one.health() == (503, said)
        for words, status in ((b"{", 400), (b"[]", 400), (b"\xff", 400)):
            url = one.router + "/v1/completions"
            async with one.http.post(url, data=words) as response:
                error = (await response.json())["error"]
                assert (response.status, error["code"]) == (status, status)
                assert error["type"] == "invalid_request_error"
        for path, status in (("/v1/nothing", 404), ("/v1/models", 405)):
            found = await one.ask(path=path)
            assert (found[0], found[1]["error"]["code"]) == (status, status)


async def test_a_body_of_some_megabytes_is_taken_and_one_that_is_too_large_is_told() -> None:
    async with house([well], [well]) as one:
        assert (await one.ask({"prompt": "x" * (3 << 20)}))[0] == 200
        found = await one.ask({"prompt": "x" * (4 << 20)})
        assert (found[0], found[1]["error"]["code"]) == (413, 413)


async def test_the_two_sides_do_not_go_in_step() -> None:
    async with house([well, well], [well, well]) as one:
        for _ in range(40):
            assert (await one.ask())[0] == 200
        pairs = {(p.base, d.base) for p in one.p for d in one.d if set(p.ids) & set(d.ids)}
        assert len(pairs) == 4


async def test_the_one_with_less_under_way_is_asked() -> None:
    async with house([well], [never, well]) as one:
        waiting = [asyncio.create_task(one.ask()) for _ in range(2)]
        await until(one.d[0].came.is_set)
        for _ in range(10):
            await asyncio.wait_for(one.ask(), 10)
        assert len(one.d[0].bodies) == 1
        for task in waiting:
            task.cancel()


@pytest.mark.parametrize("failure", [breaks, says(500), says(503)], ids=["gone", "500", "503"])
async def test_a_p_that_fails_costs_no_request_and_is_left_alone(failure: Any) -> None:
    async with house([failure, well], [well]) as one:
        # D of a handoff that has no P waits; its answer is taken for none.
        waits = one.d[0]
        waits.answer = with_state_of(one.p[1])
        for _ in range(12):
            assert (await asyncio.wait_for(one.ask(), 10))[0] == 200
        assert len(one.p[0].bodies) == 1
        assert len(set(waits.ids)) == len(waits.ids), "a used id was used again"
        assert set(one.p[0].ids).isdisjoint(one.p[1].ids)


async def with_state_or_alone(engine: FakeEngine, request: web.Request) -> web.StreamResponse:
    """A D that computes what it is not to wait for; of handoffs P's first fails, which it knows."""
    waits = "kv_transfer_params" in engine.bodies[-1] and len(engine.bodies) == 1
    return await (never if waits else well)(engine, request)


async def test_with_all_p_gone_d_computes_by_itself() -> None:
    """In the request that finds out, and in those after it."""
    async with house([breaks, says(503)], [with_state_of_none]) as one:
        for _ in range(4):
            assert (await asyncio.wait_for(one.ask(), 10))[0] == 200
        assert [len(p.bodies) for p in one.p] == [1, 1]
        assert one.d[0].bodies[2:] == [{"prompt": "who?"}] * 4


async def with_state_of_none(engine: FakeEngine, request: web.Request) -> web.StreamResponse:
    """A D that waits for a state which does not come, and else computes."""
    waits = "kv_transfer_params" in engine.bodies[-1]
    return await (never if waits else well)(engine, request)


def with_state_of(p: FakeEngine) -> Any:
    """A D that answers where that P was asked for the handoff, and else waits."""

    async def answer(engine: FakeEngine, request: web.Request) -> web.StreamResponse:
        handoff_id = engine.ids[-1]
        await until(lambda: handoff_id in p.ids)
        return await well(engine, request)

    return answer


async def test_a_p_that_was_left_alone_is_asked_again() -> None:
    async with house([says(500)], [with_state_or_alone], aside_s=0.0) as one:
        assert (await one.ask())[0] == 200
        one.p[0].answer = well
        assert (await one.ask())[0] == 200
        assert len(one.p[0].bodies) == 2


async def test_an_engine_that_is_not_well_is_not_asked() -> None:
    async with house([well, well], [well]) as one:
        one.p[0].healthy = False

        await one.sees(one.p[0])
        for _ in range(12):
            assert (await one.ask())[0] == 200
        assert one.p[0].bodies == []


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(
    "failure", [breaks, says(500), says(500, FATE)], ids=["gone", "500", "fate"]
)
async def test_a_d_that_fails_before_its_first_byte(failure: Any, stream: bool) -> None:
    """Another one decodes, from a new prefill under a new id."""
    async with house([well, well], [failure, well]) as one:
        for _ in range(20):
            url = one.router + "/v1/completions"
            async with one.http.post(url, json={"stream": stream}) as response:
                assert response.status == 200
                whole = await response.read()
            assert whole == b"".join((*EVENTS, END)) if stream else b"base" in whole
            if one.d[0].bodies:
                break
        assert one.d[0].bodies
        assert set(one.d[0].ids).isdisjoint(one.d[1].ids)
        asked = {id_ for p in one.p for id_ in p.ids}
        assert set(one.d[1].ids) <= asked <= {*one.d[0].ids, *one.d[1].ids}


async def test_a_stream_that_begins_with_an_error_is_none() -> None:
    async def answer(engine: FakeEngine, request: web.Request) -> web.StreamResponse:
        out = web.StreamResponse(headers={"Content-Type": "text/event-stream"})
        await out.prepare(request)
        await out.write(b'data: {"error": {"message": "no state", "code": 500}}\n\n')
        await out.write(END)
        return out

    async with house([well], [answer]) as one:
        status, body = await one.ask({"stream": True})
        assert (status, body["error"]["message"]) == (502, "no state")
        assert len(one.d[0].ids) == 1, "nobody else is there to ask"
        one.d[0].answer = well
        async with one.http.post(one.router + "/v1/completions", json={"stream": True}) as response:
            assert await response.read() == b"".join((*EVENTS, END))


async def test_a_stream_that_breaks_ends_with_an_error() -> None:
    async def answer(engine: FakeEngine, request: web.Request) -> web.StreamResponse:
        return await events(request, b"")

    async with house([well], [answer]) as one:
        url = one.router + "/v1/completions"
        async with one.http.post(url, json={"stream": True}) as response:
            lines = [line for line in (await response.read()).split(b"\n") if line]
    assert [line + b"\n\n" for line in lines[:-1]] == EVENTS
    error = json.loads(lines[-1].removeprefix(b"data: "))["error"]
    assert (error["type"], error["code"]) == ("engine_failed", 502)
    assert "ClientPayloadError" in error["message"]


async def test_where_nobody_answers_the_client_is_told() -> None:
    async with house([breaks], [breaks, breaks]) as one:
        status, body = await asyncio.wait_for(one.ask(), 10)
        assert status == 502
        assert (body["error"]["type"], body["error"]["code"]) == ("engine_failed", 502)
        assert any(d.base in body["error"]["message"] for d in one.d)


@pytest.mark.parametrize("refuses", ["p", "d"])
async def test_what_the_client_did_wrong_is_told_once(refuses: str) -> None:
    p, d = (says(400), never) if refuses == "p" else (never, says(400))
    async with house([p], [d]) as one:
        assert await one.ask() == (400, {"error": {"message": "from 400"}})
        await until((one.d if refuses == "p" else one.p)[0].left.is_set)
        assert [len(engine.bodies) for engine in (*one.p, *one.d)] == [1, 1]


async def test_a_d_that_got_no_state_is_not_to_blame_and_the_p_that_gave_none_is() -> None:
    async with house([never, well], [says(500, FATE)]) as one:
        one.d[0].answer = with_fate_of(one.p)
        for _ in range(12):
            assert (await one.ask())[0] == 200
        assert len(one.p[0].bodies) <= 1


async def test_a_p_whose_publications_are_refused_is_left_alone() -> None:
    """As those of one that drains are: it answers well, and D gets nothing."""
    fate = {"message": "no state", "handoff": {"reason": "PUBLICATION_REFUSED", "detail": ""}}
    async with house([well, well], [well]) as one:
        one.d[0].answer = with_fate_of(one.p, fate)
        for _ in range(12):
            assert (await one.ask())[0] == 200
        assert len(one.p[0].bodies) <= 1


def with_fate_of(ps: list[FakeEngine], fate: dict[str, Any] = FATE) -> Any:
    """A D that says that no state came, where the first P was asked for it."""

    async def answer(engine: FakeEngine, request: web.Request) -> web.StreamResponse:
        handoff_id = engine.ids[-1]
        await until(lambda: any(handoff_id in p.ids for p in ps))
        return await (says(500, fate) if handoff_id in ps[0].ids else well)(engine, request)

    return answer


async def test_a_client_that_leaves_takes_its_requests_with_it() -> None:
    async with house([never], [never]) as one:
        async with ClientSession() as http:
            task = asyncio.create_task(http.post(one.router + "/v1/completions", json={}))
            await until(lambda: one.p[0].came.is_set() and one.d[0].came.is_set())
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)
        await until(lambda: one.p[0].left.is_set() and one.d[0].left.is_set())
