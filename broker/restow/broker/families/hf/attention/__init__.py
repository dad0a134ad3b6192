"""Models with attention alone: `MODELS` by ``model_type``, `NESTED` with these in a part."""

from restow.broker.families.hf.attention.alike import ALIKE
from restow.broker.families.hf.attention.nested import NESTED
from restow.broker.families.hf.attention.uneven import UNEVEN
from restow.broker.families.hf.layers import ModelTable

MODELS: ModelTable = {**ALIKE, **UNEVEN}

__all__ = ["MODELS", "NESTED"]
