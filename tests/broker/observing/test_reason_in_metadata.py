"""Every refusal says its reason in plain metadata too: many clients decode no `ErrorInfo`."""

from __future__ import annotations

from collections.abc import Awaitable
from typing import Any

import grpc
import pytest

from broker.certificates import DOMAIN, Authority
from broker.guarded import channel_of, guarded, methods_of_the_contract, register, said_raw
from restow.broker.client.connection.channel import open_channel
from restow.broker.client.connection.errors import BrokerCallError
from restow.broker.rpc.status import REASON_KEY, abort
from restow.broker.server.serve import RunningBroker


async def reason_of(call: Awaitable[object]) -> str:
    """Return the reason in the metadata of a refused call."""
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await call
    return str(dict(caught.value.trailing_metadata() or ())[REASON_KEY])


async def test_of_every_method_that_refuses_its_words(running: RunningBroker) -> None:
    async with open_channel(running.address) as channel:
        for method in methods_of_the_contract():
            assert await reason_of(said_raw(channel, method, b"\xff")) == "ARGUMENT_INVALID"


async def test_of_calls_that_are_refused_for_their_caller(authority: Authority) -> None:
    nobody = authority.client()
    router = authority.client(f"{DOMAIN}/tenant/a/router")
    async with guarded(authority) as running:
        for who, reason in ((nobody, "UNAUTHENTICATED"), (router, "FORBIDDEN")):
            async with channel_of(running.address, who) as channel:
                assert await reason_of(register(channel)) == reason


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
