"""Where the state of a prompt stands, at the shortest prompt that there is."""

from __future__ import annotations

import pytest
import torch

from restow.broker.errors import RequestError
from restow.broker.families import EngineSettings
from restow.demo.recall.model import load_model
from restow.demo.recall.task import make_prompts
from restow.demo.transformers.engine import Engine, EngineOptions
from restow.demo.transformers.generation import generate_greedily

PROMPT = make_prompts(1, seed=7)[0].token_ids
STEPS = 4


@pytest.fixture(scope="module")
def engine() -> Engine:
    torch.set_num_threads(1)
    return Engine(load_model(), EngineOptions("alone", "", EngineSettings(), ()))


@pytest.mark.parametrize("tokens", [1, 2, 3])
def test_a_short_prompt_is_taken_once(engine: Engine, tokens: int) -> None:
    # A recurrent state that took the only token twice would answer otherwise.
    prompt = PROMPT[:tokens]
    (expected,) = generate_greedily(load_model(), [prompt], STEPS)
    assert engine.decode_alone(prompt, STEPS).token_ids == expected


def test_of_one_token_nothing_is_handed_over(engine: Engine) -> None:
    with pytest.raises(RequestError, match="D computes it"):
        engine.prefill("h", PROMPT[:1])
    with pytest.raises(RequestError, match="D computes it"):
        engine.ask("h", PROMPT[:1])
