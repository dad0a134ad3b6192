"""Private attributes of vLLM's objects, frames and replaced methods stand in one module."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

FOLDER = Path(__file__).parents[2] / "agents/restow/agents/engines/vllm"
PLACE = FOLDER / "private.py"
OWN = ("self", "cls")


def private_uses(source: str) -> Iterator[str]:
    """Yield what a module uses that no interface gives it.

    That is a private attribute of something other than itself, a frame, or a method that it gives
    to another object.
    """
    tree = ast.parse(source)
    functions = {one.name for one in ast.walk(tree) if isinstance(one, ast.FunctionDef)}
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute):
            own = isinstance(node.value, ast.Name) and node.value.id in OWN
            own = own or ast.unparse(node.value) == "super()"
            if re.match("_[a-z]", node.attr) and not own:
                yield ast.unparse(node)
            if node.attr in ("currentframe", "_getframe", "stack"):
                yield ast.unparse(node)
        if isinstance(node, ast.Assign) and isinstance(node.value, ast.Name | ast.Tuple):
            given = getattr(node.value, "elts", [node.value])
            places = [getattr(one, "elts", [one]) for one in node.targets]
            for place, value in zip(places[0], given, strict=False):
                method = isinstance(value, ast.Name) and value.id in functions
                if method and isinstance(place, ast.Attribute):
                    yield ast.unparse(place)


@pytest.mark.parametrize("path", sorted(FOLDER.rglob("*.py")), ids=str)
def test_private_places_of_vllm_stand_in_one_module(path: Path) -> None:
    found = list(private_uses(path.read_text()))
    if path == PLACE:
        assert {"cached._cache", "inspect.currentframe", "manager._load_adapter"} <= set(found)
        assert {"cached.insert", "core.collective_rpc"} <= set(found)
    else:
        assert found == []
