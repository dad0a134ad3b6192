"""Settings of ``restow serve``, from arguments, environment (RESTOW_...) and defaults."""

from __future__ import annotations

from pydantic_settings import BaseSettings, SettingsConfigDict

from restow.broker.core.grant import Limits
from restow.broker.planner import Strategy


class BrokerSettings(BaseSettings):
    """What an operator may set."""

    model_config = SettingsConfigDict(env_prefix="RESTOW_")

    listen: str = "127.0.0.1:7350"
    strategy: Strategy = Strategy.AUTO
    lease_s: float = 30.0
    timeout_s: float = 30.0
    grant_s: float = 10.0
    max_live: int = 100_000
    max_ended: int = 10_000
    max_queue: int = 100_000

    def limits(self) -> Limits:
        """The bounds that the directory works with."""
        return Limits(
            lease_s=self.lease_s,
            timeout_s=self.timeout_s,
            grant_s=self.grant_s,
            max_live=self.max_live,
            max_ended=self.max_ended,
        )
