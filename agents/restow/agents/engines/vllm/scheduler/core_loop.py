"""`CoreLoop` reaches the loop of vLLM's engine core by its queues, of requests and of outputs.

A connector's part of the scheduler is heard in steps alone, and an idle engine takes none. Its loop
waits on its queue of requests; vLLM itself wakes it by a `WAKEUP` there when it is to end. Woken,
it takes a step if the connector says that it has work (`has_pending_push_work`).
"""

from __future__ import annotations

import inspect
from typing import TYPE_CHECKING, Any

from vllm.v1.engine import EngineCoreOutputs, EngineCoreRequestType

if TYPE_CHECKING:
    from queue import Queue

    from vllm.v1.engine import EngineCoreOutput


class CoreLoop:
    """The loop of this process. Any thread may wake it."""

    def __init__(
        self,
        requests: Queue[tuple[EngineCoreRequestType, Any]],
        outputs: Queue[tuple[int, EngineCoreOutputs] | bytes],
    ) -> None:
        """Wake who waits on ``requests``; clients hear what is put into ``outputs``."""
        self._requests, self._outputs = requests, outputs

    def wake(self) -> None:
        """Have it look whether there is work."""
        self._requests.put_nowait((EngineCoreRequestType.WAKEUP, None))

    def say(self, client_index: int, output: EngineCoreOutput) -> None:
        """Have a client hear an output of a request, behind those that it was told before."""
        self._outputs.put_nowait((client_index, EngineCoreOutputs(outputs=[output])))

    def abort(self, request_id: str) -> None:
        """End a request, as if its client had given it up."""
        self._requests.put_nowait((EngineCoreRequestType.ABORT, [request_id]))

    @classmethod
    def of_caller(cls) -> CoreLoop | None:
        """Return that of the core on whose behalf this is called, as vLLM's hooks are.

        None where there is none: in the process of a client, say.
        """
        # vLLM gives connectors no way to it. Its core stands among the callers while it is made.
        frame = inspect.currentframe()
        while frame is not None:
            core = frame.f_locals.get("self")
            requests = getattr(core, "input_queue", None)
            outputs = getattr(core, "output_queue", None)
            if requests is not None and outputs is not None:
                return cls(requests, outputs)
            frame = frame.f_back
        return None
