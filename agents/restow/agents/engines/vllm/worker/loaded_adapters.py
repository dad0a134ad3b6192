"""`LoadedAdapters` notes which LoRA adapters a worker loads, by words for all that is in them."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from restow.agents.engines.common.checkpoint import CheckpointInvalidError, checkpoint_revision
from restow.agents.engines.vllm.model_revision import local_checkpoint


class LoadedAdapters:
    """Words of adapters by their names, as a worker has loaded them. Of the worker's thread."""

    def __init__(self) -> None:
        """Know of none."""
        self._news: dict[str, str] = {}

    def watch(self, manager: Any) -> None:
        """Note what a class of vLLM's (`lora/worker_manager.py`) loads from now on.

        vLLM tells nobody when it does: at the call for a name, or in the step of a request.
        """
        load = manager._load_adapter

        def noted(own: Any, request: Any) -> Any:
            folder, before = _files(request.lora_path)
            found = load(own, request)
            self.note(request.lora_name, _word(folder, before))
            return found

        manager._load_adapter = noted

    def note(self, name: str, word: str) -> None:
        """Note that an adapter was loaded; an empty ``word``: nothing tells what it was."""
        self._news[name] = word if self._news.get(name, word) == word else ""

    def take(self) -> dict[str, str]:
        """Return what was loaded since the last call."""
        news, self._news = self._news, {}
        return news


def joined_words(one: Mapping[str, str], other: Mapping[str, str]) -> dict[str, str]:
    """Return the words of two ranks: empty where these have loaded different adapters."""
    return {
        name: one.get(name, word) if one.get(name, word) == other.get(name, word) else ""
        for name, word in {**one, **other}.items()
    }


def _files(path: str) -> tuple[Path | None, object]:
    """Return an adapter's folder, and what changes when anybody writes to its files."""
    try:
        folder = local_checkpoint(path).resolve()
        stats = [(one.name, one.stat()) for one in sorted(folder.iterdir())]
    except (CheckpointInvalidError, OSError):
        return None, None
    return folder, [(name, s.st_ino, s.st_size, s.st_mtime_ns, s.st_ctime_ns) for name, s in stats]


def _word(folder: Path | None, before: object) -> str:
    """Return a word for the files that were loaded; empty where they have changed meanwhile."""
    if folder is None:
        return ""
    try:
        word = checkpoint_revision(folder, whole=True)
    except CheckpointInvalidError:
        return ""
    return word if _files(str(folder))[1] == before else ""
