"""docs/structure.md names every room, what it imports, and every module in it."""

from __future__ import annotations

import ast
import re
from collections import defaultdict
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
SOURCES = {name: ROOT / name / "restow" / name for name in ("broker", "agents", "kernels")}
PAGE = (ROOT / "docs" / "structure.md").read_text()
ROW = re.compile(r"^\| `([a-z_/]+)/` \|([^|]*)\|([^|]*)\|$", re.MULTILINE)
ROOMS = {room: (imports, words) for room, imports, words in ROW.findall(PAGE)}
MODULE = re.compile(r"`([a-z_0-9]+)`")
EVERYBODYS = {
    "restow.agents.memory.errors",
    *(f"restow.broker.{one.stem}" for one in SOURCES["broker"].glob("*.py")),
}
"""Errors and words."""


def files() -> dict[str, list[Path]]:
    """By room. What has modules in it is one; `engines/` alone only holds rooms."""
    found = defaultdict(list)
    for name, folder in SOURCES.items():
        for path in sorted(folder.rglob("*.py")):
            found[(Path(name) / path.relative_to(folder).parent).as_posix()].append(path)
    return {room: some for room, some in found.items() if names(some)}


def names(paths: list[Path]) -> set[str]:
    return {path.stem for path in paths} - {"__init__"}


FILES = files()


def imported(path: Path) -> set[str]:
    """The rooms that a file imports, at whatever time."""
    found = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            modules = [one.name for one in node.names]
        elif isinstance(node, ast.ImportFrom) and node.module:
            modules = [f"{node.module}.{one.name}" for one in node.names]
        else:
            continue
        for module in modules:
            ours = module.startswith("restow.") and module.rpartition(".")[0] not in EVERYBODYS
            parts = module.split(".")[1:] if ours else []
            rooms = ["/".join(parts[:count]) for count in range(len(parts), 0, -1)]
            found |= set([room for room in rooms if room in FILES][:1])
    return found


def full(name: str) -> str:
    """The room that the page calls ``name`` among imports."""
    if name in FILES:
        return name
    (found,) = [room for room in FILES if room.partition("/")[2] == name]
    return found


def test_every_room_is_on_the_page() -> None:
    assert sorted(ROOMS) == sorted(FILES)
    assert len(ROW.findall(PAGE)) == len(ROOMS)


@pytest.mark.parametrize("room", FILES)
def test_every_module_is_named_once_and_no_other(room: str) -> None:
    assert sorted(MODULE.findall(ROOMS[room][1])) == sorted(names(FILES[room]))


@pytest.mark.parametrize("room", FILES)
def test_a_room_imports_what_the_page_says(room: str) -> None:
    said = {full(name) for name in re.split(r",\s*", ROOMS[room][0].strip()) if name}
    found = set().union(*(imported(path) for path in FILES[room]))
    assert said == found - {room}


LIFE = PAGE.partition("## The life of a handoff")[2]


@pytest.mark.parametrize("path", sorted(set(re.findall(r"`((?:[a-z]+/)+[a-z_]*)`", LIFE))))
def test_what_a_handoff_passes_is_there(path: str) -> None:
    room, _, module = path.rpartition("/")
    assert not module or module in names(FILES[full(room)])
    assert full(room)
