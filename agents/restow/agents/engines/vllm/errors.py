"""These errors say what the connector refuses, with stable reasons."""

from __future__ import annotations

from restow.broker.errors import RestowError


class ParametersError(RestowError, status="INVALID_ARGUMENT", reason="PARAMETERS_INVALID"):
    """``kv_transfer_params`` that name no handoff, or no side of it."""


class RevisionUnknownError(RestowError, status="FAILED_PRECONDITION", reason="REVISION_UNKNOWN"):
    """The engine's weights were replaced, and nobody has said by which."""


class SettingsError(RestowError, status="INVALID_ARGUMENT", reason="SETTINGS_INVALID"):
    """A ``kv_connector_extra_config`` that says nothing sensible."""


class EngineUnsupportedError(
    RestowError, status="FAILED_PRECONDITION", reason="ENGINE_UNSUPPORTED"
):
    """An engine whose parallelism or cache the connector does not know."""


class CacheUnknownError(RestowError, status="FAILED_PRECONDITION", reason="CACHE_UNKNOWN"):
    """A cache tensor that does not lie as the model's config says that it must."""
