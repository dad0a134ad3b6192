"""Prefill and greedy decoding, apart as two engines do them, with states in their stored types.

An engine keeps state in memory between steps, so every value is rounded once when a step stores it,
and the next step reads the rounded value. vLLM's kernels do the same: they load the state, compute
with float32 in registers, and store it as `--kv-cache-dtype` and `--mamba-ssm-cache-dtype` say.
Here the cache keeps its values in the type that the model computes with, and `round_cache` rounds
them in place after prefill and after each step: the numbers are those of a cache of the stored
types. (Attention sees the keys and values of a step's own tokens before they are rounded, where
paged attention reads them back; every engine here does it alike.)

An engine that kept its state to itself must round too, like an engine that received it: else they
would drift apart after the first step.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

import torch
from torch import Tensor
from transformers import DynamicCache, NemotronHConfig, NemotronHForCausalLM

from restow.broker.layout import DType
from restow.broker.words import Worded

TORCH_TYPES: Final = {
    DType.FLOAT32: torch.float32,
    DType.BFLOAT16: torch.bfloat16,
    DType.FLOAT16: torch.float16,
}


@dataclass(frozen=True, slots=True)
class StoredTypes(Worded):
    """The types in which an engine stores keys and values, conv windows and SSM states."""

    kv: DType = DType.FLOAT32
    conv: DType = DType.FLOAT32
    ssm: DType = DType.FLOAT32

    def __post_init__(self) -> None:
        """Refuse types in which this engine stores nothing."""
        Worded.__post_init__(self)
        for dtype in (self.kv, self.conv, self.ssm):
            if dtype not in TORCH_TYPES:
                known = ", ".join(possible.label for possible in TORCH_TYPES)
                raise ValueError(f"state can't be stored as {dtype.label}, only as {known}")


AS_COMPUTED: Final = StoredTypes()
"""The types that the model computes with: nothing is rounded."""


@torch.inference_mode()
def round_cache(cache: DynamicCache, config: NemotronHConfig, stored: StoredTypes) -> None:
    """Round all of ``cache`` to the stored types, to nearest even, in place.

    Rounding twice changes nothing, so values of earlier steps stay. An empty cache stays empty.
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


@dataclass(frozen=True, slots=True)
class Decoded:
    """The result of greedy decoding."""

    logits: Tensor
    """Logits after each token that was fed, [step, vocabulary]."""
    token_ids: tuple[int, ...]
    """The tokens chosen, one for each step."""

    @property
    def first_logits(self) -> Tensor:
        """Logits after the first token that was fed, [vocabulary]."""
        return self.logits[0]


@torch.inference_mode()
def prefill(
    model: NemotronHForCausalLM, token_ids: Sequence[int], stored: StoredTypes = AS_COMPUTED
) -> DynamicCache:
    """Return the cache after ``token_ids``, computed in one forward pass and then stored.

    Without tokens it is empty.
    """
    cache = DynamicCache(config=model.config)
    if not token_ids:
        return cache
    model(torch.tensor([token_ids]), past_key_values=cache, use_cache=True)
    round_cache(cache, model.config, stored)
    return cache


@torch.inference_mode()
def decode_greedily(
    model: NemotronHForCausalLM,
    cache: DynamicCache,
    last_token_id: int,
    steps: int,
    stored: StoredTypes = AS_COMPUTED,
) -> Decoded:
    """Feed ``last_token_id``, then each token chosen; ``cache`` grows by ``steps`` tokens.

    After each step the cache is stored: the next step finds it rounded.
    """
    chosen: list[int] = []
    logits_of_steps: list[Tensor] = []
    for _ in range(steps):
        fed = torch.tensor([[chosen[-1] if chosen else last_token_id]])
        logits = model(fed, past_key_values=cache, use_cache=True).logits[0, -1]
        round_cache(cache, model.config, stored)
        logits_of_steps.append(logits)
        chosen.append(int(logits.argmax()))
    return Decoded(torch.stack(logits_of_steps), tuple(chosen))


@torch.inference_mode()
def generate_greedily(
    model: NemotronHForCausalLM, prompts: Sequence[Sequence[int]], steps: int
) -> tuple[tuple[int, ...], ...]:
    """Return ``steps`` greedy tokens of transformers' own for prompts of equal length."""
    token_ids = torch.tensor(prompts)
    output = model.generate(
        token_ids,
        attention_mask=torch.ones_like(token_ids),
        max_new_tokens=steps,
        min_new_tokens=steps,
        do_sample=False,
    )
    return tuple(tuple(row) for row in output[:, token_ids.shape[1] :].tolist())
