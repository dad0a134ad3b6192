"""Timelines: what they keep of a handoff's story, and how they say it."""

from __future__ import annotations

import pytest

from core.test_probing import SECONDS, answer, probes
from core.world import World, alone
from restow.broker.core.handoffs import timeline
from restow.broker.core.handoffs.timeline import COSTS, PLAN, Timeline, in_words


def test_a_story_does_not_grow_with_what_a_side_repeats() -> None:
    world, p = alone("p")
    world.publish(p, blocks={}, final=False)
    for _round in range(50):
        world.now_s += 1.0
        world.renew(p)
        world.publish(p, blocks={}, final=False)
        world.find().timeline.note_refused(world.now_s, "p", "PAGE_COUNT", "x" * 10_000)
    entries = world.find().timeline
    assert len(entries) <= 3 * timeline.MAX_OFTEN
    assert max(len(str(one)) for one in entries) < 2 * timeline.MAX_WORDS
    renewed_s = [at_s for at_s, event, _ in entries if event == "renewed"]
    assert renewed_s == [1001.0, *(1000.0 + at for at in range(44, 51))], "the first and the latest"


def test_a_long_story_keeps_its_beginning_and_its_end() -> None:
    world, p = alone("p")
    world.publish(p, blocks={}, final=False)
    for _round in range(300):
        world.fence(p)
    world.cancel(p)
    assert len(world.events()) == timeline.MAX_ENTRIES
    assert (world.events()[0], world.events()[-1]) == ("published", "ended")


def test_the_timeline_says_how_long_a_handoff_waited() -> None:
    world = World(measures=True)
    world.plans_at_once = False
    p, d = (world.engine(name, host=f"host-{name}") for name in "pd")
    world.begin(p, d)
    world.now_s += 0.4
    world.plan()
    world.now_s += 0.1
    number = probes(world)[0].number
    answer(world, p, number)
    answer(world, d, number, seconds=SECONDS)
    world.now_s += 0.3
    world.plan()
    told = [(event, detail) for _, event, detail in world.find().timeline]
    waits = [one for one in told if one[0] in ("planned", "measured")]
    assert [event for event, _ in waits] == ["planned", "measured", "planned"]
    assert [detail[0] for _, detail in waits] == pytest.approx([0.4, 0.1, 0.3])  # type: ignore[index]
    assert [event for event, _ in told].count("waits for a plan") == 2


@pytest.mark.parametrize("wait", [PLAN, COSTS])
def test_a_wait_is_noted_when_it_begins_and_when_it_ends(wait: tuple[str, str]) -> None:
    other = COSTS if wait is PLAN else PLAN
    story = Timeline()
    story.note_waited(1.0, wait)
    assert not story.waits(wait)
    for at_s in (2.0, 3.0):
        story.note_wait(at_s, wait)
        story.note(at_s, "renewed")
    assert (story.waits(wait), story.waits(other)) == (True, False)
    story.note_waited(5.0, other)
    story.note_waited(5.0, wait, "TIMEOUT")
    assert not story.waits(wait)
    assert [one for one in story if one[1] != "renewed"] == [
        (2.0, wait[0], ""),
        (5.0, wait[1], (3.0, "TIMEOUT")),
    ]
    story.note_wait(6.0, wait)
    assert story.waits(wait)


@pytest.mark.parametrize(
    ("event", "detail", "words"),
    [
        ("published", 40, "whole, at position 40"),
        ("published", "a chunk", "a chunk"),
        ("fenced", 1, "rank 1"),
        ("fenced early", (1, 16), "rank 1, 16 tokens"),
        ("read early", 16, "up to token 16"),
        ("requested", 8, "holding 8 tokens"),
        ("looked up", (2, 48), "engines that hold its 48 tokens: 2"),
        ("granted", (2.5, ()), "for 2.500 s"),
        ("granted", (2.5, ("slices", "pack")), "for 2.500 s, by slices and pack"),
        ("planned", (0.25, ""), "after 0.250 s"),
        ("measured", (0.25, "TIMEOUT"), "after 0.250 s, without success: TIMEOUT"),
        ("staged", (1, 0), "rank 1 gathered for rank 0"),
        ("refused", ("PAGE_COUNT", "d", "few"), "PAGE_COUNT to d: few"),
        ("settled", (1, 7, 5), "rank 1 read 7 bytes in 5 us"),
        ("ready", "", ""),
    ],
)
def test_an_entry_is_said_in_words(event: str, detail: object, words: str) -> None:
    assert in_words(event, detail) == words


def test_the_last_refusal_is_told() -> None:
    story = Timeline()
    assert story.refusal == ""
    for reason in ("PAGE_COUNT", "NULL_BLOCK"):
        story.note_refused(1.0, "d", reason, "x" * 1000)
    assert story.refusal == "NULL_BLOCK to d: " + "x" * timeline.MAX_WORDS
