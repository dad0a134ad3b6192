"""The agent that an engine embeds in its worker process."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from restow.agents.link.async_agent import AsyncAgent
from restow.agents.link.settings import AgentFigures, AgentSettings
from restow.agents.link.threaded_agent import ThreadedAgent
from restow.agents.memory.regions import RegionMemory
from restow.broker.client.connection.channel import Credentials
from restow.broker.errors import RestowError
from restow.broker.layout.values import ModelIdentity

STAGING_BYTES = AgentSettings().staging_bytes


class Agent(ThreadedAgent[AsyncAgent]):
    """Serves one rank of an engine from a background thread. A context.

    Its methods suit any thread. An engine with an event loop of its own has `AsyncAgent`, which
    wakes no other thread. The memory belongs to the engine and must stay until `close` has
    returned.
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
        *,
        model: ModelIdentity | None = None,
    ) -> None:
        """Prepare; `start` or ``with`` connects.

        ``broker`` is HOST:PORT, or as gRPC writes addresses; None: RESTOW_BROKER or the default.
        ``engine_id`` and ``incarnation`` are those of the engine's session, ``rank`` and
        ``regions`` those of the rank in its layout, the regions in its order. ``settings`` say how
        it works; None: as `AgentSettings` has it, but for ``staging_bytes``. ``credentials`` None:
        those of the environment, RESTOW_TLS_CA and so on. ``on_lost`` hears, on the agent's own
        thread, why the memory can be read no more as long as this process lives.
        ``model`` is which model the layout is of (`Layout.model.identity`): by it the agent finds,
        among several brokers, the one that owns its pool. None: there is one broker.
        """
        settings = settings or AgentSettings(staging_bytes=staging_bytes)
        given = (broker, engine_id, incarnation, rank, tuple(regions), settings, credentials)
        super().__init__(rank, lambda: AsyncAgent(*given, on_lost, model=model))

    def begin(self) -> None:
        """Register the memory and connect, without waiting: the engine may be registered later.

        `refusal` says if the broker wants none of it. Raises `TransportFailedError`,
        `CudaUnavailableError`, `RegionInvalidError` for regions at several places, and
        `CopyFailedError` for a device without room.
        """
        try:
            thread, agent = self._opened()
            thread.call_soon(agent.begin)
        except BaseException:
            self.close()
            raise

    @property
    def figures(self) -> AgentFigures:
        """What is in use, and what was read so far; nothing before `start` and after `close`."""
        agent = self._agent
        return agent.figures if agent is not None else AgentFigures()

    @property
    def refusal(self) -> RestowError | None:
        """Why the broker does not know the agent, as far as it has said. None: it does."""
        return self._agent.refusal if self._agent is not None else None
