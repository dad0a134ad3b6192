"""What an engine does on its device while handoffs write to its memory: late writes, and decoding.

On a host a thread makes the late writes, and no graphs are captured.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Sequence

import numpy as np
import torch

from bench.known_state import Blocks, Pages
from restow.agents.execute.fences import DeviceEvent

CYCLES_A_SECOND = 2e9
"""Roughly, on a GPU."""
OTHER = 0x55
"""What a late write writes."""
BATCH = 16
KERNELS, REPLAY = "kernels", "replay"


class _HostWrite(threading.Timer):
    """A late write to host memory, and the event behind it."""

    def synchronize(self) -> None:
        self.join()


def write_late(pages: Pages, several: Sequence[Blocks], late_s: float) -> DeviceEvent:
    """Queue a write to the blocks that begins ``late_s`` from now; return the event behind it."""
    # Indices are uploaded first: an upload behind the delay would wait for it.
    places = [
        (there, torch.tensor([i for blocks in several for i in blocks[group]], device=there.device))
        for group, there in pages.values()
    ]

    def write() -> None:
        for there, index in places:
            there.index_fill_(0, index, OTHER)

    if not places[0][0].is_cuda:
        timer = _HostWrite(late_s, write)
        timer.start()
        return timer
    torch.cuda._sleep(int(late_s * CYCLES_A_SECOND))  # type: ignore[no-untyped-call]
    write()
    event = torch.cuda.Event(blocking=True)  # type: ignore[no-untyped-call]
    event.record()
    return event


class DecodingSteps:
    """Decoding steps of many small kernels, whose results must all be equal."""

    def __init__(self, device: torch.device, layers: int, width: int) -> None:
        """Make the weights, and run a step, because the first one also loads libraries."""
        dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
        random = torch.Generator(device).manual_seed(0)
        state, *weights = (
            torch.randn(rows, width, generator=random, device=device, dtype=dtype)
            for rows in (BATCH, *[width] * layers)
        )
        self._first, self._last = state, torch.empty_like(state)
        self._weights = [weight * width**-0.5 for weight in weights]
        self._graph: torch.cuda.CUDAGraph | None = None
        self._wants: dict[bool, torch.Tensor] = {}
        """The first result of a graph, and of kernels that were launched one by one."""
        self._step()

    def run(self, how: str, seconds: float) -> dict[str, float]:
        """Repeat a step for ``seconds``; return its seconds, and how many numbers were wrong.

        ``how`` is `KERNELS`, `REPLAY` of the last graph, or the mode in which a new graph is
        captured for each step. Each step is waited for.
        """
        wrong = torch.zeros((), dtype=torch.int64, device=self._last.device)
        times: list[float] = []
        until_s = time.perf_counter() + seconds
        while (begun_s := time.perf_counter()) < until_s or not times:
            if how == KERNELS:
                self._step()
            else:
                if how != REPLAY or self._graph is None:
                    self._graph = self._captured(how)
                self._graph.replay()
            if self._last.is_cuda:
                torch.cuda.current_stream().synchronize()
            times.append(time.perf_counter() - begun_s)
            want = self._wants.setdefault(how != KERNELS, self._last.clone())
            wrong += (self._last != want).sum()
        p50, p99 = np.percentile(times, [50, 99]).tolist()
        return {"p50": p50, "p99": p99, "mean": float(np.mean(times)), "wrong": int(wrong)}

    def _step(self) -> None:
        """Queue the kernels of one step."""
        state = self._first
        for weight in self._weights:
            state = state + torch.tanh(state @ weight)
        self._last.copy_(state)

    def _captured(self, mode: str) -> torch.cuda.CUDAGraph:
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, capture_error_mode=mode):
            self._step()
        return graph
