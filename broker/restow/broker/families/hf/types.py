"""`Types` holds the types that a model's states were asked for in."""

from __future__ import annotations

from dataclasses import dataclass

from restow.broker.families.hf.keys import Keys
from restow.broker.families.hf.kv_types import KvTypes
from restow.broker.families.recurrent import Mixer
from restow.broker.families.specs import AttentionSpec, MlaSpec, Scales
from restow.broker.layout import DType


@dataclass(frozen=True, slots=True)
class Types:
    """Holds the types that were asked for; a recurrent state's may be left to the family.

    Those of keys and values are found when a layer has some.
    """

    keys_and_values: KvTypes
    conv: DType
    ssm: DType | None
    weights: DType

    @property
    def kv(self) -> DType:
        """The type of keys and values of heads."""
        return self.keys_and_values.attention()[0]

    @property
    def scales(self) -> Scales:
        """The scales of keys and values of heads."""
        return self.keys_and_values.attention()[1]

    def attention(self, kv_heads: int, head_dim: int) -> AttentionSpec:
        """Return a layer with keys and values of so many heads."""
        return AttentionSpec(0, kv_heads, head_dim, self.kv, scales=self.scales)

    def latent(self, latent_dim: int) -> MlaSpec:
        """Return a layer with one latent vector a token."""
        return MlaSpec(0, latent_dim, *self.keys_and_values.latents())

    def mixer(self, keys: Keys, hidden: int, bias_key: str) -> Mixer:
        """Return what an in-projection multiplies, or why its product is not the window alone."""
        obstacle, found = "", self.keys_and_values.found
        if keys.config.get(bias_key):
            # Taps before the prompt are zero, and the product of zeros with a bias is not.
            obstacle = f"the in-projection has a bias ({bias_key})"
        if found.config:
            obstacle = f"the in-projection is quantized ({found.place or found.file})"
        return Mixer(keys.number("hidden_size", hidden), self.weights, obstacle)

    def state(self, keys: Keys, key: str = "", unless_named: DType | None = None) -> DType:
        """Return the type of recurrent states; vLLM's "auto" is that of the conv states."""
        return self.ssm or keys.dtype(key, self.conv, unless_named)
