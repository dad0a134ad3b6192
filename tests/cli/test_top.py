"""`restow top`: figures of what was seen, and a screen that shows them at every width."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import pytest
from rich.text import Text
from textual.widgets import DataTable, Static

from broker.fakes import P_BLOCKS, POSITION, broker, pair
from restow.broker.cli.views import admin_json
from restow.broker.cli.views.top_app import Top
from restow.broker.cli.views.top_tables import Look, handoff_rows, headline, pair_rows
from restow.broker.client.admin import AdminClient
from restow.broker.client.errors import BrokerUnreachableError

SIZES = [(80, 24), (200, 50)]


def handoff(number: int, **more: Any) -> dict[str, Any]:
    return {
        "handoff_id": f"request-{number:04}",
        "state": "WAITING",
        "source_engine": "prefill-1",
        "destination_engine": None,
        "position_tokens": 8192,
        "bytes": 0,
        "age_s": float(number % 60),
        "waits_for": "ranks [0, 1] of engine prefill-1 have not fenced it",
        "lease_s": 30.0 - number % 60 / 2,
        "transfer_s": None,
        **more,
    }


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


def look(at_s: float, handoffs: list[dict[str, Any]], ended: int = 0, **more: Any) -> Look:
    status = {
        "broker": "127.0.0.1:7350",
        "broker_epoch": "first",
        "uptime_s": 75.0,
        "agents": 12,
        "handoffs_live": sum(one["state"] != "DONE" for one in handoffs),
        "handoffs_quarantined": 3,
        "handoffs_ended": {"DONE": ended, "FAILED": 0, "EXPIRED": 1, "CANCELLED": 0},
        "bytes_read": ended * (1 << 20),
        "draining": False,
        **more,
    }
    engines = [{"session": True, "agents": agents, "ranks": 4} for agents in (4, 4, 3)]
    return Look(at_s, status, engines, handoffs)


def test_rates_are_those_between_two_looks_at_one_life() -> None:
    before, now = look(10.0, [], ended=100), look(12.0, [], ended=150)
    found = dict(headline(before, now))
    assert (found["ends"], found["read"]) == ("25.0/s", "25.0 MiB/s")
    assert found["engines"] == "2 of 3 ready, 11 agents"
    assert found["ended"] == "150 DONE, 1 EXPIRED"
    for earlier in (None, look(10.0, [], ended=100, broker_epoch="another"), now):
        assert dict(headline(earlier, now))["ends"] == "-"
    assert "draining" not in found
    assert "draining" in dict(headline(None, look(1.0, [], draining=True)))


def test_the_oldest_come_first_and_the_shortest_lease_is_told() -> None:
    seen = look(1.0, [handoff(3), handoff(50), handoff(7), done(1, "prefill-1", 1, 1.0)])
    assert [row[0] for row in handoff_rows(seen)] == [f"request-{n:04}" for n in (50, 7, 3)]
    assert dict(headline(None, seen))["shortest lease"] == "5.0 s"
    assert dict(headline(None, look(1.0, [])))["shortest lease"] == "-"


def test_the_slowest_pair_by_the_byte_comes_first() -> None:
    seen = look(
        1.0,
        [
            *(done(n, "fast", 100 << 20, 0.1) for n in range(3)),
            *(done(n, "slow", 10 << 20, seconds) for n, seconds in enumerate((0.1, 0.5, 0.2))),
            handoff(9),
        ],
    )
    assert pair_rows(seen) == [
        ("slow", "decode-1", "37.5 MiB/s", "200 ms", "500 ms", "3"),
        ("fast", "decode-1", "1000.0 MiB/s", "100 ms", "100 ms", "3"),
    ]


def shown(app: Top, name: str) -> list[list[str]]:
    table = app.query_one(f"#{name}", DataTable)
    return [[str(cell) for cell in table.get_row_at(row)] for row in range(table.row_count)]


@pytest.mark.parametrize("size", SIZES, ids=str)
@pytest.mark.parametrize("count", [0, 1, 500])
async def test_every_size_and_number(size: tuple[int, int], count: int) -> None:
    named = [handoff(n, handoff_id=f"{n:04}-{'long' * 20}") for n in range(count)]
    seen = look(1.0, named + [done(n, "fast", 9, 1) for n in range(5)])
    app = Top(lambda: seen, every_s=60.0)
    async with app.run_test(size=size) as pilot:
        await app.look()
        await pilot.pause()
        rows = shown(app, "handoffs")
        names = [row[0] for row in handoff_rows(seen)]
        assert all(name.startswith(row[0]) for row, name in zip(rows, names, strict=True))
        assert len({row[0] for row in rows}) == count
        assert all(len(row) == (8 if size[0] == 200 else 7) for row in rows)
        assert [row[0] for row in shown(app, "pairs")] == ["fast"]
        figures = str(app.query_one("#figures", Static).render())
        assert "2 of 3 ready" in figures
        assert max(map(len, figures.splitlines())) <= size[0] - 2
        assert any(f"live {count}" in line for line in figures.splitlines())
        # No id is so long that the columns beside it leave the screen.
        assert app.query_one("#handoffs", DataTable).virtual_size.width <= size[0]
        # Everything is on the screen, under each other.
        places = [app.query_one(f"#{name}").region for name in ("figures", "handoffs", "pairs")]
        assert all(one.width == size[0] and one.height > 0 for one in places)
        assert [one.y for one in places] == sorted(one.y for one in places)
        assert places[-1].bottom < size[1]


async def test_markup_in_a_name_is_text() -> None:
    name = "[@click=app.quit]p[/][bold"
    named = handoff(1, handoff_id=name), handoff(2, source_engine=name)
    seen = look(1.0, [*named, done(3, name, 9, 1)])
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
    app = Top(lambda: look(1.0, handoffs), every_s=60.0)
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


async def test_of_a_broker_that_is_gone_the_last_is_shown() -> None:
    answers: list[Callable[[], Look]] = [lambda: look(1.0, [handoff(1)])]
    app = Top(lambda: answers[-1](), every_s=60.0)

    def gone() -> Look:
        raise BrokerUnreachableError("no broker answers at 127.0.0.1:7350")

    async with app.run_test(size=(80, 24)) as pilot:
        await app.look()
        answers.append(gone)
        await app.look()
        await pilot.pause()
        assert "BROKER_UNREACHABLE" in str(app.query_one("#figures", Static).render())
        assert [row[0] for row in shown(app, "handoffs")] == ["request-0001"]


async def test_it_stands_still_when_paused() -> None:
    looks: list[int] = []

    def seen() -> Look:
        looks.append(1)
        return look(float(len(looks)), [])

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

            def seen() -> Look:
                return Look(
                    time.monotonic(),
                    admin_json.status_json(client.status(), client.address),
                    admin_json.engines_json(client.engines())["engines"],
                    admin_json.handoffs_json(client.handoffs(limit=1000))["handoffs"],
                )

            both.p.publish("waits", P_BLOCKS, POSITION)
            await both.hand_over("done")
            app = Top(seen, every_s=60.0)
            async with app.run_test(size=(200, 50)) as pilot:
                await app.look()
                await pilot.pause()
                (row,) = shown(app, "handoffs")
                assert [row[0], row[1], row[4]] == ["waits", "WAITING", "p"]
                assert row[-1] == "ranks [0] of engine p have not fenced it"
                assert [shown(app, "pairs")[0][at] for at in (0, 1, -1)] == ["p", "d", "1"]
