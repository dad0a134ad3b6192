"""Clear the state that a slot's last request left there, before the next request begins.

An engine that computes a short new prompt like a step of decoding (one token, or up to 1 + S where
S drafts are checked at once) begins it with the state that lies in its slot. A fresh prefill begins
without a state, but a step of decoding does not. So call this before each step:

    stale = StaleSlots([[conv_0, ssm_0], [conv_1, ssm_1]], first_slot=1)   # once
    stale.clear(slots, context_tokens)                                     # every step

Requests that begin are found by their context alone, on the device; their queries may have any
length. Keys and values are not cleared, because the context says which of them count.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch

from restow.broker.errors import RestowError
from restow.kernels import SlotTable, clear_slots


class StateShapeError(RestowError, status="INVALID_ARGUMENT", reason="STATE_SHAPE_INVALID"):
    """A state tensor in which a slot is not a single run of bytes."""


class StaleSlots:
    """The recurrent states of an engine, in groups that share a list of slots."""

    def __init__(self, groups: Sequence[Sequence[torch.Tensor]], first_slot: int = 0) -> None:
        """Note the addresses of the states; the tensors are not kept.

        Each tensor is [slots, ...]; inside a slot its elements lie side by side, in any order (SD
        and DS alike). Slots below ``first_slot`` are padding, as vLLM's null block 0 is. All
        tensors are on one device. Raises `StateShapeError`.
        """
        rows = [
            _row(state, group, number)
            for group, states in enumerate(groups)
            for number, state in enumerate(states)
        ]
        self._first_slot = first_slot
        self._table: SlotTable | None = None
        if rows:
            device = next(state.device for states in groups for state in states)
            self._table = SlotTable.checked(np.array(rows, np.int64), device)

    def clear(self, slots: torch.Tensor, context_tokens: torch.Tensor) -> None:
        """Zero the states of requests without context, in one launch and without waiting.

        ``slots`` is int32 or int64 [groups, requests], or [requests] where all groups share one
        list; ``context_tokens`` counts tokens before this step [requests]. Both are on the states'
        device. A CUDA graph may capture the launch.
        """
        if self._table is None:
            return
        lists = slots.expand(self._table.groups, -1) if slots.ndim == 1 else slots
        clear_slots(self._table, lists, context_tokens, of_zero=True, first_page=self._first_slot)


def _row(state: torch.Tensor, group: int, number: int) -> tuple[int, int, int, int, int]:
    item_bytes, slot = state.element_size(), state[0]
    span = 1 + sum((n - 1) * step for n, step in zip(slot.shape, slot.stride(), strict=True))
    if span != slot.numel():
        raise StateShapeError(
            f"group {group}, state {number}: a slot of shape {list(slot.shape)} and strides "
            f"{list(slot.stride())} is not a run of bytes",
            group=group,
            state=number,
        )
    return state.data_ptr(), state.stride(0) * item_bytes, 0, span * item_bytes, group
