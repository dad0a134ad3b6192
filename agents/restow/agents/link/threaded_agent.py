"""An agent for engines that have no event loop: it works on one in a thread of its own."""

from __future__ import annotations

from collections.abc import Callable
from typing import Generic, Protocol, Self, TypeVar

from restow.agents.execute.fences import DeviceEvent, check_fence
from restow.agents.memory.errors import AgentClosedError
from restow.broker.client.connection.loop_thread import LoopThread


class LoopAgent(Protocol):
    """What works on the loop."""

    @property
    def name(self) -> str:
        """The NIXL name under which the rank's memory is read."""

    async def start(self, timeout_s: float) -> None:
        """Wait until the broker knows the agent."""

    def fence(self, handoff_id: str, event: DeviceEvent | None, tokens: int) -> None:
        """The rank's part of a handoff is complete in memory, once ``event`` has come to pass."""

    def writes_done(self, mark: int, event: DeviceEvent | None) -> None:
        """The engine's own writes before ``mark`` are done, once ``event`` has come to pass."""

    async def close(self) -> None:
        """Leave. May be repeated."""


OnLoop = TypeVar("OnLoop", bound=LoopAgent)


class ThreadedAgent(Generic[OnLoop]):
    """Serves one rank from a background thread. Its methods suit any thread."""

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
        """Register the memory, connect, and wait ``timeout_s`` until the broker knows the agent.

        Raises `BrokerCallError` with the broker's reason if it refuses, `BrokerUnreachableError`
        if nobody answers, `NoWelcomeError` if the engine is not registered by then,
        `TransportFailedError` if NIXL does not work here, a `TrustError` for credentials that
        can't be used; like all methods `ForkedError` in a process that was forked after the first
        agent, session or client.
        """
        try:
            thread, agent = self._opened()
            thread.run(agent.start(timeout_s))
        except BaseException:
            self.close()
            raise

    def fence(self, handoff_id: str, event: DeviceEvent | None = None, tokens: int = 0) -> None:
        """Say that the rank's part of handoff ``handoff_id`` is complete in memory.

        Of ``tokens`` leading ones alone where it computes on: D may read them early, from blocks
        that are published (`EngineSession.publish`), and that stay as they are from then on.

        ``event`` is what the engine recorded after its last write to the pages (a
        `torch.cuda.Event`, or what has its ``synchronize``): the agent waits for it, while this
        returns at once. None: it is complete now. If the work before the event failed, nothing is
        said, and the handoff ends by its time limit. Raises `AgentClosedError` before `start` and
        after `close`, and `MessageTooLargeError` for an id that can't be sent.
        """
        check_fence(handoff_id)
        thread, agent = self._running()
        thread.call_soon(agent.fence, handoff_id, event, tokens)

    def writes_done(self, mark: int, event: DeviceEvent | None = None) -> None:
        """Say that the engine's own writes before ``mark`` are done, as soon as ``event`` is.

        Nothing is written for a demand of that ``write_mark`` (`EngineSession.request`), or a
        smaller one, before. ``event`` is as in `fence`; None: they are done now. If the work before
        the event failed, the mark is never reached, and its demands end by their time limits.
        Raises `AgentClosedError` before `start` and after `close`.
        """
        thread, agent = self._running()
        thread.call_soon(agent.writes_done, mark, event)

    def close(self) -> None:
        """Leave the broker, end all reads, and give the memory back. May be repeated."""
        thread, agent = self._thread, self._agent
        self._thread = self._agent = None
        if thread is not None:
            if agent is not None:
                thread.run(agent.close())
            thread.close()

    def __enter__(self) -> Self:
        """Start."""
        self.start()
        return self

    def __exit__(self, *_: object) -> None:
        """Close."""
        self.close()

    def _running(self) -> tuple[LoopThread, OnLoop]:
        thread, agent = self._thread, self._agent
        if thread is None or agent is None:
            raise self._closed()
        return thread, agent

    def _closed(self) -> AgentClosedError:
        words = f"rank {self._rank} has no agent: it was not started, or closed"
        return AgentClosedError(words)

    def _opened(self) -> tuple[LoopThread, OnLoop]:
        self._thread = LoopThread(f"restow-agent-{self._rank}", self._closed)
        self._agent = self._thread.run(self._open())
        return self._thread, self._agent

    async def _open(self) -> OnLoop:
        return self._make()
