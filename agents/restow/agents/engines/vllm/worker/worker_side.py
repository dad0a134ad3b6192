"""Run a rank's agent in its vLLM worker, and do what the scheduler's side asks in each step."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from restow.agents import Agent
from restow.agents.engines.common.blocks import UnwrittenTokens
from restow.agents.engines.common.handoff_ends import AgentTally
from restow.agents.engines.common.registration import ConnectorSettings
from restow.agents.engines.vllm.worker.rank_layout import LayerCache, RankRegions
from restow.agents.link.settings import AgentSettings


@dataclass(slots=True)
class WorkerStep:
    """What the scheduler's side tells the workers in one step. Nearly always all of it is empty.

    ``fences`` are handoffs whose prompt this step completes; ``early_fences`` are handoffs of which
    it computes leading tokens, with their number. ``unwritten`` are parts of blocks that the states
    asked for in this step will not write. ``received`` are requests whose state has arrived (True)
    or failed (False); ``sent`` are requests whose pages are free again. ``write_mark`` is the mark
    of all states that were asked for while the step was scheduled; 0: there are none.
    """

    fences: list[str] = field(default_factory=list)
    early_fences: dict[str, int] = field(default_factory=dict)
    unwritten: list[UnwrittenTokens] = field(default_factory=list)
    received: dict[str, bool] = field(default_factory=dict)
    sent: list[str] = field(default_factory=list)
    write_mark: int = 0


class WorkerSide:
    """Serves one rank's caches. Belongs to the worker's thread."""

    def __init__(
        self,
        engine_id: str,
        incarnation: str,
        regions: RankRegions,
        caches: Sequence[LayerCache],
        settings: ConnectorSettings,
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
        )
        self._agent.begin()

    def begin(self, step: WorkerStep) -> None:
        """Let the agent write states that were asked for, once the steps before this are over.

        vLLM may give a load blocks that an earlier step is still writing. This step itself only
        writes to them where `load` zeroes bytes, and no state is written there.
        """
        if step.write_mark:
            self._agent.writes_done(step.write_mark, self._event())

    def load(self, step: WorkerStep) -> None:
        """Zero the parts of blocks that no state writes. Other bytes are not touched."""
        for unwritten in step.unwritten:
            # Another stage of the pipeline may have the group.
            for cache in self._caches.get(unwritten.group, ()):
                zero_tokens(cache, unwritten)

    def fence(self, step: WorkerStep) -> None:
        """Fence prompts that are computed, wholly or in part, once the device has done its work."""
        if not step.fences and not step.early_fences:
            return
        event = self._event()
        for handoff_id in step.fences:
            self._agent.fence(handoff_id, event)
        for handoff_id, tokens in step.early_fences.items():
            self._agent.fence(handoff_id, event, tokens)

    def _event(self) -> torch.cuda.Event | None:
        """Return an event that comes when the device has done its work; None: it has done it."""
        if not self._on_device:
            return None
        # A thread that waits for a blocking event sleeps, and takes nothing from the engine.
        event = torch.cuda.Event(blocking=True)  # type: ignore[no-untyped-call]
        event.record()
        return event

    def counted(self) -> dict[str, Any] | None:
        """Return the counts of the agent since the last call; None: nothing has changed."""
        return self._tally.take(self._agent.figures)

    def close(self) -> None:
        """End all reads, and give the memory back. May be repeated."""
        self._agent.close()


def zero_tokens(cache: LayerCache, unwritten: UnwrittenTokens) -> None:
    """Zero tokens of a block of ``cache``: whole pages at once, and parts of pages by token."""
    views, page_tokens = cache.by_token(), cache.tensor.shape[2]
    first = unwritten.block * cache.pages_per_block
    whole = -(-unwritten.start // page_tokens)
    stop = unwritten.stop // page_tokens
    if whole * page_tokens > unwritten.start:
        page = first + whole - 1
        end = min(unwritten.stop, whole * page_tokens) - (whole - 1) * page_tokens
        for view in views:
            view[page, :, unwritten.start % page_tokens : end].zero_()
    if stop > whole:
        cache.tensor[first + whole : first + stop].zero_()
    if stop >= whole and stop * page_tokens < unwritten.stop:
        for view in views:
            view[first + stop, :, : unwritten.stop % page_tokens].zero_()
