"""`load_model` loads the packaged recall model without a network and without noise."""

import logging
from importlib.resources import files
from pathlib import Path

from transformers import NemotronHForCausalLM
from transformers.utils import logging as transformers_logging

KERNEL_LOGGER = "transformers.integrations.hub_kernels"


def checkpoint_folder(group_count: int = 2) -> Path:
    """Return the folder that holds ``config.json`` and ``model.safetensors``.

    One was trained with two B/C groups for each Mamba2 layer, the other with one.
    """
    name = {1: "checkpoint_one_group", 2: "checkpoint"}[group_count]
    return Path(str(files(__package__).joinpath(name)))


def load_model(group_count: int = 2) -> NemotronHForCausalLM:
    """Return the trained model in float32 on the CPU, ready to decode."""
    # The reference PyTorch scan is what this model is for: it is no fall-back to warn about.
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
