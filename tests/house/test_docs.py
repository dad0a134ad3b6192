"""The pages: links lead somewhere, and what is written from something else is fresh."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
PAGES = sorted(
    [
        *(ROOT / "docs").glob("*.md"),
        *(ROOT / name for name in ("README.md", "CONTRIBUTING.md", "docker/README.md")),
    ]
)
LINK = re.compile(r"\[[^\]\[]*\]\(([^)\s]+)\)")


def anchors(page: Path) -> set[str]:
    """Return the anchors of the headings, as GitHub and Zensical make them.

    The second heading of a name is numbered.
    """
    found: set[str] = set()
    for heading in re.findall(r"^#+ (.+)$", page.read_text(), re.MULTILINE):
        words = re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-")
        number, anchor = 0, words
        while anchor in found:
            number += 1
            anchor = f"{words}-{number}"
        found.add(anchor)
    return found


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_links_lead_somewhere(page: Path) -> None:
    text = re.sub(r"```.*?```", "", page.read_text(), flags=re.DOTALL)
    for link in LINK.findall(text):
        if link.startswith(("http://", "https://")):
            continue
        file, _, anchor = link.partition("#")
        target = (page.parent / file).resolve() if file else page
        assert target.exists(), f"{page.name} links to {link}"
        if anchor:
            assert anchor in anchors(target), f"{page.name} links to {link}"


def test_the_contract_is_that_of_the_proto_files() -> None:
    command = [sys.executable, str(ROOT / "proto" / "document")]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    fresh = done.stdout == (ROOT / "docs" / "api.md").read_text()
    assert fresh, "docs/api.md is not what the .proto files say: proto/document > docs/api.md"


def test_everything_of_the_contract_has_words() -> None:
    # An empty cell at the end of a row means that nobody described the field.
    page = (ROOT / "docs" / "api.md").read_text()
    assert not re.findall(r"^\| `([A-Z]?[a-z]\w*)` .*\|  \|$", page, re.MULTILINE)
