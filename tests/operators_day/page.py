"""A page that is what a shell printed, typed in acts: all of it is lived again to make it anew."""

from __future__ import annotations

import os
import socket
import sys
import tempfile
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack, suppress
from dataclasses import dataclass
from pathlib import Path
from random import sample

from operators_day.shell import Shell, UnexpectedOutputError


@dataclass(frozen=True)
class Page:
    """Its beginning, what is typed, and the ports that it shows."""

    title: str
    acts: Sequence[Callable[[Shell], None]]
    shown_ports: Sequence[int]
    programs: Callable[[], Mapping[str, str]] = dict
    """Shell commands that `restow` and `python` stand beside, by the names that the page has."""

    def lived(self, folder: Path) -> str:
        """Type all commands in ``folder``; return the page. Raises `UnexpectedOutputError`."""
        ports = dict(zip(self.shown_ports, free_ports(self.shown_ports), strict=True))
        kept = {name: value for name, value in os.environ.items() if not name.startswith("RESTOW_")}
        environment = {**kept, "COLUMNS": "100", "OMP_NUM_THREADS": "1"}
        with Shell(folder, environment, ports, self.programs()) as shell:
            try:
                for act in self.acts:
                    act(shell)
            except UnexpectedOutputError:
                sys.stderr.write(shell.text)
                for log in sorted(folder.glob("*.log")):
                    sys.stderr.write(f"\n{log.name}\n{log.read_text()[-4000:]}")
                raise
            return self.title + shell.text

    def print(self) -> None:
        """Print the page, lived in a folder that is deleted."""
        with tempfile.TemporaryDirectory() as folder:
            sys.stdout.write(self.lived(Path(folder)))


def free_ports(shown: Sequence[int]) -> list[int]:
    """Return ports that nobody listens on, as many as those shown.

    They have as many digits as those shown, so that tables stay straight.
    """
    found: list[int] = []
    with ExitStack() as stack:
        for port in sample(range(6000, 10_000), 4000):
            one = stack.enter_context(socket.socket())
            with suppress(OSError):
                if port not in shown:
                    one.bind(("127.0.0.1", port))
                    found.append(port)
            if len(found) == len(shown):
                return found
    raise OSError(f"fewer than {len(shown)} ports of four digits are free")
