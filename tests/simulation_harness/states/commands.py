"""Commands about states in a history: who computes what, who commands what, and what goes wrong."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Callable, Coroutine, Sequence
from contextvars import Context
from dataclasses import replace
from random import Random
from typing import TYPE_CHECKING, Any

import grpc

from restow.broker.client import Credentials, Prefix
from restow.broker.client.connection.errors import from_rpc_error
from restow.broker.client.engine.commands import CommandStatus, command_request, status_of
from restow.broker.errors import RestowError
from restow.broker.server.gate.callers import DEFAULT_TENANT
from restow.broker.state_commands import Outcome, Verb
from restow.v1 import broker_pb2, broker_pb2_grpc
from simulation_harness.states.promises import Asked, Promises
from simulation_harness.states.store import Ground, Store
from simulation_harness.virtual_loop import Process
from stamped.kept_states import prefix_of
from stamped.requests import Prompt
from stamped.stamps import Violation

if TYPE_CHECKING:
    from simulation_harness.history import History
    from simulation_harness.several.brokers import Life

Who = tuple["Life", int]
"""A life of a broker, and the epoch in which it leads."""
PLAYED = 0.1
"""In how many histories there are stores."""
STORES = "ST"
WITHIN_S = 28.0
LONGEST_TOKENS = 12
AFTER_S = 30.0
"""After a command's timeout a caller gives up to hear of it."""
CALL_S = 8.0
AGAIN_S = 0.3
PLANS = (
    (Verb.PREFETCH, Verb.PIN, Verb.EVICT),
    (Verb.PREFETCH, Verb.PIN, Verb.RELEASE, Verb.EVICT),
    (Verb.PREFETCH, Verb.MOVE),
    (Verb.PREFETCH, Verb.PIN, Verb.MOVE),
    (Verb.PREFETCH, Verb.MOVE, Verb.PREFETCH, Verb.EVICT),
    (Verb.PIN, Verb.PIN, Verb.RELEASE),
    (Verb.PREFETCH, Verb.EVICT, Verb.PREFETCH),
)
"""What one caller commands about a state, one after the other."""
TO_ITSELF = 0.05
"""How many moves name one store twice."""
SAID_AGAIN, CONTRADICTED = 0.15, 0.1
"""After how many commands their id is given again, with the same content or another one."""
SAID_WITHIN_S = (0.0, 5.0)
"""How long after a command its id is given again, at most."""
HASTY, PATIENT = 0.2, 0.3
"""How many commands have a short timeout, and how many one that outlasts a stream that breaks."""
PIN_S = (0.3, 12.0)
STRIKES = (0, 1, 1, 2)
"""How often something goes wrong with stores."""
LONGER = 0.1
"""How many callers name a prompt that goes on: of this a store may pin the beginning."""
EVICTED = 0.5
"""How many states their engines evict."""


class Commands:
    """Stores and callers of a history, if there are any."""

    def __init__(self, history: History) -> None:
        """Begin without any."""
        # Numbers of its own: histories without stores stay as they are.
        self._rng = Random(history.report.seed + 4)  # noqa: S311
        self._drawn = self._rng.random()
        self._history, self._loop = history, history.loop
        self.lives: dict[str, list[Store]] = {}
        self.promises = Promises(history, self.lives)
        self.ended: Counter[str] = Counter()
        """How commands ended, by verb."""
        self._grounds: dict[str, Ground] = {}
        self._prompts: list[Prompt] = []
        self._caller = Process(history.loop, "router", "r")
        self._given = 0
        self._calling = 0

    @property
    def played(self) -> bool:
        """Whether there are any."""
        return self._drawn < PLAYED

    def begin(self) -> None:
        """Start the stores, and plan what is computed, asked for and commanded."""
        if not self.played:
            return
        rng = self._rng
        layout = self._history.memory[rng.choice("PDE")].layout
        for name in STORES:
            self._grounds[name] = Ground(name, layout, rng.randint(10, 24))
            self.lives[name] = []
            self._start(name)
        self.promises.look()
        for number in range(rng.randint(2, 4)):
            self._prompts.append(prompt := self._prompt(f"state{number}"))
            for side in rng.sample("PDE", rng.choice((0, 1, 1, 1, 2))):
                self._later(WITHIN_S / 4, self._compute, side, prompt)
                if rng.random() < EVICTED:
                    self._later(WITHIN_S, self._evict, side, prompt)
            for asked in range(rng.randint(0, 2)):
                name = f"{prompt.name}?{asked}"
                self._later(WITHIN_S, self._ask, rng.choice("PDE"), prompt, name)
        for _ in range(rng.randint(2, 5)):
            self._later(WITHIN_S * 0.7, self._call, rng.choice(PLANS))
        if self._history.faults is not None:
            for _ in range(rng.choice(STRIKES)):
                self._later(WITHIN_S, self._go_wrong, rng.choice(self.faults))

    def processes(self) -> list[Process]:
        """Return the processes of all lives."""
        return [store.process for lives in self.lives.values() for store in lives]

    def unfinished(self) -> str:
        """Return what has not ended, or was not given back."""
        if self._calling:
            return f"{self._calling} callers wait for the ends of commands"
        for life in self._history.brokers.running:
            tenants = life.hub.directory.commands.tenants if life.hub is not None else {}
            if left := [name for tenant in tenants.values() for name in tenant.open]:
                return f"{life.process.name} has commands {left}"
        words = (lives[-1].unfinished() for lives in self.lives.values())
        return next(filter(None, words), "")

    async def find_one(self, name: str) -> tuple[str, str] | None:
        """Return how a demand ends for a state that only stores have, if commands end well.

        Nothing hinders them but a slow network.
        """
        history = self._history
        prompt = replace(self._prompt(name), timeout_ms=30_000, lease_ms=30_000)
        p = history.lives["P"][-1]
        p.kept.silent = 0.0
        self._compute("P", prompt)
        await history.pass_time(4.0)
        prefix = replace(prefix_of(prompt), revision=history.revision)
        here, there = self._rng.sample(STORES, 2)
        plan = (
            *((Verb.PREFETCH, here), (Verb.PIN, here), (Verb.RELEASE, here)),
            *((Verb.MOVE, here), (Verb.EVICT, there)),
        )
        try:
            for verb, store in plan:
                if verb is Verb.EVICT and (end := await self._demand(prompt)) != ("DONE", ""):
                    return end
                asked = self._asked(verb, prefix, store)
                asked = replace(asked, timeout_s=20.0, to_store=asked.to_store and there)
                status = await self._caller.spawn(self._told(asked))
                await history.pass_time(1.0)
                if status is None or status.outcome is not Outcome.DONE:
                    return verb, "" if status is None else status.reason
                if verb is Verb.PREFETCH:
                    self._evict("P", prompt)
                    await history.pass_time(9.0)  # an eviction is told late
        finally:
            self._evict("P", prompt)
        return "DONE", ""

    async def _demand(self, prompt: Prompt) -> tuple[str, str]:
        """Return how a demand of D for a state ends."""
        requests, name = self._history.lives["D"][-1].requests, f"{prompt.name}?"
        self._ask("D", prompt, name)
        while name in requests.pending:
            await self._history.pass_time(1.0)
        return requests.said[name]

    # -- who there is -----------------------------------------------------------------------------

    def _start(self, name: str) -> None:
        lives, history = self.lives[name], self._history
        lives.append(
            Store(
                self._loop,
                self._grounds[name],
                f"life{len(lives) + 1}",
                history.brokers.given,
                self.promises,
                history.found.append,
                self._replaced,
            )
        )

    def _replaced(self, store: Store) -> None:
        """Restart a store that a late message of its killed life has replaced."""
        if store is self.lives[store.name][-1]:
            self._loop.call_later(0.0, self._end, store, context=Context())

    def _end(self, store: Store) -> None:
        """Kill a store; it starts again soon, and has nothing."""
        if store.process.alive and store is self.lives[store.name][-1]:
            store.process.kill()
            self._history.network.lost(store.process)
            back_s = self._rng.choice((0.02, 3.0)) * self._rng.random()
            self._loop.call_later(back_s, self._start, store.name, context=Context())

    # -- what goes wrong --------------------------------------------------------------------------

    @property
    def faults(self) -> Sequence[Callable[[Store], None]]:
        """Return what may go wrong with a store."""
        return (self._end, self.pause, self._cut, self.cut_from_broker, self._drain, self.forget)

    def _go_wrong(self, fault: Callable[[Store], None]) -> None:
        self._history.hinder()
        store = self.lives[self._rng.choice(STORES)][-1]
        name = f"store_{fault.__name__.strip('_')}"
        self._history.report.faults.append(f"{self._loop.time():.3f} {name} {store.name}")
        fault(store)

    def pause(self, store: Store) -> None:
        self._history.network.pause(store.process)
        pause_s = self._rng.choice((1.0, 12.0)) * self._rng.random()
        self._loop.call_later(pause_s, store.process.resume, context=Context())

    def _cut(self, store: Store) -> None:
        self._cut_hosts([self._rng.choice("pde")], store.process.host)

    def cut_from_broker(self, store: Store) -> None:
        self._cut_hosts(list(self._history.brokers.hosts), store.process.host)

    def _cut_hosts(self, hosts: list[str], other: str) -> None:
        network = self._history.network
        # Many are over when both sides have just noticed that they are cut off.
        cut_s = self._rng.choice((self._rng.uniform(0.0, 3.0), self._rng.uniform(14.0, 18.0)))
        for host in hosts:
            network.cut(host, other)
            self._loop.call_later(cut_s, network.heal, host, other, context=Context())

    def _drain(self, store: Store) -> None:
        async def drain() -> None:
            await store.drain()
            self._loop.call_later(0.01, self._end, store, context=Context())

        store.spawn(drain())

    def forget(self, store: Store) -> None:
        """Have an operator make all stores forget the states of the first weights."""
        revision = store.ground.layout.model.revision
        self._history.brokers.tell_leader(
            lambda hub: hub.directory.offering.forget_states(DEFAULT_TENANT, revision)
        )

    # -- states -----------------------------------------------------------------------------------

    def _later(self, within_s: float, call: Callable[..., object], *given: object) -> None:
        self._loop.call_later(self._rng.uniform(0.0, within_s), call, *given)

    def _prompt(self, name: str) -> Prompt:
        tokens = self._rng.randint(1, LONGEST_TOKENS)
        return Prompt(name, tokens, self._rng.uniform(0.0, 1.0), 10_000, 20_000, 8_000)

    def _compute(self, side: str, prompt: Prompt) -> None:
        engine = self._history.lives[side][-1]
        engine.spawn(engine.kept.compute(prompt, self._history.computed))

    def _evict(self, side: str, prompt: Prompt) -> None:
        engine = self._history.lives[side][-1]
        engine.spawn(engine.kept.evict(prompt))

    def _ask(self, side: str, prompt: Prompt, name: str) -> None:
        history = self._history
        engine, right = history.lives[side][-1], history.held_stamps
        engine.ask(prompt, name, history.computed, lambda of: right.get(of, set()), False)

    # -- commands ---------------------------------------------------------------------------------

    def _call(self, plan: tuple[Verb, ...]) -> None:
        rng = self._rng
        prompt = rng.choice(self._prompts)
        if rng.random() < LONGER:
            prompt = replace(prompt, position_tokens=prompt.position_tokens + rng.randint(1, 4))
        prefix, store = prefix_of(prompt), rng.choice(STORES)
        if self._history.revision and rng.random() < 0.5:
            prefix = replace(prefix, revision=self._history.revision)
        self._spawn(self._carry_out(plan, prefix, store))

    async def _carry_out(self, plan: tuple[Verb, ...], prefix: Prefix, store: str) -> None:
        for verb in plan:
            asked = self._asked(verb, prefix, store)
            work = self._told(asked)
            if self._rng.random() < 0.8:
                await work
            else:
                self._spawn(work)
            if verb is Verb.MOVE:
                store = asked.to_store
            await asyncio.sleep(self._rng.choice((0.0, 0.2, 2.0)) * self._rng.random())

    def _spawn(self, work: Coroutine[Any, Any, object]) -> None:
        """Have a caller do something."""

        async def call() -> None:
            self._calling += 1
            try:
                await work
            except Exception as error:  # noqa: BLE001 - the history ends with it
                self._history.found.append(error)
            finally:
                self._calling -= 1

        self._caller.spawn(call())

    def _asked(self, verb: Verb, prefix: Prefix, store: str) -> Asked:
        """Return a new command."""
        rng = self._rng
        self._given += 1
        other = store if rng.random() < TO_ITSELF else next(one for one in STORES if one != store)
        return Asked(
            f"command{self._given}",
            verb,
            prefix,
            store,
            timeout_s=self._timeout_s(),
            for_s=rng.uniform(*PIN_S) if verb is Verb.PIN else 0.0,
            to_store=other if verb is Verb.MOVE else "",
        )

    def _timeout_s(self) -> float:
        draw = self._rng.random()
        if draw < HASTY:
            return self._rng.uniform(0.02, 0.6)
        if draw < HASTY + PATIENT:
            return self._rng.uniform(20.0, 30.0)
        return self._rng.uniform(3.0, 12.0)

    async def _told(self, asked: Asked) -> CommandStatus | None:
        """Give a command, and return how it ended; None if nobody tells."""
        self.promises.asked[asked.command_id] = asked
        status, who = await self._await_end(asked)
        if status is not None:
            self.ended[f"{asked.verb} {status.outcome} {status.reason}".strip()] += 1
            self.promises.ended(asked, status)
            await self._say_again(asked, status, who)
        return status

    async def _await_end(self, asked: Asked) -> tuple[CommandStatus | None, Who | None]:
        end_s = self._loop.time() + asked.timeout_s + AFTER_S
        status: CommandStatus | None = None
        who: Who | None = None
        while self._loop.time() < end_s:
            try:
                # A broker that has restarted does not know it: it is given again.
                if status is not None and self._rng.random() < 0.5:
                    status, who = await self._look_up(asked)
                else:
                    status, who = await self._give(asked)
            except RestowError as error:
                if error.reason in ("COMMAND_CONFLICT", "QUOTA_EXCEEDED"):
                    raise Violation(f"a new command is refused: {error.reason}") from error
                if error.reason == "COMMAND_UNKNOWN" and who is not None and who == self._leader:
                    raise Violation("a broker has forgotten a command") from error
                status = None
                await asyncio.sleep(AGAIN_S)
                continue
            if status.ended:
                return status, who
            await asyncio.sleep(AGAIN_S * self._rng.random())
        return None, None

    async def _say_again(self, asked: Asked, before: CommandStatus, who: Who | None) -> None:
        """Give a command's id again now and then, with the same content or another one."""
        draw = self._rng.random()
        if draw > SAID_AGAIN + CONTRADICTED:
            return
        await asyncio.sleep(self._rng.choice(SAID_WITHIN_S) * self._rng.random())
        contradicts = draw < CONTRADICTED
        if contradicts:
            asked = replace(asked, prefix=replace(asked.prefix, salt="another"))
        try:
            status, again = await self._give(asked)
        except RestowError as error:
            if error.reason == "COMMAND_CONFLICT" and not contradicts:
                raise Violation("a command that is repeated is refused") from error
            self.ended[error.reason] += error.reason == "COMMAND_CONFLICT"
            return
        if again is None or again != who:
            return
        if contradicts:
            raise Violation("another command is accepted under an id that is used")
        if (status.outcome, status.reason) != (before.outcome, before.reason):
            raise Violation(f"a command that has ended {before} is now {status}")

    async def _give(self, asked: Asked) -> tuple[CommandStatus, Who | None]:
        request = command_request(
            *(asked.command_id, asked.verb, asked.prefix, asked.store),
            for_s=asked.for_s,
            to_store=asked.to_store,
            timeout_s=asked.timeout_s,
            wait_s=self._rng.choice((0.0, 0.3, 5.0)),
        )
        response, who = await self._ask_leader("Command", request)
        return status_of(response.status), who

    async def _look_up(self, asked: Asked) -> tuple[CommandStatus, Who | None]:
        request = broker_pb2.GetCommandRequest(command_id=asked.command_id)
        response, who = await self._ask_leader("GetCommand", request)
        return status_of(response.status), who

    async def _ask_leader(self, method: str, request: Any) -> tuple[Any, Who | None]:
        """Call the broker that leads; return its answer, and who it is if that is certain.

        Raises the broker's refusal, and `BrokerUnreachableError`.
        """
        brokers = self._history.brokers
        before = self._leader
        address = brokers.addresses[0] if brokers.leader is None else brokers.leader.address
        channel = self._history.network.open_channel(address, Credentials(), brokers.several)
        stub: Any = broker_pb2_grpc.BrokerStub(channel)  # type: ignore[call-overload]
        call = getattr(stub, method)
        try:
            response = await call(request, timeout=CALL_S)
        except grpc.aio.AioRpcError as error:
            raise from_rpc_error(error, address) from None
        return response, before if before == self._leader else None

    @property
    def _leader(self) -> Who | None:
        life = self._history.brokers.leader
        if life is None or (life.fleet is not None and not life.may_act()):
            return None
        return life, life.may_act()
