"""Commands about single states, as callers give them and as stores carry them out."""

from __future__ import annotations

from dataclasses import dataclass

from restow.broker.client.engine.chains import Prefix, prefix_from_proto, prefix_to_proto
from restow.broker.state_commands import Answer, Outcome, Verb
from restow.broker.words import Worded
from restow.v1 import broker_pb2 as pb


@dataclass(frozen=True, slots=True)
class CommandStatus(Worded):
    """How a command stands."""

    command_id: str
    """The command."""
    outcome: Outcome
    """How it stands."""
    tokens: int
    """Tokens of the state for which it was carried out."""
    reason: str
    """A stable word, if it was not carried out; otherwise empty."""
    detail: str
    """The reason in words."""
    left_s: float
    """How long its pin still lasts; 0: it has ended, or there is none."""

    @property
    def ended(self) -> bool:
        """Whether the command has ended."""
        return self.outcome is not Outcome.ACCEPTED


@dataclass(frozen=True, slots=True)
class StateOrder(Worded):
    """A command for a store. A move reaches its two stores as PREFETCH and as EVICT."""

    command_id: str
    """The command."""
    verb: Verb
    """What the store is to do."""
    prefix: Prefix
    """The state."""
    for_s: float = 0.0
    """How long a pin lasts."""


def command_request(
    command_id: str,
    verb: Verb,
    prefix: Prefix,
    store: str,
    *,
    for_s: float = 0.0,
    to_store: str = "",
    timeout_s: float = 0.0,
    wait_s: float = 0.0,
) -> pb.CommandRequest:
    """Return the message that gives a command. Raises `ChainInvalidError`."""
    request = pb.CommandRequest(wait_ms=int(wait_s * 1000))
    command = request.command
    command.command_id, command.engine_id = command_id, store
    command.prefix.CopyFrom(prefix_to_proto(prefix))
    command.position_tokens = prefix.position_tokens
    command.timeout_ms = int(timeout_s * 1000)
    getattr(command, verb.value).SetInParent()
    if verb is Verb.PIN:
        command.pin.for_ms = int(for_s * 1000)
    elif verb is Verb.MOVE:
        command.move.to_engine_id = to_store
    return request


def status_of(status: pb.CommandStatus) -> CommandStatus:
    """Return a command's status."""
    name = pb.CommandOutcome.Name(status.outcome).removeprefix("COMMAND_OUTCOME_")
    return CommandStatus(
        status.command_id,
        Outcome(name),
        status.tokens,
        status.reason,
        status.detail,
        status.left_ms / 1000,
    )


def order_of(command: pb.StateCommand) -> StateOrder:
    """Return what a store has to do. Raises `ValueError` for a verb that is not known here."""
    prefix = prefix_from_proto(command.prefix, command.position_tokens)
    verb = Verb(command.WhichOneof("verb") or "")
    return StateOrder(command.command_id, verb, prefix, command.pin.for_ms / 1000)


def answer_message(command_id: str, answer: Answer) -> pb.EngineMessage:
    """Return the message that answers a command."""
    return pb.EngineMessage(
        commanded=pb.CommandStatus(
            command_id=command_id,
            outcome=pb.CommandOutcome.Value(f"COMMAND_OUTCOME_{answer.outcome.value}"),
            tokens=answer.tokens,
            reason=answer.reason,
            detail=answer.detail,
            left_ms=int(answer.left_s * 1000),
        )
    )
