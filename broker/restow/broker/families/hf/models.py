"""`MODELS` says, by ``model_type``, what reads a config in the model's own words.

Each ``model_type`` has its own names for the numbers of its layers' states, and defaults.
"""

from __future__ import annotations

from restow.broker.families.hf import (
    attention,
    latent_models,
    linear_models,
    mamba_models,
)
from restow.broker.families.hf.layers import ModelTable

MODELS: ModelTable = {
    **attention.MODELS,
    **latent_models.MODELS,
    **linear_models.MODELS,
    **mamba_models.MODELS,
}
