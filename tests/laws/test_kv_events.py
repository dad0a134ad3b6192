"""A router that hears KV events alone, and loses some, believes only in states that are there."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from random import Random
from typing import Any

import msgspec
import pytest

from broker.observing.subscribers import numbers
from laws.test_prefixes import ENGINES, FORM, chain_hashes
from laws.watched import TENANT, Fleet, Group, View
from restow.broker.core.common.events import Batch, HashRun
from restow.broker.core.common.limits import Limits
from restow.broker.core.prefix import changes, index
from restow.broker.core.prefix.changes import Follower
from restow.broker.core.prefix.prefixes import Prefixes
from restow.broker.server.observe import kv_events
from restow.broker.server.observe.kv_events import KvEvents, Message

STEPS = 10_000


@dataclass
class Heard:
    """What a router knows of a topic."""

    end: int = 0
    view: View = field(default_factory=lambda: View({}))

    def take(self, message: Message) -> None:
        self.end = message.sequence + 1
        _, events, rank = msgspec.msgpack.decode(message.payload)
        assert rank == 0
        for event in events:
            self._hear(event)

    def _hear(self, event: dict[str, Any]) -> None:
        if event["type"] == "AllBlocksCleared":
            self.view = View({})
            return
        group = str(event["group_idx"])
        ours = self.view.held.setdefault(("", group), set())
        hashes = [number.to_bytes(8, "big") for number in event["block_hashes"]]
        if event["type"] == "BlockRemoved":
            ours.difference_update(hashes)
            return
        snapshot = event["kv_cache_spec_kind"] == "mamba"
        window_tokens = event.get("kv_cache_spec_sliding_window", 0)
        self.view.groups[group] = Group(0 if snapshot else event["block_size"], window_tokens)
        ours.update(hashes)


@dataclass
class Router:
    """Hears a lossy stream. It asks for what it missed, as vLLM's subscribers do."""

    events: KvEvents
    topics: dict[bytes, Heard] = field(default_factory=dict)
    replayed: int = 0
    lacked: set[bytes] = field(default_factory=set)
    """Topics of which a replay lacked something: the router knows too little of these."""

    def hear(self, message: Message) -> None:
        heard = self.topics.setdefault(message.topic, Heard())
        if message.sequence > heard.end:
            self.catch_up(message.topic)
        if message.sequence == heard.end:
            heard.take(message)

    def catch_up(self, topic: bytes) -> None:
        heard = self.topics.setdefault(topic, Heard())
        messages, lacked = self.events.replay(heard.end, topic, 0.0)
        for message in messages:
            heard.take(message)
            self.replayed += 1
        if lacked:
            self.lacked.add(topic)


@pytest.mark.parametrize(("seed", "kept"), [(1, 10_000), (2, 40), (3, 8)])
def test_a_router_of_kv_events_believes_in_what_is_held(
    seed: int, kept: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(changes, "PART_BYTES", 3000)
    monkeypatch.setattr(index, "MAX_PLACES", 7)
    monkeypatch.setattr(changes, "MAX_CHANGES", 60)
    monkeypatch.setattr(kv_events, "MAX_KEPT", kept)
    random = Random(seed)  # noqa: S311
    fleet = Fleet(random, Limits(tenant_max_holdings_bytes=30_000))
    follower, _ = fleet.prefixes.follow(TENANT, lambda: None)
    events = KvEvents()
    routers = [Router(events) for _ in range(3)]
    believed = 0

    def publish() -> None:
        while (part := follower.take()) is not None:
            for message in events.messages(part, 0.0):
                for lossy, router in zip((0.0, 0.05, 0.5), routers, strict=True):
                    if random.random() >= lossy:
                        router.hear(message)

    for step in range(STEPS):
        fleet.step()
        if random.random() < 0.3:
            publish()
        if random.random() < 0.0005:
            routers[1] = Router(events)  # a newcomer, which knows nothing
        if step % 50 == 0:
            fleet.settle()
            if step % 500 == 0:  # as the publisher does if a replay lacked something
                follower.begin_again()
                for router in routers:
                    router.lacked = set()
            publish()
            for router in routers:
                # What was lost last shows only when a router asks.
                for topic in list(events._topics):
                    router.catch_up(topic)
                believed += _check(fleet, router)
    assert believed > 1000
    assert routers[1].replayed > 10
    assert not routers[0].lacked
    assert bool(routers[2].lacked) == (kept == 8)


def _check(fleet: Fleet, router: Router) -> int:
    """Check that a router believes in what engines hold; return in how many states it believes."""
    believed = 0
    for salt, hashes in fleet.prompts():
        if salt:
            continue
        found = fleet.found(salt, hashes)
        for topic, heard in router.topics.items():
            name = topic.decode().split("@")[1]
            tokens = heard.view.tokens("", hashes)
            assert tokens == found.get(name, 0) or topic in router.lacked
            if tokens:
                fleet.check_held(name, salt, hashes, tokens)
                believed += 1
    return believed


def _told(prefixes: Prefixes, follower: Follower) -> list[tuple[str, list[dict[str, Any]]]]:
    events, told = KvEvents(), []
    while (part := follower.take()) is not None:
        for message in events.messages(part, 0.0):
            told.append((message.topic.decode(), msgspec.msgpack.decode(message.payload)[1]))
    return told


def test_every_group_is_named_before_its_first_hash() -> None:
    prefixes, engine = Prefixes(Limits()), ENGINES[3]
    follower, _ = prefixes.follow(TENANT, lambda: None)
    follower.take()
    hashes = b"".join(chain_hashes(0, 4))
    prefixes.hear(engine, Batch(1, FORM, "", (HashRun("attention", hashes[8:], hashes[:8]),)))
    ((topic, events),) = _told(prefixes, follower)
    assert topic == "kv@a3@hybrid"
    place = {"medium": "GPU", "locality": "LOCAL"}
    stored: dict[str, Any] = {
        **{"type": "BlockStored", "block_hashes": [], "parent_block_hash": None, "token_ids": []},
        **{"lora_id": None, "lora_name": None, **place},
    }
    attention = {"block_size": 8, "kv_cache_spec_kind": "full_attention", "group_idx": 0}
    snapshot = {"block_size": 4, "kv_cache_spec_kind": "mamba", "group_idx": 1}
    window = {"block_size": 8, "kv_cache_spec_kind": "sliding_window", "group_idx": 2}
    assert events == [
        {"type": "AllBlocksCleared"},
        {**stored, **attention},
        {**stored, **snapshot},
        {**stored, **window, "kv_cache_spec_sliding_window": 12},
        {
            **stored,
            **attention,
            "block_hashes": numbers(chain_hashes(0, 4)[1:]),
        },
    ]


def test_a_stores_states_of_other_weights_have_a_topic_of_their_own_and_salted_ones_none() -> None:
    prefixes, store = Prefixes(Limits()), replace(ENGINES[0], keeps=True)
    follower, _ = prefixes.follow(TENANT, lambda: None)
    run = (HashRun("attention", b"".join(chain_hashes(0, 4))),)
    prefixes.hear(store, Batch(1, FORM, "", run))
    prefixes.hear(store, Batch(2, FORM, "", run, revision="v2"))
    prefixes.hear(store, Batch(3, FORM, "a user's", run))
    prefixes.hear(store, Batch(4, FORM, "", (), run))
    prefixes.forget(store.key)
    told = dict(_told(prefixes, follower))
    assert told.keys() == {"kv@a0@m", "kv@a0@m:v2"}
    kinds = {topic: [event["type"] for event in events] for topic, events in told.items()}
    assert kinds == {topic: ["AllBlocksCleared"] for topic in told}
    prefixes.hear(store, Batch(1, FORM, "", run, revision="v2"))
    events = dict(_told(prefixes, follower))["kv@a0@m:v2"]
    assert (events[-1]["medium"], events[-1]["locality"]) == ("CPU", "REMOTE")
