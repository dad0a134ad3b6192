"""Which model an engine of vLLM serves, for the layout (vLLM 0.32 `config/model.py`, `load.py`)."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path
from typing import TYPE_CHECKING

import structlog
from huggingface_hub import snapshot_download

from restow.agents.engines.common.checkpoint import CheckpointInvalidError, checkpoint_revision

if TYPE_CHECKING:
    from vllm.config import ModelConfig, VllmConfig

DUMMY_SEED = 1234
"""vLLM's own, whatever the engine's (`weight_utils.initialize_single_dummy_weight`)."""


def weights_revision(config: VllmConfig, named: str = "") -> str:
    """A word for the weights: the one that the operator has ``named``, or a fingerprint.

    What overrides the checkpoint's config (``--hf-overrides``) is told apart as well: states of
    other positions or norms are of no use. Dummy weights are drawn anew for every parameter of a
    rank, by the shape that it has there and on the kind of device that it lies on: so those of
    another TP are others. "" where nothing can be said, as of a checkpoint that is nowhere on this
    host.
    """
    return named or _found(config)


def _found(config: VllmConfig) -> str:
    model, load = config.model_config, config.load_config
    if load.load_format == "dummy":
        parallel, kind = config.parallel_config, config.device_config.device_type
        dtype = str(model.dtype).removeprefix("torch.")
        drawn = f"dummy-{DUMMY_SEED}-tp{parallel.tensor_parallel_size}-{dtype}-{kind}"
        return drawn + _overridden(model)
    try:
        name = getattr(model, "model_weights", "") or model.model
        folder = checkpoint_folder(name, model.revision, load.download_dir)
        return checkpoint_revision(folder) + _overridden(model)
    except CheckpointInvalidError as error:
        structlog.get_logger("restow.vllm").warning(
            "nothing tells the model's weights from others: set model_revision",
            model=model.model,
            detail=error.message,
        )
        return ""


def _overridden(model: ModelConfig) -> str:
    overrides = model.hf_overrides
    if not overrides:
        return ""
    if callable(overrides):
        text = getattr(overrides, "__qualname__", repr(overrides))
    else:
        text = json.dumps(overrides, sort_keys=True, default=str)
    return f"+{hashlib.sha256(text.encode()).hexdigest()[:16]}"


def checkpoint_folder(name: str, revision: str | None = None, cache_dir: str | None = None) -> Path:
    """Where a checkpoint lies, whether it is named by its path or as on the hub.

    Raises `CheckpointInvalidError`.
    """
    path = Path(name).expanduser()
    if path.exists():
        return path
    try:
        folder = snapshot_download(
            name, revision=revision, cache_dir=cache_dir, local_files_only=True
        )
    except (OSError, ValueError):
        raise CheckpointInvalidError(
            f"checkpoint {name} is no folder, and not in the cache of this host", path=name
        ) from None
    return Path(folder)
