"""Read and write the files of commands, with the file's name in every error."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

from restow.broker.errors import FileWriteError, LayoutError, LayoutFormError
from restow.broker.layout import Layout, check_layout
from restow.broker.layout.json_form import layout_from_json


def read_json(path: Path) -> Any:
    """Return what a JSON file holds. Raises `LayoutFormError` that names file and line."""
    try:
        return json.loads(path.read_bytes())
    except (ValueError, RecursionError) as error:
        problem = "nested too deeply" if isinstance(error, RecursionError) else error
        raise LayoutFormError(f"{path} is no JSON: {problem}", file=path) from None
    except OSError as error:
        raise LayoutFormError(f"{path} can't be read: {error.strerror}", file=path) from None


def read_object(path: Path) -> dict[str, Any]:
    """Return the object that a JSON file holds. Raises `LayoutFormError`."""
    value = read_json(path)
    if not isinstance(value, dict):
        raise LayoutFormError(f"{path} holds no JSON object", file=path)
    return value


def read_model_config(path: Path) -> tuple[Any, Any]:
    """Return what ``config.json`` holds, and ``hf_quant_config.json`` beside it, if it is there.

    ``path`` is ``config.json``, under whatever name, or the folder of both. Raises
    `LayoutFormError` that names the file.
    """
    if path.is_dir():
        path = path / "config.json"
        if not path.exists():
            raise LayoutFormError(f"{path.parent} holds no config.json", file=path.parent)
    beside = path.with_name("hf_quant_config.json")
    has_both = path.name == "config.json" and beside.exists()
    return read_json(path), read_json(beside) if has_both else None


def read_layout(path: Path) -> Layout:
    """Return a checked layout. Raises `LayoutError` that names the file too."""
    try:
        layout = layout_from_json(read_json(path))
        check_layout(layout)
    except LayoutError as error:
        error.subject.setdefault("file", str(path))
        raise
    return layout


def write_text(path: Path, content: str) -> None:
    """Write a file, or replace it. Raises `FileWriteError` that names the file."""
    try:
        path.write_text(content, encoding="utf-8", newline="\n")
    except OSError as error:
        raise FileWriteError(f"{path} can't be written: {error.strerror}", file=path) from None


def write_secret(path: Path, secret: str) -> None:
    """Write a new file that only its user may read. Raises `FileWriteError`."""
    try:
        with os.fdopen(os.open(path, os.O_CREAT | os.O_EXCL | os.O_WRONLY, 0o600), "w") as file:
            file.write(secret + "\n")
    except OSError as error:
        raise FileWriteError(f"{path} can't be written: {error.strerror}", file=path) from None
