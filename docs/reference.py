"""Write docs/python.md: the Python API, in the words of its docstrings.

    python docs/reference.py > docs/python.md

What is public is what `restow.broker.client` and `restow.agents` name in their `__all__`, what
authors of engines need of layouts, families and the store, and the errors that their docstrings
name. Needs `restow[agent]`.
"""

from __future__ import annotations

import ast
import inspect
import re
import sys
import textwrap
from collections.abc import Iterator
from dataclasses import dataclass, field
from enum import Enum
from functools import cached_property
from importlib import import_module
from itertools import pairwise
from types import FunctionType
from typing import Any, get_args, get_origin

from restow.broker.errors import RestowError

MODULES: dict[str, tuple[str, ...]] = {
    "restow.broker.client": (),
    "restow.agents": (),
    "restow.broker.layout": (
        *("Layout", "Model", "Field", "Kind", "RankLayout", "Region", "Shard", "Span", "DType"),
        *("check_layout", "digest"),
    ),
    "restow.broker.families": (
        *("build_layout", "ModelSpec", "AttentionSpec", "MlaSpec", "Mamba1Spec", "Mamba2Spec"),
        *("GdnSpec", "KdaSpec", "LinearAttentionSpec", "ShortConvSpec", "EngineSettings"),
        *("ConvLayout", "KvOrder", "MatrixOrder"),
    ),
    "restow.agents.store.store": ("Store", "StoreOptions"),
}
"""Public names of each module; none given: all of its ``__all__``."""
VALUES = ("restow.broker.layout", "restow.broker.families")
"""Modules of values that callers only make: the page leaves their methods out."""
ERROR = re.compile(r"`(\w+Error)`")
NAME = re.compile(r"`([A-Za-z_][\w.]*)`")
WIDTH = 96
HEAD = """# The Python API

Written by `python docs/reference.py` from docstrings; [The Python client](client.md) has it by
example. Ids, layouts and messages (`pb.`) mean what [the contract](api.md) says. Units stand in
names. What fails raises one of the [errors](#errors), each with a stable `reason`; how a handoff
ended is no error but a `HandoffEnded`.
"""


@dataclass(frozen=True)
class Callee:
    """A function, a method, a property, or how an object is made."""

    name: str
    value: Any
    types: dict[str, str] = field(default_factory=dict)
    """What stands for each type variable of its class."""

    @property
    def words(self) -> str:
        """Return the callee's docstring."""
        return inspect.getdoc(self.value) or ""

    @cached_property
    def parameters(self) -> list[inspect.Parameter]:
        """Return all parameters but the object itself."""
        if isinstance(self.value, property):
            return []
        given = inspect.signature(self.value).parameters.values()
        return [one for one in given if one.name not in ("self", "cls")]

    @property
    def signature(self) -> str:
        """Return the signature as it stands in a program."""
        if isinstance(self.value, property):
            read: Any = self.value.fget
            return f"{self.name}: {_typed(inspect.signature(read))}"
        words: list[str] = []
        for one in self.parameters:
            if one.kind is one.KEYWORD_ONLY and "*" not in words:
                words.append("*")
            words.append(_parameter(one))
        waits = "await " if inspect.iscoroutinefunction(self.value) else ""
        gives = _typed(inspect.signature(self.value))
        gives = self.types.get(gives, gives)
        ends = f" -> {gives}" if gives not in ("", "None") else ""
        line = f"{waits}{self.name}({', '.join(words)}){ends}"
        if len(line) <= WIDTH:
            return line
        return "\n".join([f"{waits}{self.name}(", *(f"    {one}," for one in words), f"){ends}"])


@dataclass(frozen=True)
class Public:
    """A public class, protocol, enum or function."""

    name: str
    value: Any

    @property
    def words(self) -> str:
        """Return the docstring of the name."""
        return inspect.getdoc(self.value) or ""

    @property
    def begin(self) -> Callee | None:
        """Return what is called to use or make the value, or None if users make none."""
        if isinstance(self.value, FunctionType):
            return Callee(self.name, self.value)
        if hasattr(self.value, "__members__") or getattr(self.value, "_is_protocol", False):
            return None
        return Callee(self.name, self.value.__init__)

    @cached_property
    def attributes(self) -> dict[str, str]:
        """Return the attributes that a class sets, where a string after each describes it."""
        return {k: v for owner in self._owners() for k, v in _noted(owner)}

    @cached_property
    def methods(self) -> list[Callee]:
        """Return methods and properties, including those of bases that are not public."""
        found: dict[str, Any] = {}
        if self.value.__module__.startswith(VALUES):
            return []
        for owner in self._owners():
            for name, one in vars(owner).items():
                plain = one.__func__ if isinstance(one, classmethod) else one
                if not name.startswith("_") and isinstance(plain, FunctionType | property):
                    found.setdefault(name, plain)
        types = self._types()
        return [Callee(name, one, types) for name, one in found.items()]

    def _types(self) -> dict[str, str]:
        """Return the types that a generic base was given, by the names of its variables."""
        found: dict[str, str] = {}
        for base in getattr(self.value, "__orig_bases__", ()):
            variables = getattr(get_origin(base), "__parameters__", ())
            for variable, given in zip(variables, get_args(base), strict=False):
                kind = str(given) if get_args(given) else given.__name__
                found[variable.__name__] = re.sub(
                    r"restow\.[\w.]*\.|concurrent\.futures\._base\.|(?<=\b)_(?=asyncio)", "", kind
                )
        return found

    def _owners(self) -> list[type]:
        if isinstance(self.value, FunctionType):
            return []
        return [one for one in self.value.__mro__ if one.__module__.startswith("restow.")]


def public(module: str) -> list[Public]:
    """Return what a module names, in its order; errors have a part of their own."""
    found = [Public(name, getattr(import_module(module), name)) for name in _names(module)]
    return [one for one in found if not _is_error(one.value)]


def errors() -> list[type[RestowError]]:
    """Return the errors that are public, or that a public docstring names.

    All subclasses of these errors are included.
    """
    known = {one.__name__: one for one in _below(RestowError)}
    named = {name for module in MODULES for name in _names(module) if name in known}
    for one in (one for module in MODULES for one in public(module)):
        begin = [one.begin] if one.begin else []
        said = [one.words, *one.attributes.values(), *(each.words for each in one.methods + begin)]
        named |= set(ERROR.findall(" ".join(said))) & known.keys()
    kinds = {each for name in named for each in (known[name], *_below(known[name]))}
    return [RestowError, *sorted(kinds, key=lambda one: one.__name__)]


def _names(module: str) -> list[str]:
    return list(MODULES[module] or import_module(module).__all__)


def _is_error(value: object) -> bool:
    return isinstance(value, type) and issubclass(value, RestowError)


def _below(base: type[RestowError]) -> Iterator[type[RestowError]]:
    for one in base.__subclasses__():
        yield one
        yield from _below(one)


def _typed(signature: inspect.Signature) -> str:
    """Return the type that is returned, as it was written; of an admin call, the client's."""
    given = signature.return_annotation
    return "" if given is signature.empty else re.sub(r"^AdminCall\[(.*)\]$", r"\1", str(given))


def _parameter(one: inspect.Parameter) -> str:
    if one.default is one.empty:
        return f"{one.name}: {one.annotation}"
    default = str(one.default) if isinstance(one.default, Enum) else repr(one.default)
    # A function, or the sign that a dataclass makes the value by one.
    plain = isinstance(one.default, Enum | int | float | str | bytes | tuple | None)
    return f"{one.name}: {one.annotation} = {default if plain else '...'}"


def _noted(owner: type) -> Iterator[tuple[str, str]]:
    """Yield a class's attributes, with those that `__init__` sets, and the string after each."""
    (tree,) = ast.parse(textwrap.dedent(inspect.getsource(owner))).body
    for body in (tree, *ast.walk(tree)):
        if not isinstance(body, ast.ClassDef) and getattr(body, "name", "") != "__init__":
            continue
        for said, after in pairwise(body.body):  # type: ignore[attr-defined]
            target = getattr(said, "target", None) or (getattr(said, "targets", None) or [None])[0]
            words = getattr(getattr(after, "value", None), "value", None)
            if target is not None and isinstance(after, ast.Expr) and isinstance(words, str):
                name = ast.unparse(target).removeprefix("self.")
                if not name.startswith("_"):
                    yield name, inspect.cleandoc(words)


class Page:
    """The page, with links between its parts."""

    def __init__(self) -> None:
        """Find the names, errors and anchors of the page."""
        self.parts = {module: public(module) for module in MODULES}
        self.errors = errors()
        self._anchors = {one.__name__: "errors" for one in self.errors}
        for one in (one for parts in self.parts.values() for one in parts):
            self._anchors[one.name] = one.name.lower()
            for method in one.methods:
                name = f"{one.name}.{method.name}"
                self._anchors[name] = name.replace(".", "").lower()

    def blocks(self) -> Iterator[str]:
        """Yield the page's blocks, which stand between empty lines."""
        yield HEAD.strip()
        for module, parts in self.parts.items():
            yield f"## {module}"
            yield self._linked(inspect.getdoc(import_module(module)) or "")
            for one in parts:
                yield from self._part(one)
        rows = ["| error | reason | gRPC status | |", "|---|---|---|---|"]
        for error in self.errors:
            told = error.__name__ == "BrokerCallError"
            reason = "the broker's | the broker's" if told else f"`{error.reason}` | {error.status}"
            words = " ".join(self._linked(inspect.getdoc(error) or "").split())
            rows.append(f"| `{error.__name__}` | {reason} | {words} |")
        yield "## Errors"
        yield "\n".join(rows)

    def _part(self, one: Public) -> Iterator[str]:
        yield f"### {one.name}"
        yield self._linked(one.words, one.name)
        if one.begin is not None:
            yield f"```python\n{one.begin.signature}\n```"
            if not isinstance(one.value, FunctionType) and one.begin.value.__doc__:
                yield self._linked(one.begin.words, one.name)
        if one.attributes:
            lines = [
                f"- `{name}`: {' '.join(self._linked(words, one.name).split())}"
                for name, words in one.attributes.items()
            ]
            yield "\n".join(lines)
        for method in one.methods:
            yield f"#### {one.name}.{method.name}"
            yield f"```python\n{method.signature}\n```"
            yield self._linked(method.words, one.name)

    def _linked(self, words: str, owner: str = "") -> str:
        """Return a docstring as Markdown, with links from names to their part of the page.

        Doctests become code.
        """

        def link(found: re.Match[str]) -> str:
            name = found[1].removeprefix("restow.broker.client.").removeprefix("restow.agents.")
            anchor = self._anchors.get(f"{owner}.{name}") or self._anchors.get(name)
            return f"[`{found[1]}`](#{anchor})" if anchor and name != owner else found[0]

        paragraphs = words.replace("``", "`").split("\n\n")
        return "\n\n".join(
            f"```python\n{one}\n```" if one.startswith(">>>") else NAME.sub(link, one)
            for one in paragraphs
        )


def main() -> None:
    """Print the page."""
    sys.stdout.write("\n\n".join(Page().blocks()) + "\n")


if __name__ == "__main__":
    main()
