"""A short new prompt that is computed like decoding begins with what its slot's last one left.

The engine here decodes the recall model out of slots, as engines do: by state, whatever it is.
"""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor
from transformers import NemotronHForCausalLM

from restow.agents.engines.common.stale_slots import StaleSlots, StateShapeError
from restow.demo.recall.model import load_model
from restow.demo.recall.task import encode, make_prompts
from restow.demo.transformers.model_state import export_state, import_state

SLOTS, MOST_TOKENS = 5, 80
NEW = encode("? yuri :")
"""As many tokens as a step with two drafts decodes at once."""


@pytest.fixture(scope="module")
def model() -> NemotronHForCausalLM:
    return load_model()


class SlotEngine:
    """Decodes requests out of slots; each Mamba layer has slots of its own."""

    def __init__(self, model: NemotronHForCausalLM, rows_outside: bool) -> None:
        self.model = model
        with torch.no_grad():
            cache = model(torch.tensor([NEW]), use_cache=True).past_key_values
        shapes = {name: one.shape for name, one in export_state(cache, model.config).items()}
        self.layers = sorted({name.split(".")[1] for name in shapes if name.endswith("ssm")})
        self.kv = {
            name: torch.zeros(SLOTS, MOST_TOKENS, *shape[1:])
            for name, shape in shapes.items()
            if name.endswith((".k", ".v"))
        }
        self.ssm: dict[str, Tensor] = {}
        self.conv: dict[str, Tensor] = {}
        for layer in self.layers:
            parts = [shapes[f"layers.{layer}.conv.{part}"] for part in "xBC"]
            channels = sum(shape[:-1].numel() for shape in parts)
            taps = parts[0][-1]
            # SD keeps rows of all channels, DS the rows of one channel side by side.
            conv = torch.zeros(SLOTS, taps, channels).transpose(1, 2)
            self.conv[layer] = conv if rows_outside else conv.contiguous()
            self.ssm[layer] = torch.zeros(SLOTS, *shapes[f"layers.{layer}.ssm"])
        self._parts = [shape[:-1] for shape in parts]
        self.stale = StaleSlots(
            [[self.conv[layer], self.ssm[layer]] for layer in self.layers], first_slot=1
        )

    def slots(self, slot: int) -> list[int]:
        """Return the slots of a request: for each Mamba layer another slot."""
        return [1 + (slot + number) % (SLOTS - 1) for number in range(len(self.layers))]

    def decode(self, token_ids: tuple[int, ...], slot: int, context_tokens: int) -> Tensor:
        """Compute tokens one after the other from the state in a slot.

        Returns the last token's logits.
        """
        state = self._load(slot, context_tokens)
        cache = import_state(state, context_tokens, self.model.config)
        for token in token_ids:
            with torch.no_grad():
                logits: Tensor = self.model(
                    torch.tensor([[token]]), past_key_values=cache, use_cache=True
                ).logits
        self._store(export_state(cache, self.model.config), slot)
        return logits[0, -1]

    def begin(self, token_ids: tuple[int, ...], slot: int) -> Tensor:
        """Prefill a slot from an empty state."""
        with torch.no_grad():
            out = self.model(torch.tensor([token_ids]), use_cache=True)
        self._store(export_state(out.past_key_values, self.model.config), slot)
        logits: Tensor = out.logits[0, -1]
        return logits

    def _load(self, slot: int, tokens: int) -> dict[str, Tensor]:
        state = {name: kv[slot, :tokens] for name, kv in self.kv.items()}
        for layer, own in zip(self.layers, self.slots(slot), strict=True):
            conv = torch.split(self.conv[layer][own], [shape.numel() for shape in self._parts])
            for part, taps, shape in zip("xBC", conv, self._parts, strict=True):
                state[f"layers.{layer}.conv.{part}"] = taps.reshape(*shape, -1)
            state[f"layers.{layer}.ssm"] = self.ssm[layer][own]
        return state

    def _store(self, state: dict[str, Tensor], slot: int) -> None:
        for name, kv in self.kv.items():
            kv[slot, : len(state[name])] = state[name]
        for layer, own in zip(self.layers, self.slots(slot), strict=True):
            parts = [state[f"layers.{layer}.conv.{part}"].flatten(0, -2) for part in "xBC"]
            self.conv[layer][own] = torch.cat(parts)
            self.ssm[layer][own] = state[f"layers.{layer}.ssm"]

    def memory(self) -> dict[str, Tensor]:
        """Copy all tensors of the engine's memory."""
        return {
            **{name: kv.clone() for name, kv in self.kv.items()},
            **{f"conv.{name}": conv.clone() for name, conv in self.conv.items()},
            **{f"ssm.{name}": ssm.clone() for name, ssm in self.ssm.items()},
        }


@pytest.fixture(params=[True, False], ids=["SD", "DS"])
def used(model: NemotronHForCausalLM, request: pytest.FixtureRequest) -> SlotEngine:
    """Return an engine each of whose slots has served a prompt."""
    engine = SlotEngine(model, request.param)
    for slot, prompt in enumerate(make_prompts(SLOTS, seed=5)):
        engine.begin(prompt.token_ids, slot)
    return engine


def test_the_fault_and_its_end(used: SlotEngine) -> None:
    right = SlotEngine(used.model, True).begin(NEW, 2)
    fault = used.decode(NEW, 2, context_tokens=0)
    assert fault.argmax() != right.argmax()
    assert (fault - right).abs().max() > 1
    used.stale.clear(torch.tensor([[slot] for slot in used.slots(2)]), torch.tensor([0]))
    found = used.decode(NEW, 2, context_tokens=0)
    assert found.argmax() == right.argmax()
    assert torch.allclose(found, right, atol=1e-4)


def test_only_the_states_of_requests_that_begin_are_cleared(used: SlotEngine) -> None:
    # Two requests decode, one begins, and the batch is padded: with the null slot, and with -1.
    before = used.memory()
    slots = [*(used.slots(slot) for slot in (1, 2, 3)), [0, 0], [-1, -1]]
    context = torch.tensor([40, 0, 1, 0, 0], dtype=torch.int32)
    used.stale.clear(torch.tensor(slots, dtype=torch.int32).T, context)
    after = used.memory()
    for layer, own in zip(used.layers, used.slots(2), strict=True):
        for name in (f"conv.{layer}", f"ssm.{layer}"):
            assert before[name][own].any()
            before[name][own] = 0
    for name, want in before.items():
        assert torch.equal(after[name], want), name


@pytest.mark.parametrize("query", [1, 2, 3])
def test_the_length_of_the_query_does_not_matter(used: SlotEngine, query: int) -> None:
    right = SlotEngine(used.model, True).begin(NEW[:query], 3)
    used.stale.clear(torch.tensor([[slot] for slot in used.slots(3)]), torch.tensor([0]))
    assert torch.allclose(used.decode(NEW[:query], 3, 0), right, atol=1e-4)


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
