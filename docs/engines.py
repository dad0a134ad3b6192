"""Write the table of engines into README.md and docs/vllm.md, from docs/engines.toml.

    python docs/engines.py

The table stands between ``<!-- engines -->`` and ``<!-- /engines -->``. Versions are those that
docker/locked has, since tests install these.
"""

from __future__ import annotations

import re
import tomllib
from pathlib import Path

DOCS = Path(__file__).parent
LOCKED = DOCS.parent / "docker" / "locked"
PAGES = (DOCS.parent / "README.md", DOCS / "vllm.md")
PLACE = re.compile(r"(?<=<!-- engines -->\n).*?(?=<!-- /engines -->)", re.DOTALL)


def locked_version(lock: str, package: str) -> str:
    """Return the version of a package in a lock."""
    text = (LOCKED / f"{lock}.txt").read_text()
    (version,) = re.findall(rf"^{re.escape(package)}==(\S+)", text, re.MULTILINE)
    return str(version)


def table() -> str:
    """Return the table of engines."""
    lines = ["| engine | version | what tests run | what stands in for what |", "|---|---|---|---|"]
    for one in tomllib.loads((DOCS / "engines.toml").read_text())["engine"]:
        version = locked_version(one["lock"], one["package"])
        lines.append(f"| {one['name']} | {version} | {one['ran']} | {one['stood_in']} |")
    return "\n".join(lines) + "\n"


def fresh(page: str) -> str:
    """Return a page with the table as it is to be."""
    return PLACE.sub(lambda _: table(), page)


if __name__ == "__main__":
    for path in PAGES:
        path.write_text(fresh(path.read_text()))
