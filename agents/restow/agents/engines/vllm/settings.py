"""What an operator may say in ``kv_connector_extra_config``."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields

from restow.agents.engines.vllm.errors import SettingsError


@dataclass(frozen=True, slots=True)
class ConnectorSettings:
    """How the connector works. All have defaults that suit one host and a fast network."""

    broker: str = ""
    """``host:port``; empty: RESTOW_BROKER, or the client's default."""
    connect_timeout_s: float = 60.0
    """How long an engine waits at its start for a broker."""
    lease_ms: int = 30_000
    """How long P's pages stay after its session was last heard of."""
    hold_ms: int = 300_000
    """How long P keeps pages that nobody asks for."""
    request_timeout_ms: int = 120_000
    """How long D waits for a state, P's prefill included."""
    staging_mb: int = 64
    """Size of each of an agent's two staging pools."""

    @classmethod
    def of(cls, extra: Mapping[str, object]) -> ConnectorSettings:
        """Read the mapping. Raises `SettingsError` that names the key at fault."""
        known = {field.name: field for field in fields(cls)}
        values: dict[str, object] = {}
        for key, value in extra.items():
            if key not in known:
                raise SettingsError(
                    f"kv_connector_extra_config: {key!r} is unknown; known are "
                    f"{', '.join(sorted(known))}",
                    key=key,
                )
            values[key] = _checked(key, value, getattr(cls(), key))
        return cls(**values)  # type: ignore[arg-type]


def _checked(key: str, value: object, default: object) -> object:
    if isinstance(default, str):
        if not isinstance(value, str):
            raise SettingsError(f"kv_connector_extra_config: {key} is no text: {value!r}", key=key)
        return value
    if isinstance(value, bool) or not isinstance(value, int | float) or value <= 0:
        raise SettingsError(
            f"kv_connector_extra_config: {key} is {value!r}; it must be a positive number", key=key
        )
    return type(default)(value)  # type: ignore[call-arg]
