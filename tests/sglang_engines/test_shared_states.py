"""States that SGLang's engines share through Restow, compared byte by byte with the truth."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from random import Random
from typing import Any

import pytest

from restow.agents.store.store import Store
from sglang_engines.conftest import Starts, store_for
from sglang_harness.engine import SglangEngine, sglang_engine

pytestmark = pytest.mark.timeout(300)


def drawn(count: int, seed: int) -> list[int]:
    rng = Random(seed)  # noqa: S311 - reproducible, not secret
    return [rng.randrange(8, 88) for _ in range(count)]


def taken(engine: SglangEngine, tokens: list[int], **more: str) -> bool:
    """Return whether a store took the state of a prompt that the engine computed.

    SGLang makes several nodes of a prompt with a window.
    """
    assert engine.all("compute", tokens=tokens, **more)["offloads"] > 0
    return all(engine.all("settle")["taken"])


def found(engine: SglangEngine, tokens: list[int], **more: str) -> int:
    """Return how much of a prompt an engine loads, if all of that is right."""
    got = engine.all("load", tokens=[*tokens, *drawn(20, 4)], **more)
    assert got["landed"] == bool(got["found"]), got
    assert got["wrong"] == [], got
    return int(got["found"])


CASES = {
    # kind of model, tokens of a page of P and of D, TP of P and of D, tokens
    "attention to 2": ("attention", 16, 16, 1, 2, 96),
    "attention to 1": ("attention", 64, 1, 2, 1, 128),
    "hybrid to 2": ("hybrid", 1, 1, 1, 2, 75),
    "hybrid to 1": ("hybrid", 1, 1, 2, 1, 75),
    "shared groups": ("one_group", 1, 1, 2, 1, 46),
    "windows": ("windows", 16, 1, 2, 1, 96),
}


@pytest.mark.parametrize("case", CASES)
def test_a_state_of_one_tp_is_loaded_at_another(
    start: Starts, broker: str, models: dict[str, Path], case: str
) -> None:
    kind, p_page, d_page, p_tp, d_tp, count = CASES[case]
    tokens = [*drawn(count - 1, 3), 2]  # a reply ends here, between two quanta
    with store_for(broker, models[kind], case), ExitStack() as stack:
        p = stack.enter_context(start(kind, tp=p_tp, page=p_page, name="p"))
        d = stack.enter_context(start(kind, tp=d_tp, page=d_page, name="d"))
        assert taken(p, tokens)
        assert found(d, tokens) == count


@pytest.fixture(scope="module")
def store(broker: str, models: dict[str, Path]) -> Iterator[Store]:
    with store_for(broker, models["attention"]) as running:
        yield running


@pytest.fixture(scope="module")
def p(start: Starts, store: Store) -> Iterator[SglangEngine]:
    with start("attention", name="p") as engine:
        yield engine


@pytest.fixture(scope="module")
def d(start: Starts, store: Store) -> Iterator[SglangEngine]:
    with start("attention", name="d") as engine:
        yield engine


def test_behind_what_is_here_only_the_rest_is_loaded(p: SglangEngine, d: SglangEngine) -> None:
    tokens = drawn(96, 31)
    assert taken(p, tokens)
    d.all("compute", tokens=tokens[:32])
    d.all("settle")
    got = d.all("load", tokens=tokens)
    assert got == {"here": 32, "found": 64, "landed": True, "wrong": [], "queued": 1}


def test_a_node_is_given_with_its_ancestors(p: SglangEngine, d: SglangEngine) -> None:
    tokens = drawn(112, 32)
    assert taken(p, tokens[:64])
    assert taken(p, tokens)  # SGLang offloads the 48 tokens behind the first node
    assert found(d, tokens) == 112


def test_of_attention_alone_every_page_ends_a_state(p: SglangEngine, d: SglangEngine) -> None:
    tokens = drawn(96, 33)
    assert taken(p, tokens)
    assert found(d, tokens[:48]) == 48


def test_another_salt_finds_nothing(p: SglangEngine, d: SglangEngine) -> None:
    tokens = drawn(64, 34)
    assert taken(p, tokens, salt="a")
    assert (found(d, tokens), found(d, tokens, salt="b"), found(d, tokens, salt="a")) == (0, 0, 64)


def test_what_only_sglang_can_name_is_not_shared(p: SglangEngine, d: SglangEngine) -> None:
    tokens = drawn(64, 35)
    assert p.all("compute", tokens=tokens, extra_key="lora") == {"offloads": 0}
    beyond = [*drawn(48, 36), *[1 << 20] * 16]
    assert p.all("compute", tokens=beyond) == {"offloads": 0}
    assert (found(d, tokens, extra_key="lora"), found(d, beyond)) == (0, 0)


def test_a_state_that_a_store_has_is_not_read_again(
    p: SglangEngine, d: SglangEngine, store: Store
) -> None:
    tokens = drawn(64, 37)
    assert taken(p, tokens)
    asked = store.figures.asked
    assert taken(d, tokens)
    assert store.figures.asked == asked


def test_a_cancelled_load_is_not_made(p: SglangEngine, d: SglangEngine) -> None:
    tokens = drawn(64, 38)
    assert taken(p, tokens)
    got = d.all("load", tokens=tokens, rid="gone", cancel=True)
    assert (got["queued"], got["left"]) == (1, 0)
    assert d.all("start_empty") == {"index": -1}


def test_after_a_reset_the_linker_goes_on(p: SglangEngine, d: SglangEngine) -> None:
    tokens = drawn(64, 39)
    assert p.all("compute", tokens=tokens) == {"offloads": 1}
    p.all("reset")  # while the offload is under way
    assert taken(p, tokens)
    assert found(d, tokens) == 64


def test_a_state_that_is_gone_fails_its_load(
    start: Starts, broker: str, models: dict[str, Path]
) -> None:
    tokens = drawn(64, 40)
    with start("hybrid", page=1, name="d") as d:
        with store_for(broker, models["hybrid"], "short"), start("hybrid", page=1, name="p") as p:
            assert taken(p, tokens)
            assert d.all("load", tokens=tokens, rid="r", hold=True)["found"] == 64
        got = d.all("go_on", rid="r")
    assert got["landed"] is False


def test_of_a_hybrid_only_a_snapshot_ends_a_state(
    start: Starts, broker: str, models: dict[str, Path]
) -> None:
    tokens = drawn(96, 41)
    with store_for(broker, models["hybrid"], "rule"), ExitStack() as stack:
        p = stack.enter_context(start("hybrid", page=1, name="p"))
        d = stack.enter_context(start("hybrid", page=1, name="d"))
        assert taken(p, tokens[:64])
        assert taken(p, tokens)
        assert [found(d, tokens[:count]) for count in (48, 64, 80, 96)] == [0, 64, 64, 96]


def test_replaced_weights_end_all_sharing(start: Starts, store: Store, d: SglangEngine) -> None:
    tokens = drawn(64, 42)
    with start("attention", name="replaced") as engine:
        assert taken(engine, tokens)
        engine.all("replace_weights")
        engine.all("reset")
        assert engine.all("compute", tokens=drawn(64, 43)) == {"offloads": 0}
        assert found(engine, tokens) == 0
    assert found(d, tokens) == 64


def test_without_a_store_pages_are_not_locked_for_long(start: Starts) -> None:
    with start("windows", page=16, name="lonely") as engine:
        engine.all("compute", tokens=drawn(64, 44))
        engine.all("compute", tokens=drawn(64, 45))
        ends = engine.all("settle")["taken"]
    assert len(ends) > 1
    assert not any(ends)


REFUSED: dict[str, dict[str, Any]] = {
    "page_size 24": {"page": 24},
    "enable_memory_saver": {"saver": True},
    "speculative decoding": {"eagle": True},
    "json_model_override_args": {
        "override": '{"head_dim": 32}',
        "extra": {"model_revision": "", "broker": "127.0.0.1:1"},
    },
    "layers.0.k": {"head_dim": 32},
    "windows of 32 tokens": {"kind": "windows", "window": 33},
    "connector setting wrong": {"extra": {"wrong": 1}},
}


@pytest.mark.parametrize("named", REFUSED)
def test_what_it_cannot_share_it_refuses_by_name(
    packages: Path, models: dict[str, Path], broker: str, tmp_path: Path, named: str
) -> None:
    given: dict[str, Any] = {"extra": {"model_revision": "v1"}, **REFUSED[named]}
    model = models[given.pop("kind", "attention")]
    with sglang_engine(packages, tmp_path, model, broker, **given) as engine:
        answer = engine.all("start")
    assert named in answer["error"]
    assert answer["reason"] in ("ENGINE_UNSUPPORTED", "CACHE_UNKNOWN", "SETTINGS_INVALID")
