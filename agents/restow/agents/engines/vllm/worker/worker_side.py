"""`WorkerSide` runs a rank's agent in its worker, and zeroes the bytes that no handoff writes."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from restow.agents import Agent
from restow.agents.engines.common.unwritten import UnwrittenTokens
from restow.agents.engines.vllm.settings import ConnectorSettings
from restow.agents.engines.vllm.worker.agent_tally import AgentTally
from restow.agents.engines.vllm.worker.rank_layout import LayerCache, RankRegions
from restow.agents.engines.vllm.worker_step import WorkerStep
from restow.agents.link.settings import AgentSettings
from restow.broker.layout.values import ModelIdentity


class WorkerSide:
    """Serves one rank's caches. Belongs to the worker's thread."""

    def __init__(
        self,
        engine_id: str,
        incarnation: str,
        regions: RankRegions,
        caches: Sequence[LayerCache],
        settings: ConnectorSettings,
        model: ModelIdentity,
    ) -> None:
        """Register the memory, and begin to connect.

        Raises `TransportFailedError`, or a `TrustError` of the settings.
        """
        self._caches: dict[str, list[LayerCache]] = {}
        for cache in caches:
            self._caches.setdefault(cache.group, []).append(cache)
        self._tally = AgentTally()
        self._on_device = any(cache.tensor.is_cuda for cache in caches)
        self._agent = Agent(
            settings.broker or None,
            engine_id,
            incarnation,
            regions.layout.rank,
            regions.memory,
            settings=AgentSettings(staging_bytes=settings.staging_mb << 20),
            credentials=settings.credentials(),
            model=model,
        )
        self._agent.begin()

    def begin(self, step: WorkerStep) -> None:
        """Let the agent write states that were asked for, when the steps before this are over.

        vLLM gives a load blocks that a step before this one may still be writing, and this step
        writes to none of them but what `load` zeroes, where no state is written.
        """
        if step.write_mark:
            self._agent.writes_done(step.write_mark, self._event())

    def load(self, step: WorkerStep) -> None:
        """Zero what the states that now arrive leave as it is. Other bytes are not touched."""
        for some in step.unwritten:
            for cache in self._caches.get(some.group, ()):  # none: another stage's group
                zero_tokens(cache, some)

    def fence(self, step: WorkerStep) -> None:
        """Say which prompts are complete, or how far, once the device has done what it was told."""
        if not step.fences and not step.early_fences:
            return
        event = self._event()
        for handoff_id in step.fences:
            self._agent.fence(handoff_id, event)
        for handoff_id, tokens in step.early_fences.items():
            self._agent.fence(handoff_id, event, tokens)

    def _event(self) -> torch.cuda.Event | None:
        """Return what comes to pass when the device has done what it was told; None: it has."""
        if not self._on_device:
            return None
        event = torch.cuda.Event()  # type: ignore[no-untyped-call]
        event.record()
        return event

    def counted(self) -> dict[str, Any] | None:
        """Return what the agent has read since the last call; None: nothing."""
        return self._tally.take(self._agent.figures)

    def close(self) -> None:
        """End all reads, and give the memory back. May be repeated."""
        self._agent.close()


def zero_tokens(cache: LayerCache, some: UnwrittenTokens) -> None:
    """Zero tokens of a block of ``cache``: whole pages at once, then what is left of one."""
    views, page_tokens = cache.by_token(), cache.tensor.shape[2]
    first = some.block * cache.pages_per_block
    whole = -(-some.start // page_tokens)
    stop = some.stop // page_tokens
    if whole * page_tokens > some.start:
        page = first + whole - 1
        end = min(some.stop, whole * page_tokens) - (whole - 1) * page_tokens
        for view in views:
            view[page, :, some.start % page_tokens : end].zero_()
    if stop > whole:
        cache.tensor[first + whole : first + stop].zero_()
    if stop >= whole and stop * page_tokens < some.stop:
        for view in views:
            view[first + stop, :, : some.stop % page_tokens].zero_()
