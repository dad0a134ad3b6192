"""The process of one rank: its memory, and an agent for each pair of engines that it serves.

It reads lines of JSON from stdin, first the agents and the sizes of their regions, then commands,
and ends when stdin is closed. A fence has no answer; every other command has a line of JSON.
"""

from __future__ import annotations

import functools
import json
import logging
import mmap
import sys
from contextlib import ExitStack
from dataclasses import replace
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from bench.gpu.engine_work import DecodingSteps, write_late
from bench.known_state import KnownState, Pages
from restow.agents import Agent
from restow.agents.execute.fences import DeviceEvent
from restow.agents.link.settings import AgentSettings
from restow.agents.memory.regions import MemoryKind, RegionMemory
from restow.broker.layout.json_form import layout_from_json
from restow.broker.logs import log_to_stderr

known_state, decoding_steps = functools.cache(KnownState), functools.cache(DecodingSteps)
"""What takes seconds to make is made once, for all agents."""


def touched(size_bytes: int) -> npt.NDArray[np.uint8]:
    """Map memory in pages of 4 KiB and touch each page; the memory lives as long as the array.

    An array that numpy allocates may lie in huge pages, which are read faster.
    """
    view = np.frombuffer(mmap.mmap(-1, size_bytes), np.uint8)
    view[:] = 7
    return view


def allocate(page_count: int, page_stride_bytes: int, on_gpu: bool) -> torch.Tensor:
    """Allocate the pages of one region, all of them touched: ``[page, byte]``."""
    if on_gpu:
        return torch.full((page_count, page_stride_bytes), 7, dtype=torch.uint8, device="cuda")
    return torch.from_numpy(touched(page_count * page_stride_bytes)).view(page_count, -1)


def _settings(
    staging_bytes: int, read_threads: int, host_reads: bool | None, **_: object
) -> AgentSettings:
    settings = AgentSettings(staging_bytes=staging_bytes, read_threads=read_threads)
    return settings if host_reads is None else replace(settings, host_reads=host_reads)


class ServedRank:
    """A rank with its agent, which does what an engine does beside handoffs."""

    def __init__(self, served: dict[str, Any], held: dict[str, torch.Tensor], on_gpu: bool) -> None:
        """Make the agent; ranks with an equal region share its memory, which is in ``held``."""
        self._layout, self._tokens = layout_from_json(served["layout"]), served["tokens"]
        (rank,) = self._layout.ranks
        self._pages: Pages = {}
        for region in rank.regions:
            count, stride_bytes = served["pages"][region.group], region.page_stride_bytes
            key = json.dumps([region.name, count, stride_bytes])
            if key not in held:
                held[key] = allocate(count, stride_bytes, on_gpu)
            self._pages[region.name] = region.group, held[key]
        kind = MemoryKind.CUDA if on_gpu else MemoryKind.HOST
        self.agent = Agent(
            broker=served["broker"],
            engine_id=served["engine_id"],
            incarnation=served["incarnation"],
            rank=rank.rank,
            regions=[
                RegionMemory(name, pages.data_ptr(), len(pages), pages.shape[1], kind)
                for name, (_, pages) in self._pages.items()
            ],
            settings=_settings(**served),
        )
        self._written: DeviceEvent | None = None
        self._device = torch.device("cuda" if on_gpu else "cpu")

    def answer(self, command: dict[str, Any]) -> object:
        """Do what a command says, and return the answer."""
        match command:
            case {"write": blocks}:
                known_state(self._layout, self._tokens).write(self._pages, blocks)
            case {"count_wrong": several}:
                if self._written is not None:
                    self._written.synchronize()
                return known_state(self._layout, self._tokens).wrong_bytes(self._pages, several)
            case {"overwrite": several, "late_s": late_s, "mark": mark, "wait": wait}:
                self._written = write_late(self._pages, several, late_s)
                if mark:
                    self.agent.writes_done(mark, self._written)
                if wait:
                    self._written.synchronize()
            case {"steps": how, "seconds": seconds, "layers": layers, "width": width}:
                return decoding_steps(self._device, layers, width).run(how, seconds)
            case _:
                raise ValueError(f"no answer to {sorted(command)}")
        return None


def main() -> None:
    """Serve all agents until stdin is closed."""
    log_to_stderr(level=logging.WARNING)
    torch.set_num_threads(1)
    wanted = json.loads(sys.stdin.readline())
    held: dict[str, torch.Tensor] = {}
    with ExitStack() as stack:
        ranks = {
            served["engine_id"]: ServedRank(served, held, wanted["on_gpu"])
            for served in wanted["agents"]
        }
        for rank in ranks.values():
            stack.enter_context(rank.agent)
        print("ready", flush=True)
        for line in sys.stdin:
            command = json.loads(line)
            rank = ranks[command["engine_id"]]
            if "fence" in command:
                rank.agent.fence(command["fence"])
            else:
                print(json.dumps(rank.answer(command)), flush=True)


if __name__ == "__main__":
    main()
