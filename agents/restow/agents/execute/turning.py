"""Turning windows: prepared once for a program, and moved for every handoff."""

from __future__ import annotations

import torch

from restow.agents.binding.copies import Extraction
from restow.agents.binding.pages import Blocks, RegionTable, Tokens
from restow.agents.binding.pieces import Copies
from restow.agents.binding.staging import StagedSpans
from restow.agents.copying.copier import LARGE_BYTES
from restow.agents.copying.prepared_copies import PreparedCopies, prepared_copies


class Turning:
    """What of one program is copied out of spans in staging; keep it for many handoffs.

    Rows of snapshots keep their distances from each other on both sides, wherever the run of
    staging and the page of a handoff lie: what was prepared for one handoff is moved for the next.
    """

    def __init__(self, extraction: Extraction, spans: StagedSpans) -> None:
        """Nothing is prepared yet."""
        self._extraction = extraction
        self._rigid = spans.fixed is not None
        self._kept: tuple[int, int, PreparedCopies] | None = None

    def bind(
        self, staged: RegionTable, dst_blocks: Blocks, tokens: Tokens, device: torch.device
    ) -> Copies | PreparedCopies:
        """The copies of one handoff, prepared if that was of use.

        Raises `PageCountError` and `PageRangeError`.
        """
        extraction = self._extraction
        dst = extraction.distance(dst_blocks, tokens) if self._rigid else None
        if dst is None or device.type != "cpu":
            return extraction.bind(staged, dst_blocks, tokens)
        src = int(staged.base_address[0])
        if self._kept is not None:
            kept_src, kept_dst, kept = self._kept
            moved = kept.moved(src - kept_src, dst - kept_dst)
            if moved is not None:
                return moved
        copies = extraction.bind(staged, dst_blocks, tokens)
        if copies.size_bytes >= LARGE_BYTES:
            return copies
        prepared = prepared_copies(copies, device)
        self._kept = (src, dst, prepared)
        return prepared
