"""Errors that adapters raise, with stable reasons."""

from __future__ import annotations

from restow.broker.errors import RestowError


class BlocksError(RestowError, status="FAILED_PRECONDITION", reason="BLOCKS_INVALID"):
    """Block lists that hold no state."""


class ParametersError(RestowError, status="INVALID_ARGUMENT", reason="PARAMETERS_INVALID"):
    """A request's ``kv_transfer_params`` that name no handoff, or no side of a handoff."""


class RevisionUnknownError(RestowError, status="FAILED_PRECONDITION", reason="REVISION_UNKNOWN"):
    """The engine's weights were replaced by weights that nobody has named."""


class SettingsError(RestowError, status="INVALID_ARGUMENT", reason="SETTINGS_INVALID"):
    """A setting of the adapter that is unknown or out of range."""


class EngineUnsupportedError(
    RestowError, status="FAILED_PRECONDITION", reason="ENGINE_UNSUPPORTED"
):
    """An engine whose parallelism, caches or version the adapter does not support."""


class CacheUnknownError(RestowError, status="FAILED_PRECONDITION", reason="CACHE_UNKNOWN"):
    """A cache tensor that is not laid out as the model's config says."""
