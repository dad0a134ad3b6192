"""The agent that an engine embeds in its worker process."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from restow.agents.link.async_agent import AsyncAgent
from restow.agents.link.settings import AgentFigures, AgentSettings
from restow.agents.link.threaded_agent import ThreadedAgent
from restow.agents.memory.regions import RegionMemory
from restow.broker.client.connection.channel import Credentials
from restow.broker.errors import RestowError

STAGING_BYTES = AgentSettings().staging_bytes


class Agent(ThreadedAgent[AsyncAgent]):
    """Serves one rank of an engine from a background thread; use it as a context manager.

    Its methods may be called from any thread. An engine with its own event loop can use
    `AsyncAgent` instead, which wakes no other thread. The memory belongs to the engine and must
    stay allocated until `close` has returned.
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
        """Prepare the agent; `start` or ``with`` connects it.

        The parameters mean the same as `AsyncAgent`'s. ``settings`` None means the defaults of
        `AgentSettings`, with ``staging_bytes``. ``on_lost`` is called on the agent's own thread.
        """
        settings = settings or AgentSettings(staging_bytes=staging_bytes)
        given = (broker, engine_id, incarnation, rank, tuple(regions), settings, credentials)
        super().__init__(rank, lambda: AsyncAgent(*given, on_lost))

    def begin(self) -> None:
        """Register the memory and connect, without waiting: the engine may register later.

        `refusal` has the reason if the broker refuses the agent. Raises `TransportFailedError`,
        `CudaUnavailableError`, `RegionInvalidError` if regions lie at several places, and
        `CopyFailedError` if the device has no room.
        """
        try:
            thread, agent = self._opened()
            thread.call_soon(agent.begin)
        except BaseException:
            self.close()
            raise

    @property
    def figures(self) -> AgentFigures:
        """Memory in use and reads so far; empty before `start` and after `close`."""
        agent = self._agent
        return agent.figures if agent is not None else AgentFigures()

    @property
    def refusal(self) -> RestowError | None:
        """Why the broker refuses the agent, or None if it has not refused it."""
        return self._agent.refusal if self._agent is not None else None
