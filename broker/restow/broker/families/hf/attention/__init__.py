"""Models with attention alone: `MODELS` by their ``model_type``."""

from restow.broker.families.hf.attention.alike import ALIKE
from restow.broker.families.hf.attention.nested import NESTED
from restow.broker.families.hf.attention.uneven import UNEVEN
from restow.broker.families.hf.layers import ModelTable

MODELS: ModelTable = {**ALIKE, **UNEVEN, **NESTED}

__all__ = ["MODELS"]
