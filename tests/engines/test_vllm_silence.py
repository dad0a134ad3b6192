"""A broker that is gone for good keeps no request waiting, and no pages."""

from __future__ import annotations

from concurrent.futures import Future

from engines.test_vllm_sides import Session
from restow.agents.engines.vllm.decode import DecodeSide
from restow.agents.engines.vllm.ends import SILENCE_S, SILENT, Ends
from restow.agents.engines.vllm.prefill import PrefillSide
from restow.agents.settings import AgentSettings
from restow.broker.client import HandoffEnded
from restow.broker.core.limits import Limits

PATIENCE_S = 2.0
NAMED = {"group.0": [1, 2, 3], "group.1": [5]}


class Clock:
    """Stands still until told otherwise."""

    def __init__(self) -> None:
        self.now_s = 100.0

    def __call__(self) -> float:
        return self.now_s


def waiting(clock: Clock, session: Session) -> DecodeSide:
    d = DecodeSide(session, int(PATIENCE_S * 1000), Ends(clock))
    d.begin("r", "h", 9)
    d.load("r", NAMED, 9)
    session.take()
    return d


def test_d_gives_up_when_nothing_can_be_written_any_more() -> None:
    clock, session = Clock(), Session()
    d = waiting(clock, session)
    clock.now_s += PATIENCE_S + SILENCE_S - 0.1
    assert d.received() == []
    clock.now_s += 0.2
    (end,) = d.received()
    assert (end.request_id, end.reason, end.failed) == ("r", SILENT, True)
    assert "32 s" in end.detail
    assert session.take() == [("cancel", "h")]
    assert d.received() == []


def test_what_the_broker_says_too_late_changes_nothing() -> None:
    clock, session = Clock(), Session()
    d = waiting(clock, session)
    clock.now_s += PATIENCE_S + SILENCE_S
    assert len(d.received()) == 1
    d.begin("q", "g", 9)
    d.load("q", NAMED, 9)
    session.end("h")
    assert d.received() == []
    session.end("g")
    assert [end.request_id for end in d.received()] == ["q"]


def test_an_end_is_told_once() -> None:
    clock, future = Clock(), Future[HandoffEnded]()
    ends = Ends(clock)
    ends.watch("r", "h", future, PATIENCE_S)
    clock.now_s += PATIENCE_S + SILENCE_S
    assert [end.reason for end in ends.take()] == [SILENT]
    future.set_result(HandoffEnded("h", "DONE", "", "", 100, 7))
    assert list(ends.take()) == []


def test_an_end_in_time_is_the_only_one() -> None:
    clock, session = Clock(), Session()
    d = waiting(clock, session)
    session.end("h")
    assert [end.reason for end in d.received()] == [""]
    clock.now_s += 1000
    assert d.received() == []


def test_each_request_has_its_own_patience() -> None:
    clock, session = Clock(), Session()
    d = waiting(clock, session)
    d.begin("long", "l", 9, timeout_ms=60_000)
    d.load("long", NAMED, 9)
    d.begin("short", "s", 9, timeout_ms=1_000)
    d.load("short", NAMED, 9)
    found = []
    for _ in range(100):
        clock.now_s += 1
        found += [(end.request_id, round(clock.now_s - 100)) for end in d.received()]
    assert found == [("short", 31), ("r", 32), ("long", 90)]


def test_p_frees_its_pages_when_the_last_lease_has_run_out() -> None:
    clock, session = Clock(), Session()
    p = PrefillSide(session, lease_ms=3_000, hold_ms=7_000, ends=Ends(clock))
    p.begin("r", ["h"])
    assert p.finish("r", NAMED, 9)
    session.take()
    clock.now_s += 10 + SILENCE_S - 0.1
    assert p.sent() == ([], set())
    clock.now_s += 0.2
    (end,), free = p.sent()
    assert free == {"r"}
    assert (end.request_id, end.reason) == ("r", SILENT)
    assert session.take() == [("cancel", "h")]


def test_an_engine_waits_longer_than_agents_and_brokers_need() -> None:
    assert SILENCE_S > Limits().settle_grace_s > AgentSettings().quarantine_s
