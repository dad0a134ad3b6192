"""What is answered to an engine whose word of a handoff is another's, or was said before."""

from __future__ import annotations

from restow.broker.core.actions import State
from restow.broker.core.engines.engine import EngineRecord
from restow.broker.errors import HandoffConflictError, HandoffOwnedError


def owned(
    handoff_id: str, side: str, verb: str, owner: EngineRecord, other: EngineRecord
) -> HandoffOwnedError:
    """Another engine has that side."""
    return HandoffOwnedError(
        f"handoff {handoff_id} is {verb} by engine {owner.key.engine_id} (incarnation "
        f"{owner.incarnation}), not by {other.key.engine_id} (incarnation {other.incarnation})",
        handoff=handoff_id,
        side=side,
    )


def no_place(handoff_id: str, words: str, other: EngineRecord) -> HandoffOwnedError:
    """All its readers have their deliveries."""
    return HandoffOwnedError(
        f"handoff {handoff_id} is not for engine {other.key.engine_id} too: {words}",
        handoff=handoff_id,
        side="destination",
    )


def asked_before(handoff_id: str, engine: EngineRecord) -> HandoffConflictError:
    """It is a second demand of one engine."""
    return HandoffConflictError(
        f"engine {engine.key.engine_id} has asked for handoff {handoff_id} already: an id "
        f"names one state for one demand",
        handoff=handoff_id,
    )


def waited_for(handoff_id: str, engine: EngineRecord) -> HandoffConflictError:
    """It is asked for by a prefix, and others wait until a P publishes it."""
    return HandoffConflictError(
        f"engine {engine.key.engine_id} asks by a prefix for handoff {handoff_id}, which others "
        f"wait for: a demand by prefix has an id of its own",
        handoff=handoff_id,
    )


def named_late(handoff_id: str) -> HandoffConflictError:
    """Its readers are named when one of them reads already."""
    return HandoffConflictError(
        f"handoff {handoff_id} is being read, and was published for one reader: name its readers "
        f"in the first chunk",
        handoff=handoff_id,
    )


def used_again(
    handoff_id: str, state: State, engine: EngineRecord, verb: str
) -> HandoffConflictError:
    """It has ended, and is said anew."""
    return HandoffConflictError(
        f"handoff {handoff_id} has ended {state}, and engine {engine.key.engine_id} {verb} again: "
        f"an id names one state, use a new one",
        handoff=handoff_id,
    )
