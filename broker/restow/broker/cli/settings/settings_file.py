"""`ConfigOption` lets a command take settings from a file, and checks the names of all settings.

An option goes before the environment, the environment before the file, the file before the default.
"""

from __future__ import annotations

import os
import re
import tomllib
from collections.abc import Iterable, Mapping
from difflib import get_close_matches
from pathlib import Path
from typing import Annotated, Any

import typer

from restow.broker.errors import SettingUnknownError

PREFIX = "RESTOW_"
COMMANDS = ("serve", "agent")
"""Commands whose options the environment may name: brokers and agents may share it."""
OF_CLIENTS = frozenset({"RESTOW_BROKER", "RESTOW_TOKEN_FILE", "RESTOW_TLS_CA", "RESTOW_PROXY"})
OF_SCRIPTS = frozenset(
    PREFIX + name
    for name in (
        *("BASE", "COMMIT", "COMPOSE", "CONTAINERS", "CONTAINERS_DIR", "CONTAINER_LOGS"),
        *("DEVICE_READS", "FUZZ", "HISTORIES", "LAWS", "LMCACHE_PYTHON", "ONE_OF", "PROMETHEUS"),
        *("PROMETHEUS_PORT", "PYTHON"),
        *("ROUTER_PORT", "SGLANG_PACKAGES", "SIMULATED", "TAG", "TEST_PROCESSES", "VENV"),
        *("VLLM_PYTHON", "VLLM_VENV", "VLLM_VERSION", "WHOLE_MODELS"),
    )
)
"""Variables without an option: of `./run`, tests, containers and the settings of agents."""
_SERVICE_LINK = re.compile(
    r"RESTOW_(.+_)?(SERVICE_HOST|SERVICE_PORT(_.+)?|PORT(_\d+_(TCP|UDP|SCTP)(_.+)?)?)"
)
"""Variables that Kubernetes sets in every pod for a Service called restow, or restow-something."""


def _take(context: typer.Context, path: Path | None) -> Path | None:
    """Check the environment's names, and read the file. Raises `SettingUnknownError`."""
    if context.resilient_parsing:
        return path
    commands = getattr(context.find_root().command, "commands", {})
    options = [_names(commands[name], context) for name in COMMANDS if name in commands]
    known = {PREFIX + name.upper() for names in options for name in names} | OF_CLIENTS
    refuse_unknown(os.environ, known)
    if path is not None:
        values = read_settings(path, _names(context.command, context) - {"config"})
        context.default_map = {
            name: value
            for name, value in values.items()
            if PREFIX + name.upper() not in os.environ  # the environment goes first
        }
    return path


ConfigOption = Annotated[
    Path | None,
    typer.Option(
        "--config",
        envvar="RESTOW_CONFIG",
        metavar="FILE",
        is_eager=True,
        callback=_take,
        help="Take from this TOML file what is given neither here nor in the environment: options "
        "by their names, as in `lease_s = 60`.",
    ),
]


def refuse_unknown(environment: Iterable[str], known: set[str]) -> None:
    """Raise `SettingUnknownError` for a variable that begins with `PREFIX` and is not known."""
    for name in sorted(environment):
        if (
            name.startswith(PREFIX)
            and name not in known | OF_SCRIPTS
            and not _SERVICE_LINK.fullmatch(name)
        ):
            raise _unknown(name, known, "in the environment")


def read_settings(path: Path, known: set[str]) -> Mapping[str, Any]:
    """Read known options from a file. Raises `SettingUnknownError` or `typer.BadParameter`."""
    try:
        values = tomllib.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise typer.BadParameter(f"{path} can't be read: {error.strerror}") from None
    except ValueError as error:
        raise typer.BadParameter(f"{path} is no TOML: {error}") from None
    for name, value in values.items():
        if name not in known:
            raise _unknown(name, known, f"in {path}")
        if isinstance(value, dict | list):
            raise typer.BadParameter(f"{path}: {name} has one value, as the option has")
    return values


def _names(command: Any, context: typer.Context) -> set[str]:
    return {
        str(parameter.name) for parameter in command.get_params(context) if parameter.name != "help"
    }


def _unknown(name: str, known: Iterable[str], where: str) -> SettingUnknownError:
    # The prefix would make all names near, because all names begin with it.
    bare = {known_name.removeprefix(PREFIX): known_name for known_name in sorted(known)}
    near = get_close_matches(name.removeprefix(PREFIX), bare, 1)
    words = (
        f"is {bare[near[0]]} meant?"
        if near
        else "`restow serve --help` and `restow agent --help` name all settings"
    )
    return SettingUnknownError(f"{name} {where} is no setting: {words}", name=name)
