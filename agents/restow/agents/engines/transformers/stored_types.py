"""`StoredTypes` are those in which an engine stores its state, whatever it computes with.

An engine keeps state in memory between steps, so every value is rounded once when a step writes it
there, and is what the next step reads. vLLM's kernels do the same: they load the state, compute
with float32 in registers, and store it as `--kv-cache-dtype` and `--mamba-ssm-cache-dtype` say.
Here the cache keeps its values in the type that the model computes with, and `round_cache` rounds
them in place after prefill and after each step: the numbers are those of a cache of the stored
types. (Attention sees the keys and values of a step's own tokens before they are rounded, where
paged attention reads them back; every engine here does it alike.)

All that decodes must round so, an engine that kept its state to itself no less than one that
received it: else the two would drift apart after the first step.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

import torch
from torch import Tensor
from transformers import DynamicCache, NemotronHConfig

from restow.broker.layout import DType
from restow.broker.words import Worded

TORCH_TYPES: Final = {
    DType.FLOAT32: torch.float32,
    DType.BFLOAT16: torch.bfloat16,
    DType.FLOAT16: torch.float16,
}


@dataclass(frozen=True, slots=True)
class StoredTypes(Worded):
    """One type each for keys and values, conv windows and SSM states."""

    kv: DType = DType.FLOAT32
    conv: DType = DType.FLOAT32
    ssm: DType = DType.FLOAT32

    def __post_init__(self) -> None:
        """Refuse types in which this engine stores nothing."""
        Worded.__post_init__(self)
        for dtype in (self.kv, self.conv, self.ssm):
            if dtype not in TORCH_TYPES:
                known = ", ".join(one.label for one in TORCH_TYPES)
                raise ValueError(f"state can't be stored as {dtype.label}, only as {known}")


AS_COMPUTED: Final = StoredTypes()
"""The types that the model computes with: nothing is rounded."""


@torch.inference_mode()
def round_cache(cache: DynamicCache, config: NemotronHConfig, stored: StoredTypes) -> None:
    """Round all that ``cache`` holds to the stored types, to nearest even, in place.

    Idempotent, so what earlier steps have rounded stays as it is. An empty cache stays empty.
    """
    for index, kind in enumerate(config.layers_block_type or ()):
        if kind == "full_attention":
            layer = cache.layers[index]
            _round(layer.keys, stored.kv)
            _round(layer.values, stored.kv)
        elif kind == "linear_attention":
            _round(cache.get_conv_state(index), stored.conv)
            _round(cache.get_recurrent_state(index), stored.ssm)


def _round(values: Tensor | None, dtype: DType) -> None:
    stored = TORCH_TYPES[dtype]
    if values is not None and stored is not values.dtype:
        values.copy_(values.to(stored))
