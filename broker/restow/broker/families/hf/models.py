"""`MODELS` says, by ``model_type``, what reads a config in the model's own words.

`WHOLES` are the types of models that have such a one in a part of theirs. `typed` finds the
``model_type`` of files that have none.

Each ``model_type`` has its own names for the numbers of its layers' states, and defaults.
"""

from __future__ import annotations

from restow.broker.families.hf import (
    attention,
    latent_models,
    linear_models,
    mamba_models,
    sparse_models,
)
from restow.broker.families.hf.keys import Keys
from restow.broker.families.hf.layers import ModelTable, WholeTable

MODELS: ModelTable = {
    **attention.MODELS,
    **latent_models.MODELS,
    **linear_models.MODELS,
    **mamba_models.MODELS,
    **sparse_models.MODELS,
}

WHOLES: WholeTable = {
    **attention.NESTED,
    **latent_models.WHOLES,
    **linear_models.WHOLES,
    **mamba_models.WHOLES,
}

_BY_ARCHITECTURE = {
    "LongcatFlashForCausalLM": "longcat_flash",
    "LongcatFlashNgramForCausalLM": "longcat_flash",
}
"""Checkpoints whose config has an architecture alone (vLLM `_ARCHITECTURE_TO_MODEL_TYPE`)."""


def typed(keys: Keys) -> Keys:
    """Return the config with the ``model_type`` that vLLM gives one without it, else as it is.

    That is one of `_BY_ARCHITECTURE`, or Mistral's own ``params.json`` of a model with latents
    (Mistral Large 3), which vLLM serves as a DeepSeek-V3.
    """
    if keys.has("model_type"):
        return keys
    names = keys.config.get("architectures")
    for name in names if isinstance(names, list | tuple) else ():
        if name in _BY_ARCHITECTURE:
            return keys.put("model_type", _BY_ARCHITECTURE[name], "architectures")
    if keys.has("n_layers") and keys.has("kv_lora_rank"):
        renamed = keys.put("num_hidden_layers", keys.number("n_layers"), "n_layers")
        renamed.assumed("model_type", "deepseek_v3", "Mistral's own form of a model with latents")
        return renamed.put("model_type", "deepseek_v3")
    return keys
