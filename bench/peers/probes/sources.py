"""Functions and classes out of a peer's source files, without importing what stands beside them.

A peer's packages import what needs a GPU, or what is not installed; the functions that cut a state
do not. What is compiled is the peer's text as it is installed.
"""

from __future__ import annotations

import ast
import sys
import zipfile
from pathlib import Path
from types import ModuleType
from typing import Any

Source = Path | zipfile.Path
"""A file, or one in a wheel."""


class MissingError(Exception):
    """A peer's source has no such name: it is another version than the one that was read."""


def take(path: Source, *names: str, known: dict[str, Any] | None = None) -> ModuleType:
    """A module with the definitions that are named, such as ``cut`` or ``Pool.cut``.

    Of a class's own name the whole class comes, of ``Class.method`` the function alone, without
    decorators. ``known`` is what they find beside them under a global name. Raises `MissingError`.
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
        # Annotations are not evaluated: they name what is not there.
        future = ast.ImportFrom("__future__", [ast.alias("annotations")], 0)
        part = ast.Module([future, definition], [])
        exec(compile(ast.fix_missing_locations(part), str(path), "exec"), vars(module))  # noqa: S102
        if not hasattr(module, last):
            raise MissingError(f"{path}: {name} defines nothing")
    return module


def _definition(body: list[ast.stmt], names: list[str], path: Source) -> ast.stmt:
    """The statement that defines the last name; the ones before it are classes around it."""
    for statement in body:
        if getattr(statement, "name", None) == names[0]:
            if len(names) == 1:
                return statement
            if isinstance(statement, ast.ClassDef):
                return _definition(statement.body, names[1:], path)
    raise MissingError(f"{path} has no {names[0]}")
