"""Commands about states that are named by content: prefetch, pin, release, evict and move.

The broker passes a command to the store that is named, and keeps its status. A move without
another store goes to an engine that decodes:

    given --> sent to the store --> DONE, CLIPPED, REFUSED or MISSING
               |  a move: first to the other store, then to this store
               `-> its time is over: REFUSED, COMMAND_LATE; a pin is released again

No handoff passes through here, so a pinned state costs handoffs nothing.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Mapping
from dataclasses import dataclass, field

from restow.broker.core.common.actions import Action, SendCommand, TellCommand
from restow.broker.core.common.events import Command
from restow.broker.core.common.keys import EngineKey
from restow.broker.core.engines.engine import EngineRecord, pool_of
from restow.broker.errors import CommandConflictError, CommandUnknownError, QuotaExceededError
from restow.broker.state_commands import Answer, Outcome, Verb, refused

MAX_OPEN = 1000
"""Commands of a tenant that have not ended."""
MAX_KNOWN = 10_000
"""Commands of a tenant whose status is known; those that ended first are forgotten first."""
MAX_OPEN_BYTES = 64 << 20
"""Hashes of a tenant's commands that have not ended."""
KEPT_S = 600.0
"""How long a command is known after its end, or after the end of its pin."""


OPEN = Answer(Outcome.ACCEPTED)


@dataclass(slots=True, eq=False)
class Given:
    """A command and how it stands."""

    command: Command
    said: tuple[str, bytes]
    """`Command.state` as the caller named it, perhaps without a revision."""
    asked: EngineKey
    """The store that was asked last."""
    until_s: float
    """When it is late; for a pin that was done, when the pin ends."""
    store: EngineRecord | None = None
    """The process that was asked last."""
    answer: Answer = OPEN
    forget_s: float = 0.0
    state: tuple[str, bytes] = field(init=False)
    """`Command.state`; the hashes are kept only until the command has ended."""

    def __post_init__(self) -> None:
        """Name the state."""
        self.state = self.command.state

    def is_of(self, command: Command) -> bool:
        """Return whether ``command`` says the same as this command, but for its timeout."""
        own = self.command._replace(prefix=command.prefix, timeout_s=command.timeout_s)
        return own == command and self.said == command.state

    @property
    def open(self) -> bool:
        """Whether it has not ended."""
        return self.answer.outcome is Outcome.ACCEPTED

    @property
    def is_late_pin(self) -> bool:
        """Whether the store may have pinned what its caller was told is not pinned."""
        return self.command.verb is Verb.PIN and self.answer.reason == "COMMAND_LATE"

    def left_s(self, now_s: float) -> float:
        """Return how long its pin still lasts; 0 if there is none."""
        done = self.answer.outcome in (Outcome.DONE, Outcome.CLIPPED)
        if self.command.verb is not Verb.PIN or not done or self.store is None or self.store.gone:
            return 0.0
        return max(self.until_s - now_s, 0.0)


@dataclass(slots=True, eq=False)
class OfTenant:
    """The commands of a tenant."""

    by_id: dict[str, Given] = field(default_factory=dict)
    open: dict[str, Given] = field(default_factory=dict)
    """Those that have not ended."""
    open_bytes: int = 0
    ended: deque[Given] = field(default_factory=deque)
    """The others, in the order of their ends."""


class Commands:
    """The commands of all tenants."""

    def __init__(self, engines: Mapping[EngineKey, EngineRecord]) -> None:
        """Begin without commands; ``engines`` are those that are registered."""
        self.tenants: dict[str, OfTenant] = {}
        self.counts: Counter[tuple[Verb, Outcome]] = Counter()
        """Commands that have ended, by how they did."""
        self._engines = engines

    def give(self, command: Command, now_s: float) -> tuple[Given, list[Action]]:
        """Take a command, or find the same one. If no store can carry it out, it ends REFUSED.

        An empty revision becomes that of the store's layout.
        Raises `CommandConflictError`, and `QuotaExceededError` for too many open commands.
        """
        tenant = self.tenants.setdefault(command.engine.tenant, OfTenant())
        known = tenant.by_id.get(command.command_id)
        if known is not None:
            if not known.is_of(command):
                raise CommandConflictError(
                    f"command {command.command_id} was given before with another content: give "
                    f"each command an id of its own",
                    command=command.command_id,
                )
            return known, []
        size_bytes = command.prefix.size_bytes
        if len(tenant.open) >= MAX_OPEN or tenant.open_bytes + size_bytes > MAX_OPEN_BYTES:
            raise QuotaExceededError(
                f"{len(tenant.open)} commands of this tenant have not ended: wait until some have"
            )
        said, store = command.state, self._engines.get(command.engine)
        if store is not None and not command.prefix.revision:
            prefix = command.prefix._replace(revision=store.revision)
            command = command._replace(prefix=prefix)
        given = Given(command, said, command.target or command.engine, now_s + command.timeout_s)
        tenant.by_id[command.command_id] = tenant.open[command.command_id] = given
        tenant.open_bytes += size_bytes
        while len(tenant.by_id) > MAX_KNOWN and tenant.ended:
            del tenant.by_id[tenant.ended.popleft().command.command_id]
        refusal = self._why_not(command)
        if refusal is not None:
            return given, self._end(given, refusal, now_s)
        return given, self._order(given)

    def find(self, tenant: str, command_id: str) -> Given:
        """Return a command. Raises `CommandUnknownError`."""
        known = self.tenants.get(tenant)
        given = known.by_id.get(command_id) if known is not None else None
        if given is None:
            raise CommandUnknownError(
                f"no command {command_id} is known: it was not given here, or has been forgotten",
                command=command_id,
            )
        return given

    def answered(
        self, engine: EngineRecord, command_id: str, answer: Answer, now_s: float
    ) -> list[Action]:
        """Record the answer of a store; ignore it unless the command waits for this store."""
        tenant = self.tenants.get(engine.key.tenant)
        given = tenant.open.get(command_id) if tenant is not None else None
        if tenant is None or given is None or given.store is not engine:
            return []
        command = given.command
        if engine.key == command.target and answer.outcome is Outcome.DONE:
            given.asked = command.engine
            refusal = self._why_absent(command.engine)
            if refusal is None:
                return self._order(given)
            answer = refusal
        if command.verb is Verb.RELEASE and answer.outcome is Outcome.DONE:
            for other in tenant.by_id.values():
                if other.store is engine and other.state == given.state and not other.open:
                    other.until_s = min(other.until_s, now_s)
        return self._end(given, answer, now_s)

    def session_opened(self, engine: EngineRecord) -> list[Action]:
        """Repeat what a store has not answered; its stream may have lost it."""
        tenant = self.tenants.get(engine.key.tenant)
        if tenant is None:
            return []
        own = [given for given in tenant.by_id.values() if given.store is engine]
        actions = [action for given in own if given.open for action in self._order(given)]
        late = (given for given in own if given.is_late_pin)
        return actions + [SendCommand(one.asked, one.command, Verb.RELEASE) for one in late]

    def clear(self) -> None:
        """Forget all commands, because another broker leads now."""
        self.tenants.clear()

    def tick(self, now_s: float) -> list[Action]:
        """End commands that are late or whose store is gone; forget those that ended long ago."""
        actions: list[Action] = []
        for tenant in self.tenants.values():
            for given in list(tenant.open.values()):
                name = given.asked.engine_id
                if given.store is None or given.store.gone:
                    lost = refused("ENGINE_LOST", f"store {name} is gone")
                    actions += self._end(given, lost, now_s)
                elif given.until_s <= now_s:
                    if given.command.verb is Verb.PIN:  # the store may yet pin it
                        actions.append(SendCommand(given.asked, given.command, Verb.RELEASE))
                    words = f"store {name} did not answer within {given.command.timeout_s:g} s"
                    late = refused("COMMAND_LATE", words)
                    actions += self._end(given, late, now_s)
            while tenant.ended and tenant.ended[0].forget_s <= now_s:
                del tenant.by_id[tenant.ended.popleft().command.command_id]
        return actions

    # -- inside -----------------------------------------------------------------------------------

    def _order(self, given: Given) -> list[Action]:
        """Send a command to the store that is to carry it out, or its next step."""
        command, verb = given.command, given.command.verb
        if verb is Verb.MOVE and command.target is not None:
            verb = Verb.PREFETCH if given.asked == command.target else Verb.EVICT
        given.store = self._engines[given.asked]
        return [SendCommand(given.asked, command, verb)]

    def _why_not(self, command: Command) -> Answer | None:
        """Return the refusal of a command that no store can carry out; None if one can."""
        name, target = command.engine.engine_id, command.target
        replies = command.verb is Verb.MOVE and target is None
        for key in (command.engine, *filter(None, (target,))):
            if (refusal := self._why_absent(key, replies)) is not None:
                return refusal
        getting = self._engines[target or command.engine]
        if getting.key == command.engine and command.verb is Verb.MOVE and getting.keeps:
            words = f"the state of store {name} moves to another store: name one"
            return refused("SAME_STORE", words)
        if pool_of(getting) != pool_of(self._engines[command.engine]):
            words = f"stores {name} and {getting.key.engine_id} are for different models"
            return refused("MODEL_MISMATCH", words)
        takes = command.verb in (Verb.PREFETCH, Verb.PIN) or target is not None
        if getting.draining and takes:
            words = f"store {getting.key.engine_id} is draining, and takes nothing new"
            return refused("ENGINE_DRAINING", words)
        return None

    def _why_absent(self, key: EngineKey, replies: bool = False) -> Answer | None:
        """Return the refusal of a command for an engine that is away, or is no store.

        ``replies`` of an engine that is no store may move.
        """
        engine, name = self._engines.get(key), key.engine_id
        if engine is None or not engine.has_session:
            words = f"no engine {name} is connected"
            return refused("ENGINE_UNKNOWN", words)
        if not engine.keeps and not replies:
            words = (
                f"engine {name} is no store, and decides itself what it keeps: name a store, or "
                f"send the engine a request with these tokens and max_tokens 1"
            )
            return refused("NO_STORE", words)
        return None

    def _end(self, given: Given, answer: Answer, now_s: float) -> list[Action]:
        command = given.command
        tenant = self.tenants[command.engine.tenant]
        given.answer = answer
        if command.verb is Verb.PIN:
            given.until_s = now_s + min(answer.left_s, command.for_s)
        given.forget_s = now_s + given.left_s(now_s) + KEPT_S
        del tenant.open[command.command_id]
        tenant.open_bytes -= command.prefix.size_bytes
        if not given.is_late_pin:
            prefix = command.prefix._replace(hashes=b"", end_hash=b"")
            given.command = command._replace(prefix=prefix)
        tenant.ended.append(given)
        self.counts[command.verb, answer.outcome] += 1
        return [TellCommand(command, answer)]
