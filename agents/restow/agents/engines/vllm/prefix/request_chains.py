"""`RequestChains` knows which content stands behind a block hash of vLLM's own."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np

from restow.agents.engines.vllm.prefix.chain import Chain, quantum_of
from restow.agents.engines.vllm.scheduler.prompt import TRUNCATED, Request, attachments_of
from restow.broker.client import ContentChain
from restow.broker.client.engine.chains import contents_of

MAX_ENDS = 16
"""Tokens at which replies may have ended that are asked for, of a prompt: of eight turns."""


class Named(NamedTuple):
    """The tokens before ``token``, by the hash that all engines find alike.

    ``parent`` is the hash of vLLM's own one quantum of its hashes before; None: there is none.
    """

    token: int
    hash: bytes
    parent: bytes | None


@dataclass(slots=True, eq=False)
class _Following:
    """A request, and how far its tokens were looked at."""

    request: Request
    made_of: dict[str, Any]
    """What its names are made of, beside tokens."""
    text: ContentChain
    limit_blocks: int | None
    hashes: list[bytes] = field(default_factory=list)
    own: list[bytes] = field(default_factory=list)
    """Block hashes of vLLM's own that were named for it."""


class RequestChains:
    """The chains of requests under way. Belongs to the scheduler's thread.

    vLLM's own hashes are equal in two engines only by the same algorithm, seed and block size, and
    name an adapter by its path; these are equal by content alone (`ContentChain`).
    """

    def __init__(self, hash_block_tokens: int) -> None:
        """Follow none; vLLM hashes ``hash_block_tokens`` at a time."""
        self._hash_block_tokens = hash_block_tokens
        self.quantum_tokens = quantum_of(hash_block_tokens)
        self._following: dict[str, _Following] = {}
        self._named: dict[bytes, Named] = {}
        self._uses: dict[bytes, int] = {}

    def begin(self, request: Request, adapter: str) -> None:
        """Follow a request that came in, with the word of its LoRA adapter.

        Prompts of embeddings have no chain, and sessions whose prompt grows take back what was
        hashed of them: of these nothing is told.
        """
        if request.prompt_embeds is not None or request.resumable:
            return
        # vLLM hashed the prompt before its end was cut off, and may never hash that block again.
        cut = bool((request.kv_transfer_params or {}).get(TRUNCATED))
        made_of: dict[str, Any] = {
            "adapter": adapter,
            "salt": request.cache_salt or "",
            "attachments": attachments_of(request),
        }
        self._following[request.request_id] = _Following(
            request,
            made_of,
            ContentChain(**made_of),
            request.num_prompt_tokens // self._hash_block_tokens if cut else None,
        )

    def end(self, request_id: str) -> None:
        """Forget a request."""
        found = self._following.pop(request_id, None)
        for own in found.own if found else ():
            self._uses[own] -= 1
            if not self._uses[own]:
                del self._uses[own], self._named[own]

    def chain(self, request_id: str) -> Chain | None:
        """The chain of a request as far as it has tokens; None: nothing is told of it."""
        found = self._following.get(request_id)
        if found is None:
            return None
        self._read(found)
        return Chain(self.quantum_tokens, tuple(found.hashes))

    def ends(self, request_id: str, last_tokens: int) -> tuple[tuple[int, bytes], ...]:
        """Where replies may have ended in a prompt: how many tokens, and the hash of them.

        The state of one stands before the token that ended it, or behind that where the engine
        computes a step ahead. Those between two quanta are named, the last ones.
        """
        found = self._following.get(request_id)
        sampling = None if found is None else found.request.sampling_params
        if found is None or sampling is None or not sampling.all_stop_token_ids:
            return ()
        tokens = np.asarray(found.request._all_token_ids[: last_tokens + 1])
        before = np.flatnonzero(np.isin(tokens, list(sampling.all_stop_token_ids)))
        ends = np.union1d(before, before + 1)
        ends = ends[(ends % self.quantum_tokens != 0) & (ends <= last_tokens)][-MAX_ENDS:].tolist()
        names = contents_of(found.request._all_token_ids, ends, **found.made_of)
        return tuple(zip(ends, names, strict=True))

    def named(self, own: bytes) -> Named | None:
        """What stands behind a block hash of vLLM's own; None: no request under way has it."""
        found = self._named.get(own)
        if found is None:
            for one in self._following.values():
                if len(one.request.block_hashes) > len(one.own):
                    self._name(one)
            found = self._named.get(own)
        return found

    def before(self, named: Named, block_tokens: int) -> bytes:
        """The hash of what comes before the full block that ends at ``named``."""
        found: Named | None = named
        for _ in range(block_tokens // self._hash_block_tokens):
            found = self._named.get(found.parent) if found and found.parent is not None else None
        return found.hash if found else b""

    def _read(self, one: _Following) -> None:
        tokens = one.request._all_token_ids[one.text.tokens :]
        one.hashes += one.text.extend(tokens, self.quantum_tokens)

    def _name(self, one: _Following) -> None:
        self._read(one)
        quanta = self._hash_block_tokens // self.quantum_tokens
        count = min(len(one.request.block_hashes), len(one.hashes) // quanta)
        if one.limit_blocks is not None:
            count = min(count, one.limit_blocks)
        for index in range(len(one.own), count):
            own = one.request.block_hashes[index]
            self._named[own] = Named(
                (index + 1) * self._hash_block_tokens,
                one.hashes[(index + 1) * quanta - 1],
                one.own[index - 1] if index else None,
            )
            self._uses[own] = self._uses.get(own, 0) + 1
            one.own.append(own)
