"""Block ids as callers give them: whole numbers in a list, an array, or anything like these."""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np

from restow.broker.errors import PageRangeError
from restow.broker.layout.rows import Int64s
from restow.broker.rpc.status import cut

ALL_IDS = 1 << 31
"""Ids travel as int32."""


def checked_ids(handoff_id: str, group: str, ids: object, limit: int) -> Int64s:
    """The ids as an array. Raises `PageRangeError` if one is no whole number of [0, ``limit``)."""
    if isinstance(ids, str | bytes) or not isinstance(ids, Iterable):
        raise _wrong(handoff_id, group, ids, limit)
    listed = np.atleast_1d(ids) if isinstance(ids, np.ndarray) else list(ids)
    try:
        array = np.asarray(listed)
    except ValueError:  # lists of unequal length among them
        array = np.empty((), np.object_)
    if array.shape == (0,):
        return np.empty(0, np.int64)
    whole = array.dtype.kind in "iu" and array.ndim == 1
    if not whole or not 0 <= array.min() <= array.max() < limit:
        wrong = (one for one in listed if not _is_id(one, limit))
        raise _wrong(handoff_id, group, next(wrong, ids), limit)
    return array.astype(np.int64, copy=False)


def _is_id(one: object, limit: int) -> bool:
    return (
        isinstance(one, int | np.integer)
        and not isinstance(one, bool | np.bool_)
        and 0 <= int(one) < limit
    )


def _wrong(handoff_id: str, group: str, one: object, limit: int) -> PageRangeError:
    shown = cut(repr(one.item() if isinstance(one, np.generic) else one), 64)
    return PageRangeError(
        f"handoff {cut(handoff_id, 64)}, group {group}: block id {shown} is none of [0, {limit})",
        handoff=cut(handoff_id, 64),
        group=group,
        page=shown,
        range=f"[0, {limit})",
    )
