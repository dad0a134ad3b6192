"""The memory of the GPU suites: a GPU's, or the host's, in which they are rehearsed."""

from __future__ import annotations

import os

import torch


def on_gpu() -> bool:
    """Return whether to measure on a GPU, or, with TRITON_INTERPRET=1, to rehearse without one.

    A rehearsal is small. Raises `RuntimeError` without a GPU.
    """
    if os.environ.get("TRITON_INTERPRET") == "1":
        print(
            "REHEARSAL in host memory: bytes are checked, kernels are interpreted, times mean "
            "nothing. LEFT OUT: CUDA's streams, events and IPC, which need a GPU"
        )
        return False
    if not torch.cuda.is_available():
        raise RuntimeError("torch finds no GPU on this machine: TRITON_INTERPRET=1 rehearses")
    return True
