"""The pages: links lead somewhere, what is made of something else is fresh, and the site builds."""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

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


PAGE = (ROOT / "docs" / "structure.md").read_text()
SOURCES = [ROOT / name / "restow" / name for name in ("broker", "agents", "kernels", "demo")]
NAMED = sorted(set(re.findall(r"`((?:[a-z_]+/)+[a-z_]*)`", PAGE)))


@pytest.mark.parametrize("path", NAMED)
def test_what_the_page_names_is_there(path: str) -> None:
    places = [ROOT, *SOURCES]
    assert any((place / path).is_dir() or (place / f"{path}.py").is_file() for place in places)


def test_every_room_is_on_the_page() -> None:
    rooms = {
        f"{path.parent.relative_to(source).as_posix()}/"
        for source in SOURCES
        for path in source.rglob("*.py")
        if path.stem != "__init__" and path.parent != source
    }
    assert not [room for room in rooms if not room.startswith(tuple(NAMED))]


ZENSICAL = Path(sys.executable).with_name("zensical")


def listed(contents: object) -> set[str]:
    """Return all pages of a table of contents."""
    if isinstance(contents, str):
        return {contents}
    inner = contents.values() if isinstance(contents, dict) else contents
    assert not isinstance(inner, (int, type(None)))
    return set().union(*(listed(one) for one in inner))  # type: ignore[attr-defined]


def test_every_page_is_listed() -> None:
    contents = yaml.safe_load((ROOT / "mkdocs.yml").read_text())["nav"]
    assert listed(contents) == {page.name for page in (ROOT / "docs").glob("*.md")}


def test_the_site_builds(tmp_path: Path) -> None:
    shutil.copytree(ROOT / "docs", tmp_path / "docs")
    shutil.copy(ROOT / "mkdocs.yml", tmp_path)
    done = subprocess.run(
        [ZENSICAL, "build", "--strict", "-f", "mkdocs.yml"],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert "Who does what" in (tmp_path / "site" / "concepts" / "index.html").read_text()
