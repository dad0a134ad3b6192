"""`EtcdOptions` are the options by which commands reach the etcd of brokers."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

if TYPE_CHECKING:
    from restow.broker.registry.etcd_access import EtcdAccess


def _option(name: str, metavar: str, words: str) -> Any:
    envvar = f"RESTOW_{name.removeprefix('--').replace('-', '_').upper()}"
    return typer.Option(name, envvar=envvar, metavar=metavar, help=words)


@dataclass(frozen=True)
class EtcdOptions:
    """Connect to an etcd. Each field is an option, with the name that `restow serve` gives it."""

    etcd: Annotated[
        str | None,
        _option("--etcd", "HOST:PORT,...", "Look at this etcd too, which says which broker leads."),
    ]
    fleet: Annotated[
        str | None, _option("--fleet", "NAME", "The brokers' --fleet. Default: default.")
    ]
    etcd_ca: Annotated[Path | None, _option("--etcd-ca", "FILE", "The same as for `restow serve`.")]
    etcd_cert: Annotated[
        Path | None, _option("--etcd-cert", "FILE", "The same as for `restow serve`.")
    ]
    etcd_key: Annotated[
        Path | None, _option("--etcd-key", "FILE", "The same as for `restow serve`.")
    ]
    etcd_user: Annotated[
        str | None, _option("--etcd-user", "NAME", "The same as for `restow serve`.")
    ]
    etcd_password_file: Annotated[
        Path | None, _option("--etcd-password-file", "FILE", "The same as for `restow serve`.")
    ]

    def access(self) -> EtcdAccess | None:
        """Return how etcd is reached; None without --etcd. Raises an `EtcdSettingsError`."""
        from restow.broker.registry.etcd_access import EtcdAccess

        if not self.etcd:
            return None
        return EtcdAccess.parse(
            self.etcd,
            ca=self.etcd_ca,
            cert=self.etcd_cert,
            key=self.etcd_key,
            user=self.etcd_user,
            password_file=self.etcd_password_file,
        )
