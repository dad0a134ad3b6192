"""A reply that is being decoded moves to an engine of another TP, layout and block size."""

from __future__ import annotations

import asyncio
import json
from contextlib import AsyncExitStack
from dataclasses import replace
from pathlib import Path
from typing import Any
from uuid import uuid4

import pytest
from aiohttp import ClientSession, ClientTimeout

from restow.agents.engines.vllm.scheduler.moves import MOVED_REASON
from restow.broker.client import AsyncAdminClient, chain_of
from restow.broker.core.common.keys import State
from restow.broker.server.base.settings import BrokerSettings
from restow.broker.server.serve import running_broker
from restow.broker.state_commands import Outcome, Verb
from restow.demo.recall.task import decode as words_of
from vllm_harness.engine import Options
from vllm_harness.house import GRANT_S, MODEL, SOON_S, TELL, both_sides, drawn, vllm_house
from vllm_harness.served import router, vllm_servers

pytestmark = pytest.mark.timeout(600)
STEPS = 40


def text_of(choice: dict[str, Any]) -> str:
    """Return the text of a choice, of a chat or a completion."""
    place = choice.get("delta") or choice.get("message") or {"content": choice.get("text")}
    return place.get("content") or ""


async def test_replies_leave_an_engine_that_drains_and_go_on_from_their_last_token(
    vllm_python: Path, tmp_path: Path
) -> None:
    one = Options(MODEL, prefix_caching=True, extra=TELL)
    wanted = both_sides(one=one, other=replace(one, tp=2, conv_layout="DS"))
    prompts = [drawn(40 + number, number) for number in range(4)]
    async with (
        vllm_house(vllm_python, tmp_path, wanted) as house,
        AsyncAdminClient(house.broker.address) as admin,
    ):
        right = [await house.alone("one", ids, STEPS) for ids in prompts]
        begun = house["one"].ask(prompts[0], STEPS, params={"movable": True})
        first = asyncio.create_task(begun)
        named, outcome = chain_of(prompts[0]).prefix(32), Outcome.MISSING
        while outcome is Outcome.MISSING and not first.done():  # it comes to the engine first
            given = uuid4().hex, Verb.MOVE, named, "one"
            outcome = (await admin.command(*given, wait_s=10.0)).outcome
        assert (outcome, (await first).stop_reason) == (Outcome.DONE, MOVED_REASON)
        before = house.ended
        replies = [
            asyncio.create_task(house["one"].ask(ids, STEPS, params={"movable": True}))
            for ids in prompts
        ]
        await asyncio.sleep(0.15)
        await admin.drain_engine("one")
        parts = [await reply for reply in replies]
        moved = [part for part in parts if part.stop_reason == MOVED_REASON]
        assert moved, "all replies had ended before the engine was drained"
        for ids, part, whole in zip(prompts, parts, right, strict=True):
            said = list(part.tokens)
            assert said == list(whole.tokens[: len(said)])
            if part.stop_reason != MOVED_REASON:
                assert len(said) == STEPS
                continue
            rest = STEPS - len(said)
            more = await house["other"].ask([*ids, *said], rest, params={"moved": True})
            assert (more.error, more.cached) == ("", len(ids) + len(said) - 1)
            assert [*said, *more.tokens] == list(whole.tokens)
        assert (house.ended - before)[State.DONE] == len(moved)


STREAMS, TOKENS = 8, 70
AS_IT_STANDS = ("--chat-template", "{{ messages[0].content }}")


async def test_clients_of_a_router_see_one_reply_while_it_moves(
    vllm_python: Path, tmp_path: Path
) -> None:
    settings = BrokerSettings(listen="127.0.0.1:0", grant_s=GRANT_S)
    prompts = [drawn(30 + number, number) for number in range(STREAMS)]
    async with AsyncExitStack() as stack:
        broker = (await stack.enter_async_context(running_broker(settings))).address
        names = ("p0", "d0", "d1", "d2")
        p, *d = await stack.enter_async_context(
            vllm_servers(vllm_python, MODEL, names, broker, tmp_path, *AS_IT_STANDS)
        )
        log = tmp_path / "router.log"
        decode = [f"{name}={one.url}" for name, one in zip(names[1:], d, strict=True)]
        base = await stack.enter_async_context(
            router(broker, [f"p0={p.url}"], decode, log, find_ms=0)
        )
        http = await stack.enter_async_context(ClientSession(timeout=ClientTimeout(None)))
        admin = await stack.enter_async_context(AsyncAdminClient(broker))
        begun = asyncio.Semaphore(0)

        async def heard(url: str, ids: list[int], stream: bool, chat: bool) -> dict[str, Any]:
            """Return the text, its end and the counts of a reply."""
            asked: dict[str, Any] = {"model": "model", "max_tokens": TOKENS, "temperature": 0.0}
            asked |= {"ignore_eos": True, "stream": stream}
            asked |= {"stream_options": {"include_usage": True}} if stream else {}
            said = {"messages": [{"role": "user", "content": words_of(ids)}]}
            asked |= said if chat else {"prompt": ids}
            path = "/v1/chat/completions" if chat else "/v1/completions"
            parts: list[dict[str, Any]] = []
            async with http.post(url + path, json=asked) as response:
                async for line in response.content:
                    words = line.removeprefix(b"data: ").strip()
                    if words and words != b"[DONE]":
                        parts.append(json.loads(words))
                        begun.release()
            choices = [choice for part in parts for choice in part["choices"]]
            (usage,) = [part["usage"] for part in parts if part.get("usage")]
            counts = usage["prompt_tokens"], usage["completion_tokens"], usage["total_tokens"]
            ends = [one["finish_reason"] for one in choices if one["finish_reason"]]
            return {
                "text": "".join(map(text_of, choices)),
                "ends": ends,
                "counts": counts,
                "ids": len({part["id"] for part in parts}),
            }

        chats = [number % 4 in (1, 2) for number in range(STREAMS)]
        right = [
            await heard(p.url, ids, stream=False, chat=chat)
            for ids, chat in zip(prompts, chats, strict=True)
        ]
        while not begun.locked():
            await begun.acquire()
        # One engine does not answer, and is killed later: others go on with what was sent to it.
        d[2].stop()
        asked = [
            asyncio.create_task(heard(base, ids, number % 4 > 1, chat))
            for number, (ids, chat) in enumerate(zip(prompts, chats, strict=True))
        ]
        for _ in range(STREAMS):
            await begun.acquire()
        await admin.drain_engine("d0")
        async with asyncio.timeout(SOON_S):
            while "a reply moves" not in log.read_text():  # noqa: ASYNC110 - no event tells
                await asyncio.sleep(0.1)
        await asyncio.sleep(1.0)
        d[2].kill()
        replies = await asyncio.gather(*asked)
        assert replies == right
        assert "an engine failed" in log.read_text()
