"""An overloaded host is slow and not dead: nothing fails there at the default limits.

vLLM's processes spin here as they do everywhere, and the first requests compile. D alone waits for
as long as the requests take.
"""

from __future__ import annotations

import asyncio
import subprocess
import sys
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

import pytest

from restow.agents.engines.common.registration import ConnectorSettings
from restow.broker.core.common.keys import State
from restow.broker.server.base.settings import BrokerSettings
from restow.broker.server.serve import running_broker
from vllm_harness.checkpoints import write_checkpoint
from vllm_harness.engine import TWO_ENGINES, Options
from vllm_harness.house import House, drawn, vllm_engines
from vllm_harness.hybrid_checkpoints import HYBRIDS

pytestmark = pytest.mark.timeout(900)
LEASE_MS = ConnectorSettings().lease_ms
PROMPTS, AT_ONCE = 35, 16
SPINNERS = 16
SPIN = "import os\nwhile True: os.sched_yield()"


@contextmanager
def spinning(count: int) -> Iterator[None]:
    """Let processes spin that yield, as those of vLLM do while they wait."""
    with ExitStack() as stack:
        for _ in range(count):
            process = stack.enter_context(subprocess.Popen([sys.executable, "-c", SPIN]))
            stack.callback(process.kill)
        yield


async def test_nothing_fails_on_a_host_whose_processes_wait_for_processors(
    vllm_python: Path, tmp_path: Path
) -> None:
    model = write_checkpoint(HYBRIDS["falcon_h1"].make, tmp_path / "model")
    prompts = [drawn(20 + 4 * number, number) for number in range(PROMPTS)]
    compiles = {
        name: str(tmp_path / name)
        for name in ("TORCHINDUCTOR_CACHE_DIR", "VLLM_CACHE_ROOT", "TRITON_CACHE_DIR")
    }
    async with running_broker(BrokerSettings(listen="127.0.0.1:0")) as broker:
        wanted = {
            name: Options(
                model,
                role=role,
                engine_id=name,
                broker=broker.address,
                extra={"lease_ms": LEASE_MS},
                engine=TWO_ENGINES["engine"],
                environment=compiles | TWO_ENGINES["environment"],
                resting=False,
            )
            for name, role in (("p", "kv_producer"), ("d", "kv_consumer"))
        }
        async with vllm_engines(vllm_python, tmp_path, wanted) as engines:
            house = House(broker, engines)
            gate = asyncio.Semaphore(AT_ONCE)

            async def hand_over(number: int) -> tuple[int, ...]:
                async with gate:
                    handed = await house.hand_over("p", "d", f"h{number}", prompts[number])
                    return handed.d.tokens

            with spinning(SPINNERS):
                found = await asyncio.gather(*map(hand_over, range(PROMPTS)))
            assert house.ended == {State.DONE: PROMPTS}
            right = [await house.alone("d", prompt) for prompt in prompts]
            assert found == [answer.tokens for answer in right]
