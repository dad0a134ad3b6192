"""Commands about single states, given to a broker and carried out by stores with real memory."""

from __future__ import annotations

import json
import uuid
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from cli.broker_process import run_restow
from restow.broker.client import AdminClient, BlockingSession, Prefix
from restow.broker.client.engine.commands import CommandStatus, StateOrder
from restow.broker.state_commands import Answer, Outcome, Verb
from store.engine_house import MANY, MIB, PROMPTS, House, found, kept
from store.holding_engine import state, until

FIRST, SECOND = PROMPTS[:2]
WAIT_S = 20.0


@pytest.fixture
def admin(house: House) -> Iterator[AdminClient]:
    with AdminClient(house.broker) as client:
        yield client


def give(
    admin: AdminClient, verb: Verb, prefix: Prefix, store: str = "a store", **how: object
) -> CommandStatus:
    """Give a command, and wait for its end."""
    name = how.pop("command_id", uuid.uuid4().hex)
    return admin.command(name, verb, prefix, store, wait_s=WAIT_S, **how)  # type: ignore[arg-type]


def test_a_state_is_fetched_once_and_only_if_somebody_holds_it(
    house: House, admin: AdminClient
) -> None:
    with house.store("a store") as store:
        house.p.hold(FIRST, state(FIRST), keep=False)
        missing = give(admin, Verb.PREFETCH, state(SECOND))
        assert (missing.outcome, missing.tokens, missing.reason) == (
            Outcome.MISSING,
            0,
            "NOT_HELD",
        )
        for _ in range(2):
            done = give(admin, Verb.PREFETCH, state(FIRST))
            assert (done.outcome, done.tokens) == (Outcome.DONE, len(FIRST) - 1)
        assert (store.figures.asked, store.figures.kept) == (1, 1)
        house.p.evict_all()
        assert house.d.take(FIRST, state(FIRST)) == ""


def test_a_pinned_state_outlives_what_evicts_all_others(house: House, admin: AdminClient) -> None:
    with house.store("a store", MIB) as store:
        kept(house, "a store", MANY[:1])
        done = give(admin, Verb.PIN, state(MANY[0]), for_s=600.0)
        assert (done.outcome, done.tokens) == (Outcome.DONE, len(MANY[0]) - 1)
        assert 590 < done.left_s <= 600
        kept(house, "a store", MANY[1:])
        assert store.figures.evictions > 0
        assert store.holds(state(MANY[0]))
        assert house.d.take(MANY[0], state(MANY[0])) == ""
        refused = give(admin, Verb.EVICT, state(MANY[0]))
        assert (refused.outcome, refused.reason) == (Outcome.REFUSED, "PINNED")
        assert give(admin, Verb.RELEASE, state(MANY[0])).outcome is Outcome.DONE
        assert admin.command_status(done.command_id).left_s == 0
        assert store.figures.pinned == 0
        kept(house, "a store", MANY[1:])
        assert not store.holds(state(MANY[0]))
        again = give(admin, Verb.RELEASE, state(MANY[0]))
        assert (again.outcome, again.reason) == (Outcome.MISSING, "NOT_PINNED")


def test_a_pin_ends_by_itself(house: House, admin: AdminClient) -> None:
    with house.store("a store", MIB) as store:
        kept(house, "a store", MANY[:1])
        done = give(admin, Verb.PIN, state(MANY[0]), for_s=0.2)
        until(lambda: admin.command_status(done.command_id).left_s == 0)
        kept(house, "a store", MANY[1:])
        assert (store.figures.pinned, store.figures.pinned_bytes) == (0, 0)
        assert not store.holds(state(MANY[0]))


def test_pins_leave_room_for_other_states(house: House, admin: AdminClient) -> None:
    with house.store("a store", MIB) as store:
        said = []
        for tokens in MANY:
            kept(house, "a store", [tokens])
            said.append(give(admin, Verb.PIN, state(tokens), for_s=60.0))
        assert said[0].outcome is Outcome.DONE
        assert (said[-1].outcome, said[-1].reason) == (Outcome.REFUSED, "PINS_FULL")
        assert store.figures.pinned_bytes <= store.figures.memory_bytes // 2


def test_the_longest_shorter_state_is_pinned_in_place_of_one_that_is_missing(
    house: House, admin: AdminClient
) -> None:
    whole = (*FIRST[:33], *SECOND)
    begins = whole[:33]  # its state stands at 32 tokens, where a quantum ends
    with house.store("a store") as store:
        house.p.hold(begins, state(begins))
        found(house.p, begins, "a store")
        clipped = give(admin, Verb.PIN, state(whole), for_s=60.0)
        assert (clipped.outcome, clipped.tokens) == (Outcome.CLIPPED, 32)
        assert give(admin, Verb.RELEASE, state(whole)).outcome is Outcome.DONE
        assert store.figures.pinned == 0
        missing = give(admin, Verb.PIN, state(PROMPTS[2]), for_s=60.0)
        assert (missing.outcome, missing.reason) == (Outcome.MISSING, "NOT_HELD")
    house.p.evict_all()


def test_an_evicted_state_is_found_no_more(
    house: House, admin: AdminClient, tmp_path: Path
) -> None:
    with house.store("a store", disk=tmp_path / "disk") as store:
        kept(house, "a store", [FIRST, SECOND])
        until(lambda: store.figures.disk_runs == 2)
        assert give(admin, Verb.EVICT, state(FIRST)).outcome is Outcome.DONE
        until(lambda: not house.d.is_held(state(FIRST), "a store"))
        assert house.d.take(FIRST, state(FIRST)) == "NOT_HELD"
        assert house.d.take(SECOND, state(SECOND)) == ""
        assert give(admin, Verb.EVICT, state(FIRST)).outcome is Outcome.MISSING


def test_a_state_that_only_the_disk_has_is_pinned_in_memory(
    house: House, admin: AdminClient, tmp_path: Path
) -> None:
    with house.store("a store", MIB, tmp_path / "disk") as store:
        kept(house, "a store", MANY)
        until(lambda: store.figures.disk_runs == len(MANY))
        assert give(admin, Verb.PIN, state(MANY[0]), for_s=60.0).outcome is Outcome.DONE
        assert store.figures.pinned == 1


def test_a_state_moves_to_another_store(house: House, admin: AdminClient) -> None:
    with house.store("a store") as store, house.store("another") as other:
        kept(house, "a store", [FIRST])
        house.p.evict_all()
        until(lambda: store.holds(state(FIRST)) or other.holds(state(FIRST)))
        here, there = ("a store", "another")
        if other.holds(state(FIRST)):
            here, there = there, here
        assert give(admin, Verb.MOVE, state(FIRST), here, to_store=there).outcome is Outcome.DONE
        until(lambda: not house.d.is_held(state(FIRST), here))
        assert house.d.is_held(state(FIRST), there)
        assert house.d.take(FIRST, state(FIRST)) == ""


def said(house: House, *words: str) -> tuple[int, str]:
    """Run `restow state`; return its exit status and what it printed."""
    ended = run_restow("state", *words, "--broker", house.broker)
    return ended.returncode, ended.stdout + ended.stderr


def test_an_operator_gives_commands_by_tokens(house: House, tmp_path: Path) -> None:
    prompt = tmp_path / "prompt.json"
    prompt.write_text(json.dumps(list(FIRST)))
    at = (str(prompt), "--store", "a store")
    with house.store("a store"):
        assert said(house, "pin", *at, "--for", "1h")[0] == 1  # nobody holds it
        house.p.hold(FIRST, state(FIRST), keep=False)
        status, words = said(house, "prefetch", *at)
        assert (status, f"for {len(FIRST) - 1} tokens" in words) == (0, True), words
        status, words = said(house, "pin", *at, "--for", "1h", "--id", "mine")
        assert (status, "pinned for 3" in words) == (0, True), words
        assert "PINNED" in said(house, "evict", *at)[1]
        assert said(house, "evict", *at)[0] == 4
        again = said(house, "pin", *at, "--for", "1h", "--id", "mine", "--json")[1]
        assert json.loads(again)["left_s"] < 3600
        assert said(house, "release", *at)[0] == 0
        assert said(house, "evict", *at)[0] == 0
        assert said(house, "pin", *at, "--for", "soon")[0] == 2
    house.p.evict_all()


def test_a_pin_that_came_too_late_is_released_alone(house: House) -> None:
    with house.store("a store") as store:
        kept(house, "a store", [FIRST])
        named = replace(state(FIRST), revision=store.layout.model.revision)
        for name in ("one", "two"):
            store._commands.hear(StateOrder(name, Verb.PIN, named, 60.0))
        until(lambda: store.figures.pinned == 2)
        store._commands.hear(StateOrder("two", Verb.RELEASE, named))
        until(lambda: store.figures.pinned == 1)
        other = replace(state(SECOND), revision=named.revision)
        store._commands.hear(StateOrder("late", Verb.PIN, other, 60.0))  # which is missing
        store._commands.hear(StateOrder("late", Verb.RELEASE, named))
        store._commands.hear(StateOrder("last", Verb.PIN, named, 60.0))
        until(lambda: store.figures.pinned == 2)
        store._commands.hear(StateOrder("three", Verb.RELEASE, named))
        until(lambda: store.figures.pinned == 0)
    house.p.evict_all()


def test_a_pin_that_is_repeated_is_answered_with_the_time_that_is_left(
    house: House, monkeypatch: pytest.MonkeyPatch
) -> None:
    said: list[Answer] = []
    monkeypatch.setattr(BlockingSession, "answer_command", lambda *words: said.append(words[-1]))
    with house.store("a store") as store:
        kept(house, "a store", [FIRST])
        named = replace(state(FIRST), revision=store.layout.model.revision)
        for count in (1, 2):
            store._commands.hear(StateOrder("one", Verb.PIN, named, 60.0))
            until(lambda count=count: len(said) == count)  # type: ignore[misc]
    house.p.evict_all()
    assert 50 < said[1].left_s < said[0].left_s <= 60
    assert replace(said[1], left_s=said[0].left_s) == said[0]
