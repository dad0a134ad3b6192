"""`DraftLayers` tells the caches of a draft model (MTP, EAGLE) from those of the model.

vLLM 0.32 numbers some drafts' layers on behind the model's (`deepseek_mtp.py`, `llama_eagle.py`),
and others from 0 on under names of their own (`qwen3_next_mtp.py`, `spec_decode/draft_model.py`).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from vllm.config import VllmConfig


@dataclass(frozen=True, slots=True)
class DraftLayers:
    """Numbers a draft's layers behind the model's, of which there are ``first``; None: no draft."""

    first: int | None = None

    @classmethod
    def of(cls, config: VllmConfig) -> DraftLayers:
        """Return those of an engine; one without a draft model (n-grams) has none."""
        drafting = config.speculative_config is not None
        return cls(config.model_config.get_total_num_hidden_layers() if drafting else None)

    def layer(self, name: str, number: int, layer: int) -> int | None:
        """Return which layer of a draft a cache is of; None: it is the model's own.

        ``number`` is the one in the cache's ``name``, and ``layer`` the model's that it stands for.
        """
        if self.first is None:
            return None
        parts = name.split(".")
        if parts[0] == "draft_model" or "mtp" in parts:
            return number if number >= self.first else self.first + number
        return layer if layer >= self.first else None
