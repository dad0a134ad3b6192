"""Rebuild conv windows in host memory with torch (PROJECT), to the bits that an engine computes.

`project_windows` computes the product that an engine's own in-projection computes: `F.linear` in
the type of the weights. The bits are the same where the library gives a row the same bits for any
number of rows and any selection of the weights' rows. With few rows the library runs another
routine, and in float32 most elements then differ in the last bit. So inputs are padded with rows
of zeros, and an engine must also give its in-projection at least `padded_rows` rows if its prompt
is shorter. `repeats` tests whether this holds on the present processor. Measured with torch 2.13,
one and two threads:

    AMD EPYC           hidden 128, 2688: holds in every type, from 4 rows a thread
    Intel Xeon, AMX    hidden 64 to 8192: float16 from 2 rows; float32 from 16, at some sizes of
                       1024 and more never; bfloat16 below 512 only

The loop runs over products, one for each layer, each of which reads megabytes of weights.
"""

from __future__ import annotations

import torch
import torch.nn.functional

from restow.kernels.host_copies import view
from restow.kernels.tables import ProjectTable

ROWS_PER_THREAD = 4
LEAST_ROWS = 16
TRIED_ROWS = (100, 512, 2048)
TYPES = [torch.float32, torch.bfloat16, torch.float16]  # by code


def padded_rows(rows: int) -> int:
    """Return the number of rows to multiply for `rows`, so that the bits depend on nothing else."""
    return max(rows, LEAST_ROWS, ROWS_PER_THREAD * torch.get_num_threads())


@torch.inference_mode()
def repeats(weights: torch.Tensor) -> bool:
    """Return whether a row gets the same bits in a product of few rows as in a whole prompt's.

    ``weights`` are `[channels, hidden]`. The test multiplies random numbers with all and with
    some of the channels, on this processor and with torch's present number of threads.
    """
    generator = torch.Generator().manual_seed(0)
    shape = (max(TRIED_ROWS), weights.shape[1])
    prompt = torch.randn(shape, generator=generator).to(weights.dtype)
    last = padded_rows(1)
    quarter = slice(len(weights) // 4, len(weights) // 4 + max(len(weights) // 4, 1))
    for count in TRIED_ROWS:
        whole = torch.nn.functional.linear(prompt[None, :count], weights)[0, -last:]
        few = prompt[count - last : count].clone()
        for channels in (slice(None), quarter):
            again = torch.nn.functional.linear(few, weights[channels].clone())
            if not torch.equal(again, whole[:, channels]):
                return False
    return True


def project_windows(table: ProjectTable) -> None:
    """Compute the table's products, one after another."""
    for row in table.rows.tolist():
        _project(*row)


@torch.inference_mode()
def _project(
    src: int, src_tap_stride: int, taps: int, hidden: int,
    weight: int, weight_stride: int, channels: int,
    dst: int, dst_stride: int, dst_tap_stride: int, code: int, dst_code: int,
) -> None:  # fmt: skip
    item = TYPES[code].itemsize
    inputs = view(src, (taps, hidden), (src_tap_stride, item), TYPES[code])
    weights = view(weight, (channels, hidden), (weight_stride, item), TYPES[code])
    rows = torch.zeros((padded_rows(taps), hidden), dtype=TYPES[code])
    rows[:taps] = inputs
    products = torch.nn.functional.linear(rows, weights.contiguous())
    target = view(dst, (taps, channels), (dst_tap_stride, dst_stride), TYPES[dst_code])
    target.copy_(products[:taps])
