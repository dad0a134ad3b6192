"""`weights_revision` says in a word which weights a vLLM engine has (`config/model.py`, 0.32)."""

from __future__ import annotations

import copy
import hashlib
import json
from collections.abc import Callable, Mapping
from dataclasses import fields, is_dataclass
from enum import Enum
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from huggingface_hub import snapshot_download

from restow.agents.engines.common.checkpoint import CheckpointInvalidError, checkpoint_revision
from restow.agents.engines.vllm.errors import EngineUnsupportedError
from restow.broker.layout.values import ModelIdentity
from restow.broker.logs import get_logger

if TYPE_CHECKING:
    from vllm.config import ModelConfig, VllmConfig

Config = Mapping[str, Any]
ReadConfig = Callable[["ModelConfig", bool], Config | None]
DUMMY_SEED = 1234
"""vLLM's own, whatever the engine's (`weight_utils.initialize_single_dummy_weight`)."""


def served_identity(config: VllmConfig, name: str, named: str = "") -> ModelIdentity:
    """Return which model an engine serves, by the ``name`` of its layout; ``named`` as below."""
    quantisation = config.model_config.quantization or ""
    return ModelIdentity(name, weights_revision(config, named), quantisation=quantisation)


def weights_revision(config: VllmConfig, named: str = "", read: ReadConfig | None = None) -> str:
    """Return a word for what an engine's states are computed with.

    It is the word that the operator has ``named``, or a fingerprint of the checkpoint and of what
    settings make of its configuration (`_by_settings`), which ``read`` reads. It may be asked for
    again where weights were replaced. Dummy weights are drawn anew for every parameter of a rank,
    by the shape that it has there and on the kind of device that it lies on: so those of another TP
    are others. "" where nothing can be said, as of a checkpoint that is nowhere on this host.

    Raises `EngineUnsupportedError` for a configuration that has no stable form.
    """
    if named:
        return named
    model, load = config.model_config, config.load_config
    if load.load_format == "dummy":
        parallel, kind = config.parallel_config, config.device_config.device_type
        dtype = str(model.dtype).removeprefix("torch.")
        drawn = f"dummy-{DUMMY_SEED}-tp{parallel.tensor_parallel_size}-{dtype}-{kind}"
        return drawn + _by_settings(config, read or hf_config)
    try:
        name = getattr(model, "model_weights", "") or model.model
        folder = local_checkpoint(name, model.revision, load.download_dir)
        return checkpoint_revision(folder) + _by_settings(config, read or hf_config)
    except CheckpointInvalidError as error:
        get_logger("restow.vllm").warning(
            "nothing tells the model's weights from others: set model_revision",
            model=model.model,
            detail=error.message,
        )
        return ""


def reloaded_revision(config: VllmConfig, path: str) -> str:
    """Return a word for weights that were loaded anew from ``path``; empty: from the engine's."""
    loaded = copy.copy(config)
    loaded.model_config = copy.copy(config.model_config)
    if path:  # as `reload_weights` changes the config
        loaded.model_config.model, loaded.model_config.model_weights = path, ""
        loaded.model_config.revision = None
    return weights_revision(loaded)


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


NO_STATE = frozenset(
    {
        # Where it was found, and by which software it was written.
        *("_name_or_path", "name_or_path", "transformers_version", "auto_map"),
        # Types that states have are told by the layout; a computation in another is a rounding.
        *("dtype", "torch_dtype"),
        # What follows the layers: the head, and what is done with its tokens.
        *("tie_word_embeddings", "bos_token_id", "eos_token_id", "sep_token_id", "pad_token_id"),
        *("decoder_start_token_id", "id2label", "label2id", "problem_type", "num_labels"),
        # How transformers would run it.
        *("use_cache", "return_dict", "output_attentions", "output_hidden_states"),
        *("_attn_implementation", "attn_implementation"),
    }
)
"""Keys of a configuration that change no state, at any depth but inside of a quantisation's.

Settings that are left out: parallelism of any kind, ``max_model_len`` but for LongRoPE, types (of
computation, of caches), kernels and backends, sizes of blocks, caches and batches, seeds, names
under which a model is served, tokenizers (tokens are content), preprocessing (processed features
are content), and all that samples.
"""


_WRITTEN_OVER = ("deepseek_yarn", "deepseek_llama_scaling")
"""What DeepSeek's models write over "yarn" while they are loaded, in ``--hf-overrides`` too."""


def _by_settings(config: VllmConfig, read: ReadConfig) -> str:
    """Return a word for what an engine's settings change of that which states are computed with.

    It is empty where the engine has the checkpoint's own configuration, and made of the one that
    it has otherwise, however that was said: ``--hf-overrides``, also as a function, another
    ``--hf-config-path`` or format. Two ways to one configuration have one word.
    """
    model, said = config.model_config, dict[str, Any]()
    config_format = model.config_format
    overridden = model.hf_overrides or model.hf_config_path or model.disable_sliding_window
    if overridden or getattr(config_format, "value", config_format) != "auto":
        own, in_use = read(model, False), read(model, True)
        if _stable(own) != (used := _stable(in_use)):
            said["config"] = used
    if model.quantization_config is not None:
        said["quantization_config"] = _stable(model.quantization_config, ".quantization_config")
    # LongRoPE turns by other factors where longer prompts may come (`phi3_long_rope_scaled_rope`).
    short_tokens = getattr(model.hf_text_config, "original_max_position_embeddings", None)
    if isinstance(short_tokens, int) and model.max_model_len > short_tokens:
        said["long"] = True
    if pruned := getattr(model.multimodal_config, "video_pruning_rate", None):
        said["video_pruning"] = [model.multimodal_config.video_pruning_method, pruned]
    if getattr(config.lora_config, "enable_tower_connector_lora", False):
        said["tower_lora"] = True
    text = json.dumps(said, sort_keys=True)
    return f"+{hashlib.sha256(text.encode()).hexdigest()[:16]}" if said else ""


def hf_config(model: ModelConfig, overridden: bool) -> Config | None:
    """Return the model's configuration as vLLM makes it, ``overridden`` by settings or not.

    It is read anew: models change the object that the engine has while they are loaded, and a
    scheduler in a process of its own has it unchanged. None: the checkpoint has none of its own.
    """
    from vllm.transformers_utils.config import get_config, get_hf_text_config

    name, revision, kind, overrides = model.model, model.revision, "auto", {}
    if overridden:
        name = model.hf_config_path or name
        revision = model._hf_config_revision or revision
        kind, overrides = model.config_format, model.hf_overrides
    function = overrides if callable(overrides) else None
    words = {} if callable(overrides) else overrides
    try:
        found = get_config(
            *(name, model.trust_remote_code, revision, model.code_revision, kind),
            hf_overrides_kw={k: v for k, v in words.items() if not isinstance(v, dict)},
            hf_overrides_fn=function,
            token=model.hf_token,
        )
    except (OSError, ValueError):
        if overridden:
            raise
        return None
    nested = {k: v for k, v in words.items() if isinstance(v, dict)}
    model._apply_dict_overrides(found, nested)
    text = get_hf_text_config(found)
    if (overridden and model.disable_sliding_window) or not getattr(text, "sliding_window", None):
        text.sliding_window = None
    made: Config = found.to_dict()
    return made


def _stable(value: Any, path: str = "") -> Any:
    """Return a value as JSON has it, without what changes no state.

    Raises `EngineUnsupportedError` for what has no form that two processes find alike.
    """
    if is_dataclass(value) and not isinstance(value, type):
        value = {one.name: getattr(value, one.name) for one in fields(value)}
    if isinstance(value, Mapping):
        kept = {str(key): one for key, one in value.items()}
        if "quantization" not in path:
            kept = {key: one for key, one in kept.items() if key not in NO_STATE}
        if kept.get("rope_type") in _WRITTEN_OVER:
            kept["rope_type"] = "yarn"
        return {key: _stable(one, f"{path}.{key}") for key, one in sorted(kept.items())}
    if isinstance(value, list | tuple):
        return [_stable(one, path) for one in value]
    if isinstance(value, set | frozenset):
        return sorted((_stable(one, path) for one in value), key=json.dumps)
    if isinstance(value, Enum):
        return _stable(value.value, path)
    if isinstance(value, torch.dtype):
        return str(value)
    if value is None or isinstance(value, bool | int | float | str):
        return value
    raise EngineUnsupportedError(
        f"the model's configuration has a {type(value).__name__} at {path[1:] or 'its root'}, so "
        f"that nothing tells its states from others: set model_revision"
    )


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
