"""What a peer calls itself or says steers no terminal, no line of a log, and no page."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Callable
from dataclasses import replace
from typing import Any

import grpc
import pytest
from typer.testing import CliRunner

from broker.fakes import (
    D_BLOCKS,
    P_BLOCKS,
    POSITION,
    Pair,
    engine,
    heard,
    model_layout,
    pair,
)
from broker.guarded import ask
from restow.broker.cli.main import app
from restow.broker.client import AdminClient, Credentials
from restow.broker.client.connection.channel import open_channel
from restow.broker.client.connection.errors import from_rpc_error
from restow.broker.errors import RestowError
from restow.broker.layout import Layout
from restow.broker.printable import MAX_ESCAPED, shown, shown_values
from restow.broker.rpc import wire
from restow.broker.server.observe.status import StatusPage
from restow.broker.server.serve import RunningBroker
from restow.v1 import admin_pb2, agent_link_pb2_grpc, broker_pb2_grpc
from restow.v1 import agent_link_pb2 as link
from restow.v1 import broker_pb2 as pb

HOSTILE = {
    "a terminal's escape": "x\x1b[2Jx",
    "one of eight bits": "x\x9b2Jx",
    "another line": "x\nDONE x",
    "the same line again": "x\rDONE x",
    "a tab": "x\tx",
    "turned around": "x\u202ey",
    "isolated": "x\u2066y",
    "without room": "x\u200by",
    "a line's end of Unicode's": "x\u2028y",
    "nothing": "x\0",
}
REAL = (
    "cmpl-7a0e2b9c4d1f4f0e8a6f2d3c5b7a9e10-0",
    "chatcmpl-" + "f" * 32,
    "0b6f8d2e-6c8e-4d4c-9d0f-2f5b6f9d8a11",
    "cmpl-user's own id: été 漢字 \U0001f600",
    "tenant/4711 [retry] #2",
)
HUGGING_FACE = "nvidia/NVIDIA-Nemotron-Nano-9B-v2"
SAID = "gone\x1b]0;owned\x07\r\nDONE \u202edesrever"
ESCAPED = r"gone\x1b]0;owned\x07\r\nDONE \u202edesrever"

Rename = Callable[[Layout, str], Layout]


def registration(layout: Layout, name: str = "e", incarnation: str = "1") -> Any:
    ref = pb.EngineRef(engine_id=name, incarnation=incarnation)
    return pb.RegisterEngineRequest(engine=ref, layout=wire.layout_to_proto(layout))


async def refused(call: Any) -> str:
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await call
    error = from_rpc_error(caught.value, "here")
    assert error.message.isprintable()
    return error.reason


def in_model(layout: Layout, **more: Any) -> Layout:
    return replace(layout, model=replace(layout.model, **more))


def in_region(layout: Layout, **more: Any) -> Layout:
    rank = layout.ranks[0]
    regions = (replace(rank.regions[0], **more), *rank.regions[1:])
    return replace(layout, ranks=(replace(rank, regions=regions),))


def in_field(layout: Layout, **more: Any) -> Layout:
    fields = layout.model.fields
    return in_model(layout, fields=(replace(fields[0], **more), *fields[1:]))


IN_A_LAYOUT: dict[str, Rename] = {
    "model": lambda layout, name: in_model(layout, name=name),
    "revision": lambda layout, name: in_model(layout, revision=name),
    "adapter": lambda layout, name: in_model(layout, adapter=name),
    "quantisation": lambda layout, name: in_model(layout, quantisation=name),
    "scales": lambda layout, name: in_field(layout, scales=name),
    "axis": lambda layout, name: in_field(layout, axes=(name, *layout.model.fields[0].axes[1:])),
    "region": lambda layout, name: in_region(layout, name=name),
    "group": lambda layout, name: in_region(layout, group=name),
}


async def test_no_engine_and_no_handoff_has_such_a_name(running: RunningBroker, both: Pair) -> None:
    stub = broker_pb2_grpc.BrokerStub(both.channel)
    for what, name in HOSTILE.items():
        layout = model_layout(1)
        for given in (registration(layout, name), registration(layout, "e", name)):
            assert await refused(stub.RegisterEngine(given)) == "ARGUMENT_INVALID", what
        for call in (both.p.publish(name, P_BLOCKS, POSITION), both.d.request(name, D_BLOCKS)):
            with pytest.raises(Exception, match="printable") as caught:
                await call
            assert str(caught.value).isprintable()
        await both.p_agents[0].fence(name)
    await both.hand_over("next")
    engines = running.hub.directory.members.engines
    assert all(not len(one.unpublished_fences) for one in engines.values())


async def test_nothing_of_a_layout_has_such_a_name(both: Pair) -> None:
    stub = broker_pb2_grpc.BrokerStub(both.channel)
    for what, name in HOSTILE.items():
        for rename in IN_A_LAYOUT.values():
            call = stub.RegisterEngine(registration(rename(model_layout(1), name)))
            assert await refused(call) == "LAYOUT_MALFORMED", what


async def test_no_agent_and_no_host_has_such_a_name(both: Pair) -> None:
    for name in HOSTILE.values():
        for what in ("agent_name", "host"):
            hello = link.Hello()
            hello.CopyFrom(both.p_agents[0].hello)
            setattr(hello, what, name)
            first = link.ConnectRequest(messages=[link.AgentMessage(hello=hello)])
            call = agent_link_pb2_grpc.AgentLinkStub(both.channel).Connect(once(first))
            assert await refused(call.read()) == "AGENT_REGIONS_MISMATCH", (what, name)
    await both.hand_over("next")


async def once(request: Any) -> AsyncIterator[Any]:
    yield request


async def test_names_that_engines_really_have_are_taken(running: RunningBroker) -> None:
    layout = in_model(model_layout(1), name=HUGGING_FACE, revision="refs/pr/7")
    async with (
        engine(running.address, "prefill 1/rack b", layout=layout) as p,
        engine(running.address, "d", layout=layout) as d,
        open_channel(running.address, Credentials()) as channel,
    ):
        for name in REAL:
            await Pair(*p, *d, channel).hand_over(name)


def settles_with(reason: str, detail: str) -> Callable[[link.AgentOrder], list[link.AgentMessage]]:
    def answer(order: link.AgentOrder) -> list[link.AgentMessage]:
        if order.WhichOneof("body") != "execute":
            return []
        failed = link.Settled(handoff=order.execute.handoff, reason=reason, detail=detail)
        return [link.AgentMessage(settled=failed)]

    return answer


async def test_what_was_said_is_kept_and_shown_with_escapes(running: RunningBroker) -> None:
    async with pair(running.address, 1, 1) as both:
        fail = {"READ_FAILED": "READ_FAILED", "no\x1b[2Jword": "INTERNAL"}
        for number, (given, kept) in enumerate(fail.items()):
            both.d_agents[0].answers = settles_with(given, SAID)
            await both.published(f"h{number}")
            ended = await both.d.request(f"h{number}", D_BLOCKS)
            assert ended.reason == kept
            assert ESCAPED in ended.detail
            assert ended.detail.isprintable()
        stub = broker_pb2_grpc.BrokerStub(both.channel)
        released = both.p.publish("given-up", P_BLOCKS, POSITION)
        await heard(running, "given-up")
        gone = pb.Cancellation(handoff_id="given-up", detail=SAID + "x" * (1 << 20))
        await stub.Cancel(pb.CancelRequest(engine=both.p.ref, cancellation=gone))
        ended = await released
        assert ESCAPED in ended.detail
        assert len(ended.detail) < 2000
        for look in (StatusPage(running.hub).look({}), await listed(running)):
            assert ESCAPED in str(look).replace(r"\\", "\\")
        for words in (("handoffs",), ("handoff", "given-up"), ("handoff", "h1")):
            text = await printed(*words, "--broker", running.address)
            assert all(line.isprintable() for line in text.splitlines())
            assert SAID not in text


async def printed(*words: str) -> str:
    """Return what a command prints, with its errors."""
    run = CliRunner(env={"COLUMNS": "400"}).invoke
    return (await asyncio.to_thread(run, app, list(words))).output


async def listed(running: RunningBroker) -> Any:
    return (await ask(running.address, Credentials(), lambda client: client.handoffs())).handoffs


async def _list_engines(request: bytes, context: Any) -> bytes:
    info = admin_pb2.EngineInfo(engine_id=SAID, model=SAID, revision=SAID, incarnation=SAID)
    return admin_pb2.ListEnginesResponse(engines=[info]).SerializeToString()


async def _get_handoff(request: bytes, context: Any) -> None:
    await context.abort(grpc.StatusCode.NOT_FOUND, SAID)


async def test_commands_show_a_hostile_broker_with_escapes() -> None:
    server = grpc.aio.server()
    methods: dict[str, Any] = {
        "ListEngines": grpc.unary_unary_rpc_method_handler(_list_engines),
        "GetHandoff": grpc.unary_unary_rpc_method_handler(_get_handoff),
    }
    handler = grpc.method_handlers_generic_handler("restow.v1.Admin", methods)
    server.add_generic_rpc_handlers((handler,))
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    try:
        address = ("--broker", f"127.0.0.1:{port}")
        text = await printed("engines", *address)
        assert ESCAPED in text
        assert all(line.isprintable() for line in text.splitlines())
        document = json.loads(await printed("engines", "--json", *address))
        assert document["engines"][0]["engine_id"] == SAID
        with AdminClient(address[1]) as client, pytest.raises(RestowError) as caught:
            await asyncio.to_thread(client.handoff, "h")
        assert caught.value.message.endswith(f": {ESCAPED})")
    finally:
        await server.stop(None)


@pytest.mark.parametrize("text", [*HOSTILE.values(), SAID])
def test_whatever_is_shown_is_printable(text: str) -> None:
    assert shown(text).isprintable()
    assert shown_values({text: [text, {"a": text}, 1, None]}) == {
        shown(text): [shown(text), {"a": shown(text)}, 1, None]
    }


def test_of_megabytes_that_are_not_printable_the_beginning_is_shown() -> None:
    assert len(shown("\0" * (1 << 24))) == 4 * MAX_ESCAPED + 3
