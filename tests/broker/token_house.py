"""A broker that knows its callers by tokens, here or in a process of its own."""

from __future__ import annotations

import contextlib
import json
import signal
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from broker.certificates import Authority
from restow.broker.client import Credentials
from restow.broker.trust.identity import Role
from restow.broker.trust.tokens import new_token


@dataclass(frozen=True)
class Served:
    """A broker in a process of its own; with TLS it knows its callers by tokens."""

    process: subprocess.Popen[str]
    address: str
    http: str
    known: Credentials

    def most_mib(self) -> float:
        """Return the most memory that the process has had, in MiB."""
        lines = Path(f"/proc/{self.process.pid}/status").read_text().splitlines()
        return next(int(line.split()[1]) for line in lines if line.startswith("VmHWM")) / 1024


def house(folder: Path) -> tuple[dict[str, Any], Credentials]:
    """Return a broker's settings, and credentials of an operator, engine and agent in one."""
    authority = Authority(folder)
    own = authority.issue(server=True)
    secret, entry = new_token([Role.OPERATOR, Role.ENGINE, Role.AGENT], "a", "*")
    tokens, token = folder / "tokens.json", folder / "token"
    tokens.write_text(json.dumps([entry]))
    token.write_text(secret)
    for path in (tokens, token):
        path.chmod(0o600)
    settings = {"tls_cert": own.certificate, "tls_key": own.key, "tokens": tokens}
    return settings, Credentials(authority.path, token_file=token)


@contextlib.contextmanager
def served(folder: Path, soft: int = 0, hard: int = 0, *, tls: bool = True) -> Iterator[Served]:
    """Run a broker; ``soft`` and ``hard``: how many files its process may have open."""
    settings, known = house(folder) if tls else ({}, Credentials())
    command = [sys.executable, "-m", "restow.broker.cli.main", "serve"]
    command += ["--listen", "127.0.0.1:0", "--http-listen", "127.0.0.1:0"]
    for name, path in settings.items():
        command += ["--" + name.replace("_", "-"), str(path)]
    if soft:
        # The shell has the limits set before the broker is there.
        limits = f"ulimit -Sn {soft} && ulimit -Hn {hard or soft} && exec "
        command = ["bash", "-c", limits + '"$@"', "bash", *command]
    process = subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True
    )
    try:
        assert process.stdout is not None
        address, http = (process.stdout.readline().split()[-1] for _ in range(2))
        yield Served(process, address, http.removesuffix("/metrics"), known)
        process.send_signal(signal.SIGTERM)
        assert process.wait(30) == 0
    finally:
        process.kill()
        process.wait()
