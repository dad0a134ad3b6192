"""`LoraAdapters` tells LoRA adapters apart by words that P and D find alike."""

from __future__ import annotations

from collections import OrderedDict
from typing import Protocol

from restow.agents.engines.common.checkpoint import CheckpointInvalidError, checkpoint_revision
from restow.agents.engines.vllm.model_revision import local_checkpoint
from restow.broker.logs import get_logger

MAX_ADAPTERS = 4096
"""Adapters whose word is kept."""


class LoraRequest(Protocol):
    """What is needed of vLLM's (`lora/request.py`)."""

    lora_name: str
    lora_int_id: int
    lora_path: str
    load_inplace: bool


class LoraAdapters:
    """The words of adapters, each found once. Belongs to the scheduler's thread."""

    def __init__(self) -> None:
        """Know none."""
        self._words: OrderedDict[tuple[int, str, str], str] = OrderedDict()
        self._log = get_logger("restow.vllm")

    def word(self, adapter: LoraRequest | None) -> str:
        """Return a fingerprint of the adapter's weights; "" without one.

        Names are given by operators, and one may stand for other weights at P than at D. Where the
        weights can't be read it is the name all the same.
        """
        if adapter is None:
            return ""
        key = (adapter.lora_int_id, adapter.lora_name, adapter.lora_path)
        word = self._words.get(key)
        if word is None or adapter.load_inplace:  # vLLM loads such ones anew for each request
            word = self._words[key] = self._found(adapter)
            if len(self._words) > MAX_ADAPTERS:
                self._words.popitem(last=False)
        return word

    def is_known(self, adapter: LoraRequest | None) -> bool:
        """Return whether its word tells its weights, of all requests that name it.

        It does not where they can't be read, or may be others at the next request.
        """
        if adapter is None:
            return True
        return not adapter.load_inplace and self.word(adapter) != adapter.lora_name

    def _found(self, adapter: LoraRequest) -> str:
        try:
            return checkpoint_revision(local_checkpoint(adapter.lora_path))
        except CheckpointInvalidError as error:
            self._log.warning(
                "an adapter is told from others by its name alone",
                adapter=adapter.lora_name,
                detail=error.message,
            )
            return adapter.lora_name
