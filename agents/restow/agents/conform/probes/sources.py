"""Take functions and classes out of a package's source files, without importing the files.

The packages import what needs a GPU, or what is not installed; the functions that cut a state do
not. What is compiled is the text as it is installed.
"""

from __future__ import annotations

import ast
import importlib.util
import sys
from pathlib import Path
from types import ModuleType
from typing import Any


class MissingError(Exception):
    """A source lacks a name, so it is another version than the version that was read."""


def folder_of(package: str) -> Path:
    """Return the folder of an installed package, which is not imported."""
    spec = importlib.util.find_spec(package)
    if spec is None or not spec.submodule_search_locations:
        raise ModuleNotFoundError(f"No module named {package!r}")
    return Path(next(iter(spec.submodule_search_locations)))


def take(path: Path, *names: str, known: dict[str, Any] | None = None) -> ModuleType:
    """Return a module with the named definitions, such as ``cut`` or ``Pool.cut``.

    The name of a class takes the whole class; ``Class.method`` takes the function alone, without
    decorators. ``known`` has the global names that they use. Raises `MissingError`.
    """
    tree = ast.parse(path.read_text("utf-8"))
    module = ModuleType(f"{path.name} of {path}")
    sys.modules[module.__name__] = module  # dataclasses look their own module up
    vars(module).update(known or {})
    for name in names:
        _, _, last = name.rpartition(".")
        definition = _definition(tree.body, name.split("."), path)
        if "." in name and isinstance(definition, ast.FunctionDef):
            definition.decorator_list = []
        # Annotations are not evaluated, because they name what is not imported.
        future = ast.ImportFrom("__future__", [ast.alias("annotations")], 0)
        part = ast.Module([future, definition], [])
        exec(compile(ast.fix_missing_locations(part), str(path), "exec"), vars(module))  # noqa: S102
        if not hasattr(module, last):
            raise MissingError(f"{path}: {name} defines nothing")
    return module


def _definition(body: list[ast.stmt], names: list[str], path: Path) -> ast.stmt:
    """Return the statement that defines the last name; earlier names are the classes around it."""
    for statement in body:
        if getattr(statement, "name", None) == names[0]:
            if len(names) == 1:
                return statement
            if isinstance(statement, ast.ClassDef):
                return _definition(statement.body, names[1:], path)
    raise MissingError(f"{path} has no {names[0]}")
