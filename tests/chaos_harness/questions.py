"""What the driver asks the broker, from a process on the broker's host."""

from __future__ import annotations

from multiprocessing.connection import Connection

from chaos_harness.hosts import enter
from chaos_harness.process import Child
from restow.broker.client.admin import AdminClient
from restow.broker.errors import RestowError
from restow.v1 import broker_pb2

ANSWER_S = 30.0


def answer_questions(pipe: Connection, namespace: str, address: str) -> None:
    """Say in which state the broker thinks a handoff is; empty if it knows of none."""
    enter(namespace)
    while True:
        name = pipe.recv()
        try:
            with AdminClient(address) as admin:
                number = admin.handoff(name).handoff.state
        except RestowError:
            pipe.send("")
        else:
            pipe.send(broker_pb2.HandoffState.Name(number).removeprefix("HANDOFF_STATE_"))


class Questions(Child):
    """The process that asks. One question at a time."""

    def __init__(self, namespace: str, address: str) -> None:
        super().__init__("questions", answer_questions, namespace, address)

    def state(self, name: str) -> str:
        """Blocks. Raises `TimeoutError`."""
        self.pipe.send(name)
        if not self.pipe.poll(ANSWER_S):
            raise TimeoutError("the process that asks the broker does not answer")
        state: str = self.pipe.recv()
        return state
