"""What a state is of, as one hash: so that the broker can tell one prompt from another."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass, replace
from operator import itemgetter

from restow.broker.block_ids import first_wrong, is_whole, whole_numbers
from restow.broker.errors import ChainFormError, ChainInvalidError, RequestError
from restow.broker.layout.rows import Int64s
from restow.broker.rpc.status import cut
from restow.broker.rpc.wire import check_form, check_salt
from restow.v1 import broker_pb2 as pb

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


ALL_TOKENS = 1 << 31
"""Positions travel as int32."""


@dataclass(frozen=True, slots=True)
class HashForm:
    """Says how tokens become hashes: engines find each other's prefixes if all three are equal."""

    algorithm: str
    """Its name, with all that the hashes are made from besides: a seed, say."""
    quantum_tokens: int
    """Tokens from one hash to the next."""
    hash_bytes: int = 32
    """Of each: a multiple of 8, at most 64."""


def joined(form: HashForm, hashes: Iterable[bytes]) -> bytes:
    """Return the hashes, one behind the other. Raises `ChainInvalidError` for another size."""
    listed = list(hashes)
    for one in listed:
        if len(one) != form.hash_bytes:
            raise ChainInvalidError(
                f"a hash has {len(one)} bytes; by {form.algorithm!r} it has {form.hash_bytes}",
                field="hashes",
            )
    return b"".join(listed)


def form_to_proto(form: HashForm) -> pb.HashForm:
    """Return the form as it is said to a broker. Raises `ChainInvalidError`."""
    said = asdict(form)
    check_form(**said)
    return pb.HashForm(**said)


@dataclass(frozen=True, slots=True)
class PrefixChain:
    """Names a prompt by its hashes: after the first quantum of tokens, the second, and so on."""

    form: HashForm
    """How they are made."""
    hashes: tuple[bytes, ...]
    """All of one size."""
    below_tokens: int = 0
    """A state must stand before that token: the prompt's length. 0: anywhere in the chain."""
    salt: str = ""
    """What the hashes are kept apart by. Empty: nothing, or it is in them."""
    ends: tuple[tuple[int, bytes], ...] = ()
    """Other tokens at which a state may stand, such as where a reply ended, each further on than
    the one before: their number, and the hash of all before it."""
    revision: str = ""
    """Revision of the weights. Empty: the model's own, or the one that the engine has now."""

    def prefix(self, position_tokens: int) -> Prefix:
        """Return the state after so many tokens, as `PrefixHolder.tokens` says them.

        Raises `ChainInvalidError` for a position that the chain has no hash of.
        """
        whole, rest_tokens = divmod(position_tokens, self.form.quantum_tokens)
        end_hash = dict(self.ends).get(position_tokens, b"")
        if whole > len(self.hashes) or (rest_tokens and not end_hash) or position_tokens < 1:
            raise ChainInvalidError(
                f"the chain has no hash of its first {position_tokens} tokens",
                field="position_tokens",
            )
        hashes = self.hashes[:whole]
        end_hash *= bool(rest_tokens)
        return Prefix(self.form, position_tokens, hashes, end_hash, self.salt, self.revision)


@dataclass(frozen=True, slots=True)
class Prefix:
    """Names the state after exactly so many tokens, by their hashes."""

    form: HashForm
    """How they are made."""
    position_tokens: int
    """So many."""
    hashes: tuple[bytes, ...]
    """One for each whole quantum of them."""
    end_hash: bytes = b""
    """Of all of them, where they are no whole number of quanta."""
    salt: str = ""
    """As in `PrefixChain`."""
    revision: str = ""
    """Revision of the weights that computed it. Empty: that of the engine that names it."""

    @property
    def chain(self) -> PrefixChain:
        """What is looked up to find who holds just this state."""
        ends = ((self.position_tokens, self.end_hash),) if self.end_hash else ()
        return PrefixChain(
            self.form, self.hashes, salt=self.salt, ends=ends, revision=self.revision
        )


@dataclass(frozen=True, slots=True)
class Offer:
    """Asks an engine for a state that it has said that it holds.

    Publish it under ``handoff_id``, at just the position of ``prefix`` and with ``content``, and
    fence it on every rank; or decline.
    """

    handoff_id: str
    """Chosen by D."""
    prefix: Prefix
    """Which state."""
    content: bytes
    """What the publication names."""
    within_ms: int
    """How long the offer stands, from when the broker sent it."""


@dataclass(frozen=True, slots=True)
class PrefixHolder:
    """Says what an engine holds of a prompt. A hint: it may be gone since."""

    engine_id: str
    """Who it is."""
    tokens: int
    """It holds the state after so many tokens, in all of its groups."""
    layout_digest: str
    """The layout in which it has it."""
    open: int
    """Handoffs of its that have not ended."""
    draining: bool
    """Whether it takes part in nothing new."""


Holders = list[list[PrefixHolder]]


def chain_of(
    token_ids: Sequence[int],
    quantum_tokens: int = 16,
    *,
    adapter: str = "",
    salt: str = "",
    attachments: Iterable[tuple[int, bytes]] = (),
    ends_tokens: Sequence[int] = (),
) -> PrefixChain:
    """Return the chain of ``token_ids``, for engines without hashes of their own.

    There is a hash after every ``quantum_tokens``: what `content_of` returns for that many tokens,
    of the same ``adapter``, ``salt`` and ``attachments``; at ``ends_tokens`` too, which rise, and
    are tokens between two quanta. So a state that is found by it may be asked for with it as its
    ``content``.

    Raises `ChainInvalidError` for a quantum that no broker takes and for ends that do not rise, and
    `RequestError` as `content_of` does.

    >>> chain_of(range(40)).below_tokens, len(chain_of(range(40)).hashes)
    (40, 2)
    """
    form = HashForm(CONTENT_FORM, quantum_tokens)
    check_form(**asdict(form))
    attached = list(attachments)
    chain = ContentChain(adapter=adapter, salt=salt, attachments=attached)
    hashes = chain.extend(token_ids, quantum_tokens)
    ends = contents_of(token_ids, ends_tokens, adapter=adapter, salt=salt, attachments=attached)
    return PrefixChain(
        form,
        tuple(hashes),
        len(token_ids),
        ends=tuple(zip(ends_tokens, ends, strict=True)),
    )


def find_request(
    chains: Sequence[PrefixChain], engine_id: str, model: pb.ModelName | None, limit: int
) -> pb.FindRequest:
    """Return the message that asks for chains. Raises `ChainFormError`, `ChainInvalidError`."""
    forms = {one.form for one in chains}
    if len(forms) > 1:
        raise ChainFormError("the chains of one call have one form: ask for others by themselves")
    for one in chains:
        check_salt(one.salt)
        for at in (one.below_tokens, *(at for at, _ in one.ends)):
            if not 0 <= at < ALL_TOKENS:
                raise ChainInvalidError(f"a chain has no token {at}", field="chains")
    return pb.FindRequest(
        model=model,
        engine_id=engine_id,
        form=next((form_to_proto(one) for one in forms), None),
        chains=[
            pb.PrefixChain(
                hashes=joined(one.form, one.hashes),
                salt=one.salt,
                below_tokens=one.below_tokens,
                ends=[pb.ChainEnd(position_tokens=at, hash=hashed) for at, hashed in one.ends],
                revision=one.revision,
            )
            for one in chains
        ],
        limit=limit,
    )


def prefix_to_proto(prefix: Prefix) -> pb.Prefix:
    """Return the prefix as it is said to a broker. Raises `ChainInvalidError`."""
    end_hash = joined(prefix.form, (prefix.end_hash,)) if prefix.end_hash else b""
    return pb.Prefix(
        form=form_to_proto(prefix.form),
        salt=prefix.salt,
        hashes=joined(prefix.form, prefix.hashes),
        end_hash=end_hash,
        revision=prefix.revision,
    )


def keep_message(prefix: Prefix, revision: str) -> pb.EngineMessage:
    """Return what says that a state is worth keeping, of ``revision`` unless it names another.

    Raises `ChainInvalidError`.
    """
    named = prefix_to_proto(replace(prefix, revision=prefix.revision or revision))
    return pb.EngineMessage(keep=pb.Keep(prefix=named, position_tokens=prefix.position_tokens))


def prefix_from_proto(prefix: pb.Prefix, position_tokens: int) -> Prefix:
    """Return the prefix that a broker names."""
    form = HashForm(prefix.form.algorithm, prefix.form.quantum_tokens, prefix.form.hash_bytes)
    size_bytes = max(form.hash_bytes, 1)
    hashes = tuple(
        prefix.hashes[at : at + size_bytes] for at in range(0, len(prefix.hashes), size_bytes)
    )
    return Prefix(form, position_tokens, hashes, prefix.end_hash, prefix.salt, prefix.revision)


def offer_from_proto(offer: pb.Offer) -> Offer:
    """Return the offer that a broker makes."""
    prefix = prefix_from_proto(offer.prefix, offer.position_tokens)
    return Offer(offer.handoff_id, prefix, offer.content, offer.within_ms)


def holders_of(response: pb.FindResponse) -> Holders:
    """Return who holds how much of each chain: those with most first."""
    return [
        [
            PrefixHolder(one.engine_id, one.tokens, one.layout_digest, one.open, one.draining)
            for one in found.holders
        ]
        for found in response.found
    ]
