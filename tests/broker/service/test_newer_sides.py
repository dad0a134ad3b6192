"""A side of a newer release says what an older one does not know, as the contract has it."""

from __future__ import annotations

import hashlib
import re
from pathlib import Path

import grpc
import pytest

from broker.fakes import D_BLOCKS, broker, model_layout, pair
from broker.service.test_service_streams import batches
from restow.broker.client import HandoffEnded, content_of
from restow.broker.rpc.wire import layout_to_proto
from restow.v1 import broker_pb2 as pb
from restow.v1 import broker_pb2_grpc, layout_pb2

UNKNOWN = b"\xfa\xff\xff\xff\x0f\x01x"
"""Field 536870911, the last number, as text: nobody will know it."""
PROTO = Path(__file__).resolve().parents[3] / "proto" / "restow" / "v1" / "broker.proto"


def registration() -> pb.RegisterEngineRequest:
    engine = pb.EngineRef(engine_id="new", incarnation="1")
    return pb.RegisterEngineRequest(engine=engine, layout=layout_to_proto(model_layout()))


async def test_unknown_fields_are_ignored_and_an_unknown_message_is_refused_alone() -> None:
    async with broker() as running, grpc.aio.insecure_channel(running.address) as channel:
        stub = broker_pb2_grpc.BrokerStub(channel)
        said = registration()
        said.MergeFromString(UNKNOWN)
        await stub.RegisterEngine(said)
        number = pb.EngineMessage(message_id=7).SerializeToString()
        newer = pb.EngineMessage.FromString(number + UNKNOWN)
        known = pb.EngineMessage(message_id=8, renew=pb.Renewal(handoff_id="h", lease_ms=1000))
        call = stub.Session(batches(pb.SessionRequest(engine=said.engine, messages=[newer, known])))
        refused: list[pb.Refused] = []
        async for batch in call:
            refused += [one.refused for one in batch.events if one.HasField("refused")]
            if len(refused) == 2:
                break
        assert (refused[0].message_id, refused[0].reason) == (7, "ARGUMENT_INVALID")
        assert refused[1].message_id == 8


@pytest.mark.parametrize("changed", ["dtype", "kind"])
async def test_an_unknown_value_of_a_layout_is_refused(changed: str) -> None:
    said = registration()
    if changed == "dtype":
        said.layout.ranks[0].shards[0].dtype = 99  # type: ignore[assignment]
    else:
        said.layout.model.fields[0].kind = 99  # type: ignore[assignment]
    async with broker() as running, grpc.aio.insecure_channel(running.address) as channel:
        with pytest.raises(grpc.aio.AioRpcError) as refused:
            await broker_pb2_grpc.BrokerStub(channel).RegisterEngine(said)
    assert refused.value.code() == grpc.StatusCode.INVALID_ARGUMENT


async def test_a_session_ignores_an_event_that_it_does_not_know() -> None:
    async with broker() as running, pair(running.address) as both:
        asked = both.d.request("h", D_BLOCKS)
        both.d._hear(pb.EngineEvent.FromString(UNKNOWN))
        await both.published("h")
        assert (await asked).done


def test_an_unknown_end_is_not_done() -> None:
    ended = HandoffEnded.of(pb.Ended(handoff_id="h", state=99))  # type: ignore[arg-type]
    assert not ended.done


def test_the_contract_tells_how_a_chain_is_hashed() -> None:
    comment = re.sub(r"\s*// ?", " ", PROTO.read_text())
    found = re.search(r"tokens 5 and 6 without adapter and salt is ([0-9a-f]{64})\.", comment)
    assert found is not None
    assert content_of([5, 6, 7], 2).hex() == found[1]
    text = b"restow content 1\0" + b"\2\0\0\0lo" + b"\1\0\0\0s" + b"\5\0\0\0"
    image = b"\xff\xff\xff\xff" + b"\3\0\0\0img"
    told = content_of([5, 6], 2, adapter="lo", salt="s", attachments=[(2, b"late"), (1, b"img")])
    assert told == hashlib.sha256(text + image + b"\6\0\0\0").digest()


def test_layouts_have_no_value_99() -> None:
    assert 99 not in (*layout_pb2.DataType.values(), *layout_pb2.FieldKind.values())
