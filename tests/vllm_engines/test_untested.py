"""Caches that no CPU runs: served by vLLM's specs if the operator allows it, else refused."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from vllm_harness.engine import Options
from vllm_harness.house import MODEL, drawn, vllm_house
from vllm_harness.programs import answers

pytestmark = pytest.mark.timeout(600)
ALLOWED = {
    "float8 by token": "AttentionSpec(layer=0, kv_heads=2, head_dim=32, dtype=<DType.FLOAT8_E4M3FN",
    "int8 by token, window": "AttentionSpec(layer=0, kv_heads=2, head_dim=32, dtype=<DType.INT8",
    "index": "IndexerSpec(layer=0, key_dim=128, block_dim=128",
    "latents by block": "BlockScaledMlaSpec(layer=0, latent_dim=512, rope_dim=64, block_dim=128",
}
REFUSED = {
    "index, shuffled": "an indexer's cache belongs to a layer that does not say that its tokens",
    "index that does not say": "an indexer's cache belongs to a layer that does not say that",
    "index in bfloat16": "an indexer's cache has 256 bytes for 1 tokens in place of 132 for 1",
    "index, compressed": "an indexer's cache has 132 bytes for 4 tokens in place of 132 for 1",
    "latents by block, other size": "a cache of type fp8_ds_mla has 584 bytes for 1 tokens in",
    "nvfp4": "KV of type None (NVFP4) is not handed over yet",
    "int4 by token": "KV of type None (INT4_PER_TOKEN_HEAD) is not handed over yet",
    "by token, other size": "FullAttentionSpec with state_content_size_bytes 68 in place of 72",
}
"""What specs do not determine, whatever is allowed."""
PLACE = "ENGINE_UNSUPPORTED: layers.0.x: "


@pytest.fixture(scope="module")
def said(vllm_python: Path) -> dict[str, Any]:
    """Return what the connector says of each cache, without `allow_untested` and with it."""
    told = answers(vllm_python, "untested_main.py", TORCH_COMPILE_DISABLE="1")[-1]
    assert isinstance(told, dict)
    return told


@pytest.mark.parametrize("name", ALLOWED)
def test_what_specs_determine_is_served_if_it_is_allowed(said: dict[str, Any], name: str) -> None:
    without, allowed = said[name]
    assert without.startswith(PLACE)
    assert "is untested" in without
    assert "set allow_untested" in without
    assert ALLOWED[name] in allowed


@pytest.mark.parametrize("name", REFUSED)
def test_what_specs_leave_open_stays_refused(said: dict[str, Any], name: str) -> None:
    _, allowed = said[name]
    assert allowed.startswith(PLACE + REFUSED[name])


def test_nvfp4_says_why_its_place_is_unknown(said: dict[str, Any]) -> None:
    assert "some kernels interleave the scales over four tokens" in said["nvfp4"][1]


def test_an_indexer_with_scales_of_another_form_is_refused(said: dict[str, Any]) -> None:
    # vLLM 0.32 has no other form.
    refused = f"{PLACE}an indexer's cache has scales in the form of SM100's kernels"
    assert said.get("index of SM100", refused).startswith(refused)


def test_a_layer_has_latents_and_an_index(said: dict[str, Any]) -> None:
    assert said["both of a layer"] == ["BlockScaledMlaSpec", "IndexerSpec"]


async def test_an_engine_that_allows_it_has_all_its_content_compared(
    vllm_python: Path, tmp_path: Path
) -> None:
    # Only D allows it, and the broker compares nothing by itself.
    wanted = {
        "p": Options(MODEL, role="kv_producer"),
        "d": Options(MODEL, role="kv_consumer", extra={"allow_untested": True}),
    }
    async with vllm_house(vllm_python, tmp_path, wanted) as house:
        ids = drawn(40)
        handed = await house.hand_over("p", "d", "h", ids)
        assert handed.d.tokens == (await house.alone("d", ids)).tokens
        assert house.broker.hub.directory.ledger.checks.checked == 1


@pytest.mark.parametrize("order", ["HND", "NHD"])
def test_scales_lie_where_vllms_views_have_them(said: dict[str, Any], order: str) -> None:
    assert said[f"scales, {order}"]


def test_exactly_the_unwritten_tokens_of_an_index_are_zeroed(said: dict[str, Any]) -> None:
    assert said["zeroed"]
