"""Every process of an engine sleeps where vLLM's would spin and yield, and is forked.

vLLM's processes wait for each other by `os.sched_yield`, for a second after each message. A dozen
of them on two processors let nobody else run: under Linux 6.18 a stage that waited for its state
kept the engine that computed it from a processor for minutes.

On a CPU vLLM spawns its processes, each of which imports all of it anew: more than half of what an
engine's start costs. On a GPU it forks them (VLLM_WORKER_MULTIPROC_METHOD), and so it does here.
"""

import multiprocessing
import os
import time

WAIT_S = 0.0005


def _sleep() -> None:
    time.sleep(WAIT_S)


os.sched_yield = _sleep

_get_context = multiprocessing.get_context


def _forking(method: str | None = None) -> multiprocessing.context.BaseContext:
    return _get_context("fork" if method == "spawn" else method)


setattr(multiprocessing, "get_context", _forking)  # noqa: B010 - its type is of overloads
