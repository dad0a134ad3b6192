"""Layouts sent outright: fields of any axes, cut anywhere, held by any ranks, at any strides.

Hypothesis draws how many fields and ranks there are and a seed for the details: so a failure
shrinks to few of both, and drawing stays cheap enough for thousands of cases.
"""

from __future__ import annotations

import itertools
import math
import random
from collections.abc import Sequence
from dataclasses import dataclass, replace

from hypothesis import strategies as st

from restow.broker.layout import (
    Box,
    DType,
    Field,
    Kind,
    Layout,
    Model,
    RankLayout,
    Region,
    Shard,
    Span,
)

_AXES = ("head", "dim", "tap")
_WINDOWS = (0, 0, 1, 3, 6)
_FIELD_COUNTS = st.integers(1, 4)
_RANK_COUNTS = st.integers(1, 4)
_SEEDS = st.integers(0, 2**16)


@dataclass(frozen=True, slots=True)
class _Piece:
    field: Field
    box: Box
    dtype: DType
    context_part: int = 0


@st.composite
def outright_layouts(
    draw: st.DrawFn, engines: int, dtypes: Sequence[DType], casts: bool
) -> tuple[Layout, ...]:
    """Draw layouts of one model on several engines; unless ``casts`` all dtypes agree.

    Casts need every element at a multiple of its size, so gaps come in fours then.
    """
    rng = random.Random(draw(_SEEDS))  # noqa: S311
    model = _model(rng, draw(_FIELD_COUNTS))
    common = {field.name: rng.choice(dtypes) for field in model.fields}
    layouts = []
    for _ in range(engines):
        own = {field.name: rng.choice(dtypes) for field in model.fields} if casts else common
        maker = _Maker(random.Random(draw(_SEEDS)), 4 if casts else 1)  # noqa: S311
        layouts.append(maker.layout(model, own, draw(_RANK_COUNTS)))
    return tuple(layouts)


def _model(rng: random.Random, field_count: int) -> Model:
    fields = []
    for index in range(field_count):
        shape = tuple(rng.randint(1, 5) for _ in range(rng.randint(0, 3)))
        kind = rng.choice(list(Kind))
        # Whatever their windows are, fields share lists of pages here.
        window = rng.choice(_WINDOWS) if kind is Kind.PER_TOKEN else 0
        fields.append(Field(f"field{index}", kind, _AXES[: len(shape)], shape, window))
    return Model("outright", tuple(fields))


@dataclass(slots=True)
class _Maker:
    rng: random.Random
    grain_bytes: int

    def layout(self, model: Model, dtypes: dict[str, DType], rank_count: int) -> Layout:
        rng = self.rng
        numbers = rng.sample(range(10), rank_count)
        held: dict[int, list[_Piece]] = {number: [] for number in numbers}
        parts = rng.choice([1, rng.randint(1, rank_count)])
        for field in model.fields:
            least = parts if field.kind is Kind.PER_TOKEN else 1
            for box in self._cut(field):
                holding = rng.sample(numbers, rng.randint(least, rank_count))
                for index, number in enumerate(holding):
                    part = index if index < least else rng.randrange(least)
                    held[number].append(_Piece(field, box, dtypes[field.name], part))
        page_tokens, per_block = rng.randint(1, 4), rng.randint(1, 2)
        run = rng.choice([run for run in range(1, 9) if page_tokens * per_block % run == 0])
        form = page_tokens, per_block, parts, run if parts > 1 else 1
        ranks = (self._rank(number, pieces, form) for number, pieces in held.items())
        return Layout(model, tuple(ranks))

    def _cut(self, field: Field) -> list[Box]:
        """Return boxes that tile a field: every axis is cut at some places."""
        axes = []
        for size in field.shape:
            inner = self.rng.sample(range(1, size), min(size - 1, self.rng.choice([0, 0, 1, 2])))
            edges = [0, *sorted(inner), size]
            axes.append([Span(a, b) for a, b in itertools.pairwise(edges)])
        return list(itertools.product(*axes))

    def _rank(
        self, number: int, pieces: list[_Piece], form: tuple[int, int, int, int]
    ) -> RankLayout:
        regions: list[Region] = []
        shards: list[Shard] = []
        page_tokens, per_block, parts, run = form
        kinds = {(piece.field.kind, piece.context_part) for piece in pieces}
        for kind, context_part in sorted(kinds):
            mine = [p for p in pieces if (p.field.kind, p.context_part) == (kind, context_part)]
            split = self.rng.randint(0, len(mine)) if self.rng.random() < 0.5 else 0
            for part in (mine[split:], mine[:split]):
                if not part:
                    continue
                tokens = page_tokens if kind is Kind.PER_TOKEN else None
                name = f"r{len(regions)}"
                placed, size = self._place(part, name, tokens)
                stride = size + self.rng.choice([0, 0, 3, 8]) * self.grain_bytes
                region = Region(name, kind.value, stride, tokens)
                if tokens is not None:
                    region = replace(
                        region,
                        pages_per_block=per_block,
                        context_parts=parts,
                        context_part=context_part,
                        interleave_tokens=run,
                    )
                regions.append(region)
                shards.extend(placed)
        return RankLayout(number, tuple(regions), tuple(shards))

    def _place(
        self, pieces: list[_Piece], region: str, page_tokens: int | None
    ) -> tuple[list[Shard], int]:
        """Return shards that share no byte, and the bytes of a page."""
        rng = self.rng
        if page_tokens is not None and rng.random() < 0.5:
            return self._braided(pieces, region, page_tokens)
        shards, at = [], 0
        for piece in rng.sample(pieces, len(pieces)):
            at = self._up(at) + rng.choice([0, 0, 0, 1, 4]) * self.grain_bytes
            sizes = [span.size for span in piece.box]
            if page_tokens is not None:
                sizes.append(page_tokens)
            strides = [0] * len(sizes)
            reach = piece.dtype.itemsize_bytes
            for axis in rng.sample(range(len(sizes)), len(sizes)):
                strides[axis] = reach + rng.choice([0, 0, 0, 1, 2, 4]) * self.grain_bytes
                reach += (sizes[axis] - 1) * strides[axis]
            token_stride = strides.pop() if page_tokens is not None else None
            shards.append(_shard(piece, region, at, tuple(strides), token_stride))
            at += reach
        return shards, self._up(at)

    def _braided(
        self, pieces: list[_Piece], region: str, page_tokens: int
    ) -> tuple[list[Shard], int]:
        """Return per-token shards that take turns in equal strips, each in every n-th strip.

        All have bytes of their own in a strip, so they never meet, and yet step by other strides.
        """
        elements = [math.prod(span.size for span in piece.box) for piece in pieces]
        sizes = [
            self._up(n * p.dtype.itemsize_bytes) for n, p in zip(elements, pieces, strict=True)
        ]
        every = [self.rng.randint(1, 3) for _ in pieces]
        strip = sum(sizes)
        shards, at = [], 0
        for piece, size, turn in zip(pieces, sizes, every, strict=True):
            strides, step = [], piece.dtype.itemsize_bytes
            for span in reversed(piece.box):
                strides.append(step)
                step *= span.size
            shards.append(_shard(piece, region, at, tuple(reversed(strides)), turn * strip))
            at += size
        return shards, strip * max(every) * page_tokens

    def _up(self, size: int) -> int:
        return -(-size // self.grain_bytes) * self.grain_bytes


def _shard(
    piece: _Piece, region: str, at: int, strides: tuple[int, ...], token_stride: int | None
) -> Shard:
    return Shard(piece.field.name, piece.box, piece.dtype, region, at, strides, token_stride)
