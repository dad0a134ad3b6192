"""`weights_revision` says in a word which weights a vLLM engine has (`config/model.py`, 0.32)."""

from __future__ import annotations

import copy
import hashlib
import json
from pathlib import Path
from typing import TYPE_CHECKING

from huggingface_hub import snapshot_download

from restow.agents.engines.common.checkpoint import CheckpointInvalidError, checkpoint_revision
from restow.broker.layout.values import ModelIdentity
from restow.broker.logs import get_logger

if TYPE_CHECKING:
    from vllm.config import ModelConfig, VllmConfig

DUMMY_SEED = 1234
"""vLLM's own, whatever the engine's (`weight_utils.initialize_single_dummy_weight`)."""


def served_identity(config: VllmConfig, name: str, named: str = "") -> ModelIdentity:
    """Return which model an engine serves, by the ``name`` of its layout; ``named`` as below."""
    quantisation = config.model_config.quantization or ""
    return ModelIdentity(name, weights_revision(config, named), quantisation=quantisation)


def weights_revision(config: VllmConfig, named: str = "") -> str:
    """Return a word for the weights: the one that the operator has ``named``, or a fingerprint.

    What settings change of it (``--hf-overrides``, the length that LongRoPE goes by) is told apart
    as well: states of other positions or norms are of no use. Dummy weights are drawn anew for
    every parameter of a rank, by the shape that it has there and on the kind of device that it lies
    on: so those of another TP are others. "" where nothing can be said, as of a checkpoint that is
    nowhere on this host.
    """
    if named:
        return named
    model, load = config.model_config, config.load_config
    if load.load_format == "dummy":
        parallel, kind = config.parallel_config, config.device_config.device_type
        dtype = str(model.dtype).removeprefix("torch.")
        drawn = f"dummy-{DUMMY_SEED}-tp{parallel.tensor_parallel_size}-{dtype}-{kind}"
        return drawn + _by_settings(model)
    try:
        name = getattr(model, "model_weights", "") or model.model
        folder = local_checkpoint(name, model.revision, load.download_dir)
        return checkpoint_revision(folder) + _by_settings(model)
    except CheckpointInvalidError as error:
        get_logger("restow.vllm").warning(
            "nothing tells the model's weights from others: set model_revision",
            model=model.model,
            detail=error.message,
        )
        return ""


def draft_name(config: VllmConfig) -> str:
    """Return a word for the draft model: how it drafts, and a fingerprint of weights of its own.

    Those of MTP are in the model's checkpoint, whose revision tells them apart.
    """
    speculative = config.speculative_config
    draft = speculative.draft_model_config
    if draft is None or draft.model == config.model_config.model:
        return str(speculative.method)
    drafting = copy.copy(config)
    drafting.model_config = draft
    return f"{speculative.method} {weights_revision(drafting)}".rstrip()


def _by_settings(model: ModelConfig) -> str:
    """Return what the engine's settings change of that which its states are computed with."""
    said: list[str] = []
    if callable(model.hf_overrides):
        said.append(getattr(model.hf_overrides, "__qualname__", repr(model.hf_overrides)))
    elif model.hf_overrides:
        said.append(json.dumps(model.hf_overrides, sort_keys=True, default=str))
    # LongRoPE turns by other factors where longer prompts may come (`phi3_long_rope_scaled_rope`).
    short_tokens = getattr(model.hf_text_config, "original_max_position_embeddings", None)
    if isinstance(short_tokens, int) and model.max_model_len > short_tokens:
        said.append("long")
    return f"+{hashlib.sha256(json.dumps(said).encode()).hexdigest()[:16]}" if said else ""


def local_checkpoint(name: str, revision: str | None = None, cache_dir: str | None = None) -> Path:
    """Return where a checkpoint lies, whether it is named by its path or as on the hub.

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
