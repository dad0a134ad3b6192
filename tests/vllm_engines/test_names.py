"""By which ids engines of vLLM are known to the broker."""

from __future__ import annotations

import uuid
from pathlib import Path

import pytest

from agent_harness.waiting import until
from restow.broker.server.base.settings import BrokerSettings
from restow.broker.server.serve import running_broker
from vllm_harness.engine import Options, vllm_engine
from vllm_harness.pair import MODEL

pytestmark = pytest.mark.timeout(600)
CONNECT_S = 60.0


@pytest.mark.parametrize(
    ("engine_id", "ranks"), [("p", 2), ("", 1)], ids=["named, data-parallel", "of vLLM's own"]
)
async def test_every_engine_has_an_id_of_its_own(
    vllm_python: Path, tmp_path: Path, engine_id: str, ranks: int
) -> None:
    async with running_broker(BrokerSettings(listen="127.0.0.1:0")) as broker:
        options = Options(
            MODEL,
            role="kv_producer",
            broker=broker.address,
            engine_id=engine_id,
            engine={"data_parallel_size": ranks},
        )
        async with vllm_engine(vllm_python, options, tmp_path / "log"):
            engines = broker.hub.directory.members.engines
            await until(
                lambda: [one.complete for one in engines.values()] == [True] * ranks, CONNECT_S
            )
            found = sorted(key.engine_id for key in engines)
            assert not any(one.former for one in engines.values())
    if engine_id:
        assert found == ["p_dp0", "p_dp1"]
    else:
        assert str(uuid.UUID(found[0])) == found[0]
