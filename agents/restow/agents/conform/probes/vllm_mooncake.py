"""Ask vLLM's MooncakeConnector what ranks of P write, by its own functions."""

from __future__ import annotations

from importlib.metadata import version

from vllm.distributed.kv_transfer.kv_connector.utils import TransferTopology
from vllm.distributed.kv_transfer.kv_connector.v1.mooncake import mooncake_connector

from .asking import Asked, Copied, Place, RefusedError, answer_all
from .vllm_layers import form, kv_heads, own_words, page_bytes


def answer(asked: Asked) -> Copied:
    """Return what every rank of P writes, or why the connector refuses."""
    try:
        copies = _copies(asked)
    except (AssertionError, NotImplementedError, RuntimeError, ValueError) as error:
        raise own_words(error) from error
    forms = form(asked, asked.p_drafts), form(asked, asked.d_drafts)
    return Copied(*forms, page_bytes(asked), copies)


def _copies(asked: Asked) -> list[Place]:
    heads = kv_heads(asked) if asked.attention else None
    p_bytes, d_bytes = page_bytes(asked)
    replicated = _topology(asked, 0, asked.p_tp).local_replicates_kv_cache
    wrong = mooncake_connector._validate_asymmetric_region_lengths(
        [_region(p_bytes)], [_region(d_bytes)], asked.p_tp, asked.d_tp, replicated, heads
    )
    if wrong is not None:
        raise RefusedError(wrong)
    places: list[Place] = []
    for dst_rank in range(asked.d_tp):
        for src_rank in _topology(asked, dst_rank, asked.d_tp).handshake_target_ranks(asked.p_tp):
            sends, src, dst, length = mooncake_connector._compute_sender_transfer_plan(
                local_tp_rank=src_rank,
                local_tp_size=asked.p_tp,
                remote_tp_rank=dst_rank,
                remote_tp_size=asked.d_tp,
                local_kv_block_len=p_bytes,
                remote_kv_block_len=d_bytes,
                producer_cache_replicated=replicated,
                total_num_kv_heads=heads,
            )
            if sends:
                places.append((src_rank, dst_rank, src, dst, length))
    return places


def _topology(asked: Asked, rank: int, tp: int) -> TransferTopology:
    return TransferTopology(
        tp_rank=rank,
        tp_size=tp,
        block_size=asked.page_tokens,
        engine_id="an engine",
        is_mla=False,
        is_mamba=not asked.attention,
        total_num_kv_heads=kv_heads(asked),
        attn_backends=[],
    )


def _region(size_bytes: int) -> mooncake_connector.TransferRegion:
    return mooncake_connector.TransferRegion("a layer", 0, 0, size_bytes, size_bytes)


if __name__ == "__main__":
    answer_all(version("vllm"), answer)
