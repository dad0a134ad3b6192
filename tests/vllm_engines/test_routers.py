"""Routers before vLLM's own servers: the answer is that of one engine alone.

P samples the first token and D goes on behind it: texts and tokens, streamed and not, with all that
a request may ask for. Routers that were made for vLLM's own connectors drive P and D unchanged. A D
that is told to end leaves no client without an answer.
"""

from __future__ import annotations

import asyncio
import json
import subprocess
import time
from collections.abc import AsyncIterator, Mapping
from contextlib import AsyncExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import pytest_asyncio
from aiohttp import ClientSession, ClientTimeout

from restow.broker.client import AsyncAdminClient
from restow.broker.server.base.settings import BrokerSettings
from restow.broker.server.serve import running_broker
from restow.v1 import admin_pb2, broker_pb2
from vllm_harness.answers import rounded, said
from vllm_harness.byte_tokenizer import VOCABULARY_SIZE, ids_of, make_byte_tokenizer
from vllm_harness.checkpoints import write_checkpoint
from vllm_harness.house import GRANT_S, drawn
from vllm_harness.hybrid_checkpoints import HYBRIDS
from vllm_harness.served import Server, other_router, router, vllm_servers

pytestmark = pytest.mark.timeout(900)
PROMPT = "Who has what? "
STEPS = 12
HALVES = ids_of(bytes([0xC3, 0xC4, *range(0xA0, 0xB0)]))
"""First and second bytes of letters with accents."""


OUTSIDE = """
from concurrent.futures import Future
from types import SimpleNamespace
from restow.agents.engines.vllm.scheduler.engine_core import SampledTokens

sampled = SampledTokens(SimpleNamespace(), vocabulary_tokens=100)
handed_on = []
sampled._hand_on = lambda request, token: handed_on.append(token)
for name, token in (("last", 99), ("outside", 100)):
    delivery = SimpleNamespace(sampled=Future())
    sampled.wait(SimpleNamespace(request_id=name), delivery)
    delivery.sampled.set_result(token)
sampled.take()
print(handed_on, sampled.lacks("last"), sampled.lacks("outside"))
"""


@dataclass(frozen=True)
class Served:
    """A router before P and D, D for those that ask it alone, and another D for the last test."""

    router: str
    p: str
    alone: str
    another_d: Server
    admin: AsyncAdminClient
    http: ClientSession


@pytest_asyncio.fixture(scope="module", loop_scope="session")
async def served(vllm_python: Path, tmp_path_factory: Any) -> AsyncIterator[Served]:
    """Serve a hybrid model whose tokens are bytes."""
    folder = tmp_path_factory.mktemp("served")
    hybrid = HYBRIDS["falcon_h1"]
    model = write_checkpoint(lambda: hybrid.make(vocab_size=VOCABULARY_SIZE), folder / "model")
    make_byte_tokenizer().save_pretrained(model)
    settings = BrokerSettings(listen="127.0.0.1:0", grant_s=GRANT_S)
    async with AsyncExitStack() as stack:
        broker = (await stack.enter_async_context(running_broker(settings))).address
        names = ("p0", "d0", "d1")
        servers = vllm_servers(vllm_python, model, names, broker, folder, prefix="off")
        p, d, another_d = await stack.enter_async_context(servers)
        base = await stack.enter_async_context(
            router(broker, [f"p0={p.url}"], [f"d0={d.url}"], folder / "router.log", find_ms=0)
        )
        http = await stack.enter_async_context(ClientSession(timeout=ClientTimeout(None)))
        admin = await stack.enter_async_context(AsyncAdminClient(broker))
        yield Served(base, p.url, d.url, another_d, admin, http)


async def last_handoff(admin: AsyncAdminClient) -> admin_pb2.HandoffInfo:
    return max((await admin.handoffs()).handoffs, key=lambda one: one.number)


async def compare(
    served: Served, body: Mapping[str, Any], *, by_p: bool, chat: bool = False
) -> None:
    """Check that the routed answer is D's alone; ``by_p``: P has sampled its first token."""
    path = "/v1/chat/completions" if chat else "/v1/completions"
    ask = {"messages": [{"role": "user", "content": PROMPT}]} if chat else {"prompt": PROMPT}
    told = {"max_tokens": STEPS, **ask, **body}
    for stream in (False, True):
        asked = {**told, "stream": stream}
        expected = await said(served.http, served.alone, path, asked)
        found = await said(served.http, served.router, path, asked)
        assert found == rounded(expected)
        handoff = await last_handoff(served.admin)
        prompt_tokens = expected["usage"]["prompt_tokens"]
        assert handoff.position_tokens == prompt_tokens - (not by_p)


BY_P: dict[str, dict[str, Any]] = {
    "plain": {},
    "two tokens": {"max_tokens": 2},
    "characters that two tokens make": {"allowed_token_ids": HALVES, "max_tokens": 24},
    "a token that is not to be said": {"logit_bias": {str(ids_of(b"a")[0]): 100.0}},
    "said again is less likely": {"repetition_penalty": 1.3},
    "stop strings that do not come": {"stop": ["no such text"]},
    "a seed that draws nothing": {"seed": 7},
}
BY_D: dict[str, dict[str, Any]] = {
    "a seed": {"seed": 7, "temperature": 1.0},
    "presence": {"presence_penalty": 0.7},
    "frequency": {"frequency_penalty": 0.7},
    "bad words": {"bad_words": ["ab", "b"]},
    "a least length": {"min_tokens": 3},
    "probabilities": {"logprobs": 2},
    "two answers": {"n": 2, "seed": 7, "temperature": 1.0},
    "by a pattern": {"structured_outputs": {"regex": "[a-f]{3,9}"}},
}


@pytest.mark.parametrize("name", BY_P)
async def test_p_samples_the_first_token(served: Served, name: str) -> None:
    await compare(served, BY_P[name], by_p=True)


@pytest.mark.parametrize("name", BY_D)
async def test_d_samples_it_where_it_must(served: Served, name: str) -> None:
    await compare(served, BY_D[name], by_p=False)


async def test_a_chat(served: Served) -> None:
    await compare(served, {}, by_p=True, chat=True)
    await compare(served, {"logprobs": True, "top_logprobs": 2}, by_p=False, chat=True)


async def test_many_at_once(served: Served) -> None:
    # A character may break between the first and the second token, because each token is a byte.
    bodies = [
        {"prompt": f"{PROMPT}{number}", "max_tokens": STEPS, "allowed_token_ids": HALVES}
        for number in range(24)
    ]
    path = "/v1/completions"
    expected = [await said(served.http, served.alone, path, one) for one in bodies]
    for stream in (False, True):
        asked = ({**one, "stream": stream} for one in bodies)
        found = await asyncio.gather(
            *(said(served.http, served.router, path, one) for one in asked)
        )
        for one, other in zip(found, expected, strict=True):
            assert {**one["choices"][0], "logprobs": None} == other["choices"][0]
    firsts = [one["choices"][0]["ids"][0] for one in expected]
    assert set(firsts) & set(HALVES[:2])


@pytest.mark.parametrize("count", [1, 2, 3])
async def test_it_ends_where_the_first_tokens_end_it(served: Served, count: int) -> None:
    """Check ends by the count, by a token and by a text, at the first token too."""
    body = {"prompt": PROMPT, "max_tokens": STEPS, "allowed_token_ids": ids_of(b"abcdefgh")}
    answer = await said(served.http, served.alone, "/v1/completions", body)
    ids, text = answer["choices"][0]["ids"], answer["choices"][0]["text"]
    more = {key: body[key] for key in ("allowed_token_ids",)}
    await compare(served, {**more, "max_tokens": count}, by_p=True)
    await compare(served, {**more, "stop_token_ids": [ids[count - 1]]}, by_p=True)
    await compare(served, {**more, "stop": [text[:count]]}, by_p=True)
    await compare(
        served, {**more, "stop": [text[:count]], "include_stop_str_in_output": True}, by_p=True
    )


async def test_the_first_token_is_the_end_of_all(served: Served) -> None:
    # P's token may be the token that ends every text.
    await compare(served, {"allowed_token_ids": [2]}, by_p=True)


def test_a_token_outside_of_the_models_vocabulary_is_not_taken(vllm_python: Path) -> None:
    """Check that the load then counts as failed, and that D's client hears no token of P's."""
    done = subprocess.run(
        [vllm_python, "-c", OUTSIDE], capture_output=True, text=True, check=True, timeout=300
    )
    assert done.stdout.splitlines()[-1] == "[99] False True"


PROMPTS = (
    "Who has what? ",
    "The first of four prompts, and ",
    "Another one: ",
    "It is not known whether ",
)


@pytest.mark.parametrize("name", ["vllm-router", "smg"])
async def test_other_routers_ask_p_and_then_d(served: Served, tmp_path: Path, name: str) -> None:
    known = (await last_handoff(served.admin)).number
    async with other_router(name, served.p, served.alone, tmp_path / name) as base:
        for prompt in PROMPTS:  # not every router takes a prompt of token ids, or tells any
            body = {"prompt": prompt, "max_tokens": STEPS}
            found = await text_of(served.http, base, body)
            assert found == await text_of(served.http, served.alone, body)
    ended = [one for one in (await served.admin.handoffs()).handoffs if one.number > known]
    sides = [(one.state, one.source_engine, one.destination_engine) for one in ended]
    assert sides == [(broker_pb2.HANDOFF_STATE_DONE, "p0", "d0")] * len(PROMPTS)


async def text_of(http: ClientSession, base: str, body: Mapping[str, Any]) -> str:
    asked = {"model": "model", "temperature": 0.0, **body}
    async with http.post(f"{base}/v1/completions", json=asked) as response:
        answer = await response.json()
        assert response.ok, answer
    text: str = answer["choices"][0]["text"]
    return text


REQUESTS, AT_ONCE, TOKENS = 48, 8, 24
SILENCE_S, HEARS_S = 20.0, 40.0
"""The router gives up a silent engine after the first, and no client hears nothing for the second.

vLLM's server may keep a request whose engine core has ended when the server was told to end."""


async def heard(http: ClientSession, base: str, seed: int) -> str:
    """Ask, and return what came: "all", or "error". Fail for anything in between."""
    sent = {"model": "model", "temperature": 0.0, "ignore_eos": True, "stream": bool(seed % 2)}
    sent |= {"prompt": drawn(40, seed), "max_tokens": TOKENS}
    async with http.post(base + "/v1/completions", json=sent) as response:
        text = await response.text()
        if response.status != 200:
            assert json.loads(text)["error"], text
            return "error"
        if not sent["stream"]:
            answer = json.loads(text)
            assert answer["choices"][0]["finish_reason"] == "length", text
            assert answer["usage"]["completion_tokens"] == TOKENS, text
            return "all"
    events = [line[6:] for line in text.splitlines() if line.startswith("data: ")]
    if events[-1] != "[DONE]":
        assert json.loads(events[-1])["error"], text
        return "error"
    assert json.loads(events[-2])["choices"][0]["finish_reason"] == "length", text
    return "all"


async def test_nobody_hears_nothing_when_a_d_is_told_to_end(served: Served, tmp_path: Path) -> None:
    some, waited_s, begun = asyncio.Semaphore(AT_ONCE), [], asyncio.Event()
    decode = [served.alone, served.another_d.url]
    log = tmp_path / "router.log"
    async with router("", [served.p], decode, log, find_ms=0, silence_s=SILENCE_S) as base:

        async def one(seed: int) -> str:
            async with some:
                began_s = time.monotonic()
                found = await heard(served.http, base, seed)
                waited_s.append(time.monotonic() - began_s)
                if len(waited_s) >= AT_ONCE:
                    begun.set()
                return found

        asked = [asyncio.create_task(one(seed)) for seed in range(REQUESTS)]
        await begun.wait()
        served.another_d.terminate()
        found = await asyncio.gather(*asked)
        assert found.count("all") >= REQUESTS - AT_ONCE
        assert max(waited_s) < HEARS_S
