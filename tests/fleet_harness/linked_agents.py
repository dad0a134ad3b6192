"""Agents without memory over the real link: they follow their pool from broker to broker."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Callable
from typing import Any

from broker.fakes import PAGES, FakeAgent, answer_at_once, model_layout
from restow.agents.execute.fences import Fences
from restow.agents.link.broker_link import Link
from restow.broker.client import EngineSession
from restow.broker.client.connection.channel import Credentials
from restow.broker.layout import Layout
from restow.v1 import agent_link_pb2 as link


class LinkedAgent:
    """One rank's agent. It settles at once what it is told to read."""

    def __init__(
        self,
        session: EngineSession,
        layout: Layout,
        rank: int,
        credentials: Credentials | None = None,
    ) -> None:
        self._hello = FakeAgent(session, layout, rank, PAGES, "nowhere:1").hello
        self.link = Link(session.address, self, credentials or Credentials())
        self.answers: Callable[[link.AgentOrder], list[link.AgentMessage]] = answer_at_once
        self._fences = Fences(self._say)
        self.welcomes = 0

    def fence(self, handoff_id: str) -> None:
        self._fences.fence(handoff_id, None)

    def _say(self, handoff_id: str, tokens: int) -> None:
        self.link.send(link.AgentMessage(fenced=link.Fenced(handoff_id=handoff_id, tokens=tokens)))

    async def hello(self) -> link.Hello:
        return self._hello

    def welcomed(self, broker_epoch: str) -> None:
        self.welcomes += 1
        self._fences.say_again()

    def take(self, order: link.AgentOrder) -> None:
        if order.WhichOneof("body") == "unfence":
            self._fences.forget(order.unfence.handoff_id)
        for answer in self.answers(order):
            self.link.send(answer)


@contextlib.asynccontextmanager
async def linked_engine(
    addresses: str,
    name: str,
    tp: int = 1,
    model: str = "m",
    credentials: Credentials | None = None,
    **more: Any,
) -> AsyncIterator[tuple[EngineSession, list[LinkedAgent]]]:
    """Run an engine: yield its session, and its agents."""
    layout = model_layout(tp, model)
    async with EngineSession(
        name, f"{name}-life", layout, addresses, credentials, **more
    ) as session:
        agents = [LinkedAgent(session, layout, rank, credentials) for rank in range(tp)]
        try:
            await asyncio.gather(*(one.link.start(20.0) for one in agents))
            yield session, agents
        finally:
            for one in agents:
                await one.link.close()
