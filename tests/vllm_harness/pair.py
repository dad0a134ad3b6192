"""A broker, a prefill and a decode engine of vLLM, and one that serves alone."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator
from dataclasses import dataclass, replace
from pathlib import Path

from restow.agents.engines import recall
from restow.broker.server.serve import RunningBroker, running_broker
from restow.broker.server.settings import BrokerSettings
from vllm_harness.engine import Options, VllmEngine, vllm_engine

MODEL = Path(recall.__file__).with_name("checkpoint")


@dataclass(frozen=True)
class Pair:
    """All of them, running."""

    broker: RunningBroker
    prefill: VllmEngine
    decode: VllmEngine
    alone: VllmEngine | None


@contextlib.asynccontextmanager
async def vllm_pair(
    python: Path, logs: Path, prefill: Options, decode: Options, alone: bool = True
) -> AsyncIterator[Pair]:
    """Start all at once; roles and the broker's address are filled in here.

    The engine that serves alone is like the decode engine, without a connector.
    """
    async with contextlib.AsyncExitStack() as stack:
        broker = await stack.enter_async_context(
            running_broker(BrokerSettings(listen="127.0.0.1:0"))
        )
        wanted = [
            ("P", replace(prefill, role="kv_producer", broker=broker.address)),
            ("D", replace(decode, role="kv_consumer", broker=broker.address)),
            ("alone", decode),
        ]
        engines = await asyncio.gather(
            *(
                stack.enter_async_context(vllm_engine(python, options, logs / f"{name}.log"))
                for name, options in wanted[: 3 if alone else 2]
            )
        )
        yield Pair(broker, engines[0], engines[1], engines[2] if alone else None)
