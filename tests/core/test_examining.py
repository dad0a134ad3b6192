"""An operator learns over what an agent reads, whatever the agents do meanwhile."""

from __future__ import annotations

import pytest

from core.test_probing import COPYING, measure
from core.world import LIMITS, Side, World, kinds
from restow.broker.core.common import actions as act
from restow.broker.core.common.events import Probed
from restow.broker.core.probing import MAX_DETAIL, MAX_EXAMINATIONS
from restow.broker.errors import PairNotReadyError, QuotaExceededError

ADDRESS, SIZE_BYTES = 4096, 1 << 20


def house() -> tuple[World, Side, Side]:
    world = World()
    return world, world.engine("p", 2), world.engine("d", 2)


def begin(world: World, p: Side, d: Side) -> int:
    number, actions = world.directory.examining.begin(p.record, d.record, world.now_s)
    world.hear(actions)
    return number


def say(
    world: World, side: Side, number: int, *, address: int = 0, rank: int = 0, **more: str
) -> list[act.Action]:
    words = {"reason": "", "detail": "", **more}
    probed = Probed(number, address, SIZE_BYTES if address else 0, COPYING, None, 1000, **words)
    return world.run(lambda now_s: world.directory.reports.probed(side.agents[rank], probed, now_s))


def ends(world: World) -> list[tuple[str, str, str]]:
    told = world.orders(act.TellExamined)
    return [(one.transport, one.method, one.reason) for one in told]


def test_the_source_holds_memory_and_the_destination_reads_it() -> None:
    world, p, d = house()
    number = begin(world, p, d)
    (held,) = world.orders(act.SendProbe)
    assert held == act.SendProbe(p.agents[0].key, number, SIZE_BYTES)
    actions = say(world, p, number, address=ADDRESS)
    assert actions == [
        act.SendPeer(d.agents[0].key, p.agents[0].key),
        act.SendProbe(d.agents[0].key, number, SIZE_BYTES, p.agents[0].key, ADDRESS, True),
    ]
    assert say(world, d, number, transport="rc_mlx5/mlx5_0:1", method="zero-copy") == [
        act.SendUnprobe(p.agents[0].key, number),
        act.TellExamined(number, 0, 0, "rc_mlx5/mlx5_0:1", "zero-copy", "", ""),
    ]
    # Asked again, it is looked at again; the peer is known by now.
    number = begin(world, p, d)
    assert kinds(say(world, p, number, address=ADDRESS)) == ["SendProbe"]


def test_costs_that_are_measured_meanwhile_are_another_matter() -> None:
    world = World(measures=True)
    p, d = world.engine("p", host="host-p"), world.engine("d", host="host-d")
    measure(world, p, d)
    number = begin(world, p, d)
    measured, examined = world.orders(act.SendProbe)
    assert isinstance(measured, act.SendProbe)
    assert isinstance(examined, act.SendProbe)
    assert measured.number != examined.number == number
    say(world, p, number, address=ADDRESS)
    say(world, d, number, transport="tcp/eth0", method="zero-copy")
    assert ends(world) == [("tcp/eth0", "zero-copy", "")]
    assert not world.directory.probing.known


@pytest.mark.parametrize("side", ["p", "d"])
def test_an_agent_that_refuses_ends_it(side: str) -> None:
    world, p, d = house()
    number = begin(world, p, d)
    if side == "d":
        say(world, p, number, address=ADDRESS)
    say(world, p if side == "p" else d, number, reason="READ_FAILED", detail="no way")
    assert ends(world) == [("", "", "READ_FAILED")]
    assert kinds(world.sent[-2:]) == ["SendUnprobe", "TellExamined"]
    assert say(world, d, number, transport="late") == []


@pytest.mark.parametrize("side", ["p", "d"])
def test_an_agent_that_is_lost_ends_it(side: str) -> None:
    world, p, d = house()
    number = begin(world, p, d)
    say(world, p, number, address=ADDRESS)
    world.disconnect(p if side == "p" else d, 0)
    world.run(world.directory.tick)
    assert ends(world) == [("", "", "AGENT_LOST")]
    # Nothing is said to an agent that is gone.
    assert len(world.orders(act.SendUnprobe)) == (side == "d")


def test_one_that_says_nothing_is_not_waited_for() -> None:
    world, p, d = house()
    begin(world, p, d)
    world.now_s += LIMITS.examine_s
    world.run(world.directory.tick)
    assert ends(world) == []
    world.now_s += 0.1
    world.run(world.directory.tick)
    assert ends(world) == [("", "", "TIMEOUT")]


def test_nonsense_ends_it_or_is_not_heard() -> None:
    world, p, d = house()
    number = begin(world, p, d)
    assert say(world, d, number, transport="too early") == []
    assert say(world, p, number, rank=1, address=ADDRESS) == []
    assert say(world, p, number + 1, address=ADDRESS) == []
    say(world, p, number, address=-8)
    assert ends(world) == [("", "", "ARGUMENT_INVALID")]
    number = begin(world, p, d)
    say(world, p, number, address=ADDRESS)
    assert say(world, p, number, address=ADDRESS) == []
    say(world, d, number)
    assert ends(world)[1:] == [("", "", "TRANSPORT_UNKNOWN")]


def test_words_of_agents_are_bounded() -> None:
    world, p, d = house()
    number = begin(world, p, d)
    say(world, p, number, address=ADDRESS)
    say(world, d, number, transport="x" * 10_000, method="y" * 10_000, detail="z" * 10_000)
    say(world, p, begin(world, p, d), reason="r" * 10_000, detail="z" * 10_000)
    told = world.orders(act.TellExamined)
    assert len(told) == 2
    for one in told:
        assert isinstance(one, act.TellExamined)
        assert max(len(word) for word in one if isinstance(word, str)) <= MAX_DETAIL


def test_pairs_that_can_not_be_probed() -> None:
    world, p, _ = house()
    nobody = world.engine("n", agents=False)
    for pair, words in (((p, nobody), "engine n has no connected agent"), ((p, p), "from itself")):
        with pytest.raises(PairNotReadyError, match=words):
            begin(world, *pair)
    assert not world.orders(act.SendProbe)


def test_a_few_at_once() -> None:
    world, p, d = house()
    for _ in range(MAX_EXAMINATIONS):
        begin(world, p, d)
    with pytest.raises(QuotaExceededError):
        begin(world, p, d)
    world.now_s += LIMITS.examine_s + 1
    world.run(world.directory.tick)
    begin(world, p, d)
