"""Peers of which only sources are read: their wheels, by version and hash, in a folder of its own.

Nothing that they require is installed: most of it needs a GPU, and none of it is imported.
"""

from __future__ import annotations

import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

FOLDER = Path(__file__).parents[2] / ".peers"


class AbsentError(Exception):
    """A peer that can't be had here, and why."""


@dataclass(frozen=True, slots=True)
class Wheel:
    """One wheel, for the platform and Python that it is built for, whichever are here."""

    name: str
    version: str
    sha256: str
    platform: str
    python: str = "3.12"

    def fetched(self) -> Path:
        """The wheel's file, fetched the first time. Raises `AbsentError`."""
        folder = FOLDER / self.sha256
        found = list(folder.glob("*.whl"))
        if found:
            return found[0]
        folder.mkdir(parents=True, exist_ok=True)
        lock = folder / "lock.txt"
        lock.write_text(f"{self.name}=={self.version} --hash=sha256:{self.sha256}\n")
        command = [
            *(sys.executable, "-m", "pip", "download", "-q", "--no-deps", "--require-hashes"),
            *("--only-binary", ":all:", "--platform", self.platform),
            *("--python-version", self.python, "--dest", str(folder), "-r", str(lock)),
        ]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        found = list(folder.glob("*.whl"))
        if done.returncode or not found:
            errors = [line for line in done.stderr.splitlines() if line.startswith("ERROR")]
            raise AbsentError(errors[-1] if errors else f"pip ends with {done.returncode}")
        return found[0]


SGLANG = Wheel(
    "sglang",
    "0.5.23",
    "8d257a319395b322bb1be327d05e5528859358153c8563b04c0a4a3c8af164b6",
    "manylinux_2_34_x86_64",
)
LMCACHE = Wheel(
    "lmcache",
    "0.5.6",
    "c7892944ca91ec965c3448b2e30e0869f86a2499bdd01b70eb988e3436d71e4e",
    "manylinux_2_28_x86_64",
)
