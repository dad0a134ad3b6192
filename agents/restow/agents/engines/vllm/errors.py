"""These errors say what the connector refuses, with stable reasons."""

from __future__ import annotations

from restow.broker.errors import RestowError


class ParametersError(RestowError):
    """``kv_transfer_params`` that name no handoff, or no side of it."""

    status = "INVALID_ARGUMENT"
    reason = "PARAMETERS_INVALID"


class SettingsError(RestowError):
    """A ``kv_connector_extra_config`` that says nothing sensible."""

    status = "INVALID_ARGUMENT"
    reason = "SETTINGS_INVALID"


class EngineUnsupportedError(RestowError):
    """An engine whose parallelism or cache the connector does not know."""

    status = "FAILED_PRECONDITION"
    reason = "ENGINE_UNSUPPORTED"


class CacheUnknownError(RestowError):
    """A cache tensor that does not lie as the model's config says that it must."""

    status = "FAILED_PRECONDITION"
    reason = "CACHE_UNKNOWN"
