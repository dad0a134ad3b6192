"""What is installed here, and whether NIXL starts with one UCX: the one that it brings."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Iterator
from importlib.metadata import PackageNotFoundError, version
from importlib.util import find_spec

from restow.broker.doctor.finding import Finding, bad, ok, warn
from restow.broker.versions import own_version

ALWAYS = ("restow", "grpcio", "protobuf", "numpy")
OF_AGENTS = ("nixl", "torch", "triton")
START_S = 60.0


def look_at_packages() -> Iterator[Finding]:
    """Versions; and NIXL, where agents are installed."""
    found = {name: _version(name) for name in (*ALWAYS, *OF_AGENTS)}
    found["restow"] = own_version()
    yield ok("packages", ", ".join(f"{name} {one}" for name, one in found.items() if one))
    if any(found[name] for name in OF_AGENTS) and find_spec("restow.agents") is not None:
        yield start_nixl()
    else:
        yield ok("NIXL", "not installed here: there can be a broker here, and no agent")


def start_nixl() -> Finding:
    """Start an agent of NIXL's in another process, and see what that has loaded."""
    try:
        done = subprocess.run(
            [sys.executable, "-m", "restow.agents.reading.own_ucx"],
            capture_output=True,
            text=True,
            timeout=START_S,
            check=False,
        )
    except subprocess.TimeoutExpired:
        return bad("NIXL", f"did not start in {START_S:g} s", "is this machine overloaded?")
    if done.returncode:
        lines = (done.stderr or done.stdout).strip().splitlines() or [f"status {done.returncode}"]
        step = "install it anew, from its checkout: `pip install --force-reinstall '.[agent]'`"
        return bad("NIXL", f"does not start: {lines[-1][:1000]}", step)
    return judge_ucx(json.loads(done.stdout.splitlines()[-1]))


def judge_ucx(libraries: list[str]) -> Finding:
    """Given the paths of all libucp that the process has loaded."""
    if not libraries:
        return bad("NIXL", "started without UCX", "install nixl from its wheel")
    if len(libraries) > 1:
        return bad(
            "NIXL",
            f"{len(libraries)} UCX in one process: {', '.join(libraries)}",
            "keep other UCX out of LD_LIBRARY_PATH and LD_PRELOAD: two of them break each other",
        )
    (path,) = libraries
    if "nixl" not in path:
        return warn(
            "NIXL",
            f"started, with a UCX that is not its own: {path}",
            "what was measured here was measured with the UCX that NIXL's wheel brings",
        )
    return ok("NIXL", f"starts, with its own UCX alone ({path.rpartition('/')[2]})")


def _version(name: str) -> str | None:
    try:
        return version(name)
    except PackageNotFoundError:
        return None
