"""`write_checkpoint` writes a small model of random weights, of a fixed seed."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import torch
from transformers import PreTrainedModel

from restow.demo.recall.train import make_tokenizer


def write_checkpoint(make: Callable[[], PreTrainedModel], folder: Path) -> Path:
    """Write a checkpoint, the same one every time."""
    with torch.random.fork_rng():
        torch.manual_seed(0)
        make().save_pretrained(folder)
    make_tokenizer().save_pretrained(folder)
    return folder
