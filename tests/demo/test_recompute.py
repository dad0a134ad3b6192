"""Conv windows that D rebuilds, exactly: the recall model decodes as if its state had never moved.

Real processes, real NIXL, a real model, agents embedded and in a daemon. The bytes that are read
are those of the inputs, not those of the windows.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path

import pytest
import torch

from demo.house import House, demo_house
from restow.broker.client.admin import AdminClient
from restow.broker.families import ConvLayout, EngineSettings
from restow.broker.layout.span import volume
from restow.broker.planner import Strategy
from restow.demo.experiment import SEED, running_daemon
from restow.demo.recall.model import load_model
from restow.demo.recall.task import make_prompts
from restow.demo.transformers import model_state as mixers
from restow.demo.transformers.engine import Engine, EngineOptions
from restow.demo.transformers.generation import Decoded
from restow.demo.transformers.model_state import RebuildingInexactError, conv_weights, kept_inputs
from restow.demo.transformers.state_io import lay_out_weights

pytestmark = [pytest.mark.matrix, pytest.mark.timeout(600)]

SD, DS = ConvLayout.SD, ConvLayout.DS
PAIRS = [(1, 1, SD, DS), (2, 4, SD, SD), (4, 2, DS, SD), (2, 4, DS, DS)]
STEPS = 6
PROMPTS = [prompt.token_ids for prompt in make_prompts(4, SEED)]
SHORT = [PROMPTS[0][:length] for length in (2, 3, 4, 6)]
TAPS = 3
P_PAGE_TOKENS = 16
MAMBA_LAYERS = 2


@dataclass(frozen=True)
class Rebuilding:
    """A broker that forces recompute, and where agents live."""

    house: House
    broker: str
    home: Path | None

    def engine(self, side: str, tp: int, conv: ConvLayout) -> Engine:
        tokens = P_PAGE_TOKENS if side == "P" else 12
        plain = EngineSettings(tp=tp, conv_layout=conv, page_tokens=tokens)
        settings = replace(plain, mixer_inputs=side == "P", projections=side == "D")
        return self.house.engine(f"{side}{tp}{conv}", self.broker, settings, home=self.home)


@pytest.fixture(scope="module", params=["embedded", "daemon"])
def rebuilding(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Rebuilding]:
    with demo_house() as house:
        broker = house.broker(Strategy.RECOMPUTE)
        home: Path | None = None
        if request.param == "daemon":
            socket = tmp_path_factory.mktemp("sockets") / "agents.sock"
            home = house.stack.enter_context(running_daemon(broker, socket))
        yield Rebuilding(house, broker, home)


def through(p: Engine, d: Engine, name: str, prompt: tuple[int, ...]) -> Decoded:
    asked = d.ask(name, prompt)
    freed = p.prefill(name, prompt)
    answer = d.decode(asked, STEPS)
    freed.result(30)
    return answer


@pytest.mark.parametrize(("p_tp", "d_tp", "p_conv", "d_conv"), PAIRS)
def test_decoding_goes_on_to_the_last_bit(
    rebuilding: Rebuilding, p_tp: int, d_tp: int, p_conv: ConvLayout, d_conv: ConvLayout
) -> None:
    p = rebuilding.engine("P", p_tp, p_conv)
    d = rebuilding.engine("D", d_tp, d_conv)
    for number, prompt in enumerate(PROMPTS):
        name = f"{p_tp}{p_conv}-{d_tp}{d_conv}-{number}"
        answer, alone = through(p, d, name, tuple(prompt)), d.decode_alone(prompt, STEPS)
        assert answer.token_ids == alone.token_ids
        assert torch.equal(answer.first_logits, alone.first_logits)
        _check_bytes(rebuilding, name, d, len(prompt) - 1)
    # P gives its in-projection the rows of a longer prompt, and so goes on alike.
    for number, prompt in enumerate(SHORT):
        name = f"short-{p_tp}{p_conv}-{d_tp}{d_conv}-{number}"
        answer, alone = through(p, d, name, tuple(prompt)), p.decode_alone(prompt, STEPS)
        assert torch.equal(answer.first_logits, alone.first_logits)


def _check_bytes(rebuilding: Rebuilding, name: str, d: Engine, tokens: int) -> None:
    """Check that inputs were read instead of windows, whole for each rank of D.

    Pages may be read to their end.
    """
    pages = -(-tokens // P_PAGE_TOKENS) * P_PAGE_TOKENS
    with AdminClient(rebuilding.broker) as admin:
        read_bytes = admin.handoff(name).handoff.bytes
    assert read_bytes in {_needed_bytes(rebuilding, d, count) for count in (tokens, pages)}


def _needed_bytes(rebuilding: Rebuilding, d: Engine, tokens: int) -> int:
    hidden: int = rebuilding.house.model.config.hidden_size
    total = len(d.layout.ranks) * MAMBA_LAYERS * TAPS * hidden * 4
    for rank in d.layout.ranks:
        for shard in rank.shards:
            if ".conv." not in shard.field:
                total += 4 * volume(shard.box) * (tokens if shard.token_stride_bytes else 1)
    return total


def test_weights_of_other_channels_are_seen(rebuilding: Rebuilding) -> None:
    p, d = rebuilding.engine("P", 1, DS), rebuilding.engine("D", 2, DS)
    weights = conv_weights(rebuilding.house.model)
    wrong = {name: rows.flip(0) for name, rows in weights.items()}
    lay_out_weights(wrong, d.pages)
    for number, prompt in enumerate(PROMPTS):
        answer = through(p, d, f"turned-{number}", tuple(prompt))
        assert not torch.equal(answer.first_logits, d.decode_alone(prompt, STEPS).first_logits)
    lay_out_weights(weights, d.pages)


def test_an_engine_whose_products_differ_does_not_start(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(mixers, "repeats", lambda weights: False)
    model, plain = load_model(), EngineSettings()
    for offering in (replace(plain, mixer_inputs=True), replace(plain, projections=True)):
        with pytest.raises(RebuildingInexactError, match="layer 0"):
            Engine(model, EngineOptions("alone", "", offering, ()))
    Engine(model, EngineOptions("alone", "", plain, ()))


def test_without_padding_a_short_prompt_would_differ() -> None:
    # This is why P's in-projection is given more rows than a prompt of two tokens has.
    torch.set_num_threads(1)
    model = load_model()
    engine = Engine(model, EngineOptions("alone", "", EngineSettings(), ()))
    plain = engine.state_at(PROMPTS[0], 2)["layers.0.conv.x"]
    with kept_inputs(model) as inputs:
        padded = engine.state_at(PROMPTS[0], 2)["layers.0.conv.x"]
    assert torch.allclose(plain, padded, atol=1e-5)
    assert not torch.equal(plain, padded)
    assert not inputs["layers.0.mixer_input"][0].any(), "a tap before the prompt"
