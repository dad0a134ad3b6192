"""The measure of `restow conform`: wrong copies are found wrong, and Restow's plan is right."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest

from restow.agents.conform import own_plan
from restow.agents.conform.rules import GEOMETRIES, KINDS, Geometry
from restow.agents.conform.score import KV, STATE, WINDOW, Copy, Form, Page, Score, pages, score

MAMBA = Geometry("mamba2-g8", 1, 2, "DS")


def forms(geometry: Geometry) -> tuple[Form, Form]:
    kind = KINDS[geometry.kind]
    if kind.family == "gqa":
        return Form(), Form()
    layout, taps = geometry.conv_layout, kind.taps
    return Form(layout, taps + geometry.p_drafts), Form(layout, taps + geometry.d_drafts)


def both_pages(geometry: Geometry) -> tuple[list[Page], list[Page]]:
    kind, (p_form, d_form) = KINDS[geometry.kind], forms(geometry)
    return pages(kind, p_form, geometry.p_tp), pages(kind, d_form, geometry.d_tp)


def scored(geometry: Geometry, copies: list[Copy]) -> Score:
    return score(*both_pages(geometry), copies)


def planned(geometry: Geometry) -> list[Copy]:
    return own_plan.copies(geometry, *forms(geometry))


@pytest.mark.parametrize("geometry", GEOMETRIES, ids=str)
def test_restows_plan_brings_every_byte(geometry: Geometry) -> None:
    found = scored(geometry, planned(geometry))
    assert found.whole
    assert set(found.shares) in ({WINDOW, STATE}, {KV})


@pytest.mark.parametrize(
    "geometry", [MAMBA, Geometry("gdn", 4, 2, "DS"), Geometry("gqa-8", 1, 4)], ids=str
)
@pytest.mark.parametrize(
    "change",
    [
        lambda copy: replace(copy, src_offset_bytes=copy.src_offset_bytes + 2),
        lambda copy: replace(copy, dst_offset_bytes=copy.dst_offset_bytes + 1),
        lambda copy: replace(copy, length_bytes=copy.length_bytes - 1),
        lambda copy: replace(copy, length_bytes=copy.length_bytes + 1),
    ],
    ids=["shifted at P", "shifted at D", "a byte short", "a byte long"],
)
def test_a_wrong_slice_is_seen(geometry: Geometry, change: Callable[[Copy], Copy]) -> None:
    copies = planned(geometry)
    assert not scored(geometry, [*copies[:-1], change(copies[-1])]).whole


def test_a_slice_from_another_rank_is_seen() -> None:
    geometry = Geometry("mamba2-g8", 4, 2, "DS")
    copies = planned(geometry)
    other = replace(copies[0], src_rank=copies[0].src_rank + 1)
    assert not scored(geometry, [other, *copies[1:]]).whole


def test_a_slice_that_is_left_out_is_seen() -> None:
    assert not scored(MAMBA, planned(MAMBA)[1:]).whole
    assert {share.right_bytes for part in scored(MAMBA, []).shares.values() for share in part} == {
        0
    }


def test_one_slice_of_a_whole_conv_state_is_right_only_in_part() -> None:
    # The part x is two thirds of `[x | B | C]`. Rank 0 gets its own x; rank 1 gets what is C at its
    # place.
    conv_bytes = both_pages(MAMBA)[1][0].parts[WINDOW][1]
    copies = [Copy(0, rank, rank * conv_bytes, 0, conv_bytes) for rank in range(2)]
    shares = scored(MAMBA, copies).shares[WINDOW]
    assert [round(share.right_bytes / share.due_bytes, 3) for share in shares] == [0.667, 0.167]


def test_what_lands_outside_of_a_page_is_counted() -> None:
    end = both_pages(MAMBA)[1][0].parts[STATE][1]
    found = scored(MAMBA, [*planned(MAMBA), Copy(0, 0, 0, end - 4, 10)])
    assert found.outside_bytes == 6
