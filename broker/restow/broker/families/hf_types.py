"""The types that a model's states were asked for in."""

from __future__ import annotations

from dataclasses import dataclass

from restow.broker.families.hf_keys import Keys
from restow.broker.families.scales import Scales
from restow.broker.families.specs import AttentionSpec
from restow.broker.layout import DType


@dataclass(frozen=True, slots=True)
class Types:
    """The types that were asked for; a recurrent state's may be left to the family."""

    kv: DType
    conv: DType
    ssm: DType | None
    scales: Scales

    def attention(self, kv_heads: int, head_dim: int) -> AttentionSpec:
        """Keys and values of so many heads."""
        return AttentionSpec(0, kv_heads, head_dim, self.kv, scales=self.scales)

    def state(self, keys: Keys, key: str = "", unless_named: DType | None = None) -> DType:
        """The type of recurrent states; vLLM's "auto" is that of the conv states."""
        return self.ssm or keys.dtype(key, self.conv, unless_named)
