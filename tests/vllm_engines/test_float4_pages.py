"""Pages in float4 (NVFP4) lie as vLLM's own views of them say, at TP 1 to 16."""

from __future__ import annotations

import asyncio
import json
import os
from pathlib import Path

import pytest

from restow.broker.families import (
    AttentionSpec,
    EngineSettings,
    KvOrder,
    ModelSpec,
    ScaleKind,
    Scales,
    build_layout,
)
from restow.broker.layout import DType
from vllm_harness.engine import ENVIRONMENT, HERE

pytestmark = pytest.mark.timeout(300)
KV_HEADS = 8
CASES = [
    (tp, tokens, head_dim, order)
    for tp in (1, 2, 4, 8, 16)
    for tokens, head_dim in ((16, 128), (32, 64), (64, 256))
    for order in ("HND", "NHD")
]


def places(tp: int, tokens: int, head_dim: int, order: str) -> list[list[int]]:
    scales = Scales(ScaleKind.PER_16, "v1")
    layer = AttentionSpec(0, KV_HEADS, head_dim, DType.FLOAT4_E2M1FN_X2, scales=scales)
    settings = EngineSettings(tp=tp, page_tokens=tokens, kv_order=KvOrder(order))
    rank = build_layout(ModelSpec("m", (layer,)), settings).ranks[-1]
    return [
        [s.offset_bytes, *s.strides_bytes, s.token_stride_bytes or 0, s.box[1].size]
        for s in rank.shards
    ]


async def test_pages_are_those_of_vllms_views(vllm_python: Path) -> None:
    asked = json.dumps([(max(1, KV_HEADS // tp), *rest) for tp, *rest in CASES])
    process = await asyncio.create_subprocess_exec(
        vllm_python,
        HERE / "float4_views.py",
        asked,
        stdout=asyncio.subprocess.PIPE,
        env={**os.environ, **ENVIRONMENT},
    )
    said, _ = await process.communicate()
    assert json.loads(said.splitlines()[-1]) == [places(*case) for case in CASES]
