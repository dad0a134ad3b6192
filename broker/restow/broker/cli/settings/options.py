"""Hold the options that several commands share, except options of the connection to brokers."""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer

if TYPE_CHECKING:
    from restow.broker.registry.etcd_access import EtcdAccess

JsonFile = Annotated[Path, typer.Argument(exists=True, dir_okay=False, help="A JSON file.")]
ConfigPath = Annotated[
    Path,
    typer.Argument(exists=True, help="A model's config.json, or the folder of its checkpoint."),
]
JsonOption = Annotated[bool, typer.Option("--json", help="Print JSON, errors too.")]
CostsOption = Annotated[
    Path | None,
    typer.Option(
        "--costs",
        exists=True,
        dir_okay=False,
        help="Costs to choose ways by: a JSON object such as `costs` in `restow costs --json`.",
    ),
]
LogFormatOption = Annotated[
    Literal["console", "json"],
    typer.Option("--log-format", envvar="RESTOW_LOG_FORMAT", help="Form of the log on stderr."),
]

_UNITS = {
    **{"": 1, "B": 1},
    **{f"{letter}iB": 1024**power for power, letter in enumerate("KMGT", 1)},
    **{f"{letter}B": 1000**power for power, letter in enumerate("kMGT", 1)},
}
_SIZE = re.compile(r"(\d+(?:\.\d+)?) ?([A-Za-z]*)")


def parse_size(text: str) -> int:
    """Return the bytes of a size with its unit.

    Raises `typer.BadParameter` if the text is no size.

    >>> parse_size("8GiB"), parse_size("1.5 kB"), parse_size("4096")
    (8589934592, 1500, 4096)
    """
    match = _SIZE.fullmatch(text.strip())
    if match is None or match[2] not in _UNITS:
        raise typer.BadParameter(f"{text!r} is no size: write it like 8GiB or 500MB")
    size = int(float(match[1]) * _UNITS[match[2]])
    if size < 1:
        raise typer.BadParameter(f"{text!r} is less than a byte")
    return size


def _of_etcd(name: str, metavar: str, words: str = "The same as for `restow serve`.") -> Any:
    envvar = f"RESTOW_{name.removeprefix('--').replace('-', '_').upper()}"
    return typer.Option(name, envvar=envvar, metavar=metavar, help=words)


@dataclass(frozen=True)
class EtcdOptions:
    """Connect to an etcd. Each field is an option, with the name that `restow serve` gives it."""

    etcd: Annotated[
        str | None,
        _of_etcd(
            "--etcd", "HOST:PORT,...", "Look at this etcd too, which says which broker leads."
        ),
    ]
    fleet: Annotated[
        str | None, _of_etcd("--fleet", "NAME", "The brokers' --fleet. Default: default.")
    ]
    etcd_ca: Annotated[Path | None, _of_etcd("--etcd-ca", "FILE")]
    etcd_cert: Annotated[Path | None, _of_etcd("--etcd-cert", "FILE")]
    etcd_key: Annotated[Path | None, _of_etcd("--etcd-key", "FILE")]
    etcd_user: Annotated[str | None, _of_etcd("--etcd-user", "NAME")]
    etcd_password_file: Annotated[Path | None, _of_etcd("--etcd-password-file", "FILE")]

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
