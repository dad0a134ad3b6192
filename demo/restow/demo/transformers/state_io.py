"""Write a model's state into TP shards in paged memory, and read it back.

Follows the layout alone and shares no code with the planner, so that the demo's equality proves
something.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from restow.agents.engines.common.blocks import BlockLists
from restow.broker.errors import RestowError
from restow.broker.layout import DType, Layout, RankLayout, Region, Shard
from restow.demo.transformers.generation import TORCH_TYPES


class ReplicaError(RestowError, status="DATA_LOSS", reason="REPLICAS_DIFFER"):
    """Two ranks hold different bytes of a value that they share."""


@dataclass(frozen=True, slots=True)
class RankTensors:
    """A rank's memory: uint8 ``[page_count * page_stride_bytes]`` for each region by name."""

    layout: RankLayout
    regions: Mapping[str, Tensor]


def lay_out(state: Mapping[str, Tensor], ranks: Sequence[RankTensors], blocks: BlockLists) -> None:
    """Write every rank's shard of every field, and of every input that it keeps, into its blocks.

    ``state`` has a tensor for each field: ``[token, *shape]`` for a per-token field, ``shape`` for
    a snapshot; it is cast to the type in which the layout stores it. Tokens fill the blocks from
    token 0 on.
    """
    for rank in ranks:
        for shard in (*rank.layout.shards, *rank.layout.inputs):
            region = rank.layout.region(shard.region)
            whole = state[shard.field]
            view = _pages(rank.regions[region.name], region, shard)
            places = _places(region, blocks, len(whole))
            view[places] = _as_bytes(whole[_box(region, shard)], shard.dtype)


def lay_out_weights(weights: Mapping[str, Tensor], ranks: Sequence[RankTensors]) -> None:
    """Write every rank's part of the weights that it offers into its constant regions.

    ``weights`` has a tensor ``[*axes without tap, hidden]`` for each field that is rebuilt.
    """
    for rank in ranks:
        for offered in rank.layout.projections:
            box = tuple(slice(span.start, span.stop) for span in offered.box[:-1])
            part = weights[offered.field][box]
            memory = rank.regions[offered.region]
            view = memory.as_strided(
                (*part.shape, offered.dtype.itemsize_bytes),
                (*offered.strides_bytes, 1),
                memory.storage_offset() + offered.offset_bytes,
            )
            view[...] = _as_bytes(part, offered.dtype)


def collect(
    layout: Layout, ranks: Sequence[RankTensors], blocks: BlockLists, tokens: int
) -> dict[str, Tensor]:
    """Read the whole state back from all ranks' shards, in the types in which they store it.

    Raises `ReplicaError` where ranks that hold the same box differ in a byte.
    """
    state: dict[str, Tensor] = {}
    written: dict[str, Tensor] = {}
    dtypes: dict[str, torch.dtype] = {}
    shapes = {field.name: field.shape for field in layout.model.fields}
    for rank in ranks:
        for shard in rank.layout.shards:
            region = rank.layout.region(shard.region)
            view = _pages(rank.regions[region.name], region, shard)
            held, box = view[_places(region, blocks, tokens)], _box(region, shard)
            if shard.field not in state:
                per_token = region.page_tokens is not None
                shape = (tokens, *shapes[shard.field]) if per_token else shapes[shard.field]
                dtypes[shard.field] = TORCH_TYPES[shard.dtype]
                item = shard.dtype.itemsize_bytes
                state[shard.field] = torch.zeros((*shape, item), dtype=torch.uint8)
                written[shard.field] = torch.zeros(shape, dtype=torch.bool)
            seen = written[shard.field][box]
            if not torch.equal(state[shard.field][box][seen], held[seen]):
                raise ReplicaError(
                    f"rank {rank.layout.rank} holds other bytes of {shard.field} than an earlier "
                    f"rank with the same box",
                    field=shard.field,
                    rank=rank.layout.rank,
                )
            state[shard.field][box] = held
            written[shard.field][box] = True
    return {
        name: values.view(dtypes[name]).reshape(values.shape[:-1]) for name, values in state.items()
    }


def _box(region: Region, shard: Shard) -> tuple[slice, ...]:
    """Return the shard's part of the whole field, or of every token of a per-token field."""
    box = tuple(slice(span.start, span.stop) for span in shard.box)
    return box if region.page_tokens is None else (slice(None), *box)


def _as_bytes(values: Tensor, dtype: DType) -> Tensor:
    """Return the elements as they are stored, with their bytes as a last axis."""
    return values.to(TORCH_TYPES[dtype]).contiguous().unsqueeze(-1).view(torch.uint8)


def _pages(memory: Tensor, region: Region, shard: Shard) -> Tensor:
    """Return the shard in every page: uint8 ``[page, (token,) *box, item]``."""
    sizes = [len(memory) // region.page_stride_bytes]
    strides = [region.page_stride_bytes]
    if region.page_tokens is not None and shard.token_stride_bytes is not None:
        sizes.append(region.page_tokens)
        strides.append(shard.token_stride_bytes)
    sizes += [span.size for span in shard.box] + [shard.dtype.itemsize_bytes]
    strides += [*shard.strides_bytes, 1]
    return memory.as_strided(sizes, strides, memory.storage_offset() + shard.offset_bytes)


def _places(region: Region, blocks: BlockLists, tokens: int) -> tuple[Tensor, ...]:
    """Return the page of every token and its place in it, or the page of a snapshot."""
    ids = torch.tensor(list(blocks[region.group]), dtype=torch.int64)
    if region.page_tokens is None:
        return (ids[0],)
    ratio = region.pages_per_block
    pages = (ids[:, None] * ratio + torch.arange(ratio)).flatten()
    token = torch.arange(tokens)
    return pages[token // region.page_tokens], token % region.page_tokens
