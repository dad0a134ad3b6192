"""A request's ``kv_transfer_params``: which side of which handoff it is.

Routers made for vLLM's own connectors send ``do_remote_decode`` to P, and hand P's answer on to D.
Others give both sides the same ``handoff_id`` at once; then the engine's role says the side.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum
from typing import Any

from restow.agents.engines.vllm.errors import ParametersError

HANDOFF_ID = "handoff_id"
TIMEOUT_MS = "timeout_ms"
TRUNCATED = "_p_side_truncated"
"""vLLM's own mark of a prompt that was cut already, kept over preemptions."""


class Side(StrEnum):
    """What a request is to a handoff."""

    PREFILL = "prefill"
    DECODE = "decode"


@dataclass(frozen=True, slots=True)
class Part:
    """One side of one handoff."""

    side: Side
    handoff_id: str
    timeout_ms: int = 0
    """How long D waits for this state; 0: as long as its engine commonly waits."""


def part_of(params: Mapping[str, Any] | None, kv_role: str, default_id: str) -> Part | None:
    """The request's part; None if it has none.

    ``default_id`` names the handoff of a P that was given no name. Raises `ParametersError`.
    """
    if not params:
        return None
    handoff_id = params.get(HANDOFF_ID)
    if handoff_id is not None and (not isinstance(handoff_id, str) or not handoff_id):
        raise ParametersError(f"handoff_id is {handoff_id!r}; it must be a text")
    timeout_ms = params.get(TIMEOUT_MS, 0)
    if not isinstance(timeout_ms, int) or isinstance(timeout_ms, bool) or timeout_ms < 0:
        raise ParametersError(f"timeout_ms is {timeout_ms!r}; it must be a positive whole number")
    if params.get("do_remote_decode"):
        return Part(Side.PREFILL, handoff_id or default_id)
    if params.get("do_remote_prefill"):
        if handoff_id is None:
            raise ParametersError(
                "do_remote_prefill without handoff_id: the parameters are not those that a P with "
                "this connector answered with"
            )
        return Part(Side.DECODE, handoff_id, timeout_ms)
    if handoff_id is None:
        return None
    if kv_role == "kv_both":
        raise ParametersError(
            f"handoff {handoff_id}: this engine is both P and D (kv_both), so the request must say "
            "do_remote_decode or do_remote_prefill"
        )
    if kv_role == "kv_producer":
        return Part(Side.PREFILL, handoff_id)
    return Part(Side.DECODE, handoff_id, timeout_ms)


def answer(part: Part, engine_id: str, request_id: str, position_tokens: int) -> dict[str, Any]:
    """What P answers with, for the router to hand on to D."""
    return {
        "do_remote_prefill": True,
        "do_remote_decode": False,
        HANDOFF_ID: part.handoff_id,
        "remote_engine_id": engine_id,
        "remote_request_id": request_id,
        "remote_num_tokens": position_tokens,
    }
