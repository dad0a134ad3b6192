"""Memory that tests of daemons share."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from agent_harness.shared_rank import SharedRank, small_rank


@pytest.fixture
def shared() -> Iterator[SharedRank]:
    with SharedRank() as rank:
        yield rank


@pytest.fixture
def small() -> Iterator[SharedRank]:
    with small_rank() as rank:
        yield rank
