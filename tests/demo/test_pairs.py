"""The recall model decodes exactly, whatever two things differ between the engines, or agree.

The factors are how states travel, and on each side the size, the conv layout, the rows for
speculative tokens, the pages, and a type each for KV, windows and SSM states. Every pair of their
values occurs in a case, with agents in processes, a broker and NIXL.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any, cast

import pytest

from demo.covering import Row, covering_rows, every_pair
from demo.house import House, demo_house
from demo.poisoned import poison, with_state, wrong_regions
from restow.broker.families import ConvLayout, EngineSettings, KvOrder
from restow.broker.layout import DType
from restow.broker.planner import Strategy
from restow.demo.experiment import PromptAnswer
from restow.demo.recall.task import make_prompts
from restow.demo.transformers.generation import StoredTypes

pytestmark = [pytest.mark.matrix, pytest.mark.timeout(900)]

LEFT_OUT = {
    "recompute": "D rebuilds windows from a mixer's inputs, which this engine keeps none of"
}
"""Strategies that no case has, and why."""
RAW = {"slices"}
"""Strategies that cast nothing: both sides have the same types."""
STEPS = 6
PROMPTS = [one for one in make_prompts(16, seed=3) if len(one.token_ids) >= 36][:2]
"""They have more tokens than a page of any size holds."""


@dataclass(frozen=True)
class Pages:
    """How KV lies in pages."""

    tokens: int
    per_block: int
    align_bytes: int
    order: KvOrder
    packed: bool


PAGES = (
    Pages(16, 1, 1, KvOrder.HND, packed=True),
    Pages(12, 3, 4096, KvOrder.NHD, packed=True),
    Pages(8, 2, 1000, KvOrder.HND, packed=False),
    Pages(32, 1, 64, KvOrder.NHD, packed=False),
)
TYPES = (DType.FLOAT32, DType.BFLOAT16, DType.FLOAT16)
OF_A_SIDE: dict[str, Sequence[object]] = {
    "rows": (0, 1, 2, 3),
    "pages": PAGES,
    "tp": (1, 2, 4),
    "kv": TYPES,
    "conv": TYPES,
    "ssm": TYPES,
    "layout": tuple(ConvLayout),
}
FACTORS: dict[str, Sequence[object]] = {
    "strategy": tuple(s for s in Strategy if s.value not in LEFT_OUT),
    **{f"{side}.{name}": values for name, values in OF_A_SIDE.items() for side in "pd"},
}


def allowed(row: Row) -> bool:
    """Return whether the types differ nowhere, so far as known, if the strategy can't cast."""
    pairs = [(row.get(f"p.{name}"), row.get(f"d.{name}")) for name in ("kv", "conv", "ssm")]
    return row.get("strategy") not in RAW or all(p is d or p is None or d is None for p, d in pairs)


CASES = covering_rows(FACTORS, allowed)


def settings_of(row: Row, side: str) -> EngineSettings:
    pages: Any = row[f"{side}.pages"]
    tp, rows, layout = (cast("Any", row[f"{side}.{name}"]) for name in ("tp", "rows", "layout"))
    return EngineSettings(
        tp=tp,
        page_tokens=pages.tokens,
        pages_per_block=pages.per_block,
        conv_layout=layout,
        kv_order=pages.order,
        conv_rows_extra=rows,
        page_align_bytes=pages.align_bytes,
        kv_packed=pages.packed,
    )


def types_of(row: Row, side: str) -> StoredTypes:
    return StoredTypes(*(cast("DType", row[f"{side}.{name}"]) for name in ("kv", "conv", "ssm")))


def words(row: Row) -> str:
    sides = []
    for side in "pd":
        settings, types = settings_of(row, side), types_of(row, side)
        labels = "/".join(t.label.replace("float", "f") for t in (types.kv, types.conv, types.ssm))
        sides.append(
            f"tp{settings.tp},{settings.conv_layout}+{settings.conv_rows_extra},"
            f"{settings.page_tokens}x{settings.pages_per_block},{labels}"
        )
    return f"{row['strategy']}-{'-'.join(sides)}"


@pytest.fixture(scope="module")
def house() -> Iterator[House]:
    with demo_house() as made:
        yield made


def test_every_pair_of_values_occurs() -> None:
    found = {
        ((one, row[one]), (other, row[other]))
        for row in CASES
        for one in FACTORS
        for other in FACTORS
    }
    assert set(every_pair(FACTORS)) <= found
    assert all(allowed(row) for row in CASES)


@pytest.mark.parametrize("row", [pytest.param(row, id=words(row)) for row in CASES])
def test_any_two_differences_together(house: House, row: Row) -> None:
    strategy = Strategy(str(row["strategy"]))
    name = words(row)
    # Any type on either side: every second pair of types rounds.
    broker = house.broker(strategy, allow_narrowing=True)
    sides = [
        house.unstarted(
            *(f"{side.upper()} {name}", broker, settings_of(row, side)),
            capacity_tokens=512,
            capacity_requests=4,
            stored=types_of(row, side),
        )
        for side in "pd"
    ]
    with ExitStack() as stack, ThreadPoolExecutor() as pool:
        p, d = pool.map(stack.enter_context, sides)
        for index, prompt in enumerate(PROMPTS):
            handoff_id = f"{name} {index}"
            held = len(prompt.token_ids) - 1
            poison(d)
            asked = d.ask(handoff_id, prompt.token_ids) if index % 2 else None
            p.prefill(handoff_id, prompt.token_ids)
            asked = asked or d.ask(handoff_id, prompt.token_ids)
            through = d.decode(asked, STEPS)

            expected = with_state(d, p.state_at(prompt.token_ids, held), asked.blocks)
            assert wrong_regions(d, expected) == []
            alone = d.decode_alone(prompt.token_ids, STEPS, prefilled_as=types_of(row, "p"))
            assert PromptAnswer(prompt, alone, through, 0, 0).exact
