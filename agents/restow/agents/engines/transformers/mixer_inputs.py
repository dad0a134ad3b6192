"""`kept_inputs` keeps what Mamba layers read, `conv_weights` are what that is multiplied with."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from transformers import NemotronHConfig, NemotronHForCausalLM

from restow.agents.engines.transformers.model_state import conv_fields
from restow.broker.errors import RestowError
from restow.kernels.host_product import padded_rows, repeats


class RebuildingInexactError(
    RestowError, status="FAILED_PRECONDITION", reason="REBUILDING_INEXACT"
):
    """Windows that were rebuilt here would differ from those of a prefill in their last bits."""


@contextmanager
def kept_inputs(model: NemotronHForCausalLM) -> Iterator[dict[str, Tensor]]:
    """Run a prefill in this; afterwards the dict has ``layers.{i}.mixer_input`` [tap, hidden].

    These are the last ``conv_kernel - 1`` vectors that in-projections were given, the oldest first,
    zero before the prompt. A prompt shorter than `padded_rows` is padded for the in-projection
    alone: so that each row is computed as in a long prompt, and as D will compute it.
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
                f"few rows than in one of a whole prompt: offer neither mixer inputs nor "
                f"projections",
                layer=index,
            )


def in_projections(model: NemotronHForCausalLM) -> Iterator[tuple[int, nn.Linear]]:
    """The in-projection of each Mamba layer, by the layer's number."""
    for index, kind in enumerate(model.config.layers_block_type or ()):
        if kind == "linear_attention":
            yield index, model.model.layers[index].mixer.in_proj


def conv_weights(model: NemotronHForCausalLM) -> dict[str, Tensor]:
    """For each conv field the rows of the in-projection that make it, ``[*channels, hidden]``."""
    config: NemotronHConfig = model.config
    inner = config.mamba_num_heads * config.mamba_head_dim
    found: dict[str, Tensor] = {}
    for index, linear in in_projections(model):
        # The rows of the gate come first, those of the time steps last.
        rows = linear.weight.detach()[inner : linear.out_features - config.mamba_num_heads]
        found |= conv_fields(f"layers.{index}", rows, config)
    return found


class _Hooks:
    """Of one in-projection: what it is given is kept, padded, and the padding taken off again."""

    def __init__(self, kept: dict[str, Tensor], name: str, taps: int) -> None:
        self._kept, self._name, self._taps = kept, name, taps
        self._tokens = 0

    def before(self, _: nn.Module, given: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
        (hidden,) = given
        self._tokens = hidden.shape[1]
        last = hidden[0, -self._taps :]
        window = torch.zeros((self._taps, hidden.shape[2]), dtype=hidden.dtype)
        window[self._taps - len(last) :] = last
        self._kept[self._name] = window
        missing = max(padded_rows(self._tokens) - self._tokens, 0)
        return (nn.functional.pad(hidden, (0, 0, 0, missing)),)

    def after(self, _: nn.Module, __: Any, product: Tensor) -> Tensor:
        return product[:, : self._tokens]
