"""Tell LoRA adapters apart by fingerprints of their files, which P and D compute alike.

A worker notes which adapters it loads (`LoadedAdapters`), and its scheduler keeps their
fingerprints by name (`LoraAdapters`).
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

from restow.agents.engines.common.checkpoint import (
    CheckpointInvalidError,
    checkpoint_revision,
    local_checkpoint,
)
from restow.broker.logs import get_logger

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
        """By name; empty where the name stands for several adapters, or for an unknown one."""
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
                "the engine may find prefixes of the old ones; load it under another name"
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
        folder, before = _files(path)
        yield
        self.note(name, _unchanged_fingerprint(folder, before))

    def note(self, name: str, fingerprint: str) -> None:
        """Note a loaded adapter; an empty ``fingerprint``: it is unknown what was loaded."""
        self._news[name] = fingerprint if self._news.get(name, fingerprint) == fingerprint else ""

    def take(self) -> dict[str, str]:
        """Return what was loaded since the last call."""
        news, self._news = self._news, {}
        return news


def joined_fingerprints(one: Mapping[str, str], other: Mapping[str, str]) -> dict[str, str]:
    """Return the fingerprints of two ranks: empty where they have loaded different adapters."""
    return {
        name: one.get(name, found) if one.get(name, found) == other.get(name, found) else ""
        for name, found in {**one, **other}.items()
    }


def _files(path: str) -> tuple[Path | None, object]:
    """Return an adapter's folder, and a value that changes when its files are written."""
    try:
        folder = local_checkpoint(path).resolve()
        stats = [(one.name, one.stat()) for one in sorted(folder.iterdir())]
    except (CheckpointInvalidError, OSError):
        return None, None
    return folder, [(name, s.st_ino, s.st_size, s.st_mtime_ns, s.st_ctime_ns) for name, s in stats]


def _unchanged_fingerprint(folder: Path | None, before: object) -> str:
    """Return the fingerprint of the files that were loaded; empty if they have changed since."""
    if folder is None:
        return ""
    try:
        found = checkpoint_revision(folder, whole=True)
    except CheckpointInvalidError:
        return ""
    return found if _files(str(folder))[1] == before else ""
