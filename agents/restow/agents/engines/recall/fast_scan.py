"""The whole Mamba2 mixer for training: one quadratic block in place of the chunked scan.

transformers' reference scan expands B and C to every head and cuts the sequence into chunks.
For sequences below a hundred tokens the quadratic form is several times faster on a CPU, and
training needs no state at the end.  It computes the same function as the reference.
"""

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor
from torch.nn import functional
from transformers.models.nemotron_h import modeling_nemotron_h


def mixer_output(
    zxbcdt: Tensor,
    conv1d_weight: Tensor,
    conv1d_bias: Tensor,
    dt_bias: Tensor,
    A: Tensor,
    D: Tensor,
    *,
    rmsnorm_weight: Tensor,
    rmsnorm_eps: float,
    outproj_weight: Tensor,
    headdim: int,
    ngroups: int,
    **_: object,
) -> Tensor:
    """Return the output of a mixer, [sequence, token, hidden].

    Args:
        zxbcdt: Projected input, [sequence, token, z | x | B | C | dt].
        conv1d_weight: [channel, tap].
        conv1d_bias: [channel].
        dt_bias: [head].
        A: Negative decay rates, [head].
        D: Skip weights, [head].
        rmsnorm_weight: Weight of the gated norm, [head * dim].
        rmsnorm_eps: Its epsilon.
        outproj_weight: [hidden, head * dim].
        headdim: Size of a head.
        ngroups: Number of B/C groups.
    """
    batch, tokens, _width = zxbcdt.shape
    heads = A.shape[0]
    channels, taps = conv1d_weight.shape
    inner = heads * headdim
    gate, xbc, dt = torch.split(zxbcdt, [inner, channels, heads], dim=-1)

    padded = functional.pad(xbc, (0, 0, taps - 1, 0))
    convolved = conv1d_bias + sum(
        padded[:, tap : tap + tokens] * conv1d_weight[:, tap] for tap in range(taps)
    )
    grouped_width = (channels - inner) // 2
    x, b, c = torch.split(functional.silu(convolved), [inner, grouped_width, grouped_width], dim=-1)
    x = x.view(batch, tokens, heads, headdim).transpose(1, 2)  # [sequence, head, token, dim]
    b = b.view(batch, tokens, ngroups, -1).permute(0, 2, 3, 1)  # [sequence, group, state, token]
    c = c.view(batch, tokens, ngroups, -1).transpose(1, 2)  # [sequence, group, token, state]

    step = functional.softplus(dt + dt_bias).transpose(1, 2)  # [sequence, head, token]
    log_decay = (step * A[:, None]).cumsum(-1)
    future = torch.ones(tokens, tokens, dtype=torch.bool).triu(1)
    decay = (log_decay[..., :, None] - log_decay[..., None, :]).masked_fill(future, -torch.inf)
    mixing = (c @ b)[:, :, None] * decay.exp().view(batch, ngroups, -1, tokens, tokens)
    y = mixing.view(batch, heads, tokens, tokens) @ (x * step[..., None]) + x * D[:, None, None]

    y = y.transpose(1, 2).reshape(batch, tokens, inner) * functional.silu(gate)
    grouped = y.view(batch, tokens, ngroups, -1)
    normed = grouped * torch.rsqrt(grouped.pow(2).mean(-1, keepdim=True) + rmsnorm_eps)
    return functional.linear(rmsnorm_weight * normed.view_as(y), outproj_weight)


@contextmanager
def fast_training() -> Iterator[None]:
    """Let mixers in training mode without a cache use :func:`mixer_output`.

    This is the place where transformers calls the fused CUDA kernel if there is one.
    """
    name = "mamba2_split_conv1d_scan_combined"
    original = getattr(modeling_nemotron_h, name)
    setattr(modeling_nemotron_h, name, mixer_output)
    try:
        yield
    finally:
        setattr(modeling_nemotron_h, name, original)
