"""Ask vLLM's MoRIIOConnector (READ) whether it serves a geometry, by its own checks."""

from __future__ import annotations

from importlib.metadata import version
from pathlib import Path
from types import SimpleNamespace

import torch
from vllm.distributed.kv_transfer.kv_connector.v1 import ssm_conv_transfer_utils as conv
from vllm.distributed.kv_transfer.kv_connector.v1.moriio import moriio_layout

from .asking import Asked, Copied, NotAskedError, RefusedError, answer_all
from .sources import take
from .vllm_layers import kv_heads, mamba_spec, own_words

# The connector's module imports packages which vLLM does not install.
CONNECTOR = take(
    Path(moriio_layout.__file__).with_name("moriio_connector.py"),
    "validate_moriio_heterogeneous_tp_kv_heads",
    "_validate_hybrid_speculation",
    known={"MoRIIOError": RefusedError},
)
MTP = SimpleNamespace(method="mtp", use_dspark=lambda: False)


def answer(asked: Asked) -> Copied:
    """Return why the connector refuses; what it does serve is not in the table."""
    try:
        if asked.attention:
            tps = asked.d_tp, asked.p_tp
            CONNECTOR.validate_moriio_heterogeneous_tp_kv_heads(*tps, kv_heads(asked), False)
        else:
            _check_states(asked)
    except (AssertionError, NotImplementedError, ValueError) as error:
        raise own_words(error) from error
    raise NotAskedError("it serves equal TP, and heads that both sides replicate")


def _check_states(asked: Asked) -> None:
    """Check as for a request: the speculation, then the places of a layer's states in its page."""
    speculates = asked.p_drafts or asked.d_drafts
    config = SimpleNamespace(speculative_config=MTP if speculates else None)
    CONNECTOR._validate_hybrid_speculation(config)
    spec = mamba_spec(asked, asked.d_tp, asked.d_drafts)
    states = (
        torch.zeros(1, *shape, dtype=dtype)
        for shape, dtype in zip(spec.shapes, spec.dtypes, strict=True)
    )
    split = conv.derive_mamba_conv_split(spec, asked.d_tp)
    ratio = asked.d_tp // asked.p_tp if asked.d_tp >= asked.p_tp else -(asked.p_tp // asked.d_tp)
    moriio_layout.build_mamba_offset_template(*states, split, ratio)


if __name__ == "__main__":
    answer_all(version("vllm"), answer)
