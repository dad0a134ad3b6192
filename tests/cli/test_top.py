"""`restow top`: figures of what was seen, and a screen that shows them at every width."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import pytest
from rich.text import Text
from textual.widgets import DataTable, Static

from broker.fakes import P_BLOCKS, POSITION, broker, pair
from restow.broker.cli.commands.top import look_at
from restow.broker.cli.views.tables import chart_lines
from restow.broker.cli.views.top_screen import Top
from restow.broker.cli.views.top_view import Look, chosen, headline, pair_rows, trend_lines
from restow.broker.client.admin import AdminClient
from restow.broker.client.connection.errors import BrokerUnreachableError
from restow.broker.display.documents import handoffs_json
from restow.broker.display.rows import charts
from restow.v1 import admin_pb2 as pb
from restow.v1 import broker_pb2

SIZES = [(80, 24), (200, 50)]


def handoff(number: int, **more: Any) -> dict[str, Any]:
    """Return a handoff under way as its document, but for some fields."""
    info = pb.HandoffInfo(
        handoff_id=f"request-{number:04}",
        state=broker_pb2.HANDOFF_STATE_WAITING,
        source_engine="prefill-1",
        position_tokens=8192,
        age_s=number % 60,
        waits_for="ranks [0, 1] of engine prefill-1 have not fenced it",
        lease_s=30.0 - number % 60 / 2,
        tenant="default",
    )
    listed = handoffs_json(pb.ListHandoffsResponse(handoffs=[info]))
    return {**listed["handoffs"][0], **more}


def done(number: int, source: str, size_bytes: int, transfer_s: float) -> dict[str, Any]:
    return handoff(
        number,
        state="DONE",
        source_engine=source,
        destination_engine="decode-1",
        bytes=size_bytes,
        transfer_s=transfer_s,
        lease_s=None,
        waits_for=None,
    )


def ended_step(done: int, failed: int = 0, **more: Any) -> dict[str, Any]:
    seconds = {"p50_s": 0.1, "p99_s": 0.5} if done else {"p50_s": None, "p99_s": None}
    return {"done": done, "failed": failed, "cancelled": 0, "bytes": done << 20, **seconds, **more}


def between(source: str, bytes_per_second: float | None, **more: Any) -> dict[str, Any]:
    names = {"tenant": "t", "source_engine": source, "destination_engine": "decode-1"}
    return {**ended_step(3), **names, "bytes_per_second": bytes_per_second, **more}


def traffic(*pairs: dict[str, Any]) -> dict[str, Any]:
    steps = [ended_step(number % 7, number // 80) for number in range(90)]
    return {"step_s": 10.0, "steps": steps, "pairs": list(pairs), "pairs_left_out": 0}


def look(handoffs: list[dict[str, Any]], pairs: Sequence[dict[str, Any]] = (), **more: Any) -> Look:
    status = {
        "broker": "127.0.0.1:7350",
        "broker_epoch": "first",
        "uptime_s": 75.0,
        "agents": 12,
        "handoffs_live": sum(one["state"] != "DONE" for one in handoffs),
        "handoffs_quarantined": 3,
        "handoffs_ended": {"DONE": 150, "FAILED": 0, "EXPIRED": 1, "CANCELLED": 0},
        "draining": False,
        "membership": None,
        **more,
    }
    engines = [{"session": True, "agents": agents, "ranks": 4} for agents in (4, 4, 3)]
    return Look(status, engines, handoffs, traffic(*pairs))


def told(seen: Look) -> dict[str, str]:
    """Return the figures by title."""
    return {one.title: one.text for one in headline(seen)}


def test_figures_are_of_the_broker_and_of_the_last_step_that_is_over() -> None:
    steps = [ended_step(7), ended_step(250, failed=10), ended_step(1)]
    seen = look([])
    found = told(replace(seen, traffic={**seen.traffic, "steps": steps}))
    assert (found["ended"], found["read"]) == ("26.0/s", "25.0 MiB/s")
    assert (found["engines ready"], found["agents"]) == ("2 of 3", "11")
    assert (found["DONE"], found["EXPIRED"], found["quarantine"]) == ("150", "1", "3")
    bad = {one.title for one in headline(seen) if one.bad}
    assert bad == {"engines ready", "quarantine", "EXPIRED"}
    for few in ([], steps[:1]):
        assert told(replace(seen, traffic={**seen.traffic, "steps": few}))["ended"] == "-"
    assert "draining" not in found
    assert "draining" in told(look([], draining=True))
    assert found["broker"] == "127.0.0.1:7350, up 1 min 15 s"
    one = {"brokers": 3, "expected": 3, "leads": True, "leader": "h:1", "epoch": 7, "let_in": True}
    among = look([], membership={**one, "still_s": None, "trouble": None, "warnings": []})
    assert "leads in epoch 7; there are 3 of 3 brokers" in told(among)["broker"]


def holding(name: str, blocks: int, snapshots: int) -> dict[str, Any]:
    attention = {"group": "a", "count": blocks, "block_tokens": 16, "window_tokens": None}
    window = {"group": "w", "count": 1, "block_tokens": 16, "window_tokens": 64}
    state = {"group": "s", "count": snapshots, "block_tokens": None, "window_tokens": None}
    return {"engine_id": name, "groups": [attention, window, state]}


def test_who_holds_most_is_told() -> None:
    assert "held" not in told(look([]))
    three = [holding("p", 3, 1), holding("store", 512, 40), holding("d", 2, 2)]
    seen = replace(look([]), holdings=three)
    found = told(seen)["held"]
    assert found == "store 8192 tokens, 40 snapshots; p 48 tokens, 1 snapshot; 1 more"


def test_the_oldest_come_first_and_the_shortest_lease_is_told() -> None:
    seen = look([handoff(3), handoff(50), handoff(7), done(1, "prefill-1", 1, 1.0)])
    ids = [one["handoff_id"] for one in chosen(seen)]
    assert ids == [f"request-{n:04}" for n in (50, 7, 3)]
    assert told(seen)["shortest lease"] == "5.0 s"
    assert told(look([]))["shortest lease"] == "-"


def test_the_slowest_pair_by_the_byte_comes_first() -> None:
    # The rates are those of the broker's own counts: which handoffs are listed does not matter.
    slow = between("slow", 37.5 * 2**20, failed=2, bytes=30 << 20)
    seen = look([handoff(9)], pairs=[between("fast", 1000.0 * 2**20), slow])
    assert pair_rows(seen) == [
        ("slow", "decode-1", "37.5 MiB/s", "100 ms", "500 ms", "3", "2", "30.0 MiB"),
        ("fast", "decode-1", "1000.0 MiB/s", "100 ms", "500 ms", "3", "-", "3.0 MiB"),
    ]
    assert "pairs" not in told(seen)
    more = replace(seen, traffic={**seen.traffic, "pairs_left_out": 7})
    assert told(more)["pairs"] == "the busiest 2 of 9"
    assert [row[0] for row in pair_rows(seen, "FAST 1")] == ["fast"]


def test_rows_are_filtered_by_words_and_sorted_by_a_column() -> None:
    seen = look([handoff(3), handoff(50), handoff(7, state="READY"), handoff(8, lease_s=None)])
    ids = [one["handoff_id"][-2:] for one in chosen(seen, order="lease")]
    assert ids == ["50", "07", "03", "08"]
    assert [one["handoff_id"][-2:] for one in chosen(seen, "ready PREFILL")] == ["07"]
    assert not chosen(seen, "nobody")


@pytest.mark.parametrize("width", [60, 78, 198])
def test_bars_fit(width: int) -> None:
    lines = trend_lines(traffic(), width)
    assert max(map(len, lines)) <= width
    whole = " ".join(lines)
    for words in ("ended", "top 0.7/s", "read", "p50", "p99", "top 500 ms", "failed", "top 1"):
        assert words in whole
    assert trend_lines({"steps": []}, width) == []


def shown(app: Top, name: str) -> list[list[str]]:
    table = app.query_one(f"#{name}", DataTable)
    return [[str(cell) for cell in table.get_row_at(row)] for row in range(table.row_count)]


@pytest.mark.parametrize("size", SIZES, ids=str)
@pytest.mark.parametrize("count", [0, 1, 500])
async def test_every_size_and_number(size: tuple[int, int], count: int) -> None:
    named = [handoff(n, handoff_id=f"{n:04}-{'long' * 20}") for n in range(count)]
    seen = look(named, pairs=[between("fast", 9.0)])
    app = Top(lambda: seen, every_s=60.0)
    async with app.run_test(size=size) as pilot:
        await app.look()
        await pilot.pause()
        rows = shown(app, "handoffs")
        names = [one["handoff_id"] for one in chosen(seen)]
        assert all(name.startswith(row[0]) for row, name in zip(rows, names, strict=True))
        assert len({row[0] for row in rows}) == count
        assert all(len(row) == (9 if size[0] == 200 else 7) for row in rows)
        assert [row[0] for row in shown(app, "pairs")] == ["fast"]
        figures = str(app.query_one("#figures", Static).render())
        assert "engines ready 2 of 3" in figures
        assert max(map(len, figures.splitlines())) <= size[0] - 2
        assert any(f"under way {count}" in line for line in figures.splitlines())
        # No id is so long that the columns beside it leave the screen.
        assert app.query_one("#handoffs", DataTable).virtual_size.width <= size[0]
        # Everything is on the screen, under each other.
        parts = ("figures", "trends", "handoffs", "pairs")
        places = [app.query_one(f"#{name}").region for name in parts]
        assert all(one.width == size[0] and one.height > 0 for one in places)
        assert [one.y for one in places] == sorted(one.y for one in places)
        assert places[-1].bottom < size[1]


async def test_markup_in_a_name_is_text() -> None:
    name = "[@click=app.quit]p[/][bold"
    named = handoff(1, handoff_id=name), handoff(2, source_engine=name)
    seen = look(list(named), pairs=[between(name, 9.0)])
    app = Top(lambda: seen, every_s=60.0)
    async with app.run_test(size=(200, 50)) as pilot:
        await app.look()
        await pilot.pause()
        assert name in shown(app, "handoffs")[0] + shown(app, "handoffs")[1]
        cells = [*app.query_one("#handoffs", DataTable).get_row_at(0)]
        assert all(isinstance(cell, Text) and not cell.spans for cell in cells)
        assert shown(app, "pairs")[0][0] == name


async def test_a_reader_stays_where_it_is_while_figures_change() -> None:
    handoffs = [handoff(n) for n in range(100)]
    app = Top(lambda: look(handoffs), every_s=60.0)
    async with app.run_test(size=(80, 24)) as pilot:
        await app.look()
        for _ in range(40):
            await pilot.press("down")
        await pilot.pause()
        table = app.query_one("#handoffs", DataTable)
        before = table.cursor_row, table.scroll_y
        assert before[0] == 40
        await app.look()
        await pilot.pause()
        assert (table.cursor_row, table.scroll_y) == before


async def test_keys_filter_sort_and_open_one() -> None:
    handoffs = [handoff(n, source_engine=f"prefill-{n % 3}") for n in range(9)]
    asked: list[tuple[str, str]] = []

    def get_handoff(tenant: str, handoff_id: str) -> dict[str, Any]:
        asked.append((tenant, handoff_id))
        span = {"source_rank": None, "bytes": 3 << 20, "over": True, "end_ms": 60.0}
        spans = [
            {**span, "kind": "wait", "rank": None, "bytes": None, "begin_ms": 0.0, "end_ms": 50.0},
            {**span, "kind": "read", "rank": 0, "begin_ms": 50.0},
        ]
        more = {
            "content": "not named",
            "spans": spans,
            "deliveries": [],
            "timeline": [],
            "reason": None,
        }
        return {**handoffs[0], **more, "handoff_id": handoff_id}

    app = Top(lambda: look(handoffs), every_s=60.0, get_handoff=get_handoff)
    async with app.run_test(size=(100, 30)) as pilot:
        await app.look()
        await pilot.press("/", *"prefill-2", "enter")
        await pilot.pause()
        assert [row[0][-1] for row in shown(app, "handoffs")] == ["8", "5", "2"]
        await pilot.press("s")
        await pilot.pause()
        assert [row[0][-1] for row in shown(app, "handoffs")] == ["8", "5", "2"]
        assert "sorted lease" in str(app.query_one("#figures", Static).render())
        await pilot.press("down", "enter")
        while not asked:
            await pilot.pause(0.02)
        await pilot.pause()
        assert asked[0] == ("default", "request-0005")
        await app.look()  # the tables below go on
        await pilot.press("escape")
        await pilot.pause()
        await pilot.press("escape")
        await pilot.pause()
        assert len(shown(app, "handoffs")) == 9


def test_a_gantt_chart_fits_and_has_each_rank() -> None:
    base = {"source_rank": None, "bytes": None, "over": True}
    staged = {**base, "kind": "stage", "source_rank": 0}
    spans = [
        {**base, "kind": "wait", "rank": None, "begin_ms": 0.0, "end_ms": 5000.0},
        {**base, "kind": "grant", "rank": None, "begin_ms": 5000.0, "end_ms": 5001.0},
        {**staged, "rank": 1, "begin_ms": 5001.0, "end_ms": 5010.0},
        {**base, "kind": "read", "rank": 0, "begin_ms": 5001.0, "end_ms": 5021.0, "bytes": 3 << 20},
        {**base, "kind": "read", "rank": 1, "begin_ms": 5010.0, "end_ms": 5021.0, "over": False},
    ]
    for width in (40, 80, 100):
        drawn = charts({"spans": spans, "bytes": 3 << 20})
        lines = [line.plain for chart in drawn for line in chart_lines(chart, width)]
        assert max(map(len, lines)) <= max(width, 18 + 10 + 2 + 24)
        assert lines[0] == "the whole, 5.0 s"
        assert "from the grant on, 20 ms" in lines
        assert any(line.startswith("stage P0 for D1") for line in lines)
        assert any(line.endswith("20 ms, 3.0 MiB") and "\N{FULL BLOCK}" in line for line in lines)
        assert any(line.endswith("11 ms so far") and "\N{MEDIUM SHADE}" in line for line in lines)


async def test_of_a_broker_that_is_gone_the_last_is_shown() -> None:
    answers: list[Callable[[], Look]] = [lambda: look([handoff(1)])]
    app = Top(lambda: answers[-1](), every_s=60.0)

    def gone() -> Look:
        raise BrokerUnreachableError("no broker answers at 127.0.0.1:7350")

    async with app.run_test(size=(80, 24)) as pilot:
        await app.look()
        answers.append(gone)
        await app.look()
        await pilot.pause()
        await pilot.press("s")
        await pilot.pause()
        assert "BROKER_UNREACHABLE" in str(app.query_one("#figures", Static).render())
        assert [row[0] for row in shown(app, "handoffs")] == ["request-0001"]


async def test_it_stands_still_when_paused() -> None:
    looks: list[int] = []

    def seen() -> Look:
        looks.append(1)
        return look([])

    app = Top(seen, every_s=0.02)
    async with app.run_test(size=(80, 24)) as pilot:
        while len(looks) < 3:
            await pilot.pause(0.02)
        await pilot.press("p")
        await pilot.pause(0.1)
        still = len(looks)
        await pilot.pause(0.2)
        assert len(looks) == still
        await pilot.press("p")
        while len(looks) == still:
            await pilot.pause(0.02)


async def test_beside_a_real_broker() -> None:
    async with broker() as running, pair(running.address, 1, 1) as both:
        with AdminClient(running.address) as client:
            both.p.publish("waits", P_BLOCKS, POSITION)
            await both.hand_over("done")
            app = Top(lambda: look_at(client), every_s=60.0)
            async with app.run_test(size=(200, 50)) as pilot:
                await app.look()
                await pilot.pause()
                (row,) = shown(app, "handoffs")
                assert [row[0], row[1], row[4]] == ["waits", "WAITING", "p"]
                assert row[-1] == "ranks [0] of engine p have not fenced it"
                assert [shown(app, "pairs")[0][at] for at in (0, 1, 5)] == ["p", "d", "1"]
            of_all = await asyncio.to_thread(look_at, client, all_tenants=True)
            assert [row[:2] for row in pair_rows(of_all)] == [("default/p", "default/d")]
            assert [one["source_engine"] for one in of_all.live] == ["default/p"]
