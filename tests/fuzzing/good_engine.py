"""An engine that behaves, among others that do not: it hears of nothing that is not its own."""

from __future__ import annotations

import asyncio
from functools import partial
from typing import Any

from broker.fakes import PAGES, POSITION, answer_at_once
from fuzzing.door import Answer, Door, Stream, Violation
from restow.broker.layout import Layout
from restow.broker.rpc import wire, wire_program
from restow.v1 import agent_link_pb2 as link
from restow.v1 import broker_pb2 as pb

REGISTER = "/restow.v1.Broker/RegisterEngine"
SESSION = "/restow.v1.Broker/Session"
CONNECT = "/restow.v1.AgentLink/Connect"
LEASE_MS = 240_000
HELD = [bytes([1, number]) * 16 for number in range(3)]
"""Hashes that nobody guesses: of two quanta of 16 tokens, and of all up to `POSITION`."""
HELD_PREFIX = pb.Prefix(
    form=pb.HashForm(algorithm="sha256", quantum_tokens=16, hash_bytes=32),
    hashes=b"".join(HELD[:2]),
    end_hash=HELD[2],
)


def hello(
    layout: Layout, ref: pb.EngineRef, rank: int, host: str = "", tenant: str = ""
) -> link.Hello:
    """Return a Hello that the broker takes. Its agent name tells whose it is, whoever hears it."""
    return link.Hello(
        engine=ref,
        rank=rank,
        agent_name=f"{tenant}/{ref.engine_id}/{ref.incarnation}/{rank}",
        nixl_metadata=b"metadata",
        regions=[
            link.RegionMemory(
                name=region.name,
                base_address=(1 + at) << 40,
                page_count=PAGES,
                page_stride_bytes=region.page_stride_bytes,
            )
            for one in layout.ranks
            if one.rank == rank
            for at, region in enumerate(one.regions)
        ],
        staging_bytes=1 << 20,
        program_form=wire_program.PROGRAM_FORM,
        host=host,
    )


class GoodEngine:
    """One engine, its session and its agents. Raises `Violation` when it hears what it must not."""

    def __init__(
        self, door: Door, tenant: str, name: str, layout: Layout, blocks: dict[str, list[int]]
    ) -> None:
        self.ref = pb.EngineRef(engine_id=name, incarnation=f"{name}-life")
        self.ended: dict[str, pb.Ended] = {}
        self.waits = False
        """Whether its agents keep what they read to themselves for now."""
        self.agents: list[Stream] = []
        self.hellos = [hello(layout, self.ref, one.rank, f"host-{name}") for one in layout.ranks]
        self.friends = {one.agent_name for one in self.hellos}
        """NIXL names of those with whom it has to do."""
        self.examined: set[str] = set()
        """NIXL names of those from whom an operator had its agents read once."""
        self.asked: set[str] = set()
        self.numbers: set[int] = set()
        """Of handoffs that its agents heard of."""
        self._neighbours: set[str] = set()
        """NIXL names of all agents of its tenant, whatever names these have chosen."""
        self._door, self._tenant, self._layout = door, tenant, layout
        self._lists = wire.block_lists(blocks)
        self._blocks = blocks
        self._demanded: dict[str, list[pb.BlockList]] = {}
        """By handoff that it asks for: its blocks, which no other of these names."""
        self.friend: GoodEngine | None = None
        """Who alone may be offered what it holds."""
        self._kept: list[tuple[Stream, list[link.AgentMessage]]] = []
        self._session: Stream | None = None

    async def start(self) -> None:
        """Register, open the session, connect all agents."""
        request = pb.RegisterEngineRequest(
            engine=self.ref, layout=wire.layout_to_proto(self._layout)
        )
        answer = await self._door.call(REGISTER, request.SerializeToString(), self._tenant)
        if answer != Answer(response=answer.response):
            raise Violation(f"a good engine is refused: {answer}")
        self._session = self._door.stream(SESSION, self._tenant)
        self._session.hear = self._hear_events
        self._session.say(pb.SessionRequest(engine=self.ref))
        for one in self.hellos:
            stream = self._door.stream(CONNECT, self._tenant)
            stream.hear = partial(self._hear_orders, stream)
            stream.say(link.ConnectRequest(messages=[link.AgentMessage(hello=one)]))
            self.agents.append(stream)

    def publish(self, name: str, content: bytes = b"") -> None:
        """Publish a handoff whole; all ranks fence."""
        whole = pb.Publication(
            handoff_id=name,
            blocks=self._lists,
            position_tokens=POSITION,
            final=True,
            lease_ms=LEASE_MS,
            content=content,
        )
        self._say(pb.EngineMessage(publish=whole))
        for agent in self.agents:
            fenced = link.AgentMessage(fenced=link.Fenced(handoff_id=name))
            agent.say(link.ConnectRequest(messages=[fenced]))

    def request(self, name: str) -> None:
        """Ask for a handoff."""
        demand = pb.Demand(handoff_id=name, blocks=self._new_lists(name), timeout_ms=LEASE_MS)
        self._say(pb.EngineMessage(request=demand))

    def _new_lists(self, name: str) -> list[pb.BlockList]:
        self.asked.add(name)
        step = max(max(ids) for ids in self._blocks.values()) + 1
        shift = step * (len(self._demanded) % (PAGES // step))
        shifted = {group: [shift + one for one in ids] for group, ids in self._blocks.items()}
        self._demanded[name] = wire.block_lists(shifted)
        return self._demanded[name]

    def hold(self) -> None:
        """Tell the broker anew that the engine holds a state."""
        held = [
            pb.HeldRun(group="attention", hashes=b"".join(HELD)),
            pb.HeldRun(group="state", hashes=HELD[2]),
        ]
        told = pb.Holdings(number=1, form=HELD_PREFIX.form, held=held)
        self._say(pb.EngineMessage(holdings=told))

    def request_held(self, name: str) -> None:
        """Ask for the state that the other engine holds, whoever holds it."""
        demand = pb.Demand(
            handoff_id=name,
            blocks=self._new_lists(name),
            timeout_ms=LEASE_MS,
            prefix=HELD_PREFIX,
            position_tokens=POSITION,
        )
        self._say(pb.EngineMessage(request=demand))

    def go_on(self) -> None:
        """Let the agents give the answers that they held back."""
        self.waits = False
        kept, self._kept = self._kept, []
        for stream, messages in kept:
            stream.say(link.ConnectRequest(messages=messages))

    def check(self) -> None:
        """Check that all streams of the engine are open."""
        for stream in (self._session, *self.agents):
            if stream is None or stream.over:
                raise Violation(f"{self.ref.engine_id} lost a stream: {stream and stream.answer}")

    def _say(self, message: pb.EngineMessage) -> None:
        if self._session is not None:
            self._session.say(pb.SessionRequest(messages=[message]))

    def _hear_events(self, response: Any) -> None:
        for event in response.events:
            body = event.WhichOneof("body")
            if body == "refused":
                raise Violation(f"{self.ref.engine_id} is refused: {event.refused}")
            if body == "ended":
                self.ended[event.ended.handoff_id] = event.ended
            if body == "offer":
                self._hear_offer(event.offer)

    def _hear_offer(self, offer: pb.Offer) -> None:
        asked = self.friend.asked if self.friend else set()
        held = pb.Prefix()
        held.CopyFrom(HELD_PREFIX)
        held.revision = self._layout.model.revision  # the broker names whose weights are asked for
        if offer.handoff_id not in asked or offer.prefix != held:
            raise Violation(f"{self.ref.engine_id} is offered what it does not hold: {offer}")
        self.publish(offer.handoff_id, offer.content)

    def _hear_orders(self, stream: Stream, response: Any) -> None:
        for order in response.orders:
            self._check_order(order)
            if answers := answer_at_once(order):
                self._kept.append((stream, answers))
        if not self.waits:
            self.go_on()

    def _check_order(self, order: Any) -> None:
        """Check that a good agent is told nothing that does not concern it.

        Its own engine or an operator caused the order, or an engine of its tenant that it may read
        from.
        """
        body = order.WhichOneof("body")
        part = getattr(order, body)
        if body == "execute":
            names, known = {one.agent_name for one in part.sources}, self.friends
        else:
            names = {part.agent_name} if body in ("peer", "forget", "probe") else set()
            known = self.friends | self.examined
            if self.asked:  # costs are measured ahead, from whoever publishes in the same tenant
                self._neighbours |= {
                    agent.agent_name
                    for engine in self._door.hub.directory.members.engines.values()
                    if engine.key.tenant == self._tenant
                    for agent in engine.agents.values()
                }
                known |= self._neighbours
        if names - known - {""}:
            raise Violation(f"{self.ref.engine_id} is told of {sorted(names)}")
        if body == "execute":
            if part.handoff_id not in self.asked or (
                list(part.dst_blocks) != self._demanded[part.handoff_id]
            ):
                raise Violation(f"{self.ref.engine_id} is to fill what it did not ask for: {part}")
        elif body == "stage" and list(part.src_blocks) != self._lists:
            raise Violation(f"{self.ref.engine_id} is to gather what it did not publish: {part}")
        if body in ("execute", "stage"):
            self.numbers.add(part.handoff)


async def hand_over(source: GoodEngine, destination: GoodEngine, name: str) -> None:
    """Run a handoff that nothing hinders, and check that it ends well."""
    source.publish(name)
    destination.request(name)
    await _ended_well(source, destination, name)


async def ask_by_content(source: GoodEngine, destination: GoodEngine, name: str) -> None:
    """Hand over a state that the source holds and the destination asks for by its content."""
    source.hold()
    await asyncio.sleep(0.001)
    destination.request_held(name)
    await _ended_well(source, destination, name)


async def _ended_well(source: GoodEngine, destination: GoodEngine, name: str) -> None:
    await asyncio.sleep(0.5)
    for engine in (source, destination):
        ended = engine.ended.get(name)
        if ended is None or ended.state != pb.HANDOFF_STATE_DONE:
            raise Violation(f"{name} of {engine.ref.engine_id} did not end well: {ended}")
