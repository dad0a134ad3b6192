"""Ask vLLM's NixlConnector (pull) what a worker of D reads, by its own methods.

A worker is made without its constructor, which opens NIXL, and is given the attributes that the
methods read; the memory of every rank is one page at address 0.
"""

from __future__ import annotations

from importlib.metadata import version
from types import SimpleNamespace
from typing import Any

import numpy as np
from vllm.distributed.kv_transfer.kv_connector.utils import EngineTransferInfo, TransferTopology
from vllm.distributed.kv_transfer.kv_connector.v1 import ssm_conv_transfer_utils as conv
from vllm.distributed.kv_transfer.kv_connector.v1.nixl import base_worker, metadata, tp_mapping
from vllm.v1.kv_cache_interface import FullAttentionSpec, MambaSpec

from .asking import Asked, Copied, Place, RefusedError, answer_all
from .vllm_layers import (
    channels,
    form,
    kv_heads,
    mamba_spec,
    own_words,
    page_bytes,
)

P = "the engine that prefilled"
LAYOUT = "LBHNC"

Worker: Any = type(
    "Worker",
    (base_worker.NixlBaseConnectorWorker,),
    {"__init__": lambda self, **known: self.__dict__.update(known), "__del__": lambda self: None},
)


def answer(asked: Asked) -> Copied:
    """Return what every rank of D reads, or why the connector refuses."""
    if _speculation(asked.p_drafts) != _speculation(asked.d_drafts):
        raise RefusedError("the compatibility hashes of P and D differ")
    try:
        copies = [
            place for rank in range(asked.d_tp) for place in _read(asked, _worker(asked, rank))
        ]
    except (AssertionError, NotImplementedError, RuntimeError, ValueError) as error:
        raise own_words(error) from error
    forms = form(asked, asked.p_drafts), form(asked, asked.d_drafts)
    mamba2 = asked.family == "mamba2"
    loaded = (channels(asked, asked.p_tp), channels(asked, asked.d_tp)) if mamba2 else None
    return Copied(*forms, page_bytes(asked), copies, loaded)


def _speculation(drafts: int) -> Any:
    """Return the parts of an MTP speculator that enter the compatibility hash."""
    speculator = SimpleNamespace(
        use_eagle=lambda: True,
        method="mtp",
        num_speculative_tokens=drafts,
        parallel_drafting=False,
        kv_cache_dtype=None,
        draft_model_config=SimpleNamespace(
            model="a model", revision=None, code_revision=None, hf_config=SimpleNamespace()
        ),
    )
    config = SimpleNamespace(
        speculative_config=speculator if drafts else None,
        cache_config=SimpleNamespace(cache_dtype="auto"),
    )
    return metadata._get_speculative_compatibility_factors(config)


def _worker(asked: Asked, rank: int) -> Any:
    """Make a rank of D."""
    split = _split(asked, asked.d_tp, asked.d_drafts)
    _, size_bytes = page_bytes(asked)
    topology = TransferTopology(
        tp_rank=rank,
        tp_size=asked.d_tp,
        block_size=asked.page_tokens,
        engine_id="the engine that decodes",
        is_mla=False,
        is_mamba=not asked.attention,
        total_num_kv_heads=kv_heads(asked),
        attn_backends=[],
    )
    return Worker(
        tp_rank=rank,
        transfer_topo=topology,
        device_id=0,
        dcp_size=1,
        use_mla=False,
        backend_name="FLASH_ATTN",
        kv_cache_layout=LAYOUT,
        use_host_buffer=False,
        enable_permute_local_kv=False,
        vllm_config=SimpleNamespace(cache_config=SimpleNamespace(enable_prefix_caching=False)),
        num_regions=1,
        region_names=[],
        region_group_ids=[0],
        region_num_blocks=[1],
        dst_num_blocks={P: 1},
        dst_region_group_ids={P: [0]},
        block_len_per_layer=[size_bytes],
        block_stride_per_layer=[size_bytes],
        _has_mamba=not asked.attention,
        _is_hma_required=not asked.attention,
        _group_spec_types=(FullAttentionSpec,)
        if asked.attention
        else (FullAttentionSpec, MambaSpec),
        _conv_decomp=split,
        _mamba_ssm_size=split.ssm_sizes if split else (0, 0),
        _logical_num_blocks=1,
        _physical_blocks_per_logical_kv_block=1,
        _uses_region_group_mapping=False,
        _ssm_region_indices=[],
        _scratch_region_indices=[],
        _head_sharded_draft_regions=set(),  # these three since 0.33
        _head_sharded_draft_kv_heads=None,
        _layer_specs={},
        _ple_region_index=None,
        _ple_group_index=None,
        _region_is_mla=[False],
        _transfer_layer_region_indices=(),
        _transfer_layer_group_ids=(),
        _transfer_layer_names=(),
    )


def _split(asked: Asked, tp: int, drafts: int) -> Any:
    if asked.attention:
        return None
    return conv.derive_mamba_conv_split(mamba_spec(asked, tp, drafts), tp)


def _read(asked: Asked, worker: Any) -> list[Place]:
    """Return the reads of one rank of D from each of its ranks of P."""
    theirs = _split(asked, asked.p_tp, asked.p_drafts)
    size_bytes, _ = page_bytes(asked)
    p_metadata = metadata.NixlAgentMetadata(
        engine_id=P,
        agent_metadata=b"",
        kv_caches_base_addr=[0],
        device_id=0,
        num_blocks=1,
        block_lens=[size_bytes],
        block_strides=[size_bytes],
        kv_cache_layout=LAYOUT,
        block_size=asked.page_tokens,
        ssm_sizes=theirs.ssm_sizes if theirs else (0, 0),
        attn_backend_name="FLASH_ATTN",
        physical_blocks_per_logical_kv_block=1,
    )
    info = EngineTransferInfo(
        remote_tp_size=asked.p_tp,
        remote_block_len=size_bytes,
        remote_block_size=asked.page_tokens,
        remote_physical_blocks_per_logical=1,
    )
    worker.transfer_topo.register_remote_engine(P, info)
    worker._validate_remote_agent_handshake(p_metadata, asked.p_tp)
    plan = tp_mapping.compute_tp_mapping(worker.transfer_topo, asked.p_tp, worker._group_spec_types)
    ratio = worker.transfer_topo.tp_ratio(asked.p_tp)
    own = worker._build_fa_local([0], 1)
    attention_count = len(own)
    remote = worker._build_fa_remote(plan, p_metadata, 1)
    if not asked.attention:
        own = np.concatenate([own, worker._build_mamba_local([0])])
        remote = np.concatenate([remote, worker._build_mamba_remote(p_metadata, ratio, info)])
    places = [own.tolist()] * len(plan.all_source_ranks)
    if worker._needs_split_local_xfer_handles(ratio, plan):
        places = list(worker._build_local_splits_from_plan(plan, own, attention_count))
    reads: list[Place] = []
    for rank, here in zip(plan.all_source_ranks, places, strict=True):
        if rank not in plan.source_ranks_per_group[-1]:
            continue
        blocks = [[0]] if asked.attention else [[], [0]]
        for index in worker._compute_desc_ids(blocks, 1, None, 1).tolist():
            # Since 0.33 a stride and a count of blocks follow; a page is one block.
            src, src_bytes, *_ = remote[index].tolist()
            dst, dst_bytes, *_ = here[index]
            if src_bytes != dst_bytes:
                raise RefusedError(f"NIXL: descriptors of {src_bytes} and {dst_bytes} bytes")
            reads.append((rank, worker.tp_rank, src, int(dst), int(dst_bytes)))
    return reads


if __name__ == "__main__":
    answer_all(version("vllm"), answer)
