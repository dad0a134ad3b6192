"""Two engines that disagree, their memory, and a state whose every element is known."""

from __future__ import annotations

import functools
from collections.abc import Mapping
from dataclasses import dataclass, replace

import numpy as np
import numpy.typing as npt

from agent_harness import mixers
from restow.agents.binding.pages import Blocks
from restow.agents.memory.regions import RegionMemory
from restow.broker.families import (
    AttentionSpec,
    ConvLayout,
    EngineSettings,
    Mamba2Spec,
    Mixer,
    ModelSpec,
    build_layout,
)
from restow.broker.layout import DType, Field, Kind, Layout, RankLayout, Region, Shard, Span

POISON = 0xA5
GUARD_BYTES = 64
COLD = "D's"
"""The name of a draft that P has not: its fields are zero."""
_UINTS = {1: np.uint8, 2: np.uint16, 4: np.uint32}

Bytes = npt.NDArray[np.uint8]


@dataclass(frozen=True)
class Case:
    """One handoff: both layouts, the position, and the blocks of both sides."""

    source: Layout
    destination: Layout
    tokens: int
    src_ids: Mapping[str, tuple[int, ...]]
    dst_ids: Mapping[str, tuple[int, ...]]

    @property
    def fields(self) -> dict[str, Field]:
        """Fields of D's model by name, with inputs."""
        return fields_of(self.destination)

    def source_memory(self) -> dict[int, RankMemory]:
        """Return the memory of P's ranks, with the state in it."""
        memories = {one.rank: RankMemory(one, self.src_ids) for one in self.source.ranks}
        for memory in memories.values():
            memory.write(fields_of(self.source), self.tokens)
        return memories

    def destination_memory(self) -> dict[int, RankMemory]:
        """Return the poisoned memory of D's ranks."""
        return {one.rank: RankMemory(one, self.dst_ids) for one in self.destination.ranks}


def fields_of(layout: Layout) -> dict[str, Field]:
    return {field.name: field for field in (*layout.model.fields, *layout.model.inputs)}


def make_case(name: str) -> Case:
    """Return a case by its name.

    ``wide``: P2 to D4 with other pages and conv layout. ``cast``: and other SSM dtype. ``big``:
    enough bytes to be caught in the middle. ``stages``: pipelines of different cuts, and ranks of P
    that hold nothing, because the last layer has no state. ``shared``: the ranks of both share
    tokens out, each in its own way. ``recompute``: P keeps mixer inputs, D has weights. ``drafts``:
    both have a draft, of one name, but D has another than P.
    """
    head_dim, layers = (64, 4) if name == "big" else (8, 2)
    spec = _model(head_dim, layers, DType.FLOAT32)
    casted = _model(head_dim, layers, DType.BFLOAT16) if name == "cast" else spec
    page_tokens = 16 if name == "big" else 4
    source = build_layout(
        spec, EngineSettings(tp=2, page_tokens=page_tokens, conv_layout=ConvLayout.DS)
    )
    destination = build_layout(
        casted,
        EngineSettings(
            tp=4,
            page_tokens=2 * page_tokens,
            conv_layout=ConvLayout.SD,
            page_align_bytes=64,
            conv_rows_extra=2,
        ),
    )
    if name == "stages":
        staged = replace(spec, layer_count=3)
        source = build_layout(staged, EngineSettings(tp=2, pp=3, page_tokens=page_tokens))
        destination = build_layout(
            staged, EngineSettings(pp=2, layers_per_stage=(1, 2), page_tokens=2 * page_tokens)
        )
    if name == "shared":
        one_head = (
            replace(one, kv_heads=1) if isinstance(one, AttentionSpec) else one
            for one in spec.layers
        )
        single = replace(spec, layers=tuple(one_head))
        source = build_layout(single, EngineSettings(tp=4, page_tokens=page_tokens, dcp=4))
        destination = build_layout(
            single, EngineSettings(tp=2, page_tokens=2 * page_tokens, dcp=2, interleave_tokens=4)
        )
    if name == "recompute":
        mixer = Mixer(24, DType.BFLOAT16)
        mixing = replace(
            spec,
            layers=tuple(
                replace(one, mixer=mixer) if isinstance(one, Mamba2Spec) else one
                for one in spec.layers
            ),
        )
        source = build_layout(mixing, EngineSettings(tp=2, page_tokens=4, mixer_inputs=True))
        destination = build_layout(
            mixing,
            EngineSettings(
                tp=4, page_tokens=8, conv_layout=ConvLayout.DS, conv_rows_extra=2, projections=True
            ),
        )
    if name == "drafts":
        drafts = (replace(one, layer=2) for one in spec.layers if isinstance(one, AttentionSpec))
        drafting = replace(spec, draft_layers=tuple(drafts), draft="P's")
        source = build_layout(drafting, EngineSettings(tp=2, page_tokens=4))
        destination = build_layout(
            replace(drafting, draft=COLD), EngineSettings(tp=4, page_tokens=8)
        )
    tokens = 4096 if name == "big" else 21
    return Case(
        source,
        destination,
        tokens,
        {"attention": _scattered(-(-tokens // page_tokens)), "state": (2,)},
        {"attention": _scattered(-(-tokens // (2 * page_tokens))), "state": (1,)},
    )


def blocks(ids: Mapping[str, tuple[int, ...]]) -> Blocks:
    return Blocks({group: np.array(values, np.int64) for group, values in ids.items()})


def _model(head_dim: int, layers: int, ssm: DType) -> ModelSpec:
    mamba = Mamba2Spec(
        layer=0,
        heads=8,
        head_dim=head_dim,
        state=16,
        groups=4,
        conv_kernel=4,
        conv_dtype=DType.BFLOAT16,
        ssm_dtype=ssm,
    )
    attention = AttentionSpec(layer=0, kv_heads=4, head_dim=head_dim, dtype=DType.BFLOAT16)
    return ModelSpec(
        "small",
        tuple(
            replace(attention, layer=i) if i % 2 else replace(mamba, layer=i) for i in range(layers)
        ),
    )


def _scattered(count: int) -> tuple[int, ...]:
    """Return ids from 1 on in no order; block 0 is the null block."""
    return tuple(int(i) + 1 for i in np.random.default_rng(count).permutation(count))


class RankMemory:
    """A rank's regions in poisoned memory with guard bytes around each."""

    def __init__(
        self, layout: RankLayout, ids: Mapping[str, tuple[int, ...]], data: Bytes | None = None
    ) -> None:
        """Lay out all regions with their guards, one after the other, in ``data`` if given."""
        self.layout, self.ids = layout, ids
        self.offsets: dict[str, int] = {}
        self.page_counts: dict[str, int] = {}
        end = GUARD_BYTES
        for region in layout.regions:
            self.offsets[region.name] = end
            pages = 1 if region.constant else (max(ids[region.group]) + 2) * region.pages_per_block
            self.page_counts[region.name] = pages
            size = self.page_counts[region.name] * region.page_stride_bytes
            end += -(-size // GUARD_BYTES) * GUARD_BYTES + GUARD_BYTES
        self.size_bytes = end
        self.data = np.empty(end, np.uint8) if data is None else data[:end]
        self.poison()

    def poison(self) -> None:
        """Fill the memory with poison, as before anything arrives; weights are there."""
        self.data[:] = POISON
        self._write_weights(self.data)

    @property
    def regions(self) -> list[RegionMemory]:
        return [
            RegionMemory(
                region.name,
                self.data.ctypes.data + self.offsets[region.name],
                self.page_counts[region.name],
                region.page_stride_bytes,
                private=region.constant,
            )
            for region in self.layout.regions
        ]

    def _write_weights(self, image: Bytes) -> None:
        for one in self.layout.projections:
            row = next(other for other in self.layout.projections if other.input == one.input)
            hidden = row.strides_bytes[-2] // row.strides_bytes[-1]
            box = (*one.box[:-1], Span(0, hidden))
            shard = Shard(
                one.field, box, one.dtype, one.region, one.offset_bytes, one.strides_bytes
            )
            bits = mixers.numbers(one.field, box).view(np.uint32) >> 16
            self._view(image, self.layout.region(one.region), shard, 0)[...] = bits

    def write(self, fields: Mapping[str, Field], tokens: int, image: Bytes | None = None) -> None:
        """Write the rank's part of the known state into its memory, or into an image of it."""
        image = self.data if image is None else image
        for shard in self.layout.shards:
            field = fields[shard.field]
            read = mixers.input_of(field, fields)
            values = known(field, shard.dtype, tokens)
            if read is not None:
                values = (mixers.window(field, read).view(np.uint32) >> 16).astype(np.uint16)
            box = tuple(slice(span.start, span.stop) for span in shard.box)
            part = values[(slice(None), *box) if field.kind is Kind.PER_TOKEN else box]
            region = self.layout.region(shard.region)
            if field.kind is Kind.SNAPSHOT:
                self._view(image, region, shard, self.ids[region.group][0])[...] = part
                continue
            first = tokens - field.window_tokens if field.window_tokens else 0
            held = np.arange(max(first, 0), tokens)
            turn, in_turn = np.divmod(held, region.interleave_tokens)
            held = held[turn % region.context_parts == region.context_part]
            turn, in_turn = np.divmod(held, region.interleave_tokens)
            place = turn // region.context_parts * region.interleave_tokens + in_turn
            index, in_page = np.divmod(place, region.page_tokens or 1)
            for number in np.unique(index).tolist():  # places follow each other in a page
                here = index == number
                page, stop = self.ids[region.group][number], int(in_page[here][-1]) + 1
                view = self._view(image, region, shard, page, range(int(in_page[here][0]), stop))
                view[...] = part[held[here]]

        for shard in self.layout.inputs:
            region = self.layout.region(shard.region)
            view = self._view(image, region, shard, self.ids[region.group][0])
            view[...] = mixers.numbers(shard.field, shard.box).view(np.uint32) >> 16
        for scratch in self.layout.scratch:
            region = self.layout.region(scratch.region)
            start = self.offsets[region.name]
            start += self.ids[region.group][0] * region.page_stride_bytes + scratch.offset_bytes
            kind = _UINTS[scratch.dtype.itemsize_bytes]
            sizes, strides = scratch.sizes, scratch.strides_bytes
            np.ndarray(sizes, kind, image.data, start, strides)[...] = 0

    def expected(self, fields: Mapping[str, Field], tokens: int) -> Bytes:
        """Return what the whole memory must hold after the handoff."""
        image = np.full_like(self.data, POISON)
        self._write_weights(image)
        self.write(fields, tokens, image)
        return image

    def cleared(self, fields: Mapping[str, Field], tokens: int) -> npt.NDArray[np.bool_]:
        """Return a mask of the bytes of snapshots."""
        snapshots = {n: f for n, f in fields.items() if f.kind is Kind.SNAPSHOT}
        mine = tuple(shard for shard in self.layout.shards if shard.field in snapshots)
        only = RankMemory(replace(self.layout, shards=mine, projections=()), self.ids)
        first, second = np.zeros_like(self.data), np.full_like(self.data, 0xFF)
        for image in (first, second):
            only.write(snapshots, tokens, image)
        mask: npt.NDArray[np.bool_] = first == second
        return mask

    def _view(
        self,
        image: Bytes,
        region: Region,
        shard: Shard,
        page: int,
        tokens: range | None = None,
    ) -> npt.NDArray[np.unsignedinteger]:
        """Return a shard in a page, or those of some tokens in the page, ``[token, *box]``."""
        start = self.offsets[region.name] + page * region.page_stride_bytes + shard.offset_bytes
        sizes, strides = tuple(span.size for span in shard.box), shard.strides_bytes
        if tokens is not None:
            stride = shard.token_stride_bytes or 0
            start += tokens.start * stride
            sizes, strides = (len(tokens), *sizes), (stride, *strides)
        kind = _UINTS[shard.dtype.itemsize_bytes]
        return np.ndarray(sizes, kind, image.data, start, strides)


@functools.lru_cache(maxsize=128)
def known(field: Field, dtype: DType, tokens: int) -> npt.NDArray[np.unsignedinteger]:
    """Return the bit patterns of a field, with numbers that bfloat16 and float32 both hold."""
    values = _known(field, dtype, tokens)
    values.flags.writeable = False
    return values


def _known(field: Field, dtype: DType, tokens: int) -> npt.NDArray[np.unsignedinteger]:
    shape = (tokens, *field.shape) if field.kind is Kind.PER_TOKEN else field.shape
    seed = sum(field.name.encode())
    small = np.random.default_rng(seed).integers(-120, 120, shape, np.int8)
    if field.draft == COLD:
        small[...] = 0
    numbers = small.astype(np.float32)
    wide = numbers.view(np.uint32)
    if dtype.itemsize_bytes == 1:
        return small.view(np.uint8)
    return wide if dtype is DType.FLOAT32 else (wide >> 16).astype(np.uint16)
