"""What an engine's adapter refuses, with stable reasons."""

from __future__ import annotations

from restow.broker.errors import RestowError


class ParametersError(RestowError):
    """``kv_transfer_params`` that name no handoff, or no side of it."""

    status = "INVALID_ARGUMENT"
    reason = "PARAMETERS_INVALID"


class BlocksError(RestowError):
    """Block lists that hold no state."""

    status = "FAILED_PRECONDITION"
    reason = "BLOCKS_INVALID"
