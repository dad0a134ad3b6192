"""Holdings and chains, bounded where they enter; who holds what, as it is told."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import replace
from itertools import chain as joined

from restow.broker.core.common.events import (
    MAX_CHAIN_HASHES,
    MAX_CHAINS,
    MAX_ENDS,
    Batch,
    Chain,
    ChainEnd,
    HashForm,
    NamedPrefix,
    Run,
)
from restow.broker.core.engines.engine import EngineRecord
from restow.broker.core.prefix.prefixes import Holders, Teller
from restow.broker.errors import ChainInvalidError, HoldingsError, RequestError
from restow.broker.layout.values import ModelIdentity
from restow.broker.rpc import wire
from restow.broker.rpc.wire import (
    MAX_BATCH_HASHES,
    check_form,
    check_revision,
    check_salt,
)
from restow.v1 import admin_pb2
from restow.v1 import broker_pb2 as pb

DEFAULT_HOLDERS, MAX_HOLDERS = 8, 100


def revision_of(revision: str) -> str:
    """Return a revision that a message may leave empty. Raises `RequestError`."""
    if revision:
        check_revision(revision)
    return revision


def form_of(form: pb.HashForm) -> HashForm:
    """How hashes are made. Raises `ChainInvalidError` for what no chain can be made by."""
    check_form(form.algorithm, form.quantum_tokens, form.hash_bytes)
    return HashForm(form.algorithm, form.quantum_tokens, form.hash_bytes)


def batch_of(holdings: pb.Holdings) -> Batch:
    """A batch of an engine's. Raises `ChainInvalidError` and `HoldingsError`."""
    if holdings.number < 1:
        raise HoldingsError(f"number is {holdings.number}; batches count from 1", field="number")
    form = form_of(holdings.form)
    check_salt(holdings.salt)
    runs = joined(holdings.held, holdings.evicted)
    count = sum(len(run.hashes) for run in runs) // form.hash_bytes
    if count > MAX_BATCH_HASHES:
        raise HoldingsError(
            f"batch {holdings.number} has {count} hashes; one has at most {MAX_BATCH_HASHES}: tell "
            f"them in several",
            field="held",
        )
    return Batch(
        holdings.number,
        form,
        holdings.salt,
        _runs_of(holdings.held, form),
        _runs_of(holdings.evicted, form),
        revision_of(holdings.revision),
    )


def _runs_of(runs: Iterable[pb.HeldRun], form: HashForm) -> tuple[Run, ...]:
    for run in runs:
        _check_size(run.hashes, form)
        if len(run.parent) not in (0, form.hash_bytes):
            raise ChainInvalidError(
                f"a parent has {len(run.parent)} bytes; it is one hash, of {form.hash_bytes}, or "
                f"empty",
                field="parent",
            )
    return tuple(Run(run.group, run.hashes, run.parent) for run in runs if run.hashes)


def chains_of(request: pb.FindRequest, model: ModelIdentity) -> list[Chain]:
    """What is asked for. Raises `ChainInvalidError`."""
    form = form_of(request.form)
    if len(request.chains) > MAX_CHAINS:
        raise ChainInvalidError(
            f"{len(request.chains)} chains; a call has at most {MAX_CHAINS}", field="chains"
        )
    count = sum(len(one.hashes) for one in request.chains) // form.hash_bytes
    if count > MAX_CHAIN_HASHES:
        raise ChainInvalidError(
            f"the chains have {count} hashes; a call has at most {MAX_CHAIN_HASHES}: ask by a "
            f"larger quantum, or for the beginning",
            field="chains",
        )
    for one in request.chains:
        _check_size(one.hashes, form)
        check_salt(one.salt)
        _check_ends(one.ends, form)
        if one.below_tokens < 0:
            raise ChainInvalidError(
                f"below_tokens {one.below_tokens} must not be negative", field="below_tokens"
            )
    return [
        Chain(
            replace(model, revision=revision_of(one.revision)) if one.revision else model,
            form,
            one.salt,
            one.hashes,
            one.below_tokens,
            tuple(ChainEnd(end.position_tokens, end.hash) for end in one.ends),
        )
        for one in request.chains
    ]


def named_of(prefix: pb.Prefix, position_tokens: int) -> NamedPrefix:
    """A state of so many tokens by its hashes. Raises `ChainInvalidError` where they do not fit."""
    form = form_of(prefix.form)
    check_salt(prefix.salt)
    _check_size(prefix.hashes, form)
    count, quantum_tokens = len(prefix.hashes) // form.hash_bytes, form.quantum_tokens
    if count > MAX_CHAIN_HASHES:
        raise ChainInvalidError(
            f"the prefix has {count} hashes; one has at most {MAX_CHAIN_HASHES}", field="hashes"
        )
    whole, rest_tokens = divmod(position_tokens, quantum_tokens)
    end_bytes = form.hash_bytes if rest_tokens else 0
    if position_tokens < 1 or count != whole or len(prefix.end_hash) != end_bytes:
        raise ChainInvalidError(
            f"a prefix of {position_tokens} tokens has one hash for each {quantum_tokens} of them, "
            f"and an end_hash where some are left over; this one has {count} and "
            f"{len(prefix.end_hash)} bytes",
            field="hashes",
        )
    revision = revision_of(prefix.revision)
    return NamedPrefix(position_tokens, form, prefix.salt, prefix.hashes, prefix.end_hash, revision)


def _check_ends(ends: Sequence[pb.ChainEnd], form: HashForm) -> None:
    """Raise `ChainInvalidError` for too many, and for positions that do not rise."""
    if len(ends) > MAX_ENDS:
        raise ChainInvalidError(f"{len(ends)} ends; a chain has at most {MAX_ENDS}", field="ends")
    before = 0
    for end in ends:
        position_tokens = end.position_tokens
        if position_tokens <= before or not position_tokens % form.quantum_tokens:
            raise ChainInvalidError(
                f"an end at token {position_tokens}, after {before}: the positions of ends rise, "
                f"and none is a multiple of the {form.quantum_tokens} tokens of a quantum",
                field="ends",
            )
        before = position_tokens
        if len(end.hash) != form.hash_bytes:
            raise ChainInvalidError(
                f"an end's hash has {len(end.hash)} bytes, and the chain's have {form.hash_bytes}",
                field="ends",
            )


def limit_of(limit: int) -> int:
    """How many holders are told. Raises `RequestError`."""
    if not 0 <= limit <= MAX_HOLDERS:
        raise RequestError(f"limit is {limit}; it must be 0 to {MAX_HOLDERS}", field="limit")
    return limit or DEFAULT_HOLDERS


def model_of(model: pb.ModelName) -> ModelIdentity:
    """The model that is asked for by name. Raises `RequestError` for none."""
    if not model.name:
        raise RequestError("name a model, or an engine whose model it is", field="model")
    return wire.identity_of(model)


def _check_size(hashes: bytes, form: HashForm) -> None:
    if len(hashes) % form.hash_bytes:
        raise ChainInvalidError(
            f"{len(hashes)} bytes of hashes are no multiple of the {form.hash_bytes} that each has",
            field="hashes",
        )


def fill_found(found: pb.FoundPrefix, held: list[tuple[EngineRecord, int]], limit: int) -> None:
    """Who holds how many tokens: ``limit`` of those with most, and of equals of the less busy."""
    held.sort(key=lambda one: (-one[1], one[0].draining, len(one[0].handoffs), one[0].key))
    for engine, tokens in held[:limit]:
        holder = found.holders.add()
        holder.engine_id = engine.key.engine_id
        holder.tokens = tokens
        holder.layout_digest = engine.layout_digest
        holder.open = len(engine.handoffs)
        holder.draining = engine.draining


def engine_holdings(
    teller: Teller, holders: Holders, engine: EngineRecord | None
) -> admin_pb2.EngineHoldings:
    """What an engine holds of each group, and what became of its offers."""
    counts, tokens = holders.count(teller), teller.form.quantum_tokens
    return admin_pb2.EngineHoldings(
        tenant=teller.engine.tenant,
        engine_id=teller.engine.engine_id,
        form=pb.HashForm(**teller.form._asdict()),
        batches=teller.heard,
        offers=engine.offers if engine else 0,
        offers_declined=engine.offers_declined if engine else 0,
        groups=[
            admin_pb2.GroupHoldings(
                group=rule.name,
                count=counts[rule.name],
                block_tokens=rule.block_quanta * tokens,
                window_tokens=rule.window_quanta * tokens,
            )
            for rule in teller.rules
        ],
    )


def tenant_holdings(tenant: str, holders: Holders, limit_bytes: int) -> admin_pb2.TenantHoldings:
    """What those of a tenant take."""
    return admin_pb2.TenantHoldings(
        tenant=tenant,
        hashes=len(holders.index),
        bytes=holders.index.size_bytes,
        limit_bytes=limit_bytes,
        forgotten=holders.forgotten,
    )
