"""What a state is of, as one hash: so that the broker can tell one prompt from another."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Sequence
from itertools import pairwise

import numpy as np

from restow.broker.errors import ChainInvalidError, RequestError
from restow.broker.layout.rows import Int64s

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
    chain = ContentChain(adapter=adapter, salt=salt, attachments=attachments)
    found = []
    for position_tokens in positions_tokens:
        chain.extend(ids[chain.tokens : position_tokens], max(position_tokens, 1))
        found.append(chain.digest())
    return found


class ContentChain:
    """The names of a prompt's prefixes, each as `content_of` has it, in one pass over the tokens.

    Tokens may come bit by bit, as those of a reply do.

    >>> chain = ContentChain()
    >>> chain.extend([5, 6, 7], 2) == [content_of([5, 6], 2)]
    True
    >>> chain.extend([8], 2) == [content_of([5, 6, 7, 8], 4)]
    True
    """

    def __init__(
        self, *, adapter: str = "", salt: str = "", attachments: Iterable[tuple[int, bytes]] = ()
    ) -> None:
        """Begin before any token. ``adapter``, ``salt``, ``attachments``: like `content_of`."""
        self.tokens = 0
        self._attachments = sorted(attachments, reverse=True)
        self._text = hashlib.sha256(CONTENT_FORM.encode() + b"\0")
        for word in (adapter, salt):
            self._text.update(_with_length(word.encode()))

    def digest(self) -> bytes:
        """Return the name of the state after all tokens so far."""
        return self._text.digest()

    def extend(self, token_ids: Sequence[int] | Int64s, every_tokens: int) -> list[bytes]:
        """Add ``token_ids``; return the names at each multiple of ``every_tokens`` among them.

        Raises `RequestError` for ids that are no uint32.
        """
        ids = np.asarray(token_ids, np.int64)
        if len(ids) and not 0 <= int(ids.min()) <= int(ids.max()) <= MAX_TOKEN_ID:
            raise RequestError(f"a token id is outside of [0, {MAX_TOKEN_ID}]", field="token_ids")
        packed = memoryview(ids.astype("<u4").tobytes())
        first, end = self.tokens, self.tokens + len(ids)
        names = []
        for stop in range(first - first % every_tokens + every_tokens, end + 1, every_tokens):
            self._read(packed[4 * (self.tokens - first) : 4 * (stop - first)], stop)
            names.append(self._text.digest())
        self._read(packed[4 * (self.tokens - first) :], end)
        return names

    def _read(self, packed: memoryview, stop: int) -> None:
        """Add ``packed`` tokens up to ``stop``, and what begins at one of them."""
        done = 0
        while self._attachments and self._attachments[-1][0] < stop:
            at, digest = self._attachments.pop()
            place = max(4 * (at - self.tokens), done)
            self._text.update(packed[done:place])
            self._text.update(_ATTACHMENT + _with_length(digest))
            done = place
        self._text.update(packed[done:])
        self.tokens = stop


def _with_length(word: bytes) -> bytes:
    return len(word).to_bytes(4, "little") + word
