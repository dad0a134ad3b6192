"""Hostile answers of a broker: a session goes on, or ends with a typed error for every caller."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import AsyncIterator, Iterator
from dataclasses import dataclass, field
from typing import Any
from unittest.mock import patch

import grpc
import pytest
from google.protobuf import any_pb2
from google.rpc import error_details_pb2, status_pb2
from hypothesis import given
from hypothesis import strategies as st

from broker.fakes import D_BLOCKS, P_BLOCKS, POSITION, model_layout
from fuzzing.house import quiet
from fuzzing.messages import ODDNESS, STRINGS, Draw, Known, draw_message, spoiled
from fuzzing.rounds import tried
from restow.broker.client import EngineSession, Offer, Prefix
from restow.broker.client.connection.errors import BrokerUnreachableError, from_rpc_error
from restow.broker.errors import RestowError
from restow.broker.rpc.status import ERROR_DOMAIN
from restow.v1 import broker_pb2 as pb
from simulation_harness.network import failure
from simulation_harness.virtual_loop import VirtualLoop

KNOWN = Known(
    {
        "handoff_id": ["p", "d", "other"],
        "message_id": [0, 1, 2, 3],
        "reason": ["", "BROKEN"],
        "status": ["ABORTED", "nonsense", ""],
        "state": list(pb.HandoffState.values()),
        "position_tokens": [40, 64],
        "hashes": [b"", bytes(64), bytes(128)],
        "within_ms": [0, 2000],
    }
)
LED_ELSEWHERE = ("NOT_LEADER", "leader", "elsewhere:1", "elsewhere:2,elsewhere:3")
WORDS = st.sampled_from(
    [*STRINGS, *LED_ELSEWHERE, "status", "reason", "message", "self", "subject", "engine"]
)
CODES = st.sampled_from([one for one in grpc.StatusCode if one is not grpc.StatusCode.OK])


@pytest.fixture(autouse=True)
def silence() -> Iterator[None]:
    with quiet():
        yield


def details(draw: Draw) -> tuple[str, tuple[tuple[str, bytes], ...]]:
    """Draw the words of a status, and the details that it carries."""
    info = error_details_pb2.ErrorInfo(
        reason=draw(WORDS), domain=draw(WORDS), metadata=draw(st.dictionaries(WORDS, WORDS))
    )
    packed = any_pb2.Any()
    packed.Pack(info)
    if draw(st.integers(0, 3)) == 0:
        packed.value = draw(st.binary(max_size=8))
    status = status_pb2.Status(code=draw(st.integers(0, 20)), message=draw(WORDS), details=[packed])
    data = status.SerializeToString()
    if draw(st.integers(0, 3)) == 0:
        data = draw(spoiled(data))
    words = status.message if draw(st.booleans()) else draw(WORDS)
    return words, (("grpc-status-details-bin", data),)


@tried(150)
@given(st.data(), CODES)
def test_every_failure_of_a_call_is_typed(data: st.DataObject, code: grpc.StatusCode) -> None:
    words, trailing = details(data.draw)
    error = from_rpc_error(failure(code, words, trailing), "here")
    assert isinstance(error, RestowError)
    assert error.status in (code.name, BrokerUnreachableError.status)
    assert isinstance(error.reason, str)


def test_the_reason_of_a_refusal_is_read_whatever_it_is_about() -> None:
    names = ("status", "reason", "message", "self", "engine")
    subject = dict.fromkeys(names, "x")
    info = error_details_pb2.ErrorInfo(reason="BROKEN", domain=ERROR_DOMAIN, metadata=subject)
    packed = any_pb2.Any()
    packed.Pack(info)
    status = status_pb2.Status(code=10, message="words", details=[packed])
    trailing = (("grpc-status-details-bin", status.SerializeToString()),)
    error = from_rpc_error(failure(grpc.StatusCode.ABORTED, "words", trailing), "here")
    assert (error.status, error.reason, error.message) == ("ABORTED", "BROKEN", "words")
    assert error.subject == subject
    other = failure(grpc.StatusCode.OUT_OF_RANGE, "words", trailing)
    assert from_rpc_error(other, "here").reason == "OTHER_SERVER"


@dataclass
class HostileBroker:
    """As much of a stub as a session uses: streams that say what they are to say, and end."""

    streams: list[list[pb.SessionResponse]]
    ends: list[grpc.aio.AioRpcError]
    heard: list[Any] = field(default_factory=list)

    async def RegisterEngine(
        self,
        request: Any,
        timeout: float,  # noqa: ASYNC109
        metadata: Any,
    ) -> Any:
        return pb.RegisterEngineResponse(layout_digest="digest")

    async def UnregisterEngine(self, *call: Any, **more: Any) -> Any:
        return pb.UnregisterEngineResponse()

    def Session(self) -> Any:
        if not self.streams:
            info = error_details_pb2.ErrorInfo(reason="ENGINE_REPLACED", domain=ERROR_DOMAIN)
            packed = any_pb2.Any()
            packed.Pack(info)
            status = status_pb2.Status(code=10, details=[packed]).SerializeToString()
            trailing = (("grpc-status-details-bin", status),)
            return HostileCall([], failure(grpc.StatusCode.ABORTED, "", trailing), self.heard)
        return HostileCall(self.streams.pop(0), self.ends.pop(0), self.heard)


@dataclass
class HostileCall:
    responses: list[pb.SessionResponse]
    end: grpc.aio.AioRpcError
    heard: list[Any]

    async def write(self, message: Any) -> None:
        self.heard.append(message)

    async def wait_for_connection(self) -> None:
        """Return at once."""

    def cancel(self) -> None:
        """Do nothing: the call keeps nothing."""

    async def __aiter__(self) -> AsyncIterator[pb.SessionResponse]:
        for response in self.responses:
            await asyncio.sleep(0.01)
            yield response
        raise self.end


@tried(80)
@given(st.data())
def test_a_session_outlives_whatever_a_broker_says(data: st.DataObject) -> None:
    streams, ends = [], []
    for _ in range(data.draw(st.integers(1, 3))):
        odd = data.draw(ODDNESS)
        drawn = [
            draw_message(data.draw, pb.SessionResponse.DESCRIPTOR, KNOWN, odd)
            for _ in range(data.draw(st.integers(0, 4)))
        ]
        opened = pb.SessionResponse(events=[pb.EngineEvent(opened=pb.SessionOpened())])
        streams.append(
            [opened, *(pb.SessionResponse.FromString(m.SerializeToString()) for m in drawn)]
        )
        words, trailing = details(data.draw)
        ends.append(failure(grpc.StatusCode.UNAVAILABLE, words, trailing))
    loop = VirtualLoop()
    try:
        loop.run_until_complete(_live(HostileBroker(streams, ends)))
        assert not loop.broken
    finally:
        loop.close()


async def _live(broker: HostileBroker) -> None:
    heard: list[Any] = []
    session = EngineSession(
        "e", "1", model_layout(), "nowhere:1", on_offer=heard.append, on_keep=heard.append
    )
    futures = [
        session.publish("p", P_BLOCKS, POSITION),
        session.request("d", D_BLOCKS),
        session.decline("other"),
    ]
    with (
        patch(
            "restow.broker.client.engine.session.broker_pb2_grpc.BrokerStub",
            lambda channel: broker,
        ),
        patch(
            "restow.broker.client.connection.kept_stream.RenewedChannel.connects", return_value=True
        ),
    ):
        await session.start()
        runner: Any = session._stream._runner
        await asyncio.wait_for(runner, 1000)
        await session.close()
    outcomes: Counter[str] = Counter()
    for future in futures:
        assert future.done(), "nobody answers this caller any more"
        if (error := future.exception()) is not None:
            assert isinstance(error, RestowError)
            outcomes[error.reason] += 1
        else:
            assert future.result().done == (future.result().state == "DONE")
    assert all(isinstance(one, Offer | Prefix) for one in heard)
