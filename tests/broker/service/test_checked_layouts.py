"""Layouts that replicas register are checked once."""

from __future__ import annotations

from unittest.mock import patch

import pytest

from broker.fakes import model_layout
from restow.broker.errors import LayoutError
from restow.broker.layout import digest
from restow.broker.rpc import wire
from restow.broker.server.services import checked_messages as checked_layouts
from restow.broker.server.services.checked_messages import CheckedLayouts


def test_the_same_layout_is_the_same_value() -> None:
    layouts = CheckedLayouts()
    message = wire.layout_to_proto(model_layout(2))
    first = layouts.of(message)
    assert first == (model_layout(2), digest(model_layout(2)))
    again = type(message).FromString(message.SerializeToString())
    with patch.object(checked_layouts, "check_layout", side_effect=AssertionError):
        assert layouts.of(again)[0] is first[0]


def test_another_layout_is_another_value() -> None:
    layouts = CheckedLayouts()
    assert len({layouts.of(wire.layout_to_proto(model_layout(tp)))[1] for tp in (1, 2)}) == 2


def test_what_is_refused_is_refused_again() -> None:
    layouts = CheckedLayouts()
    message = wire.layout_to_proto(model_layout())
    message.ranks[0].regions[0].page_stride_bytes = 0
    for _ in range(2):
        with pytest.raises(LayoutError):
            layouts.of(message)


def test_what_no_engine_has_is_not_kept() -> None:
    layouts = CheckedLayouts()
    kept = layouts.of(wire.layout_to_proto(model_layout(name="a")))
    for name in ("b", "c"):
        layouts.of(wire.layout_to_proto(model_layout(name=name)))
    assert list(layouts._layouts.values()) == [kept[0]]


def test_messages_that_differ_and_say_the_same_make_one_value() -> None:
    layouts = CheckedLayouts()
    message = wire.layout_to_proto(model_layout())
    first, _ = layouts.of(message)
    page = message.ranks[0].regions[0]
    assert page.pages_per_block == 1
    page.pages_per_block = 0  # which stands for 1
    assert layouts.of(message)[0] is first


def test_no_more_digests_of_messages_are_kept_than_may(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(checked_layouts, "MAX_KEPT", 2)
    layouts = CheckedLayouts()
    for name in ("a", "b", "c"):
        layouts.of(wire.layout_to_proto(model_layout(name=name)))
    assert len(layouts._digests) == 2
