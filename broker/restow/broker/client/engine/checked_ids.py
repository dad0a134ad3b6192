"""Block ids as callers give them: whole numbers in a list, an array, or anything like these."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from restow.broker.block_ids import first_wrong, whole_numbers
from restow.broker.errors import PageRangeError
from restow.broker.layout.rows import Int64s
from restow.broker.rpc.status import cut

ALL_IDS = 1 << 31
"""Ids travel as int32."""


def checked_ids(handoff_id: str, group: str, ids: object, limit: int) -> Int64s:
    """Return the ids as an array.

    Raises `PageRangeError` if an id is no whole number of [0, ``limit``).
    """
    listed = list(ids) if isinstance(ids, Iterator) else ids
    array = whole_numbers(listed, limit)
    if array is None:
        raise _wrong(handoff_id, group, first_wrong(listed, limit), limit)
    return array


def _wrong(handoff_id: str, group: str, one: object, limit: int) -> PageRangeError:
    shown = cut(repr(one.item() if isinstance(one, np.generic) else one), 64)
    return PageRangeError(
        f"handoff {cut(handoff_id, 64)}, group {group}: block id {shown} is none of [0, {limit})",
        handoff=cut(handoff_id, 64),
        group=group,
        page=shown,
        range=f"[0, {limit})",
    )
