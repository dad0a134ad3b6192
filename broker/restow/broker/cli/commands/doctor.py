"""``restow doctor`` finds what is wrong with this host, the broker, or the way between engines."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated

import typer

from restow.broker.cli.common.completion import complete_pair
from restow.broker.cli.common.connection import TenantConnection, connects
from restow.broker.cli.common.output import FOUND, Output, print_document
from restow.broker.cli.settings.options import EtcdOptions
from restow.broker.printable import shown

if TYPE_CHECKING:
    from collections.abc import Iterator

    from restow.broker.client.admin import AdminClient
    from restow.broker.client.connection.channel import Credentials
    from restow.broker.doctor.local import Finding
    from restow.broker.registry.etcd_access import EtcdAccess

ALL = "all"
COLORS = {"ok": "green", "warn": "yellow", "bad": "red"}


def _named_pairs(given: list[str]) -> list[tuple[str, str]] | None:
    """Return the pairs that --pair names; None for all pairs. Raises `typer.BadParameter`."""
    if ALL in given:
        return None
    pairs = []
    for pair in given:
        source, _, destination = pair.partition(":")
        if not (source and destination):
            raise typer.BadParameter(f"{pair} is not P:D, or all", param_hint="--pair")
        pairs.append((source, destination))
    return pairs


def _broker_findings(
    client: AdminClient, credentials: Credentials, pairs: list[tuple[str, str]] | None
) -> Iterator[Finding]:
    from restow.broker.client.admin import AdminClient
    from restow.broker.doctor.broker_view import all_pairs, look_at_broker, look_at_pairs
    from restow.broker.doctor.fleet_view import look_at_brokers
    from restow.broker.doctor.local import bad
    from restow.broker.errors import RestowError

    try:
        yield from look_at_brokers(
            client, lambda address: AdminClient(address, credentials=credentials)
        )
        yield from look_at_broker(client)
        yield from look_at_pairs(client, all_pairs(client.engines()) if pairs is None else pairs)
    except RestowError as error:
        yield bad(
            "broker",
            error.message,
            f"reason {error.reason}: is the broker started, and is this its address?",
        )


def _etcd_findings(access: EtcdAccess, fleet: str) -> Iterator[Finding]:
    import asyncio

    from restow.broker.doctor.etcd_view import look_at_etcd

    async def look() -> list[Finding]:
        return [finding async for finding in look_at_etcd(access, fleet)]

    yield from asyncio.run(look())


def _show(finding: Finding) -> None:
    typer.secho(f"{finding.verdict:4}", fg=COLORS[finding.verdict], bold=True, nl=False)
    typer.echo(shown(f"  {finding.subject}: {finding.words}"))
    if finding.next_step:
        typer.echo(shown(f"      Next: {finding.next_step}"))


@connects
def doctor(
    here: Annotated[
        bool, typer.Option("--here", help="Look at this host alone, and ask no broker.")
    ] = False,
    pair: Annotated[
        list[str] | None,
        typer.Option(
            metavar="P:D",
            autocompletion=complete_pair,
            help="Have D's agent read from P's agent, and say over which transport. "
            "With all: every pair.",
        ),
    ] = None,
    *,
    connection: TenantConnection,
    etcd: EtcdOptions,
    output: Output,
) -> None:
    """Look for what is wrong: limits, versions, NIXL, certificates, brokers, engines, transports.

    Exits with 4 if anything is bad; warnings do not change the exit status.
    """
    from dataclasses import asdict
    from itertools import chain

    from restow.broker.addresses import checked_targets
    from restow.broker.cli.common.handoff_ids import say_hidden
    from restow.broker.client.connection.channel import broker_address
    from restow.broker.doctor.local import (
        Verdict,
        look_at_host,
        look_at_packages,
        look_at_shown,
        look_at_trust,
    )

    if output.form == "name" and not output.document:
        raise typer.BadParameter("there are no names to print here", param_hint="-o")
    if here and pair:
        raise typer.BadParameter("--here asks no broker, and --pair does: leave one of them out")
    if pair and connection.all_tenants:
        raise typer.BadParameter(
            "the engines of a pair have the same tenant: name it with --tenant"
        )
    pairs, credentials, access = _named_pairs(pair or []), connection.credentials(), etcd.access()
    looked = chain(look_at_host(), look_at_packages(), look_at_trust(credentials))
    all_findings = []

    def take(findings: Iterator[Finding]) -> None:
        for finding in findings:
            all_findings.append(finding)
            if not output.document:
                _show(finding)

    take(looked)
    if access is not None:
        take(_etcd_findings(access, etcd.fleet or "default"))
    if not here and not any(
        finding.subject == "trust" and finding.verdict is Verdict.BAD for finding in all_findings
    ):
        for address in checked_targets(broker_address(connection.broker)):
            take(look_at_shown(address, credentials))
        with connection.client() as client:
            take(_broker_findings(client, credentials, pairs))
            say_hidden(client, output)
    unsound = any(finding.verdict is Verdict.BAD for finding in all_findings)
    if output.document:
        print_document(
            {"findings": [asdict(finding) for finding in all_findings], "sound": not unsound},
            output.document,
        )
    if unsound:
        raise typer.Exit(FOUND)
