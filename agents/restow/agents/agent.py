"""The agent that an engine embeds in its worker process."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from types import TracebackType
from typing import Self

from restow.agents.async_agent import AsyncAgent
from restow.agents.errors import AgentClosedError
from restow.agents.link.fences import DeviceEvent
from restow.agents.memory.regions import RegionMemory
from restow.agents.settings import AgentSettings
from restow.broker.client.credentials import Credentials
from restow.broker.client.loop_thread import LoopThread
from restow.broker.errors import RestowError

STAGING_BYTES = AgentSettings().staging_bytes


class Agent:
    """Serves one rank of an engine from a background thread. Its methods suit any thread.

    ``regions`` are those of the rank's layout, in its order. The memory belongs to the engine and
    must stay until `close` has returned.
    """

    def __init__(
        self,
        broker: str | None,
        engine_id: str,
        incarnation: str,
        rank: int,
        regions: Sequence[RegionMemory],
        staging_bytes: int = STAGING_BYTES,
        settings: AgentSettings | None = None,
        credentials: Credentials | None = None,
        on_lost: Callable[[RestowError], object] = lambda _: None,
    ) -> None:
        """Prepare; `start` or ``with`` connects. ``broker`` None: RESTOW_BROKER or the default.

        ``credentials`` None: those of the environment, RESTOW_TLS_CA and so on. ``on_lost`` hears,
        on the agent's own thread, why the memory can be read no more as long as this process lives.
        """
        self._broker, self._engine_id, self._incarnation = broker, engine_id, incarnation
        self._rank, self._regions = rank, tuple(regions)
        self._settings = settings or AgentSettings(staging_bytes=staging_bytes)
        self._credentials = credentials
        self._on_lost = on_lost
        self._thread: LoopThread | None = None
        self._agent: AsyncAgent | None = None

    @property
    def name(self) -> str:
        """The NIXL name under which the rank's memory is read; empty before `start`."""
        return self._agent.name if self._agent is not None else ""

    def start(self, timeout_s: float = 30.0) -> None:
        """Register the memory, connect, and wait until the broker knows the agent.

        Raises `BrokerCallError` with the broker's reason if it refuses, `BrokerUnreachableError`
        if nobody answers within ``timeout_s``, `TransportFailedError` if NIXL does not work here, a
        `TrustError` for credentials that can't be used.
        """
        try:
            thread, agent = self._opened()
            thread.run(agent.start(timeout_s))
        except BaseException:
            self.close()
            raise

    def begin(self) -> None:
        """Register the memory and connect, without waiting: the engine may be registered later.

        `refusal` says if the broker wants none of it. Raises `TransportFailedError`.
        """
        try:
            thread, agent = self._opened()
            thread.call_soon(agent.begin)
        except BaseException:
            self.close()
            raise

    @property
    def refusal(self) -> RestowError | None:
        """Why the broker does not know the agent, as far as it has said."""
        return self._agent.refusal if self._agent is not None else None

    def fence(self, handoff_id: str, event: DeviceEvent | None = None) -> None:
        """Say that the rank's part of a handoff is complete in memory.

        ``event`` is what the engine recorded after its last write to the pages: the agent waits
        for it, while this returns at once. Raises `AgentClosedError` before `start` and after
        `close`.
        """
        thread, agent = self._thread, self._agent
        if thread is None or agent is None:
            raise self._closed()
        thread.call_soon(agent.fence, handoff_id, event)

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

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        """Close."""
        self.close()

    def _closed(self) -> AgentClosedError:
        words = f"rank {self._rank} has no agent: it was not started, or closed"
        return AgentClosedError(words)

    def _opened(self) -> tuple[LoopThread, AsyncAgent]:
        self._thread = LoopThread(f"restow-agent-{self._rank}", self._closed)
        self._agent = self._thread.run(self._open())
        return self._thread, self._agent

    async def _open(self) -> AsyncAgent:
        return AsyncAgent(
            self._broker,
            self._engine_id,
            self._incarnation,
            self._rank,
            self._regions,
            self._settings,
            self._credentials,
            self._on_lost,
        )
