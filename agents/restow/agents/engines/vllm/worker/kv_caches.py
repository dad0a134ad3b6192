"""Read vLLM's cache config and cache tensors (`v1/kv_cache_interface.py`).

`layer_caches` yields the cache of each layer, `kv_order` finds how keys and values lie in its
pages, and `kv_type` finds their type and their scales.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

import torch
from vllm import _custom_ops as ops
from vllm.model_executor.models.utils import extract_layer_index
from vllm.v1.kv_cache_interface import (
    AttentionSpec,
    KVCacheConfig,
    KVCacheSpec,
    KVQuantMode,
    MambaSpec,
    MLAAttentionSpec,
    UniformTypeKVCacheSpecs,
    iter_layer_specs,
)

from restow.agents.engines.common.adapter_errors import CacheUnknownError, EngineUnsupportedError
from restow.agents.engines.common.blocks import Group
from restow.agents.engines.vllm.private import static_scales
from restow.agents.engines.vllm.worker.layers_from_specs import unsupported_layer
from restow.agents.engines.vllm.worker.rank_layout import (
    DraftLayers,
    LayerCache,
    LayerNumbers,
    dtype_of,
)
from restow.agents.engines.vllm.worker.untested_forms import (
    INDEX_PARTS_BYTES,
    TOKEN_HEAD_TYPES,
    check_allowed,
    is_index,
)
from restow.broker.errors import UnknownModelError
from restow.broker.families import NO_SCALES, KvOrder, ModelSpec, ScaleKind, Scales
from restow.broker.families.hf import model_from_hf_config
from restow.broker.layout import DType

AUTO = "auto"
"""vLLM's name for a cache in the model's own type."""
TORCH_FLOAT8 = {
    "fp8": torch.float8_e4m3fn,
    "fp8_e4m3": torch.float8_e4m3fn,
    "fp8_e5m2": torch.float8_e5m2,
}
DIGITS = 7
"""The smallest type, with two bits of mantissa, has the numbers from 1 to 8."""


def kv_order(name: str, tensor: torch.Tensor, layer: Any) -> KvOrder:
    """Return the order in which ``layer`` fills its cache ``tensor``.

    vLLM's caches all have the shape ``[pages, heads, tokens, content]``. On a GPU the content of a
    head and token is its key, then its value. The CPU's attention orders the memory of a head as
    its instructions need it, which no shape shows. So a few numbers are written there, and the
    function looks where they lie.

    Raises `CacheUnknownError` for an order that no layout can express.
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
    probes = _probes(tokens, heads, content // 2, _computed(tensor.dtype))
    if all(
        torch.equal(_written(isa, written, numbers, tensor.dtype), _expected(numbers, written))
        for numbers in probes
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


def _probes(tokens: int, heads: int, dims: int, dtype: torch.dtype) -> Iterator[torch.Tensor]:
    """Yield `[tokens, heads, dims]` with one digit of each element's token, head or dim.

    Even the smallest float types hold digits and their opposites. All probes together tell every
    element apart.
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
    """Return a page to which the attention wrote the numbers as keys, their opposites as values."""
    tokens, heads, dims = numbers.shape
    cache = torch.zeros(2, heads, tokens, 2 * dims, dtype=dtype)
    keys, values = cache.view(2, heads, 2 * tokens, dims).chunk(2, dim=2)
    slots = torch.arange(tokens, 2 * tokens, dtype=torch.int64)
    ops.cpu_attn_reshape_and_cache(
        numbers, -numbers, keys, values, slots, isa, kv_cache_dtype=written
    )
    return cache[1].reshape(heads, -1)


def _expected(numbers: torch.Tensor, written: str) -> torch.Tensor:
    """Return the page as `KvOrder.HDN` has it."""
    heads = numbers.shape[1]
    keys = numbers.permute(1, 2, 0).reshape(heads, -1)
    values = -numbers.permute(1, 0, 2).reshape(heads, -1)
    page = torch.cat([keys, values], dim=1)
    return page.to(TORCH_FLOAT8[written]).view(torch.uint8) if written in TORCH_FLOAT8 else page


FLOAT8 = {
    "fp8": DType.FLOAT8_E4M3FN,
    "fp8_e4m3": DType.FLOAT8_E4M3FN,
    "fp8_e5m2": DType.FLOAT8_E5M2,
}
"""vLLM's names of types with a scale for a layer's keys and another for its values. Both scales are
loaded with the weights."""


def kv_type(
    name: str, spec: Any, module: Any, allow_untested: bool = False
) -> tuple[DType, Scales]:
    """Return the type of the cache's elements, and their scales.

    ``spec`` is vLLM's `AttentionSpec`, ``module`` the layer that writes. A float8 cache is only
    bytes; its layer knows the type and the scales (`model_executor/layers/attention/attention.py`,
    `model_executor/layers/quantization/kv_cache.py`). Raises `EngineUnsupportedError` where they
    do not determine the values.
    """
    if spec.kv_quant_mode is KVQuantMode.NONE:
        dtype = dtype_of(spec.dtype)
        if not dtype.castable:
            raise unsupported_layer(
                name, f"KV in {spec.dtype}: what its elements stand for is missing"
            )
        return dtype, NO_SCALES
    word = getattr(module, "kv_cache_dtype", None)
    dtype = FLOAT8.get(str(word), DType.UINT8)
    scales = static_scales(module)
    fnuz = torch.version.hip is not None  # some AMD devices have a float8 of their own
    by_token = TOKEN_HEAD_TYPES.get(spec.kv_quant_mode)
    if by_token is not None and not fnuz and not isinstance(spec, MLAAttentionSpec):
        check_allowed(name, f"KV with scales per token and head ({word})", allow_untested)
        return by_token, Scales(ScaleKind.PER_TOKEN_HEAD)
    if (
        spec.kv_quant_mode is not KVQuantMode.FP8_PER_TENSOR
        or dtype is DType.UINT8
        or fnuz
        or not all(isinstance(scale, float) for scale in scales)
    ):
        raise unsupported_layer(
            name,
            f"KV of type {word} ({spec.kv_quant_mode.name}) is not handed over yet; handed over "
            f"are {', '.join(FLOAT8)} with a scale for a layer's keys and another for its values"
            f"{_WHY_NOT.get(spec.kv_quant_mode, '')}",
        )
    return dtype, Scales(ScaleKind.STATIC, "k {!r}, v {!r}".format(*scales))


_WHY_NOT = {
    KVQuantMode.NVFP4: ". In NVFP4 some kernels interleave the scales over four tokens, and no "
    "spec says which kernel writes"
}


UNQUANTISED = DType.BFLOAT16
"""The type that a known model has for quantised keys and values, until `kv_type` finds theirs."""


class FoundCache(NamedTuple):
    """A layer's cache, vLLM's spec of it, vLLM's layer, and whether the layer is a draft's."""

    cache: LayerCache
    spec: KVCacheSpec
    module: Any
    drafted: bool = False


def known_model(hf_config: Mapping[str, Any], config: KVCacheConfig) -> ModelSpec | None:
    """Return the model of a config in the types of vLLM's caches; None: no family has its type.

    Quantised keys and values get the type `UNQUANTISED`, since only the cache has their type.
    Raises `LayoutFormError`.
    """
    kv: DType | None = None
    conv: DType | None = None
    ssm: DType | None = None
    for group in config.transfer_groups:
        for spec in iter_layer_specs(group.kv_cache_spec):
            if isinstance(spec, MambaSpec):
                conv, ssm = dtype_of(spec.dtypes[0]), dtype_of(spec.dtypes[-1])
            elif isinstance(spec, AttentionSpec):
                quantised = spec.kv_quant_mode is not KVQuantMode.NONE
                kv = UNQUANTISED if quantised else dtype_of(spec.dtype)
    try:
        return model_from_hf_config(hf_config, kv_dtype=kv, conv_dtype=conv, ssm_dtype=ssm)
    except UnknownModelError:
        return None


def groups_of(
    windows: Mapping[str, int], config: KVCacheConfig, whole_blocks: bool
) -> tuple[Group, ...]:
    """Return the groups whose states are handed over, with the windows of their layers."""
    groups = []
    for index, group in enumerate(config.transfer_groups):
        name, spec = _group_name(index), group.kv_cache_spec
        window = windows.get(name, 0)
        groups.append(Group(name, spec.block_size, _scratch(spec), window, whole_blocks))
    return tuple(groups)


def layer_caches(
    config: KVCacheConfig,
    tensors: Mapping[str, torch.Tensor],
    layers: Mapping[str, Any],
    numbers: LayerNumbers,
    drafts: DraftLayers,
) -> Iterator[FoundCache]:
    """Yield every layer's cache on this rank, in the order of the groups.

    ``layers`` are vLLM's own (`static_forward_context`), which know how they write. A layer that
    reads another layer's cache has none of its own.
    """
    for index, group in enumerate(config.transfer_groups):
        places: dict[int, str] = {}
        for name in group.layer_names:
            tensor, module = tensors.get(name), layers.get(name)
            if tensor is None:  # another stage has the layer
                continue
            if getattr(module, "kv_sharing_target_layer_name", None):
                continue
            other = places.setdefault(tensor.data_ptr(), name)
            if other != name:
                raise CacheUnknownError(
                    f"{name} and {other} have one cache, and neither is marked as sharing it",
                    layer=name,
                )
            spec = _spec_of(group.kv_cache_spec, name)
            pages, blocks = tensor.shape[0], config.num_blocks
            if pages % blocks:
                raise CacheUnknownError(
                    f"{name}: {pages} pages are no multiple of {blocks} blocks", layer=name
                )
            state = isinstance(spec, MambaSpec)
            # A token has one latent, so latents lie in the order of the tokens.
            plain = state or isinstance(spec, MLAAttentionSpec)
            number = _number(name)
            layer = numbers.layer(number, state)
            drafted = drafts.layer(name, number, layer)
            cache = LayerCache(
                name,
                layer if drafted is None else drafted,
                _group_name(index),
                tensor,
                pages // blocks,
                KvOrder.HND if plain else kv_order(name, tensor, module),
                tuple(tuple(shape) for shape in spec.shapes) if state else (),
                tuple(spec.dtypes) if state else (),
                INDEX_PARTS_BYTES if is_index(spec) else (),
            )
            yield FoundCache(cache, spec, module, drafted is not None)


def _number(name: str) -> int:
    """Return the number in a layer's name. Raises `EngineUnsupportedError`."""
    try:
        number: int = extract_layer_index(name)
    except (AssertionError, ValueError) as error:
        raise EngineUnsupportedError(f"{name}: the layer's number is missing: {error}") from None
    return number


def _spec_of(spec: KVCacheSpec, layer_name: str) -> KVCacheSpec:
    if isinstance(spec, UniformTypeKVCacheSpecs):
        return spec.kv_cache_specs[layer_name]
    return spec


def _scratch(spec: KVCacheSpec) -> int | None:
    first = next(iter(iter_layer_specs(spec)))
    return first.num_speculative_blocks if isinstance(first, MambaSpec) else None


def _group_name(index: int) -> str:
    return f"group.{index}"
