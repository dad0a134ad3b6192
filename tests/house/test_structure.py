"""docs/structure.md names rooms and files that exist, and leaves no room out."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
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
