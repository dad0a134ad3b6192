"""Chains: prompts by the hashes of their beginnings, and who holds how much of them."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass, replace

from restow.broker.client.engine.prefixes.content import (
    CONTENT_FORM,
    ContentChain,
    contents_of,
)
from restow.broker.errors import ChainFormError, ChainInvalidError
from restow.broker.rpc.chains import check_form, check_salt
from restow.v1 import broker_pb2 as pb

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
