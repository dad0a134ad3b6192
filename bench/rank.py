"""One rank's process of the data-plane benchmark: memory, and an agent for each engine it serves.

Lines of JSON on stdin: first whom it serves and how large the regions are, then fences; ends with
its stdin.
"""

from __future__ import annotations

import json
import logging
import sys
from contextlib import ExitStack
from dataclasses import replace

import torch
from touched import touched

from restow.agents import Agent
from restow.agents.link.settings import AgentSettings
from restow.agents.memory.regions import MemoryKind, RegionMemory
from restow.broker.layout.values import ModelIdentity
from restow.broker.logs import log_to_stderr


def allocate(
    name: str, page_count: int, page_stride_bytes: int, on_gpu: bool, stack: ExitStack
) -> RegionMemory:
    """Memory of one region, every page of it touched; it lives as long as ``stack``."""
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
    log_to_stderr(level=logging.WARNING)
    torch.set_num_threads(1)
    told = json.loads(sys.stdin.readline())
    with ExitStack() as stack:
        agents = {}
        held: dict[str, RegionMemory] = {}

        def region(name: str, page_count: int, page_stride_bytes: int) -> RegionMemory:
            """Agents of one process that serve the same layout share its memory."""
            key = json.dumps([name, page_count, page_stride_bytes])
            if key not in held:
                held[key] = allocate(name, page_count, page_stride_bytes, told["on_gpu"], stack)
            return held[key]

        for served in told["agents"]:
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
                    model=ModelIdentity(**served["model"]),
                )
            )
        print("ready", flush=True)
        for line in sys.stdin:
            command = json.loads(line)
            agents[command["engine_id"]].fence(command["fence"])


if __name__ == "__main__":
    main()
