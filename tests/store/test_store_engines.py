"""A store between engines of the recall model: it gives what it was given, at any TP and layout."""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import FIRST_COMPLETED, Future, wait
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import NemotronHForCausalLM

from restow.agents.demo.processes import running_broker_process
from restow.agents.engines.common.fork_server import ForkServer
from restow.agents.engines.recall.model import load_model
from restow.agents.engines.recall.task import make_prompts
from restow.agents.engines.transformers import Engine, EngineOptions
from restow.agents.store.errors import NotHeldError, NotKeptError, StoreFullError
from restow.agents.store.options import StoreOptions
from restow.agents.store.prefix import Prefix, prefix_of
from restow.agents.store.store import Store
from restow.broker.families import ConvLayout, EngineSettings
from restow.broker.planner import Strategy

PROMPTS = make_prompts(4, seed=5)
STEPS = 6
TIMEOUT_S = 60.0
MIB = 1 << 20
SD, DS = ConvLayout.SD, ConvLayout.DS


@dataclass(frozen=True)
class House:
    """A broker with engines of one model, started when first asked for."""

    model: NemotronHForCausalLM
    broker: str
    forks: ForkServer
    stack: ExitStack
    engines: dict[str, Engine]

    def engine(self, tp: int, conv: ConvLayout, page_tokens: int = 16) -> Engine:
        name = f"{tp}{conv}{page_tokens}"
        if name not in self.engines:
            settings = EngineSettings(tp=tp, conv_layout=conv, page_tokens=page_tokens)
            options = EngineOptions(name, self.broker, settings, (self.forks,) * tp)
            self.engines[name] = self.stack.enter_context(Engine(self.model, options))
        return self.engines[name]

    def store(self, name: str, memory_bytes: int = 16 * MIB, disk: Path | None = None) -> Store:
        options = StoreOptions(name, self.broker, memory_bytes, 16, disk, 1 << 30)
        return Store(self.engine(2, SD).layout, options)


@pytest.fixture(scope="module")
def house() -> Iterator[House]:
    torch.set_num_threads(1)
    with ExitStack() as stack:
        broker = stack.enter_context(running_broker_process(Strategy.AUTO))
        forks = stack.enter_context(ForkServer())
        yield House(load_model(), broker, forks, stack, {})


def prefix(tokens: tuple[int, ...]) -> Prefix:
    return prefix_of(tokens, len(tokens) - 1, 16)


def put(store: Store, engine: Engine, handoff_id: str, tokens: tuple[int, ...]) -> None:
    freed = engine.prefill(handoff_id, tokens)
    store.keep(handoff_id, prefix(tokens)).result(TIMEOUT_S)
    freed.result(TIMEOUT_S)


def answer(store: Store, engine: Engine, handoff_id: str, tokens: tuple[int, ...]) -> list[int]:
    given = store.publish(handoff_id, prefix(tokens))
    asked = engine.ask(handoff_id, tokens)
    ends: list[Future[Any]] = [given, asked.end]
    wait(ends, TIMEOUT_S, FIRST_COMPLETED)
    if given.done():  # it may have nothing
        given.result()
    said = engine.decode(asked, STEPS).token_ids
    given.result(TIMEOUT_S)
    return list(said)


def test_stored_once_it_serves_engines_of_any_tp_and_layout(house: House) -> None:
    p = house.engine(2, SD)
    with house.store("one") as store:
        for index, prompt in enumerate(PROMPTS):
            put(store, p, f"in {index}", prompt.token_ids)
        for tp, conv, page_tokens in ((1, DS, 16), (4, SD, 8), (4, DS, 32), (2, SD, 16)):
            d = house.engine(tp, conv, page_tokens)
            for index, prompt in enumerate(PROMPTS):
                alone = d.decode_alone(prompt.token_ids, STEPS)
                said = answer(store, d, f"out {tp} {conv} {index}", prompt.token_ids)
                assert said == list(alone.token_ids)


def test_the_second_turn_moves_only_what_is_new(house: House) -> None:
    first = PROMPTS[0].token_ids
    second = (*first, *PROMPTS[1].token_ids)
    with house.store("turns") as store:
        put(store, house.engine(1, DS), "turn 1", first)
        before = store.figures.used_bytes
        put(store, house.engine(4, SD, 8), "turn 2", second)
        d = house.engine(2, SD)
        assert answer(store, d, "turn 3", second) == list(d.decode_alone(second, STEPS).token_ids)
        assert answer(store, d, "again", first) == list(d.decode_alone(first, STEPS).token_ids)
        assert store.figures.used_bytes < 2 * before + before


def test_what_is_kept_is_not_moved_again(house: House) -> None:
    tokens, p = PROMPTS[2].token_ids, house.engine(2, SD)
    with house.store("twice") as store:
        put(store, p, "once", tokens)
        freed = p.prefill("twice", tokens)
        store.keep("twice", prefix(tokens)).result(TIMEOUT_S)
        assert freed.result(TIMEOUT_S).reason == "DECLINED"


def test_what_it_has_not_it_says_at_once(house: House) -> None:
    with (
        house.store("none") as store,
        pytest.raises(NotHeldError, match="no such state"),
    ):
        store.publish("nothing", prefix(PROMPTS[0].token_ids)).result(TIMEOUT_S)


def test_another_prompts_state_is_not_kept(house: House) -> None:
    p = house.engine(2, SD)
    with house.store("wrong") as store:
        p.prefill("wrong", PROMPTS[0].token_ids)
        with pytest.raises(NotKeptError):
            store.keep("wrong", prefix(PROMPTS[1].token_ids)).result(TIMEOUT_S)
        assert not store.holds(prefix(PROMPTS[1].token_ids))
        put(store, p, "right", PROMPTS[1].token_ids)


def test_evicted_states_are_gone_and_come_back_from_the_disk(house: House, tmp_path: Path) -> None:
    p, d = house.engine(2, SD), house.engine(1, DS)
    prompts = [prompt.token_ids for prompt in make_prompts(24, seed=9)]
    with house.store("disk", MIB, tmp_path / "disk") as store:
        for index, tokens in enumerate(prompts):
            put(store, p, f"to disk {index}", tokens)
        figures = store.figures
        assert figures.evictions > 0
        for index, tokens in enumerate(prompts):
            said = answer(store, d, f"from disk {index}", tokens)
            assert said == list(d.decode_alone(tokens, STEPS).token_ids)
    with house.store("disk again", MIB, tmp_path / "disk") as store:  # another life
        assert store.figures.disk_runs == len(prompts)
        for index, tokens in enumerate(prompts):
            said = answer(store, d, f"from disk again {index}", tokens)
            assert said == list(d.decode_alone(tokens, STEPS).token_ids)


def test_a_state_without_room_is_declined(house: House) -> None:
    p = house.engine(2, SD)
    tokens = PROMPTS[0].token_ids * 24
    with house.store("small", MIB // 4) as store:
        freed = p.prefill("large", tokens)
        with pytest.raises(StoreFullError, match="no room"):
            store.keep("large", prefix(tokens)).result(TIMEOUT_S)
        assert freed.result(TIMEOUT_S).reason == "DECLINED"
