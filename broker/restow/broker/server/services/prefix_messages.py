"""Conversion and limits of messages about holdings and chains."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import asdict, replace
from itertools import chain as joined

from restow.broker.core.common.events import (
    MAX_CHAIN_HASHES,
    MAX_CHAINS,
    MAX_ENDS,
    Batch,
    Chain,
    ChainEnd,
    HashForm,
    HashRun,
    NamedPrefix,
)
from restow.broker.core.engines.engine import EngineRecord
from restow.broker.core.prefix.changes import Change, Kind
from restow.broker.core.prefix.prefixes import Announcements, Holders
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
    """Check and return a revision, which may be empty. Raises `RequestError`."""
    if revision:
        check_revision(revision)
    return revision


def form_of(form: pb.HashForm) -> HashForm:
    """Return the form of hashes. Raises `ChainInvalidError` for an impossible form."""
    check_form(form.algorithm, form.quantum_tokens, form.hash_bytes)
    return HashForm(form.algorithm, form.quantum_tokens, form.hash_bytes)


def batch_of(holdings: pb.Holdings) -> Batch:
    """Return an engine's batch. Raises `ChainInvalidError` and `HoldingsError`."""
    if holdings.number < 1:
        raise HoldingsError(f"number is {holdings.number}; batches count from 1", field="number")
    form = form_of(holdings.form)
    check_salt(holdings.salt)
    runs = joined(holdings.held, holdings.evicted)
    count = sum(len(run.hashes) for run in runs) // form.hash_bytes
    if count > MAX_BATCH_HASHES:
        raise HoldingsError(
            f"batch {holdings.number} has {count} hashes, but may have at most {MAX_BATCH_HASHES}: "
            f"send several batches",
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


def _runs_of(runs: Iterable[pb.HeldRun], form: HashForm) -> tuple[HashRun, ...]:
    for run in runs:
        _check_size(run.hashes, form)
        if len(run.parent) not in (0, form.hash_bytes):
            raise ChainInvalidError(
                f"a parent has {len(run.parent)} bytes, but must be empty or a hash of "
                f"{form.hash_bytes} bytes",
                field="parent",
            )
    return tuple(HashRun(run.group, run.hashes, run.parent) for run in runs if run.hashes)


def chains_of(request: pb.FindRequest, model: ModelIdentity) -> list[Chain]:
    """Return the chains that are asked for. Raises `ChainInvalidError`."""
    form = form_of(request.form)
    if len(request.chains) > MAX_CHAINS:
        raise ChainInvalidError(
            f"{len(request.chains)} chains, but a call may have at most {MAX_CHAINS}",
            field="chains",
        )
    count = sum(len(chain.hashes) for chain in request.chains) // form.hash_bytes
    if count > MAX_CHAIN_HASHES:
        raise ChainInvalidError(
            f"the chains have {count} hashes, but a call may have at most {MAX_CHAIN_HASHES}: use "
            f"a larger quantum, or ask for the beginning",
            field="chains",
        )
    for chain in request.chains:
        _check_size(chain.hashes, form)
        check_salt(chain.salt)
        _check_ends(chain.ends, form)
        if chain.below_tokens < 0:
            raise ChainInvalidError(
                f"below_tokens {chain.below_tokens} must not be negative", field="below_tokens"
            )
    return [
        Chain(
            replace(model, revision=revision_of(chain.revision)) if chain.revision else model,
            form,
            chain.salt,
            chain.hashes,
            chain.below_tokens,
            tuple(ChainEnd(end.position_tokens, end.hash) for end in chain.ends),
        )
        for chain in request.chains
    ]


def named_of(prefix: pb.Prefix, position_tokens: int) -> NamedPrefix:
    """Return a state's name by its hashes. Raises `ChainInvalidError` if they do not fit."""
    form = form_of(prefix.form)
    check_salt(prefix.salt)
    _check_size(prefix.hashes, form)
    count, quantum_tokens = len(prefix.hashes) // form.hash_bytes, form.quantum_tokens
    if count > MAX_CHAIN_HASHES:
        raise ChainInvalidError(
            f"the prefix has {count} hashes, but may have at most {MAX_CHAIN_HASHES}",
            field="hashes",
        )
    whole, rest_tokens = divmod(position_tokens, quantum_tokens)
    end_bytes = form.hash_bytes if rest_tokens else 0
    if position_tokens < 1 or count != whole or len(prefix.end_hash) != end_bytes:
        raise ChainInvalidError(
            f"a prefix of {position_tokens} tokens needs a hash for each {quantum_tokens} tokens, "
            f"and an end_hash if some are left over; this prefix has {count} hashes and an "
            f"end_hash of {len(prefix.end_hash)} bytes",
            field="hashes",
        )
    revision = revision_of(prefix.revision)
    return NamedPrefix(position_tokens, form, prefix.salt, prefix.hashes, prefix.end_hash, revision)


def _check_ends(ends: Sequence[pb.ChainEnd], form: HashForm) -> None:
    """Raise `ChainInvalidError` for too many ends, or ends that do not rise."""
    if len(ends) > MAX_ENDS:
        raise ChainInvalidError(
            f"{len(ends)} ends, but a chain may have at most {MAX_ENDS}", field="ends"
        )
    before = 0
    for end in ends:
        position_tokens = end.position_tokens
        if position_tokens <= before or not position_tokens % form.quantum_tokens:
            raise ChainInvalidError(
                f"an end at token {position_tokens} after an end at {before}: ends must "
                f"rise, and must not be multiples of the quantum of {form.quantum_tokens} tokens",
                field="ends",
            )
        before = position_tokens
        if len(end.hash) != form.hash_bytes:
            raise ChainInvalidError(
                f"an end's hash has {len(end.hash)} bytes, but the chain's have {form.hash_bytes}",
                field="ends",
            )


def limit_of(limit: int) -> int:
    """Return how many holders to name. Raises `RequestError`."""
    if not 0 <= limit <= MAX_HOLDERS:
        raise RequestError(f"limit is {limit}; it must be 0 to {MAX_HOLDERS}", field="limit")
    return limit or DEFAULT_HOLDERS


def model_of(model: pb.ModelName) -> ModelIdentity:
    """Return the model that is named. Raises `RequestError` if none is."""
    if not model.name:
        raise RequestError("name a model, or an engine whose model it is", field="model")
    return wire.identity_of(model)


def _check_size(hashes: bytes, form: HashForm) -> None:
    if len(hashes) % form.hash_bytes:
        raise ChainInvalidError(
            f"{len(hashes)} bytes of hashes are not a multiple of a hash's {form.hash_bytes} bytes",
            field="hashes",
        )


def fill_found(message: pb.FoundPrefix, held: list[tuple[EngineRecord, int]], limit: int) -> None:
    """Write up to ``limit`` holders, most tokens first, then the less busy."""
    held.sort(
        key=lambda holding: (
            -holding[1],
            holding[0].draining,
            len(holding[0].handoffs),
            holding[0].key,
        )
    )
    for engine, tokens in held[:limit]:
        holder = message.holders.add()
        holder.engine_id = engine.key.engine_id
        holder.tokens = tokens
        holder.layout_digest = engine.layout_digest
        holder.open = len(engine.handoffs)
        holder.draining = engine.draining


def fill_changes(message: pb.WatchResponse, changes: Iterable[Change]) -> None:
    """Write changes of what engines hold."""
    for change in changes:
        said = message.changes.add(engine_id=change.teller.engine.engine_id)
        if change.kind is Kind.BEGAN:
            said.began.CopyFrom(_began(change.teller))
        elif change.kind is Kind.ENDED:
            said.ended.SetInParent()
        else:
            told = said.held if change.kind is Kind.HELD else said.evicted
            told.salt, told.revision = change.salt, change.revision
            told.group, told.hashes = change.group, change.hashes


def _began(teller: Announcements) -> pb.WatchedEngine:
    tokens = teller.form.quantum_tokens
    return pb.WatchedEngine(
        model=pb.ModelName(**asdict(replace(teller.model, revision=teller.revision))),
        form=pb.HashForm(**teller.form._asdict()),
        groups=[
            pb.WatchedGroup(
                group=rule.name,
                block_tokens=rule.block_quanta * tokens,
                window_tokens=rule.window_quanta * tokens,
            )
            for rule in teller.rules
        ],
        store=teller.keeps,
    )


def engine_holdings(
    teller: Announcements, holders: Holders, engine: EngineRecord | None
) -> admin_pb2.EngineHoldings:
    """Return what an engine holds of each group, and how its offers ended."""
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
    """Return what a tenant's holdings take."""
    return admin_pb2.TenantHoldings(
        tenant=tenant,
        hashes=len(holders.index),
        bytes=holders.index.size_bytes,
        limit_bytes=limit_bytes,
        forgotten=holders.forgotten,
    )
