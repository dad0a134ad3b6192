"""Settings of ``restow serve``, from arguments, the environment (RESTOW_...) and defaults."""

from __future__ import annotations

from dataclasses import fields
from pathlib import Path
from typing import Annotated

from pydantic import AfterValidator, Field
from pydantic_settings import BaseSettings, SettingsConfigDict

from restow.broker.addresses import DEFAULT_PORT, checked_http, checked_listener, checked_target
from restow.broker.core.common.limits import Limits
from restow.broker.core.common.pair import DigestMode, Digests
from restow.broker.planner import CostModel, Strategy
from restow.broker.registry.etcd_access import EtcdAccess
from restow.broker.registry.registry import Timing

Seconds = Annotated[float, Field(gt=0, le=600)]
Count = Annotated[int, Field(ge=1)]
LIMITS = Limits()
TIMING = Timing()


class BrokerSettings(BaseSettings):
    """The operator's settings. Raises pydantic's `ValidationError`, and `AddressInvalidError`."""

    model_config = SettingsConfigDict(env_prefix="RESTOW_")

    listen: Annotated[str, AfterValidator(checked_listener)] = f"127.0.0.1:{DEFAULT_PORT}"
    http_listen: Annotated[str, AfterValidator(checked_http)] | None = None
    """Address for metrics and probes."""
    status_page: bool = False
    """Whether to serve a status page there, which names engines and handoffs."""
    http_hosts: str = ""
    """Host names that the status page accepts beside addresses, separated by commas."""
    otlp_endpoint: Annotated[str, Field(pattern=r"^https?://.+$")] | None = None
    """The OpenTelemetry collector that receives traces."""
    trace_ratio: Annotated[float, Field(ge=0, le=1)] = 1.0
    """Share of handoffs to trace, among those whose request has no trace."""
    etcd: str | None = None
    """Addresses of etcd, ``HOST:PORT,...``, for one of several brokers. None: the only broker."""
    advertise: Annotated[str, AfterValidator(checked_target)] | None = None
    """Address at which engines and agents reach this broker, if it is one of several."""
    fleet: Annotated[str, Field(pattern=r"^[a-z0-9][a-z0-9.-]{0,62}$")] = "default"
    """Name of the group of brokers; another group may use the same etcd."""
    etcd_ca: Path | None = None
    etcd_cert: Path | None = None
    etcd_key: Path | None = None
    etcd_user: str = ""
    etcd_password_file: Path | None = None
    kubernetes_leases: Annotated[str, Field(pattern=r"^[a-z0-9]([a-z0-9-]*[a-z0-9])?$")] | None = (
        None
    )
    """Namespace whose Lease objects replace etcd. None uses none."""
    kubernetes_account: Path | None = None
    """Folder of the service account for the Leases. None: the pod's own."""
    member_lease_s: Seconds = TIMING.lease_s
    """How long a broker that says nothing is thought to live, before another one leads."""
    expect_brokers: Annotated[int, Field(ge=0)] = 0
    """How many brokers there should be; with fewer an alert is raised. 0: nobody says."""
    strategy: Strategy = Strategy.AUTO
    allow_narrowing: bool = False
    costs: dict[str, float] = {}
    """Costs to use instead of measuring. Costs that are not named have their defaults."""
    digests: DigestMode = DigestMode.OFF
    digest_every: Count = Digests().every
    lease_s: Seconds = LIMITS.lease_s
    timeout_s: Seconds = LIMITS.timeout_s
    grant_s: Seconds = LIMITS.grant_s
    settle_grace_s: Seconds = LIMITS.settle_grace_s
    offer_s: Seconds = LIMITS.offer_s
    early_bytes: Annotated[int, Field(ge=0)] = LIMITS.early_bytes
    require_content: bool = LIMITS.require_content
    engine_idle_s: Seconds = LIMITS.engine_idle_s
    """Time for which an engine that is gone is remembered."""
    drain_s: Annotated[float, Field(ge=0, le=600)] = 10.0
    """Time for which reads under way may delay the end of the process."""
    max_live: Count = LIMITS.max_live
    max_ended: Count = LIMITS.max_ended
    max_queue: Count = 100_000
    max_connections: Annotated[int, Field(ge=16)] | None = None
    """Limit of connections; None means 512 with TLS, else as many as open files allow.

    With TLS each stranger's connection may take 80 KiB.
    """
    max_bytes: Count = LIMITS.max_bytes
    tenant_max_live: Count | None = None
    tenant_max_ended: Count | None = None
    tenant_max_engines: Count | None = None
    tenant_max_bytes: Count | None = None
    max_holdings_bytes: Count = LIMITS.max_holdings_bytes
    tenant_max_holdings_bytes: Count | None = None
    tls_cert: Path | None = None
    tls_key: Path | None = None
    client_ca: Path | None = None
    """Certificate authorities of clients."""
    tokens: Path | None = None
    """File with the list of tokens (`trust.tokens`)."""

    def cost_model(self) -> CostModel | None:
        """Return the given costs, or None. Raises `CostsInvalidError`."""
        return CostModel.of(self.costs) if self.costs else None

    def content_digests(self) -> Digests:
        """Return which handoffs' content is checked by digests."""
        return Digests(self.digests, self.digest_every)

    def etcd_access(self) -> EtcdAccess:
        """Return how etcd is reached. Raises `EtcdSettingsError` and `AddressInvalidError`."""
        return EtcdAccess.parse(
            self.etcd or "",
            ca=self.etcd_ca,
            cert=self.etcd_cert,
            key=self.etcd_key,
            user=self.etcd_user,
            password_file=self.etcd_password_file,
        )

    def timing(self) -> Timing:
        """Return the lengths of leases among several brokers."""
        return Timing.of_lease(self.member_lease_s)

    def limits(self) -> Limits:
        """Return the limits of the directory."""
        named = {field.name for field in fields(Limits)} & set(type(self).model_fields)
        limits = Limits(**{name: getattr(self, name) for name in named})
        alone = self.etcd is None and self.kubernetes_leases is None
        return limits if alone else limits.among_others()
