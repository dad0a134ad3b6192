"""The recall model's state between engines that are cut and laid out differently, exactly.

All pairs of P_TP and D_TP in {1, 2, 4}, SD to DS and DS to SD, unequal pages, both strategies,
agents embedded and as daemons: real processes, real NIXL, a real model.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch
from transformers import NemotronHForCausalLM

from restow.broker.families import ConvLayout, EngineSettings
from restow.broker.planner import Strategy
from restow.demo.experiment import (
    SEED,
    PromptAnswer,
    Sabotage,
    answer_prompts,
    running_broker_process,
    running_daemon,
    swap_b_and_c,
)
from restow.demo.recall.model import load_model
from restow.demo.recall.task import Prompt, make_prompts
from restow.demo.transformers.engine import Engine, EngineOptions
from restow.demo.transformers.generation import Decoded
from restow.demo.transformers.rank_processes import ForkServer

pytestmark = [pytest.mark.matrix, pytest.mark.timeout(900)]

TP_SIZES = (1, 2, 4)
CONV_LAYOUTS = ((ConvLayout.SD, ConvLayout.DS), (ConvLayout.DS, ConvLayout.SD))
P_PAGE_TOKENS = 16
D_PAGE_TOKENS = 12
PROMPTS = 4
STEPS = 6


@dataclass(frozen=True)
class Reference:
    """What an engine answers that keeps its state to itself."""

    model: NemotronHForCausalLM
    prompts: tuple[Prompt, ...]
    alone: tuple[Decoded, ...]


@pytest.fixture(scope="module")
def reference() -> Reference:
    torch.set_num_threads(1)
    model = load_model()
    prompts = make_prompts(PROMPTS, SEED)
    engine = Engine(
        model, EngineOptions("alone", "", EngineSettings(page_tokens=P_PAGE_TOKENS), ())
    )
    alone = tuple(engine.decode_alone(prompt.token_ids, STEPS) for prompt in prompts)
    return Reference(model, prompts, alone)


@dataclass(frozen=True)
class House:
    """One broker with a P and a D of every size and layout, started when first asked for."""

    reference: Reference
    broker: str
    homes: dict[str, ForkServer | Path]
    stack: ExitStack
    engines: dict[object, Engine]

    def engine(self, name: str, tp: int, conv: ConvLayout, lies: bool = False) -> Engine:
        key = (name, tp, conv, lies)
        if key not in self.engines:
            page_tokens = P_PAGE_TOKENS if name == "P" else D_PAGE_TOKENS
            options = EngineOptions(
                f"{name}{tp}{conv}{'-lies' if lies else ''}",
                self.broker,
                EngineSettings(tp=tp, conv_layout=conv, page_tokens=page_tokens),
                (self.homes[name],) * tp,
            )
            announce = {"announce": swap_b_and_c} if lies else {}
            engine = Engine(self.reference.model, options, **announce)
            self.engines[key] = self.stack.enter_context(engine)
        return self.engines[key]

    def answer(
        self, p: Engine, d: Engine, run: str, sabotage: Sabotage | None = None
    ) -> tuple[PromptAnswer, ...]:
        reference = self.reference
        return answer_prompts(run, p, d, reference.prompts, reference.alone, STEPS, sabotage)


@pytest.fixture(
    scope="module",
    params=[
        *itertools.product((Strategy.SLICES, Strategy.PACK), ("embedded", "daemon")),
        (Strategy.WHOLE, "embedded"),
    ],
    ids=lambda param: f"{param[0]}-{param[1]}",
)
def house(
    request: pytest.FixtureRequest, reference: Reference, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[House]:
    strategy, where = request.param
    with ExitStack() as stack:
        broker = stack.enter_context(running_broker_process(strategy))
        homes: dict[str, ForkServer | Path] = dict.fromkeys("PD", stack.enter_context(ForkServer()))
        if where == "daemon":
            folder = tmp_path_factory.mktemp("sockets")
            homes = {
                name: stack.enter_context(running_daemon(broker, folder / f"{name}.sock"))
                for name in "PD"
            }
        yield House(reference, broker, homes, stack, {})


@pytest.mark.parametrize(("p_conv", "d_conv"), CONV_LAYOUTS)
@pytest.mark.parametrize("d_tp", TP_SIZES)
@pytest.mark.parametrize("p_tp", TP_SIZES)
def test_state_arrives_to_the_last_bit(
    house: House, p_tp: int, d_tp: int, p_conv: ConvLayout, d_conv: ConvLayout
) -> None:
    p, d = house.engine("P", p_tp, p_conv), house.engine("D", d_tp, d_conv)

    answers = house.answer(p, d, f"{p_tp}{p_conv}-{d_tp}{d_conv}")

    assert [a.through.token_ids for a in answers] == [a.alone.token_ids for a in answers]
    assert all(a.exact for a in answers)


@pytest.mark.parametrize("sabotage", Sabotage)
@pytest.mark.parametrize(("p_tp", "d_tp"), [(1, 1), (2, 4), (4, 2)])
def test_sabotage_is_seen_on_every_prompt(
    house: House, p_tp: int, d_tp: int, sabotage: Sabotage
) -> None:
    lies = sabotage is Sabotage.SWAPPED_B_C
    p = house.engine("P", p_tp, ConvLayout.SD, lies=lies)
    d = house.engine("D", d_tp, ConvLayout.DS)

    answers = house.answer(p, d, f"{sabotage}-{p_tp}-{d_tp}", sabotage)

    assert not any(a.logits_equal for a in answers)
    assert any(not a.tokens_equal for a in answers)
