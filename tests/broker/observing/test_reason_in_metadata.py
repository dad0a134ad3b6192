"""Every refusal says its reason in plain metadata too: many clients decode no `ErrorInfo`."""

from __future__ import annotations

from collections.abc import Awaitable
from pathlib import Path
from typing import Any

import grpc
import pytest

from broker.certificates import DOMAIN, Authority
from broker.fakes import broker
from broker.guarded import channel_of, everything, first_of, guarded, methods_of_the_contract
from restow.broker.client.connection.channel import open_channel
from restow.broker.client.connection.errors import BrokerCallError
from restow.broker.rpc.status import REASON_KEY, abort


async def reason_of(call: Awaitable[object]) -> str:
    """Return the reason in the metadata of a refused call."""
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await call
    return str(dict(caught.value.trailing_metadata() or ())[REASON_KEY])


def said_raw(channel: grpc.aio.Channel, method: Any, words: bytes) -> Awaitable[object]:
    """Call a method with bytes."""
    made: Any = channel  # grpc's types know no method without serializers
    path = f"/{method.containing_service.full_name}/{method.name}"
    if method.client_streaming:
        return first_of(made.stream_stream(path)(iter([words])))
    refused: Awaitable[object] = made.unary_unary(path)(words)
    return refused


async def test_of_every_method_that_refuses_its_words() -> None:
    async with broker() as running, open_channel(running.address) as channel:
        for method in methods_of_the_contract():
            assert await reason_of(said_raw(channel, method, b"\xff")) == "ARGUMENT_INVALID"


async def test_of_every_method_that_refuses_its_caller(tmp_path: Path) -> None:
    authority = Authority(tmp_path)
    nobody = authority.client()
    router = authority.client(f"{DOMAIN}/tenant/a/router")
    for who, reason in ((nobody, "UNAUTHENTICATED"), (router, "FORBIDDEN")):
        async with (
            guarded(authority) as running,
            channel_of(running.address, who) as channel,
        ):
            calls = everything(channel)
            for name in ("GetHandoff", "AbandonHandoff", "Find"):
                if who is router:  # which it may
                    del calls[name]
            for name, call in calls.items():
                assert await reason_of(call()) == reason, name


class _Ends:
    """A call's context, as far as it is ended."""

    trailing: tuple[tuple[str, str | bytes], ...] = ()

    async def abort(self, code: object, details: str, trailing: Any) -> None:
        self.trailing = trailing


@pytest.mark.parametrize("reason", ["READ FAILED", "ä", "A\n", "", "R" * 65])
async def test_what_is_passed_on_and_no_word_is_not_put_into_metadata(reason: str) -> None:
    ends = _Ends()
    await abort(ends, BrokerCallError("ABORTED", reason, "as a broker said it"))  # type: ignore[arg-type]
    assert dict(ends.trailing)[REASON_KEY] == "INTERNAL"
