"""Mends two faults of vLLM for the CPU in its workers, where a test can't do without.

Decoding, its convolution takes a state's last K-1 rows, whatever was accepted. The state was
prefilled into the first K-1, and a step's window begins after the tokens that were accepted before
it (`num_accepted_tokens - 1`), as `ops/causal_conv1d.py` has it on every other device.

Its second pipeline stage has nowhere to put what the first one sends: others make room in the
profiling run, which it leaves out.
"""

from __future__ import annotations

from typing import Any

import torch
from torch.nn import functional
from vllm.model_executor.layers.mamba import mamba_mixer2
from vllm.v1.worker.gpu_model_runner import GPUModelRunner


def _update_conv(
    x: torch.Tensor,
    conv_state: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    activation: str,
    *,
    conv_state_indices: torch.Tensor,
    num_accepted_tokens: torch.Tensor | None,
    query_start_loc: torch.Tensor | None,
    **_: Any,
) -> torch.Tensor:
    """Update the conv states, and return the outputs.

    `x` is [tokens, channels], `conv_state` [slots, channels, rows], `weight` [channels, K].
    """
    kept, found = weight.shape[1] - 1, torch.empty_like(x)
    slots = conv_state_indices.reshape(len(conv_state_indices), -1)[:, 0].tolist()
    ends = range(len(x) + 1) if query_start_loc is None else query_start_loc.tolist()
    accepted = [1] * len(slots) if num_accepted_tokens is None else num_accepted_tokens.tolist()
    for slot, first, end, count in zip(slots, ends, ends[1:], accepted, strict=False):
        window = conv_state[slot, :, count - 1 : count - 1 + kept]
        rows = torch.cat([window, x[first:end].T], dim=1)
        said = functional.conv1d(rows[None], weight[:, None], bias, groups=len(weight))[0].T
        found[first:end] = functional.silu(said)
        conv_state[slot, :, : kept + end - first - 1] = rows[:, 1:]
    return found


_gather = GPUModelRunner.sync_and_gather_intermediate_tensors


def _gather_into_room(self: GPUModelRunner, *arguments: Any, **named: Any) -> Any:
    if self.intermediate_tensors is None:
        self.intermediate_tensors = self.model.make_empty_intermediate_tensors(
            batch_size=self.max_num_tokens, dtype=self.model_config.dtype, device=self.device
        )
    return _gather(self, *arguments, **named)


mamba_mixer2.causal_conv1d_update = _update_conv
GPUModelRunner.sync_and_gather_intermediate_tensors = _gather_into_room


class MendedWorkers:
    """Named to vLLM as ``worker_extension_cls``, so that every worker imports this module."""
