"""Which layer a cache belongs to, where vLLM numbers caches in its own way."""

from __future__ import annotations

from typing import Any

import pytest

from restow.agents.engines.vllm.worker.layer_numbers import LayerNumbers


def test_numbers_are_those_of_the_layers() -> None:
    numbers = LayerNumbers.of({"model_type": "nemotron_h", "num_hidden_layers": 52})
    assert [numbers.layer(5, state) for state in (False, True)] == [5, 5]


def test_mixers_of_falcon_h1_are_counted_on_behind_all_layers() -> None:
    """`falcon_h1.py`: a mixer's prefix is ``num_hidden_layers + layer``."""
    numbers = LayerNumbers.of({"model_type": "falcon_h1", "num_hidden_layers": 24})
    assert [numbers.layer(number, False) for number in (0, 7, 23)] == [0, 7, 23]
    assert [numbers.layer(24 + layer, True) for layer in (0, 7, 23)] == [0, 7, 23]


def _as_vllm_counts(hybrid: list[int], blocks: int) -> dict[int, int]:
    """Layer by the number that `Zamba2Attention` gives its cache, in that class's own steps."""
    found: dict[int, int] = {}
    for bare in range(blocks):
        number = bare * (len(hybrid) + blocks - 1) // blocks
        for use, layer in enumerate(hybrid):
            if use % blocks == bare:
                found[number] = layer
                number += 1
    return found


@pytest.mark.parametrize("blocks", [1, 2, 3])
@pytest.mark.parametrize("uses", [1, 2, 7, 9, 13])
def test_attention_of_zamba2_is_counted_block_by_block(uses: int, blocks: int) -> None:
    kinds = ["mamba", "mamba", "hybrid"] * uses + ["mamba"]
    config: dict[str, Any] = {
        "model_type": "zamba2",
        "num_hidden_layers": len(kinds),
        "layers_block_type": kinds,
        "num_mem_blocks": blocks,
    }
    numbers, hybrid = LayerNumbers.of(config), [3 * use + 2 for use in range(uses)]
    wanted = _as_vllm_counts(hybrid, blocks)
    assert {number: numbers.layer(number, False) for number in wanted} == wanted
    assert sorted(wanted.values()) == hybrid
    # `Zamba2Model`: a mixer's prefix is the number of hybrid layers, and its layer.
    assert [numbers.layer(uses + layer, True) for layer in range(len(kinds))] == [
        *range(len(kinds))
    ]


def test_two_blocks_of_zamba2_take_turns() -> None:
    kinds = ["mamba", "hybrid", "mamba", "hybrid", "mamba", "hybrid", "mamba"]
    numbers = LayerNumbers.of(
        {"model_type": "zamba2", "layers_block_type": kinds, "num_mem_blocks": 2}
    )
    assert [numbers.layer(number, False) for number in range(3)] == [1, 5, 3]
    assert [numbers.layer(3 + layer, True) for layer in range(7)] == [*range(7)]
