"""The same through real gRPC: it answers every time, and the server lives."""

from __future__ import annotations

import asyncio
import contextlib
import logging
from typing import Any

import grpc
import pytest
from hypothesis import given
from hypothesis import strategies as st

from broker.fakes import Pair, broker, pair
from fuzzing.door import read_refusal
from fuzzing.messages import ODDNESS, Known, draw_message, spoiled
from fuzzing.party import ANSWERING, METHODS, STREAMING, UNARY
from fuzzing.rounds import tried
from restow.v1 import broker_pb2 as pb
from restow.v1.admin_pb2 import SetDrainingRequest
from restow.v1.admin_pb2_grpc import AdminStub

CALLS = st.lists(st.sampled_from(sorted(METHODS)), min_size=1, max_size=6)
WAITS = "/restow.v1.Broker/Request"
"""Answers at the end of a handoff only."""
UNTOLD = "Internal error from Core"


def known(both: Pair) -> Known:
    """Return what others may say: anything in the name of an engine that does not exist."""
    return Known(
        {"handoff_id": ["h", "x"], "final": [True, False]},
        {
            "restow.v1.EngineRef": [pb.EngineRef(engine_id="x", incarnation="1")],
            "restow.v1.Layout": [both.p._stream.message.layout],
        },
    )


async def said_and_heard(call: Any, words: bytes, times: int) -> None:
    """Send a request, and read all that comes; a refusal must have its reason."""
    # It was refused before all was said: that is told by the first, or, once heard, by the second.
    with contextlib.suppress(grpc.aio.AioRpcError, asyncio.InvalidStateError):
        for _ in range(times):
            await call.write(words)
        await call.done_writing()
    try:
        async for _ in call:
            continue
    except grpc.aio.AioRpcError as error:
        # A client of grpc.aio whose stream ends while it writes is not told why: its own words.
        if times and error.details() == UNTOLD:
            return
        check(error)


def check(error: grpc.aio.AioRpcError) -> None:
    if error.code() is not grpc.StatusCode.DEADLINE_EXCEEDED:
        read_refusal(error.code(), error.details() or "", error.trailing_metadata() or ())


@tried(30)
@given(data=st.data())
async def test_whatever_is_said_the_server_lives(data: st.DataObject) -> None:
    # No letter drawn by chance names one of them: an operator may well drain or forget it.
    names = "prefill", "decode"
    async with broker() as running, pair(running.address, names=names) as both:
        running.hub.expected.wait_s = 0.02  # agents are kept waiting for an engine
        for path in data.draw(CALLS):
            kind = METHODS[path].input_type
            said = draw_message(data.draw, kind, known(both), data.draw(ODDNESS))
            words = said.SerializeToString()
            if data.draw(st.booleans()):
                words = data.draw(spoiled(words))
            if path in STREAMING:
                stream: Any = both.channel.stream_stream(path)
                await said_and_heard(stream(), words, data.draw(st.integers(0, 2)))
                continue
            if path in ANSWERING:
                answers: Any = both.channel.unary_stream(path)
                try:
                    await answers(words).read()
                except grpc.aio.AioRpcError as error:
                    check(error)
                continue
            method: Any = both.channel.unary_unary(path)
            try:
                await method(words, timeout=0.02 if path == WAITS else 60)
            except grpc.aio.AioRpcError as error:
                check(error)
        # An operator may have said it.
        await AdminStub(both.channel).SetDraining(SetDrainingRequest(draining=False))
        await both.hand_over("good")
        assert not running.clock.done()


async def test_a_stream_is_refused_while_more_is_said_on_it() -> None:
    stranger = pb.SessionRequest(engine=pb.EngineRef(engine_id="x", incarnation="1"))
    words = stranger.SerializeToString()
    async with broker() as running, grpc.aio.insecure_channel(running.address) as channel:
        stream: Any = channel.stream_stream("/restow.v1.Broker/Session")
        call = stream()
        await call.write(words)
        assert await call.code() is grpc.StatusCode.NOT_FOUND
        await said_and_heard(call, words, 1)


async def test_what_is_larger_than_a_message_may_be(caplog: pytest.LogCaptureFixture) -> None:
    async with broker() as running, pair(running.address) as both:
        for path in UNARY:
            method: Any = both.channel.unary_unary(path)
            with pytest.raises(grpc.aio.AioRpcError) as caught:
                await method(b"\0" * (16 << 20) + b"\0")
            assert caught.value.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
        await both.hand_over("good")
    assert not [one for one in caplog.records if one.levelno >= logging.ERROR]
