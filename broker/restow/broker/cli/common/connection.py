"""`connects` gives a command the options of its groups, such as `Connection`."""

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
    """Connect to brokers as a whole. Each field is an option."""

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
        """Return the credentials that the broker is shown. Raises a `TrustError`."""
        from restow.broker.client.connection.channel import Credentials

        return Credentials.of(self.tls_ca, self.tls_cert, self.tls_key, self.token_file)

    def client(self) -> AdminClient:
        """Return a client, to be used as a context. Raises a `TrustError`."""
        return self.client_of(None)

    def client_of(self, tenant: str | None) -> AdminClient:
        """Return a client of a tenant, to be used as a context. Raises a `TrustError`."""
        from restow.broker.client.admin import AdminClient

        return AdminClient(self.broker, tenant=tenant, credentials=self.credentials())


@dataclass(frozen=True)
class TenantConnection(Connection):
    """Connect to what a broker holds of one tenant, or of all tenants."""

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
        typer.Option(
            "--all-tenants", "-A", help="Show all tenants, to an operator of all tenants."
        ),
    ]

    def client(self) -> AdminClient:
        """Return a client of the tenant, or of all tenants. Raises a `TrustError`."""
        if self.tenant == "":  # an unset variable: nothing would be found, silently
            raise typer.BadParameter(
                "an empty --tenant names no tenant: leave it out, or name a tenant"
            )
        if self.all_tenants and self.tenant:
            raise typer.BadParameter("--tenant names one tenant, and -A all: leave one of them out")
        return self.client_of(ALL_TENANTS if self.all_tenants else self.tenant)


def connects(command: Callable[..., None]) -> Callable[..., None]:
    """Replace each parameter of the command that is a group by the options of the group."""
    signature = inspect.signature(command, eval_str=True)
    groups: dict[str, tuple[Any, list[str]]] = {}
    parameters: list[inspect.Parameter] = []
    for parameter in signature.parameters.values():
        kind = parameter.annotation
        if not is_dataclass(kind):
            parameters.append(parameter.replace(kind=inspect.Parameter.KEYWORD_ONLY))
            continue
        options = get_type_hints(kind, include_extras=True)
        groups[parameter.name] = kind, list(options)
        parameters += [
            parameter.replace(name=name, default=_default_of(kind, name, option), annotation=option)
            for name, option in options.items()
        ]

    @wraps(command)
    def run(**arguments: object) -> None:
        made = {
            name: kind(**{option: arguments.pop(option) for option in options})
            for name, (kind, options) in groups.items()
        }
        command(**arguments, **made)

    del run.__wrapped__  # the signature of run differs
    run.__signature__ = signature.replace(parameters=parameters)  # type: ignore[attr-defined]
    run.__annotations__ = {option.name: option.annotation for option in parameters}
    return run


def _default_of(group: object, name: str, option: Any) -> Any:
    """Return the default of a group's field, or else False for a flag and None for others."""
    return getattr(group, name, False if get_args(option)[0] is bool else None)
