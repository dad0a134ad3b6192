"""Why a store keeps a state not, or has none to give."""

from __future__ import annotations

from restow.broker.errors import RestowError


class RoomTooSmallError(RestowError, status="INVALID_ARGUMENT", reason="STORE_TOO_SMALL"):
    """The memory of a store holds no state at all."""


class StoreFullError(RestowError, status="RESOURCE_EXHAUSTED", reason="STORE_FULL"):
    """There is no room for a state: handoffs have all of it, or it is larger than all of it."""


class NotHeldError(RestowError, status="NOT_FOUND", reason="NOT_HELD"):
    """The store has no such state, or not any more."""


class NotKeptError(RestowError, status="ABORTED", reason="STATE_NOT_KEPT"):
    """A state did not arrive: its handoff ended otherwise."""
