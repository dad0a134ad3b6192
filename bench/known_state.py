"""A state of which every byte is known, in the pages of a rank."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np
import torch

from agent_harness.world import RankMemory
from restow.broker.layout import Layout

Blocks = Mapping[str, Sequence[int]]
Pages = dict[str, tuple[str, torch.Tensor]]
"""The group and the pages, ``[page, byte]``, of each region by its name."""


class KnownState:
    """A rank's part of the known state, page by page, and which bytes of the pages it covers."""

    def __init__(self, layout: Layout, tokens: int) -> None:
        """Slice the whole tensors as the only rank of ``layout`` holds them."""
        (rank,) = layout.ranks
        sizes = {region.group: region.page_tokens or tokens for region in rank.regions}
        counts = {group: -(-tokens // size) for group, size in sizes.items()}
        memory = RankMemory(rank, {group: tuple(range(n)) for group, n in counts.items()})
        images = [np.full(memory.size_bytes, byte, np.uint8) for byte in (0, 0xFF)]
        for image in images:
            memory.write({field.name: field for field in layout.model.fields}, tokens, image)
        self._values: dict[str, torch.Tensor] = {}
        self._covered: dict[str, torch.Tensor] = {}
        for region in rank.regions:
            first, count = memory.offsets[region.name], counts[region.group]
            values, others = (
                torch.from_numpy(image[first : first + count * region.page_stride_bytes])
                for image in images
            )
            self._values[region.name] = values.view(count, -1)
            self._covered[region.name] = (values == others).view(count, -1)

    def write(self, pages: Pages, blocks: Blocks) -> None:
        """Write the state to the pages of ``blocks``, and return when it is there."""
        for name, (group, there) in pages.items():
            index = torch.tensor(blocks[group], device=there.device)
            there.index_copy_(0, index, self._values[name].to(there.device))
            if there.is_cuda:
                torch.cuda.synchronize()

    def wrong_bytes(self, pages: Pages, several: Sequence[Blocks]) -> int:
        """Count the bytes of the state that the pages of each of ``several`` lack."""
        wrong = 0
        for name, (group, there) in pages.items():
            values, covered = (
                part[name].to(there.device) for part in (self._values, self._covered)
            )
            for blocks in several:
                got = there[torch.tensor(blocks[group], device=there.device)]
                wrong += int(((got != values) & covered).sum())
        return wrong
