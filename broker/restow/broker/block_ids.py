"""Lists of block ids as they travel and are kept: int32, little-endian, one after the other."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from restow.broker.errors import PagesError

ID_BYTES = 4
MAX_BLOCKS = 1 << 20
"""In one list."""
MAX_LIST_BYTES = ID_BYTES * MAX_BLOCKS
_ID = np.dtype("<i4")
_UNSIGNED_ID = np.dtype("<u4")


def packed(ids: npt.NDArray[np.int64]) -> bytes:
    """As bytes; all ids are int32."""
    return ids.astype(_ID).tobytes()


def unpacked(group: str, data: bytes) -> npt.NDArray[np.int64]:
    """As int64. Raises `PagesError` for bytes that are no int32."""
    check_whole(group, data)
    return np.frombuffer(data, _ID).astype(np.int64)


def unsigned(data: bytes) -> npt.NDArray[np.uint32]:
    """Seen as unsigned, so that a negative id is out of every range. Copies nothing."""
    return np.frombuffer(data, _UNSIGNED_ID)


def check_whole(group: str, data: bytes) -> None:
    """Raise `PagesError` for bytes that are no int32."""
    if len(data) % ID_BYTES:
        raise PagesError(f"group {group}: {len(data)} bytes are not int32 ids", group=group)
