"""Where vLLM itself writes: float4 pages, an indexer's keys, and tokens that ranks share out."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from restow.broker.errors import LayoutFormError
from restow.broker.families import (
    AttentionSpec,
    EngineSettings,
    KvOrder,
    MlaSpec,
    ModelSpec,
    ScaleKind,
    Scales,
    build_layout,
)
from restow.broker.layout import DType, check_layout
from vllm_harness.programs import answers, run_kernel

pytestmark = pytest.mark.timeout(600)
KV_HEADS = 8
FLOAT4_PAGES = [
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


def test_float4_pages_are_those_of_vllms_views(vllm_python: Path) -> None:
    asked = json.dumps([(max(1, KV_HEADS // tp), *rest) for tp, *rest in FLOAT4_PAGES])
    views = answers(vllm_python, "float4_views.py", asked)[-1]
    assert views == [places(*case) for case in FLOAT4_PAGES]


@pytest.mark.parametrize("page_tokens", [64, 16])
def test_an_indexers_keys_and_scales_lie_where_vllms_kernel_writes_them(
    vllm_python: Path, tmp_path: Path, page_tokens: int
) -> None:
    source = "models/deepseek_v32/common/kernels.py"
    printed = run_kernel(vllm_python, "indexer_writer.py", source, tmp_path, page_tokens)
    assert printed == "100 tokens"


def test_ranks_have_the_parts_of_vllms_groups(vllm_python: Path) -> None:
    """Check that vLLM and Restow refuse the same sizes, too."""
    model = ModelSpec("m", tuple(MlaSpec(layer, 8, DType.BFLOAT16) for layer in range(2)))
    found = answers(vllm_python, "context_groups.py")[-1]
    assert len([one for one in found.values() if one]) > 40
    for name, parts in found.items():
        tp, pcp, dcp, pp = map(int, name.split(","))
        settings = EngineSettings(tp=tp, pcp=pcp, dcp=dcp, pp=pp)
        if parts is None:
            with pytest.raises(LayoutFormError):
                settings.check()
            continue
        layout = build_layout(model, settings)
        check_layout(layout)
        assert [rank.regions[0].context_part for rank in layout.ranks] == parts, name


def test_shared_out_tokens_lie_where_vllms_kernel_writes_them(
    vllm_python: Path, tmp_path: Path
) -> None:
    printed = run_kernel(vllm_python, "slot_mapping.py", "v1/worker/gpu", tmp_path)
    assert printed == "16800 tokens"
