"""What is judged of a state that D has, whichever side is heard first."""

from __future__ import annotations

from chaos_harness.found import Found


def test_p_may_be_heard_after_d() -> None:
    found = Found()
    found.check("D", "h1", {7})
    assert found.violations == ["h1 is DONE at D with {7} instead of set()"]
    found.stamps["h1"] = {7}
    assert found.violations == []


def test_another_state_than_any_that_p_wrote_is_broken() -> None:
    found = Found()
    found.stamps["h1"] = {7, 8}
    for stamps in ({9}, {7, 8}, set[int]()):
        found.check("D", "h1", stamps)
    assert len(found.violations) == 3
    found.check("D", "h1", {8})
    assert len(found.violations) == 3
