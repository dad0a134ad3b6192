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
"""

import torch
from torch import Tensor
from transformers import DynamicCache, NemotronHConfig


def export_state(cache: DynamicCache, config: NemotronHConfig) -> dict[str, Tensor]:
    """Return copies of everything that ``cache`` holds of its one sequence.

    Copies, because decoding changes the conv and SSM states of a cache in place.

    Returns:
        For each attention layer ``i``: ``layers.{i}.k`` and ``layers.{i}.v`` [token, head, dim].
        For each Mamba layer ``i``: ``layers.{i}.conv.x`` [channel, tap], ``layers.{i}.conv.B``
        and ``layers.{i}.conv.C`` [group, state, tap] with ``conv_kernel - 1`` taps, the oldest
        first, and ``layers.{i}.ssm`` [head, dim, state].
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

    Only the cache's own ``update`` methods are used, because they set its flags too: a Mamba
    layer without ``has_previous_state`` would silently start from zeros.

    Args:
        state: Tensors named and shaped as :func:`export_state` returns them.
        tokens: Number of tokens that the state stands for.
        config: Shape of the model.
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
