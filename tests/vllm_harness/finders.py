"""Two engines that find each other's prefixes, and one that serves alone."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator
from dataclasses import dataclass, replace
from pathlib import Path
from random import Random

from restow.broker.client import AsyncAdminClient, chain_of
from restow.broker.core.common.keys import State
from restow.broker.server.base.settings import BrokerSettings
from restow.broker.server.serve import RunningBroker, running_broker
from restow.demo.recall.task import VOCABULARY_SIZE
from vllm_harness.engine import Options, VllmEngine, vllm_engine
from vllm_harness.pair import GRANT_S

STEPS = 12
TELL = {"prefix": "find+tell", "find_ms": 10_000}
"""A machine with few processors may keep the broker from one for longer than 50 ms."""
END = 2
"""The token that ends a reply: it stands in the next turn's prompt."""
SOON_S = 60.0


@dataclass
class Finders:
    """All of them, running."""

    broker: RunningBroker
    one: VllmEngine
    other: VllmEngine
    alone: VllmEngine

    async def told(self, name: str, ids: list[int], tokens: int, adapter: str = "") -> None:
        """Wait until an engine has told that it holds the state of the first ``tokens``.

        ``adapter`` is the word of the adapter that the tokens were computed with.
        """
        await told(self.broker, "other", name, ids, tokens, adapter)

    async def leave(self) -> None:
        """Have `one` hand over what it holds, and stop it."""
        async with AsyncAdminClient(self.broker.address) as client, asyncio.timeout(SOON_S):
            while await client.drain_engine("one"):  # noqa: ASYNC110 - the broker tells no events
                await asyncio.sleep(0.05)
        await self.one.close()

    @property
    def ended(self) -> dict[State, int]:
        """Return how many handoffs ended in each state."""
        return self.broker.hub.directory.ledger.statistics.by_state


async def told(
    broker: RunningBroker, asking: str, name: str, ids: list[int], tokens: int, adapter: str = ""
) -> None:
    """Wait until an engine has told that it holds a state that the engine ``asking`` may use.

    The state is that of the first ``tokens``, computed with the adapter of the word ``adapter``.
    """
    ends = [tokens] if tokens % 16 else []
    chain = chain_of(ids[: tokens + 1], adapter=adapter, ends_tokens=ends)
    async with AsyncAdminClient(broker.address) as client, asyncio.timeout(SOON_S):
        while True:
            (holders,) = await client.find([chain], engine_id=asking)
            if any((one.engine_id, one.tokens) == (name, tokens) for one in holders):
                return


@contextlib.asynccontextmanager
async def finders(
    python: Path, logs: Path, one: Options, other: Options, alone: bool = True
) -> AsyncIterator[Finders]:
    """Start all engines at once.

    The engine `alone` is like `one` and caches nothing, or it is `one` itself.
    """
    settings = BrokerSettings(listen="127.0.0.1:0", grant_s=GRANT_S)
    async with running_broker(settings) as broker, contextlib.AsyncExitStack() as stack:
        joined = {"role": "kv_both", "broker": broker.address, "policy": "recompute"}
        wanted = {
            "one": replace(one, engine_id="one", **joined),  # type: ignore[arg-type]
            "other": replace(other, engine_id="other", **joined),  # type: ignore[arg-type]
        }
        if alone:
            wanted["alone"] = replace(one, prefix_caching=False)
        started = await asyncio.gather(
            *(
                stack.enter_async_context(vllm_engine(python, options, logs / f"{name}.log"))
                for name, options in wanted.items()
            )
        )
        yield Finders(broker, started[0], started[1], started[2 if alone else 0])


def drawn(count: int, seed: int = 11) -> list[int]:
    """Draw ``count`` tokens, the same ones every time."""
    rng = Random(seed)  # noqa: S311 - reproducible, not secret
    return [rng.randrange(8, VOCABULARY_SIZE) for _ in range(count)]
