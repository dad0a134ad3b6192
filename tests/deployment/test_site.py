"""The pages as a site: it builds, and every page is in its table of contents."""

from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path

import yaml

ROOT = Path(__file__).resolve().parents[2]
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
