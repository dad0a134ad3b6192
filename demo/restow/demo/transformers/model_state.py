"""Export a Nemotron-H model's state as named tensors, and build a cache from such tensors.

transformers keeps one sequence's state in a ``DynamicCache`` with a layer for each model layer:

=================  ====================================  ============================
layer              holds                                 shape
=================  ====================================  ============================
full_attention     ``keys``, ``values``                  [1, head, token, dim]
linear_attention   ``conv_states[0]``, newest tap last   [1, x | B | C, conv_kernel]
linear_attention   ``recurrent_states[0]``               [1, head, dim, state]
mlp                nothing                               --
=================  ====================================  ============================

A causal convolution with ``conv_kernel`` taps reads ``conv_kernel - 1`` earlier inputs, so column
0 of ``conv_states`` is dead: it is not exported, and an imported cache has zeros there.

Windows can also be rebuilt at D: `kept_inputs` keeps the inputs of Mamba layers, and `conv_weights`
returns the weights that they are multiplied with.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from transformers import DynamicCache, NemotronHConfig, NemotronHForCausalLM

from restow.broker.errors import RestowError
from restow.kernels.host_product import padded_rows, repeats


def export_state(cache: DynamicCache, config: NemotronHConfig) -> dict[str, Tensor]:
    """Return copies of everything that ``cache`` holds of its sequence.

    They are copies because decoding changes the conv and SSM states of a cache in place.

    Each attention layer ``i`` has ``layers.{i}.k`` and ``layers.{i}.v`` [token, head, dim]. Each
    Mamba layer ``i`` has ``layers.{i}.conv.x`` [channel, tap], ``layers.{i}.conv.B`` and
    ``layers.{i}.conv.C`` [group, state, tap] with ``conv_kernel - 1`` taps, the oldest first, and
    ``layers.{i}.ssm`` [head, dim, state].
    """
    views: dict[str, Tensor] = {}
    for index, kind in enumerate(config.layers_block_type or ()):
        name = f"layers.{index}"
        if kind == "full_attention":
            layer = cache.layers[index]
            views[f"{name}.k"] = layer.keys[0].transpose(0, 1)
            views[f"{name}.v"] = layer.values[0].transpose(0, 1)
        elif kind == "linear_attention":
            conv, ssm = cache.get_conv_state(index), cache.get_recurrent_state(index)
            if conv is None or ssm is None:
                raise ValueError(f"layer {index} has no state yet: prefill before exporting")
            views |= conv_fields(name, conv[0, :, 1:], config)
            views[f"{name}.ssm"] = ssm[0]
    return {name: view.clone(memory_format=torch.contiguous_format) for name, view in views.items()}


def import_state(state: dict[str, Tensor], tokens: int, config: NemotronHConfig) -> DynamicCache:
    """Return a new cache that continues after ``tokens`` tokens; it shares no memory.

    ``state`` has the names and shapes that `export_state` returns. Only the cache's own ``update``
    methods are used, because they set its flags too: a Mamba layer without ``has_previous_state``
    would silently start from zeros.
    """
    cache = DynamicCache(config=config)
    for index, kind in enumerate(config.layers_block_type or ()):
        name = f"layers.{index}"
        if kind == "full_attention":
            k, v = state[f"{name}.k"], state[f"{name}.v"]
            if k.shape[0] != tokens or v.shape[0] != tokens:
                raise ValueError(
                    f"{name} holds {k.shape[0]} keys and {v.shape[0]} values, expected {tokens}"
                )
            cache.update(_as_heads(k), _as_heads(v), index)
        elif kind == "linear_attention":
            x, b, c = (state[f"{name}.conv.{part}"] for part in ("x", "B", "C"))
            taps = torch.cat([x, b.flatten(0, 1), c.flatten(0, 1)])
            # Given one column too few, the cache pads the dead column 0 with zeros.
            cache.update_conv_state(taps[None], index, conv_kernel_size=config.conv_kernel)
            cache.update_recurrent_state(state[f"{name}.ssm"][None], index)
    return cache


def conv_fields(name: str, rows: Tensor, config: NemotronHConfig) -> dict[str, Tensor]:
    """Cut ``rows`` [x | B | C, ...] into the conv fields of the layer ``name``: views."""
    inner = config.mamba_num_heads * config.mamba_head_dim
    grouped = config.n_groups * config.ssm_state_size
    x, b, c = torch.split(rows, [inner, grouped, grouped])
    shape = (config.n_groups, config.ssm_state_size, *rows.shape[1:])
    return {
        f"{name}.conv.x": x,
        f"{name}.conv.B": b.reshape(shape),
        f"{name}.conv.C": c.reshape(shape),
    }


def _as_heads(rows: Tensor) -> Tensor:
    """Return [token, head, dim] as the cache's [1, head, token, dim]."""
    return rows.transpose(0, 1)[None]


class RebuildingInexactError(
    RestowError, status="FAILED_PRECONDITION", reason="REBUILDING_INEXACT"
):
    """Windows that were rebuilt here would differ from those of a prefill in their last bits."""


@contextmanager
def kept_inputs(model: NemotronHForCausalLM) -> Iterator[dict[str, Tensor]]:
    """Keep mixer inputs of a prefill within: ``layers.{i}.mixer_input`` [tap, hidden].

    These are the last ``conv_kernel - 1`` inputs of in-projections, the oldest first, zero before
    the prompt. A prompt shorter than `padded_rows` is padded for the in-projection alone, so that
    each row is computed as in a long prompt, and as D will compute it.
    """
    kept: dict[str, Tensor] = {}
    with ExitStack() as stack:
        for index, linear in in_projections(model):
            hooks = _Hooks(kept, f"layers.{index}.mixer_input", model.config.conv_kernel - 1)
            before = linear.register_forward_pre_hook(hooks.before)
            stack.callback(before.remove)
            stack.callback(linear.register_forward_hook(hooks.after).remove)
        yield kept


def check_exact(model: NemotronHForCausalLM) -> None:
    """Try every in-projection on this processor. Raises `RebuildingInexactError`."""
    for index, linear in in_projections(model):
        if not repeats(linear.weight.detach()):
            raise RebuildingInexactError(
                f"layer {index}: this processor gives a row of the in-projection "
                f"{tuple(linear.weight.shape)} in {linear.weight.dtype} other bits in a product of "
                f"few rows than in a product of a whole prompt: offer neither mixer inputs nor "
                f"projections",
                layer=index,
            )


def in_projections(model: NemotronHForCausalLM) -> Iterator[tuple[int, nn.Linear]]:
    """Yield the in-projection of each Mamba layer, with the layer's number."""
    for index, kind in enumerate(model.config.layers_block_type or ()):
        if kind == "linear_attention":
            yield index, model.model.layers[index].mixer.in_proj


def conv_weights(model: NemotronHForCausalLM) -> dict[str, Tensor]:
    """Return the rows of in-projections that make each conv field, ``[*channels, hidden]``."""
    config: NemotronHConfig = model.config
    inner = config.mamba_num_heads * config.mamba_head_dim
    weights: dict[str, Tensor] = {}
    for index, linear in in_projections(model):
        # The rows of the gate come first, and the rows of the time steps last.
        rows = linear.weight.detach()[inner : linear.out_features - config.mamba_num_heads]
        weights |= conv_fields(f"layers.{index}", rows, config)
    return weights


class _Hooks:
    """Hooks of an in-projection: they keep its input, pad it, and take the padding off again."""

    def __init__(self, kept: dict[str, Tensor], name: str, taps: int) -> None:
        self._kept, self._name, self._taps = kept, name, taps
        self._tokens = 0

    def before(self, _: nn.Module, inputs: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
        (hidden,) = inputs
        self._tokens = hidden.shape[1]
        last = hidden[0, -self._taps :]
        window = torch.zeros((self._taps, hidden.shape[2]), dtype=hidden.dtype)
        window[self._taps - len(last) :] = last
        self._kept[self._name] = window
        missing = max(padded_rows(self._tokens) - self._tokens, 0)
        return (nn.functional.pad(hidden, (0, 0, 0, missing)),)

    def after(self, _: nn.Module, __: Any, product: Tensor) -> Tensor:
        return product[:, : self._tokens]
