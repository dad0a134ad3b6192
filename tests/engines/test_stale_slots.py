"""A short new prompt that is computed like decoding must not begin with what its slot's last left.

States are cleared by the context of requests alone: the length of their queries is not even told.
"""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from hypothesis import example, given
from hypothesis import strategies as st
from torch import Tensor

from restow.agents.engines.common.stale_slots import StaleSlots, StateShapeError

SLOTS, GROUPS = 5, 2
REQUESTS = st.tuples(*[st.integers(-1, SLOTS - 1)] * GROUPS, st.integers(0, 2))
"""A request's slot in each group, -1 for one that pads the batch, and the tokens of its context."""


@pytest.mark.parametrize("rows_outside", [True, False], ids=["SD", "DS"])
@given(st.lists(REQUESTS, min_size=1, max_size=6), st.sampled_from([torch.int32, torch.int64]))
@example([(1, 2, 40), (2, 3, 0), (3, 4, 1), (0, 0, 0), (-1, -1, 0)], torch.int32)
def test_the_states_of_requests_that_begin_are_cleared_and_no_others(
    rows_outside: bool, batch: list[tuple[int, ...]], dtype: torch.dtype
) -> None:
    # SD keeps rows of all channels, DS the rows of one channel side by side.
    shape = (SLOTS, 3, 12) if rows_outside else (SLOTS, 12, 3)
    conv = [torch.ones(shape, dtype=torch.bfloat16) for _ in range(GROUPS)]
    ssm = [torch.ones(SLOTS, 2, 4, 8) for _ in range(GROUPS)]
    views = [one.transpose(1, 2) if rows_outside else one for one in conv]
    stale = StaleSlots([list(states) for states in zip(views, ssm, strict=True)], first_slot=1)
    *slots, context = torch.tensor(batch, dtype=dtype).T
    stale.clear(torch.stack(slots), context)
    for group in range(GROUPS):
        begun = {one[group] for one in batch if one[-1] == 0 and one[group] > 0}
        wanted = [float(slot not in begun) for slot in range(SLOTS)]
        for state in (conv[group], ssm[group]):
            flat = state.float().flatten(1)
            assert [flat.amin(1).tolist(), flat.amax(1).tolist()] == [wanted, wanted]


def test_one_list_may_serve_all_groups() -> None:
    states = [torch.ones(4, 3), torch.ones(4, 2, dtype=torch.bfloat16)]
    StaleSlots([[states[0]], [states[1]]]).clear(torch.tensor([1, 3]), torch.tensor([0, 5]))
    for state in states:
        assert state.float().sum(1).eq(0).tolist() == [False, True, False, False]


def test_an_engine_without_recurrent_state_has_nothing_to_clear() -> None:
    StaleSlots([]).clear(torch.tensor([[1]]), torch.tensor([0]))


@pytest.mark.parametrize(
    "gaps",
    [lambda: torch.zeros(4, 6, 8)[:, :, :4], lambda: torch.zeros(4, 3, 1).expand(4, 3, 2)],
    ids=["gaps", "twice"],
)
def test_a_slot_in_pieces_is_refused(gaps: Callable[[], Tensor]) -> None:
    with pytest.raises(StateShapeError, match="group 0, state 0"):
        StaleSlots([[gaps()]])
