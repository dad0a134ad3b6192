"""Answer the KV hints of a request: say of each action whether it is carried out, or why not.

An orchestrator gives hints with a request: vLLM 0.33 carries them as an envelope of actions
(`v1/kv_hints/protocol.py`), Dynamo as ``kv_hint`` in the ``kv_transfer_params``. The envelope has
no reply, so the answers stand as ``kv_hints`` in the ``kv_transfer_params`` of vLLM's answer.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from typing import Any

from restow.agents.engines.vllm.scheduler.requests import KV_HINT, Request
from restow.broker.logs import get_logger

FETCHES = frozenset({"fetch", "prefetch", "share"})
"""Actions that want a state here which another engine or a store holds."""
UNSUPPORTED = {
    "demote": "a store chooses itself which states it takes, and no engine gives one up for it",
    "evict": "vLLM alone evicts what it has cached",
    "pin": "no cached state can be kept in place for longer than a handoff",
    "retain": "no state can be given another priority of eviction",
}
OTHER = "other"
MAX_ACTIONS = 64
"""Actions of an envelope that are answered."""
MAX_SHOWN = 80
"""Characters of an id or type that an answer repeats."""
_64_BITS = (1 << 64) - 1


class KvHints:
    """Answers the hints of one engine's requests. Belongs to the scheduler's thread."""

    def __init__(self, counts: Counter[str]) -> None:
        """Begin without hints. ``counts`` are by kind and outcome: ``retain:not_supported``."""
        self._counts = counts
        self._answers: dict[str, dict[str, Any]] = {}
        self._logged: set[str] = set()
        self._log = get_logger("restow.vllm")

    def begin(self, request: Request, why_no_fetch: str) -> None:
        """Decide about the hints of a request that came in.

        A fetch is carried out by looking for the request's prefix by content, as for every request.
        ``why_no_fetch`` says why it is not looked for; empty: it is.
        """
        envelope = getattr(request, "kv_hints", None)  # vLLM 0.32 has no such attribute
        if envelope is None:
            envelope = _part(request.kv_transfer_params, KV_HINT)
        if envelope is None:
            return
        given = _part(envelope, "actions")
        actions = given if isinstance(given, list | tuple) else [None]
        if len(actions) > MAX_ACTIONS:
            why_no_fetch = f"an envelope has at most {MAX_ACTIONS} actions, not {len(actions)}"
        self._answers[request.request_id] = {
            "message_id": str(_part(envelope, "message_id"))[:MAX_SHOWN],
            "actions": [self._decided(one, request, why_no_fetch) for one in actions[:MAX_ACTIONS]],
        }

    def loaded(self, request_id: str, tokens: int) -> None:
        """Note how many tokens of a request have come from another engine or a store."""
        for said in self._answers.get(request_id, {}).get("actions", ()):
            if "tokens" in said:
                said["tokens"] = tokens

    def answer(self, request_id: str) -> dict[str, Any]:
        """Return the answer to the hints of a request that has ended, once; empty: it had none."""
        answer = self._answers.pop(request_id, None)
        return {} if answer is None else {"kv_hints": answer}

    def _decided(self, action: Any, request: Request, why_no_fetch: str) -> dict[str, Any]:
        kind = str(_part(action, "action_type")).removeprefix("kv.")
        if kind in FETCHES:
            why = why_no_fetch or _why_not_fetched(action, request)
        else:
            why = UNSUPPORTED.get(kind, "Restow does not know this action")
        label = kind if kind in FETCHES or kind in UNSUPPORTED else OTHER
        outcome = "not_supported" if why else "carried_out"
        counted = f"{label}:{outcome}"
        self._counts[counted] += 1
        if counted not in self._logged:
            self._logged.add(counted)
            self._log.info("first KV hint of its kind", kind=label, outcome=outcome, why=why)
        said = {name: str(_part(action, name))[:MAX_SHOWN] for name in ("action_id", "action_type")}
        return {**said, "outcome": outcome, **({"reason": why} if why else {"tokens": 0})}


def _part(whole: Any, name: str) -> Any:
    """Return a field of vLLM's struct, or of a client's JSON."""
    return whole.get(name) if isinstance(whole, Mapping) else getattr(whole, name, None)


def _why_not_fetched(action: Any, request: Request) -> str:
    """Return why a fetch asks for something else than the request's own prefix; empty: it does."""
    payload = _part(action, "payload")
    if not isinstance(payload, Mapping):
        return "its payload is no map"
    if not str(_part(action, "action_version")).startswith(("0.", "1.")):
        return "only versions 0 and 1 of this action are known"
    if payload.get("mode", "copy") != "copy":
        return "a fetch copies: the source keeps its state"
    named = payload.get("block_hashes")
    own = {int.from_bytes(one) & _64_BITS for one in request.block_hashes}
    listed = named if isinstance(named, list) else [] if named is None else [None]
    if not all(isinstance(one, int) and one in own for one in listed):
        return "it names blocks that are none of this prompt: a state moves with its request"
    return ""
