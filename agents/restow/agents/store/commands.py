"""Carry out commands about single states: prefetch, pin, release and evict.

A pin keeps a state in memory until its time is over. Pins are looked through when the memory has no
room and when a command comes, so an ended pin costs nothing until then.
"""

from __future__ import annotations

import contextlib
import threading
import time
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial

from restow.agents.store.holdings import DiskThread, StoredStates
from restow.agents.store.kept import Pinned
from restow.agents.store.requests import StateRequests
from restow.broker.client import BlockingSession, Prefix, SessionClosedError
from restow.broker.client.engine.commands import StateOrder
from restow.broker.errors import ChainFormError, ChainInvalidError
from restow.broker.state_commands import Answer, Outcome, Verb, refused

MAX_ANSWERS = 10_000
"""Answers that are remembered, so that a repeated command has no effect of its own."""


@dataclass(slots=True)
class Pin:
    """A state that stays in memory until ``until_s``."""

    asked: Prefix
    """What the command named; ``pinned`` may be a shorter state of the same prompt."""
    pinned: Pinned
    size_bytes: int
    until_s: float

    def names(self, prefix: Prefix) -> bool:
        """Return whether ``prefix`` is what was asked for, or what was pinned."""
        return prefix in (self.asked, self.pinned.prefix)


class StateCommands:
    """Carries out the broker's commands. All methods but `hear` run on one thread."""

    def __init__(
        self,
        session: BlockingSession,
        holdings: StoredStates,
        requests: StateRequests,
        disk: DiskThread | None,
        pin_bytes: int,
        run: Callable[[Callable[[], None]], None],
    ) -> None:
        """Begin without pins, which take at most ``pin_bytes``; ``run`` does work on the thread."""
        self.pinned_bytes = 0
        """Memory of pinned states. States that share blocks count them several times."""
        self._session, self._holdings, self._requests = session, holdings, requests
        self._disk, self._pin_bytes, self._run = disk, pin_bytes, run
        self._pins: dict[str, Pin] = {}
        """By command."""
        self._answers: OrderedDict[tuple[str, Verb], Answer | None] = OrderedDict()
        """None: the command is being carried out."""
        self._lock = threading.Lock()
        holdings.before_reserve = self.end_late

    @property
    def pins(self) -> int:
        """Number of pins, including those that have ended and were not looked through yet."""
        return len(self._pins)

    def hear(self, order: StateOrder) -> None:
        """Take a command. Returns at once, on any thread."""
        self._run(lambda: self._carry_out(order))

    def end_late(self) -> None:
        """End the pins whose time is over. May be called on any thread."""
        now_s = time.monotonic()
        for name, pin in list(self._pins.items()):
            if pin.until_s <= now_s:
                self._unpin(name)

    def _carry_out(self, order: StateOrder) -> None:
        key = order.command_id, order.verb
        if key in self._answers:
            known = self._answers[key]
            if known is not None:
                self._say(order, known)
            return
        self._answers[key] = None
        while len(self._answers) > MAX_ANSWERS:
            self._answers.popitem(last=False)
        self.end_late()
        try:
            self._holdings.check(order.prefix)
        except (ChainFormError, ChainInvalidError) as error:
            self._end(order, refused(error.reason, error.message))
            return
        if order.verb is Verb.PREFETCH:
            self._requests.fetch(order.prefix, lambda answer: self._end(order, answer))
        elif order.verb is Verb.PIN:
            self._pin(order)
        elif order.verb is Verb.RELEASE:
            self._end(order, self._release(order))
        else:
            self._end(order, self._evict(order.prefix))

    def _pin(self, order: StateOrder) -> None:
        """Pin a state in memory; one that is on disk alone is read into memory first."""
        on_disk = not self._holdings.keeps(order.prefix) and self._holdings.holds(order.prefix)
        if self._disk is not None and on_disk:
            self._disk.read(partial(self._bring, self._disk, order))
        else:
            self._pin_kept(order)

    def _bring(self, disk: DiskThread, order: StateOrder) -> None:
        """Read a state from disk, and have it pinned. Runs on the disk's thread."""
        disk.bring(order.prefix)
        self._run(lambda: self._pin_kept(order))

    def _pin_kept(self, order: StateOrder) -> None:
        prefix = self._holdings.longest(order.prefix)
        pinned = self._holdings.pin_quietly(prefix) if prefix is not None else None
        if prefix is None or pinned is None:
            words = "the store has no state of these tokens"
            self._end(order, Answer(Outcome.MISSING, 0, "NOT_HELD", words))
            return
        size_bytes = self._holdings.size_bytes(pinned)
        if self.pinned_bytes + size_bytes > self._pin_bytes:
            self._holdings.give_up(pinned)
            words = (
                f"{self.pinned_bytes} of at most {self._pin_bytes} bytes are pinned, and this "
                f"state has {size_bytes}: wait, release others, or raise --pin-memory"
            )
            self._end(order, refused("PINS_FULL", words))
            return
        until_s = time.monotonic() + order.for_s
        self._pins[order.command_id] = Pin(order.prefix, pinned, size_bytes, until_s)
        with self._lock:
            self.pinned_bytes += size_bytes
        clipped = prefix.position_tokens < order.prefix.position_tokens
        outcome = Outcome.CLIPPED if clipped else Outcome.DONE
        self._end(order, Answer(outcome, prefix.position_tokens))

    def _release(self, order: StateOrder) -> Answer:
        """End all pins of a state; with the id of a late pin, no pin but that one."""
        names = [name for name, pin in self._pins.items() if pin.names(order.prefix)]
        if (order.command_id, Verb.PIN) in self._answers:
            names = [name for name in names if name == order.command_id]
        if not names:
            words = "the store has no pin of this state"
            return Answer(Outcome.MISSING, 0, "NOT_PINNED", words)
        tokens = max(self._pins[name].pinned.prefix.position_tokens for name in names)
        for name in names:
            self._unpin(name)
        return Answer(Outcome.DONE, tokens)

    def _evict(self, prefix: Prefix) -> Answer:
        if any(pin.names(prefix) for pin in self._pins.values()):
            words = "the state is pinned: release it first, or wait until its pin ends"
            return refused("PINNED", words)
        there = self._holdings.evict(prefix)
        if self._disk is not None and self._holdings.holds(prefix):
            there = True
            self._disk.evict(prefix)
        if not there:
            words = "the store has no state that ends after exactly these tokens"
            return Answer(Outcome.MISSING, 0, "NOT_HELD", words)
        return Answer(Outcome.DONE, prefix.position_tokens)

    def _unpin(self, name: str) -> None:
        pin = self._pins.pop(name, None)
        if pin is not None:  # another thread may have ended it
            with self._lock:
                self.pinned_bytes -= pin.size_bytes
            self._holdings.give_up(pin.pinned)

    def _end(self, order: StateOrder, answer: Answer) -> None:
        self._answers[order.command_id, order.verb] = answer
        self._say(order, answer)

    def _say(self, order: StateOrder, answer: Answer) -> None:
        pin = self._pins.get(order.command_id)
        left_s = max(pin.until_s - time.monotonic(), 0.0) if pin is not None else 0.0
        with contextlib.suppress(SessionClosedError):
            self._session.answer_command(order.command_id, replace(answer, left_s=left_s))
