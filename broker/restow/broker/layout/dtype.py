"""Element types, by the names that torch and safetensors use."""

from __future__ import annotations

from enum import IntEnum

import numpy as np

from restow.broker.errors import LayoutFormError


class DType(IntEnum):
    """An element type; the number is what travels in piece tables.

    >>> DType.parse("bfloat16").itemsize_bytes
    2
    """

    UINT8 = 1
    INT8 = 2
    FLOAT8_E4M3FN = 3
    FLOAT8_E5M2 = 4
    FLOAT16 = 5
    BFLOAT16 = 6
    FLOAT32 = 7
    FLOAT4_E2M1FN_X2 = 8
    """Two numbers in a byte: axes count pairs, so that no cut falls between two of one byte."""

    @property
    def label(self) -> str:
        """The dtype's name, for example ``bfloat16``."""
        return self.name.lower()

    @property
    def itemsize_bytes(self) -> int:
        """Bytes of one element."""
        return _ITEM_BYTES.get(self, 1)

    @property
    def castable(self) -> bool:
        """Whether its elements may be turned into another castable type on the way."""
        return self in (DType.FLOAT16, DType.BFLOAT16, DType.FLOAT32)

    def holds(self, other: DType) -> bool:
        """Whether every value of ``other`` is a value of this type.

        >>> DType.FLOAT32.holds(DType.BFLOAT16), DType.FLOAT16.holds(DType.BFLOAT16)
        (True, False)
        """
        return self is other or (self is DType.FLOAT32 and other.castable)

    @classmethod
    def _missing_(cls, value: object) -> DType | None:
        """The type of that name."""
        return cls.__members__.get(value.upper()) if isinstance(value, str) else None

    @classmethod
    def parse(cls, name: str) -> DType:
        """Read a dtype's name; `LayoutFormError` lists the known ones."""
        try:
            return cls[name.upper()]
        except KeyError:
            known = ", ".join(dtype.label for dtype in cls)
            raise LayoutFormError(f"dtype {name!r} is unknown; known are {known}") from None


_ITEM_BYTES = {DType.FLOAT16: 2, DType.BFLOAT16: 2, DType.FLOAT32: 4}
ITEM_BYTES = np.array([0, *(dtype.itemsize_bytes for dtype in DType)], np.int64)
"""Bytes of an element by `DType` number."""
