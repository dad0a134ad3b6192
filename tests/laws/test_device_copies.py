"""Law: what a device's kernel is told to copy is, byte for byte, what a host would copy.

The host binds every row to addresses; a device keeps the rows, and is given tokens and page ids.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import cast

import numpy as np
import pytest
import torch
from hypothesis import given, settings

from laws.checks import engines_of
from laws.executor import Arena, rows_of
from laws.rounds import tried
from laws.strategies import CASTING, STRATEGIES, Case, any_cases, cast_cases
from laws.transfers import Reading, served
from restow.agents.binding.copies import RowCopies
from restow.agents.binding.operands import DST, paged
from restow.agents.binding.pages import Blocks
from restow.agents.copying.codes import COPY_CODES
from restow.agents.copying.device_copies import DeviceLaunch, DeviceTables
from restow.broker.errors import PageRangeError
from restow.broker.layout import DType
from restow.broker.planner import Strategy, compile_programs, make_plan
from restow.kernels import ZERO_CODES, CopyCode, RowTable
from restow.kernels.codes import DST_BYTES, SRC_BYTES
from restow.kernels.copy import DeviceRows
from restow.kernels.reference import row_pieces

CPU = torch.device("cpu")
Bytes = list[tuple[int, ...]]


@dataclass
class Uploaded:
    """Stands for rows on a device; the definition reads them here."""

    table: RowTable


def uploaded(table: RowTable, device: torch.device) -> DeviceRows:
    return cast(DeviceRows, Uploaded(table))


def bytes_of(pieces: list[list[int]]) -> Bytes:
    """Return (source, destination, code) of each byte, or of each element that is cast; sorted."""
    found = []
    for src, dst, count, src_step, dst_step, code in pieces:
        i = np.arange(count)
        if code >= len(CopyCode):
            item = int(np.flatnonzero(code == ZERO_CODES)[0])
            places = (dst + i[:, None] * dst_step + np.arange(item)).ravel()
            found += [(-1, place, -1) for place in places.tolist()]
            continue
        whole = code <= CopyCode.COPY_8
        within = np.arange(int(SRC_BYTES[code]) if whole else 1)
        assert not whole or SRC_BYTES[code] == DST_BYTES[code]
        sources, targets = (
            (address + i[:, None] * step + within).ravel().tolist()
            for address, step in ((src, src_step), (dst, dst_step))
        )
        kind = -2 if whole else code
        found += [(a, b, kind) for a, b in zip(sources, targets, strict=True)]
    return sorted(found)


def on_host(part: RowCopies) -> list[list[int]]:
    pieces = []
    for src, dst, count, src_step, dst_step, src_type, dst_type in rows_of(part.bind()):
        code = int(COPY_CODES[src_type, dst_type])
        if part.src is None:
            src, src_step, code = 0, 0, int(ZERO_CODES[DType(dst_type).itemsize_bytes])
        pieces.append([src, dst, count, src_step, dst_step, code])
    return pieces


def on_device(launch: DeviceLaunch | None) -> list[list[int]]:
    if launch is None:
        return []
    return list(row_pieces(launch.rows.table, launch.call, launch.staged))


def check_devices(case: Case, strategy: Strategy) -> None:
    arena = Arena()
    source, destination = engines_of(case, arena)
    plan = make_plan(source.layout, destination.layout)
    for program in compile_programs(plan, served(plan, strategy)):
        tables = DeviceTables(CPU, uploaded)
        for parts in Reading(program, source, destination, case.tokens).launches:
            wanted = bytes_of([piece for part in parts for piece in on_host(part)])
            for _ in range(2):  # the second time the rows are there
                assert bytes_of(on_device(tables.bind(parts))) == wanted


@given(any_cases())
@settings(max_examples=20)
def test_a_page_that_a_region_does_not_have_is_refused_as_on_a_host(case: Case) -> None:
    source, destination = engines_of(case, Arena())
    plan = make_plan(source.layout, destination.layout)
    for program in compile_programs(plan, Strategy.PACK):
        reading = Reading(program, source, destination, case.tokens)
        ids = reading.order.dst_blocks.by_group
        beyond = Blocks({group: pages + (1 << 20) for group, pages in ids.items()})
        pages = paged(reading.memory, DST, beyond)
        for part in reading.launches[-2]:
            wrong = replace(part, dst=pages)
            if not len(part.bind()):
                continue
            for bind in (wrong.bind, lambda: DeviceTables(CPU, uploaded).bind([wrong])):  # noqa: B023
                with pytest.raises(PageRangeError):
                    bind()


@tried("device copies")
@given(any_cases(), STRATEGIES)
def test_layouts_of_any_kind(case: Case, strategy: Strategy) -> None:
    check_devices(case, strategy)


@tried("device copies, casts")
@given(cast_cases(), CASTING)
def test_casts(case: Case, strategy: Strategy) -> None:
    check_devices(case, strategy)
