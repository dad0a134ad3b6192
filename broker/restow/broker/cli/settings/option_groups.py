"""`in_groups` puts the options of ``restow serve`` into groups, and names their variables."""

from __future__ import annotations

import copy
import inspect
from collections.abc import Callable
from typing import Annotated, Any, get_args

from typer.models import OptionInfo

LISTENING, CALLERS, TRAVEL = "Where it is reached", "Who may call", "How states travel"
TIMES, BOUNDS, TOLD = "How long", "How much", "What it tells"
SEVERAL = "One of several brokers"
GROUPS = {
    LISTENING: {"listen", "http_listen", "status_page", "http_hosts"},
    CALLERS: {"tls_cert", "tls_key", "client_ca", "tokens", "insecure"},
    SEVERAL: {"etcd", "advertise", "fleet", "member_lease_s", "expect_brokers"},
    TRAVEL: {
        "strategy",
        "allow_narrowing",
        "costs",
        "digests",
        "digest_every",
        "early_bytes",
        "require_content",
    },
    TOLD: {"log_format", "otlp_endpoint", "trace_ratio"},
}
OF_OTHER_FORM = {"costs": ", as JSON"}


def group_of(name: str) -> str | None:
    """Return the group of an option; None: of all others.

    >>> group_of("listen"), group_of("lease_s"), group_of("tenant_max_live")
    ('Where it is reached', 'How long', 'How much')
    """
    for group, names in GROUPS.items():
        if name in names:
            return group
    if name.startswith(("etcd_", "kubernetes_")):
        return SEVERAL
    if name.endswith("_s"):
        return TIMES
    return BOUNDS if "max_" in name else None


def in_groups(command: Callable[..., None]) -> Callable[..., None]:
    """Give each option of a command its group, and its help the variable that says the same."""
    signature = inspect.signature(command, eval_str=True)
    parameters = [one.replace(annotation=_grouped(one)) for one in signature.parameters.values()]
    command.__signature__ = signature.replace(  # type: ignore[attr-defined]
        parameters=parameters, return_annotation=None
    )
    command.__annotations__ = {one.name: one.annotation for one in parameters}
    return command


def _grouped(parameter: inspect.Parameter) -> Any:
    kind, option = get_args(parameter.annotation)
    made: OptionInfo = copy.copy(option)
    made.rich_help_panel = group_of(parameter.name)
    if made.envvar is None:  # of those that have one the help says so by itself
        form = OF_OTHER_FORM.get(parameter.name, "")
        made.help = f"{made.help} \\[env var: RESTOW_{parameter.name.upper()}{form}]"
    return Annotated[kind, made]
