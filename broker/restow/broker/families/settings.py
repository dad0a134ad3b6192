"""How an engine lays a model's state out."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum

from restow.broker.errors import LayoutFormError
from restow.broker.layout.limits import MAX_PAGE_BYTES, MAX_RANKS
from restow.broker.words import Worded


class ConvLayout(StrEnum):
    """Which axis of the conv state is innermost (vLLM `VLLM_SSM_CONV_STATE_LAYOUT`)."""

    SD = "SD"
    """Rows of taps, each a row of channels ``[x | B | C]``."""
    DS = "DS"
    """Rows of channels, each with its taps."""


class KvOrder(StrEnum):
    """Order of tokens, heads and their elements inside an attention page."""

    HND = "HND"
    """Head, token, then K and V side by side (vLLM 0.32)."""
    NHD = "NHD"
    """Token, head, then K and V side by side."""
    HDN = "HDN"
    """Head, then its keys with tokens innermost, then its values token by token (vLLM on the CPU).

    vLLM 0.32 `csrc/cpu`, attention of the kinds vec and vec16: seen by writing tokens there.
    """


class MatrixOrder(StrEnum):
    """Order of the two axes of a head's matrix: delta nets, KDA and linear attention."""

    VK = "VK"
    """A row of keys for each value (vLLM 0.32)."""
    KV = "KV"
    """A row of values for each key."""


@dataclass(frozen=True, slots=True)
class EngineSettings(Worded):
    """The settings of one engine that its layout follows from.

    ``conv_rows_extra`` are rows for speculative tokens behind the live window; ``page_align_bytes``
    rounds every page up, so that padding follows the last field. Without ``kv_packed`` keys and
    values have regions of their own. ``layers_per_stage`` empty: as vLLM cuts. With
    ``mixer_inputs`` the engine keeps what its recurrent layers read behind their states; with
    ``projections`` it offers the in-projection weights that such inputs can be multiplied with.
    ``null_block`` is the id that lists have where a request has no block; None: no id is. With
    ``cross_layer_blocks`` a block has the pages of all layers of its group, side by side; with
    ``whole_blocks`` the engine keeps full blocks for other prompts that begin alike.
    """

    tp: int = 1
    page_tokens: int = 16
    pages_per_block: int = 1
    conv_layout: ConvLayout = ConvLayout.SD
    kv_order: KvOrder = KvOrder.HND
    conv_rows_extra: int = 0
    page_align_bytes: int = 1
    pp: int = 1
    layers_per_stage: tuple[int, ...] = ()
    kv_packed: bool = True
    mixer_inputs: bool = False
    projections: bool = False
    null_block: int | None = None
    cross_layer_blocks: bool = False
    matrix_order: MatrixOrder = MatrixOrder.VK
    whole_blocks: bool = False

    def check(self) -> None:
        """Raise `LayoutFormError` that names a setting outside of its bounds."""
        for name, value, least in (
            ("tp", self.tp, 1),
            ("pp", self.pp, 1),
            ("tp * pp", self.tp * self.pp, 1),
            ("page_tokens", self.page_tokens, 1),
            ("pages_per_block", self.pages_per_block, 1),
            ("conv_rows_extra", self.conv_rows_extra, 0),
            ("page_align_bytes", self.page_align_bytes, 1),
        ):
            most = MAX_RANKS if name in ("tp", "pp", "tp * pp") else MAX_PAGE_BYTES
            if not least <= value <= most:
                raise LayoutFormError(f"{name} is {value}; it must be {least} to {most}")
