"""``restow serve`` runs the broker. Its options are the settings of the broker."""

from __future__ import annotations

import inspect
import ipaddress
from dataclasses import asdict
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from typer.core import TyperCommand

from restow.broker.cli.settings.settings_file import ConfigOption

if TYPE_CHECKING:
    from restow.broker.server.base.settings import BrokerSettings, SettingHelp


class ServeCommand(TyperCommand):
    """Offer an option for each setting. The settings are imported when they are needed.

    Importing them takes longer than importing all other commands.
    """

    @cached_property
    def _whole(self) -> Any:
        from restow.broker.server.base.settings import all_settings

        def command(**values: Any) -> None:
            del values["config"]  # has been read
            run(values)

        options = [_option(setting) for setting in all_settings()]
        config = inspect.signature(serve, eval_str=True).parameters["config"]
        config = config.replace(kind=inspect.Parameter.KEYWORD_ONLY)
        command.__signature__ = inspect.Signature([config, *options])  # type: ignore[attr-defined]
        command.__annotations__ = {
            parameter.name: parameter.annotation for parameter in [config, *options]
        }
        made = typer.Typer(add_completion=False)
        made.command(help=serve.__doc__)(command)
        return typer.main.get_command(made)

    def get_params(self, ctx: Any) -> list[Any]:
        """Return all options."""
        params: list[Any] = self._whole.get_params(ctx)
        return params

    def invoke(self, ctx: Any) -> Any:
        """Run the broker."""
        return self._whole.invoke(ctx)


def serve(config: ConfigOption = None) -> None:
    """Run the broker until SIGTERM or SIGINT; reads under way end first.

    What is not given here is taken from the environment (RESTOW_LISTEN, RESTOW_LEASE_S, ...), and
    then from --config. docs/security.md says which caller may do what with --client-ca and
    --tokens.
    """


def _option(shown: SettingHelp) -> inspect.Parameter:
    """Return the option of a setting. The option has no default, because the setting has it."""
    of_file = shown.type == dict[str, float]
    variable = f"{shown.variable}, as JSON" if of_file else shown.variable
    option = typer.Option(
        shown.option,
        metavar=shown.form,
        help=f"{shown.words} \\[env var: {variable}]",
        rich_help_panel=shown.group,
        exists=of_file,
        dir_okay=not of_file,
    )
    kind = Path if of_file else shown.type
    return inspect.Parameter(
        shown.name,
        inspect.Parameter.KEYWORD_ONLY,
        default=None,
        annotation=Annotated[kind | None, option],
    )


def run(options: dict[str, Any]) -> None:
    """Run the broker with the given options; the rest is from the environment or defaults."""
    import uvloop
    from pydantic import ValidationError

    from restow.broker.cli.common.files import read_object
    from restow.broker.planner import CostModel
    from restow.broker.server.base.settings import BrokerSettings
    from restow.broker.server.serve import serve_until_signalled
    from restow.broker.stderr import logging_to_stderr

    given = {name: value for name, value in options.items() if value is not None}
    if "costs" in given:
        given["costs"] = asdict(CostModel.of(read_object(given["costs"])))
    try:
        settings = BrokerSettings(**given)
    except ValidationError as error:
        words = "; ".join(f"{problem['loc'][0]}: {problem['msg']}" for problem in error.errors())
        raise typer.BadParameter(words) from None
    if not settings.insecure:
        refuse_plaintext(settings)
    with logging_to_stderr(settings.log_format == "json"):
        uvloop.run(serve_until_signalled(settings))


def refuse_plaintext(settings: BrokerSettings) -> None:
    """Raise `typer.BadParameter` if other machines could read or change what is sent."""
    if settings.tls_cert is None and not is_loopback(settings.listen):
        raise typer.BadParameter(
            f"{settings.listen} can be reached from other machines, and the broker speaks "
            f"plaintext without authentication: give --tls-cert and --tls-key, listen on "
            f"127.0.0.1, or add --insecure on a network that you trust",
            param_hint="--listen",
        )
    if settings.etcd is not None and settings.etcd_ca is None:
        for endpoint in settings.etcd_access().endpoints:
            if not is_loopback(endpoint):
                raise typer.BadParameter(
                    f"{endpoint} is another machine, and whoever can change what etcd answers "
                    f"decides which broker leads: give --etcd-ca to speak TLS with etcd, or add "
                    f"--insecure on a network that you trust",
                    param_hint="--etcd",
                )


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
