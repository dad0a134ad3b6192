"""A block id that is none of the engine's is refused in one way, at the call that names it."""

from __future__ import annotations

import asyncio
import secrets
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from broker.fakes import PAGES, POSITION, engine, model_layout
from broker.guarded import error_of
from restow.broker.client import BlockingSession, EngineSession
from restow.broker.errors import PageRangeError
from restow.broker.server.serve import RunningBroker

COUNTS = {"attention": PAGES, "state": PAGES}
NO_IDS: list[object] = [
    [-1],
    [PAGES],
    [1, "x"],
    ["x"],
    [2**31],
    [2**80],
    [1, 1.5],
    [True],
    [1, True],
    [None],
    [[1]],
    [1, [2]],
    np.array([[1, 2]]),
    np.array([0.5]),
    np.array([-3]),
    np.array([2**63], np.uint64),
    "x",
    7,
    None,
]
Session = EngineSession | BlockingSession
CALLS: list[Callable[[Session, Any], object]] = [
    lambda session, blocks: session.publish("mine", blocks, POSITION),
    lambda session, blocks: session.request("mine", blocks),
]


@pytest.mark.parametrize("ids", NO_IDS, ids=repr)
async def test_what_is_no_block_id_is_refused_at_the_call(ids: object) -> None:
    # The session refuses the ids by itself: no broker is there.
    life = secrets.token_hex(4)
    session = EngineSession("e", life, model_layout(), "nowhere:1", block_counts=COUNTS)
    for call in CALLS:
        with pytest.raises(PageRangeError, match="handoff mine, group attention") as caught:
            call(session, {"state": [1], "attention": ids})
        assert caught.value.reason == "PAGE_OUT_OF_RANGE"
        assert caught.value.subject["handoff"] == "mine"
        assert caught.value.subject["range"] == f"[0, {PAGES})"
    assert session._handoffs.empty


@pytest.mark.parametrize(("ids", "named"), [([3, -1, 5], "-1"), ([1, "x"], "'x'"), ([80], "80")])
async def test_the_error_names_the_id(ids: list[object], named: str) -> None:
    session = EngineSession("e", "1", model_layout(), "nowhere:1", block_counts={"attention": 80})
    with pytest.raises(PageRangeError) as caught:
        CALLS[0](session, {"attention": ids})
    assert caught.value.subject["page"] == named
    assert f"block id {named} is none of [0, 80)" in caught.value.message


async def test_threads_hear_it_at_the_call_too(running: RunningBroker) -> None:

    def ask() -> None:
        life = secrets.token_hex(4)
        with BlockingSession("e", life, model_layout(), running.address) as session:
            for call in CALLS:
                with pytest.raises(PageRangeError):
                    call(session, {"attention": [-1]})
            assert session.drain(0)

    await asyncio.to_thread(ask)


async def test_without_counts_the_broker_refuses_under_the_same_reason(
    running: RunningBroker,
) -> None:
    async with engine(running.address, "e") as (session, _):
        refused = await error_of(
            session.publish("h", {"attention": [1, 2, PAGES], "state": [4]}, POSITION)
        )
        assert refused.reason == PageRangeError.reason
        assert f"block {PAGES} is outside of [0, {PAGES})" in refused.message
        assert refused.subject["handoff"] == "h"


IDS: list[Any] = [[], (0, PAGES - 1), range(3), np.arange(3, dtype=np.uint8), {4: 5}, [np.int32(2)]]


async def test_ids_of_any_iterable_are_taken(running: RunningBroker) -> None:
    async with engine(running.address, "e", block_counts=COUNTS) as (session, _):
        for number, ids in enumerate(IDS):
            blocks = {"attention": (one for one in ids), "state": [1]}
            said = session.publish(f"h{number}", blocks, POSITION, final=False)
            session.cancel(f"h{number}")
            assert (await said).reason == "CANCELLED"
