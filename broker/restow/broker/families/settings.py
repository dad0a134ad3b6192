"""How an engine lays a model's state out."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum


class ConvLayout(StrEnum):
    """Which axis of the conv state is innermost (vLLM `VLLM_SSM_CONV_STATE_LAYOUT`)."""

    SD = "SD"
    """Rows of taps, each a row of channels ``[x | B | C]``."""
    DS = "DS"
    """Rows of channels, each with its taps."""


class KvOrder(StrEnum):
    """Order of tokens and heads inside an attention page."""

    HND = "HND"
    """Head, token, then K and V side by side (vLLM 0.32)."""
    NHD = "NHD"
    """Token, head, then K and V side by side."""


@dataclass(frozen=True, slots=True)
class EngineSettings:
    """The settings of one engine that its layout follows from.

    ``conv_rows_extra`` are rows for speculative tokens behind the live window; ``page_align_bytes``
    rounds every page up, so that padding follows the last field.
    """

    tp: int = 1
    page_tokens: int = 16
    pages_per_block: int = 1
    conv_layout: ConvLayout = ConvLayout.SD
    kv_order: KvOrder = KvOrder.HND
    conv_rows_extra: int = 0
    page_align_bytes: int = 1
