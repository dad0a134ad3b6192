"""Takes Triton kernels out of vLLM's files, since importing those needs a GPU's Triton."""

from __future__ import annotations

import importlib.util
from collections.abc import Iterable
from pathlib import Path
from typing import Any

_HEAD = """
import triton
import triton.language as tl
"""


def kernels(copy: Path, sources: Iterable[tuple[Path, str]], driver: str = "") -> Any:
    """Return a module of the functions of these names in vLLM's files, and of a ``driver``.

    The module is written to ``copy``.
    """
    functions = []
    for file, name in sources:
        text = f"{file.read_text()}\n\n\n"
        at = text.index(f"@triton.jit\ndef {name}(")
        functions.append(text[at : text.index("\n\n\n", at)])
    copy.write_text("\n\n".join([_HEAD, *functions, driver]))
    spec = importlib.util.spec_from_file_location("kernel", copy)
    if spec is None or spec.loader is None:
        raise ImportError(copy)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module
