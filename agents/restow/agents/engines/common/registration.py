"""The settings that an operator gives an engine's adapter, and its session with the broker."""

from __future__ import annotations

import asyncio
import os
import signal
import time
from collections.abc import Callable, Mapping, Sequence
from enum import StrEnum
from typing import Annotated

import structlog
from pydantic import (
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    PositiveFloat,
    PositiveInt,
    ValidationError,
)

from restow.agents.engines.common.adapter_errors import SettingsError
from restow.broker.client import BlockingSession, Offer, Prefix, StateOrder
from restow.broker.client.connection.channel import Credentials
from restow.broker.client.connection.errors import MAY_PASS
from restow.broker.errors import RestowError
from restow.broker.layout import Layout

LOG_INTERVAL_S = 5.0
"""How often an engine that waits for its broker logs that it waits."""
AGAIN_S = 1.0
"""When a SIGTERM to an engine's own process is sent a second time."""


class PrefixUse(StrEnum):
    """How an engine uses prefixes that are found by their content."""

    OFF = "off"
    FIND = "find"
    """The engine takes prefixes that others hold."""
    FIND_AND_TELL = "find+tell"
    """The engine also offers the prefixes that it holds itself."""


def _joined(broker: object) -> object:
    """Return a list of addresses with commas between them, and anything else as it is."""
    several = isinstance(broker, list) and all(isinstance(one, str) for one in broker)
    return ",".join(broker) if several else broker  # type: ignore[arg-type]


class ConnectorSettings(BaseModel):
    """Settings of an engine's adapter. The defaults suit one host and a fast network."""

    model_config = ConfigDict(frozen=True, extra="forbid", strict=True)

    broker: Annotated[str, BeforeValidator(_joined)] = ""
    """``host:port``; several brokers as a list or with commas; empty: RESTOW_BROKER, or the
    client's default."""
    connect_timeout_s: PositiveFloat = 60.0
    """How long an engine waits at its start for a broker."""
    lease_ms: PositiveInt = 180_000
    """How long P's pages stay after the broker last heard from its session."""
    hold_ms: PositiveInt = 300_000
    """How long P renews the lease of pages that nobody asks for; they stay up to a lease longer."""
    request_timeout_ms: PositiveInt = 120_000
    """How long D waits for a state, P's prefill included."""
    staging_mb: PositiveInt = 64
    """Size of each of an agent's two staging pools."""
    model_revision: str = ""
    """A word for the model's weights, equal on P and D exactly when the weights are; empty: a
    fingerprint of the checkpoint."""
    prefix: PrefixUse = Field(default=PrefixUse.OFF, strict=False)
    """Whether prompts begin with states that others hold, and whether the engine offers its own."""
    find_ms: PositiveInt = 50
    """How long a prompt waits for the broker to say who holds its prefix, before it goes on
    without."""
    allow_untested: bool = False
    """Whether to serve caches of kinds that no test has run, and compare their content."""
    tls_ca: str = ""
    """File of authorities for the broker's certificate; empty here and in the three settings below:
    RESTOW_TLS_CA, ..., RESTOW_TOKEN_FILE."""
    tls_cert: str = ""
    """File of the engine's certificate."""
    tls_key: str = ""
    """File of the certificate's key."""
    token_file: str = ""
    """File of the engine's token."""

    def credentials(self) -> Credentials:
        """Return the credentials of the engine and its agents. Raises a `TrustError`."""
        return Credentials.of(self.tls_ca, self.tls_cert, self.tls_key, self.token_file)

    @property
    def finds(self) -> bool:
        """Whether the engine takes prefixes that others hold."""
        return self.prefix is not PrefixUse.OFF

    @property
    def tells(self) -> bool:
        """Whether others may take prefixes that the engine holds."""
        return self.prefix is PrefixUse.FIND_AND_TELL

    def check_weights(self, revision: str) -> None:
        """Refuse prefixes of a model whose weights have no ``revision``. Raises `SettingsError`.

        To the broker all engines without a revision are alike. A router knows which engines have
        the same weights, but a request for a prefix takes the state of any engine.
        """
        if self.finds and not revision:
            raise SettingsError(
                f"connector setting prefix is {self.prefix}, and the model's weights have no "
                f"revision: set model_revision, or prefix to {PrefixUse.OFF}",
                key="prefix",
            )

    @classmethod
    def of(cls, given: Mapping[str, object]) -> ConnectorSettings:
        """Return the settings ``given`` by name. Raises `SettingsError` with the key at fault."""
        try:
            return cls.model_validate(dict(given))
        except ValidationError as error:
            fault = error.errors()[0]
            key, words = str(fault["loc"][0]), f"is {fault['input']!r}: {fault['msg']}"
            if fault["type"] == "extra_forbidden":
                words = f"is unknown; known are {', '.join(sorted(cls.model_fields))}"
            raise SettingsError(f"connector setting {key} {words}", key=key) from None


def end_process() -> None:
    """Send SIGTERM to this process, and again after ``AGAIN_S`` if its handler still stands.

    Python does not notice a signal that arrives just before the main thread blocks, and the main
    thread of an idle engine stays blocked. The second signal meets a thread that is blocked
    already. Call it on an event loop that ends with the engine.
    """
    handler = signal.getsignal(signal.SIGTERM)

    def again() -> None:
        if signal.getsignal(signal.SIGTERM) is handler:
            os.kill(os.getpid(), signal.SIGTERM)

    asyncio.get_running_loop().call_later(AGAIN_S, again)
    os.kill(os.getpid(), signal.SIGTERM)


def register_engine(
    engine_id: str,
    incarnation: str,
    layout: Layout,
    settings: ConnectorSettings,
    log: structlog.stdlib.BoundLogger,
    *,
    publishes: bool,
    asks: bool,
    on_offer: Callable[[Offer], None] | None = None,
    on_drain: Callable[[], Sequence[Prefix]] | None = None,
    on_command: Callable[[StateOrder], None] | None = None,
) -> BlockingSession:
    """Register an engine, and return its session as soon as the broker answers.

    The engine ``publishes`` prompts and prefixes, ``asks`` for them, or both. Offers of the broker
    go to ``on_offer`` and commands to ``on_command``; the prefixes that ``on_drain`` returns are
    handed over before the engine leaves. The process gets SIGTERM when the broker is lost for good.

    Tries again for ``connect_timeout_s`` while nobody answers, the broker gives no welcome, nobody
    leads, or the broker is full. Raises `BrokerUnreachableError`, `NoWelcomeError`, and
    `BrokerCallError` with the broker's reason.
    """

    def lost(error: RestowError) -> None:
        # The engine can hand nothing over any more, and its supervisor must see that.
        log.error("the broker is lost for good", reason=error.reason, detail=error.message)
        end_process()

    began_s = time.monotonic()
    while True:
        session = BlockingSession(
            engine_id,
            incarnation,
            layout,
            settings.broker or None,
            settings.credentials(),
            lost,
            publishes=publishes,
            asks=asks,
            digests=settings.allow_untested,
            on_offer=on_offer,
            on_drain=on_drain,
            on_command=on_command,
        )
        left_s = began_s + settings.connect_timeout_s - time.monotonic()
        try:
            session.start(min(LOG_INTERVAL_S, max(left_s, 0.1)))
        except RestowError as error:
            if error.status not in MAY_PASS or left_s <= LOG_INTERVAL_S:
                raise
            log.warning(
                "the broker is not there yet",
                reason=error.reason,
                detail=error.message,
                gives_up_in_s=round(left_s - LOG_INTERVAL_S),
            )
            continue
        log.info("registered with the broker", ranks=len(layout.ranks))
        return session
