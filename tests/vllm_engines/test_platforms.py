"""Platforms that drive P and D themselves: Dynamo's own module, and llm-d's flow.

Dynamo says by a module of its own what P and D are asked for. llm-d's sidecar, which KServe uses
too, asks P and then D; `vllm_harness.llm_d_sidecar` stands in for it.
"""

from __future__ import annotations

import asyncio
import json
import subprocess
from collections.abc import AsyncIterator
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
from restow.v1 import broker_pb2
from vllm_harness.answers import rounded, said
from vllm_harness.byte_tokenizer import VOCABULARY_SIZE, make_byte_tokenizer
from vllm_harness.checkpoints import write_checkpoint
from vllm_harness.engine import kill_group
from vllm_harness.house import GRANT_S
from vllm_harness.hybrid_checkpoints import HYBRIDS
from vllm_harness.llm_d_sidecar import RETRIES, Sidecar
from vllm_harness.served import Server, others_folder, vllm_servers

pytestmark = pytest.mark.timeout(900)
STEPS, ENDS_S = 12, 60.0
COMPLETIONS, CHATS = "/v1/completions", "/v1/chat/completions"
DONE, FAILED = broker_pb2.HANDOFF_STATE_DONE, broker_pb2.HANDOFF_STATE_FAILED
CANCELLED = broker_pb2.HANDOFF_STATE_CANCELLED
ENDED = (DONE, FAILED, CANCELLED, broker_pb2.HANDOFF_STATE_EXPIRED)
RESTOW = {"kv_connector": "RestowConnector", "kv_role": "kv_both"}
SHARED = {"kv_connector": "ExampleConnector", "kv_role": "kv_both"}
CONNECTORS: dict[str, dict[str, Any]] = {
    "alone": RESTOW,
    "under MultiConnector": {
        "kv_connector": "MultiConnector",
        "kv_role": "kv_both",
        "kv_connector_extra_config": {"connectors": [RESTOW, SHARED]},
    },
}
DYNAMO = """
import json, sys
from types import SimpleNamespace
from vllm.config import KVTransferConfig
from vllm.plugins import load_general_plugins
load_general_plugins()
from dynamo.vllm.kv_connector_protocols import make_kv_connector_protocol

transfer, answer = json.loads(sys.argv[1]), json.loads(sys.argv[2])
config = SimpleNamespace(kv_transfer_config=KVTransferConfig(**transfer))
protocol = make_kv_connector_protocol(config)
of_p = protocol.prefill_request_kv_transfer_params()
of_d = protocol.decode_request_kv_transfer_params(SimpleNamespace(kv_transfer_params=answer))
print(json.dumps([of_p, of_d]))
"""


@dataclass(frozen=True)
class Served:
    """P, another P that may end, and D."""

    p: str
    another_p: Server
    d: str
    admin: AsyncAdminClient
    http: ClientSession

    async def alone(self, path: str, body: dict[str, Any]) -> dict[str, Any]:
        """Return the answer of D alone."""
        return await said(self.http, self.d, path, body)

    async def ends_after(self, number: int, count: int) -> list[tuple[int, str, str]]:
        """Wait until ``count`` handoffs after that number have ended; return their ends."""
        async with asyncio.timeout(ENDS_S):
            while True:
                known = (await self.admin.handoffs()).handoffs
                ended = [one for one in known if one.number > number and one.state in ENDED]
                if len(ended) >= count:
                    found = sorted(ended, key=lambda one: one.number)
                    return [(one.state, one.source_engine, one.destination_engine) for one in found]
                await asyncio.sleep(0.05)

    async def last(self) -> int:
        """Return the number of the last handoff."""
        return max((one.number for one in (await self.admin.handoffs()).handoffs), default=0)


@pytest_asyncio.fixture(scope="module", loop_scope="session")
async def served(vllm_python: Path, tmp_path_factory: Any) -> AsyncIterator[Served]:
    """Serve a hybrid model whose tokens are bytes."""
    folder = tmp_path_factory.mktemp("platforms")
    hybrid = HYBRIDS["falcon_h1"]
    model = write_checkpoint(lambda: hybrid.make(vocab_size=VOCABULARY_SIZE), folder / "model")
    make_byte_tokenizer().save_pretrained(model)
    settings = BrokerSettings(listen="127.0.0.1:0", grant_s=GRANT_S)
    async with AsyncExitStack() as stack:
        broker = (await stack.enter_async_context(running_broker(settings))).address
        names = ("p0", "p1", "d0")
        servers = vllm_servers(vllm_python, model, names, broker, folder, prefix="off")
        p, another_p, d = await stack.enter_async_context(servers)
        http = await stack.enter_async_context(ClientSession(timeout=ClientTimeout(None)))
        admin = await stack.enter_async_context(AsyncAdminClient(broker))
        yield Served(p.url, another_p, d.url, admin, http)


@pytest.mark.parametrize("name", CONNECTORS)
async def test_dynamo_asks_p_and_then_d(served: Served, vllm_python: Path, name: str) -> None:
    folder = await others_folder() / "dynamo"

    def dynamo(answer: Any) -> Any:
        command = [str(vllm_python), "-c", DYNAMO, json.dumps(CONNECTORS[name]), json.dumps(answer)]
        environment = {"PYTHONPATH": str(folder)}
        done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=300)
        assert done.returncode == 0, done.stderr
        return json.loads(done.stdout.splitlines()[-1])

    known = await served.last()
    body = {"model": "model", "temperature": 0.0, "prompt": f"Dynamo, {name}: "}
    of_p, _ = await asyncio.to_thread(dynamo, None)
    asked = {**body, "max_tokens": 1, "kv_transfer_params": of_p}
    async with served.http.post(served.p + COMPLETIONS, json=asked) as response:
        answer = await response.json()
    _, of_d = await asyncio.to_thread(dynamo, answer["kv_transfer_params"])
    body |= {"max_tokens": STEPS}
    found = await said(served.http, served.d, COMPLETIONS, {**body, "kv_transfer_params": of_d})
    assert found == rounded(await served.alone(COMPLETIONS, body))
    assert await served.ends_after(known, 1) == [(DONE, "p0", "d0")]


@pytest.mark.parametrize("parallel", [False, True], ids=["P and then D", "both at once"])
@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("path", [COMPLETIONS, CHATS])
async def test_llm_d_asks(served: Served, path: str, stream: bool, parallel: bool) -> None:
    words = f"llm-d, {path}, {stream}, {parallel}: "
    ask = {"messages": [{"role": "user", "content": words}]} if path == CHATS else {"prompt": words}
    body = {**ask, "max_tokens": STEPS, "stream": stream}
    known = await served.last()
    async with Sidecar(served.p, served.d, parallel=parallel).serving() as sidecar:
        found = await said(served.http, sidecar.url, path, body)
    assert found == rounded(await served.alone(path, body))
    assert await served.ends_after(known, 1) == [(DONE, "p0", "d0")]


@pytest.mark.parametrize("parallel", [False, True], ids=["P and then D", "both at once"])
async def test_an_error_of_p_is_the_clients_answer(served: Served, parallel: bool) -> None:
    known = await served.last()
    body = {"model": "model", "prompt": "a" * 100_000, "max_tokens": STEPS}
    async with (
        Sidecar(served.p, served.d, parallel=parallel).serving() as sidecar,
        served.http.post(sidecar.url + COMPLETIONS, json=body) as response,
    ):
        assert response.status == 400
        assert "maximum" in (await response.json())["error"]["message"]
    # D, which was asked at once, refuses as P does, and tells the broker that it will not read.
    states = {one.state for one in (await served.admin.handoffs()).handoffs if one.number > known}
    assert states <= ({CANCELLED} if parallel else set())


async def test_p_is_asked_again_when_its_answer_was_lost(served: Served) -> None:
    """The state of the first attempt is never asked for; P holds it until its lease ends."""
    body = {"prompt": "Twice the same: ", "max_tokens": STEPS}
    known = await served.last()
    async with Sidecar(served.p, served.d, lost_answers=RETRIES).serving() as sidecar:
        found = await said(served.http, sidecar.url, COMPLETIONS, body)
    assert found == rounded(await served.alone(COMPLETIONS, body))
    assert await served.ends_after(known, 1) == [(DONE, "p0", "d0")]
    waiting = [one for one in (await served.admin.handoffs()).handoffs if one.number > known]
    assert len(waiting) == 1 + RETRIES


async def test_d_computes_itself_when_p_dies_after_its_answer(served: Served) -> None:
    """This is the last test with another P: nothing listens at its port afterwards."""
    body = {"prompt": "P dies behind this: ", "max_tokens": STEPS}
    known = await served.last()

    async def kill() -> None:
        kill_group(served.another_p.pid)

    async with Sidecar(served.another_p.url, served.d, before_decode=kill).serving() as sidecar:
        found = await said(served.http, sidecar.url, COMPLETIONS, body)
        assert found == rounded(await served.alone(COMPLETIONS, body))
        ((state, source, _),) = await served.ends_after(known, 1)
        assert (state, source) == (FAILED, "p1")
        asked = {"model": "model", **body}
        async with served.http.post(sidecar.url + COMPLETIONS, json=asked) as response:
            assert response.status == 502
        sidecar.parallel, known = True, await served.last()
        async with served.http.post(sidecar.url + COMPLETIONS, json=asked) as response:
            assert response.status == 502
        assert await served.ends_after(known, 1) == [(CANCELLED, "", "d0")]
