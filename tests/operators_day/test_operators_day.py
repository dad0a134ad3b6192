"""The day of docs/operators-day.md can be lived again, command by command."""

from __future__ import annotations

import re
import shutil
from pathlib import Path

import pytest

from operators_day.day import live

PAGE = Path(__file__).resolve().parents[2] / "docs" / "operators-day.md"


def typed(page: str) -> list[str]:
    """Its headings, and what was typed."""
    return re.findall(r"^(?:#|\$ ).*$", page, re.MULTILINE)


@pytest.mark.skipif(
    not (shutil.which("openssl") and shutil.which("curl")), reason="needs openssl and curl"
)
def test_the_day_goes_as_the_page_tells(tmp_path: Path) -> None:
    """What each command has to print is said in `day`; times and ids are other ones each day."""
    assert typed(live(tmp_path)) == typed(PAGE.read_text())
