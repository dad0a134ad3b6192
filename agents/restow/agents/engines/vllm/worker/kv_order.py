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
    found = [
        _written(isa, (heads, tokens, content // 2), tensor.dtype, numbers) for numbers in (0, 1)
    ]
    expected = [
        _expected((heads, tokens, content // 2), tensor.dtype, numbers) for numbers in (0, 1)
    ]
    if all(torch.equal(one, other) for one, other in zip(found, expected, strict=True)):
        return KvOrder.HDN
    raise CacheUnknownError(
        f"{name}: the CPU's attention ({isa}, {tensor.dtype}) packs keys and values in a way that "
        "no layout can express; use another dtype or block size",
        layer=name,
    )


def _numbers(shape: tuple[int, int, int], dtype: torch.dtype, axis: int) -> torch.Tensor:
    """Return ``[tokens, heads, dims]``: each element numbers its token, or its dim and head.

    Small ones, which every type of float holds: two looks together tell every element apart.
    """
    heads, tokens, dims = shape
    token, head, dim = torch.meshgrid(
        torch.arange(tokens), torch.arange(heads), torch.arange(dims), indexing="ij"
    )
    number = token if axis == 0 else (dim + 7 * head) % 251
    return (1 + number % 251).to(dtype)


def _written(isa: str, shape: tuple[int, int, int], dtype: torch.dtype, axis: int) -> torch.Tensor:
    """Return a page where the attention wrote the numbers as keys, their opposites as values."""
    heads, tokens, dims = shape
    cache = torch.zeros(2, heads, tokens, 2 * dims, dtype=dtype)
    keys, values = cache.view(2, heads, 2 * tokens, dims).chunk(2, dim=2)
    numbers = _numbers(shape, dtype, axis)
    slots = torch.arange(tokens, 2 * tokens, dtype=torch.int64)
    ops.cpu_attn_reshape_and_cache(numbers, -numbers, keys, values, slots, isa)
    return cache[1].reshape(heads, -1)


def _expected(shape: tuple[int, int, int], dtype: torch.dtype, axis: int) -> torch.Tensor:
    """Return the same by the words of `KvOrder.HDN`."""
    heads = shape[0]
    numbers = _numbers(shape, dtype, axis)
    keys = numbers.permute(1, 2, 0).reshape(heads, -1)
    values = -numbers.permute(1, 0, 2).reshape(heads, -1)
    return torch.cat([keys, values], dim=1)
