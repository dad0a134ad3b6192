"""What the driver asks the broker, from a process on the broker's host."""

from __future__ import annotations

from collections.abc import Callable
from multiprocessing.connection import Connection
from typing import Any

from chaos_harness.hosts import enter
from chaos_harness.lives import STORE
from chaos_harness.process import Child
from restow.broker.client.admin import AdminClient
from restow.broker.errors import RestowError
from restow.broker.state_commands import Verb
from restow.v1 import broker_pb2
from stamped.kept_states import prefix_of
from stamped.requests import Prompt

ANSWER_S = 30.0
COMMAND_S, PIN_S = 5.0, 1.0


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


def drain(admin: AdminClient, engine: str, draining: bool) -> bool:
    """Have an engine take nothing new, or resume; return True."""
    admin.drain_engine(engine, draining)
    return True


def outcome_of(admin: AdminClient, command: str) -> str:
    """Return how a command stands."""
    return str(admin.command_status(command).outcome)


def give_command(admin: AdminClient, name: str, verb: Verb, prompt: Prompt) -> str:
    """Give the store a command about a state, and return how it stands."""
    for_s = PIN_S if verb is Verb.PIN else 0.0
    prefix = prefix_of(prompt)
    return str(admin.command(name, verb, prefix, STORE, for_s=for_s, timeout_s=COMMAND_S).outcome)


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

    def ask(self, question: Callable[..., Any], *words: object) -> Any:
        """Ask, and block until the answer comes. Raises `TimeoutError`."""
        self.pipe.send((question, *words))
        if not self.pipe.poll(ANSWER_S):
            raise TimeoutError("the process that asks the broker does not answer")
        return self.pipe.recv()
