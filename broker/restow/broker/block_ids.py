"""Lists of block ids: integers as callers pass them, packed int32 as they travel and are stored."""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np
import numpy.typing as npt

from restow.broker.errors import PagesError

ID_BYTES = 4
MAX_BLOCKS = 1 << 20
"""Largest number of ids in a list."""
MAX_LIST_BYTES = ID_BYTES * MAX_BLOCKS
_ID = np.dtype("<i4")
_UNSIGNED_ID = np.dtype("<u4")


def whole_numbers(values: object, limit: int) -> npt.NDArray[np.int64] | None:
    """Return a flat list or array of integers in [0, ``limit``) as int64; otherwise None.

    Nothing is rounded or parsed: ``1.0``, ``"1"`` and ``True`` are not accepted as integers.

    >>> whole_numbers([1, np.int32(2)], 9), whole_numbers([1, True], 9), whole_numbers([9], 9)
    (array([1, 2]), None, None)
    """
    if isinstance(values, str | bytes) or not isinstance(values, Iterable):
        return None
    if hasattr(values, "dtype"):
        array = np.atleast_1d(np.asarray(values))
        known = array.dtype.kind in "iu" and array.ndim == 1
    else:
        listed = values if isinstance(values, list | range) else list(values)
        # numpy converts True to 1, so check the types of the elements first.
        known = all(_is_whole_type(kind) for kind in set(map(type, listed)))
        try:
            array = np.asarray(listed if known else (), np.int64)
        except OverflowError:
            return None
    if not known or (len(array) and not 0 <= array.min() <= array.max() < limit):
        return None
    return array.astype(np.int64, copy=False)


def first_wrong(values: object, limit: int) -> object:
    """Return the first element that `whole_numbers` refuses; ``values`` itself if it is no list."""
    if isinstance(values, str | bytes) or not isinstance(values, Iterable):
        return values
    listed = np.atleast_1d(np.asarray(values)) if hasattr(values, "dtype") else values
    return next((element for element in listed if not is_whole(element, limit)), values)


def is_whole(value: object, limit: int) -> bool:
    """Return whether ``value`` is an integer in [0, ``limit``)."""
    return _is_whole_type(type(value)) and 0 <= value < limit  # type: ignore[operator]


def _is_whole_type(kind: type) -> bool:
    return issubclass(kind, int | np.integer) and kind is not bool


def packed(ids: npt.NDArray[np.int64]) -> bytes:
    """Pack ids, all of which fit into int32, as little-endian bytes."""
    return ids.astype(_ID).tobytes()


def unpacked(group: str, data: bytes) -> npt.NDArray[np.int64]:
    """Unpack bytes to int64 ids.

    Raises `PagesError` if the length is not a multiple of four bytes.
    """
    check_whole(group, data)
    return np.frombuffer(data, _ID).astype(np.int64)


def unsigned(data: bytes) -> npt.NDArray[np.uint32]:
    """View packed ids as unsigned, so that a negative id exceeds every limit. Copies nothing."""
    return np.frombuffer(data, _UNSIGNED_ID)


def check_whole(group: str, data: bytes) -> None:
    """Raise `PagesError` if the length is not a multiple of four bytes."""
    if len(data) % ID_BYTES:
        raise PagesError(f"group {group}: {len(data)} bytes are not int32 ids", group=group)
