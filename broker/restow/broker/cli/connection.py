"""`connects` gives a command the options by which it reaches its broker, as a `Connection`."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from dataclasses import dataclass
from functools import wraps
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, get_type_hints

import typer

if TYPE_CHECKING:
    from restow.broker.client.admin import AdminClient
    from restow.broker.client.credentials import Credentials


def _file(name: str, envvar: str, words: str) -> Any:
    return typer.Option(name, envvar=envvar, metavar="FILE", help=words)


@dataclass(frozen=True)
class Connection:
    """Leads to a broker as a whole. Each field is an option."""

    broker: Annotated[
        str | None,
        typer.Option(
            "--broker",
            envvar="RESTOW_BROKER",
            metavar="HOST:PORT",
            help="The broker. Default: 127.0.0.1:7350.",
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
        from restow.broker.client.credentials import Credentials

        return Credentials.of(self.tls_ca, self.tls_cert, self.tls_key, self.token_file)

    def client(self) -> AdminClient:
        """Return a client, to be used as a context. Raises a `TrustError`."""
        return self._client(None)

    def _client(self, tenant: str | None) -> AdminClient:
        from restow.broker.client.admin import AdminClient

        return AdminClient(self.broker, tenant=tenant, credentials=self.credentials())


@dataclass(frozen=True)
class TenantConnection(Connection):
    """Leads to what a broker holds of one tenant."""

    tenant: Annotated[
        str | None,
        typer.Option(
            "--tenant",
            help="Whose handoffs and engines. Default: the identity's tenant, or else default.",
        ),
    ]

    def client(self) -> AdminClient:
        """Return a client of that tenant. Raises a `TrustError`."""
        return self._client(self.tenant)


def connects(command: Callable[..., None]) -> Callable[..., None]:
    """Give the command the options of its keyword ``connection`` in place of that."""
    signature = inspect.signature(command, eval_str=True)
    kind = signature.parameters["connection"].annotation
    options = get_type_hints(kind, include_extras=True)
    parameters: list[inspect.Parameter] = []
    for own in signature.parameters.values():
        if own.name != "connection":
            parameters.append(own.replace(kind=inspect.Parameter.KEYWORD_ONLY))
            continue
        parameters += [
            own.replace(name=name, default=None, annotation=option)
            for name, option in options.items()
        ]

    @wraps(command)
    def run(**given: object) -> None:
        connection = kind(**{name: given.pop(name) for name in options})
        command(**given, connection=connection)

    del run.__wrapped__  # its signature is another
    run.__signature__ = signature.replace(parameters=parameters)  # type: ignore[attr-defined]
    run.__annotations__ = {one.name: one.annotation for one in parameters}
    return run
