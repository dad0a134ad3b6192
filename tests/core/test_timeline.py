"""Timelines: what they keep of a handoff's story, and how they say it."""

from __future__ import annotations

import pytest

from core.world import alone, p_and_d
from restow.broker.core.handoffs import timeline
from restow.broker.core.handoffs.timeline import Timeline, in_words


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


def test_the_timeline_says_how_long_a_handoff_waited_for_its_plan() -> None:
    world, p, d = p_and_d()
    world.plans_at_once = False
    world.begin(p, d)
    world.now_s += 0.4
    world.plan()
    told = [(event, detail) for _, event, detail in world.find().timeline]
    assert [event for event, _ in told].count("waits for a plan") == 1
    assert [detail for event, detail in told if event == "planned"] == [pytest.approx(0.4)]


def test_a_wait_is_noted_when_it_begins_and_when_it_ends() -> None:
    story = Timeline()
    story.note_planned(1.0)
    assert not story.waits_for_plan
    for at_s in (2.0, 3.0):
        story.note_wait_for_plan(at_s)
        story.note(at_s, "renewed")
    assert story.waits_for_plan
    story.note_planned(5.0)
    assert not story.waits_for_plan
    assert [entry for entry in story if entry[1] != "renewed"] == [
        (2.0, "waits for a plan", ""),
        (5.0, "planned", 3.0),
    ]
    story.note_wait_for_plan(6.0)
    assert story.waits_for_plan


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
        ("planned", 0.25, "after 0.250 s"),
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
