"""Stand in for what SGLang imports and no CPU has: ``sgl_kernel``, and ``torchvision``.

Every name in them is an empty class: nothing that a test calls uses them.
"""

from __future__ import annotations

import importlib.abc
import importlib.machinery
import sys
import types
from collections.abc import MutableSequence
from typing import Any

from transformers import AutoProcessor
from transformers.utils import is_torchvision_available

NAMES = ("sgl_kernel", "torchvision")


class Empty(type):
    """A class whose attributes are such classes."""

    def __getattr__(cls, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        made = Empty(name, (), {})
        setattr(cls, name, made)
        return made


class StandIn(types.ModuleType):
    __path__: MutableSequence[str] = []  # noqa: RUF012 - as every module has it

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        made = Empty(name, (), {})
        setattr(self, name, made)
        return made


class Finder(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    def find_spec(self, name: str, *_: object) -> importlib.machinery.ModuleSpec | None:
        if name.split(".")[0] not in NAMES:
            return None
        return importlib.machinery.ModuleSpec(name, self, is_package=True)

    def create_module(self, spec: importlib.machinery.ModuleSpec) -> types.ModuleType:
        return StandIn(spec.name)

    def exec_module(self, module: types.ModuleType) -> None:
        pass


def install() -> None:
    """Let SGLang find them; transformers first finds out that torchvision is not there."""
    assert AutoProcessor is not None
    assert not is_torchvision_available()
    sys.meta_path.insert(0, Finder())
