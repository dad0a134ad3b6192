"""What a state is of, as one hash: so that the broker can tell one prompt from another."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Sequence

import numpy as np

from restow.broker.errors import RequestError

_FORM = b"restow content 1\0"
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
    ids = np.asarray(token_ids[:position_tokens], np.int64)
    if not 0 <= position_tokens == len(ids):
        raise RequestError(
            f"position_tokens is {position_tokens}, of a prompt of {len(token_ids)} tokens",
            field="position_tokens",
        )
    if len(ids) and not 0 <= int(ids.min()) <= int(ids.max()) <= MAX_TOKEN_ID:
        raise RequestError(f"a token id is outside of [0, {MAX_TOKEN_ID}]", field="token_ids")
    packed = memoryview(ids.astype("<u4").tobytes())
    text = hashlib.sha256(_FORM)
    for word in (adapter, salt):
        text.update(_with_length(word.encode()))
    done = 0
    for first, digest in sorted(attachments):
        if first >= position_tokens:
            break
        text.update(packed[4 * done : 4 * first])
        text.update(_ATTACHMENT + _with_length(digest))
        done = max(done, first)
    text.update(packed[4 * done :])
    return text.digest()


def _with_length(word: bytes) -> bytes:
    return len(word).to_bytes(4, "little") + word
