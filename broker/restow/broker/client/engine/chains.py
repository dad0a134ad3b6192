"""Names of states: content hashes, chains of hashes, and the prefixes that they name."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass, field, replace
from operator import itemgetter

from restow.broker.block_ids import first_wrong, is_whole, whole_numbers
from restow.broker.errors import ChainFormError, ChainInvalidError, RequestError
from restow.broker.layout.rows import Int64s
from restow.broker.rpc.status import cut
from restow.broker.rpc.wire import check_form, check_salt
from restow.v1 import broker_pb2 as pb

CONTENT_FORM = "restow content 1"
_ATTACHMENT = (0xFFFFFFFF).to_bytes(4, "little")
"""An id that no token has."""
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

    They are the SHA-256 of an unambiguous text: the form's name; ``adapter`` and ``salt``, each
    with its length; then ``token_ids`` as little-endian uint32, as many as the position says.
    ``token_ids`` may be longer. ``attachments`` are the other inputs of the prompt (images,
    embeddings), each as the token at which it begins and a hash. Each is inserted before that
    token, after an id that no token has; attachments of one token keep the given order.
    Attachments at the position or later do not belong to the state.

    The hash is a chain: the text of a longer prefix continues this text. So one pass over a prompt
    gives the hashes of all its prefixes, whatever the page sizes of the engines are.

    Raises `RequestError` for a position beyond the tokens, for ids that are not uint32, and for
    values that are not whole numbers (``1.0``, ``"1"``, ``True``), hashes or text.

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
    """Return `content_of` for each of ``positions_tokens``, in one pass.

    Raises `ChainInvalidError` for positions that do not rise, and as `content_of`.

    >>> contents_of([5, 6, 7], [1, 3])[1] == content_of([5, 6, 7], 3)
    True
    """
    limit = len(token_ids) + 1
    positions = whole_numbers(positions_tokens, limit)
    if positions is None:
        raise RequestError(
            f"position_tokens is {cut(repr(first_wrong(positions_tokens, limit)), 64)}, but the "
            f"prompt has {len(token_ids)} tokens",
            field="position_tokens",
        )
    if (positions[1:] <= positions[:-1]).any():
        raise ChainInvalidError("the positions of a chain must rise", field="positions_tokens")
    ids = _checked_tokens(token_ids[: positions[-1] if len(positions) else 0])
    chain = ContentChain(adapter=adapter, salt=salt, attachments=attachments)
    digests = []
    for position_tokens in positions.tolist():
        chain.extend(ids[chain.tokens : position_tokens], max(position_tokens, 1))
        digests.append(chain.digest())
    return digests


class ContentChain:
    """Computes `content_of` for the prefixes of a prompt, in one pass over the tokens.

    Tokens may be added in parts, as a reply produces them.

    >>> chain = ContentChain()
    >>> chain.extend([5, 6, 7], 2) == [content_of([5, 6], 2)]
    True
    >>> chain.extend([8], 2) == [content_of([5, 6, 7, 8], 4)]
    True
    """

    def __init__(
        self, *, adapter: str = "", salt: str = "", attachments: Iterable[tuple[int, bytes]] = ()
    ) -> None:
        """Begin before any token; ``adapter``, ``salt``, ``attachments`` are as in `content_of`.

        Raises `RequestError`.
        """
        self.tokens = 0
        # Sorted backwards to pop the next attachment; those of one token keep their order.
        self._attachments = sorted(map(_checked_attachment, attachments), key=itemgetter(0))[::-1]
        self._text = hashlib.sha256(CONTENT_FORM.encode() + b"\0")
        for name, word in (("adapter", adapter), ("salt", salt)):
            if not isinstance(word, str):
                raise RequestError(f"{name} is {word!r}, but must be text", field=name)
            self._text.update(_with_length(word.encode(errors="surrogatepass")))

    def digest(self) -> bytes:
        """Return the name of the state after all tokens so far."""
        return self._text.digest()

    def extend(self, token_ids: Sequence[int] | Int64s, every_tokens: int) -> list[bytes]:
        """Add ``token_ids``; return the names at each multiple of ``every_tokens`` among them.

        Raises `RequestError` for ids that are not uint32, and for ``every_tokens`` below 1.
        """
        if not is_whole(every_tokens, _ANYWHERE) or not every_tokens:
            raise RequestError(
                f"every_tokens is {every_tokens!r}, but must be 1 or more", field="every_tokens"
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
        """Add ``packed`` tokens up to ``stop``, with the attachments among them."""
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
            f"token id {wrong} is not a whole number in [0, {MAX_TOKEN_ID}]", field="token_ids"
        )
    return ids


def _checked_attachment(attachment: tuple[int, bytes]) -> tuple[int, bytes]:
    at, digest = attachment
    if not is_whole(at, _ANYWHERE) or not isinstance(digest, bytes):
        raise RequestError(
            f"an attachment is {cut(repr(attachment), 64)}, but must be the token at which it "
            f"begins, and its hash as bytes",
            field="attachments",
        )
    return int(at), digest


def _with_length(word: bytes) -> bytes:
    return len(word).to_bytes(4, "little") + word


ALL_TOKENS = 1 << 31
"""Positions are sent as int32."""


@dataclass(frozen=True, slots=True)
class HashForm:
    """The way in which tokens are hashed.

    Engines find each other's prefixes only if all three fields are equal.
    """

    algorithm: str
    """Name of the algorithm, including all other inputs of the hashes, such as a seed."""
    quantum_tokens: int
    """Tokens from one hash to the next."""
    hash_bytes: int = 32
    """Size of a hash: a multiple of 8, at most 64."""


def joined(form: HashForm, hashes: Iterable[bytes]) -> bytes:
    """Return the concatenated hashes. Raises `ChainInvalidError` for a hash of another size."""
    listed = list(hashes)
    for hashed in listed:
        if len(hashed) != form.hash_bytes:
            raise ChainInvalidError(
                f"a hash has {len(hashed)} bytes, but {form.algorithm!r} has {form.hash_bytes}",
                field="hashes",
            )
    return b"".join(listed)


def form_to_proto(form: HashForm) -> pb.HashForm:
    """Return the form's message. Raises `ChainInvalidError`."""
    said = asdict(form)
    check_form(**said)
    return pb.HashForm(**said)


@dataclass(frozen=True, slots=True)
class PrefixChain:
    """The name of a prompt: a hash after each quantum of tokens."""

    form: HashForm
    """The form of the hashes."""
    hashes: tuple[bytes, ...]
    """The hashes, all of one size."""
    below_tokens: int = 0
    """A state must end before this token, the prompt's length. 0: anywhere in the chain."""
    salt: str = ""
    """The salt that keeps equal hashes apart. Empty: none, or it is part of the hashes."""
    ends: tuple[tuple[int, bytes], ...] = ()
    """Other tokens at which a state may end, such as the end of a reply, in rising order.

    Each is the number of tokens, and the hash of all tokens before it.
    """
    revision: str = ""
    """Revision of the weights. Empty: the model's own, or the engine's present revision."""

    def prefix(self, position_tokens: int) -> Prefix:
        """Return the name of the state after ``position_tokens`` (`PrefixHolder.tokens`).

        Raises `ChainInvalidError` if the chain has no hash for that position.
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
    """The name of the state after exactly ``position_tokens``: the hashes of these tokens."""

    form: HashForm
    """The form of the hashes."""
    position_tokens: int
    """Tokens in the prefix."""
    hashes: tuple[bytes, ...]
    """A hash for each whole quantum of tokens."""
    end_hash: bytes = b""
    """The hash of all tokens, if they are not a whole number of quanta."""
    salt: str = ""
    """The salt, as in `PrefixChain`."""
    revision: str = ""
    """Revision of the weights that computed the state. Empty: that of the engine that names it."""
    marked: bool = field(default=False, compare=False)
    """Whether a request has marked the state as worth keeping. It is no part of the name."""

    @property
    def chain(self) -> PrefixChain:
        """The chain to look up to find who holds exactly this state."""
        ends = ((self.position_tokens, self.end_hash),) if self.end_hash else ()
        return PrefixChain(
            self.form, self.hashes, salt=self.salt, ends=ends, revision=self.revision
        )


@dataclass(frozen=True, slots=True)
class Offer:
    """A request to an engine for a state that it has reported to hold.

    Publish the state under ``handoff_id``, at exactly the position of ``prefix`` and with
    ``content``, and fence it on every rank; or decline.
    """

    handoff_id: str
    """Id chosen by D."""
    prefix: Prefix
    """The state."""
    content: bytes
    """Content that the publication must name."""
    within_ms: int
    """Validity of the offer, from the time at which the broker sent it."""


@dataclass(frozen=True, slots=True)
class PrefixHolder:
    """An engine that holds part of a prompt. A hint: the state may be gone by now."""

    engine_id: str
    """Id of the engine."""
    tokens: int
    """Tokens after which it holds the state, in all of its groups."""
    layout_digest: str
    """Digest of the layout of its states."""
    open: int
    """Number of its open handoffs."""
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

    It has a hash after every ``quantum_tokens``, equal to `content_of` for that many tokens with
    the same ``adapter``, ``salt`` and ``attachments``. It also has hashes at ``ends_tokens``, which
    must rise and lie between two quanta. So a state that is found by the chain may be requested
    with the hash as its ``content``.

    Raises `ChainInvalidError` for a quantum that no broker accepts and for ends that do not rise,
    and `RequestError` as `content_of` does.

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
    forms = {chain.form for chain in chains}
    if len(forms) > 1:
        raise ChainFormError("the chains of a call must have one form: make a call for each form")
    for chain in chains:
        check_salt(chain.salt)
        for at in (chain.below_tokens, *(at for at, _ in chain.ends)):
            if not 0 <= at < ALL_TOKENS:
                raise ChainInvalidError(f"a chain has no token {at}", field="chains")
    return pb.FindRequest(
        model=model,
        engine_id=engine_id,
        form=next((form_to_proto(form) for form in forms), None),
        chains=[
            pb.PrefixChain(
                hashes=joined(chain.form, chain.hashes),
                salt=chain.salt,
                below_tokens=chain.below_tokens,
                ends=[pb.ChainEnd(position_tokens=at, hash=hashed) for at, hashed in chain.ends],
                revision=chain.revision,
            )
            for chain in chains
        ],
        limit=limit,
    )


def prefix_to_proto(prefix: Prefix) -> pb.Prefix:
    """Return the prefix's message. Raises `ChainInvalidError`."""
    end_hash = joined(prefix.form, (prefix.end_hash,)) if prefix.end_hash else b""
    return pb.Prefix(
        form=form_to_proto(prefix.form),
        salt=prefix.salt,
        hashes=joined(prefix.form, prefix.hashes),
        end_hash=end_hash,
        revision=prefix.revision,
    )


def keep_message(prefix: Prefix, revision: str) -> pb.EngineMessage:
    """Return the message that a state is worth keeping, of ``revision`` unless it names another.

    Raises `ChainInvalidError`.
    """
    named = prefix_to_proto(replace(prefix, revision=prefix.revision or revision))
    keep = pb.Keep(prefix=named, position_tokens=prefix.position_tokens, marked=prefix.marked)
    return pb.EngineMessage(keep=keep)


def prefix_from_proto(prefix: pb.Prefix, position_tokens: int) -> Prefix:
    """Return the prefix of a broker's message."""
    form = HashForm(prefix.form.algorithm, prefix.form.quantum_tokens, prefix.form.hash_bytes)
    size_bytes = max(form.hash_bytes, 1)
    hashes = tuple(
        prefix.hashes[at : at + size_bytes] for at in range(0, len(prefix.hashes), size_bytes)
    )
    return Prefix(form, position_tokens, hashes, prefix.end_hash, prefix.salt, prefix.revision)


def offer_from_proto(offer: pb.Offer) -> Offer:
    """Return the offer of a broker's message."""
    prefix = prefix_from_proto(offer.prefix, offer.position_tokens)
    return Offer(offer.handoff_id, prefix, offer.content, offer.within_ms)


def holders_of(response: pb.FindResponse) -> Holders:
    """Return the holders of each chain, holders of most tokens first."""
    return [
        [
            PrefixHolder(
                holder.engine_id, holder.tokens, holder.layout_digest, holder.open, holder.draining
            )
            for holder in chain.holders
        ]
        for chain in response.found
    ]
