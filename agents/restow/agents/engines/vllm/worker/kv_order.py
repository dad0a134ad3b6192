"""`kv_order` finds how an attention layer lays keys and values into a page.

vLLM's caches all have the shape ``[pages, heads, tokens, content]``. On a GPU the content of a head
and token is its key, then its value. The CPU's attention takes the memory of a head for itself, and
lays keys out as its instructions want them, which no shape tells: so a few numbers are written
there, and looked for.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from vllm import _custom_ops as ops

from restow.agents.engines.vllm.errors import CacheUnknownError
from restow.broker.families import KvOrder

AUTO = "auto"
"""vLLM's word for a cache in the model's own type."""
TORCH_FLOAT8 = {
    "fp8": torch.float8_e4m3fn,
    "fp8_e4m3": torch.float8_e4m3fn,
    "fp8_e5m2": torch.float8_e5m2,
}
DIGITS = 7
"""The least type, of two bits behind the point, has the numbers from 1 to 8."""


def kv_order(name: str, tensor: torch.Tensor, layer: Any) -> KvOrder:
    """Return the order in which ``layer`` fills its cache ``tensor``.

    Raises `CacheUnknownError` for one that no layout can express.
    """
    if tensor.device.type != "cpu":
        outside = tensor.stride(1) >= tensor.stride(2) or tensor.shape[1] == 1
        return KvOrder.HND if outside else KvOrder.NHD
    _, heads, tokens, content = tensor.shape
    isa = getattr(layer, "isa", None)
    widths = {getattr(layer, name, content / 2) for name in ("head_size", "head_size_v")}
    if isa is None or widths != {content / 2}:
        raise CacheUnknownError(
            f"{name}: the CPU's attention does not say how it lays out its cache", layer=name
        )
    written = getattr(layer, "kv_cache_dtype", AUTO)
    looks = _looks(tokens, heads, content // 2, _computed(tensor.dtype))
    if all(
        torch.equal(_written(isa, written, numbers, tensor.dtype), _expected(numbers, written))
        for numbers in looks
    ):
        return KvOrder.HDN
    raise CacheUnknownError(
        f"{name}: the CPU's attention ({isa}, {tensor.dtype}) packs keys and values in a way that "
        "no layout can express; use another dtype or block size",
        layer=name,
    )


def _computed(dtype: torch.dtype) -> torch.dtype:
    """Return the type of the numbers that a cache of this type is written from."""
    return dtype if dtype.is_floating_point else torch.bfloat16


def _looks(tokens: int, heads: int, dims: int, dtype: torch.dtype) -> Iterator[torch.Tensor]:
    """Yield `[tokens, heads, dims]` with one digit of each element's token, head or dim.

    The least types of float hold digits and their opposites, and all looks together tell every
    element from every other.
    """
    numbers = torch.meshgrid(
        torch.arange(tokens), torch.arange(heads), torch.arange(dims), indexing="ij"
    )
    for number, count in zip(numbers, (tokens, heads, dims), strict=True):
        power = 1
        while power < count:
            yield (1 + number // power % DIGITS).to(dtype)
            power *= DIGITS


def _written(isa: str, written: str, numbers: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Return a page where the attention wrote the numbers as keys, their opposites as values."""
    tokens, heads, dims = numbers.shape
    cache = torch.zeros(2, heads, tokens, 2 * dims, dtype=dtype)
    keys, values = cache.view(2, heads, 2 * tokens, dims).chunk(2, dim=2)
    slots = torch.arange(tokens, 2 * tokens, dtype=torch.int64)
    ops.cpu_attn_reshape_and_cache(
        numbers, -numbers, keys, values, slots, isa, kv_cache_dtype=written
    )
    return cache[1].reshape(heads, -1)


def _expected(numbers: torch.Tensor, written: str) -> torch.Tensor:
    """Return the same by the words of `KvOrder.HDN`."""
    heads = numbers.shape[1]
    keys = numbers.permute(1, 2, 0).reshape(heads, -1)
    values = -numbers.permute(1, 0, 2).reshape(heads, -1)
    page = torch.cat([keys, values], dim=1)
    return page.to(TORCH_FLOAT8[written]).view(torch.uint8) if written in TORCH_FLOAT8 else page
