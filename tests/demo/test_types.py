"""Types that differ on the two sides: what rounds needs leave, and the words stay right."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from demo.house import House, demo_house
from restow.broker.families import ConvLayout, EngineSettings
from restow.broker.layout import DType
from restow.demo.experiment import PromptAnswer, answer_prompts
from restow.demo.recall.task import make_prompts
from restow.demo.transformers.engine import HandoffFailedError
from restow.demo.transformers.generation import StoredTypes

pytestmark = [pytest.mark.matrix, pytest.mark.timeout(900)]

F32, BF16, F16 = DType.FLOAT32, DType.BFLOAT16, DType.FLOAT16
SINGLE = StoredTypes()
BF16_SSM = StoredTypes(ssm=BF16)
PROMPTS = make_prompts(32, seed=11)
STEPS = 6
TIMEOUT_S = 60.0


@pytest.fixture(scope="module")
def house() -> Iterator[House]:
    with demo_house() as made:
        yield made


def answers_of(
    house: House,
    narrowing: bool,
    p_types: StoredTypes,
    d_types: StoredTypes,
    prefilled_as: StoredTypes,
) -> tuple[PromptAnswer, ...]:
    """Return answers through Restow, each beside that of a standalone D.

    The standalone D's state was stored as ``prefilled_as``.
    """
    broker, run = house.broker(allow_narrowing=narrowing), f"{p_types}-{d_types}"
    p_settings = EngineSettings(tp=1, conv_layout=ConvLayout.SD)
    d_settings = EngineSettings(tp=2, conv_layout=ConvLayout.DS)
    p = house.engine(f"P {run}", broker, p_settings, stored=p_types)
    d = house.engine(f"D {run}", broker, d_settings, stored=d_types)
    alone = [d.decode_alone(one.token_ids, STEPS, prefilled_as) for one in PROMPTS]
    return answer_prompts(run, p, d, PROMPTS, alone, STEPS)


def accuracy(right: list[bool]) -> float:
    return sum(right) / len(right)


@pytest.mark.parametrize(
    "d_types", [BF16_SSM, StoredTypes(BF16, BF16, BF16)], ids=["ssm", "everything"]
)
def test_float32_that_d_rounds_decodes_as_an_engine_that_runs_in_bfloat16(
    house: House, d_types: StoredTypes
) -> None:
    answers = answers_of(house, True, SINGLE, d_types, prefilled_as=d_types)

    assert all(answer.exact for answer in answers)
    assert accuracy([a.right_through for a in answers]) >= 0.95


@pytest.mark.parametrize(
    ("p_types", "d_types"),
    [
        (BF16_SSM, SINGLE),
        (StoredTypes(BF16, F16, BF16), SINGLE),
        (StoredTypes(BF16, BF16, F32), StoredTypes(F32, BF16, F32)),
    ],
    ids=["ssm", "everything", "kv"],
)
def test_types_that_hold_those_of_p_need_no_permission(
    house: House, p_types: StoredTypes, d_types: StoredTypes
) -> None:
    answers = answers_of(house, False, p_types, d_types, prefilled_as=p_types)

    assert all(answer.exact for answer in answers)


def test_twice_rounded_is_as_accurate_as_an_engine_that_runs_in_d_s_types(house: House) -> None:
    p_types, d_types = StoredTypes(BF16, BF16, BF16), StoredTypes(F16, F16, F16)

    answers = answers_of(house, True, p_types, d_types, prefilled_as=d_types)

    assert not all(answer.exact for answer in answers)
    through, alone = ([a.right_through for a in answers], [a.right_alone for a in answers])
    assert accuracy(through) >= accuracy(alone)


def test_rounding_is_refused_unless_the_operator_allows_it(house: House) -> None:
    p = house.engine("P refused", house.broker(), EngineSettings(), stored=SINGLE)
    d = house.engine("D refused", house.broker(), EngineSettings(), stored=BF16_SSM)

    freed = p.prefill("refused", PROMPTS[0].token_ids)
    with pytest.raises(HandoffFailedError, match=r"NARROWING_NOT_ALLOWED.*layers\.0\.ssm.*float32"):
        d.decode(d.ask("refused", PROMPTS[0].token_ids), STEPS)

    assert freed.result(TIMEOUT_S).reason == "NARROWING_NOT_ALLOWED"
