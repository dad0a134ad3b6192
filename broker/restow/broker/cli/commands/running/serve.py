"""``restow serve`` runs the broker."""

from __future__ import annotations

import ipaddress
from dataclasses import asdict
from pathlib import Path
from typing import Annotated, Any

import typer

from restow.broker.cli.settings.option_groups import in_groups
from restow.broker.cli.settings.options import CostsOption, DigestModeName, LogFormatOption
from restow.broker.cli.settings.settings_file import ConfigOption
from restow.broker.strategy import Strategy


@in_groups
def serve(
    listen: Annotated[
        str | None,
        typer.Option(metavar="HOST:PORT", help="Where to listen. Default: 127.0.0.1:7350."),
    ] = None,
    http_listen: Annotated[
        str | None,
        typer.Option(
            metavar="HOST:PORT",
            help="Show Prometheus metrics and probes there (/metrics, /healthz, /readyz), to "
            "whoever asks. Default: nowhere.",
        ),
    ] = None,
    status_page: Annotated[
        bool | None,
        typer.Option(
            "--status-page",
            help="With --http-listen: also a page for people (/), which names engines and "
            "handoffs of all tenants to whoever asks. Default: none.",
        ),
    ] = None,
    http_hosts: Annotated[
        str | None,
        typer.Option(
            metavar="NAME,...",
            help="With --status-page: names under which browsers may ask for it. Default: that of "
            "--http-listen; addresses and localhost always.",
        ),
    ] = None,
    otlp_endpoint: Annotated[
        str | None,
        typer.Option(
            metavar="URL",
            help="Send a trace of each handoff to this OpenTelemetry collector (OTLP over gRPC, "
            "http://HOST:4317). Default: none are made.",
        ),
    ] = None,
    trace_ratio: Annotated[
        float | None,
        typer.Option(
            help="Trace so many of the handoffs whose request has no trace of its own, 0 to 1. "
            "Default: 1."
        ),
    ] = None,
    etcd: Annotated[
        str | None,
        typer.Option(
            metavar="HOST:PORT,...",
            help="Be one of several brokers, of which this etcd says who leads. Default: alone.",
        ),
    ] = None,
    advertise: Annotated[
        str | None,
        typer.Option(
            metavar="HOST:PORT",
            help="Of several: where engines and agents reach this broker. Default: --listen.",
        ),
    ] = None,
    fleet: Annotated[
        str | None,
        typer.Option(
            metavar="NAME",
            help="Of several: the name of the fleet; other fleets may use the same etcd. "
            "Default: default.",
        ),
    ] = None,
    member_lease_s: Annotated[
        float | None,
        typer.Option(
            help="Of several: how long a leader that says nothing is waited for, before another "
            "broker leads. Default: 2.",
        ),
    ] = None,
    expect_brokers: Annotated[
        int | None,
        typer.Option(
            help="Of several: how many there should be; metrics, `restow brokers` and doctor say "
            "when there are fewer. Default: not known.",
        ),
    ] = None,
    kubernetes_leases: Annotated[
        str | None,
        typer.Option(
            metavar="NAMESPACE",
            help="Be one of several brokers by Lease objects of the Kubernetes whose pod this is, "
            "in place of --etcd. Default: alone.",
        ),
    ] = None,
    kubernetes_account: Annotated[
        Path | None,
        typer.Option(
            "--kubernetes-account",
            metavar="FOLDER",
            help="With --kubernetes-leases: token and ca.crt of a service account. Default: where "
            "a pod has its own.",
        ),
    ] = None,
    etcd_ca: Annotated[
        Path | None,
        typer.Option(
            "--etcd-ca", metavar="FILE", help="Speak TLS with etcd, and check it by this authority."
        ),
    ] = None,
    etcd_cert: Annotated[
        Path | None,
        typer.Option("--etcd-cert", metavar="FILE", help="Show etcd this certificate."),
    ] = None,
    etcd_key: Annotated[
        Path | None, typer.Option("--etcd-key", metavar="FILE", help="Its private key.")
    ] = None,
    etcd_user: Annotated[
        str | None,
        typer.Option(metavar="NAME", help="Be this user of etcd. Default: nobody in particular."),
    ] = None,
    etcd_password_file: Annotated[
        Path | None,
        typer.Option("--etcd-password-file", metavar="FILE", help="That user's password."),
    ] = None,
    strategy: Annotated[
        Strategy | None,
        typer.Option(help="How states travel. Default: auto."),
    ] = None,
    allow_narrowing: Annotated[
        bool | None,
        typer.Option(
            "--allow-narrowing",
            help="Round states to D's type where it is narrower than P's, for example float32 to "
            "bfloat16. Default: such pairs are refused.",
        ),
    ] = None,
    costs: CostsOption = None,
    digests: Annotated[
        DigestModeName | None,
        typer.Option(
            help="Have P hash what it holds and D compare what it read: of no handoff, of one in "
            "so many, or of all. Default: off."
        ),
    ] = None,
    digest_every: Annotated[
        int | None,
        typer.Option(help="With --digests sampled: one handoff in so many. Default: 64."),
    ] = None,
    lease_s: Annotated[
        float | None, typer.Option(help="Lease of publications that name none. Default: 30.")
    ] = None,
    timeout_s: Annotated[
        float | None, typer.Option(help="Patience of demands that name none. Default: 30.")
    ] = None,
    grant_s: Annotated[
        float | None, typer.Option(help="Longest time that a read may take. Default: 10.")
    ] = None,
    settle_grace_s: Annotated[
        float | None,
        typer.Option(
            help="How long reports are awaited after a grant: longer than agents keep a failed "
            "read in quarantine. Default: 7."
        ),
    ] = None,
    offer_s: Annotated[
        float | None,
        typer.Option(
            help="How long an engine has to answer an offer, before it goes to the next. "
            "Default: 2."
        ),
    ] = None,
    early_bytes: Annotated[
        int | None,
        typer.Option(
            help="Leading tokens are read while P computes on, as soon as they make up so many "
            "bytes. Default: 4194304."
        ),
    ] = None,
    require_content: Annotated[
        bool | None,
        typer.Option(
            "--require-content",
            help="Refuse publications and demands that do not name the state's content, so that "
            "each D gets the state of its own prompt. Default: what is not named is not compared.",
        ),
    ] = None,
    engine_idle_s: Annotated[
        float | None,
        typer.Option(
            help="How long an engine is remembered that has no session, no agents and no handoff "
            "under way. Default: 30."
        ),
    ] = None,
    drain_s: Annotated[
        float | None,
        typer.Option(help="How long SIGTERM waits for reads under way. Default: 10."),
    ] = None,
    max_live: Annotated[
        int | None, typer.Option(help="Handoffs under way at once. Default: 100000.")
    ] = None,
    max_ended: Annotated[
        int | None, typer.Option(help="Ended handoffs remembered. Default: 10000.")
    ] = None,
    max_queue: Annotated[
        int | None, typer.Option(help="Messages that may wait for one stream. Default: 100000.")
    ] = None,
    max_connections: Annotated[
        int | None,
        typer.Option(
            help="Connections at once: each engine and agent has one, and strangers may take "
            "80 KiB with each. Default: 512 with TLS, else as many as there may be files."
        ),
    ] = None,
    max_bytes: Annotated[
        int | None,
        typer.Option(
            help="Bytes of ids, metadata, layouts, plans and waiting messages, together. "
            "Default: 4294967296."
        ),
    ] = None,
    tenant_max_live: Annotated[
        int | None,
        typer.Option(help="Handoffs under way at once of one tenant. Default: those of all."),
    ] = None,
    tenant_max_ended: Annotated[
        int | None,
        typer.Option(help="Ended handoffs remembered of one tenant. Default: those of all."),
    ] = None,
    tenant_max_engines: Annotated[
        int | None, typer.Option(help="Engines of one tenant. Default: those of all.")
    ] = None,
    tenant_max_bytes: Annotated[
        int | None,
        typer.Option(help="Bytes kept for one tenant, as of --max-bytes. Default: those of all."),
    ] = None,
    max_holdings_bytes: Annotated[
        int | None,
        typer.Option(
            help="Bytes of what engines say that they hold of prefixes, about 90 for each hash. "
            "Default: 1073741824."
        ),
    ] = None,
    tenant_max_holdings_bytes: Annotated[
        int | None,
        typer.Option(help="Those of one tenant: it forgets its oldest. Default: those of all."),
    ] = None,
    tls_cert: Annotated[
        Path | None,
        typer.Option(
            "--tls-cert",
            metavar="FILE",
            help="Speak TLS, and show this certificate. Needs --client-ca or --tokens.",
        ),
    ] = None,
    tls_key: Annotated[
        Path | None, typer.Option("--tls-key", metavar="FILE", help="Its private key.")
    ] = None,
    client_ca: Annotated[
        Path | None,
        typer.Option(
            "--client-ca",
            metavar="FILE",
            help="Know clients by certificates of this authority. Excludes --tokens.",
        ),
    ] = None,
    tokens: Annotated[
        Path | None,
        typer.Option(
            "--tokens",
            metavar="FILE",
            help="Know clients by tokens that this file lists (`restow token`).",
        ),
    ] = None,
    insecure: Annotated[
        bool,
        typer.Option(
            "--insecure",
            envvar="RESTOW_INSECURE",
            help="Speak plaintext on an address that others can reach, and with an etcd of another "
            "machine.",
        ),
    ] = False,
    log_format: LogFormatOption = "console",
    config: ConfigOption = None,
) -> None:
    """Run the broker until SIGTERM or SIGINT; reads under way end first.

    What is not given is taken from the environment (RESTOW_LISTEN, RESTOW_LEASE_S, ...), and then
    from --config. Who may say what with --client-ca and --tokens: docs/security.md.
    """
    given: dict[str, Any] = {name: one for name, one in locals().items() if one is not None}
    # All others are settings.
    given = {k: v for k, v in given.items() if k not in ("insecure", "log_format", "config")}

    import uvloop
    from pydantic import ValidationError

    from restow.broker.cli.files import read_object
    from restow.broker.planner import CostModel
    from restow.broker.server.base.settings import BrokerSettings
    from restow.broker.server.serve import serve_until_signalled
    from restow.broker.stderr import logging_to_stderr

    if costs is not None:
        given["costs"] = asdict(CostModel.of(read_object(costs)))
    try:
        settings = BrokerSettings(**given)
    except ValidationError as error:
        words = "; ".join(f"{one['loc'][0]}: {one['msg']}" for one in error.errors())
        raise typer.BadParameter(words) from None
    if settings.tls_cert is None and not insecure and not is_loopback(settings.listen):
        raise typer.BadParameter(
            f"{settings.listen} can be reached from other machines, and the broker speaks "
            f"plaintext without authentication: give --tls-cert and --tls-key, listen on "
            f"127.0.0.1, or add --insecure on a network that you trust",
            param_hint="--listen",
        )
    if settings.etcd is not None and settings.etcd_ca is None and not insecure:
        for endpoint in settings.etcd_access().endpoints:
            if not is_loopback(endpoint):
                raise typer.BadParameter(
                    f"{endpoint} is another machine, and whoever can change what etcd answers "
                    f"decides which broker leads: give --etcd-ca to speak TLS with etcd, or add "
                    f"--insecure on a network that you trust",
                    param_hint="--etcd",
                )
    with logging_to_stderr(log_format == "json"):
        uvloop.run(serve_until_signalled(settings))


def is_loopback(listen: str) -> bool:
    """Return whether only this machine can reach an address.

    >>> is_loopback("127.0.0.1:7350"), is_loopback("[::1]:0"), is_loopback("0.0.0.0:7350")
    (True, True, False)
    """
    host = listen.rpartition(":")[0].strip("[]")
    if listen.startswith("unix:") or host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False
