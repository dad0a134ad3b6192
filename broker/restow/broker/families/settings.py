"""An engine's settings, and which heads and channels each of its tensor-parallel ranks holds."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum

from restow.broker.errors import LayoutFormError, TpSizeError
from restow.broker.layout import Span
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
    """Head, then its keys with tokens innermost, then its values token by token.

    This is the order of vLLM 0.32 on the CPU (`csrc/cpu`, attention kinds vec and vec16), as found
    by writing tokens there.
    """


class MatrixOrder(StrEnum):
    """Order of the two axes of a head's matrix (delta nets, KDA, linear attention)."""

    VK = "VK"
    """A row of keys for each value (vLLM 0.32)."""
    KV = "KV"
    """A row of values for each key."""


@dataclass(frozen=True, slots=True)
class EngineSettings(Worded):
    """The settings of one engine that determine its layout.

    ``tp`` and ``pp`` are the tensor and pipeline parallel sizes. A block of attention has
    ``pages_per_block`` pages of ``page_tokens`` tokens. ``conv_layout``, ``kv_order`` and
    ``matrix_order`` say in which order elements lie.
    ``conv_rows_extra`` counts the rows for speculative tokens behind the live window.
    ``page_align_bytes`` rounds every page up, so that padding follows the last field. Without
    ``kv_packed``, keys and values have regions of their own. If ``layers_per_stage`` is empty,
    stages are cut as vLLM cuts them. With ``mixer_inputs`` the engine keeps the inputs of its
    recurrent layers behind their states; with ``projections`` it offers the in-projection weights
    to multiply these inputs with. ``pcp`` and ``dcp`` are vLLM's prefill and decode context
    parallel sizes: ``pcp`` times as many ranks share prefills, and ``dcp`` of a stage's ranks
    share the tokens of attention without windows, ``interleave_tokens`` at a time; ``page_tokens``
    then counts the tokens of a single rank's page. ``null_block`` is the id in block lists where a
    request has no block; None if there is no null block. With ``cross_layer_blocks`` a block
    holds the pages of all layers of its group, side by side. With ``whole_blocks`` the engine keeps
    full blocks for other prompts with the same beginning.
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
        """Number of ranks in a pipeline stage."""
        return self.tp * self.pcp

    def context_part(self, stage_rank: int) -> int:
        """Return which of the ``dcp`` parts of the tokens a rank of a stage holds.

        Ranks with the same tensor-parallel rank come first (vLLM `initialize_model_parallel`).
        """
        pcp_rank, tp_rank = divmod(stage_rank, self.tp)
        return (tp_rank * self.pcp + pcp_rank) % self.dcp

    def check(self) -> None:
        """Raise `LayoutFormError`, naming the setting, if a setting is out of bounds."""
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
        """Refuse sizes that vLLM refuses (`ParallelConfig`, `VllmConfig.validate_block_size`)."""
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


def rank_span(count: int, tp: int, rank: int, noun: str) -> Span:
    """Return the heads or groups of ``rank``: its slice, or the head that it shares with others.

    If ``tp`` divides ``count``, each rank has a slice. If ``count`` divides ``tp``, ranks share
    heads: rank r has head ``r // (tp / count)``. (vLLM PR #55091 does so for groups; its
    ``rank * heads // tp`` for heads gives the same.) Otherwise raises `TpSizeError`.

    >>> rank_span(8, 4, 1, "head"), rank_span(2, 4, 1, "head")
    (Span(2, 4), Span(0, 1))
    """
    if count % tp == 0:
        return rank_slice(count, tp, rank, noun)
    if tp % count == 0:
        index = rank // (tp // count)
        return Span(index, index + 1)
    raise TpSizeError(
        f"{count} {noun}s can be neither cut nor replicated over TP {tp}: "
        f"one must divide the other",
        axis=noun,
        ranks=tp,
    )


def rank_slice(count: int, tp: int, rank: int, noun: str) -> Span:
    """Return a rank's slice of an axis. Raises `TpSizeError` unless ``tp`` divides ``count``."""
    if count % tp:
        raise TpSizeError(
            f"{count} {noun}s can't be cut over TP {tp}: it does not divide them",
            axis=noun,
            ranks=tp,
        )
    size = count // tp
    return Span(rank * size, (rank + 1) * size)
