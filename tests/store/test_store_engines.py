"""A store between engines of the recall model takes and gives by itself, at any TP and layout."""

from __future__ import annotations

import errno
import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import pytest

from restow.agents.store.requests import MOST_AT_ONCE
from restow.agents.store.run_files import NAME as JOURNAL
from restow.agents.store.store import Store, StoreOptions
from restow.broker.client import AdminClient
from restow.broker.errors import WeightsUnknownError
from restow.broker.layout.json_form import layout_to_json
from store.engine_house import DS, MANY, MIB, PROMPTS, SD, House, found, kept
from store.holding_engine import state, until


def test_it_asks_by_itself_and_serves_engines_of_any_tp_and_layout(house: House) -> None:
    with house.store("a store") as store:
        kept(house, "a store", PROMPTS)
        for tp, conv, page_tokens in ((1, DS, 16), (4, SD, 8), (4, DS, 32), (2, SD, 16)):
            d = house.engine(tp, conv, page_tokens)
            assert [d.take(tokens, state(tokens)) for tokens in PROMPTS] == [""] * len(PROMPTS)
        until(lambda: store.figures.given == 4 * len(PROMPTS))
        figures = store.figures
        assert (figures.asked, figures.kept, figures.declined) == (len(PROMPTS), len(PROMPTS), 0)
        assert (figures.waiting, figures.dropped) == (0, 0)


def test_a_state_moves_once_however_often_it_is_worth_keeping(house: House) -> None:
    first, second = PROMPTS[:2]
    with house.store("a store") as store:
        house.p.silent = True
        house.p.hold(first, state(first))
        for _ in range(3):
            house.p.keep(state(first))
        until(lambda: len(house.p.offers) == 1)
        house.p.answer(house.p.offers[0])
        found(house.p, first, "a store")
        house.p.silent = False
        house.p.keep(state(first))
        house.p.hold(second, state(second))
        found(house.p, second, "a store")
        assert (store.figures.asked, store.figures.states) == (2, 2)
        assert len(house.p.offers) == 2


def test_the_second_turn_moves_only_what_is_new(house: House) -> None:
    first = PROMPTS[0]
    second = (*first, *PROMPTS[1])
    with house.store("a store") as store:
        kept(house, "a store", [first])
        before = store.figures.memory_used_bytes
        kept(house, "a store", [second])
        assert store.figures.memory_used_bytes < 2 * before + before
        d = house.engine(4, SD, 8)
        assert [d.take(tokens, state(tokens)) for tokens in (second, first)] == ["", ""]


def test_what_is_evicted_is_found_no_more_and_not_held(house: House) -> None:
    first = MANY[0]
    with house.store("a store", MIB) as store:
        kept(house, "a store", MANY)
        assert store.figures.evictions > 0
        gone = [one for one in MANY if not store.holds(state(one))]
        assert gone
        for tokens in gone:
            assert not house.d.is_held(state(tokens), "a store")
            assert house.d.take(tokens, state(tokens)) == "NOT_HELD"
        (there, *_) = [one for one in MANY if store.holds(state(one))]
        assert house.d.take(there, state(there)) == ""
        assert store.figures.declined == 0
    assert house.d.take(first, state(first)) == "NOT_HELD"


def test_evicted_states_come_back_from_the_disk_in_another_life_too(
    house: House, tmp_path: Path
) -> None:
    with house.store("a store", MIB, tmp_path / "disk") as store:
        kept(house, "a store", MANY)
        until(lambda: store.figures.disk_runs == len(MANY))
        assert store.figures.evictions > 0
        assert {house.d.take(tokens, state(tokens)) for tokens in MANY} == {""}
    with house.store("another", MIB, tmp_path / "disk"):
        for tokens in MANY:
            found(house.d, tokens, "another")
            assert house.d.take(tokens, state(tokens)) == ""


@contextmanager
def store_process(house: House, tmp_path: Path) -> Iterator[subprocess.Popen[str]]:
    """Run ``restow store`` with a disk, and wait until it has said that it is ready."""
    layout = tmp_path / "layout.json"
    layout.write_text(json.dumps(layout_to_json(house.p.layout)))
    command = [sys.executable, "-m", "restow.broker.cli.main", "store", "--layout", str(layout)]
    command += ["--memory", "16MiB", "--broker", house.broker, "--engine-id", "a process"]
    command += ["--disk", str(tmp_path / "disk"), "--disk-size", "1GiB", "--block-tokens", "16"]
    with subprocess.Popen(command, stderr=subprocess.PIPE, text=True) as process:
        assert process.stderr is not None
        try:
            assert any("store ready" in line for line in process.stderr)
            yield process
        finally:
            process.kill()


def runs_said(folder: Path) -> int:
    return (folder / "disk" / JOURNAL).read_text().count('"run":')


def test_a_store_that_is_killed_serves_again_what_was_on_its_disk(
    house: House, tmp_path: Path
) -> None:
    with store_process(house, tmp_path) as process:
        kept(house, "a process", PROMPTS)
        until(lambda: runs_said(tmp_path) == len(PROMPTS))
        process.send_signal(signal.SIGKILL)
        process.wait(10)
    until(lambda: not house.d.holders(state(PROMPTS[0])))
    with store_process(house, tmp_path):
        for tokens in PROMPTS:
            found(house.d, tokens, "a process")
            assert house.d.take(tokens, state(tokens)) == ""


def tear(folder: Path) -> None:
    """Flip a bit of each run on the disk, and leave its size as it is."""
    for path in folder.glob("*.run"):
        data = bytearray(path.read_bytes())
        data[5000] ^= 1
        path.write_bytes(data)


def test_a_torn_file_is_declined_and_the_next_holder_gives(house: House, tmp_path: Path) -> None:
    first, second = PROMPTS[:2]
    with house.store("a store", disk=tmp_path / "disk") as store:
        kept(house, "a store", [first, second])
        until(lambda: store.figures.disk_runs == 2)
    tear(tmp_path / "disk")
    with house.store("a store", disk=tmp_path / "disk") as store:
        found(house.d, first, "a store")
        assert house.d.take(first, state(first)) == "NOT_HELD"
        assert not house.d.is_held(state(first), "a store")
        assert (store.figures.declined, store.figures.disk_lost) == (1, 1)
        house.p.hold(second, state(second), keep=False)
        until(lambda: len(house.d.holders(state(second))) == 2)
        assert house.d.take(second, state(second)) == ""
        assert (store.figures.declined, len(house.p.offers)) == (2, 3)
        house.p.keep(state(second))  # it may come again
        found(house.d, second, "a store")


def test_a_disk_that_takes_nothing_costs_no_request(
    house: House, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fails(*_: object) -> int:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    with house.store("a store", disk=tmp_path / "disk") as store:
        monkeypatch.setattr(os, "pwritev", fails)
        kept(house, "a store", PROMPTS)
        until(lambda: store.figures.disk_lost == len(PROMPTS))
        assert {house.d.take(tokens, state(tokens)) for tokens in PROMPTS} == {""}
        assert store.figures.disk_runs == 0


def test_two_stores_share_the_states(house: House) -> None:
    with house.store("one", 32 * MIB) as one, house.store("two", 32 * MIB) as two:
        for tokens in MANY:
            house.p.hold(tokens, state(tokens))
        until(lambda: one.figures.states + two.figures.states == len(MANY))
        assert one.figures.states
        assert two.figures.states
        assert not any(one.holds(state(some)) and two.holds(state(some)) for some in MANY)
        house.p.evict_all()
        assert {house.d.take(tokens, state(tokens)) for tokens in MANY} == {""}


def test_many_keeps_at_once_are_few_demands(house: House) -> None:
    with house.store("a store", 32 * MIB) as store:
        house.p.silent = True
        for tokens in MANY:
            house.p.hold(tokens, state(tokens))
        until(lambda: store.figures.waiting == len(MANY) - MOST_AT_ONCE)
        assert store.figures.asked == MOST_AT_ONCE
        house.p.silent = False
        for offer in list(house.p.offers):
            house.p.answer(offer)
        until(lambda: store.figures.kept == len(MANY))
        assert store.figures.asked == len(MANY)


def test_nothing_is_evicted_for_what_nobody_holds_any_more(house: House) -> None:
    with house.store("a store", MIB) as store:
        kept(house, "a store", MANY[:8])
        before = store.figures
        for tokens in MANY[8:]:
            house.p.keep(state(tokens))
        house.p.hold(MANY[0], state(MANY[0]))  # it has that: the last one to be looked at
        until(lambda: store.figures.waiting == 0)
        house.p.hold(MANY[8], state(MANY[8]))
        found(house.p, MANY[8], "a store")
        assert store.figures.asked == before.asked + 1
        assert store.figures.evictions <= before.evictions + 1


def test_one_store_has_hashes_of_one_form_and_salts_apart(house: House) -> None:
    first, second = PROMPTS[:2]
    salted, other = state(first, salt="one"), state(second, algorithm="another")
    with house.store("a store") as store:
        house.p.hold(first, salted)
        until(lambda: house.p.is_held(salted, "a store"))
        house.p.evict_all()
        store.keep(other)
        store.keep(state(second, quantum_tokens=32))
        store.keep(state(first, salt="two"))  # nobody holds it
        house.p.hold(second, state(second))
        found(house.p, second, "a store")  # what was said before is looked at by then
        assert store.figures.asked == 2
        assert house.d.take(first, state(first)) == "NOT_HELD"
        assert house.d.take(first, state(first, salt="two")) == "NOT_HELD"
        assert house.d.take(first, salted) == ""
        assert store.figures.states == 2


def test_a_model_whose_weights_nothing_tells_has_no_store(house: House) -> None:
    layout = house.p.layout
    unsupported_layer = replace(layout, model=replace(layout.model, revision=""))
    with pytest.raises(WeightsUnknownError, match="no revision"):
        Store(unsupported_layer, StoreOptions("a store", house.broker, MIB))


def test_states_of_replaced_weights_are_found_by_nobody_who_has_others(house: House) -> None:
    p, d = house.engine(1, SD, 32), house.engine(1, DS, 32)
    first, second = PROMPTS[:2]
    old = p.layout.model.revision
    with house.store("a store") as store:
        p.hold(first, state(first))
        found(p, first, "a store")
        p.evict_all()
        for engine in (p, d):
            engine.set_revision("v2")
        assert d.take(first, state(first)) == "NOT_HELD"
        p.hold(second, state(second))
        found(p, second, "a store")
        p.evict_all()
        assert d.take(second, state(second)) == ""
        assert store.figures.states == 2
        with AdminClient(house.broker) as admin:
            assert admin.forget_states(old) == 1
        until(lambda: store.figures.states == 1)
        assert not store.holds(state(first))
        assert d.take(second, state(second)) == ""
        p.forget_states()
        until(lambda: store.figures.states == 0)
        assert d.take(second, state(second)) == "NOT_HELD"
