"""What a state is of, as one hash: so that the broker can tell one prompt from another."""

from __future__ import annotations

import hashlib
from collections import deque
from collections.abc import Iterable, Sequence
from itertools import pairwise

import numpy as np

from restow.broker.errors import ChainInvalidError, RequestError

CONTENT_FORM = "restow content 1"
_ATTACHMENT = (0xFFFFFFFF).to_bytes(4, "little")
"""No token has this id."""
MAX_TOKEN_ID = 0xFFFFFFFE


def content_of(
    token_ids: Sequence[int],
    position_tokens: int,
    *,
    adapter: str = "",
    salt: str = "",
    attachments: Iterable[tuple[int, bytes]] = (),
) -> bytes:
    """Return the 32 bytes that name the state after the first ``position_tokens`` tokens.

    The SHA-256 of a text in which nothing else reads the same: the form's name; the ``adapter`` and
    the ``salt``, each with its length; then ``token_ids`` as little-endian uint32, all of the
    prompt's or as many at least as the position says. ``attachments`` are what else
    the prompt is computed from (images, embeddings) by the token at which each begins, and a hash
    of it: each stands before that token, behind an id that no token has. Those that begin at the
    position or later are no part of the state.

    It is a chain: that of a longer prefix goes on from where this text ends, so one pass over a
    prompt gives the hashes of all its prefixes, whatever the size of anybody's pages.

    Raises `RequestError` for a position beyond the tokens and for ids that are no uint32.

    >>> content_of([5, 6, 7], 2) == content_of([5, 6, 9], 2) != content_of([5, 6, 7], 3)
    True
    """
    return contents_of(
        token_ids, [position_tokens], adapter=adapter, salt=salt, attachments=attachments
    )[0]


def contents_of(
    token_ids: Sequence[int],
    positions_tokens: Sequence[int],
    *,
    adapter: str = "",
    salt: str = "",
    attachments: Iterable[tuple[int, bytes]] = (),
) -> list[bytes]:
    """Return what `content_of` does for each of ``positions_tokens``, in one pass.

    Raises `ChainInvalidError` for positions that do not rise, and as `content_of`.

    >>> contents_of([5, 6, 7], [1, 3])[1] == content_of([5, 6, 7], 3)
    True
    """
    if any(one >= other for one, other in pairwise(positions_tokens)):
        raise ChainInvalidError("the positions of a chain must rise", field="positions_tokens")
    last = positions_tokens[-1] if positions_tokens else 0
    ids = np.asarray(token_ids[:last], np.int64)
    if not 0 <= last == len(ids) or any(one < 0 for one in positions_tokens[:1]):
        raise RequestError(
            f"position_tokens is {last}, of a prompt of {len(token_ids)} tokens",
            field="position_tokens",
        )
    if len(ids) and not 0 <= int(ids.min()) <= int(ids.max()) <= MAX_TOKEN_ID:
        raise RequestError(f"a token id is outside of [0, {MAX_TOKEN_ID}]", field="token_ids")
    packed = memoryview(ids.astype("<u4").tobytes())
    text = hashlib.sha256(CONTENT_FORM.encode() + b"\0")
    for word in (adapter, salt):
        text.update(_with_length(word.encode()))
    found, done, left = [], 0, deque(sorted(attachments))
    for position_tokens in positions_tokens:
        while left and left[0][0] < position_tokens:
            first, digest = left.popleft()
            text.update(packed[4 * done : 4 * first])
            text.update(_ATTACHMENT + _with_length(digest))
            done = max(done, first)
        text.update(packed[4 * done : 4 * position_tokens])
        done = position_tokens
        found.append(text.copy().digest())
    return found


def _with_length(word: bytes) -> bytes:
    return len(word).to_bytes(4, "little") + word
