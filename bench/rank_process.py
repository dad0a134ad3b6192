"""The process of one rank: its memory, and an agent for each pair of engines that it serves.

It reads lines of JSON from stdin, first the agents and the sizes of their regions, then fences, and
ends when stdin is closed.
"""

from __future__ import annotations

import json
import logging
import mmap
import sys
from contextlib import ExitStack
from dataclasses import replace

import numpy as np
import numpy.typing as npt
import torch

from restow.agents import Agent
from restow.agents.link.settings import AgentSettings
from restow.agents.memory.regions import MemoryKind, RegionMemory
from restow.broker.logs import log_to_stderr


def touched(size_bytes: int) -> npt.NDArray[np.uint8]:
    """Map memory in pages of 4 KiB and touch each page; the memory lives as long as the array.

    An array that numpy allocates may lie in huge pages, which are read faster.
    """
    view = np.frombuffer(mmap.mmap(-1, size_bytes), np.uint8)
    view[:] = 7
    return view


def allocate(
    name: str, page_count: int, page_stride_bytes: int, on_gpu: bool, stack: ExitStack
) -> RegionMemory:
    """Allocate one region, all of it touched; it lives as long as ``stack``."""
    size_bytes = page_count * page_stride_bytes
    if on_gpu:
        pages = torch.full((size_bytes,), 7, dtype=torch.uint8, device="cuda")
        stack.callback(id, pages)
        kind = MemoryKind.CUDA
        return RegionMemory(name, pages.data_ptr(), page_count, page_stride_bytes, kind)
    view = touched(size_bytes)
    stack.callback(id, view)  # the reference is what keeps the mapping
    return RegionMemory(name, view.ctypes.data, page_count, page_stride_bytes)


def _settings(
    staging_bytes: int, read_threads: int, host_reads: bool | None, **_: object
) -> AgentSettings:
    settings = AgentSettings(staging_bytes=staging_bytes, read_threads=read_threads)
    return settings if host_reads is None else replace(settings, host_reads=host_reads)


def main() -> None:
    """Serve all agents until stdin is closed."""
    log_to_stderr(level=logging.WARNING)
    torch.set_num_threads(1)
    wanted = json.loads(sys.stdin.readline())
    with ExitStack() as stack:
        agents = {}
        held: dict[str, RegionMemory] = {}

        def region(name: str, page_count: int, page_stride_bytes: int) -> RegionMemory:
            """Return a region's memory, which all agents with an equal region share."""
            key = json.dumps([name, page_count, page_stride_bytes])
            if key not in held:
                held[key] = allocate(name, page_count, page_stride_bytes, wanted["on_gpu"], stack)
            return held[key]

        for served in wanted["agents"]:
            agents[served["engine_id"]] = stack.enter_context(
                Agent(
                    broker=served["broker"],
                    engine_id=served["engine_id"],
                    incarnation=served["incarnation"],
                    rank=served["rank"],
                    regions=[
                        region(name, page_count, stride_bytes)
                        for name, page_count, stride_bytes in served["regions"]
                    ],
                    settings=_settings(**served),
                )
            )
        print("ready", flush=True)
        for line in sys.stdin:
            command = json.loads(line)
            agents[command["engine_id"]].fence(command["fence"])


if __name__ == "__main__":
    main()
