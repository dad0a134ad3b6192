"""Load the packaged recall model without a network and without warnings, and measure it."""

from __future__ import annotations

import logging
from collections import defaultdict
from collections.abc import Iterable
from importlib.resources import files
from pathlib import Path

from transformers import NemotronHForCausalLM
from transformers.utils import logging as transformers_logging

from restow.demo.recall.task import Prompt
from restow.demo.transformers.generation import generate_greedily

KERNEL_LOGGER = "transformers.integrations.hub_kernels"


def checkpoint_folder(group_count: int = 2) -> Path:
    """Return the folder that holds ``config.json`` and ``model.safetensors``.

    One checkpoint was trained with two B/C groups for each Mamba2 layer, the other with one group.
    """
    name = {1: "checkpoint_one_group", 2: "checkpoint"}[group_count]
    return Path(str(files(__package__).joinpath(name)))


def load_model(group_count: int = 2) -> NemotronHForCausalLM:
    """Return the trained model in float32 on the CPU, ready to decode."""
    # The reference PyTorch scan is meant to be used here: it is no fall-back to warn about.
    logging.getLogger(KERNEL_LOGGER).addFilter(is_no_kernel_advice)
    showed_progress = transformers_logging.is_progress_bar_enabled()
    transformers_logging.disable_progress_bar()
    try:
        model = NemotronHForCausalLM.from_pretrained(
            checkpoint_folder(group_count), local_files_only=True, dtype="float32"
        )
    finally:
        if showed_progress:
            transformers_logging.enable_progress_bar()
    return model.eval()


def is_no_kernel_advice(record: logging.LogRecord) -> bool:
    """Tell a log record apart from the advice to install a faster kernel."""
    return "is falling back to its reference PyTorch implementation" not in record.getMessage()


def whole_answer_accuracy(model: NemotronHForCausalLM, prompts: Iterable[Prompt]) -> float:
    """Return the share of prompts whose whole reply is right, decoded from the model's cache."""
    model.eval()
    # Prompts of one length share a batch without padding, which would alter the conv state.
    batches: defaultdict[tuple[int, int], list[Prompt]] = defaultdict(list)
    for prompt in prompts:
        batches[len(prompt.token_ids), len(prompt.answer_ids)].append(prompt)
    right = total = 0
    for (_, steps), batch in batches.items():
        replies = generate_greedily(model, [prompt.token_ids for prompt in batch], steps)
        right += sum(
            reply == prompt.answer_ids for reply, prompt in zip(replies, batch, strict=True)
        )
        total += len(batch)
    return right / total
