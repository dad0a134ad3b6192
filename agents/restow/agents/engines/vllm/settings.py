"""`ConnectorSettings` holds what an operator says in ``kv_connector_extra_config``."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from enum import StrEnum

from restow.agents.engines.vllm.errors import SettingsError
from restow.broker.client.connection.channel import Credentials
from restow.broker.words import Worded


class PrefixUse(StrEnum):
    """Says what an engine does with prefixes, by their content."""

    OFF = "off"
    FIND = "find"
    """It takes those of others."""
    FIND_AND_TELL = "find+tell"
    """It gives its own too."""


@dataclass(frozen=True, slots=True)
class ConnectorSettings(Worded):
    """How the connector works. All have defaults that suit one host and a fast network."""

    broker: str = ""
    """``host:port``, of several brokers a list of them or with commas; empty: RESTOW_BROKER, or the
    client's default."""
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
    model_revision: str = ""
    """A word for the model's weights, equal on P and D exactly when those are; empty: a fingerprint
    of the checkpoint."""
    prefix: PrefixUse = PrefixUse.OFF
    """Whether prompts begin with states that others hold, and others are told of those here."""
    find_ms: int = 50
    """How long a prompt waits for the broker's word who holds them. Then it goes on without."""
    tls_ca: str = ""
    """File of authorities for the broker's certificate; empty, as the three below: RESTOW_TLS_CA,
    ..., RESTOW_TOKEN_FILE."""
    tls_cert: str = ""
    """File of the engine's certificate."""
    tls_key: str = ""
    """File of its key."""
    token_file: str = ""
    """File of the engine's token."""

    def credentials(self) -> Credentials:
        """Return what the engine and its agents show to the broker. Raises a `TrustError`."""
        return Credentials.of(self.tls_ca, self.tls_cert, self.tls_key, self.token_file)

    @property
    def finds(self) -> bool:
        """Whether the engine takes prefixes that others hold."""
        return self.prefix is not PrefixUse.OFF

    @property
    def tells(self) -> bool:
        """Whether others may take those that the engine holds."""
        return self.prefix is PrefixUse.FIND_AND_TELL

    def check_weights(self, revision: str) -> None:
        """Refuse prefixes of a model whose weights no ``revision`` tells. Raises `SettingsError`.

        Engines that say none are all alike to the broker: a router sends their prompts to such as
        it knows to be, but who asks by content takes the state of any.
        """
        if self.finds and not revision:
            raise SettingsError(
                f"kv_connector_extra_config: prefix is {self.prefix}, and nothing tells the "
                f"model's weights from others: set model_revision, or prefix to {PrefixUse.OFF}",
                key="prefix",
            )

    @classmethod
    def of(cls, extra: Mapping[str, object]) -> ConnectorSettings:
        """Read the mapping. Raises `SettingsError` that names the key at fault."""
        defaults = asdict(cls())
        values: dict[str, object] = {}
        for key, value in extra.items():
            if key not in defaults:
                raise SettingsError(
                    f"kv_connector_extra_config: {key!r} is unknown; known are "
                    f"{', '.join(sorted(defaults))}",
                    key=key,
                )
            values[key] = _checked(key, value, defaults[key])
        return cls(**values)  # type: ignore[arg-type]


def _checked(key: str, value: object, default: object) -> object:
    if isinstance(default, PrefixUse):
        if value not in list(PrefixUse):
            raise SettingsError(
                f"kv_connector_extra_config: {key} is {value!r}; it must be one of "
                f"{', '.join(PrefixUse)}",
                key=key,
            )
        return PrefixUse(str(value))
    if key == "broker" and isinstance(value, list) and all(isinstance(one, str) for one in value):
        return ",".join(value)
    if isinstance(default, str):
        if not isinstance(value, str):
            raise SettingsError(f"kv_connector_extra_config: {key} is no text: {value!r}", key=key)
        return value
    if isinstance(value, bool) or not isinstance(value, int | float) or value <= 0:
        raise SettingsError(
            f"kv_connector_extra_config: {key} is {value!r}; it must be a positive number", key=key
        )
    return type(default)(value)  # type: ignore[call-arg]
