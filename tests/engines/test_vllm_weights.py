"""Which weights a vLLM engine has: told apart at start, and unknown once they are replaced."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import pytest

from engines.written_session import BLOCKS, GROUPS, Session, chunk, computed, decode, prefill
from restow.agents.engines.common.adapter_errors import EngineUnsupportedError
from restow.agents.engines.common.registration import ConnectorSettings
from restow.agents.engines.vllm.private import core_of_caller
from restow.agents.engines.vllm.scheduler.scheduler_side import SchedulerSide
from restow.agents.engines.vllm.scheduler.weights import Weights, weights_revision
from restow.demo.recall.model import checkpoint_folder


@dataclass
class Core:
    """The engine core that vLLM's calls reach, and what became of them."""

    called: list[object] = field(default_factory=list)
    version: str = "default"
    during: Callable[[], None] = lambda: None

    def collective_rpc(
        self, method: object, timeout: object = None, args: object = (), kwargs: object = None
    ) -> str:
        self.called.append(method)
        self.during()
        return "done"

    def set_weight_version(self, weight_version: str) -> None:
        self.version = weight_version


class Engine:
    """A scheduler's side whose engine core's weights are replaced."""

    def __init__(self, empty: bool = True) -> None:
        self.core, self.session, self.empty = Core(), Session(), empty
        words = {"": "v1", "/other": "v2", "/gone": ""}
        self.weights = Weights("v1", "life", words.__getitem__, lambda: self.empty)
        self.weights.watch(self.core)
        self.side = SchedulerSide(
            *("E", "life", "kv_both", GROUPS, 0, self.session, ConnectorSettings()),
            weights=self.weights,
        )

    def call(self, method: object, *args: Any, **kwargs: Any) -> None:
        assert self.core.collective_rpc(method, None, args, kwargs) == "done"

    def revisions(self) -> list[str]:
        return [one[1] for one in self.session.take() if one[0] == "revise"]


UNKNOWN = "unknown life 1"


def test_weights_of_another_checkpoint_are_known_as_soon_as_nothing_of_the_old_is_cached() -> None:
    engine = Engine(empty=False)
    engine.core.during = lambda: assert_unknown(engine)
    engine.call("reload_weights", weights_path="/other")
    assert engine.revisions() == [UNKNOWN]
    assert not engine.weights.look()
    engine.empty = True
    engine.side.reset_cache()
    assert engine.session.take() == [("forget", "v1"), ("revise", "v2")]
    assert engine.weights.known


def assert_unknown(engine: Engine) -> None:
    """Check that nothing is handed over while the workers replace the weights."""
    assert not engine.weights.known


def test_weights_are_loaded_again_from_where_they_came_last() -> None:
    engine = Engine()
    for path, revision in (("/other", "v2"), (None, "v2")):
        engine.call("reload_weights", None, path)
        assert engine.revisions()[-1] == revision
    engine.call("update_config", {"model_config": {"model": "/third"}})
    engine.call("reload_weights")
    assert not engine.weights.look()


@pytest.mark.parametrize(
    "how",
    [
        ("update_weights", {}),
        ("start_weight_update", {}),
        ("anything of somebody's", {}),
        (print, {}),
        ("reload_weights", {"weights_path": "/gone"}),
        ("reload_weights", {"weights_iterator": iter(())}),
        ("reload_weights", {"weights_path": "/other", "is_checkpoint_format": False}),
    ],
    ids=lambda how: f"{how[0]} {sorted(how[1])}",
)
def test_weights_that_nobody_names_are_known_by_a_version_that_was_never_told(how: Any) -> None:
    engine = Engine()
    engine.core.set_weight_version("6")
    assert engine.weights.known
    method, arguments = how
    engine.call(method, **arguments)
    assert engine.revisions() == [UNKNOWN]
    for version, known in (("6", False), ("7", True)):
        engine.core.set_weight_version(version)
        assert engine.weights.look() == known
    assert engine.core.version == "7"
    assert engine.revisions() == ["v1@7"]


def test_what_replaces_nothing_changes_nothing() -> None:
    engine = Engine()
    engine.call("compute_weight_checksums")
    assert engine.weights.known
    assert engine.session.take() == []


def test_a_call_that_fails_leaves_the_weights_unknown() -> None:
    engine = Engine()

    def fail() -> None:
        raise RuntimeError("out of memory")

    engine.core.during = fail
    with pytest.raises(RuntimeError, match="out of memory"):
        engine.call("reload_weights", weights_path="/other")
    assert not engine.weights.look()


def test_requests_are_refused_and_counted_while_the_weights_are_unknown() -> None:
    engine, p, d = Engine(), prefill(), decode()
    engine.call("update_weights")
    engine.session.take()
    engine.side.new_request(p)
    assert engine.session.take() == [("publish", "h", {}, 0, False), ("cancel", "h")]
    assert engine.side.step(chunk(9)).fences == []
    assert computed(engine.side, p) is None
    engine.side.new_request(d)
    assert engine.session.take() == [("decline", "h")]
    assert engine.side.loadable_tokens(d, 0) == 10
    engine.side.allocated(d, BLOCKS, 10)
    assert engine.side.step().received == {"r": False}
    counted = engine.side.counted()
    assert counted is not None
    assert counted["present"]["weights_known"] == 0
    assert counted["failures"] == {"decode:REVISION_UNKNOWN": 2}


def test_a_request_that_comes_when_the_cache_is_empty_is_of_the_new_weights() -> None:
    engine = Engine(empty=False)
    engine.call("reload_weights", weights_path="/other")
    engine.session.take()
    engine.empty = True
    engine.side.new_request(prefill())
    assert engine.session.take() == [("revise", "v2"), ("publish", "h", {}, 0, False)]


def test_what_the_weights_before_have_begun_is_given_up() -> None:
    engine, p = Engine(), prefill()
    engine.side.new_request(p)
    assert engine.side.step(chunk(9)).fences == ["h"]
    engine.session.take()
    engine.call("reload_weights", weights_path="/other")
    assert engine.session.take()[0] == ("cancel", "h")
    assert computed(engine.side, p) is None
    assert engine.session.take() == []


def test_a_state_that_was_asked_for_before_is_not_taken() -> None:
    engine, d = Engine(), decode()
    engine.side.new_request(d)
    engine.side.allocated(d, BLOCKS, engine.side.loadable_tokens(d, 0) or 0)
    engine.session.end("h")
    engine.call("reload_weights", weights_path="/other")
    assert engine.side.step().received == {"r": False}


def test_an_engine_core_that_shows_no_calls_is_refused() -> None:
    with pytest.raises(EngineUnsupportedError, match="collective_rpc"):
        core_of_caller()


OWN = {"rope_parameters": {"rope_theta": 1e4}, "eos_token_id": 2}


def revision(
    model: str = str(checkpoint_folder()), named: str = "", load_format: str = "auto", **more: Any
) -> str:
    """Return the revision of an engine.

    Configurations are merged here as vLLM does (`hf_config`).
    """
    settings: dict[str, Any] = {"model": model, "revision": None, "dtype": "torch.bfloat16"}
    settings["hf_overrides"] = {}
    settings |= {
        "hf_text_config": SimpleNamespace(),
        "max_model_len": 8192,
        "config_format": "auto",
    }
    settings |= dict.fromkeys(("hf_config_path", "quantization_config", "multimodal_config"))
    settings |= {"disable_sliding_window": False}
    config: Any = SimpleNamespace(
        model_config=SimpleNamespace(**settings | more),
        load_config=SimpleNamespace(load_format=load_format, download_dir=None),
        parallel_config=SimpleNamespace(tensor_parallel_size=2),
        device_config=SimpleNamespace(device_type="cpu"),
        lora_config=None,
    )

    def read(model: Any, overridden: bool) -> dict[str, Any]:
        return OWN | model.hf_overrides if overridden else OWN

    return weights_revision(config, named, read)


def test_the_configuration_that_settings_make_of_a_checkpoints_makes_another_model_of_it() -> None:
    theta = {"rope_parameters": {"rope_theta": 1e6, "rope_type": "default"}}
    turned = {"rope_parameters": dict(reversed(theta["rope_parameters"].items()))}
    other = {"rope_parameters": {"rope_theta": 1e5, "rope_type": "default"}}
    assert len({revision(hf_overrides=one) for one in ({}, theta, other)}) == 3
    assert revision(hf_overrides=theta) == revision(hf_overrides=turned)
    assert revision(hf_overrides={"eos_token_id": 7}) == revision()
    assert revision(hf_overrides=OWN) == revision()
    assert revision(load_format="dummy") != revision(load_format="dummy", hf_overrides=theta)


def test_a_configuration_without_a_stable_form_is_refused_by_its_place() -> None:
    odd = {"rope_parameters": {"a": object()}}
    with pytest.raises(EngineUnsupportedError, match=r"object at rope_parameters\.a"):
        revision(hf_overrides=odd)
    assert revision(hf_overrides=odd, named="v1") == "v1"


def test_what_is_computed_by_other_settings_is_told_apart() -> None:
    def pruning(rate: float) -> SimpleNamespace:
        return SimpleNamespace(video_pruning_rate=rate, video_pruning_method="evs")

    words = [
        revision(),
        revision(quantization_config={"linear": "fp8"}),
        revision(quantization_config={"linear": "int8"}),
        revision(multimodal_config=pruning(0.5)),
        revision(multimodal_config=pruning(0.25)),
    ]
    assert len(set(words)) == len(words)
    assert revision(multimodal_config=pruning(0)) == revision()


def test_long_rope_turns_otherwise_where_longer_prompts_may_come() -> None:
    phi = SimpleNamespace(original_max_position_embeddings=4096)
    short, other, long = (
        revision(hf_text_config=phi, max_model_len=tokens) for tokens in (2048, 4096, 4097)
    )
    assert short == other != long


def test_the_operators_word_stands_for_all_of_it() -> None:
    assert revision(named="v1", hf_overrides={"a": 1}) == "v1"


def test_of_a_checkpoint_that_is_not_here_nothing_is_said() -> None:
    assert revision("no/where", hf_overrides={"a": 1}) == ""
