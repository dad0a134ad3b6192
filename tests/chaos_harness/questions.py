"""What the driver asks the broker, from a process on the broker's host."""

from __future__ import annotations

from collections.abc import Callable
from multiprocessing.connection import Connection
from typing import Any

from chaos_harness.hosts import enter
from chaos_harness.process import Child
from restow.broker.client.admin import AdminClient
from restow.broker.errors import RestowError
from restow.v1 import broker_pb2

ANSWER_S = 30.0


def state_of(admin: AdminClient, handoff: str) -> str:
    """Return the state of a handoff at the broker."""
    number = admin.handoff(handoff).handoff.state
    return broker_pb2.HandoffState.Name(number).removeprefix("HANDOFF_STATE_")


def events_of(admin: AdminClient, handoff: str) -> list[str]:
    """Return what has happened to a handoff, in order."""
    return [entry.event for entry in admin.handoff(handoff).timeline]


def who_is_whole(admin: AdminClient) -> list[str]:
    """Return the engines that have their session and all their agents."""
    return [one.engine_id for one in admin.engines() if one.session and one.agents == one.ranks]


def answer_questions(pipe: Connection, namespace: str, address: str) -> None:
    """Answer questions until the asker is gone.

    The answer is None where the broker is gone, or knows nothing of the handoff.
    """
    enter(namespace)
    while True:
        question, *words = pipe.recv()
        try:
            with AdminClient(address) as admin:
                pipe.send(question(admin, *words))
        except RestowError:
            pipe.send(None)


class Questions(Child):
    """The process that asks. One question at a time."""

    def __init__(self, namespace: str, address: str) -> None:
        super().__init__("questions", answer_questions, namespace, address)

    def ask(self, question: Callable[..., Any], *words: str) -> Any:
        """Ask, and block until the answer comes. Raises `TimeoutError`."""
        self.pipe.send((question, *words))
        if not self.pipe.poll(ANSWER_S):
            raise TimeoutError("the process that asks the broker does not answer")
        return self.pipe.recv()
