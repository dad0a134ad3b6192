"""Tell weights apart by fingerprints of their files, made by reading little of them.

P and D compute the fingerprint of a checkpoint alike (`checkpoint_revision`), and those of LoRA
adapters: a worker notes which adapters it loads (`LoadedAdapters`), and its scheduler keeps their
fingerprints by name (`LoraAdapters`).
"""

from __future__ import annotations

import hashlib
import json
import struct
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import BinaryIO

from restow.broker.errors import RestowError
from restow.broker.logs import get_logger

SAMPLE_BYTES = 256
"""Bytes read at either end of a tensor, and at each place of a file whose tensors are unknown."""
PLACES = 1024
"""Places read in a file whose tensors are unknown, from its beginning to its end."""
MAX_HEADER_BYTES = 100_000_000
"""The limit of safetensors itself."""
CONFIG, QUANTISATION = "config.json", "hf_quant_config.json"
CONFIGS = (CONFIG, "params.json", "adapter_config.json", QUANTISATION)
"""Files that say how weights are used: the model's, Mistral's, an adapter's, ModelOpt's."""
INDEX = "model.safetensors.index.json"
OPAQUE = (".bin", ".pt", ".pth", ".gguf")
_OF_TRAINING = ("training_args.bin", "optimizer.bin", "optimizer.pt", "scheduler.pt", "scaler.pt")
"""Files that no engine reads (vLLM `filter_files_not_needed_for_inference`)."""


class CheckpointInvalidError(
    RestowError, status="FAILED_PRECONDITION", reason="CHECKPOINT_INVALID"
):
    """A checkpoint without weights of which a fingerprint can be made."""


def checkpoint_revision(path: Path, *, whole: bool = False) -> str:
    """Return a word for the weights of a checkpoint's folder, or file, wherever it lies.

    The word is made of the names of the files that engines read, of the `CONFIGS`, and of the
    headers of safetensors with the first and last bytes of each tensor. For other weights it is
    made of bytes all over the file. So it tells a checkpoint from the same model after more
    training, and takes a few milliseconds. ``whole``: read small files, such as adapters, from
    beginning to end.

    It finds accidents: somebody who wants to can make two checkpoints look alike. Raises
    `CheckpointInvalidError` where there are no weights, or none that can be read.
    """
    hasher = hashlib.sha256()
    has_weights = False
    try:
        for file in _files(path):
            has_weights = has_weights or file.name not in CONFIGS
            hasher.update(f"{file.name}\n".encode())
            for part in [_whole(file)] if whole else _parts(file):
                hasher.update(struct.pack("<q", len(part)) + part)
    except OSError as error:
        raise _invalid(path, error.strerror or "it can't be read") from None
    if not has_weights:
        raise _invalid(path, "it holds no weights (*.safetensors, *.bin, *.pt, *.pth, *.gguf)")
    return f"sha256-{hasher.hexdigest()[:32]}"


def _files(path: Path) -> list[Path]:
    """Return the files that engines read: the safetensors of the index, or other weights."""
    if not path.is_dir():
        return [path]
    names = {file.name: file for file in path.iterdir()}
    weights = {name for name in names if name.endswith(".safetensors")}
    if INDEX in names:
        weights &= _indexed(names[INDEX]) or weights
    if not weights:
        weights = {name for name in names if name.endswith(OPAQUE)} - {*_OF_TRAINING}
    configs = {*CONFIGS} & {*names}
    if CONFIG in configs and b'"quantization_config"' in names[CONFIG].read_bytes():
        configs.discard(QUANTISATION)  # engines load the config's own, and not this file
    return sorted(names[name] for name in weights | configs)


def _indexed(index: Path) -> set[str]:
    try:
        return {str(name) for name in json.loads(index.read_bytes())["weight_map"].values()}
    except (ValueError, KeyError, TypeError, AttributeError):
        raise _invalid(index, "it is no index of safetensors") from None


def _whole(file: Path) -> bytes:
    with file.open("rb") as opened:
        return hashlib.file_digest(opened, "sha256").digest()


def _parts(file: Path) -> Iterator[bytes]:
    if file.name in CONFIGS:
        yield file.read_bytes()
        return
    with file.open("rb") as opened:
        yield from _tensors(file, opened) if file.suffix == ".safetensors" else _places(opened)


def _tensors(file: Path, opened: BinaryIO) -> Iterator[bytes]:
    """Yield the header, then both ends of each tensor in the order of the header."""
    start = opened.read(8)
    length = int.from_bytes(start, "little")
    header = opened.read(length) if len(start) == 8 and length <= MAX_HEADER_BYTES else b""
    if not header or len(header) < length:
        raise _invalid(file, "its header is not whole")
    yield header
    try:
        tensors = [
            entry["data_offsets"] for name, entry in json.loads(header).items() if name[:2] != "__"
        ]
        spans = [(int(begin), int(end)) for begin, end in tensors]
    except (ValueError, KeyError, TypeError, AttributeError):
        raise _invalid(file, "its header is not that of safetensors") from None
    for begin, end in spans:
        size = min(SAMPLE_BYTES, end - begin)
        for place in sorted({begin, end - size}):
            yield _read(file, opened, 8 + length + place, size)


def _places(opened: BinaryIO) -> Iterator[bytes]:
    """Yield the size, and bytes at places spread evenly."""
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
        f"checkpoint {path}: {why}: no revision can be made of it; name a revision instead",
        path=path,
    )


def local_checkpoint(name: str, revision: str | None = None, cache_dir: str | None = None) -> Path:
    """Return where a checkpoint lies that is named by its path, or as on the Hugging Face hub.

    Raises `CheckpointInvalidError`.
    """
    path = Path(name).expanduser()
    if path.exists():
        return path
    # Only an engine's process has the hub's library.
    from huggingface_hub import snapshot_download

    try:
        folder = snapshot_download(
            name, revision=revision, cache_dir=cache_dir, local_files_only=True
        )
    except (OSError, ValueError):
        raise CheckpointInvalidError(
            f"checkpoint {name} is no folder, and not in the cache of this host", path=name
        ) from None
    return Path(folder)


MAX_ADAPTERS = 4096
"""Names of adapters that are remembered. Under any further name nothing is handed over."""


class LoraAdapters:
    """Fingerprints of the adapters that an engine's workers have loaded, by name.

    Engines key cached blocks by an adapter's name and read its files again when a request needs an
    adapter that was evicted, or when they are told to. So a name can be used as long as workers
    have loaded one adapter under it; after that cached blocks may belong to either. Belongs to the
    scheduler's thread.
    """

    def __init__(self) -> None:
        """Begin with no adapters."""
        self._fingerprints: dict[str, str] = {}
        """By name; empty where the name stands for several adapters, or for an unknown adapter."""
        self._log = get_logger("restow.engine")

    def loaded(self, fingerprints: Mapping[str, str]) -> set[str]:
        """Note what workers have loaded since the last call; return names that became useless.

        A fingerprint is empty where ranks have loaded different files, or files that changed.
        """
        lost = set()
        for name, fingerprint in fingerprints.items():
            known = self._fingerprints.get(name)
            if known is None and len(self._fingerprints) >= MAX_ADAPTERS:
                continue
            self._fingerprints[name] = fingerprint if known in (None, fingerprint) else ""
            if self._fingerprints[name] or known == "":
                continue
            lost.add(name)
            self._log.error(
                "nothing is handed over for an adapter that was loaded again with other weights: "
                "the engine may find prefixes of the old weights; load it under another name"
                if known
                else "nothing is handed over for an adapter whose files changed while it was "
                "loaded, or differ between ranks: load it again under another name",
                adapter=name,
            )
        return lost

    def fingerprint(self, name: str | None) -> str | None:
        """Return the fingerprint of the adapter of that name; "" for a request without an adapter.

        None: it is unknown, so nothing is handed over. Workers report an adapter after the step in
        which they first loaded it.
        """
        return "" if name is None else self._fingerprints.get(name) or None


class LoadedAdapters:
    """Fingerprints of the adapters that a worker has loaded. Belongs to the worker's thread."""

    def __init__(self) -> None:
        """Begin with no adapters."""
        self._news: dict[str, str] = {}

    @contextmanager
    def loading(self, name: str, path: str) -> Iterator[None]:
        """Note an adapter that is loaded from ``path`` meanwhile, if its files do not change."""
        folder, before = _adapter_files(path)
        yield
        self.note(name, _unchanged_fingerprint(folder, before))

    def note(self, name: str, fingerprint: str) -> None:
        """Note a loaded adapter; an empty ``fingerprint``: it is unknown what was loaded."""
        self._news[name] = fingerprint if self._news.get(name, fingerprint) == fingerprint else ""

    def take(self) -> dict[str, str]:
        """Return what was loaded since the last call."""
        news, self._news = self._news, {}
        return news


def joined_fingerprints(mine: Mapping[str, str], theirs: Mapping[str, str]) -> dict[str, str]:
    """Return the fingerprints of two ranks: empty where they have loaded different adapters."""
    return {
        name: mine.get(name, fingerprint)
        if mine.get(name, fingerprint) == theirs.get(name, fingerprint)
        else ""
        for name, fingerprint in {**mine, **theirs}.items()
    }


def _adapter_files(path: str) -> tuple[Path | None, object]:
    """Return an adapter's folder, and a value that changes when its files are written."""
    try:
        folder = local_checkpoint(path).resolve()
        stats = [(file.name, file.stat()) for file in sorted(folder.iterdir())]
    except (CheckpointInvalidError, OSError):
        return None, None
    return folder, [(name, s.st_ino, s.st_size, s.st_mtime_ns, s.st_ctime_ns) for name, s in stats]


def _unchanged_fingerprint(folder: Path | None, before: object) -> str:
    """Return the fingerprint of the files that were loaded; empty if they have changed since."""
    if folder is None:
        return ""
    try:
        fingerprint = checkpoint_revision(folder, whole=True)
    except CheckpointInvalidError:
        return ""
    return fingerprint if _adapter_files(str(folder))[1] == before else ""
