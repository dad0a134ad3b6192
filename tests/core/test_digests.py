"""Content digests: of which handoffs, made by whom, and what becomes of one without."""

from __future__ import annotations

import pytest

from core.world import LIMITS, Side, World, digest_of, ends, p_and_d, reading
from restow.broker.core.common import actions as act
from restow.broker.core.common.events import StagedRun
from restow.broker.core.common.keys import State
from restow.broker.core.common.limits import Numbering
from restow.broker.core.common.pair import DIGEST_BYTES, DigestMode, Digests, PairPlan
from restow.broker.families import EngineSettings, Mamba2Spec, ModelSpec, build_layout
from restow.broker.layout import DType
from restow.broker.planner import Strategy, compile_programs, make_plan

ALL = Digests(DigestMode.ALL)


def asked(*, digests: Digests | None = ALL, **how: bool) -> tuple[World, Side, Side, int]:
    """Return a world with a granted handoff from two ranks to two, and the handoff's number."""
    return reading(2, 2, digests=digests, **how)


def parts(world: World) -> list[tuple[int, tuple[int, ...], bool]]:
    """Return which rank was asked to gather or hash, and for which ranks."""
    return [
        (one.agent.rank, tuple(part.dst_rank for part in one.parts), one.hashed)
        for one in world.orders(act.SendStage)
    ]


@pytest.mark.parametrize("staged", [False, True])
@pytest.mark.parametrize("digests", [None, Digests(), Digests(DigestMode.SAMPLED, 1 << 60)])
def test_without_digests_everything_is_as_it_was(staged: bool, digests: Digests | None) -> None:
    world, p, d, number = asked(staged=staged, digests=digests)
    assert bool(parts(world)) == staged
    assert not any(hashed for *_, hashed in parts(world))
    if staged:
        world.stage_all(p, number, 2)
    programs = world.orders(act.SendProgram)
    assert not any(one.hashed for one in programs)
    for one in world.orders(act.SendExecute):
        assert not one.hashed
        assert not any(source.digest for source in one.sources), "passed on unasked"
    for rank in range(2):
        world.settle(d, number, rank, compared=False)
    assert ends(p) == ends(d) == [("DONE", "")]
    assert "checked" not in world.events()
    assert world.directory.ledger.checks.checked == 0


@pytest.mark.parametrize("wants", ["p", "d"])
def test_an_engine_that_wants_digests_has_them_whatever_the_settings_say(wants: str) -> None:
    world, p, d = p_and_d(2, 2, digests=Digests())
    {"p": p, "d": d}[wants].record.digests = True
    number = world.begin(p, d)
    assert all(hashed for *_, hashed in parts(world))
    world.stage_all(p, number, 2)
    assert all(one.hashed for one in world.orders(act.SendExecute))
    for rank in range(2):
        world.settle(d, number, rank)
    assert ends(p) == ends(d) == [("DONE", "")]
    assert world.directory.ledger.checks.checked == 1


@pytest.mark.parametrize("staged", [False, True])
def test_every_source_hashes_for_every_reader_before_it_is_read(staged: bool) -> None:
    world, p, d, number = asked(staged=staged)
    assert sorted(parts(world)) == [(s, (d,), True) for s in range(2) for d in range(2)]
    assert world.find().state is State.STAGING
    world.stage(p, number, 0, 0)
    world.stage(p, number, 0, 1)
    assert not world.orders(act.SendExecute)
    world.stage(p, number, 1, 1)
    (first,) = world.orders(act.SendExecute)
    assert first.agent.rank == 1
    assert first.hashed
    assert [one.digest for one in first.sources] == [digest_of(0, 1), digest_of(1, 1)]
    world.stage(p, number, 1, 0)
    assert [one.digest for one in world.orders(act.SendExecute)[1].sources] == [
        digest_of(0, 0),
        digest_of(1, 0),
    ]
    world.settle(d, number, 0)
    assert ends(d) == []
    world.settle(d, number, 1)
    assert ends(p) == ends(d) == [("DONE", "")]
    assert world.events()[-2:] == ["checked", "ended"]
    checks = world.directory.ledger.checks
    assert (checks.checked, checks.mismatches) == (1, 0)
    unstaged = [one.agent.rank for one in world.orders(act.SendUnstage)]
    assert unstaged == [0, 1]


def test_what_is_gathered_together_is_asked_for_together() -> None:
    world, p, d, number = asked(staged=True, together=True)
    assert parts(world) == [(0, (0, 1), True), (1, (0, 1), True)]
    world.stage_all(p, number, 2)
    world.settle_all(d, number)
    assert ends(d) == [("DONE", "")]


def test_the_part_of_a_program_that_is_hashed_has_a_name_of_its_own() -> None:
    # A part that only gathers may have been sent before.
    world, *_ = asked(staged=True)
    sent = world.orders(act.SendProgram)
    assert {(one.src_rank, one.hashed) for one in sent} == {(0, True), (1, True)}
    named = {part.program_id for one in world.orders(act.SendStage) for part in one.parts}
    programs = [one.program for one in sent]
    assert named == {one.hashed_id(rank) for one in programs for rank in range(2)}
    assert not named & {one.gather_id(rank) for one in programs for rank in range(2)}


@pytest.mark.parametrize("digest", [b"", b"short", bytes(DIGEST_BYTES + 1)])
def test_a_source_that_hashes_nothing_is_not_read(digest: bytes) -> None:
    world, p, d, number = asked()
    world.stage(p, number, 0, 0)
    world.stage(p, number, 1, 0, digest=digest)
    assert not world.orders(act.SendExecute)
    assert ends(p) == ends(d) == [("FAILED", "DIGEST_MISSING")]
    assert "rank 1 of P" in d.told[0].detail
    assert world.directory.ledger.checks.checked == 0
    # What it gathered nonetheless is given back.
    unstaged = [one.agent.rank for one in world.orders(act.SendUnstage)]
    assert unstaged == [0, 1]


def test_a_missing_digest_waits_for_those_who_read() -> None:
    world, p, d, number = asked()
    world.stage(p, number, 0, 0)
    world.stage(p, number, 1, 0)
    world.stage(p, number, 0, 1)
    world.stage(p, number, 1, 1, digest=b"")
    assert [one.agent.rank for one in world.orders(act.SendExecute)] == [0]
    assert ends(d) == []
    world.settle(d, number, 0)
    assert ends(p) == ends(d) == [("FAILED", "DIGEST_MISSING")]


def test_a_rank_of_d_that_compares_nothing_has_no_state() -> None:
    world, p, d, number = asked()
    world.stage_all(p, number, 2)
    world.settle(d, number, 0, compared=False)
    world.settle(d, number, 1)
    assert ends(p) == ends(d) == [("FAILED", "DIGEST_MISSING")]
    assert "rank 0 of D" in d.told[0].detail


def test_a_difference_fails_the_handoff_and_is_counted() -> None:
    world, p, d, number = asked()
    world.stage_all(p, number, 2)
    world.settle(d, number, 0)
    world.settle(d, number, 1, "DIGEST_MISMATCH")
    assert ends(p) == ends(d) == [("FAILED", "DIGEST_MISMATCH")]
    assert "checked" not in world.events()
    for checks in (world.directory.ledger.checks, world.directory.ledger.tenants.of("t").checks):
        assert (checks.checked, checks.mismatches) == (1, 1)


def test_a_difference_that_nobody_asked_for_is_not_counted() -> None:
    world, _, d, number = asked(digests=None)
    world.settle(d, number, 0, "DIGEST_MISMATCH")
    world.settle(d, number, 1)
    assert ends(d) == [("FAILED", "DIGEST_MISMATCH")]
    assert world.directory.ledger.checks.checked == 0


def test_digests_said_twice_late_or_by_others_change_nothing() -> None:
    world, p, d, number = asked()
    world.stage_all(p, number, 2)
    heard = len(world.sent)
    world.stage(p, number, 0, 0, digest=bytes(16))
    assert len(world.sent) == heard
    assert world.find().staged[0, 0].digest == digest_of(0, 0)
    other = world.engine("q", 2)
    (unstage,) = world.stage(other, number, 0, 0, digest=bytes(16))
    assert isinstance(unstage, act.SendUnstage)
    assert unstage.agent == other.agents[0].key
    world.stage(d, number, 0, 0, digest=bytes(16))
    assert world.find().staged[0, 0].digest == digest_of(0, 0)
    world.settle_all(d, number)
    (late,) = world.stage(p, number, 0, 0)
    assert isinstance(late, act.SendUnstage)
    assert ends(d) == [("DONE", "")]


def test_a_source_that_is_lost_while_it_hashes_fails_the_handoff() -> None:
    world, p, d, number = asked()
    world.stage(p, number, 0, 0)
    world.disconnect(p, 1)
    world.wait(LIMITS.agent_wait_s + 1.0)
    assert ends(d) == [("FAILED", "AGENT_LOST")]


def test_a_rank_that_reads_nothing_need_not_wait() -> None:
    mamba = Mamba2Spec(0, 4, 2, 2, 2, 4, DType.BFLOAT16, DType.BFLOAT16)
    layout = build_layout(ModelSpec("m", (mamba,)), EngineSettings(tp=2))
    pair = PairPlan.of(compile_programs(make_plan(layout, layout), Strategy.SLICES))
    assert pair.gathers == ()
    hashed = pair.with_digests()
    assert hashed.programs is pair.programs
    assert hashed.staging == {0: (0,), 1: (1,)}
    assert [(one.src_rank, one.dst_ranks) for one in hashed.gathers] == [(0, (0,)), (1, (1,))]


@pytest.mark.parametrize("rhythm_us", [1, 7, 1000, 1 << 20, 64 * 1000, 10**6])
@pytest.mark.parametrize("every", [1, 2, 64])
def test_of_sampled_handoffs_one_in_so_many_is_chosen(rhythm_us: int, every: int) -> None:
    """Check the share of chosen handoffs, whatever the rhythm in which they come."""
    count = 400 * every
    taken = Numbering(123_456_789)
    numbers = [taken.take(index * rhythm_us / 1e6) for index in range(count)]
    chosen = [one for one in numbers if Digests(DigestMode.SAMPLED, every).choose(one)]
    assert 0.75 * 400 < len(chosen) < 1.25 * 400
    assert chosen == [one for one in numbers if Digests(DigestMode.SAMPLED, every).choose(one)]
    assert all(ALL.choose(one) and not Digests().choose(one) for one in numbers[:100])


def test_a_handoff_keeps_its_lot() -> None:
    """Check that its number alone chooses a handoff, however often and to whom it is granted."""
    sampled = Digests(DigestMode.SAMPLED, 3)
    world, p, d = p_and_d(digests=sampled)
    for index in range(60):
        name = f"h{index}"
        world.begin(p, d, name)
        handoff = world.find(name)
        assert (handoff.state is State.STAGING) == sampled.choose(handoff.number)
        if handoff.state is State.STAGING:
            world.stage(p, handoff.number)
        world.settle(d, handoff.number, compared=handoff.pair is not None and handoff.pair.hashed)
        world.now_s += 0.0137
    states = {state for state, _ in ends(d)}
    assert states == {"DONE"}
    assert 5 < world.directory.ledger.checks.checked < 40


def test_a_run_is_kept_with_the_digest_that_was_asked_for() -> None:
    run = StagedRun(4096, 64, bytes(16))
    assert run.kept(True) is run
    assert run.kept(False) == StagedRun(4096, 64)
