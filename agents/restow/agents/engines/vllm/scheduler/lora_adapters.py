"""`LoraAdapters` tells LoRA adapters apart by words that P and D find alike."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Protocol

from restow.broker.logs import get_logger

MAX_ADAPTERS = 4096
"""Names of adapters that are kept. Under any further name nothing is handed over."""


class LoraRequest(Protocol):
    """What is needed of vLLM's (`lora/request.py`)."""

    lora_name: str
    lora_int_id: int
    lora_path: str


class LoraAdapters:
    """Keeps the words of the adapters that an engine's workers have loaded.

    vLLM keys cached blocks by an adapter's name, and reads its files whenever a request needs an
    adapter that was evicted, or at a call (`load_inplace`). So a name is of use as long as workers
    have loaded one adapter under it: afterwards cached blocks may be of either. Belongs to the
    scheduler's thread.
    """

    def __init__(self) -> None:
        """Know none."""
        self._words: dict[str, str] = {}
        """By name; empty where the name stands for several adapters, or for an unknown one."""
        self._log = get_logger("restow.vllm")

    def loaded(self, words: Mapping[str, str]) -> set[str]:
        """Take what workers have loaded since the last call; return the names that lost their use.

        A word is empty where ranks have loaded different files, or nothing tells what.
        """
        lost = set()
        for name, word in words.items():
            known = self._words.get(name)
            if known is None and len(self._words) >= MAX_ADAPTERS:
                continue
            self._words[name] = word if known in (None, word) else ""
            if self._words[name] or known == "":
                continue
            lost.add(name)
            self._log.error(
                "nothing is handed over for an adapter that was loaded again with other weights, "
                "as vLLM may find prefixes of the old ones: load it under another name"
                if known
                else "nothing is handed over for an adapter whose files changed while it was "
                "loaded, or differ between ranks: load it again under another name",
                adapter=name,
            )
        return lost

    def word(self, adapter: LoraRequest | None) -> str | None:
        """Return the fingerprint of what workers have loaded for a request; "" without an adapter.

        None: nobody knows, so nothing is handed over. Workers tell after the step in which they
        first have an adapter.
        """
        return "" if adapter is None else self._words.get(adapter.lora_name) or None
