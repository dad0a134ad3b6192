"""`kv_order` finds how an attention layer lays keys and values into a page.

vLLM's caches all have the shape ``[pages, heads, tokens, content]``. On a GPU the content of a head
and token is its key, then its value. The CPU's attention takes the memory of a head for itself, and
lays keys out as its instructions want them, which no shape tells: so a few numbers are written
there, and looked for.
"""

from __future__ import annotations

from typing import Any

import torch
from vllm import _custom_ops as ops

from restow.agents.engines.vllm.errors import CacheUnknownError
from restow.broker.families import KvOrder


def kv_order(name: str, tensor: torch.Tensor, layer: Any) -> KvOrder:
    """Return the order in which ``layer`` fills its cache ``tensor``.

    Raises `CacheUnknownError` for one that no layout can express.
    """
    if tensor.device.type != "cpu":
        outside = tensor.stride(1) >= tensor.stride(2) or tensor.shape[1] == 1
        return KvOrder.HND if outside else KvOrder.NHD
    _, heads, tokens, content = tensor.shape
    isa = getattr(layer, "isa", None)
    if isa is None or content % 2:
        raise CacheUnknownError(
            f"{name}: the CPU's attention does not say how it lays out its cache", layer=name
        )
    looks = _numbers(tokens, heads, content // 2, tensor.dtype)
    if all(torch.equal(_written(isa, numbers), _expected(numbers)) for numbers in looks):
        return KvOrder.HDN
    raise CacheUnknownError(
        f"{name}: the CPU's attention ({isa}, {tensor.dtype}) packs keys and values in a way that "
        "no layout can express; use another dtype or block size",
        layer=name,
    )


def _numbers(tokens: int, heads: int, dims: int, dtype: torch.dtype) -> tuple[torch.Tensor, ...]:
    """Return two of ``[tokens, heads, dims]``: elements number their token, or their dim and head.

    Small ones, which every type of float holds: two looks together tell every element apart.
    """
    token, head, dim = torch.meshgrid(
        torch.arange(tokens), torch.arange(heads), torch.arange(dims), indexing="ij"
    )
    return tuple((1 + number % 251).to(dtype) for number in (token, dim + 7 * head))


def _written(isa: str, numbers: torch.Tensor) -> torch.Tensor:
    """Return a page where the attention wrote the numbers as keys, their opposites as values."""
    tokens, heads, dims = numbers.shape
    cache = torch.zeros(2, heads, tokens, 2 * dims, dtype=numbers.dtype)
    keys, values = cache.view(2, heads, 2 * tokens, dims).chunk(2, dim=2)
    slots = torch.arange(tokens, 2 * tokens, dtype=torch.int64)
    ops.cpu_attn_reshape_and_cache(numbers, -numbers, keys, values, slots, isa)
    return cache[1].reshape(heads, -1)


def _expected(numbers: torch.Tensor) -> torch.Tensor:
    """Return the same by the words of `KvOrder.HDN`."""
    heads = numbers.shape[1]
    keys = numbers.permute(1, 2, 0).reshape(heads, -1)
    values = -numbers.permute(1, 0, 2).reshape(heads, -1)
    return torch.cat([keys, values], dim=1)
