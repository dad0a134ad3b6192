"""The directory: every engine, agent and handoff, and what each event means for them.

Pure: events and a time go in, actions come out. Single-threaded by construction; the server calls
it from one event loop.
"""

from __future__ import annotations

from collections import Counter, OrderedDict, defaultdict
from typing import NamedTuple

from restow.broker.core.actions import (
    Action,
    AgentKey,
    EngineKey,
    MakePlan,
    PairKey,
    SendForget,
    SendUnstage,
    State,
    TellEnded,
)
from restow.broker.core.deadlines import Deadlines
from restow.broker.core.grant import Limits, execute, open_grant, release_staging
from restow.broker.core.handoff import Chunk, Failure, Handoff, Wish
from restow.broker.core.pair import PairOutcome, PairPlan, PairRefused
from restow.broker.core.roster import AgentRecord, EngineRecord
from restow.broker.errors import (
    DirectoryFullError,
    EngineReplacedError,
    EngineUnknownError,
    HandoffUnknownError,
    RequestError,
    RestowError,
)
from restow.broker.layout import Layout

MAX_ID_LENGTH = 256


class Settlement(NamedTuple):
    """What a destination's agent reports at the end of its part."""

    number: int
    bytes: int
    elapsed_us: int
    reason: str
    detail: str


class Directory:
    """The broker's state. Soft: a restarted broker is told everything again."""

    def __init__(self, limits: Limits | None = None) -> None:
        """Start empty."""
        self.limits = limits or Limits()
        self.engines: dict[EngineKey, EngineRecord] = {}
        self.live: dict[tuple[str, str], Handoff] = {}
        self.ended: OrderedDict[tuple[str, str], Handoff] = OrderedDict()
        self.ended_counts: Counter[State] = Counter()
        self.bytes_read = 0
        self.pairs: dict[PairKey, PairOutcome] = {}
        self._planning: dict[PairKey, set[int]] = {}
        self._by_number: dict[int, Handoff] = {}
        self._by_engine: dict[EngineKey, set[int]] = defaultdict(set)
        self._deadlines = Deadlines()
        self._last_number = 0

    # -- engines and agents ---------------------------------------------------------------------

    def register(
        self, key: EngineKey, incarnation: str, layout: Layout, layout_digest: str, now_s: float
    ) -> list[Action]:
        """Take an engine with a checked layout in; another incarnation of it is replaced."""
        if not key.engine_id or not incarnation or max(map(len, (*key, incarnation))) > MAX_ID_LENGTH:
            raise RequestError(
                f"engine_id and incarnation must have 1 to {MAX_ID_LENGTH} characters"
            )
        known = self.engines.get(key)
        if known is not None and known.incarnation == incarnation:
            if known.layout_digest != layout_digest:
                raise RequestError(
                    f"engine {key.engine_id} registered another layout in this incarnation: "
                    f"use a new incarnation",
                    engine=key.engine_id,
                )
            return []
        actions: list[Action] = []
        if known is not None:
            actions = self.remove_engine(known, "a newer incarnation registered", now_s)
        self.engines[key] = EngineRecord.of(key, incarnation, layout, layout_digest)
        return actions

    def engine(self, key: EngineKey, incarnation: str) -> EngineRecord:
        """Look an engine up. Raises `EngineUnknownError` or `EngineReplacedError`."""
        record = self.engines.get(key)
        if record is None:
            raise EngineUnknownError(
                f"engine {key.engine_id} is not registered: call RegisterEngine first",
                engine=key.engine_id,
            )
        if record.incarnation != incarnation:
            raise EngineReplacedError(
                f"engine {key.engine_id} is registered as incarnation {record.incarnation}, "
                f"this is {incarnation}",
                engine=key.engine_id,
            )
        return record

    def remove_engine(self, engine: EngineRecord, why: str, now_s: float) -> list[Action]:
        """Take an engine out: nothing of its handoffs can go on."""
        if self.engines.get(engine.key) is engine:
            del self.engines[engine.key]
        actions: list[Action] = []
        for agent in list(engine.agents.values()):
            actions += self.remove_agent(engine, agent, now_s)
        failure = Failure(
            State.FAILED, "ENGINE_LOST", f"engine {engine.key.engine_id} is gone: {why}"
        )
        for number in sorted(self._by_engine.get(engine.key, ())):
            handoff = self._by_number[number]
            if engine in (handoff.source, handoff.destination):
                actions += self._stop(handoff, failure, now_s)
        return actions

    def remove_agent(self, engine: EngineRecord, agent: AgentRecord, now_s: float) -> list[Action]:
        """An agent's stream broke: its handoffs in progress can't be trusted to end well."""
        if not engine.dismiss(agent):
            return []
        actions: list[Action] = [
            SendForget(reader.key, agent.agent_name)
            for other in self.engines.values()
            for reader in other.agents.values()
            if agent.agent_name in reader.peers
        ]
        for action in actions:
            if isinstance(action, SendForget):
                reader_engine = self.engines[action.agent.engine]
                reader_engine.agents[action.agent.rank].peers.discard(agent.agent_name)
        failure = Failure(
            State.FAILED,
            "AGENT_LOST",
            f"the agent of engine {engine.key.engine_id}, rank {agent.key.rank} is gone",
        )
        for number in sorted(self._by_engine.get(engine.key, ())):
            handoff = self._by_number[number]
            if handoff.source is engine and (handoff.final or handoff.fenced or handoff.granted):
                actions += self._stop(handoff, failure, now_s)
            elif handoff.destination is engine and handoff.granted:
                actions += self._stop(handoff, failure, now_s)
        return actions

    # -- handoffs -------------------------------------------------------------------------------

    def publish(
        self, engine: EngineRecord, handoff_id: str, chunk: Chunk, now_s: float
    ) -> list[Action]:
        """P publishes a chunk. Raises a typed error; then nothing changed."""
        ended = self._ended_for(engine, handoff_id)
        if ended is not None:
            return [_told(ended, engine)]
        handoff, new = self._find_or_make(engine, handoff_id, now_s)
        try:
            handoff.publish(engine, chunk, now_s)
        except RestowError:
            self._unmake(handoff, new)
            raise
        self._by_engine[engine.key].add(handoff.number)
        self._deadlines.add(handoff.next_look_s(), handoff.number)
        return self._advance(handoff, now_s)

    def fence(
        self, engine: EngineRecord, rank: int, handoff_id: str, now_s: float
    ) -> list[Action]:
        """A rank of P says that its part is complete in memory."""
        if self._ended_for(engine, handoff_id) is not None:
            return []
        handoff, new = self._find_or_make(engine, handoff_id, now_s)
        handoff.fence(engine, rank, now_s)
        if new:
            handoff.lease_until_s = now_s + self.limits.lease_s
            self._by_engine[engine.key].add(handoff.number)
            self._deadlines.add(handoff.lease_until_s, handoff.number)
        return self._advance(handoff, now_s)

    def request(
        self, engine: EngineRecord, handoff_id: str, wish: Wish, now_s: float
    ) -> list[Action]:
        """D asks, once or again. Raises a typed error; then nothing changed."""
        ended = self._ended_for(engine, handoff_id)
        if ended is not None:
            return [_told(ended, engine)]
        handoff, new = self._find_or_make(engine, handoff_id, now_s)
        try:
            first = handoff.ask(engine, wish, now_s)
        except RestowError:
            self._unmake(handoff, new)
            raise
        if not first:
            return []
        self._by_engine[engine.key].add(handoff.number)
        self._deadlines.add(handoff.next_look_s(), handoff.number)
        return self._advance(handoff, now_s)

    def renew(
        self, engine: EngineRecord, handoff_id: str, lease_s: float, now_s: float
    ) -> list[Action]:
        """P prolongs its lease. Raises `HandoffUnknownError` or `HandoffOwnedError`."""
        ended = self._ended_for(engine, handoff_id)
        if ended is not None:
            return [_told(ended, engine)]
        handoff = self._known(engine, handoff_id)
        handoff.claim_source(engine)
        handoff.lease_until_s = max(handoff.lease_until_s, now_s + lease_s)
        handoff.note(now_s, "renewed", lease_s)
        return []

    def cancel(
        self, engine: EngineRecord, handoff_id: str, detail: str, now_s: float
    ) -> list[Action]:
        """A side gives up. Raises `HandoffUnknownError`."""
        ended = self._ended_for(engine, handoff_id)
        if ended is not None:
            return [_told(ended, engine)]
        handoff = self._known(engine, handoff_id)
        if engine is not handoff.source and engine is not handoff.destination:
            raise self._unknown(engine, handoff_id)
        words = f"engine {engine.key.engine_id} cancelled" + (f": {detail}" if detail else "")
        return self._stop(handoff, Failure(State.CANCELLED, "CANCELLED", words), now_s)

    def plan_made(self, pair: PairKey, outcome: PairOutcome, now_s: float) -> list[Action]:
        """The planner answered."""
        self.pairs[pair] = outcome
        actions: list[Action] = []
        for number in sorted(self._planning.pop(pair, ())):
            handoff = self._by_number.get(number)
            if handoff is not None:
                actions += self._advance(handoff, now_s)
        return actions

    def staged(
        self,
        engine: EngineRecord,
        rank: int,
        number: int,
        dst_rank: int,
        run: tuple[int, int],
        failure: Failure | None,
        now_s: float,
    ) -> list[Action]:
        """A source's agent has gathered ``run`` (address, bytes), or could not."""
        handoff = self._by_number.get(number)
        if handoff is None or handoff.source is not engine or handoff.state is not State.STAGING:
            return [SendUnstage(AgentKey(engine.key, rank), number)]
        if failure is not None:
            return self._stop(handoff, failure, now_s)
        handoff.staged[dst_rank, rank] = run
        handoff.note(now_s, "staged", (rank, dst_rank))
        pair = self._pair(handoff)
        missing = [r for r in pair.staging.get(dst_rank, ()) if (dst_rank, r) not in handoff.staged]
        if missing or dst_rank not in handoff.unsettled or handoff.failure is not None:
            return []
        if all((d, s) in handoff.staged for d, ranks in pair.staging.items() for s in ranks):
            handoff.state = State.READING
        return execute(handoff, pair, dst_rank, now_s)

    def settled(
        self, engine: EngineRecord, rank: int, settlement: Settlement, now_s: float
    ) -> list[Action]:
        """A destination's agent has ended its part."""
        handoff = self._by_number.get(settlement.number)
        if handoff is None or handoff.destination is not engine or not handoff.granted:
            return []
        if rank not in handoff.unsettled:
            return []
        handoff.unsettled.discard(rank)
        handoff.bytes_read += settlement.bytes
        handoff.note(now_s, "settled", (rank, settlement.bytes, settlement.elapsed_us))
        if settlement.reason:
            words = f"rank {rank} of engine {engine.key.engine_id}: {settlement.detail}"
            handoff.fail(Failure(State.FAILED, settlement.reason, words), now_s)
            return self._settle_failed(handoff, now_s)
        if handoff.unsettled:
            return []
        if now_s > handoff.settle_until_s:
            handoff.fail(
                Failure(State.FAILED, "GRANT_OUTLIVED", "the read ended after its grant"), now_s
            )
        return self._end(handoff, handoff.failure, now_s)

    def tick(self, now_s: float) -> list[Action]:
        """Time has passed."""
        actions: list[Action] = []
        for number in self._deadlines.due(now_s):
            handoff = self._by_number.get(number)
            if handoff is None:
                continue
            if handoff.next_look_s() > now_s:
                self._deadlines.add(handoff.next_look_s(), number)
            else:
                actions += self._out_of_time(handoff, now_s)
        return actions

    def find(self, tenant: str, handoff_id: str) -> Handoff:
        """Look a handoff up, live or ended. Raises `HandoffUnknownError`."""
        key = (tenant, handoff_id)
        handoff = self.live.get(key) or self.ended.get(key)
        if handoff is None:
            raise HandoffUnknownError(
                f"handoff {handoff_id} is not known here", handoff=handoff_id
            )
        return handoff

    # -- inside -----------------------------------------------------------------------------------

    def _ended_for(self, engine: EngineRecord, handoff_id: str) -> Handoff | None:
        """The ended handoff of that id, if the engine had a side in it or could take a free one."""
        return self.ended.get((engine.key.tenant, handoff_id))

    def _known(self, engine: EngineRecord, handoff_id: str) -> Handoff:
        handoff = self.live.get((engine.key.tenant, handoff_id))
        if handoff is None:
            raise self._unknown(engine, handoff_id)
        return handoff

    def _unknown(self, engine: EngineRecord, handoff_id: str) -> HandoffUnknownError:
        return HandoffUnknownError(
            f"engine {engine.key.engine_id} has no handoff {handoff_id}", handoff=handoff_id
        )

    def _find_or_make(
        self, engine: EngineRecord, handoff_id: str, now_s: float
    ) -> tuple[Handoff, bool]:
        key = (engine.key.tenant, handoff_id)
        handoff = self.live.get(key)
        if handoff is not None:
            return handoff, False
        if not 0 < len(handoff_id) <= MAX_ID_LENGTH:
            raise RequestError(f"handoff_id must have 1 to {MAX_ID_LENGTH} characters")
        if len(self.live) >= self.limits.max_live:
            raise DirectoryFullError(
                f"the broker holds {len(self.live)} handoffs, as many as it may: try again later"
            )
        self._last_number += 1
        handoff = Handoff(self._last_number, engine.key.tenant, handoff_id, now_s)
        self.live[key] = handoff
        self._by_number[handoff.number] = handoff
        return handoff, True

    def _unmake(self, handoff: Handoff, new: bool) -> None:
        """Leave no trace of a handoff whose first call was refused."""
        if new:
            del self.live[handoff.tenant, handoff.handoff_id]
            del self._by_number[handoff.number]

    def _pair_key(self, handoff: Handoff) -> PairKey:
        source, destination = handoff.source, handoff.destination
        if source is None or destination is None:
            raise HandoffUnknownError(f"handoff {handoff.handoff_id} has one side only")
        return PairKey(source.layout_digest, destination.layout_digest)

    def _pair(self, handoff: Handoff) -> PairPlan:
        pair = self.pairs[self._pair_key(handoff)]
        if isinstance(pair, PairRefused):
            raise pair.error
        return pair

    def _advance(self, handoff: Handoff, now_s: float) -> list[Action]:
        """Grant as soon as everything is there."""
        if handoff.granted or handoff.source is None:
            return []
        if handoff.state is State.WAITING and handoff.complete:
            handoff.state = State.READY
            handoff.note(now_s, "ready")
        if handoff.destination is None:
            return []
        key = PairKey(handoff.source.layout_digest, handoff.destination.layout_digest)
        pair = self.pairs.get(key)
        if pair is None:
            planning = self._planning.get(key)
            if planning is None:
                self._planning[key] = {handoff.number}
                return [MakePlan(key)]
            planning.add(handoff.number)
            return []
        if isinstance(pair, PairRefused):
            failure = Failure(State.FAILED, pair.error.reason, pair.error.message)
            return self._end(handoff, failure, now_s)
        if handoff.state is not State.READY:
            return []
        granted = open_grant(handoff, pair, self.limits, now_s)
        if isinstance(granted, Failure):
            return self._end(handoff, granted, now_s)
        self._deadlines.add(handoff.next_look_s(), handoff.number)
        return granted

    def _stop(self, handoff: Handoff, failure: Failure, now_s: float) -> list[Action]:
        """Something ends the handoff from outside; readers are waited for."""
        handoff.fail(failure, now_s)
        if not handoff.granted:
            return self._end(handoff, handoff.failure, now_s)
        return self._settle_failed(handoff, now_s)

    def _settle_failed(self, handoff: Handoff, now_s: float) -> list[Action]:
        """A granted handoff failed: ranks that were never told to read have nothing to settle."""
        if handoff.state is State.STAGING:
            pair = self._pair(handoff)
            for dst_rank in list(handoff.unsettled):
                needed = pair.staging.get(dst_rank, ())
                if any((dst_rank, rank) not in handoff.staged for rank in needed):
                    handoff.unsettled.discard(dst_rank)
        if handoff.unsettled:
            return []
        return self._end(handoff, handoff.failure, now_s)

    def _out_of_time(self, handoff: Handoff, now_s: float) -> list[Action]:
        if handoff.granted:
            missing = sorted(handoff.unsettled)
            failure = Failure(
                State.FAILED, "READ_DEADLINE", f"ranks {missing} did not settle inside the grant"
            )
        elif 0 < handoff.patience_until_s <= now_s:
            lacking = "nobody published it" if handoff.source is None else "P has not completed it"
            failure = Failure(State.EXPIRED, "NOT_PUBLISHED", f"D's patience ran out: {lacking}")
        else:
            failure = Failure(State.EXPIRED, "LEASE_EXPIRED", "P's lease ran out before the state could be granted")
        handoff.fail(failure, now_s)
        return self._end(handoff, handoff.failure, now_s)

    def _end(self, handoff: Handoff, failure: Failure | None, now_s: float) -> list[Action]:
        """The one way to an end: tell both sides, give staging back, keep the story."""
        if failure is not None:
            handoff.fail(failure, now_s)
        actions = release_staging(handoff)
        handoff.state = State.DONE if failure is None else failure.state
        handoff.ended_s = now_s
        handoff.note(now_s, "ended", handoff.state)
        key = (handoff.tenant, handoff.handoff_id)
        del self.live[key]
        del self._by_number[handoff.number]
        self.ended[key] = handoff
        if len(self.ended) > self.limits.max_ended:
            self.ended.popitem(last=False)
        self.ended_counts[handoff.state] += 1
        self.bytes_read += handoff.bytes_read
        for engine in (handoff.source, handoff.destination):
            if engine is not None:
                self._by_engine[engine.key].discard(handoff.number)
                actions.append(_told(handoff, engine))
        handoff.src_blocks = {}
        handoff.dst_blocks = ()
        handoff.staged = {}
        return actions


def _told(handoff: Handoff, engine: EngineRecord) -> TellEnded:
    failure = handoff.failure
    transfer_s = handoff.ended_s - handoff.granted_s if handoff.granted_s else 0.0
    return TellEnded(
        engine.key,
        handoff.handoff_id,
        handoff.state,
        failure.reason if failure else "",
        failure.detail if failure else "",
        handoff.bytes_read,
        int(transfer_s * 1e6),
    )
