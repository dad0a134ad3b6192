"""End replies so that other engines go on with them.

A reply moves if its router has another engine go on with it (`MOVABLE`) and if its next tokens
depend on nothing but the tokens before. It ends behind its next token, with `MOVED_REASON`, and its
state is kept as after any reply. The router asks another engine, which finds the state by content.
Replies move when the engine is drained, or when a command names a prompt.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from queue import SimpleQueue
from typing import Any

from restow.agents.engines.common.prefix_sharing import PrefixSharing
from restow.agents.engines.vllm.scheduler.requests import MOVABLE, Request, why_not_handed_on
from restow.broker.client import BlockingSession, SessionClosedError, StateOrder
from restow.broker.errors import ChainFormError
from restow.broker.state_commands import Answer, Outcome, Verb, refused

MOVED_REASON = "restow_moved"
"""The stop reason of a reply that is to go on at another engine."""


def is_movable(request: Request) -> bool:
    """Return whether another engine would go on with the reply as this engine would.

    Its router says that it can, and no later token depends on more than the tokens before it.
    """
    given = request.kv_transfer_params
    wanted = isinstance(given, Mapping) and given.get(MOVABLE) is True
    return wanted and not (why_not_handed_on(request) or request.sampling_params.stop)


def end_for_move(request: Any) -> bool:
    """End a reply behind its next token (vLLM's `check_stop`).

    Return False, and change nothing, if the reply ends there anyway.
    """
    ahead = getattr(request, "num_output_placeholders", 0)  # tokens of steps under way
    stop = len(request.output_token_ids) + ahead + 1
    if stop >= request.max_tokens:
        return False
    request.max_tokens, request.stop_reason = stop, MOVED_REASON
    return True


class MoveOrders:
    """Brings what is to move from the session's thread to the scheduler's."""

    def __init__(self, wake: Callable[[], None], parses: bool = False) -> None:
        """``wake`` has the engine take a step if it is idle.

        ``parses``: the server tells reasoning from answers, so a reply stays with its parser.
        """
        self._wake, self.parses = wake, parses
        self.queue: SimpleQueue[StateOrder | None] = SimpleQueue()

    def leave(self) -> None:
        """Have all replies move, because the engine is told to leave."""
        self.queue.put(None)

    def hear(self, order: StateOrder) -> None:
        """Take a command: the replies to one prompt are to move."""
        self.queue.put(order)
        self._wake()


class ReplyMoves:
    """The replies that can move. Belongs to the scheduler's thread."""

    def __init__(
        self, orders: MoveOrders, session: BlockingSession, prefixes: PrefixSharing | None
    ) -> None:
        """Carry out ``orders``, and answer commands through ``session``."""
        self._orders, self._session, self._prefixes = orders.queue, session, prefixes
        self._parses = orders.parses
        self._movable: dict[str, Request] = {}

    @property
    def pending(self) -> bool:
        """Whether the next step has something to do here."""
        return not self._orders.empty()

    def begin(self, request: Request) -> None:
        """Follow a request that came in, if its reply can move; earlier orders are not for it."""
        self.step()
        if not self._parses and is_movable(request):
            self._movable[request.request_id] = request

    def end(self, request_id: str) -> None:
        """Forget a request that has ended."""
        self._movable.pop(request_id, None)

    def step(self) -> None:
        """Carry out what was ordered since the last step."""
        while self.pending:
            order = self._orders.get_nowait()
            if order is None:
                for request in self._movable.values():
                    end_for_move(request)
                continue
            try:
                self._session.answer_command(order.command_id, self._carry_out(order))
            except SessionClosedError:
                return

    def _carry_out(self, order: StateOrder) -> Answer:
        if order.verb is not Verb.MOVE:
            return refused("NO_STORE", "this engine decides itself what it keeps")
        try:
            moving = sum(
                end_for_move(request)
                for request_id, request in self._movable.items()
                if self._prefixes is not None
                and self._prefixes.begins_with(request_id, order.prefix)
            )
        except ChainFormError as error:
            return refused(error.reason, error.message)
        if not moving:
            words = "no reply that can move begins with these tokens"
            return Answer(Outcome.MISSING, 0, "NO_REPLY", words)
        return Answer(Outcome.DONE, order.prefix.position_tokens, "", f"{moving} replies move")
