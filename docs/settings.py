"""Write docs/settings.md: the settings of `restow serve`, in the words of its help.

python docs/settings.py > docs/settings.md
"""

from __future__ import annotations

from enum import Enum
from itertools import groupby
from pathlib import Path
from typing import Any, get_args

from restow.broker.server.base.settings import SettingHelp, all_settings

HEAD = """# Settings of the broker

Written by `python docs/settings.py`. Look here for an option of `restow serve`. A setting that is
called `lease_s` is the option `--lease-s`, the variable `RESTOW_LEASE_S` in the environment, and
the key `lease_s` of the TOML file that `--config` (or `RESTOW_CONFIG`) names. An option goes before
the environment, and the environment before the file. Names that end in `_s` are seconds."""
TYPES = {bool: "true or false", int: "whole number", float: "number", str: "text", Path: "FILE"}


def form_of(shown: SettingHelp) -> str:
    """Return what a value looks like."""
    if shown.form is not None:
        return f"`{shown.form}`"
    kind: Any = shown.type
    if isinstance(kind, type) and issubclass(kind, Enum):
        return ", ".join(f"`{one.value}`" for one in kind)
    return TYPES.get(kind) or ", ".join(f"`{one}`" for one in get_args(kind))


def page() -> str:
    """Return the page."""
    lines = [HEAD]
    for group, settings in groupby(all_settings(), lambda one: one.group):
        lines += ["", f"## {group}", "", "| option | value | |", "|---|---|---|"]
        for one in settings:
            words = one.words.replace("|", "\\|")
            lines.append(f"| `{one.option}` | {form_of(one)} | {words} |")
    lines += [
        "",
        "In the environment `RESTOW_COSTS` has the JSON object itself in place of a file.",
    ]
    return "\n".join(lines)


if __name__ == "__main__":
    print(page())
