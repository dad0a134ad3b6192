"""`connects` gives a command the options of a `Connection` to its broker, and of such groups."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from dataclasses import dataclass, is_dataclass
from functools import wraps
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, get_args, get_type_hints

import typer

from restow.broker.cli.common.completion import complete_tenant

if TYPE_CHECKING:
    from restow.broker.client.admin import AdminClient
    from restow.broker.client.connection.channel import Credentials


ALL_TENANTS = "*"


def _file(name: str, envvar: str, words: str) -> Any:
    return typer.Option(name, envvar=envvar, metavar="FILE", help=words)


@dataclass(frozen=True)
class Connection:
    """Leads to brokers as a whole. Each field is an option."""

    broker: Annotated[
        str | None,
        typer.Option(
            "--broker",
            envvar="RESTOW_BROKER",
            metavar="HOST:PORT,...",
            help="The broker, or several. Default: 127.0.0.1:7350.",
        ),
    ]
    tls_ca: Annotated[
        Path | None,
        _file(
            "--tls-ca",
            "RESTOW_TLS_CA",
            "Speak TLS, and check the broker's certificate against this authority.",
        ),
    ]
    tls_cert: Annotated[Path | None, _file("--tls-cert", "RESTOW_TLS_CERT", "Certificate to show.")]
    tls_key: Annotated[Path | None, _file("--tls-key", "RESTOW_TLS_KEY", "Its private key.")]
    token_file: Annotated[
        Path | None, _file("--token-file", "RESTOW_TOKEN_FILE", "Holds the token to send.")
    ]

    def credentials(self) -> Credentials:
        """Return what is shown to the broker. Raises a `TrustError`."""
        from restow.broker.client.connection.channel import Credentials

        return Credentials.of(self.tls_ca, self.tls_cert, self.tls_key, self.token_file)

    def client(self) -> AdminClient:
        """Return a client, to be used as a context. Raises a `TrustError`."""
        return self._client(None)

    def _client(self, tenant: str | None) -> AdminClient:
        from restow.broker.client.admin import AdminClient

        return AdminClient(self.broker, tenant=tenant, credentials=self.credentials())


@dataclass(frozen=True)
class TenantConnection(Connection):
    """Leads to what a broker holds of one tenant, or of all."""

    tenant: Annotated[
        str | None,
        typer.Option(
            "--tenant",
            autocompletion=complete_tenant,
            help="Whose handoffs and engines. Default: the identity's tenant, or else default.",
        ),
    ]
    all_tenants: Annotated[
        bool,
        typer.Option("--all-tenants", "-A", help="Those of all tenants, to an operator of all."),
    ]

    def client(self) -> AdminClient:
        """Return a client of that tenant, or of all. Raises a `TrustError`."""
        if self.tenant == "":  # of an unset variable: nothing would be found, and no word said
            raise typer.BadParameter("an empty --tenant names none: leave it out, or name one")
        if self.all_tenants and self.tenant:
            raise typer.BadParameter("--tenant is one, and -A all: leave one of them out")
        return self.client_of(ALL_TENANTS if self.all_tenants else self.tenant)

    def client_of(self, tenant: str | None) -> AdminClient:
        """Return a client of a tenant. Raises a `TrustError`."""
        return self._client(tenant)


def connects(command: Callable[..., None]) -> Callable[..., None]:
    """Give the command the options of keywords that are such groups, in place of those."""
    signature = inspect.signature(command, eval_str=True)
    groups: dict[str, tuple[Any, list[str]]] = {}
    parameters: list[inspect.Parameter] = []
    for own in signature.parameters.values():
        kind = own.annotation
        if not is_dataclass(kind):
            parameters.append(own.replace(kind=inspect.Parameter.KEYWORD_ONLY))
            continue
        options = get_type_hints(kind, include_extras=True)
        groups[own.name] = kind, list(options)
        parameters += [
            own.replace(name=name, default=_default_of(kind, name, option), annotation=option)
            for name, option in options.items()
        ]

    @wraps(command)
    def run(**given: object) -> None:
        made = {
            name: kind(**{option: given.pop(option) for option in options})
            for name, (kind, options) in groups.items()
        }
        command(**given, **made)

    del run.__wrapped__  # its signature is another
    run.__signature__ = signature.replace(parameters=parameters)  # type: ignore[attr-defined]
    run.__annotations__ = {one.name: one.annotation for one in parameters}
    return run


def _default_of(group: object, name: str, option: Any) -> Any:
    """Return the default of a group's field; without one a flag is off, and others are None."""
    return getattr(group, name, False if get_args(option)[0] is bool else None)
