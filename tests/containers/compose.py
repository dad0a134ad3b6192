"""The services of docker/compose.yaml as containers, driven by the `docker` command."""

from __future__ import annotations

import json
import shlex
import subprocess
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar

ROOT = Path(__file__).resolve().parents[2]
FILE = ROOT / "docker" / "compose.yaml"
SERVICES = ("broker", "p0", "p1", "d0", "d1", "router")
ENGINES = SERVICES[1:5]
ASK = """
import json, sys, urllib.error, urllib.request as r
base, seconds, body = sys.argv[1], float(sys.argv[2]), sys.argv[3].encode()
ask = r.Request(base + "/v1/completions", body, {"Content-Type": "application/json"})
try:
    with r.urlopen(ask, timeout=seconds) as answer:
        print(json.dumps([answer.status, json.load(answer)]))
except urllib.error.HTTPError as error:
    print(json.dumps([error.code, json.loads(error.read() or b"null")]))
except OSError as error:
    print(json.dumps([0, {"error": {"message": str(error), "type": type(error).__name__}}]))
"""

T = TypeVar("T")
Answer = tuple[int, dict[str, Any]]


@dataclass(frozen=True)
class Compose:
    """One project of them. ``command`` is `docker compose` or `docker-compose`, in words."""

    command: tuple[str, ...]
    project: str
    _ids: dict[str, str] = field(default_factory=dict)

    @classmethod
    def of(cls, words: str, project: str) -> Compose:
        return cls(tuple(shlex.split(words)), project)

    def do(self, *words: str, check: bool = True) -> str:
        """Run a compose command."""
        return docker(*self.command[1:], *self._where(), *words, first=self.command[0], check=check)

    def _where(self) -> tuple[str, ...]:
        return ("-p", self.project, "-f", str(FILE))

    def id_of(self, service: str) -> str:
        """Return the id of a service's container, also when the container does not run."""
        if service not in self._ids:
            self._ids[service] = self.do("ps", "-q", service).split()[0]
        return self._ids[service]

    @property
    def healthy(self) -> bool:
        """Return whether every container reports that it is healthy."""
        ids = [self.id_of(service) for service in SERVICES]
        found = docker("inspect", "-f", "{{.State.Health.Status}}", *ids).split()
        return found == ["healthy"] * len(ids)

    def restow(self, *words: str) -> str:
        """Run `restow` in the broker's container, as an operator types it."""
        return docker("exec", self.id_of("broker"), "restow", *words)

    def ask(
        self, service: str, seconds: float = 60.0, inside: str = "router", **body: Any
    ) -> Answer:
        """Ask a service for a completion from the container of ``inside``; status 0: no answer."""
        port = 8000 if service == "router" else 8100
        base = f"http://{service}:{port}" if service != "router" else f"http://127.0.0.1:{port}"
        words = ("python", "-c", ASK, base, f"{seconds:g}", json.dumps(body))
        status, answer = json.loads(docker("exec", self.id_of(inside), *words))
        return status, answer

    def logs(self, folder: Path) -> None:
        """Keep what all containers wrote."""
        folder.mkdir(parents=True, exist_ok=True)
        for service in SERVICES:
            text = self.do("logs", "--no-color", "--timestamps", service, check=False)
            (folder / f"{service}.log").write_text(text)


def docker(*words: str, first: str = "docker", check: bool = True) -> str:
    """Run a command, and return its output. Raises `RuntimeError` with the end of its stderr."""
    done = subprocess.run([first, *words], capture_output=True, text=True, check=False, timeout=300)
    if check and done.returncode:
        raise RuntimeError(f"{first} {' '.join(words)[:200]}: {done.stderr[-2000:]}")
    return done.stdout + ("" if check else done.stderr)


def until(true: Callable[[], T], seconds: float, what: str) -> T:
    """Return the first true value of ``true``. Raises `AssertionError` after ``seconds``."""
    ends_s = time.monotonic() + seconds
    while True:
        found = true()
        if found:
            return found
        assert time.monotonic() < ends_s, f"not within {seconds:g} s: {what}"
        time.sleep(0.5)
