"""The values of a model's state, and the part of them that a rank of SGLang holds.

Written down from SGLang's own rules (`Mamba2StateShape`, `MHATokenToKVPool`), without Restow's
families and planner, because it is the measure for both.
"""

from __future__ import annotations

import json
import zlib
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

Array = np.ndarray[Any, np.dtype[np.float32]]


@dataclass(frozen=True)
class Sizes:
    """A model's sizes, as its config has them."""

    config: dict[str, Any]
    truth: Path | None = None
    """A folder with states that somebody computed, by prompt; None: values are drawn."""

    @classmethod
    def of(cls, folder: Path, truth: str = "") -> Sizes:
        config = json.loads((folder / "config.json").read_text())
        return cls(config, Path(truth) if truth else None)

    def whole(self, name: str, tokens: list[int], *shape: int) -> Array:
        """Return a field of the whole model, after a prompt."""
        if self.truth is None:
            return drawn(name, tokens, *shape)
        with np.load(file_of(self.truth, tokens)) as fields:
            found: Array = fields[name].reshape(shape)
            return found

    @property
    def attention(self) -> list[int]:
        kinds = self.config.get("layers_block_type")
        if kinds is None:
            return list(range(self.config["num_hidden_layers"]))
        return [layer for layer, kind in enumerate(kinds) if kind == "full_attention"]

    @property
    def windowed(self) -> list[int]:
        kinds = self.config.get("layer_types", ())
        return [layer for layer, kind in enumerate(kinds) if kind == "sliding_attention"]

    @property
    def mamba(self) -> list[int]:
        kinds = self.config.get("layers_block_type", ())
        return [layer for layer, kind in enumerate(kinds) if kind == "linear_attention"]

    @property
    def channels(self) -> int:
        return int(self.config["mamba_num_heads"] * self.config["mamba_head_dim"])

    def keys(self, layer: int, part: str, tokens: list[int], tp: int, rank: int) -> Array:
        """Return keys or values of a rank's heads: ``[token, head, dim]``."""
        heads = self.config["num_key_value_heads"]
        whole = self.whole(f"{layer}.{part}", tokens, len(tokens), heads, self.config["head_dim"])
        return whole[:, heads_of(heads, tp, rank)]

    def window(self, layer: int, tokens: list[int], tp: int, rank: int) -> Array:
        """Return a rank's conv window, ``[channel, tap]``: its x, then its B, then its C."""
        taps, groups = self.config["conv_kernel"] - 1, self.config["n_groups"]
        state = self.config["ssm_state_size"]
        x = self.whole(f"{layer}.x", tokens, self.channels, taps)
        share = self.channels // tp
        parts = [x[rank * share : (rank + 1) * share]]
        for name in "BC":
            part = self.whole(f"{layer}.{name}", tokens, groups, state, taps)
            parts.append(part[heads_of(groups, tp, rank)].reshape(-1, taps))
        return np.concatenate(parts)

    def state(self, layer: int, tokens: list[int], tp: int, rank: int) -> Array:
        """Return a rank's recurrent states, ``[head, dim, state]``."""
        heads, dim = self.config["mamba_num_heads"], self.config["mamba_head_dim"]
        whole = self.whole(f"{layer}.ssm", tokens, heads, dim, self.config["ssm_state_size"])
        return whole[heads_of(heads, tp, rank)]


def file_of(folder: Path, tokens: list[int]) -> Path:
    """Return where the state after a prompt lies."""
    return folder / f"{zlib.crc32(np.array(tokens, '<u4').tobytes()):08x}.npz"


def heads_of(count: int, tp: int, rank: int) -> slice:
    """Return a rank's share of heads or groups: its slice, or the one that it shares."""
    if count % tp == 0:
        return slice(rank * count // tp, (rank + 1) * count // tp)
    return slice(rank * count // tp, rank * count // tp + 1)


def drawn(name: str, tokens: list[int], *shape: int) -> Array:
    """Draw the values of a field for a prompt; the first axis of keys and values is the token."""
    seed = zlib.crc32(name.encode())
    if name[-1] in "kv":  # an entry depends on the tokens up to its own
        rows, known = [], seed
        for token in tokens:
            known = zlib.crc32(token.to_bytes(4, "little"), known)
            rows.append(np.random.default_rng(known).standard_normal(shape[1:], np.float32))
        return np.stack(rows)
    whole = zlib.crc32(np.array(tokens, "<u4").tobytes(), seed)
    return np.random.default_rng(whole).standard_normal(shape, np.float32)
