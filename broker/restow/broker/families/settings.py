"""How an engine lays a model's state out."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum

from restow.broker.errors import LayoutFormError
from restow.broker.layout.values import MAX_PAGE_BYTES, MAX_RANKS
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
    ``pcp`` times as many ranks share prefills, and ``dcp`` of all ranks of a stage share out the
    tokens of attention without windows, ``interleave_tokens`` at a time (vLLM's prefill and decode
    context parallel sizes): ``page_tokens`` are then those of one rank's page.
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
    pcp: int = 1
    dcp: int = 1
    interleave_tokens: int = 1

    @property
    def stage_ranks(self) -> int:
        """How many ranks a pipeline stage has."""
        return self.tp * self.pcp

    def context_part(self, stage_rank: int) -> int:
        """Which part of the tokens a stage's rank holds, of ``dcp``.

        Ranks of one place in TP come first (vLLM `initialize_model_parallel`).
        """
        pcp_rank, tp_rank = divmod(stage_rank, self.tp)
        return (tp_rank * self.pcp + pcp_rank) % self.dcp

    def check(self) -> None:
        """Raise `LayoutFormError` that names a setting outside of its bounds."""
        for name, value, least in (
            ("tp", self.tp, 1),
            ("pp", self.pp, 1),
            ("pcp", self.pcp, 1),
            ("dcp", self.dcp, 1),
            ("tp * pcp * pp", self.stage_ranks * self.pp, 1),
            ("page_tokens", self.page_tokens, 1),
            ("pages_per_block", self.pages_per_block, 1),
            ("conv_rows_extra", self.conv_rows_extra, 0),
            ("page_align_bytes", self.page_align_bytes, 1),
            ("interleave_tokens", self.interleave_tokens, 1),
        ):
            most = MAX_RANKS if name in _RANKS else MAX_PAGE_BYTES
            if not least <= value <= most:
                raise LayoutFormError(f"{name} is {value}; it must be {least} to {most}")
        self._check_context()

    def _check_context(self) -> None:
        """Refuse what vLLM refuses (`ParallelConfig`, `VllmConfig.validate_block_size`)."""
        sizes = (1, self.pcp, self.stage_ranks)
        if self.dcp not in sizes and (self.pcp > 1 or self.tp % self.dcp):
            raise LayoutFormError(
                f"dcp is {self.dcp} over tp {self.tp} and pcp {self.pcp}: it must divide tp, and "
                f"where pcp is not 1 be 1, pcp or tp * pcp"
            )
        block_tokens = self.page_tokens * self.pages_per_block
        if self.dcp > 1 and block_tokens % self.interleave_tokens:
            raise LayoutFormError(
                f"interleave_tokens is {self.interleave_tokens}; it must divide the {block_tokens} "
                f"tokens of a block"
            )


_RANKS = ("tp", "pp", "pcp", "dcp", "tp * pcp * pp")
