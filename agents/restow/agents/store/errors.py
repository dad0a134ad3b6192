"""Why there is no store."""

from __future__ import annotations

from restow.broker.errors import RestowError


class RoomTooSmallError(RestowError, status="INVALID_ARGUMENT", reason="STORE_TOO_SMALL"):
    """The memory of a store holds no state at all."""
