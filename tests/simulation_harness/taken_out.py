"""Put something else in place of a part of the code while a history is played."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING
from unittest.mock import patch

if TYPE_CHECKING:
    from simulation_harness.history import History

StandIn = tuple[object, str, object]
"""An owner, the name of its attribute, and what replaces that."""
Mutation = Callable[["History"], contextlib.AbstractContextManager[None]]


def nothing(*words: object) -> None:
    """Do nothing."""


def no_actions(*words: object) -> list[object]:
    """Return no actions, in place of what a message has the broker do."""
    return []


def instead(
    *stand_ins: StandIn,
    only: Sequence[str] = (),
    first: Callable[[History], object] = nothing,
) -> Mutation:
    """Return a mutation that prepares a history with ``first`` and sets ``stand_ins``.

    Nothing else than the faults named by ``only`` happens then, where chance alone brings what
    matters about too seldom.
    """

    @contextlib.contextmanager
    def mutated(history: History) -> Iterator[None]:
        first(history)
        if only and history.faults is not None:
            history.faults.kinds = tuple(getattr(history.faults, name) for name in only)
        with contextlib.ExitStack() as stack:
            for owner, name, value in stand_ins:
                stack.enter_context(patch.object(owner, name, value))
            yield

    return mutated


def both(one: Mutation, other: Mutation) -> Mutation:
    """Return the mutation that makes two mutations together."""

    @contextlib.contextmanager
    def mutated(history: History) -> Iterator[None]:
        with one(history), other(history):
            yield

    return mutated
