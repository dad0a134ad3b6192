"""`Types` holds the types that a model's states were asked for in."""

from __future__ import annotations

from dataclasses import dataclass

from restow.broker.families.hf.keys import Keys
from restow.broker.families.parts import Mixer
from restow.broker.families.scales import Scales
from restow.broker.families.specs import AttentionSpec
from restow.broker.layout import DType


@dataclass(frozen=True, slots=True)
class Types:
    """Holds the types that were asked for; a recurrent state's may be left to the family."""

    kv: DType
    conv: DType
    ssm: DType | None
    scales: Scales
    weights: DType

    def attention(self, kv_heads: int, head_dim: int) -> AttentionSpec:
        """Return a layer with keys and values of so many heads."""
        return AttentionSpec(0, kv_heads, head_dim, self.kv, scales=self.scales)

    def mixer(self, keys: Keys, hidden: int, bias_key: str) -> Mixer:
        """Return what an in-projection multiplies, or why its product is not the window alone."""
        obstacle = ""
        if keys.config.get(bias_key):
            # Taps before the prompt are zero, and the product of zeros with a bias is not.
            obstacle = f"the in-projection has a bias ({bias_key})"
        if keys.has("quantization_config"):
            obstacle = "the in-projection is quantized (quantization_config)"
        return Mixer(keys.number("hidden_size", hidden), self.weights, obstacle)

    def state(self, keys: Keys, key: str = "", unless_named: DType | None = None) -> DType:
        """Return the type of recurrent states; vLLM's "auto" is that of the conv states."""
        return self.ssm or keys.dtype(key, self.conv, unless_named)
