"""Page ids and positions that do not fit: refused, and nothing is left of them."""

from __future__ import annotations

import pytest

from core.world import World, alone, ends, p_and_d
from restow.broker.block_ids import ID_BYTES, MAX_BLOCKS
from restow.broker.core.common import actions as act
from restow.broker.core.common.events import Wish
from restow.broker.core.handoffs import publication
from restow.broker.errors import (
    PageCountError,
    PageRangeError,
    PagesError,
    RequestError,
)


@pytest.mark.parametrize(
    ("blocks", "words"),
    [
        ({"kv": [1, 2], "state": [4]}, "2 blocks of 16 tokens"),
        ({"kv": [1, 2, 3], "state": []}, "exactly one"),
        ({"kv": [1, 2, 3]}, "group state"),
    ],
)
def test_p_hears_that_it_has_named_too_few_pages_and_nothing_is_left_of_it(
    blocks: dict[str, list[int]], words: str
) -> None:
    world, p = alone("p")
    with pytest.raises(PageCountError, match=words):
        world.publish(p, blocks=blocks)
    assert not world.directory.ledger.live
    assert not p.record.handoffs


@pytest.mark.parametrize(
    ("blocks", "held", "reason"),
    [
        ({"kv": [11, 12], "state": [14]}, 0, "PAGE_COUNT"),
        ({"kv": [11, 12, 13]}, 0, "PAGE_COUNT"),
        ({"kv": [11, 12, 13], "state": [14]}, 41, "ARGUMENT_INVALID"),
    ],
)
def test_what_only_the_position_can_prove_wrong_is_refused_and_p_keeps_its_state(
    blocks: dict[str, list[int]], held: int, reason: str
) -> None:
    world, p, d = p_and_d()
    world.request(d, blocks=blocks, held=held)
    world.ready(p)
    assert ends(d) == [("FAILED", reason)]
    assert ends(p) == []
    other = world.engine("e")
    world.request(other)
    world.settle(other, world.find().number)
    assert ends(p) == ends(other) == [("DONE", "")]


def test_pages_are_checked_again_when_a_smaller_agent_has_come_since() -> None:
    world = World()
    p, d = world.engine("p"), world.engine("d", 2, agents=False)
    world.connect(d, 0)
    world.request(d, blocks={"kv": [11, 12, 99], "state": [14]})
    world.connect(d, 1, pages=50)
    world.ready(p)
    assert ends(d) == [("FAILED", "PAGE_OUT_OF_RANGE")]
    assert not world.orders(act.SendExecute)


def test_ps_pages_are_checked_again_when_a_smaller_agent_has_come_since() -> None:
    world = World()
    p, d = world.engine("p", 2, agents=False), world.engine("d")
    world.connect(p, 0)
    world.publish(p, blocks={"kv": [1, 2, 99], "state": [4]})
    world.request(d)
    world.connect(p, 1, pages=50)
    world.fence_all(p)
    assert ends(p) == ends(d) == [("FAILED", "PAGE_OUT_OF_RANGE")]
    assert not world.orders(act.SendExecute)


def test_pages_of_an_earlier_chunk_are_checked_again_too() -> None:
    world = World()
    p, d = world.engine("p", 2, agents=False), world.engine("d")
    world.connect(p, 0)
    world.publish(p, blocks={"kv": [99], "state": [4]}, final=False)
    world.connect(p, 1, pages=50)
    world.publish(p, blocks={"kv": [2, 3]}, first=1)
    world.request(d)
    world.fence_all(p)
    assert ends(p) == ends(d) == [("FAILED", "PAGE_OUT_OF_RANGE")]


def test_blocks_of_all_chunks_together_are_bounded() -> None:
    world, p = alone("p")
    world.publish(p, blocks={"kv": [0] * MAX_BLOCKS}, final=False)
    with pytest.raises(PageCountError, match=f"more than {MAX_BLOCKS} blocks"):
        world.publish(p, blocks={"kv": [0]}, first=MAX_BLOCKS, final=False)


def test_ids_count_blocks_and_not_the_pages_in_them() -> None:
    # Four hundred pages are a hundred blocks of four pages, each block sixteen tokens.
    world = World()
    p = world.engine("p", pages_per_block=4)
    world.publish(p, blocks={"kv": [97, 98, 99], "state": [4]})
    with pytest.raises(PageRangeError, match=r"block 100 .* \[0, 100\)"):
        world.publish(p, "more", blocks={"kv": [98, 99, 100], "state": [4]})
    with pytest.raises(PageCountError, match="2 blocks of 16 tokens"):
        world.publish(p, "fewer", blocks={"kv": [98, 99], "state": [4]})


def test_a_group_twice_in_a_demand_is_refused() -> None:
    world, d = alone("d")
    wish = Wish((("kv", b""), ("kv", b"")), 0, 30.0)
    with pytest.raises(PagesError, match="more than once"):
        world.directory.request(d.record, "h", wish, world.now_s)


def test_bytes_that_are_no_ids_are_refused() -> None:
    _, p = alone("p")
    with pytest.raises(PagesError, match="3 bytes"):
        p.record.check_ids("kv", b"abc")


def test_position_zero_is_refused_in_a_final_chunk() -> None:
    world = World()
    with pytest.raises(PageCountError, match="at least 1"):
        world.publish(world.engine("p"), position=0)


@pytest.mark.parametrize("name", ["", "x" * 257])
def test_an_id_has_a_sensible_length(name: str) -> None:
    world = World()
    with pytest.raises(RequestError):
        world.publish(world.engine("p"), name)
    world.publish(world.side("p"), "x" * 256)
    assert world.find("x" * 256)


def test_all_lists_of_a_publication_have_a_limit(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(publication, "MAX_PUBLICATION_BYTES", 4 * ID_BYTES)
    world = World()
    p = world.engine("p")
    refused = world.publish_refused(p, blocks={"kv": [1, 2, 3, 5], "state": [4]})
    assert isinstance(refused, PageCountError)
    assert "all lists have 5 blocks, but the limit for a handoff is 4" in refused.message
    world.publish(p, "fits")
    assert world.find("fits").publication.final


def test_a_state_after_one_token_and_one_of_which_d_holds_all_tokens_are_handed_over() -> None:
    for position, held in ((1, 0), (1, 1), (40, 40)):
        world, p, d = p_and_d()
        blocks = {"kv": [1, 2, 3][: -(-position // 16)], "state": [4]}
        world.ready(p, blocks=blocks, position=position)
        world.request(d, blocks={"kv": [11, 12, 13], "state": [14]}, held=held)
        world.settle(d, world.find().number)
        assert ends(d) == ends(p) == [("DONE", "")]
