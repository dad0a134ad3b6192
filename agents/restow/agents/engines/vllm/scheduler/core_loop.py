"""`CoreLoop` wakes the loop of vLLM's engine core, which waits for requests while it has none.

A connector's part of the scheduler is heard in steps alone, and an idle engine takes none. Its loop
waits on its queue of requests; vLLM itself wakes it by a `WAKEUP` there when it is to end. Woken,
it takes a step if the connector says that it has work (`has_pending_push_work`).
"""

from __future__ import annotations

import inspect
from typing import TYPE_CHECKING, Any

from vllm.v1.engine import EngineCoreRequestType

from restow.agents.engines.vllm.errors import EngineUnsupportedError

if TYPE_CHECKING:
    from queue import Queue


class CoreLoop:
    """The loop of this process. Any thread may wake it."""

    def __init__(self, requests: Queue[tuple[EngineCoreRequestType, Any]]) -> None:
        """Wake who waits on ``requests``."""
        self._requests = requests

    def wake(self) -> None:
        """Have it look whether there is work."""
        self._requests.put_nowait((EngineCoreRequestType.WAKEUP, None))

    @classmethod
    def of_caller(cls) -> CoreLoop:
        """Return that of the core on whose behalf this is called, as vLLM's hooks are.

        Raises `EngineUnsupportedError` where there is none: in the process of a client, say.
        """
        # vLLM gives connectors no way to it. Its core stands among the callers while it is made.
        frame = inspect.currentframe()
        while frame is not None:
            requests = getattr(frame.f_locals.get("self"), "input_queue", None)
            if requests is not None:
                return cls(requests)
            frame = frame.f_back
        raise EngineUnsupportedError(
            "prefix: find+tell needs vLLM's engine core in a process of its own "
            "(VLLM_ENABLE_V1_MULTIPROCESSING), where it can be woken for others"
        )
