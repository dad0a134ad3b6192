"""Prefixes that can't be, and holders that give nothing: a reason each, and others lose nothing."""

from __future__ import annotations

import asyncio
import hashlib
from collections.abc import Iterator
from dataclasses import replace

import pytest

from agent_harness.waiting import WAIT_S, until
from broker.certificates import Authority
from broker.content.holders import D_STATE, PROMPT, STATE, ask, heard, hold, holder
from broker.fakes import broker, engine, model_layout
from broker.guarded import guarded, of_tenant
from restow.broker.client import BrokerCallError, EngineSession, HashForm, Prefix
from restow.broker.core.common.events import MAX_CHAIN_HASHES
from restow.broker.server.serve import RunningBroker

TOLD = 300_000
SMALL = HashForm("small", 16, 8)
AT_ONCE = 50_000
ROOM_BYTES = 8 << 20


def invented(count: int) -> Iterator[list[bytes]]:
    """Yield batches of hashes of no content."""
    for first in range(0, count, AT_ONCE):
        some = range(first, min(first + AT_ONCE, count))
        yield [hashlib.blake2b(b"%d" % one, digest_size=8).digest() for one in some]


@pytest.mark.timeout(120)
async def test_a_flood_of_holdings_that_do_not_exist_costs_its_tenant_alone(
    authority: Authority,
) -> None:
    mine, theirs = of_tenant(authority, "a"), of_tenant(authority, "b")
    async with (
        guarded(authority, tenant_max_holdings_bytes=ROOM_BYTES) as running,
        engine(running.address, "d", credentials=mine) as (d, _),
        engine(running.address, "p", credentials=theirs) as (p, _),
        engine(running.address, "other", credentials=theirs) as (other, _),
    ):
        hold(p)
        await heard(running, "p", 2, "b")
        prefixes = running.hub.directory.prefixes
        async with engine(running.address, "liar", credentials=mine) as (liar, _):
            batches = 0
            for hashes in invented(TOLD):
                liar.hold(SMALL, "attention", hashes)
                liar.hold(SMALL, "state", hashes[-1:])
                batches += -(-len(hashes) // 4096) + 1
                await heard(running, "liar", batches, "a")
                assert prefixes.holders["a"].index.size_bytes <= ROOM_BYTES
                # Meanwhile, and of another tenant:
                ((found,),) = await other.find([PROMPT], timeout_s=WAIT_S)
                assert (found.engine_id, found.tokens) == ("p", 160)
            assert prefixes.holders["a"].forgotten > TOLD / 2
            assert prefixes.holders["b"].forgotten == 0
            # What is found of them is not there, and who asks is told so.
            claimed = Prefix(SMALL, 16, (hashes[-1],))
            assert (await d.request("h", D_STATE, prefix=claimed)).reason == "NOT_HELD"
            offering = running.hub.directory.offering
            assert (offering.offered, offering.declined) == (1, 1)
        await until(lambda: "a" not in prefixes.holders, 60.0)
        assert prefixes.size_bytes == prefixes.holders["b"].index.size_bytes


async def test_the_only_holder_that_never_answers_is_not_held() -> None:
    async with (
        broker(offer_s=0.2) as running,
        holder(running, "p") as p,
        engine(running.address, "d") as (d, _),
    ):
        p.answer = p.be_silent
        ended = await ask(d, "one")
        assert (ended.state, ended.reason) == ("CANCELLED", "NOT_HELD")
        assert "declined it (1)" in ended.detail
        # Whoever asks before the time is up hears its own end.
        patient = asyncio.ensure_future(d.request("two", D_STATE, prefix=STATE, timeout_ms=50))
        assert (await patient).state in ("FAILED", "EXPIRED", "CANCELLED")
        offering = running.hub.directory.offering
        await until(lambda: not offering.open)
        # Nothing of it is left: the next one is given.
        p.answer = p.publish
        assert (await ask(d, "three")).state == "DONE"


async def test_states_of_weights_that_nothing_tells_are_not_found_by_their_content(
    running: RunningBroker,
) -> None:
    # Two models of one name and shape may be two fine-tunes.
    said = model_layout()
    unsupported_layer = replace(said, model=replace(said.model, revision=""))
    async with (
        engine(running.address, "p", layout=unsupported_layer) as (p, _),
        engine(running.address, "d", layout=unsupported_layer) as (d, _),
    ):
        hold(p, 4, [4])
        with pytest.raises(BrokerCallError, match="no revision") as refused:
            await d.find([PROMPT], timeout_s=WAIT_S)
        assert refused.value.reason == "WEIGHTS_UNKNOWN"
        ended = await ask(d)
        assert ended.reason == "NOT_HELD"
        assert "no revision" in ended.detail
        assert not running.hub.directory.prefixes.holders


async def test_a_prefix_that_is_too_long_is_refused_with_a_reason(d: EngineSession) -> None:
    hashes = tuple(bytes(8) for _ in range(MAX_CHAIN_HASHES + 1))
    with pytest.raises(BrokerCallError, match="may have at most") as refused:
        await d.request("h", D_STATE, prefix=Prefix(SMALL, 16 * len(hashes), hashes))
    assert refused.value.reason == "CHAIN_INVALID"
    assert (await ask(d, "next")).reason == "NOT_HELD"
