"""Where vLLM's views of a page in NVFP4 lie. Runs in vLLM's environment.

Of ``[[heads, tokens, head_dim, order], ...]`` on the command line it prints the offset, the strides
of heads, elements and tokens, and the length of a row: of K's data and scales, then of V's.
"""

from __future__ import annotations

import json
import sys

import torch
from vllm.utils.torch_utils import nvfp4_kv_cache_full_dim, nvfp4_split_data_scale


def views(heads: int, tokens: int, head_dim: int, order: str) -> list[list[int]]:
    """Return the views that `flashinfer._nvfp4_kv_views` makes, which itself needs FlashInfer."""
    full_dim = nvfp4_kv_cache_full_dim(head_dim)
    side_bytes = heads * tokens * full_dim
    page = torch.zeros(2, 2 * side_bytes, dtype=torch.uint8)
    rows = (heads, tokens) if order == "HND" else (tokens, heads)
    found = []
    for side in range(2):
        strides = (page.stride(0), rows[1] * full_dim, full_dim, 1)
        half = page.as_strided((2, *rows, full_dim), strides, side * side_bytes)
        for view in nvfp4_split_data_scale(half):
            head, token = (1, 2) if order == "HND" else (2, 1)
            numbers = view.stride(head), view.stride(3), view.stride(token), view.shape[3]
            found.append([view.storage_offset(), *numbers])
    return found


if __name__ == "__main__":
    print(json.dumps([views(*one) for one in json.loads(sys.argv[1])]))
