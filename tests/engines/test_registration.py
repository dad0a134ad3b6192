"""An engine waits at its start for a broker that cannot serve it yet."""

from __future__ import annotations

import asyncio
import subprocess
import sys
from typing import Any

import grpc
import pytest
import structlog

from agent_harness.waiting import until
from broker.fakes import broker, model_layout
from restow.agents.engines.common import registration
from restow.agents.engines.common.registration import ConnectorSettings, register_engine
from restow.broker.client import NoWelcomeError
from restow.broker.errors import NoLeaderError, RestowError
from restow.broker.rpc.status import ErrorInterceptor
from restow.broker.server.serve import SERVER_OPTIONS


def refusing(refusal: RestowError) -> grpc.GenericRpcHandler:
    """Refuse the registration of every engine."""

    async def refuse(_: bytes, __: Any) -> None:
        raise refusal

    handler: grpc.RpcMethodHandler[bytes, bytes] = grpc.unary_unary_rpc_method_handler(refuse)
    return grpc.method_handlers_generic_handler("restow.v1.Broker", {"RegisterEngine": handler})


@pytest.mark.parametrize("refusal", [NoLeaderError("nobody leads"), NoWelcomeError("not yet")])
async def test_a_broker_that_can_not_serve_yet_is_waited_for(
    refusal: RestowError, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(registration, "LOG_INTERVAL_S", 2.0)
    server = grpc.aio.server(options=SERVER_OPTIONS, interceptors=[ErrorInterceptor()])
    server.add_generic_rpc_handlers((refusing(refusal),))
    address = f"127.0.0.1:{server.add_insecure_port('127.0.0.1:0')}"
    await server.start()
    settings, log = ConnectorSettings(broker=address), structlog.get_logger()
    with structlog.testing.capture_logs() as entries:

        def waits() -> list[Any]:
            return [one for one in entries if one["event"] == "the broker is not there yet"]

        registering = asyncio.create_task(
            asyncio.to_thread(
                register_engine, "e", "1", model_layout(), settings, log, publishes=True, asks=True
            )
        )
        await until(lambda: bool(waits()) or registering.done())
        await server.stop(0)
        assert not registering.done(), registering.exception()
        async with broker(address):
            session = await registering
            await asyncio.to_thread(session.close)
    assert waits()[0]["reason"] == refusal.reason


ENDS_ITSELF = """
import asyncio, signal, sys, threading, time
from restow.agents.engines.common import registration
registration.AGAIN_S = 0.2
heard = []
def hear(number, frame):
    heard.append(number)
    if sys.argv[1] == "ends":
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
signal.signal(signal.SIGTERM, hear)
async def lose():
    registration.end_process()
    await asyncio.sleep(0.6)
lost = threading.Thread(target=asyncio.run, args=(lose(),))
lost.start()
while lost.is_alive():
    time.sleep(0.01)
print(len(heard))
"""


@pytest.mark.parametrize(("handler", "signals"), [("stands", 2), ("ends", 1)])
def test_a_process_that_did_not_notice_its_signal_gets_it_again(handler: str, signals: int) -> None:
    ended = subprocess.run(
        [sys.executable, "-c", ENDS_ITSELF, handler],
        check=True, capture_output=True, text=True, timeout=60,
    )  # fmt: skip
    assert int(ended.stdout) == signals
