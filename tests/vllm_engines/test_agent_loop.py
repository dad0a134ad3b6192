"""docs/examples/agent_loop.py as it stands, before real engines and a store."""

from __future__ import annotations

import asyncio
import re
import sys
from contextlib import AsyncExitStack
from pathlib import Path

import pytest

from restow.broker.server.base.settings import BrokerSettings
from restow.broker.server.serve import running_broker
from vllm_harness.byte_tokenizer import VOCABULARY_SIZE, make_byte_tokenizer
from vllm_harness.checkpoints import write_checkpoint
from vllm_harness.house import GRANT_S, store
from vllm_harness.hybrid_checkpoints import HYBRIDS
from vllm_harness.served import router, vllm_servers

pytestmark = pytest.mark.timeout(600)
EXAMPLE = Path(__file__).resolve().parents[2] / "docs" / "examples" / "agent_loop.py"
TURNS, FORKS = 6, 2


async def test_an_agent_computes_nothing_again_that_is_pinned(
    vllm_python: Path, tmp_path: Path
) -> None:
    """Check what the agent prints, of a model whose recurrent states stand where marks are."""
    sizes = {"vocab_size": VOCABULARY_SIZE, "max_position_embeddings": 4096}
    model = write_checkpoint(lambda: HYBRIDS["qwen3_next"].make(**sizes), tmp_path / "model")
    make_byte_tokenizer().save_pretrained(model)
    settings = BrokerSettings(listen="127.0.0.1:0", grant_s=GRANT_S)
    async with AsyncExitStack() as stack:
        broker = (await stack.enter_async_context(running_broker(settings))).address
        servers = vllm_servers(
            vllm_python, model, ("p0", "d0"), broker, tmp_path, "--dtype", "bfloat16"
        )
        p, d = await stack.enter_async_context(servers)
        await stack.enter_async_context(store(broker, "p0"))
        log = tmp_path / "router.log"
        base = await stack.enter_async_context(router(broker, [p.url], [d.url], log, find_ms=0))
        words = ["--router", base, "--engines", p.url, d.url, "--broker", broker]
        done = await asyncio.create_subprocess_exec(
            sys.executable, EXAMPLE, *words, "--turns", f"{TURNS}", stdout=asyncio.subprocess.PIPE
        )
        said = (await done.communicate())[0].decode()
        print(said)
    assert done.returncode == 0
    first, *lines = said.splitlines()
    assert lines.pop(0) == "pin: DONE"
    assert lines.pop() == "release: DONE"
    _, kept, begin = map(int, re.findall(r"\d+", first))
    assert begin - 512 < kept <= begin
    found = [[*map(int, re.findall(r"\d+", line))] for line in lines]
    assert [count for count, _, _ in found] == [*range(1, TURNS + 1), FORKS]
    for line, (_, computed, prompt) in zip(lines, found, strict=True):
        prompts = FORKS if "forks" in line else 1
        assert 0 < computed <= prompt - prompts * kept + prompts, line
