"""Tell which weights a vLLM engine has, also when they are replaced while it runs.

`weights_revision` makes a word of the checkpoint and of the settings that change what states are
computed with. `Weights` follows what replaces the weights of a running engine.
"""

from __future__ import annotations

import copy
import hashlib
import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import fields, is_dataclass
from enum import Enum
from typing import TYPE_CHECKING, Any

import torch

from restow.agents.engines.common.adapter_errors import EngineUnsupportedError
from restow.agents.engines.common.checkpoint import (
    CheckpointInvalidError,
    checkpoint_revision,
    local_checkpoint,
)
from restow.agents.engines.vllm.private import config_revision, override_config, watch_calls
from restow.broker.layout.values import ModelIdentity
from restow.broker.logs import get_logger

if TYPE_CHECKING:
    from vllm.config import ModelConfig, VllmConfig


Config = Mapping[str, Any]
ReadConfig = Callable[["ModelConfig", bool], Config | None]
DUMMY_SEED = 1234
"""vLLM's seed of dummy weights (`weight_utils.initialize_single_dummy_weight`)."""


def served_identity(config: VllmConfig, name: str, named: str = "") -> ModelIdentity:
    """Return the identity of an engine's model, whose layout has ``name``.

    ``named`` is that of `weights_revision`.
    """
    quantisation = config.model_config.quantization or ""
    return ModelIdentity(name, weights_revision(config, named), quantisation=quantisation)


def weights_revision(config: VllmConfig, named: str = "", read: ReadConfig | None = None) -> str:
    """Return a word for the weights and configuration with which an engine computes states.

    It is the word that the operator has ``named``, or else a fingerprint of the checkpoint and of
    its configuration as settings change it, which ``read`` reads. Dummy weights are drawn for every
    parameter of a rank, by its shape there and on its kind of device, so they depend on TP. Return
    "" if nothing tells the weights, as with a checkpoint that is not on this host.

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
    """Return the revision of weights loaded again from ``path``; empty: the engine's own path."""
    loaded = copy.copy(config)
    loaded.model_config = copy.copy(config.model_config)
    if path:  # as `reload_weights` changes the config
        loaded.model_config.model, loaded.model_config.model_weights = path, ""
        loaded.model_config.revision = None
    return weights_revision(loaded)


def draft_name(config: VllmConfig) -> str:
    """Return a word for the draft model: its method, and a fingerprint of its own weights.

    MTP has its weights in the model's checkpoint, whose revision covers them.
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
        # Where the checkpoint was found, and which software wrote it.
        *("_name_or_path", "name_or_path", "transformers_version", "auto_map"),
        # The layout has the types of states; a computation in another type only rounds.
        *("dtype", "torch_dtype"),
        # The head, which follows the layers, and its tokens.
        *("tie_word_embeddings", "bos_token_id", "eos_token_id", "sep_token_id", "pad_token_id"),
        *("decoder_start_token_id", "id2label", "label2id", "problem_type", "num_labels"),
        # How transformers would run the model.
        *("use_cache", "return_dict", "output_attentions", "output_hidden_states"),
        *("_attn_implementation", "attn_implementation"),
    }
)
"""Keys of a configuration that change no state, at any depth except inside a quantisation.

Settings of the engine that are left out: parallelism, ``max_model_len`` except for LongRoPE, types
of computation and caches, kernels and backends, sizes of blocks, caches and batches, seeds, served
names, tokenizers (tokens are content), preprocessing (processed features are content), and
sampling.
"""


_WRITTEN_OVER = ("deepseek_yarn", "deepseek_llama_scaling")
"""Words that DeepSeek's models write over "yarn" at loading, in ``--hf-overrides`` too."""


def _by_settings(config: VllmConfig, read: ReadConfig) -> str:
    """Return a word for the settings that change what states are computed with.

    It is empty if the engine has the checkpoint's own configuration. Otherwise it is made of the
    resulting configuration, however that was given: by ``--hf-overrides``, also as a function, or
    by another ``--hf-config-path`` or format.
    """
    model, changed = config.model_config, dict[str, Any]()
    config_format = model.config_format
    overridden = model.hf_overrides or model.hf_config_path or model.disable_sliding_window
    if overridden or getattr(config_format, "value", config_format) != "auto":
        own, in_use = read(model, False), read(model, True)
        if _stable(own) != (used := _stable(in_use)):
            changed["config"] = used
    if model.quantization_config is not None:
        changed["quantization_config"] = _stable(model.quantization_config, ".quantization_config")
    # LongRoPE has other factors where longer prompts may come (`phi3_long_rope_scaled_rope`).
    short_tokens = getattr(model.hf_text_config, "original_max_position_embeddings", None)
    if isinstance(short_tokens, int) and model.max_model_len > short_tokens:
        changed["long"] = True
    if pruned := getattr(model.multimodal_config, "video_pruning_rate", None):
        changed["video_pruning"] = [model.multimodal_config.video_pruning_method, pruned]
    if getattr(config.lora_config, "enable_tower_connector_lora", False):
        changed["tower_lora"] = True
    text = json.dumps(changed, sort_keys=True)
    return f"+{hashlib.sha256(text.encode()).hexdigest()[:16]}" if changed else ""


def hf_config(model: ModelConfig, overridden: bool) -> Config | None:
    """Return the model's configuration as vLLM makes it, ``overridden`` by settings or not.

    It is read anew, because models change the engine's object while they are loaded, and a
    scheduler in a process of its own has it unchanged. None: the checkpoint has no configuration.
    """
    from vllm.transformers_utils.config import get_config, get_hf_text_config

    name, revision, kind, overrides = model.model, model.revision, "auto", {}
    if overridden:
        name = model.hf_config_path or name
        revision = config_revision(model) or revision
        kind, overrides = model.config_format, model.hf_overrides
    function = overrides if callable(overrides) else None
    words = {} if callable(overrides) else overrides
    try:
        config = get_config(
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
    override_config(model, config, nested)
    text = get_hf_text_config(config)
    if (overridden and model.disable_sliding_window) or not getattr(text, "sliding_window", None):
        text.sliding_window = None
    made: Config = config.to_dict()
    return made


def _stable(value: Any, path: str = "") -> Any:
    """Return a value in a JSON form that is the same in all processes, without `NO_STATE`.

    Raises `EngineUnsupportedError` for a value that has no such form.
    """
    if is_dataclass(value) and not isinstance(value, type):
        value = {field.name: getattr(value, field.name) for field in fields(value)}
    if isinstance(value, Mapping):
        kept = {str(key): item for key, item in value.items()}
        if "quantization" not in path:
            kept = {key: item for key, item in kept.items() if key not in NO_STATE}
        if kept.get("rope_type") in _WRITTEN_OVER:
            kept["rope_type"] = "yarn"
        return {key: _stable(item, f"{path}.{key}") for key, item in sorted(kept.items())}
    if isinstance(value, list | tuple):
        return [_stable(item, path) for item in value]
    if isinstance(value, set | frozenset):
        return sorted((_stable(item, path) for item in value), key=json.dumps)
    if isinstance(value, Enum):
        return _stable(value.value, path)
    if isinstance(value, torch.dtype):
        return str(value)
    if value is None or isinstance(value, bool | int | float | str):
        return value
    raise EngineUnsupportedError(
        f"the model's configuration has a {type(value).__name__} at {path[1:] or 'its root'}, "
        f"which has no form that two engines can compare: set model_revision"
    )


# -- weights that are replaced --------------------------------------------------------------------

HARMLESS = frozenset(
    {
        "compute_weight_checksums",
        "init_weight_transfer_engine",
        "profile",
        "shutdown_weight_transfer_engine",
        "synchronize_device",
    }
)
"""Calls of vLLM's own entry points to workers that replace no weights."""
UNKNOWN_PATH = "\0"
"""Stands for the path of weights after vLLM's configuration was changed at its workers."""


class Weights:
    """The weights of one engine. Belongs to the scheduler's thread, which serves vLLM's calls too.

    vLLM does not tell connectors when weights are replaced. Every call that may replace them goes
    through ``EngineCore.collective_rpc``: ``reload_weights``, the calls of ``/update_weights``, and
    calls of an operator's own. So these calls are watched, and all count but those in `HARMLESS`.

    ::

        known      a call may replace the weights -> unknown: nothing is handed over
        unknown    the call was reload_weights, or a version of the weights is set, and nothing that
                   the earlier weights have computed is left in vLLM's cache -> known
    """

    def __init__(
        self,
        first: str,
        incarnation: str,
        checkpoint: Callable[[str], str],
        cache_is_empty: Callable[[], bool],
    ) -> None:
        """Begin with the revision ``first``; empty: it is unknown.

        ``incarnation`` makes words that no other engine uses. ``checkpoint`` returns the revision
        of weights that were loaded from a path (empty: from where they were loaded first), or "".
        ``cache_is_empty`` returns whether vLLM keeps nothing that it has computed.
        """
        self.known = True
        """Whether states may be handed over."""
        self.revision = first
        """The revision of the states that may be handed over, now or last."""
        self.on_replaced: Callable[[str], None] = lambda _: None
        """Called when the weights become unknown, with a revision that no other engine has."""
        self.on_known: Callable[[str], None] = lambda _: None
        """Called with the revision when it is known again."""
        self._first, self._incarnation = first, incarnation
        self._checkpoint, self._cache_is_empty = checkpoint, cache_is_empty
        self._path, self._word = "", first
        self._replaced = 0
        self._versions: set[str] = set()
        self._log = get_logger("restow.vllm")

    def watch(self, core: Any) -> None:
        """Watch the calls of an engine core to its workers."""
        watch_calls(core, self._called, self._versioned)

    def _called(
        self,
        method: str | Callable[..., Any],
        call: Callable[[], Any],
        args: Sequence[Any],
        kwargs: Mapping[str, Any],
    ) -> Any:
        if method in HARMLESS:
            return call()
        self.lose(getattr(method, "__name__", str(method)))
        done = call()
        if method == "reload_weights":
            self._reloaded(*args, **kwargs)
        elif method == "update_config":
            self._path = UNKNOWN_PATH
        return done

    def lose(self, why: str) -> None:
        """Note that the weights may be others from now on."""
        self._replaced += 1
        self.known, self._word = False, ""
        self._log.warning("the weights may be replaced: nothing is handed over", by=why)
        self.on_replaced(f"unknown {self._incarnation} {self._replaced}")

    def look(self) -> bool:
        """Return whether states may be handed over, possibly since just now."""
        if not self.known and self._word and self._cache_is_empty():
            self.known, self.revision = True, self._word
            self._log.info("the weights are known: states are handed over", revision=self._word)
            self.on_known(self._word)
        return self.known

    def _reloaded(
        self,
        weights_iterator: Any = None,
        weights_path: str | None = None,
        is_checkpoint_format: bool = True,
    ) -> None:
        if weights_iterator is None and is_checkpoint_format:
            self._path = weights_path or self._path
            self._word = "" if self._path == UNKNOWN_PATH else self._checkpoint(self._path)
        self.look()

    def _versioned(self, version: str) -> None:
        """Note a version that was set. A new version names the weights that replaced others."""
        if not self._word and version not in self._versions:
            self._word = f"{self._first}@{version}"
        self._versions.add(version)
        self.look()
