"""The days of these pages can be lived again, command by command."""

from __future__ import annotations

import re
import shutil
from pathlib import Path

import pytest

from operators_day import day, three_brokers
from operators_day.shell import Page

DOCS = Path(__file__).resolve().parents[2] / "docs"


def typed(page: str) -> list[str]:
    """Return the page's headings, and what was typed."""
    return re.findall(r"^(?:#|\$ ).*$", page, re.MULTILINE)


@pytest.mark.sampled
@pytest.mark.skipif(
    not (shutil.which("openssl") and shutil.which("curl")), reason="needs openssl and curl"
)
@pytest.mark.parametrize(
    ("name", "page"),
    [("several-brokers.md", three_brokers.PAGE), ("operators-day.md", day.PAGE)],
    ids=["three brokers", "a day"],
)
def test_the_day_goes_as_the_page_tells(name: str, page: Page, tmp_path: Path) -> None:
    # The day itself says what each command must print; times and ids differ each day.
    assert typed(page.lived(tmp_path, quick=True)) == typed((DOCS / name).read_text())
