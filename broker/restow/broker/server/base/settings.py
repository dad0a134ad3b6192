"""Every setting of the broker, with its default and what it does.

The options of ``restow serve``, the variables (``RESTOW_LEASE_S``), the keys of a TOML file
(``lease_s``) and docs/settings.md follow from these classes. Each group of settings is a class.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, fields
from enum import Enum
from pathlib import Path
from types import UnionType
from typing import Annotated, Any, Literal, Union, get_args, get_origin

from pydantic import AfterValidator, BaseModel, BeforeValidator, Field
from pydantic_settings import BaseSettings, SettingsConfigDict

from restow.broker.addresses import DEFAULT_PORT, checked_http, checked_listener, checked_target
from restow.broker.core.common.limits import Limits
from restow.broker.core.common.pair import DigestMode, Digests
from restow.broker.planner import CostModel, Strategy
from restow.broker.registry.etcd_access import EtcdAccess
from restow.broker.registry.registry import Timing

PREFIX = "RESTOW_"
LIMITS = Limits()

Seconds = Annotated[float, Field(gt=0, le=600)]
Count = Annotated[int, Field(ge=1)]


def or_unset(default: object) -> BeforeValidator:
    """Treat an empty variable as a variable that is not set."""
    return BeforeValidator(lambda value: default if value == "" else value)


def setting(default: Any, words: str, form: str | None = None) -> Any:
    """Describe a field. ``form`` stands for its value, where its type does not say enough."""
    return Field(default, description=words, json_schema_extra={"form": form})


class ListeningSettings(BaseModel):
    """Addresses."""

    listen: Annotated[str, AfterValidator(checked_listener)] = setting(
        f"127.0.0.1:{DEFAULT_PORT}", "Listen on this address.", "HOST:PORT"
    )
    http_listen: Annotated[str, AfterValidator(checked_http)] | None = setting(
        None,
        "Serve Prometheus metrics and probes (/metrics, /healthz, /readyz) on this address, to "
        "everybody who asks. Default: nowhere.",
        "HOST:PORT",
    )
    status_page: bool = setting(
        False,
        "With --http-listen: also serve a page for people (/). It names engines and handoffs of "
        "all tenants to everybody who asks. Default: no page.",
    )
    http_hosts: str = setting(
        "",
        "With --status-page: accept these host names from browsers. Default: the host name of "
        "--http-listen. Addresses and localhost are always accepted.",
        "NAME,...",
    )


class TellingSettings(BaseModel):
    """Traces, KV events and log."""

    otlp_endpoint: Annotated[str, Field(pattern=r"^https?://.+$")] | None = setting(
        None,
        "Send a trace of each handoff to this OpenTelemetry collector (OTLP over gRPC, "
        "http://HOST:4317). Default: no traces.",
        "URL",
    )
    trace_ratio: Annotated[float, Field(ge=0, le=1)] = setting(
        1.0, "Trace this share (0 to 1) of the handoffs whose request has no trace of its own."
    )
    otlp_metrics_s: Annotated[float, Field(ge=0)] = setting(
        0.0, "With --otlp-endpoint: seconds between metrics that go there too. 0: no metrics."
    )
    log_format: Annotated[Literal["console", "json"], or_unset("console")] = setting(
        "console", "Form of the log on stderr."
    )
    kv_events: Annotated[str, Field(pattern=r"^(tcp|ipc)://.+$")] | None = setting(
        None,
        "Publish what engines and stores hold as vLLM's KV events over ZeroMQ at this address, to "
        "everybody who reaches it. `tcp://*:5557` listens, `tcp://HOST:5557` connects to a "
        "subscriber that listens. Default: nowhere.",
        "ADDRESS",
    )
    kv_events_replay: Annotated[str, Field(pattern=r"^(tcp|ipc)://.+$")] | None = setting(
        None,
        "With --kv-events: answer subscribers that ask for events again at this address. "
        "Default: nowhere.",
        "ADDRESS",
    )
    kv_events_tenant: str = setting(
        "default", "With --kv-events: publish what this tenant's engines hold.", "NAME"
    )


class FleetSettings(BaseModel):
    """One of several brokers."""

    etcd: str | None = setting(
        None,
        "Be one of several brokers; this etcd says which broker leads. Default: the only broker.",
        "HOST:PORT,...",
    )
    advertise: Annotated[str, AfterValidator(checked_target)] | None = setting(
        None,
        "Of several brokers: the address at which engines and agents reach this broker. "
        "Default: --listen.",
        "HOST:PORT",
    )
    fleet: Annotated[str, Field(pattern=r"^[a-z0-9][a-z0-9.-]{0,62}$")] = setting(
        "default",
        "Of several brokers: the name of their fleet. Other fleets may use the same registry.",
        "NAME",
    )
    member_lease_s: Seconds = setting(
        Timing().lease_s,
        "Of several brokers: let another broker lead when the leader has been silent for this "
        "long.",
    )
    expect_brokers: Annotated[int, Field(ge=0)] = setting(
        0,
        "Of several brokers: how many there should be. Metrics, `restow brokers` and `restow "
        "doctor` report missing brokers. Default: not known.",
    )
    kubernetes_leases: Annotated[str, Field(pattern=r"^[a-z0-9]([a-z0-9-]*[a-z0-9])?$")] | None = (
        setting(
            None,
            "Be one of several brokers; Lease objects of the Kubernetes that runs this pod say "
            "which broker leads. Used instead of --etcd. Default: the only broker.",
            "NAMESPACE",
        )
    )
    kubernetes_account: Path | None = setting(
        None,
        "With --kubernetes-leases: the token and ca.crt of a service account. Default: the "
        "pod's own.",
        "FOLDER",
    )
    etcd_ca: Path | None = setting(
        None, "Use TLS to etcd, and check its certificate against this authority.", "FILE"
    )
    etcd_cert: Path | None = setting(None, "Present this certificate to etcd.", "FILE")
    etcd_key: Path | None = setting(None, "Private key of --etcd-cert.", "FILE")
    etcd_user: str = setting("", "Log in to etcd as this user. Default: no login.", "NAME")
    etcd_password_file: Path | None = setting(None, "Password of --etcd-user.", "FILE")


class TransferSettings(BaseModel):
    """How states travel."""

    strategy: Strategy = setting(Strategy.AUTO, "How states travel.")
    allow_narrowing: bool = setting(
        False,
        "Round states to D's type where it is narrower than P's, for example float32 to "
        "bfloat16. Default: refuse these pairs.",
    )
    costs: dict[str, float] = setting(
        {},
        "Choose how states travel by these costs: a JSON object like `costs` in `restow costs "
        "--json`. Default: costs that are measured.",
        "FILE",
    )
    digests: DigestMode = setting(
        DigestMode.OFF,
        "Have P hash the state and D compare what it has read: of no handoff, of a sample, or of "
        "all handoffs.",
    )
    digest_every: Count = setting(
        Digests().every, "With --digests sampled: check one in this many handoffs."
    )
    early_bytes: Annotated[int, Field(ge=0)] = setting(
        LIMITS.early_bytes,
        "Read leading tokens while P still computes, as soon as they make up this many bytes.",
    )
    require_content: bool = setting(
        LIMITS.require_content,
        "Refuse publications and demands that do not name the state's content, so that each D "
        "gets the state of its own prompt. Default: unnamed content is not compared.",
    )


class TimeSettings(BaseModel):
    """Times."""

    lease_s: Seconds = setting(LIMITS.lease_s, "Lease of publications that name no lease.")
    timeout_s: Seconds = setting(LIMITS.timeout_s, "Timeout of demands that name no timeout.")
    grant_s: Seconds = setting(
        LIMITS.grant_s, "Longest time of a read; a slower read is repeated with twice the time."
    )
    settle_grace_s: Seconds = setting(
        LIMITS.settle_grace_s,
        "Wait this long for reports after a grant; longer than agents keep a failed read in "
        "quarantine.",
    )
    offer_s: Seconds = setting(
        LIMITS.offer_s, "Wait this long for an engine's answer to an offer before asking the next."
    )
    engine_idle_s: Seconds = setting(
        LIMITS.engine_idle_s,
        "Forget an engine after this time without a session, agents and open handoffs.",
    )
    drain_s: Annotated[float, Field(ge=0, le=600)] = setting(
        10.0, "After SIGTERM wait at most this long for open reads."
    )


class BoundSettings(BaseModel):
    """Limits."""

    max_live: Count = setting(LIMITS.max_live, "Open handoffs at a time.")
    max_ended: Count = setting(LIMITS.max_ended, "Ended handoffs to remember.")
    max_queue: Count = setting(100_000, "Messages that may wait for a stream.")
    max_connections: Annotated[int, Field(ge=16)] | None = setting(
        None,
        "Connections at a time. Each engine and each agent has a connection, and a stranger's "
        "connection may take 80 KiB. Default: 512 with TLS, else as many as open files allow.",
    )
    max_bytes: Count = setting(
        LIMITS.max_bytes, "Bytes of ids, metadata, layouts, plans and waiting messages together."
    )
    tenant_max_live: Count | None = setting(
        None, "Open handoffs of each tenant at a time. Default: --max-live."
    )
    tenant_max_ended: Count | None = setting(
        None, "Ended handoffs to remember of each tenant. Default: --max-ended."
    )
    tenant_max_engines: Count | None = setting(
        None, "Engines of each tenant. Default: as many as all tenants may have together."
    )
    tenant_max_bytes: Count | None = setting(
        None, "Bytes kept for each tenant, counted as for --max-bytes. Default: --max-bytes."
    )
    max_holdings_bytes: Count = setting(
        LIMITS.max_holdings_bytes,
        "Bytes of what engines announce that they hold of prefixes, about 90 for each hash.",
    )
    tenant_max_holdings_bytes: Count | None = setting(
        None,
        "Bytes of announced prefixes of each tenant; the oldest are forgotten. Default: "
        "--max-holdings-bytes.",
    )


class CallerSettings(BaseModel):
    """Callers."""

    tls_cert: Path | None = setting(
        None, "Use TLS, and present this certificate. Needs --client-ca or --tokens.", "FILE"
    )
    tls_key: Path | None = setting(None, "Private key of --tls-cert.", "FILE")
    client_ca: Path | None = setting(
        None,
        "Identify clients by certificates of this authority. Excludes --tokens.",
        "FILE",
    )
    tokens: Path | None = setting(
        None, "Identify clients by the tokens that this file lists (`restow token`).", "FILE"
    )
    insecure: Annotated[bool, or_unset(False)] = setting(
        False,
        "Use plaintext on an address that other machines can reach, and to an etcd on another "
        "machine. Default: refuse both.",
    )


class BrokerSettings(
    ListeningSettings,
    TellingSettings,
    FleetSettings,
    TransferSettings,
    TimeSettings,
    BoundSettings,
    CallerSettings,
    BaseSettings,
):
    """All settings. Raises pydantic's `ValidationError`, and `AddressInvalidError`."""

    model_config = SettingsConfigDict(env_prefix=PREFIX)

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


@dataclass(frozen=True, slots=True)
class SettingHelp:
    """The help and documentation of a setting."""

    name: str
    group: str
    type: Any
    """The type of its value, without constraints."""
    form: str | None
    """The word for its value. None: the type says enough."""
    words: str
    """What it does, and its default."""

    @property
    def option(self) -> str:
        """The option of ``restow serve``."""
        return f"--{self.name.replace('_', '-')}"

    @property
    def variable(self) -> str:
        """The variable in the environment."""
        return f"{PREFIX}{self.name.upper()}"


def all_settings() -> Iterator[SettingHelp]:
    """Return the settings in the order of their groups."""
    for group in BrokerSettings.__bases__:
        if not issubclass(group, BaseModel) or issubclass(group, BaseSettings):
            continue
        for name, field in group.model_fields.items():
            default = field.default.value if isinstance(field.default, Enum) else field.default
            shown = f"{default:g}" if isinstance(default, float) else default
            words = field.description or ""
            if default:
                words += f" Default: {shown}."
            extra = field.json_schema_extra
            form = extra["form"] if isinstance(extra, dict) else None
            title = (group.__doc__ or "").rstrip(".")
            yield SettingHelp(
                name, title, _bare(field.annotation), None if form is None else str(form), words
            )


def _bare(annotation: Any) -> Any:
    """Return a type without None and without constraints."""
    if get_origin(annotation) in (Union, UnionType):
        annotation = next(part for part in get_args(annotation) if part is not type(None))
    return get_args(annotation)[0] if get_origin(annotation) is Annotated else annotation
