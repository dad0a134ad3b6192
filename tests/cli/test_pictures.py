"""The pictures of the documentation are what `restow plan --svg` draws."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

DOCS = Path(__file__).resolve().parents[2] / "docs"


def test_pictures_of_the_pages_are_true(tmp_path: Path) -> None:
    command = [sys.executable, str(DOCS / "pictures" / "make.py"), str(tmp_path)]
    subprocess.run(command, check=True)
    fresh = {path.name: path.read_bytes() for path in tmp_path.glob("*.svg")}
    kept = {path.name: path.read_bytes() for path in (DOCS / "pictures").glob("*.svg")}
    assert fresh.keys() == kept.keys()
    stale = [name for name, content in fresh.items() if kept[name] != content]
    assert not stale, f"run docs/pictures/make.py and look at them: {stale} have changed"


def test_pages_show_pictures_that_are_there() -> None:
    shown = {
        (page.parent / path).resolve()
        for page in (DOCS / "layouts.md", DOCS.parent / "README.md")
        for path in re.findall(r"\]\(([\w/.-]+\.svg)\)", page.read_text())
    }
    assert shown == {path.resolve() for path in (DOCS / "pictures").glob("*.svg")}
