"""What a state is of, as one hash: so that the broker can tell one prompt from another."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Sequence
from operator import itemgetter

from restow.broker.block_ids import first_wrong, is_whole, whole_numbers
from restow.broker.errors import ChainInvalidError, RequestError
from restow.broker.layout.rows import Int64s
from restow.broker.rpc.status import cut

CONTENT_FORM = "restow content 1"
_ATTACHMENT = (0xFFFFFFFF).to_bytes(4, "little")
"""No token has this id."""
MAX_TOKEN_ID = 0xFFFFFFFE
_ANYWHERE = 1 << 63


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
    of it: each stands before that token, behind an id that no token has; those that begin at one
    token stand in the order given. Those that begin at the position or later are no part of the
    state.

    It is a chain: that of a longer prefix goes on from where this text ends, so one pass over a
    prompt gives the hashes of all its prefixes, whatever the size of anybody's pages.

    Raises `RequestError` for a position beyond the tokens, for ids that are no uint32, and for what
    is no whole number (``1.0``, ``"1"``, ``True``), no hash or no text.

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
    limit = len(token_ids) + 1
    positions = whole_numbers(positions_tokens, limit)
    if positions is None:
        raise RequestError(
            f"position_tokens is {cut(repr(first_wrong(positions_tokens, limit)), 64)}, of a "
            f"prompt of {len(token_ids)} tokens",
            field="position_tokens",
        )
    if (positions[1:] <= positions[:-1]).any():
        raise ChainInvalidError("the positions of a chain must rise", field="positions_tokens")
    ids = _checked_tokens(token_ids[: positions[-1] if len(positions) else 0])
    chain = ContentChain(adapter=adapter, salt=salt, attachments=attachments)
    found = []
    for position_tokens in positions.tolist():
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
        """Begin before any token. ``adapter``, ``salt``, ``attachments``: like `content_of`.

        Raises `RequestError`.
        """
        self.tokens = 0
        # The next one stands last; of those at one token the order is kept.
        self._attachments = sorted(map(_checked_attachment, attachments), key=itemgetter(0))[::-1]
        self._text = hashlib.sha256(CONTENT_FORM.encode() + b"\0")
        for name, word in (("adapter", adapter), ("salt", salt)):
            if not isinstance(word, str):
                raise RequestError(f"{name} is {word!r}, which is no text", field=name)
            self._text.update(_with_length(word.encode(errors="surrogatepass")))

    def digest(self) -> bytes:
        """Return the name of the state after all tokens so far."""
        return self._text.digest()

    def extend(self, token_ids: Sequence[int] | Int64s, every_tokens: int) -> list[bytes]:
        """Add ``token_ids``; return the names at each multiple of ``every_tokens`` among them.

        Raises `RequestError` for ids that are no uint32, and for ``every_tokens`` below 1.
        """
        if not is_whole(every_tokens, _ANYWHERE) or not every_tokens:
            raise RequestError(
                f"every_tokens is {every_tokens!r}, not 1 or more", field="every_tokens"
            )
        ids = _checked_tokens(token_ids)
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


def _checked_tokens(token_ids: object) -> Int64s:
    ids = whole_numbers(token_ids, MAX_TOKEN_ID + 1)
    if ids is None:
        wrong = cut(repr(first_wrong(token_ids, MAX_TOKEN_ID + 1)), 64)
        raise RequestError(
            f"token id {wrong} is no whole number of [0, {MAX_TOKEN_ID}]", field="token_ids"
        )
    return ids


def _checked_attachment(attachment: tuple[int, bytes]) -> tuple[int, bytes]:
    at, digest = attachment
    if not is_whole(at, _ANYWHERE) or not isinstance(digest, bytes):
        raise RequestError(
            f"an attachment is {cut(repr(attachment), 64)}: it must be the token at which it "
            f"begins, and a hash of it in bytes",
            field="attachments",
        )
    return int(at), digest


def _with_length(word: bytes) -> bytes:
    return len(word).to_bytes(4, "little") + word
