"""Has vLLM's kernel say where it writes tokens, and compares that with a layout's token classes.

``slot_mapping.py FOLDER COPY``: FOLDER is vLLM's ``v1/worker/gpu``.
"""

from __future__ import annotations

import itertools
import sys
from pathlib import Path
from typing import Any

import numpy as np
import torch

from restow.broker.families import EngineSettings, MlaSpec
from restow.broker.families.build import layer_pages
from restow.broker.layout import DType
from vllm_harness.kernel_source import kernels

BLOCK_TOKENS, TOKENS = 16, 300


def main(folder: Path, copy: Path) -> None:
    """Fail unless each token is on the rank, in the block and at the place that a layout says."""
    sources = [
        (folder / "buffer_utils.py", "_load_ptr"),
        (folder / "block_table.py", "_compute_slot_mappings_kernel"),
    ]
    kernel = kernels(copy, sources)
    count = 0
    for parts, run in itertools.product((2, 4, 8), (1, 2, 8, 16)):
        for rank in range(parts):
            told = _slots(kernel, parts, rank, run)
            settings = EngineSettings(tp=parts, dcp=parts, interleave_tokens=run)
            pages = layer_pages(MlaSpec(0, 8, DType.BFLOAT16), settings, rank)
            held = pages.regions[0].tokens
            tokens = np.arange(TOKENS)
            page, in_page = np.divmod(held.before(tokens), BLOCK_TOKENS)
            own = np.isin(tokens, held.first_tokens(tokens))
            ours = np.where(own, _blocks()[page] * BLOCK_TOKENS + in_page, -1)
            assert ours.tolist() == told, (parts, rank, run)
            count += TOKENS
    print(count, "tokens")


def _blocks() -> np.ndarray[tuple[int], np.dtype[np.int32]]:
    """Return the block ids of the only request."""
    return np.random.default_rng(0).permutation(np.arange(1, 41, dtype=np.int32))


def _slots(kernel: Any, parts: int, rank: int, run: int) -> list[int]:
    blocks = torch.from_numpy(_blocks())
    slots = torch.full((1, TOKENS), -7, dtype=torch.int64)
    kernel._compute_slot_mappings_kernel[(1, 2)](
        TOKENS,
        torch.tensor([0], dtype=torch.int32),
        torch.tensor([0, TOKENS], dtype=torch.int32),
        torch.arange(TOKENS),
        torch.tensor([blocks.data_ptr()], dtype=torch.uint64),
        torch.tensor([len(blocks)]),
        torch.tensor([BLOCK_TOKENS], dtype=torch.int32),
        torch.tensor([True]),
        torch.tensor([True]),
        slots,
        TOKENS,
        rank,
        CP_SIZE=parts,
        CP_INTERLEAVE=run,
        PAD_ID=-1,
        TRITON_BLOCK_SIZE=1024,
    )
    found: list[int] = slots[0].tolist()
    return found


if __name__ == "__main__":
    main(Path(sys.argv[1]), Path(sys.argv[2]))
