"""One copy of a box from a source shard to a destination shard."""

from __future__ import annotations

from dataclasses import dataclass

from restow.broker.layout import Box, DType, Shard
from restow.broker.layout.span import volume
from restow.broker.words import Worded


@dataclass(frozen=True, slots=True)
class Place(Worded):
    """Where a box begins inside a page, and how it is strided there."""

    region: str
    offset_bytes: int
    strides_bytes: tuple[int, ...]
    token_stride_bytes: int | None
    dtype: DType

    @classmethod
    def of(cls, shard: Shard, box: Box) -> Place:
        """The place of ``box``, which lies inside the shard's box."""
        shift = sum(
            (span.start - held.start) * stride
            for span, held, stride in zip(box, shard.box, shard.strides_bytes, strict=True)
        )
        return cls(
            shard.region,
            shard.offset_bytes + shift,
            shard.strides_bytes,
            shard.token_stride_bytes,
            shard.dtype,
        )


@dataclass(frozen=True, slots=True)
class Move:
    """``box`` of ``field``, in global coordinates, from one rank's page to another's."""

    field: str
    src_rank: int
    dst_rank: int
    box: Box
    src: Place
    dst: Place

    @property
    def elements(self) -> int:
        """Elements moved, for one token where the field is per-token."""
        return volume(self.box)

    @property
    def bytes(self) -> int:
        """Source bytes read, for one token where the field is per-token."""
        return self.elements * self.src.dtype.itemsize_bytes

    @property
    def per_token(self) -> bool:
        """Whether the move repeats for every token."""
        return self.src.token_stride_bytes is not None
