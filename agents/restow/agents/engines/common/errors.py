"""These errors say what an engine's adapter refuses, with stable reasons."""

from __future__ import annotations

from restow.broker.errors import RestowError


class BlocksError(RestowError, status="FAILED_PRECONDITION", reason="BLOCKS_INVALID"):
    """Block lists that hold no state."""
