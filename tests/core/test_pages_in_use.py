"""A block that a demand will have written stands in no other open word of its engine."""

from __future__ import annotations

import random
from unittest.mock import patch

import pytest
from hypothesis import given
from hypothesis import strategies as st

from core.world import BLOCK_TOKENS, World, alone, ends, p_and_d
from restow.broker.core.engines import blocks as pages_in_use
from restow.broker.errors import PageRepeatedError

MANY = list(range(100, 140))
"""More blocks than are looked at id by id."""
TAKEN = "engine d, group {}: block {} of handoff {} is .* by handoff {}, which has not ended"


def refused(group: str, block: int, mine: str, other: str) -> pytest.RaisesExc[PageRepeatedError]:
    return pytest.raises(PageRepeatedError, match=TAKEN.format(group, block, mine, other))


@pytest.mark.parametrize(
    ("blocks", "group", "block"),
    [
        ({"kv": [21, 12, 23], "state": [24]}, "kv", 12),
        ({"kv": [21, 22, 23], "state": [14]}, "state", 14),
        ({"kv": [*MANY, 13], "state": [24]}, "kv", 13),
    ],
)
def test_two_open_demands_do_not_name_one_block(
    blocks: dict[str, list[int]], group: str, block: int
) -> None:
    world, d = alone("d")
    world.request(d, "a", {"kv": [11, 12, 13], "state": [14]})
    with refused(group, block, "b", "a"):
        world.request(d, "b", blocks)
    assert not world.directory.ledger.known("t", "b")
    world.cancel(d, "a")
    world.request(d, "b", blocks)
    assert ends(d) == [("CANCELLED", "CANCELLED")]


def test_a_long_list_is_in_use_until_its_demand_has_ended() -> None:
    world, d = alone("d")
    world.request(d, "a", {"kv": MANY, "state": [14]})
    with refused("kv", MANY[-1], "b", "a"):
        world.request(d, "b", {"kv": MANY[-1:], "state": [24]})
    world.cancel(d, "a")
    world.request(d, "b", {"kv": MANY, "state": [14]})


def test_engines_have_blocks_of_their_own() -> None:
    world = World()
    for name in "de":
        world.request(world.engine(name), name, {"kv": [11, 12, 13], "state": [14]})


@pytest.mark.parametrize("blocks", [[12, 22, 23], [*MANY, 12]])
def test_a_demand_does_not_write_what_its_engine_has_published(blocks: list[int]) -> None:
    world, d = alone("d")
    world.publish(d, "a", {"kv": [11, 12, 13], "state": [14]})
    with refused("kv", 12, "b", "a"):
        world.request(d, "b", {"kv": blocks, "state": [24]})
    world.cancel(d, "a")
    world.request(d, "b", {"kv": blocks, "state": [24]})


def test_an_engine_does_not_publish_what_a_demand_of_its_will_have_written() -> None:
    world, d = alone("d")
    world.request(d, "a", {"kv": [11, 12, 13], "state": [14]})
    with refused("state", 14, "b", "a"):
        world.publish(d, "b", {"kv": [21, 22, 23], "state": [14]})
    assert not world.directory.ledger.known("t", "b")


def test_an_engine_does_not_copy_onto_its_own_blocks() -> None:
    # P and D of the handoff are one engine.
    world, d = alone("d")
    world.publish(d, "a", {"kv": [11, 12, 13], "state": [14]})
    with refused("kv", 13, "a", "a"):
        world.request(d, "a", {"kv": [13, 22, 23], "state": [24]})
    world.request(d, "a", {"kv": [21, 22, 23], "state": [24]})


def test_blocks_that_are_only_read_may_be_shared() -> None:
    world, d = alone("d")
    for number in range(3):
        world.publish(d, f"p{number}", {"kv": [1, 2, 30 + number], "state": [4]})
    for number in range(3):
        blocks = {"kv": [1, 2, 40 + number], "state": [40 + number]}
        world.request(d, f"d{number}", blocks, held=2 * BLOCK_TOKENS)
    with refused("kv", 2, "x", "p0"):
        world.request(d, "x", {"kv": [50, 2, 52], "state": [54]})


def test_a_held_prefix_is_not_written_until_its_demand_has_ended() -> None:
    world, d = alone("d")
    world.request(d, "a", {"kv": [11, 12, 13], "state": [14]}, held=2 * BLOCK_TOKENS)
    with refused("kv", 12, "b", "a"):
        world.request(d, "b", {"kv": [12, 22, 23], "state": [24]})
    world.cancel(d, "a")
    world.request(d, "b", {"kv": [12, 22, 23], "state": [24]})


def test_nobody_holds_what_another_demand_will_have_written() -> None:
    world, d = alone("d")
    world.request(d, "a", {"kv": [11, 12, 13], "state": [14]})
    with refused("kv", 11, "b", "a"):
        world.request(d, "b", {"kv": [11, 22, 23], "state": [24]}, held=BLOCK_TOKENS)


def test_a_block_that_is_held_in_part_is_written() -> None:
    world, d = alone("d")
    world.publish(d, "a", {"kv": [11, 12, 13], "state": [14]})
    with refused("kv", 12, "b", "a"):
        blocks = {"kv": [11, 12, 23], "state": [24]}
        world.request(d, "b", blocks, held=2 * BLOCK_TOKENS - 1)


def test_the_null_block_is_nobodys() -> None:
    world, d = alone("d")
    for name, at in (("a", 10), ("b", 20)):
        world.publish(d, f"{name}'", {"kv": [0, 0, at + 5], "state": [at + 6]})
        world.request(d, name, {"kv": [0, 0, at], "state": [at]})
        world.request(
            d, f"{name}2", {"kv": [0, 0, *MANY[2 * at - 20 : 2 * at - 3]], "state": [at + 1]}
        )


def test_blocks_of_a_demand_that_may_still_be_written_to_are_in_use() -> None:
    # The handoff has ended and a rank of D has not answered: the handoff is in quarantine.
    world, p, d = p_and_d()
    world.ready(p, "a")
    world.request(d, "a", {"kv": [11, 12, 13], "state": [14]})
    number = world.find("a").number
    world.cancel(p, "a")
    assert ends(d) == []
    with refused("kv", 11, "b", "a"):
        world.request(d, "b", {"kv": [11, 22, 23], "state": [24]})
    world.settle(d, number)
    assert ends(d) == [("CANCELLED", "CANCELLED")]
    world.request(d, "b", {"kv": [11, 22, 23], "state": [24]})


def test_each_chunk_of_a_publication_is_looked_at() -> None:
    world, d = alone("d")
    world.request(d, "a", {"kv": [11, 12, 13], "state": [14]})
    world.publish(d, "b", {"kv": [21]}, final=False)
    with refused("kv", 12, "b", "a"):
        world.publish(d, "b", {"kv": [12]}, first=1, final=False)
    world.publish(d, "b", {"kv": [22]}, first=1, final=False)
    with refused("kv", 22, "c", "b"):
        world.request(d, "c", {"kv": [22, 32, 33], "state": [34]})


def test_blocks_of_chunks_that_are_taken_back_are_free() -> None:
    world, d = alone("d")
    world.request(d, "a", {"kv": [11], "state": [14]})
    world.publish(d, "b", {"kv": [21, 22]}, final=False)
    world.publish(d, "b", {}, final=False, anew=True)
    world.request(d, "c", {"kv": [21, 32, 33], "state": [34]})
    with refused("kv", 22, "e", "b"):
        world.publish(d, "b", {"kv": [41, 22]}, final=False, anew=True)
        world.request(d, "e", {"kv": [51, 22, 53], "state": [54]})


@pytest.mark.parametrize("anew", [False, True], ids=["same broker", "new broker"])
def test_what_is_said_again_after_a_reconnect_is_taken(anew: bool) -> None:
    world = World()
    life = "life"
    d = world.engine("d", life=life)

    def say(again: bool) -> None:
        world.publish(d, "a", {"kv": [1, 2, 3], "state": [4]}, repeated=again)
        blocks = {"kv": [1, 12, 13], "state": [14]}
        world.request(d, "b", blocks, held=BLOCK_TOKENS, repeated=again, number=7)

    say(again=False)
    if anew:
        world = World()
        d = world.engine("d", life=life)
    say(again=True)
    say(again=True)
    assert ends(d) == []


def test_deliveries_have_blocks_of_their_own() -> None:
    world = World()
    d, e = world.engine("d"), world.engine("e")
    world.request(d, "a", {"kv": [11, 12, 13], "state": [14]}, readers=2)
    world.request(e, "a", {"kv": [11, 12, 13], "state": [14]}, readers=2)
    with refused("kv", 12, "b", "a"):
        world.request(d, "b", {"kv": [21, 12, 23], "state": [24]})
    world.cancel(d, "a")
    world.request(d, "b", {"kv": [21, 12, 23], "state": [24]})


def test_a_demand_becomes_a_delivery_with_its_blocks() -> None:
    world, p, d = p_and_d()
    world.request(d, "a", {"kv": [11, 12, 13], "state": [14]})
    world.publish(p, "a", readers=2)
    with refused("kv", 12, "b", "a"):
        world.request(d, "b", {"kv": [21, 12, 23], "state": [24]})
    world.cancel(d, "a")
    world.request(d, "b", {"kv": [21, 12, 23], "state": [24]})


def test_a_demand_that_is_refused_late_gives_its_blocks_back() -> None:
    world, p, d = p_and_d()
    world.request(d, "a", {"kv": [11, 12, 13], "state": [14]}, position=39)
    world.ready(p, "a")
    assert ends(d) == [("FAILED", "POSITION_MISMATCH")]
    world.request(d, "a", {"kv": [11, 12, 13], "state": [14]})


@given(seed=st.integers(0, 1 << 32))
def test_the_tables_say_what_sets_say(seed: int) -> None:
    """Check random publications, demands and ends, with numbers that soon begin anew."""
    rng = random.Random(seed)  # noqa: S311 - reproducible, not secret
    with (
        patch.object(pages_in_use, "FIRST_NUMBERS", 4),
        patch.object(pages_in_use, "FIRST_BLOCKS", 2),
    ):
        world = World()
        d = world.engine("d")
        written: dict[str, set[int]] = {}
        read: dict[str, set[int]] = {}
        for at in range(60):
            name, ids = f"h{at}", rng.sample(range(60), rng.choice((3, 20)))
            state, held = 100 + at, rng.choice((0, 0, 1, 2))
            stands = set().union(*written.values()) - {0}
            if rng.random() < 0.3 and written | read:
                ended = rng.choice([*written, *read])
                world.cancel(d, ended)
                written.pop(ended, None), read.pop(ended, None)
            elif rng.random() < 0.3:
                free = not stands & set(ids)
                said = {"kv": ids, "state": [state]}
                if free:
                    world.publish(d, name, said)
                    read[name] = set(ids)
                else:
                    with pytest.raises(PageRepeatedError):
                        world.publish(d, name, said)
            else:
                reads = set().union(*read.values()) - {0}
                free = not (stands & set(ids) or reads & set(ids[held:]))
                said, held_tokens = {"kv": ids, "state": [state]}, held * BLOCK_TOKENS
                if free:
                    world.request(d, name, said, held=held_tokens)
                    written[name] = set(ids[held:])
                    read[name] = set(ids[:held])
                else:
                    with pytest.raises(PageRepeatedError):
                        world.request(d, name, said, held=held_tokens)
