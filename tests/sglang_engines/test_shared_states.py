"""States that SGLang's engines share through Restow, compared byte by byte with the truth."""

from __future__ import annotations

from pathlib import Path
from random import Random

import pytest

from sglang_engines.conftest import Starts, store_for

pytestmark = pytest.mark.timeout(300)


def drawn(count: int, seed: int) -> list[int]:
    rng = Random(seed)  # noqa: S311 - reproducible, not secret
    return [rng.randrange(8, 88) for _ in range(count)]


@pytest.mark.parametrize("tps", [(1, 2), (2, 1)])
@pytest.mark.parametrize(("kind", "page"), [("attention", 16), ("hybrid", 1)])
def test_a_state_of_one_tp_is_loaded_at_another(
    start: Starts, broker: str, models: dict[str, Path], kind: str, page: int, tps: tuple[int, int]
) -> None:
    tokens = drawn(96, 3)
    with store_for(broker, models[kind]), start(kind, tp=tps[0], page=page, name="p") as p:
        assert p.all("compute", tokens=tokens) == {"offloads": 1}
        assert p.all("settle") == {"taken": [True]}
        with start(kind, tp=tps[1], page=page, name="d") as d:
            got = d.all("load", tokens=[*tokens, *drawn(20, 4)])
    assert got == {"here": 0, "found": 96, "landed": True, "wrong": [], "queued": 1}
