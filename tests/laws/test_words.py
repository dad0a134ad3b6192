"""Law: a value that holds an enum takes its word, or refuses it; it never keeps a string.

Members are compared by identity, so a string that stayed one would choose something else silently.
"""

from __future__ import annotations

import dataclasses
import importlib
import pkgutil
import types
from collections.abc import Iterator
from enum import Enum
from typing import Any, get_args, get_origin, get_type_hints

import pytest

import restow
from restow.broker.core.common.limits import Limits
from restow.broker.errors import RestowError, WordUnknownError
from restow.broker.families import ConvLayout, EngineSettings, KvOrder, ModelSpec, build_layout
from restow.broker.families.hf import model_from_hf_config
from restow.broker.layout import DType
from restow.broker.planner import Strategy, compile_programs, make_plan
from restow.broker.server.base.hub import Hub
from restow.broker.trust.identity import IdentityInvalidError
from restow.broker.words import enums_of

INTERNAL = {
    # Made by one module for the next, of members that were checked where they came in.
    "restow.agents.engines.vllm.scheduler.requests.HandoffParameters",
    "restow.agents.binding.operands.SideColumns",
    "restow.broker.core.common.events.Failure",
    "restow.broker.doctor.local.Finding",
    "restow.broker.families.hf.kv_types.KvTypes",
    "restow.broker.families.hf.kv_types.Types",
    "restow.broker.families.recurrent.StatePart",
    "restow.broker.families.recurrent.Recurrence",
    "restow.broker.draw.layer_pages.Cell",
    "restow.broker.core.handoffs.progress.TimeSpan",
    "restow.broker.http.server.Answer",
}
REFUSED = (WordUnknownError, IdentityInvalidError)
GIVEN: dict[str, dict[str, Any]] = {"Right": {"engine": "x"}, "Scales": {"fingerprint": ""}}
"""What a class wants beside the first value of each type."""


def worded() -> Iterator[type]:
    """Yield every public frozen dataclass of Restow that holds an enum."""
    for found in pkgutil.walk_packages(restow.__path__, "restow."):
        if "_pb2" in found.name:
            continue
        try:
            module = importlib.import_module(found.name)
        except ModuleNotFoundError as error:
            if error.name not in ("vllm", "sglang"):
                raise
            continue
        for name, value in vars(module).items():
            if not isinstance(value, type) or value.__module__ != found.name or name[0] == "_":
                continue
            if not dataclasses.is_dataclass(value) or not value.__dataclass_params__.frozen:  # type: ignore[attr-defined]
                continue
            try:
                words = enums_of(value)
            except NameError:  # it names a type of vLLM's, which is not here
                continue
            if words:
                yield value


CLASSES = [one for one in worded() if f"{one.__module__}.{one.__name__}" not in INTERNAL]
PLACES = [(cls, name, kind) for cls in CLASSES for name, kind, _ in enums_of(cls)]


def some(hint: Any) -> Any:
    """Return a value of a type."""
    if get_origin(hint) in (types.UnionType,):
        return some(get_args(hint)[0])
    if isinstance(hint, type) and issubclass(hint, Enum):
        return next(iter(hint))
    if dataclasses.is_dataclass(hint) and isinstance(hint, type):
        return sample(hint)
    simple: dict[Any, Any] = {int: 1, str: "x", bool: False, bytes: b"x", float: 1.0}
    return simple.get(hint, ())


def sample(cls: type, **more: Any) -> Any:
    """Return a value of a class; fields without a default get a made-up value."""
    hints = get_type_hints(cls)
    needed = {
        field.name: some(hints[field.name])
        for field in dataclasses.fields(cls)
        if field.default is dataclasses.MISSING and field.default_factory is dataclasses.MISSING
    }
    return cls(**needed | GIVEN.get(cls.__name__, {}) | more)


def word(one: Enum) -> str:
    return str(getattr(one, "label", one.value))


def test_all_that_is_public_is_looked_at() -> None:
    names = {cls.__name__ for cls in CLASSES}
    assert {"EngineSettings", "Field", "Shard", "AttentionSpec", "RegionMemory", "Digests"} <= names
    known = {f"{cls.__module__}.{cls.__name__}" for cls in worded()}
    assert known >= INTERNAL, "an exception for a class that is no more"


@pytest.mark.parametrize(
    ("cls", "name", "kind"), PLACES, ids=lambda one: getattr(one, "__name__", str(one))
)
def test_a_word_is_its_member_or_refused(cls: type, name: str, kind: type[Enum]) -> None:
    taken = 0
    for one in kind:
        try:
            sample(cls, **{name: one})
        except (RestowError, ValueError):  # a member that does not go with the rest
            continue
        made = sample(cls, **{name: word(one)})
        assert getattr(made, name) is one
        taken += 1
    assert taken
    for wrong in ("XX", "", 77, None):
        with pytest.raises(
            (WordUnknownError, IdentityInvalidError), match=f"{cls.__name__}.{name}"
        ):
            sample(cls, **{name: wrong})


def test_words_of_settings_build_what_their_members_do(recurrent: ModelSpec) -> None:
    for conv in ConvLayout:
        for order in KvOrder:
            by_member = build_layout(recurrent, EngineSettings(conv_layout=conv, kv_order=order))
            words: Any = {"conv_layout": conv.value, "kv_order": order.value}
            assert build_layout(recurrent, EngineSettings(**words)) == by_member


def test_words_are_taken_where_a_call_takes_an_enum(recurrent: ModelSpec) -> None:
    layout = build_layout(recurrent, EngineSettings())
    plan = make_plan(layout, layout)
    packed: Any = "pack"
    (program,) = compile_programs(plan, packed)
    (expected,) = compile_programs(plan, Strategy.PACK)
    assert program.program_id == expected.program_id
    auto: Any = "auto"
    assert Hub(Limits(), auto, 1).measures
    wrong: Any = "XX"
    for call in (lambda: compile_programs(plan, wrong), lambda: Hub(Limits(), wrong, 1)):
        with pytest.raises(WordUnknownError, match="strategy is 'XX'"):
            call()
    config = {"model_type": "mamba2", "num_hidden_layers": 1}
    half: Any = "float16"
    assert model_from_hf_config(config, conv_dtype=half) == model_from_hf_config(
        config, conv_dtype=DType.FLOAT16
    )
    with pytest.raises(WordUnknownError, match="ssm_dtype is 'XX'"):
        model_from_hf_config(config, ssm_dtype=wrong)


@pytest.fixture
def recurrent() -> ModelSpec:
    """Return a model with a layer of each kind."""
    return model_from_hf_config(
        {
            "model_type": "nemotron_h",
            "hybrid_override_pattern": "M*",
            "mamba_num_heads": 8,
            "mamba_head_dim": 16,
            "ssm_state_size": 16,
            "n_groups": 2,
            "num_attention_heads": 4,
            "num_key_value_heads": 2,
            "head_dim": 16,
        }
    )
