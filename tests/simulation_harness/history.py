"""One history: brokers, a P and two D's, what they hand over, what goes wrong, what must hold."""

from __future__ import annotations

import asyncio
import contextlib
import traceback
from collections import Counter
from collections.abc import Awaitable, Callable
from contextvars import Context
from dataclasses import dataclass, field, replace
from functools import cache
from random import Random

from restow.broker.core.audit import audit
from restow.broker.core.common.actions import Action
from restow.broker.core.common.keys import EngineKey, State
from restow.broker.core.common.limits import Limits
from restow.broker.core.common.pair import Checks, DigestMode, Digests
from restow.broker.families import (
    AttentionSpec,
    ConvLayout,
    EngineSettings,
    Mamba2Spec,
    ModelSpec,
    build_layout,
)
from restow.broker.layout import DType, Layout
from restow.broker.planner import CostModel, Strategy
from restow.broker.server.base.hub import Hub
from restow.broker.server.gate.callers import DEFAULT_TENANT
from simulation_harness.by_content import by_content
from simulation_harness.engines import Engine
from simulation_harness.fabric import Fabric
from simulation_harness.faults import Faults
from simulation_harness.kept_prefixes import Prefixes
from simulation_harness.network import Network
from simulation_harness.replaced import simulated
from simulation_harness.several.brokers import Brokers
from simulation_harness.several.faults import FleetFaults
from simulation_harness.several.unhindered import Unhindered
from simulation_harness.states.commands import Commands
from simulation_harness.virtual_loop import Process, VirtualLoop
from stamped.memory import HostMemory
from stamped.requests import Prompt
from stamped.stamps import Stamps, Violation

PAGE_TOKENS = (2, 4)
HELD_TOKENS, HELD_STATES = 48, 6
LONGEST_TOKENS = 12
BUSY_S = 40.0
"""In which prompts come and things go wrong."""
SETTLE_S = 20.0
"""In which those that were killed last start again, and streams that are dead are noticed."""
USED_AGAIN = 0.3
"""Of how many handoffs the id is used a second time, for another prompt."""
ASKED_WRONG = 0.1
"""For how many D asks for another prompt under P's id, beside the right one."""
COMPUTED_AT_ONCE = 0.2
"""For how many P computes another prompt under the same id at the same time."""
LAST = 4
"""Handoffs after all has healed, if the first is not DONE: it may meet a slow network."""
LATE_S = 22.0
"""After its timeout: the quarantine of a read, and messages on a slow network."""
QUIET_S = 120.0
"""In which all must have ended: leases, holds, backoffs and quarantines are shorter together."""
STRATEGIES = (Strategy.AUTO, Strategy.SLICES, Strategy.WHOLE, Strategy.PACK, Strategy.INTERLEAVE)
SIZES = ((1, 1), (2, 2), (1, 2), (2, 1))
DIGESTS = (*[Digests()] * 14, Digests(DigestMode.ALL), Digests(DigestMode.SAMPLED, 2))
"""They take turns."""
LIMITS = Limits(engine_idle_s=2.0, offer_s=0.5, early_bytes=0)
"""Engines that can't be reached are forgotten, and come back."""
FOR_SEVERAL = 0.4
"""Of how many publications readers are named: as many as ask, fewer, so that one of them takes the
place of one that fails, or more, which the lease ends."""
DECLINED = 0.05
"""How many D's go on without a state that they were to have."""
SEVERAL_OF, FLEET_ALONE_OF = 6, 12
"""In one history of so many there are several brokers; in one of so many nothing else goes wrong
than what befalls these."""
ENDS_ALONE_OF = 8
"""In one history of so many nothing else goes wrong than that a side hears of no end."""
ATTEMPTED = 0.05
"""Of how many prompts P's ranks have fenced an attempt of which nothing was published."""
REPLACED_OF = 4
"""In one history of so many the weights of engines are replaced."""
CLIENT_LEAVES = 0.1
"""For how many a router gives up what nobody has asked for by then."""


@dataclass
class Report:
    """What a history was."""

    seed: int
    events: int = 0
    ended: Counter[str] = field(default_factory=Counter)
    checks: Checks = field(default_factory=Checks)
    """Of all lives of the broker."""
    offers: Counter[str] = field(default_factory=Counter)
    """Of states that were asked for by content, as `by_content` counts them."""
    faults: list[str] = field(default_factory=list)
    unhindered: Counter[str] = field(default_factory=Counter)
    """How handoffs ended where only brokers and their registry failed, and time had not run out."""
    commands: Counter[str] = field(default_factory=Counter)
    """How commands about states ended, by verb."""
    acts: int = 0
    """Batches in which one of several brokers granted, ended or freed something."""
    violation: str = ""
    trace: str = ""


@cache
def layout(tp: int, conv: ConvLayout, page_tokens: int) -> Layout:
    """Return the layout of a small hybrid model."""
    mamba = Mamba2Spec(
        layer=0,
        heads=2,
        head_dim=2,
        state=4,
        groups=2,
        conv_kernel=4,
        conv_dtype=DType.BFLOAT16,
        ssm_dtype=DType.FLOAT32,
    )
    attention = AttentionSpec(layer=1, kv_heads=2, head_dim=4, dtype=DType.BFLOAT16)
    spec = ModelSpec("small", (mamba, attention), revision="v1")
    return build_layout(spec, EngineSettings(tp=tp, page_tokens=page_tokens, conv_layout=conv))


def host_memory(tp: int, conv: ConvLayout, page_tokens: int) -> HostMemory:
    """Return memory for a few prompts."""
    counts = {"attention": HELD_TOKENS // page_tokens, "state": HELD_STATES}
    return HostMemory(layout(tp, conv, page_tokens), counts)


class History:
    """Everything that one seed decides."""

    def __init__(self, seed: int, faults: bool = True, digests: Digests | None = None) -> None:
        self.rng = Random(seed)  # noqa: S311 - to be replayed, not secret
        self.report = Report(seed)
        self.loop = VirtualLoop()
        self.network = Network(self.loop, Random(self.rng.random()))  # noqa: S311
        self.fabric = Fabric(self.network, Random(self.rng.random()))  # noqa: S311
        self.stamps = Stamps()
        self.strategy = self.rng.choice(STRATEGIES)
        self.digests = digests or DIGESTS[seed % len(DIGESTS)]
        tps, convs = self.rng.choice(SIZES), list(ConvLayout)
        self.memory = {
            side: host_memory(tp, self.rng.choice(convs), self.rng.choice(PAGE_TOKENS))
            for side, tp in zip("PDE", (*tps, self.rng.choice((1, 2))), strict=True)
        }
        self.lives: dict[str, list[Engine]] = {"P": [], "D": [], "E": []}
        """E is another D: it asks for what is published for several."""
        self.held_stamps: dict[str, set[int]] = {}
        """Of each state that engines keep by its content: those that it was written with."""
        self.revision = ""
        """Of the newest weights; an engine that starts has these."""
        self.found: list[BaseException] = []
        self.brokers = Brokers(self, self._make_hub)
        self.unhindered = Unhindered(self)
        self.commands = Commands(self)
        self.faults = Faults(self) if faults else None
        if seed % SEVERAL_OF == SEVERAL_OF - 1:
            self.be_several(alone=seed % FLEET_ALONE_OF == FLEET_ALONE_OF - 1)
        elif seed % ENDS_ALONE_OF == ENDS_ALONE_OF - 1:
            self.lose_ends()

    def be_several(self, alone: bool = True) -> None:
        """Play the history with several brokers; ``alone``: only they and their etcd fail."""
        if not self.brokers.several:
            self.brokers.be_several()
        if self.faults is not None:
            fleet = FleetFaults(self)
            self.faults.kinds = fleet.kinds if alone else (*self.faults.kinds, *fleet.kinds)
            self.unhindered.looks = alone

    def lose_ends(self) -> None:
        """Let nothing fail but the broker, which dies between telling P and D of an end."""
        if self.faults is not None:
            self.faults.kinds = (self.faults.lose_an_end,)
            self.unhindered.looks = True

    # -- running ----------------------------------------------------------------------------------

    def run(self) -> Report:
        """Play the history; violations are in the report."""
        said = self.brokers.said
        looked_at = contextlib.nullcontext() if said is None else said.looked_at()
        with simulated(self.report.seed, self.rng, self.network, self.fabric), looked_at:
            asyncio.set_event_loop(self.loop)
            try:
                self.loop.run_until_complete(self._play())
                self._raise_found()
            except Violation as violation:
                self.report.violation = f"{violation}"
                self.report.trace = "".join(traceback.format_exception(violation))
            finally:
                asyncio.set_event_loop(None)
                self.report.events = self.network.delivered
                self.report.acts = 0 if said is None else said.acts
                for hub in self.brokers.hubs:
                    self.report.checks.checked += hub.directory.ledger.checks.checked
                    self.report.checks.mismatches += hub.directory.ledger.checks.mismatches
                engines = [e for lives in self.lives.values() for e in lives]
                self.report.offers = by_content(self.brokers.hubs, engines)
                self.report.commands = self.commands.ended
                for engine in engines:
                    self.report.ended.update(
                        f"{engine.side} {state} {reason}".strip()
                        for state, reason in engine.requests.said.values()
                    )
                for process in self.processes():
                    process.kill()
                self.loop.close()
        return self.report

    async def _play(self) -> None:
        self.brokers.begin()
        for side in "PDE":
            self.start_engine(side)
        if self.faults is not None:
            self.faults.plan(BUSY_S)
        for number in range(self.rng.randint(2, 6)):
            prompt, at_s = self.prompt(f"h{number}"), self.rng.uniform(0.0, BUSY_S / 2)
            prompt = self._for_several(prompt)
            sides = "PDE" if prompt.counted > 1 or prompt.readers else "PD"
            again, wrong = self.rng.random() < USED_AGAIN, self.rng.random() < ASKED_WRONG
            twin = self.rng.random() < COMPUTED_AT_ONCE
            # Whoever fences what he does not publish must be alone in saying the id.
            if self.rng.random() < ATTEMPTED and not (again or twin):
                prompt = replace(prompt, attempt_s=self.rng.uniform(0.1, 4.0))
            # Who declines an id that it asks for too may be told of that.
            self._plan_prompt(prompt, at_s, sides, "" if again or wrong else sides[1:])
            if twin:
                self._plan_prompt(self.prompt(f"h{number}#twin"), at_s, "P")
            if again:
                again_s = self.rng.uniform(BUSY_S / 2, BUSY_S)
                self._plan_prompt(self.prompt(f"h{number}#again"), again_s)
            if self.rng.random() < CLIENT_LEAVES:
                left_s = at_s + self.rng.uniform(0.0, 3.0)
                self.loop.call_later(left_s, self._abandon, prompt.handoff_id)
            if wrong:
                # As long as the right one: the position alone does not tell them apart.
                other = replace(prompt, name=f"h{number}#other")
                self._plan_prompt(other, self.rng.uniform(0.0, BUSY_S / 2), "D")
        Prefixes(self).plan()
        if self.report.seed % REPLACED_OF == REPLACED_OF - 1:
            self._plan_replacements()
        self.unhindered.plan(BUSY_S)
        self.commands.begin()
        await self.pass_time(BUSY_S)
        self.fabric.spoiled = 0.0
        if self.faults is not None:
            self.faults.heal()
            self.brokers.heal()
            for lives in self.lives.values():
                lives[-1].revise(self.revision)
        await self.pass_time(SETTLE_S)
        for lives in self.lives.values():
            lives[-1].spawn(lives[-1].kept.evict_all())
        await self._quiet()
        await self._one_is_done("handoffs", self._serve_one)
        await self._one_is_done("demands for what is held", self._find_one)
        if self.commands.played:
            await self._one_is_done("commands and a demand", self.commands.find_one)
            await self._quiet()
        self.unhindered.count()

    async def _one_is_done(
        self, what: str, begin: Callable[[str], Awaitable[tuple[str, str] | None]]
    ) -> None:
        ends = []
        for number in range(LAST):
            ends.append(await begin(f"last {what} {number}"))
            if ends[-1] == ("DONE", ""):
                return
        raise Violation(f"after all has healed {what} ended as {ends}")

    async def _serve_one(self, name: str) -> tuple[str, str] | None:
        """Return how a handoff ends that nothing hinders but a slow network."""
        prompt = replace(self.prompt(name, healthy=True), readers=2, told_readers=2)
        for side in "PDE":
            self.loop.call_later(self.rng.random(), self.begin, side, prompt)
        await self.pass_time(2.0)
        await self._quiet()
        ends = {self.lives[side][-1].requests.said.get(name) for side in "PDE"}
        return ("DONE", "") if ends == {("DONE", "")} else next(iter(ends - {("DONE", "")}))

    async def _find_one(self, name: str) -> tuple[str, str] | None:
        """Return how a demand ends if E, which holds its state, does not answer, and P does.

        Nothing else hinders the demand but a slow network.
        """
        prompt = self.prompt(name, healthy=True)
        p, d, e = (self.lives[side][-1] for side in "PDE")
        p.kept.silent, e.kept.deaf = 0.0, True
        for holder in (p, e):
            holder.spawn(holder.kept.compute(prompt, self.computed))
        await self.pass_time(4.0)
        d.ask(prompt, f"{name}?", self.computed, self.held_stamps.__getitem__, keeps=False)
        await self.pass_time(4.0)
        for holder in (p, e):
            holder.spawn(holder.kept.evict_all())
        await self._quiet()
        return d.requests.said.get(f"{name}?")

    def computed(self, name: str, stamp: int) -> None:
        """Note that an engine has written a state that it keeps by its content."""
        self.held_stamps.setdefault(name, set()).add(stamp)

    async def pass_time(self, seconds: float) -> None:
        end_s = self.loop.time() + seconds
        while self.loop.time() < end_s:
            await asyncio.sleep(1.0)
            self._raise_found()
            self._audit()

    def _audit(self) -> None:
        for life in self.brokers.running:
            if life.hub is not None and (found := audit(life.hub.directory)):
                raise Violation(f"the audit of {life.process.name}: {found}")

    def _raise_found(self) -> None:
        for error in self.found:
            raise error if isinstance(error, Violation) else Violation(repr(error)) from error
        for context in self.loop.broken:
            raise Violation(f"{context['exception']!r}") from context["exception"]

    # -- what must hold in the end ----------------------------------------------------------------

    async def _quiet(self) -> None:
        end_s = self.loop.time() + QUIET_S
        while (left := self._unfinished()) and self.loop.time() < end_s:
            await asyncio.sleep(0.5)
            self._raise_found()
        if left:
            raise Violation(f"{QUIET_S:g} s after all has healed: {left}")
        self._audit()
        for lives in self.lives.values():
            lives[-1].requests.pages.check()
        late = {
            name: late_s
            for side in "DE"
            for name, late_s in self.lives[side][-1].requests.late_s.items()
            if late_s > LATE_S
        }
        if late and not (self.faults and self.faults.met_d):
            raise Violation(f"nothing hindered D, and it heard late by (s) {late}")

    def _unfinished(self) -> str:
        for side, lives in self.lives.items():
            engine = lives[-1]
            if pending := engine.requests.pending:
                return f"{side} waits for {sorted(pending)}"
            if not engine.requests.pages.all_free:
                return f"{side} has not all of its pages back"
            for agent in engine.agents.values():
                executor = agent._executor
                if any(pool.used_bytes for pool in executor.staging):
                    return f"{side} has not all of its staging back"
                if kept := executor.gathering._held:
                    return f"{side} keeps what it staged or hashed for {sorted(kept)}"
        for life in self.brokers.running:
            if life.hub is not None and (live := life.hub.directory.ledger.live):
                return f"{life.process.name} has {list(live)}"
        return self.commands.unfinished()

    # -- who there is -----------------------------------------------------------------------------

    def processes(self) -> list[Process]:
        engines = [
            process for lives in self.lives.values() for e in lives for process in e.processes
        ]
        brokers = [life.process for life in self.brokers.lives]
        return [*engines, *brokers, *self.commands.processes()]

    def hinder(self) -> None:
        """Note that a fault meets D, which may make it late."""
        if self.faults is not None:
            self.faults.met_d = True

    def _make_hub(self) -> Hub:
        return Hub(
            LIMITS.among_others() if self.brokers.several else LIMITS,
            self.strategy,
            10_000,
            self.loop.time,
            costs=CostModel(),
            digests=self.digests,
        )

    def start_engine(self, side: str, again: bool = False) -> None:
        """Begin a life of an engine; ``again``: under the incarnation of its last life."""
        lives = self.lives[side]
        lives.append(
            Engine(
                self.loop,
                side,
                lives[-1].life if again else f"life{len(lives) + 1}",
                self.memory[side],
                self.stamps,
                Random(self.rng.random()),  # noqa: S311
                self.found.append,
                self._replaced,
                self.brokers.given,
                self._lost_since,
                self.revision,
            )
        )
        lives[-1].kept.for_stores = self.commands.played

    def _lost_since(self, side: str, name: str) -> bool:
        """Return whether a rank of D was lost after its broker knew that the handoff had ended.

        The broker may hear of the loss a moment later than of what ended before it.
        """
        key = EngineKey(DEFAULT_TENANT, side)
        lost_s = self.lives[side][-1].lost_s
        for hub in self.brokers.hubs:
            known = hub.directory.ledger.known(DEFAULT_TENANT, name.split("#")[0])
            part = known and known.deliveries.by_engine.get(key, known)
            engine = part and part.destination
            if part and engine and engine.key == key and part.state is State.DONE:
                later_s = max(engine.replaced_s, lost_s)
                return later_s > part.ended_s or not engine.complete
        return True

    def _replaced(self, engine: Engine) -> None:
        """Restart an engine that a late message of its killed life has replaced."""
        if self.faults is not None and engine is self.lives[engine.side][-1]:
            self.loop.call_later(0.0, self.faults.end_engine, engine.side, context=Context())

    # -- what they do -----------------------------------------------------------------------------

    def prompt(self, name: str, healthy: bool = False) -> Prompt:
        rng = self.rng
        patient = healthy or rng.random() < 0.5
        return Prompt(
            name,
            rng.randint(1, LONGEST_TOKENS),
            rng.uniform(0.0, 1.0),
            lease_ms=30_000 if patient else rng.randint(200, 8_000),
            hold_ms=60_000 if healthy else rng.randint(1_000, 20_000),
            timeout_ms=30_000 if patient else rng.randint(200, 8_000),
            p_cancels_s=0.0 if healthy or rng.random() < 0.9 else rng.uniform(0.0, 4.0),
            d_cancels_s=0.0 if healthy or rng.random() < 0.9 else rng.uniform(0.0, 4.0),
            uses_s=rng.uniform(0.0, 5.0),
        )

    def _for_several(self, prompt: Prompt) -> Prompt:
        """Return the prompt, perhaps changed so that several D's read it."""
        if self.rng.random() >= FOR_SEVERAL:
            return prompt
        readers = self.rng.choice((1, 2, 2, 3))
        said_by = self.rng.choice(("P", "router", "both"))
        return replace(
            prompt,
            readers=readers if said_by != "router" else 0,
            told_readers=readers if said_by != "P" else 0,
        )

    def _plan_prompt(
        self, prompt: Prompt, at_s: float, sides: str = "PD", may_decline: str = ""
    ) -> None:
        declining = [side for side in may_decline if self.rng.random() < DECLINED]
        for side in sides:
            # Some prompts lie ready for a while before D asks.
            wait_s = self.rng.uniform(0.0, self.rng.choice((1.0, 1.0, 6.0)))
            how = replace(prompt, declines=side in declining, may_decline=len(declining))
            self.loop.call_later(at_s + wait_s, self.begin, side, how)

    def _plan_replacements(self) -> None:
        """Decide when which engines' weights are replaced, if faults are on."""
        rng = Random(self.report.seed + 2)  # noqa: S311 - what else happens stays as it is
        if self.faults is not None and not self.unhindered.looks:
            for number in range(rng.randint(1, 4)):
                sides = rng.sample("PDE", rng.randint(1, 3))
                at_s = rng.uniform(0.0, BUSY_S)
                self.loop.call_later(at_s, self._replace_weights, sides, f"new{number}")

    def _replace_weights(self, sides: list[str], revision: str) -> None:
        self.hinder()
        self.revision = revision
        self.report.faults.append(f"{self.loop.time():.3f} replaced {sides}")
        for side in sides:
            self.lives[side][-1].revise(revision)

    def begin(self, side: str, prompt: Prompt) -> None:
        engine = self.lives[side][-1]
        if side == "P":
            engine.prefill(prompt)
        else:
            engine.decode(prompt, self._stamps_of)

    def _abandon(self, handoff_id: str) -> None:
        """Tell the leader that nobody will ask for a handoff, as a router does."""
        self.brokers.tell_leader(
            lambda hub: hub.directory.abandon(DEFAULT_TENANT, handoff_id, hub.now_s())
        )

    def forget(self, side: str) -> None:
        """Have an operator make the leader forget an engine that is not there."""

        def forget(hub: Hub) -> list[Action]:
            members = hub.directory.members
            engine = members.engines.get(EngineKey(DEFAULT_TENANT, side))
            if engine is None or engine.has_session or engine.agents:
                return []
            return members.forget(engine, hub.now_s())

        self.brokers.tell_leader(forget)

    def check_drained(self, engine: Engine) -> None:
        """Check that an engine that has drained may go: its broker has nothing of it left."""
        life = (
            None
            if engine.session is None
            else self.brokers.at(engine.session._stream.brokers.current)
        )
        if life is None or life.hub is None:
            return
        left = [
            handoff.handoff_id
            for handoff in life.hub.directory.ledger.by_number.values()
            for one in (handoff.source, handoff.destination)
            if one is not None
            and (one.key.engine_id, one.incarnation) == (engine.side, engine.life)
        ]
        if left:
            raise Violation(f"{engine.side} has drained, and the broker has {left} of it")

    def _stamps_of(self, name: str) -> set[int]:
        return {life.stamped[name] for life in self.lives["P"] if name in life.stamped}
