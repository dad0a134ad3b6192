"""A fingerprint says which weights a checkpoint has; it is made by reading little of it."""

from __future__ import annotations

import hashlib
import json
import struct
from collections.abc import Iterator
from pathlib import Path
from typing import BinaryIO

from restow.broker.errors import RestowError

SAMPLE_BYTES = 256
"""Read at either end of a tensor, and at each place of a file whose tensors are not known."""
PLACES = 1024
"""In such a file, from its beginning to its end."""
MAX_HEADER_BYTES = 100_000_000
"""As safetensors itself allows."""
CONFIGS = ("config.json", "adapter_config.json")
"""Files that say how weights are used; an adapter's strength stands in the second."""
OPAQUE = (".bin", ".pt", ".pth", ".gguf")


class CheckpointInvalidError(
    RestowError, status="FAILED_PRECONDITION", reason="CHECKPOINT_INVALID"
):
    """A checkpoint without weights that a fingerprint can be made of."""


def checkpoint_revision(path: Path) -> str:
    """A word for the weights of a checkpoint's folder, or file: where it lies does not matter.

    It is made of the names of its files, of ``config.json`` (an adapter's ``adapter_config.json``),
    and of the headers of safetensors with the first and the last bytes of each tensor; of other
    weights, of bytes all over the file. So it tells checkpoints of equal shapes apart that were
    trained on, and takes as long as seeking does.
    It finds accidents: who wishes to can make two checkpoints look alike. Raises
    `CheckpointInvalidError` where there are no weights, or none that can be read.
    """
    hasher = hashlib.sha256()
    found = False
    try:
        for file in _files(path):
            found = found or file.name not in CONFIGS
            hasher.update(f"{file.name}\n".encode())
            for part in _parts(file):
                hasher.update(struct.pack("<q", len(part)) + part)
    except OSError as error:
        raise _invalid(path, error.strerror or "it can't be read") from None
    if not found:
        raise _invalid(path, "it holds no weights (*.safetensors, *.bin, *.pt, *.pth, *.gguf)")
    return f"sha256-{hasher.hexdigest()[:32]}"


def _files(path: Path) -> list[Path]:
    if not path.is_dir():
        return [path]
    known = (".safetensors", *OPAQUE)
    return sorted(one for one in path.iterdir() if one.name in CONFIGS or one.suffix in known)


def _parts(file: Path) -> Iterator[bytes]:
    if file.name in CONFIGS:
        yield file.read_bytes()
        return
    with file.open("rb") as opened:
        yield from _tensors(file, opened) if file.suffix == ".safetensors" else _places(opened)


def _tensors(file: Path, opened: BinaryIO) -> Iterator[bytes]:
    """The header, then both ends of each tensor in the order of the header."""
    start = opened.read(8)
    length = int.from_bytes(start, "little")
    header = opened.read(length) if len(start) == 8 and length <= MAX_HEADER_BYTES else b""
    if not header or len(header) < length:
        raise _invalid(file, "its header is not whole")
    yield header
    try:
        tensors = [
            one["data_offsets"] for name, one in json.loads(header).items() if name[:2] != "__"
        ]
        spans = [(int(begin), int(end)) for begin, end in tensors]
    except (ValueError, KeyError, TypeError, AttributeError):
        raise _invalid(file, "its header is not that of safetensors") from None
    for begin, end in spans:
        size = min(SAMPLE_BYTES, end - begin)
        for place in sorted({begin, end - size}):
            yield _read(file, opened, 8 + length + place, size)


def _places(opened: BinaryIO) -> Iterator[bytes]:
    """The size, and bytes at places spread evenly."""
    size_bytes = opened.seek(0, 2)
    yield struct.pack("<q", size_bytes)
    last = max(size_bytes - SAMPLE_BYTES, 0)
    for place in sorted({last * index // (PLACES - 1) for index in range(PLACES)}):
        opened.seek(place)
        yield opened.read(SAMPLE_BYTES)


def _read(file: Path, opened: BinaryIO, place: int, size: int) -> bytes:
    opened.seek(place)
    data = opened.read(size)
    if len(data) < size:
        raise _invalid(file, "it ends before its tensors do")
    return data


def _invalid(path: Path, why: str) -> CheckpointInvalidError:
    return CheckpointInvalidError(
        f"checkpoint {path}: {why}: no revision can be made of it; name one instead",
        path=path,
    )
