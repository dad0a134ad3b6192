"""An agent for engines without an event loop, which runs on a loop in its own thread."""

from __future__ import annotations

from collections.abc import Callable
from typing import Generic, Protocol, Self, TypeVar

from restow.agents.execute.fences import DeviceEvent, check_fence
from restow.agents.memory.errors import AgentClosedError
from restow.broker.client.connection.loop_thread import LoopThread


class LoopAgent(Protocol):
    """The agent that works on the loop."""

    @property
    def name(self) -> str:
        """The NIXL name under which the rank's memory is read."""

    async def start(self, timeout_s: float) -> None:
        """Wait until the broker knows the agent."""

    def fence(self, handoff_id: str, event: DeviceEvent | None, tokens: int) -> None:
        """Announce that the rank's part of a handoff is complete, once ``event`` has passed."""

    def writes_done(self, mark: int, event: DeviceEvent | None) -> None:
        """Announce that the engine's writes before ``mark`` are done, once ``event`` has passed."""

    async def close(self) -> None:
        """Leave the broker. May be called again."""


OnLoop = TypeVar("OnLoop", bound=LoopAgent)


class ThreadedAgent(Generic[OnLoop]):
    """Serves one rank from a background thread. Its methods may be called from any thread."""

    def __init__(self, rank: int, make: Callable[[], OnLoop]) -> None:
        """Prepare; `start` or ``with`` connects. ``make`` is called on the loop."""
        self._rank = rank
        self._make = make
        self._thread: LoopThread | None = None
        self._agent: OnLoop | None = None

    @property
    def name(self) -> str:
        """The NIXL name under which the rank's memory is read; empty before `start`."""
        return self._agent.name if self._agent is not None else ""

    def start(self, timeout_s: float = 30.0) -> None:
        """Register the memory, connect, and wait up to ``timeout_s`` for the broker's welcome.

        Raises `BrokerCallError` with the broker's reason if it refuses, `BrokerUnreachableError` if
        nobody answers, `NoWelcomeError` if the engine does not register in time,
        `TransportFailedError` if NIXL does not work here, and a `TrustError` for unusable
        credentials; like all methods `ForkedError` in a process that was forked after the first
        agent, session or client.
        """
        try:
            thread, agent = self._opened()
            thread.run(agent.start(timeout_s))
        except BaseException:
            self.close()
            raise

    def fence(self, handoff_id: str, event: DeviceEvent | None = None, tokens: int = 0) -> None:
        """Announce that the rank's part of handoff ``handoff_id`` is complete in memory.

        With ``tokens``, only that many leading tokens are complete, and the engine computes on. D
        may read them early, from published blocks (`EngineSession.publish`), which must not change
        from then on.

        ``event`` is what the engine recorded after its last write to the pages (a
        `torch.cuda.Event`, or any object with its ``synchronize``). A thread of the agent waits for
        it, while this method returns at once; an event with ``blocking=True`` lets it sleep. None
        means complete now. If the work before the event failed, nothing is announced, and the
        handoff times out. Raises `AgentClosedError` before `start` and after `close`, and
        `MessageTooLargeError` for an id that can't be sent.
        """
        check_fence(handoff_id)
        thread, agent = self._running()
        thread.call_soon(agent.fence, handoff_id, event, tokens)

    def writes_done(self, mark: int, event: DeviceEvent | None = None) -> None:
        """Announce that the engine's own writes before ``mark`` are done, once ``event`` is.

        The agent writes nothing for a demand with that ``write_mark`` (`EngineSession.request`), or
        a smaller mark, before. ``event`` is as in `fence`; None means that the writes are done now.
        If the work before the event failed, the mark is never reached, and its demands time out.
        Raises `AgentClosedError` before `start` and after `close`.
        """
        thread, agent = self._running()
        thread.call_soon(agent.writes_done, mark, event)

    def close(self) -> None:
        """Leave the broker, end all reads, and release the memory. May be called again."""
        thread, agent = self._thread, self._agent
        self._thread = self._agent = None
        if thread is not None:
            if agent is not None:
                thread.run(agent.close())
            thread.close()

    def __enter__(self) -> Self:
        """Start the agent."""
        self.start()
        return self

    def __exit__(self, *_: object) -> None:
        """Close the agent."""
        self.close()

    def _running(self) -> tuple[LoopThread, OnLoop]:
        thread, agent = self._thread, self._agent
        if thread is None or agent is None:
            raise self._closed()
        return thread, agent

    def _closed(self) -> AgentClosedError:
        words = f"rank {self._rank} has no agent: it was not started, or was closed"
        return AgentClosedError(words)

    def _opened(self) -> tuple[LoopThread, OnLoop]:
        self._thread = LoopThread(f"restow-agent-{self._rank}", self._closed)
        self._agent = self._thread.run(self._open())
        return self._thread, self._agent

    async def _open(self) -> OnLoop:
        return self._make()
