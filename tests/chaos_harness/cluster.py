"""A broker, a P and a D on hosts of their own, what they hand over, and what came of it."""

from __future__ import annotations

import asyncio
import contextlib
import shutil
import signal
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Mapping
from pathlib import Path
from random import Random
from types import MappingProxyType
from typing import Any

from chaos_harness.engine import Life, Said
from chaos_harness.fleet import Fleet
from chaos_harness.found import Found
from chaos_harness.hosts import Hosts
from chaos_harness.lives import BrokerLife, EngineLife, ProgramLife, StoreLife
from chaos_harness.model import PAGE_TOKENS, layout, page_counts
from chaos_harness.process import Member, warm_up
from chaos_harness.questions import (
    Questions,
    drain,
    events_of,
    give_command,
    outcome_of,
    state_of,
    who_is_whole,
)
from forked.ports import free_port
from restow.broker.families import ConvLayout
from restow.broker.state_commands import Verb
from stamped.requests import Prompt

PORT = 7350
WIRES = (("b", "p"), ("b", "d"), ("p", "d"))
STAGING_BYTES = 8 << 20
SHARED_MEMORY = Path("/dev/shm")  # noqa: S108 - memory that processes share
READY_S = 60.0
ASK_EVERY_S = 0.1


class Cluster:
    """All of them. Belongs to one event loop."""

    def __init__(
        self,
        rng: Random,
        hosts: Hosts | None,
        *,
        transports: str = "tcp",
        quarantine_s: float = 3.0,
        broker_options: tuple[str, ...] = (),
        broker_environment: Mapping[str, str] = MappingProxyType({}),
        fleet: Fleet | None = None,
    ) -> None:
        """Prepare a cluster, which runs on one host if there are no ``hosts``.

        ``transports`` narrows UCX's transports (UCX_TLS). With ``tcp`` no byte is read of a process
        that is stopped. With a ``fleet`` there are several brokers in place of the one.
        """
        self.fleet = fleet
        self.found, self._rng, self._hosts = Found(), rng, hosts
        self._transports, self._quarantine_s = transports, quarantine_s
        self._broker_options, self._broker_environment = broker_options, broker_environment
        self._port = PORT if hosts is not None else free_port()
        self.broker: BrokerLife | None = None
        self.store: StoreLife | None = None
        self._questions: Questions | None = None
        self._asking = asyncio.Lock()
        self.engines: dict[str, EngineLife] = {}
        self.lives: Counter[str] = Counter()
        self.folder = Path(tempfile.mkdtemp(prefix="restow-chaos-"))
        self._on_change = asyncio.Event()

    # -- who there is -----------------------------------------------------------------------------

    async def __aenter__(self) -> Cluster:
        await asyncio.to_thread(warm_up)
        return self

    async def __aexit__(self, *error: object) -> None:
        for engine in self.engines.values():
            if engine.alive:
                engine.kill()
        for command in (self.store, self.broker, *self._of_fleet()):
            if command is not None and command.alive:
                await asyncio.to_thread(command.end, signal.SIGKILL)
        if self._questions is not None:
            self._questions.kill()
            self._questions.reap()
        shutil.rmtree(self.folder)

    @property
    def members(self) -> list[Member]:
        """Return the members that are alive."""
        engines = [m for engine in self.engines.values() for m in engine.members if m.alive]
        commands = (self.broker, self.store, *self._of_fleet())
        return [*engines, *(one for one in commands if one is not None and one.alive)]

    def _of_fleet(self) -> list[ProgramLife]:
        return [] if self.fleet is None else list(self.fleet.members.values())

    @property
    def broker_log(self) -> Path:
        return self.folder / "broker.log"

    def worker(self, name: str) -> Member:
        """Return a worker by its name, such as P.0 or D.scheduler."""
        return next(one for one in self.engines[name[0]].members if one.name == name)

    def address(self, seen_from: str) -> str:
        """Return the address of the broker, or of all brokers, as a host sees it."""
        if self.fleet is not None:
            return self.fleet.addresses
        host = self._hosts.address("b", seen_from) if self._hosts is not None else "127.0.0.1"
        return f"{host}:{self._port}"

    def start_broker(self, *options: str) -> None:
        """Start the broker, which is empty at each start."""
        namespace = self._hosts.namespace("b") if self._hosts is not None else ""
        listen = f"0.0.0.0:{self._port}" if namespace else f"127.0.0.1:{self._port}"
        self.broker = BrokerLife(
            namespace,
            listen,
            self.broker_log,
            self._broker_environment,
            (*self._broker_options, *options),
        )
        self.lives["broker"] += 1

    async def end_broker(self, number: signal.Signals = signal.SIGKILL) -> int:
        """Kill the broker, or ask it to stop; return the exit status."""
        if self.broker is None:
            raise RuntimeError("there is no broker")
        return await asyncio.to_thread(self.broker.end, number)

    def start_store(self) -> None:
        """Start a new life of the store, on P's host, with the disk of the lives before it."""
        namespace = self._hosts.namespace("p") if self._hosts is not None else ""
        transport = self._transport("p", "d")
        self.store = StoreLife(namespace, self.address("p"), self.folder, transport)
        self.lives["store"] += 1

    async def end_store(self, number: signal.Signals = signal.SIGKILL) -> int:
        """Kill the store, or ask it to stop; return the exit status."""
        if self.store is None:
            raise RuntimeError("there is no store")
        return await asyncio.to_thread(self.store.end, number)

    def _transport(self, host: str, other: str) -> dict[str, str]:
        device = self._hosts.device(host, other) if self._hosts is not None else "lo"
        return {"UCX_TLS": self._transports, "UCX_NET_DEVICES": device}

    def start_engine(
        self, side: str, tp: int, conv: ConvLayout, page_tokens: int = PAGE_TOKENS
    ) -> EngineLife:
        """Start a new life of an engine."""
        self.lives[side] += 1
        made = layout(tp, conv, page_tokens)
        host, other = side.lower(), "d" if side == "P" else "p"
        name = f"life{self.lives[side]}"
        life = Life(
            side,
            name,
            self._rng.getrandbits(32),
            made,
            page_counts(page_tokens),
            f"{SHARED_MEMORY / self.folder.name}-{side}-{name}",
            self.address(host),
            self._hosts.namespace(host) if self._hosts is not None else "",
            self._transport(host, other),
            STAGING_BYTES,
            self._quarantine_s,
            f"{self.folder / side}.log",
        )
        engine = self.engines[side] = EngineLife(life, self._hear)
        return engine

    def end_engine(self, side: str) -> None:
        """Kill all processes of an engine."""
        engine = self.engines[side]
        pending = list(engine.pending)
        engine.kill()
        for name in pending:
            if (side, name) not in self.found.said:
                self._ended(side, name, "LOST", "")

    def cut(self, one: str, other: str) -> None:
        """Cut the wire between two of the hosts b, p and d."""
        if self._hosts is not None:
            self._hosts.cut(one, other)

    def heal(self, one: str, other: str) -> None:
        if self._hosts is not None:
            self._hosts.heal(one, other)

    def story(self) -> str:
        """Return what explains a failed test: violations, ends, and the end of each log."""
        lines = [*self.found.violations, f"{dict(self.found.ends)}"]
        for log in sorted(self.folder.glob("*.log")):
            words = log.read_text(errors="replace").splitlines()
            lines += [f"{log.stem}: {line[:300]}" for line in words[-20:]]
        return "\n".join(lines)

    # -- what they do -----------------------------------------------------------------------------

    def prefill(self, prompt: Prompt) -> None:
        self._begin("P", prompt)

    def decode(self, prompt: Prompt, side: str = "D") -> None:
        self._begin(side, prompt)

    def compute(self, prompt: Prompt, side: str = "P") -> None:
        """Have an engine compute a state, and keep it by its content."""
        self.found.kept.add(prompt.name)
        self._tell(side, ("compute", prompt))

    def ask(self, prompt: Prompt, name: str, side: str = "D", keeps: bool = False) -> None:
        """Have an engine ask for a state by its content, as handoff ``name``."""
        self._say(side, name, ("ask", (prompt, name, keeps)))

    def evict(self, prompt: Prompt | None, side: str) -> None:
        """Have an engine forget a state that it keeps; None: all states."""
        self._tell(side, ("evict", prompt))

    def _begin(self, side: str, prompt: Prompt) -> None:
        self._say(side, prompt.name, ("prompt", prompt))

    def _say(self, side: str, name: str, word: Said) -> None:
        engine = self.engines[side]
        if engine.alive:
            engine.pending[name] = time.monotonic()
            engine.scheduler.tell(word)
        else:
            self._ended(side, name, "LOST", "")

    def _tell(self, side: str, word: Said) -> None:
        if self.engines[side].alive:
            self.engines[side].scheduler.tell(word)

    def _hear(self, engine: EngineLife, said: Said) -> None:
        word, *what = said
        side, found = engine.life.side, self.found
        if word == "connected":
            engine.connected = True
        elif word == "computed":
            name, stamp = what
            found.stamps.setdefault(name, set()).add(stamp)
        elif word == "received":
            found.check(side, *what)
        elif word == "over":
            name, state, reason, late_s = what
            engine.pending.pop(name, None)
            found.late_s[side] = max(found.late_s.get(side, late_s), late_s)
            self._ended(side, name, state, reason)
        elif word == "violation":
            found.broken.append(f"{side} {engine.life.name}: {what[0]}")
        elif word == "crashed":
            tail = Path(engine.life.log).read_text(errors="replace").splitlines()[-12:]
            found.crashes.append("\n".join((f"{what[0]}, {engine.life.name}:", *tail)))
        elif word == "report":
            engine.reported = what[0], what[1]
        self._on_change.set()

    def _ended(self, side: str, name: str, state: str, reason: str) -> None:
        self.found.ends[side, state, reason] += 1
        self.found.said[side, name] = state, reason

    # -- waiting ----------------------------------------------------------------------------------

    async def until(self, holds: Callable[[], bool], within_s: float = READY_S) -> None:
        """Wait until the engines' messages make a condition true. Raises `TimeoutError`."""
        async with asyncio.timeout(within_s):
            while not holds():
                self._on_change.clear()
                with contextlib.suppress(TimeoutError):
                    await asyncio.wait_for(self._on_change.wait(), 0.2)

    async def connected(self) -> None:
        """Wait until all engines have their sessions."""
        await self.until(lambda: all(engine.connected for engine in self.engines.values()))

    async def ended(self, side: str, name: str, within_s: float = READY_S) -> tuple[str, str]:
        """Return the state and the reason that a side was told of a handoff's end."""
        await self.until(lambda: (side, name) in self.found.said, within_s)
        return self.found.said[side, name]

    async def state(self, name: str) -> str:
        """Return the state of a handoff at the broker, or an empty text if it is unknown there."""
        return await self._asked(state_of, name) or ""

    async def whole(self) -> None:
        """Wait until the broker has the session and all agents of every engine."""
        async with asyncio.timeout(READY_S):
            while not self.engines.keys() <= {*(await self._asked(who_is_whole) or ())}:  # noqa: ASYNC110
                await asyncio.sleep(0.02)

    async def drain(self, engine: str, draining: bool) -> bool:
        """Drain an engine, or end that; return False if no broker knows the engine."""
        return bool(await self._asked(drain, engine, draining))

    async def command(self, name: str, verb: Verb, prompt: Prompt) -> None:
        """Give the store a command about a state; a broker that is gone hears nothing of it."""
        await self._asked(give_command, name, verb, prompt)

    async def outcome(self, name: str) -> str:
        """Return how a command stands, or an empty text if the broker does not know it."""
        return await self._asked(outcome_of, name) or ""

    async def _asked(self, question: Callable[..., Any], *words: object) -> Any:
        async with self._asking:
            if self._questions is None:
                namespace = self._hosts.namespace("b") if self._hosts is not None else ""
                self._questions = Questions(namespace, f"127.0.0.1:{self._port}")
            return await asyncio.to_thread(self._questions.ask, question, *words)

    async def reaches(self, name: str, state: str, within_s: float = READY_S) -> None:
        """Wait until a handoff is in a state at the broker. Raises `TimeoutError`."""
        async with asyncio.timeout(within_s):
            while await self.state(name) != state:  # noqa: ASYNC110 - the broker tells no events
                await asyncio.sleep(0.01)

    async def happens(self, name: str, event: str, within_s: float = READY_S) -> None:
        """Wait until a handoff's story at the broker has an event. Raises `TimeoutError`."""
        async with asyncio.timeout(within_s):
            while event not in (await self._asked(events_of, name) or ()):  # noqa: ASYNC110
                await asyncio.sleep(0.01)

    async def finished(self, within_s: float) -> str:
        """Wait until engines hold nothing any more; return what is held after ``within_s``."""
        end_s = time.monotonic() + within_s
        while (left := await self.unfinished()) and time.monotonic() < end_s:  # noqa: ASYNC110
            await asyncio.sleep(ASK_EVERY_S)
        return left

    async def unfinished(self) -> str:
        """Return what the engines still hold, or an empty text if they hold nothing."""
        for engine in self.engines.values():
            engine.reported = None
            engine.free_staging.clear()
            engine.scheduler.tell(("report", None))
        try:
            await self.until(lambda: all(e.answered for e in self.engines.values()), 5.0)
        except TimeoutError:
            return "a scheduler or worker does not answer"
        for side, engine in self.engines.items():
            pending, all_free = engine.reported or ((), False)
            if pending:
                return f"{side} waits for {pending}"
            if not all_free:
                return f"{side} has not all of its pages back"
            if any(set(free) != {STAGING_BYTES} for free in engine.free_staging.values()):
                return f"{side} has not all of its staging back: {engine.free_staging}"
        return ""
