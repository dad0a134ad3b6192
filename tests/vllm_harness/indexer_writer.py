"""Has vLLM's kernel write an indexer's keys, and reads them back by a layout's shards.

``indexer_writer.py SOURCE COPY TOKENS``: SOURCE is vLLM's file, and pages have so many tokens.
"""

from __future__ import annotations

import sys
from pathlib import Path

import torch

from restow.broker.families import EngineSettings, IndexerSpec
from restow.broker.families.build import layer_pages
from vllm_harness.kernel_source import kernels

DIM, PAGES, TOKENS = 128, 8, 100
UNTOUCHED = 0xA5
_DRIVER = """
@triton.jit
def write(keys, slots, cache, scales, page_tokens, page_bytes, DIM: tl.constexpr):
    token = tl.program_id(0)
    dims = tl.arange(0, DIM)
    _fp8_quant_and_cache_write(
        tl.load(keys + token * DIM + dims), dims < DIM, tl.load(slots + token), cache, scales,
        page_tokens, page_bytes, dims, DIM, SHUFFLE=False, BLOCK_TILE=16, HEAD_TILE=16,
        FP8_MAX=448.0, USE_FNUZ=False, MORE
    )
"""


def main(source: Path, copy: Path, page_tokens: int) -> None:
    """Fail unless every key is where the layout says, and nothing else was written."""
    names = ("_fp8_ue8m0_quantize", "_fp8_quant_and_cache_write")
    # vLLM 0.33 can also write the scales of SM100's kernels, in another form.
    driver = _DRIVER.replace("MORE", "MX_SCALE=False" * ("MX_SCALE" in source.read_text()))
    kernel = kernels(copy, [(source, name) for name in names], driver)
    pages = layer_pages(IndexerSpec(0, DIM), EngineSettings(page_tokens=page_tokens), 0)
    page_bytes = pages.regions[0].page_stride_bytes
    cache = torch.full((PAGES, page_bytes), UNTOUCHED, dtype=torch.uint8)
    # Powers of two: float8 holds them exactly, whatever their scale is.
    keys = 2.0 ** torch.randint(-3, 4, (TOKENS, DIM)) * (1 - 2 * torch.randint(0, 2, (TOKENS, DIM)))
    slots = torch.randperm(page_tokens * PAGES)[:TOKENS]
    kernel.write[(TOKENS,)](
        keys,
        slots,
        cache.view(torch.float8_e4m3fn),
        cache.view(torch.float32),
        page_tokens,
        page_bytes,
        DIM,
    )
    elements, scales = pages.shards
    for key, slot in zip(keys, slots.tolist(), strict=True):
        page, token = divmod(slot, page_tokens)
        found = []
        for shard in (elements, scales):
            start = shard.offset_bytes + token * (shard.token_stride_bytes or 0)
            size = shard.box[0].size * shard.dtype.itemsize_bytes
            found.append(cache[page, start : start + size].clone())
            cache[page, start : start + size] = UNTOUCHED
        values = found[0].view(torch.float8_e4m3fn).float() * found[1].view(torch.float32)
        if not torch.equal(values, key):
            raise ValueError(f"the key of slot {slot} is not where the layout says")
    if not bool((cache == UNTOUCHED).all()):
        raise ValueError("something else was written")
    print(f"{TOKENS} tokens")


if __name__ == "__main__":
    main(Path(sys.argv[1]), Path(sys.argv[2]), int(sys.argv[3]))
