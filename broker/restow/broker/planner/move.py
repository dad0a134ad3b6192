"""One copy of a box from a source shard to a destination shard."""

from __future__ import annotations

from dataclasses import dataclass

from restow.broker.layout import ALL_TOKENS, Box, DType, Shard, TokenClass
from restow.broker.layout.span import volume
from restow.broker.layout.token_class import count_shared
from restow.broker.words import Worded


@dataclass(frozen=True, slots=True)
class Place(Worded):
    """Where a box begins inside a page, and how it is strided there; which tokens are there."""

    region: str
    offset_bytes: int
    strides_bytes: tuple[int, ...]
    token_stride_bytes: int | None
    dtype: DType
    tokens: TokenClass = ALL_TOKENS

    @classmethod
    def of(cls, shard: Shard, box: Box, tokens: TokenClass = ALL_TOKENS) -> Place:
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
            tokens,
        )


@dataclass(frozen=True, slots=True)
class Move:
    """``box`` of ``field``, in global coordinates, from one rank's page to another's.

    Of a per-token field it moves the tokens that both places hold.
    """

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

    def entries(self, count: int, tokens: int) -> int:
        """How many of its field's last ``count`` entries it moves, in a handoff of ``tokens``."""
        if not self.per_token:
            return count
        return count_shared(self.src.tokens, self.dst.tokens, tokens - count, tokens)

    @property
    def per_token(self) -> bool:
        """Whether the move repeats for every token."""
        return self.src.token_stride_bytes is not None
