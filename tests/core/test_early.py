"""Leading tokens are read while P computes on, and D hears of the whole alone."""

from __future__ import annotations

from dataclasses import replace

import pytest

from core.world import LIMITS, PAGES, POSITION, Side, World, ends, of_kind, packed
from restow.broker.core.common import actions as act
from restow.broker.core.common.keys import State
from restow.broker.core.common.limits import Limits
from restow.broker.errors import HandoffConflictError

EVERY_TOKEN = replace(LIMITS, early_bytes=0)
DONE = ("DONE", "")


def world_of(*, limits: Limits = EVERY_TOKEN, staged: bool = False) -> World:
    return World(early=True, limits=limits, staged=staged)


def orders(actions: list[act.Action]) -> list[act.SendExecute]:
    """Return the orders to read."""
    return of_kind(act.SendExecute, actions)


def reads(actions: list[act.Action]) -> list[tuple[str, int, int]]:
    """Return the programs and tokens of the orders to read."""
    return [(one.program_id, one.first_token, one.stop_token) for one in orders(actions)]


def number(actions: list[act.Action]) -> int:
    (found,) = {one.handoff for one in orders(actions)}
    return found


def begun(world: World, ranks: int = 2, held: int = 0) -> tuple[Side, Side]:
    """Return a P whose first block is complete on no rank yet, and a D that has asked."""
    p, d = world.engine("p", ranks), world.engine("d")
    world.request(d, held=held)
    assert not reads(world.publish(p, blocks={"kv": [1]}, final=False))
    return p, d


def finish(world: World, p: Side) -> list[act.Action]:
    """Have P compute the rest of the prompt."""
    actions = world.publish(p)
    return actions + world.fence_all(p)


def test_a_chunk_is_read_when_every_rank_has_fenced_it_and_the_end_is_told_once() -> None:
    world = world_of()
    p, d = begun(world)
    assert not reads(world.fence(p, 0, tokens=16))
    first = world.fence(p, 1, tokens=16)
    assert reads(first) == [("early/0", 0, 16)]
    assert world.find().state is State.READING
    world.settle(d, number(first), size_bytes=5)
    assert not ends(d)
    assert world.find().state is State.WAITING
    last = finish(world, p)
    assert reads(last) == [("program/0", 16, POSITION)]
    assert number(last) > number(first)
    world.settle(d, number(last), size_bytes=7)
    assert ends(d) == ends(p) == [DONE]
    assert d.told[0].bytes == 12
    ledger = world.directory.ledger
    assert (ledger.statistics.early_bytes, ledger.statistics.bytes_read) == (5, 12)


def test_what_is_fenced_while_a_chunk_is_read_is_read_next() -> None:
    world = world_of()
    p, d = begun(world, ranks=1)
    first = world.fence(p, tokens=16)
    world.publish(p, blocks={"kv": [2]}, first=1, final=False)
    assert not reads(world.fence(p, tokens=30))
    second = world.settle(d, number(first))
    assert reads(second) == [("early/0", 16, 30)]
    assert not reads(finish(world, p))
    last = world.settle(d, number(second))
    assert reads(last) == [("program/0", 30, POSITION)]
    world.settle(d, number(last))
    assert ends(d) == [DONE]


def test_tokens_whose_blocks_are_not_listed_are_not_read() -> None:
    world = world_of()
    p, _ = begun(world, ranks=1)
    assert not reads(world.fence(p, tokens=17))
    listed = world.publish(p, blocks={"kv": [2]}, first=1, final=False)
    assert reads(listed) == [("early/0", 0, 17)]


@pytest.mark.parametrize(
    ("of_p", "of_d", "first"),
    [
        ([1, 2], [11, 12], (0, 32)),
        ([1, 2], [11], None),  # D named too few blocks
        ([1, 2], [0, 12], None),  # a null block where tokens are moved
        ([0, 2], [11, 12], None),
        ([1, 2], [11, 0], None),
    ],
)
def test_nothing_is_read_early_from_or_into_blocks_that_are_not_there(
    of_p: list[int], of_d: list[int], first: tuple[int, int] | None
) -> None:
    world = world_of()
    p, d = world.engine("p"), world.engine("d")
    world.request(d, blocks={"kv": of_d, "state": [14]})
    world.publish(p, blocks={"kv": of_p}, final=False)
    read = reads(world.fence(p, tokens=32))
    assert read == ([] if first is None else [("early/0", *first)])


def test_a_chunk_that_is_not_worth_a_read_waits_for_more() -> None:
    world = world_of(limits=replace(LIMITS, early_bytes=20 * 256))
    p, d = begun(world, ranks=1)
    d.record.token_bytes = 256
    world.publish(p, blocks={"kv": [2]}, first=1, final=False)
    assert not reads(world.fence(p, tokens=19))
    assert reads(world.fence(p, tokens=20)) == [("early/0", 0, 20)]


def test_what_d_holds_is_not_read_and_nothing_behind_what_it_goes_on_from() -> None:
    world = world_of()
    p, d = world.engine("p"), world.engine("d")
    world.request(d, held=8, position=20)
    world.publish(p, blocks={"kv": [1, 2]}, final=False)
    assert not reads(world.fence(p, tokens=8))
    assert reads(world.fence(p, tokens=32)) == [("early/0", 8, 20)]


def test_nothing_is_read_early_where_the_plan_has_no_such_part() -> None:
    world = World(limits=EVERY_TOKEN)
    p, d = begun(world, ranks=1)
    assert not reads(world.fence(p, tokens=16))
    last = finish(world, p)
    assert reads(last) == [("program/0", 0, POSITION)]
    world.settle(d, number(last))
    assert ends(d) == [DONE]


def test_a_chunk_is_gathered_first_where_the_plan_says_so() -> None:
    world = world_of(staged=True)
    p, d = begun(world, ranks=1)
    (stage,) = of_kind(act.SendStage, world.fence(p, tokens=16))
    assert (stage.first_token, stage.stop_token) == (0, 16)
    first = world.stage(p, stage.handoff)
    assert reads(first) == [("early/0", 0, 16)]
    settled = world.settle(d, number(first))
    assert act.SendUnstage(p.agents[0].key, stage.handoff) in settled
    (stage,) = of_kind(act.SendStage, finish(world, p))
    assert (stage.first_token, stage.stop_token) == (16, POSITION)
    world.settle(d, number(world.stage(p, stage.handoff)))
    assert ends(d) == [DONE]


def test_a_late_word_of_a_chunk_says_nothing_of_the_next_grant() -> None:
    world = world_of()
    p, d = begun(world, ranks=1)
    first = world.fence(p, tokens=16)
    world.settle(d, number(first))
    last = finish(world, p)
    world.settle(d, number(first))
    assert not ends(d)
    world.settle(d, number(last))
    assert ends(d) == [DONE]


def test_p_dies_after_a_half_and_d_hears_it_when_no_rank_writes_any_more() -> None:
    world = world_of()
    p, d = begun(world, ranks=1)
    first = world.fence(p, tokens=16)
    world.disconnect(p, 0)
    world.wait(LIMITS.agent_wait_s + 0.1)
    assert not ends(d) or ends(d)[0][0] == "FAILED"
    world.settle(d, number(first))
    assert [state for state, _ in ends(d)] == ["FAILED"]


def test_a_rank_that_is_gone_between_two_chunks_takes_the_state_along() -> None:
    world = world_of()
    p, d = begun(world, ranks=2)
    first = world.fence_all(p, tokens=16)
    world.settle(d, number(first))
    world.disconnect(p, 1)
    world.wait(LIMITS.agent_wait_s + 0.1)
    assert ends(d) == [("FAILED", "AGENT_LOST")]


def test_a_chunk_whose_read_fails_fails_the_handoff() -> None:
    world = world_of()
    p, d = begun(world, ranks=1)
    first = world.fence(p, tokens=16)
    world.settle(d, number(first), reason="TRANSFER_FAILED")
    assert ends(d) == [("FAILED", "TRANSFER_FAILED")]
    assert ends(p) == [("FAILED", "TRANSFER_FAILED")]


def test_a_chunk_whose_rank_reports_its_deadline_is_read_again_with_the_whole() -> None:
    world = world_of()
    p, d = begun(world, ranks=1)
    first = world.fence(p, tokens=16)
    world.settle(d, number(first), reason="READ_DEADLINE")
    assert not ends(d)
    assert not ends(p)
    assert not reads(world.publish(p, blocks={"kv": [2]}, first=1, final=False))
    assert not reads(world.fence(p, tokens=32))
    last = finish(world, p) + world.wait(0.02)
    assert reads(last) == [("program/0", 0, POSITION)]
    world.settle(d, number(last))
    assert ends(d) == ends(p) == [DONE]


def test_a_publication_is_looked_at_again_when_the_chunk_of_a_reader_is_given_up() -> None:
    world = world_of()
    p, d = world.engine("p", 1), world.engine("d", 2)
    world.request(d, readers=1)
    world.publish(p, blocks={"kv": [1]}, final=False, readers=1, lease_s=5.0)
    first = world.fence(p, tokens=16)
    world.wait(4.9)
    world.renew(p, lease_s=0.45)
    world.wait(0.3)
    world.settle(d, number(first), 0, reason="READ_DEADLINE")
    assert not ends(p)
    world.wait(0.2)
    assert ends(p) == [("EXPIRED", "LEASE_EXPIRED")]


def test_a_chunk_that_is_read_after_its_grant_is_read_again_behind_the_chunks_before() -> None:
    world = world_of()
    p, d = begun(world, ranks=1)
    world.settle(d, number(world.fence(p, tokens=8)))
    late = world.fence(p, tokens=16)
    world.now_s = world.find().lease.grant_until_s + LIMITS.lease_margin_s + 0.01
    world.settle(d, number(late))
    world.renew(p)
    last = finish(world, p) + world.wait(0.02)
    assert reads(last) == [("program/0", 8, POSITION)]
    world.settle(d, number(last))
    assert ends(d) == ends(p) == [DONE]


def test_a_chunk_that_a_silent_rank_holds_up_waits_for_that_rank_and_no_longer_than_d() -> None:
    world = world_of()
    p, d = begun(world, ranks=1)
    first = world.fence(p, tokens=16)
    world.wait(LIMITS.grant_s + LIMITS.settle_grace_s + 0.1)
    world.renew(p, lease_s=60.0)
    assert not ends(p)
    assert not reads(finish(world, p) + world.wait(0.1))
    last = world.settle(d, number(first)) + world.wait(0.02)
    assert reads(last) == [("program/0", 0, POSITION)]

    other = world_of()
    p, d = begun(other, ranks=1)
    other.fence(p, tokens=16)
    other.wait(LIMITS.grant_s + LIMITS.settle_grace_s + 0.1)
    other.renew(p, lease_s=600.0)
    other.wait(LIMITS.timeout_s)
    assert ends(p) == [("FAILED", "READ_DEADLINE")]


def taken_back(world: World, p: Side) -> list[act.Action]:
    """Have P preempt the prompt, and compute it again into other blocks."""
    actions = world.publish(p, blocks={}, final=False, anew=True)
    actions += world.fence(p, tokens=16)  # said of the first blocks, or of the second ones
    actions += world.publish(p, blocks={"kv": [7, 8, 9], "state": [4]}, anew=True)
    assert not reads(actions)
    return world.fence_all(p)


def test_what_p_takes_back_is_read_again_from_the_beginning() -> None:
    world = world_of()
    p, d = begun(world, ranks=1)
    world.settle(d, number(world.fence(p, tokens=16)), size_bytes=5)
    last = taken_back(world, p)
    assert reads(last) == [("program/0", 0, POSITION)]
    assert {group: ids for group, ids in orders(last)[0].src_blocks}["kv"] == packed([7, 8, 9])
    world.settle(d, number(last), size_bytes=7)
    assert ends(d) == ends(p) == [DONE]
    assert d.told[0].bytes == 7


def test_a_chunk_that_is_read_while_p_takes_it_back_is_waited_for_and_not_used() -> None:
    world = world_of()
    p, d = begun(world, ranks=1)
    first = world.fence(p, tokens=16)
    assert not reads(taken_back(world, p))
    last = world.settle(d, number(first)) + world.wait(0.02)
    assert reads(last) == [("program/0", 0, POSITION)]
    world.settle(d, number(last))
    assert ends(d) == ends(p) == [DONE]


def test_all_readers_read_again_what_p_takes_back() -> None:
    world = world_of()
    p, d, e = world.engine("p"), world.engine("d"), world.engine("e")
    for one in (d, e):
        world.request(one, readers=2)
    world.publish(p, blocks={"kv": [1]}, final=False, readers=2)
    for one, order in zip((d, e), orders(world.fence(p, tokens=16)), strict=True):
        world.settle(one, order.handoff)
    assert reads(taken_back(world, p)) == [("program/0", 0, POSITION)] * 2


def test_a_state_that_is_whole_is_not_taken_back_nor_one_that_was_said_anew() -> None:
    world = world_of()
    p, _ = begun(world, ranks=1)
    world.publish(p, blocks={}, final=False, anew=True)
    with pytest.raises(HandoffConflictError):
        world.publish(p, blocks={"kv": [1]}, final=False)
    world.publish(p, anew=True)
    other = world_of()
    p, _ = begun(other, ranks=1)
    other.publish(p)
    with pytest.raises(HandoffConflictError):
        other.publish(p, blocks={}, final=False, anew=True)


def test_ranks_that_fence_the_whole_before_p_takes_chunks_back_have_computed_it_again() -> None:
    world = world_of()
    p, d = begun(world, ranks=1)
    world.fence(p)
    world.publish(p, blocks={}, final=False, anew=True)
    last = world.publish(p, anew=True)
    assert reads(last) == [("program/0", 0, POSITION)]
    world.settle(d, number(last))
    assert ends(d) == ends(p) == [DONE]


def test_a_chunk_that_a_rank_could_not_begin_is_granted_again() -> None:
    world = world_of()
    p, d = begun(world, ranks=1)
    first = world.fence(p, tokens=16)
    world.settle(d, number(first), reason="READ_NOT_BEGUN")
    assert world.find().state is State.WAITING
    again = world.wait(0.02)
    assert reads(again) == [("early/0", 0, 16)]
    world.settle(d, number(again))
    world.settle(d, number(finish(world, p)))
    assert ends(d) == [DONE]


def test_every_order_of_a_demand_has_its_write_mark() -> None:
    world = world_of()
    p, d = world.engine("p"), world.engine("d")
    world.request(d, write_mark=5)
    world.publish(p, blocks={"kv": [1]}, final=False)
    first = world.fence(p, tokens=16)
    world.settle(d, number(first), reason="READ_NOT_BEGUN")
    again = world.wait(0.02)
    world.settle(d, number(again))
    last = finish(world, p)
    assert [one.write_mark for one in orders(first + again + last)] == [5, 5, 5]


def test_d_s_patience_ends_between_two_chunks() -> None:
    world = world_of()
    p, d = world.engine("p"), world.engine("d")
    world.request(d, timeout_s=5.0)
    world.publish(p, blocks={"kv": [1]}, final=False)
    world.settle(d, number(world.fence(p, tokens=16)))
    world.wait(5.1)
    assert ends(d) == [("EXPIRED", "NOT_PUBLISHED")]


def test_a_lease_that_leaves_no_time_for_a_chunk_ends_nothing() -> None:
    world = world_of()
    p, d = world.engine("p"), world.engine("d")
    world.request(d)
    world.publish(p, blocks={"kv": [1]}, final=False, lease_s=0.1)
    assert not reads(world.fence(p, tokens=16))
    assert not ends(d)
    world.renew(p)
    last = finish(world, p)
    assert reads(last) == [("early/0", 0, 16)] or reads(last) == [("program/0", 0, POSITION)]


def test_another_d_begins_at_the_beginning() -> None:
    world = world_of()
    p, d, e = world.engine("p"), world.engine("d"), world.engine("e")
    world.request(d, position=30)
    world.publish(p, blocks={"kv": [1, 2]}, final=False)
    world.settle(d, number(world.fence(p, tokens=16)))
    finish(world, p)  # at 40: D, which goes on from 30, is refused
    assert ends(d) == [("FAILED", "POSITION_MISMATCH")]
    asked = world.request(e, blocks={"kv": [21, 22, 23], "state": [24]})
    assert reads(asked) == [("program/0", 0, POSITION)]


def test_each_of_several_readers_reads_early() -> None:
    world = world_of()
    p, d, e = world.engine("p"), world.engine("d"), world.engine("e")
    for one in (d, e):
        world.request(one, readers=2)
    world.publish(p, blocks={"kv": [1]}, final=False, readers=2)
    chunks = world.fence(p, tokens=16)
    assert reads(chunks) == [("early/0", 0, 16)] * 2
    for one, order in zip((d, e), orders(chunks), strict=True):
        world.settle(one, order.handoff)
    rest = world.publish(p, readers=2) + world.fence_all(p)
    assert reads(rest) == [("program/0", 16, POSITION)] * 2
    for one, order in zip((d, e), orders(rest), strict=True):
        world.settle(one, order.handoff)
    assert ends(d) == ends(e) == ends(p) == [DONE]


def test_a_reader_without_a_place_reads_nothing_early() -> None:
    world = world_of()
    p, d, e = world.engine("p"), world.engine("d"), world.engine("e")
    for one in (d, e):
        world.request(one, readers=1)
    world.publish(p, blocks={"kv": [1]}, final=False, readers=1)
    (chunk,) = orders(world.fence(p, tokens=16))
    assert chunk.agent == d.agents[0].key


def test_readers_that_are_named_when_one_reads_are_refused() -> None:
    world = world_of()
    p, d = begun(world, ranks=1)
    first = world.fence(p, tokens=16)
    with pytest.raises(HandoffConflictError):
        world.publish(p, readers=2)
    world.settle(d, number(first))
    with pytest.raises(HandoffConflictError):
        world.publish(p, readers=2)
    world.settle(d, number(finish(world, p)))
    assert ends(d) == [DONE]


def test_memory_that_shrank_is_looked_at_when_all_is_known() -> None:
    world = world_of()
    p, d = begun(world, ranks=1)
    world.disconnect(d, 0)
    world.connect(d, 0, PAGES // 2)
    assert not reads(world.fence(p, tokens=16))


def test_a_d_that_is_refused_after_an_early_read_leaves_nothing_to_the_next() -> None:
    world = world_of()
    p, d, e = (world.engine(name) for name in "pde")
    world.connect(e, 0)  # its agent was replaced before it asked
    world.request(d, position=20)
    world.publish(p, blocks={"kv": [1]}, final=False)
    world.settle(d, number(world.fence(p, tokens=16)), size_bytes=5)
    finish(world, p)
    assert ends(d) == [("FAILED", "POSITION_MISMATCH")]
    last = world.request(e)
    assert reads(last) == [("program/0", 0, POSITION)]
    world.settle(e, number(last), size_bytes=7)
    assert ends(e) == ends(p) == [DONE]
    assert e.told[0].bytes == 7
