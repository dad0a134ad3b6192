"""A broker, a prefill and a decode engine of vLLM, and one that serves alone."""

from __future__ import annotations

import asyncio
import contextlib
from collections import Counter
from collections.abc import AsyncIterator
from dataclasses import dataclass, replace
from pathlib import Path

from agent_harness.waiting import until
from restow.broker.server.base.settings import BrokerSettings
from restow.broker.server.serve import RunningBroker, running_broker
from restow.demo.recall.model import checkpoint_folder
from vllm_harness.engine import Options, VllmEngine, vllm_engine

GRANT_S = 120.0
LOST_S = 60.0
MODEL = checkpoint_folder()


@dataclass(frozen=True)
class Pair:
    """All of them, running."""

    broker: RunningBroker
    prefill: VllmEngine
    decode: VllmEngine
    alone: VllmEngine | None


@contextlib.asynccontextmanager
async def vllm_pair(
    python: Path,
    logs: Path,
    prefill: Options,
    decode: Options,
    alone: bool = True,
    otlp_endpoint: str | None = None,
    early_bytes: int | None = None,
) -> AsyncIterator[Pair]:
    """Start all engines at once; roles and the broker's address are filled in here.

    The engine that serves alone is like the decode engine, without a connector. ``early_bytes`` is
    the broker's setting; None: the broker's default. When this context ends, all traces have been
    sent.
    """
    settings = BrokerSettings(listen="127.0.0.1:0", grant_s=GRANT_S, otlp_endpoint=otlp_endpoint)
    if early_bytes is not None:
        settings = settings.model_copy(update={"early_bytes": early_bytes})
    async with (
        running_broker(settings) as broker,
        vllm_engines(python, logs, broker.address, prefill, decode, alone) as engines,
    ):
        pair = Pair(broker, engines[0], engines[1], engines[2] if alone else None)
        try:
            yield pair
        except BaseException as error:
            error.add_note(_story(pair, logs))
            raise


@contextlib.asynccontextmanager
async def vllm_engines(
    python: Path, logs: Path, address: str, prefill: Options, decode: Options, alone: bool
) -> AsyncIterator[list[VllmEngine]]:
    """Run P, D, and perhaps an engine that serves alone.

    The broker at ``address`` may start later.
    """
    wanted = [
        ("P", replace(prefill, role="kv_producer", broker=address)),
        ("D", replace(decode, role="kv_consumer", broker=address)),
        ("alone", decode),
    ]
    async with contextlib.AsyncExitStack() as stack:
        yield await asyncio.gather(
            *(
                stack.enter_async_context(vllm_engine(python, options, logs / f"{name}.log"))
                for name, options in wanted[: 3 if alone else 2]
            )
        )


async def deserted(broker: RunningBroker) -> None:
    """Wait until an engine that was killed is lost to the broker: by then its memory is gone.

    A process gives up its memory before its connections, and both take a while.
    """
    known = broker.hub.directory.members.engines.values()
    await until(lambda: any(not (one.has_session or one.agents) for one in known), LOST_S)


def _story(pair: Pair, logs: Path) -> str:
    """Return what explains a failed test: how handoffs ended, and what engines complained of."""
    ended = pair.broker.hub.directory.ledger.ended.values()
    failures = Counter(
        f"{one.failure.reason}: {one.failure.detail}" for one in ended if one.failure is not None
    )
    lines = [f"{count} x {failure}" for failure, count in failures.items()]
    for log in sorted(logs.glob("*.log")):
        words = log.read_text(errors="replace").splitlines()
        lines += [f"{log.stem}: {line[:300]}" for line in words if _is_complaint(line)][-12:]
    return "\n".join(lines)


def _is_complaint(line: str) -> bool:
    return "[warning" in line or "[error" in line or "ERROR" in line
