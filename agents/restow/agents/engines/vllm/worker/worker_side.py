"""`WorkerSide` runs a rank's agent in its worker, and zeroes the bytes that no handoff writes."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch

from restow.agents import Agent
from restow.agents.engines.common.groups import group_name
from restow.agents.engines.common.unwritten import Hole
from restow.agents.engines.vllm.settings import ConnectorSettings
from restow.agents.engines.vllm.step import Step
from restow.agents.engines.vllm.worker.rank_pages import LayerCache, RankPages
from restow.agents.settings import AgentSettings


class WorkerSide:
    """Serves one rank's caches. Belongs to the worker's thread."""

    def __init__(
        self,
        engine_id: str,
        incarnation: str,
        pages: RankPages,
        caches: Sequence[LayerCache],
        settings: ConnectorSettings,
    ) -> None:
        """Register the memory, and begin to connect.

        Raises `TransportFailedError`, or a `TrustError` of the settings.
        """
        self._caches: dict[str, list[LayerCache]] = {}
        for cache in caches:
            if not cache.is_state:
                self._caches.setdefault(group_name(cache.group), []).append(cache)
        self._on_device = any(cache.tensor.is_cuda for cache in caches)
        self._agent = Agent(
            settings.broker or None,
            engine_id,
            incarnation,
            pages.layout.rank,
            pages.memory,
            settings=AgentSettings(staging_bytes=settings.staging_mb << 20),
            credentials=settings.credentials(),
        )
        self._agent.begin()

    def load(self, step: Step) -> None:
        """Zero what the states that now arrive leave as it is. Other bytes are not touched."""
        for one in step.loading:
            self._zero(one.holes)

    def fence(self, step: Step) -> None:
        """Say which prompts are complete, once the device has done what it was told so far."""
        if not step.fences:
            return
        event = None
        if self._on_device:
            event = torch.cuda.Event()  # type: ignore[no-untyped-call]
            event.record()
        for handoff_id in step.fences:
            self._agent.fence(handoff_id, event)

    def close(self) -> None:
        """End all reads, and give the memory back. May be repeated."""
        self._agent.close()

    def _zero(self, holes: Mapping[str, Sequence[Hole]]) -> None:
        for group, some in holes.items():
            for cache in self._caches.get(group, ()):
                for hole in some:
                    zero_tokens(cache, hole)


def zero_tokens(cache: LayerCache, hole: Hole) -> None:
    """Zero tokens of a block of ``cache``: whole pages at once, then what is left of one."""
    views, page_tokens = cache.by_token(), cache.tensor.shape[2]
    first = hole.block * cache.pages_per_block
    whole = -(-hole.start // page_tokens)
    stop = hole.stop // page_tokens
    if whole * page_tokens > hole.start:
        page = first + whole - 1
        end = min(hole.stop, whole * page_tokens) - (whole - 1) * page_tokens
        for view in views:
            view[page, :, hole.start % page_tokens : end].zero_()
    if stop > whole:
        cache.tensor[first + whole : first + stop].zero_()
    if stop >= whole and stop * page_tokens < hole.stop:
        for view in views:
            view[first + stop, :, : hole.stop % page_tokens].zero_()
