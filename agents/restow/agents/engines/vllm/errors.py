"""These errors say what the connector refuses, with stable reasons."""

from __future__ import annotations

from restow.broker.errors import RestowError


class VllmError(RestowError):
    """Base of the connector's errors."""

    status = "FAILED_PRECONDITION"


class SettingsError(VllmError):
    """A ``kv_connector_extra_config`` that says nothing sensible."""

    status = "INVALID_ARGUMENT"
    reason = "SETTINGS_INVALID"


class EngineUnsupportedError(VllmError):
    """An engine whose parallelism or cache the connector does not know."""

    reason = "ENGINE_UNSUPPORTED"


class CacheUnknownError(VllmError):
    """A cache tensor that does not lie as the model's config says that it must."""

    reason = "CACHE_UNKNOWN"
