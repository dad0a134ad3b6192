"""Conversion and limits of messages about commands."""

from __future__ import annotations

from restow.broker.core.commands import Given
from restow.broker.core.common.events import Command
from restow.broker.core.common.keys import EngineKey
from restow.broker.core.ledger.handoff_table import MAX_ID_LENGTH
from restow.broker.errors import RequestError
from restow.broker.rpc.status import cut
from restow.broker.server.services.prefix_messages import named_of
from restow.broker.state_commands import Answer, Outcome, Verb
from restow.v1 import broker_pb2 as pb

DEFAULT_TIMEOUT_S = 30.0
MAX_MS = 600_000
MAX_PIN_MS = 86_400_000
MAX_REASON_LENGTH = 64


def command_of(message: pb.StateCommand, tenant: str) -> Command:
    """Return a caller's command. Raises `RequestError` and `ChainInvalidError`."""
    for name in ("command_id", "engine_id"):
        _check_id(name, getattr(message, name))
    named = message.WhichOneof("verb")
    if named is None:
        raise RequestError("a command without a verb", field="verb")
    verb = Verb(named)
    if not 0 <= message.timeout_ms <= MAX_MS:
        raise RequestError(
            f"timeout_ms is {message.timeout_ms}; it must be 0 to {MAX_MS}", field="timeout_ms"
        )
    for_ms = message.pin.for_ms
    if verb is Verb.PIN and not 0 < for_ms <= MAX_PIN_MS:
        raise RequestError(f"for_ms is {for_ms}; it must be 1 to {MAX_PIN_MS}", field="for_ms")
    target = None
    if message.move.to_engine_id:
        _check_id("to_engine_id", message.move.to_engine_id)
        target = EngineKey(tenant, message.move.to_engine_id)
    key = EngineKey(tenant, message.engine_id)
    prefix = named_of(message.prefix, message.position_tokens)
    timeout_s = message.timeout_ms / 1000 or DEFAULT_TIMEOUT_S
    return Command(message.command_id, verb, key, prefix, timeout_s, for_ms / 1000, target)


def wait_s_of(wait_ms: int) -> float:
    """Return how long a call waits for the end of its command. Raises `RequestError`."""
    if not 0 <= wait_ms <= MAX_MS:
        raise RequestError(f"wait_ms is {wait_ms}; it must be 0 to {MAX_MS}", field="wait_ms")
    return wait_ms / 1000


def answer_of(status: pb.CommandStatus) -> Answer:
    """Return a store's answer. Raises `RequestError` for an answer that ends nothing."""
    name = pb.CommandOutcome.Name(status.outcome) if status.outcome in _OUTCOMES else ""
    outcome = name.removeprefix("COMMAND_OUTCOME_")
    if outcome not in (Outcome.DONE, Outcome.CLIPPED, Outcome.REFUSED, Outcome.MISSING):
        raise RequestError(f"outcome {status.outcome} ends no command", field="outcome")
    if status.tokens < 0 or len(status.reason) > MAX_REASON_LENGTH:
        raise RequestError(
            f"tokens must not be negative, and a reason has at most {MAX_REASON_LENGTH} characters",
            field="tokens",
        )
    left_s = status.left_ms / 1000
    return Answer(Outcome(outcome), status.tokens, status.reason, cut(status.detail), left_s)


def fill_status(filled: pb.CommandStatus, given: Given, now_s: float) -> None:
    """Write how a command stands."""
    answer = given.answer
    filled.command_id = given.command.command_id
    filled.outcome = pb.CommandOutcome.Value(f"COMMAND_OUTCOME_{answer.outcome.value}")
    filled.tokens, filled.reason, filled.detail = answer.tokens, answer.reason, answer.detail
    filled.left_ms = int(given.left_s(now_s) * 1000)


_OUTCOMES = frozenset(pb.CommandOutcome.values())


def _check_id(name: str, text: str) -> None:
    if not 0 < len(text) <= MAX_ID_LENGTH or not text.isprintable():
        raise RequestError(
            f"{name} {text[:64]!r} must have 1 to {MAX_ID_LENGTH} printable characters", field=name
        )
