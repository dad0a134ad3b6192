"""`LayerNumbers` says which layer of the model a cache of vLLM belongs to.

vLLM wants caches to have numbers of their own. Where one layer has two, the numbers in their names
are not those of the model's layers.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True, slots=True)
class LayerNumbers:
    """Maps the numbers in the names of caches to layers; all are the layers' own by default.

    Mixers are numbered from ``first_state`` on. The number of an attention cache that is a key of
    ``attention`` stands for the layer that it is mapped to.
    """

    first_state: int
    attention: Mapping[int, int]

    @classmethod
    def of(cls, hf_config: Mapping[str, Any]) -> LayerNumbers:
        """Return how vLLM 0.32 numbers the caches of a model (`falcon_h1.py`, `zamba2.py`)."""
        model_type = hf_config.get("model_type")
        if model_type == "falcon_h1":
            return cls(hf_config["num_hidden_layers"], {})
        if model_type == "zamba2":
            kinds = hf_config["layers_block_type"]
            hybrid = [layer for layer, kind in enumerate(kinds) if kind == "hybrid"]
            return cls(len(hybrid), _of_shared_blocks(hybrid, hf_config["num_mem_blocks"]))
        return cls(0, {})

    def layer(self, number: int, is_state: bool) -> int:
        """Return the layer that the cache with this number in its name belongs to."""
        return number - self.first_state if is_state else self.attention.get(number, number)


def _of_shared_blocks(hybrid: list[int], blocks: int) -> dict[int, int]:
    """Return the layers by number, where the layers take turns with so many ``blocks`` of weights.

    vLLM counts all uses of one block, then those of the next one, which begins at a place of its
    own: of 3 blocks and 7 layers at 0, 3 and 6.
    """
    count = len(hybrid)
    return {
        block * (count + blocks - 1) // blocks + use: layer
        for block in range(blocks)
        for use, layer in enumerate(hybrid[block::blocks])
    }
