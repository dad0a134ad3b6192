"""The recall model's state between engines that are cut and laid out differently, exactly.

All pairs of P_TP and D_TP in {1, 2, 4}, SD to DS and DS to SD, unequal pages, both strategies,
agents embedded and as daemons: real processes, real NIXL, a real model.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

from demo.house import House, demo_house
from restow.broker.families import ConvLayout, EngineSettings
from restow.broker.planner import Strategy
from restow.demo.experiment import (
    SEED,
    PromptAnswer,
    Sabotage,
    answer_prompts,
    running_daemon,
    swap_b_and_c,
)
from restow.demo.recall.task import make_prompts
from restow.demo.transformers.engine import Engine
from restow.demo.transformers.generation import Decoded

pytestmark = [pytest.mark.matrix, pytest.mark.timeout(900)]

TP_SIZES = (1, 2, 4)
CONV_LAYOUTS = ((ConvLayout.SD, ConvLayout.DS), (ConvLayout.DS, ConvLayout.SD))
PAGE_TOKENS = {"P": 16, "D": 12}
PROMPTS = make_prompts(4, SEED)
STEPS = 6


@dataclass(frozen=True)
class Matrix:
    """A P and a D of every size and layout, at one broker."""

    house: House
    broker: str
    homes: dict[str, Path]
    alone: tuple[Decoded, ...]
    """What an engine answers that keeps its state to itself."""

    def engine(self, side: str, tp: int, conv: ConvLayout, lies: bool = False) -> Engine:
        settings = EngineSettings(tp=tp, conv_layout=conv, page_tokens=PAGE_TOKENS[side])
        more = {"announce": swap_b_and_c} if lies else {}
        name = f"{side}{tp}{conv}{'-lies' if lies else ''}"
        return self.house.engine(name, self.broker, settings, home=self.homes.get(side), **more)

    def answer(
        self, p: Engine, d: Engine, run: str, sabotage: Sabotage | None = None
    ) -> tuple[PromptAnswer, ...]:
        return answer_prompts(run, p, d, PROMPTS, self.alone, STEPS, sabotage)


@pytest.fixture(
    scope="module",
    params=[
        *itertools.product((Strategy.SLICES, Strategy.PACK), ("embedded", "daemon")),
        (Strategy.WHOLE, "embedded"),
    ],
    ids=lambda param: f"{param[0]}-{param[1]}",
)
def matrix(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Matrix]:
    strategy, where = request.param
    with demo_house() as house:
        broker, folder = house.broker(strategy), tmp_path_factory.mktemp("sockets")
        homes = {
            side: house.stack.enter_context(running_daemon(broker, folder / f"{side}.sock"))
            for side in PAGE_TOKENS
            if where == "daemon"
        }
        single = house.unstarted("alone", "", EngineSettings())
        alone = tuple(single.decode_alone(prompt.token_ids, STEPS) for prompt in PROMPTS)
        yield Matrix(house, broker, homes, alone)


@pytest.mark.parametrize(("p_conv", "d_conv"), CONV_LAYOUTS)
@pytest.mark.parametrize("d_tp", TP_SIZES)
@pytest.mark.parametrize("p_tp", TP_SIZES)
def test_state_arrives_to_the_last_bit(
    matrix: Matrix, p_tp: int, d_tp: int, p_conv: ConvLayout, d_conv: ConvLayout
) -> None:
    p, d = matrix.engine("P", p_tp, p_conv), matrix.engine("D", d_tp, d_conv)

    answers = matrix.answer(p, d, f"{p_tp}{p_conv}-{d_tp}{d_conv}")

    assert [a.through.token_ids for a in answers] == [a.alone.token_ids for a in answers]
    assert all(a.exact for a in answers)


@pytest.mark.parametrize("sabotage", Sabotage)
@pytest.mark.parametrize(("p_tp", "d_tp"), [(1, 1), (2, 4), (4, 2)])
def test_sabotage_is_seen_on_every_prompt(
    matrix: Matrix, p_tp: int, d_tp: int, sabotage: Sabotage
) -> None:
    lies = sabotage is Sabotage.SWAPPED_B_C
    p = matrix.engine("P", p_tp, ConvLayout.SD, lies=lies)
    d = matrix.engine("D", d_tp, ConvLayout.DS)

    answers = matrix.answer(p, d, f"{sabotage}-{p_tp}-{d_tp}", sabotage)

    assert not any(a.logits_equal for a in answers)
    assert any(not a.tokens_equal for a in answers)
