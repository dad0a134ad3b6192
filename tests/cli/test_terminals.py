"""What commands show at 80 columns, at 200 and in a pipe: nothing that can't be copied and used."""

from __future__ import annotations

import asyncio
import json
import signal
import subprocess
import uuid
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import Any

import pytest
import yaml
from typer.testing import CliRunner, Result

from broker.fakes import D_BLOCKS, P_BLOCKS, POSITION, Pair, broker, pair
from cli.terminals import COMMAND, STYLES, asked_on_terminal, environment, on_terminal
from restow.broker.cli.main import app

UUIDS = [str(uuid.uuid5(uuid.NAMESPACE_DNS, str(number))) for number in range(3)]
LONG = ["request-0001-of-a-long-name-that-was-lengthened-a", "request-0001-of-a-long-name-that-was"]
WAITS = "waits-for-d-28dc0fcc-4acc-4390-870f-a19954a50eca"


@asynccontextmanager
async def some() -> AsyncIterator[tuple[str, Pair]]:
    """Yield a broker's address and a pair.

    Several handoffs have ended, one of them because nobody published it, and another handoff waits.
    """
    async with broker() as running, pair(running.address, 2, 1) as both:
        for name in (*UUIDS, *LONG):
            await both.hand_over(name)
        await both.d.request("request-4711", D_BLOCKS, timeout_ms=50)
        both.p.publish(WAITS, P_BLOCKS, POSITION)
        await both.hand_over("last")  # sessions keep their order: what waits is known by now
        yield running.address, both


def run(address: str, *arguments: str, columns: int | None = None) -> Result:
    """Run a command in this process: on a terminal of ``columns`` columns, or into a pipe."""
    terminal = {"COLUMNS": str(columns), "FORCE_COLOR": "1"} if columns else {"COLUMNS": "80"}
    env = {"RESTOW_BROKER": address, **terminal}
    return CliRunner(env=env).invoke(app, list(arguments))


async def aside(call: Callable[..., Any], *arguments: Any, **more: Any) -> Any:
    return await asyncio.to_thread(call, *arguments, **more)


async def out(address: str, *arguments: str, columns: int | None = None) -> str:
    done = await aside(run, address, *arguments, columns=columns)
    assert done.exit_code == 0, done.output
    return STYLES.sub("", done.stdout)


async def test_what_a_narrow_terminal_shows_of_an_id_is_enough_to_name_it() -> None:
    async with some() as (address, _):
        shown = await aside(on_terminal, "handoffs", "--broker", address, columns=80)
        lines = shown.splitlines()
        assert max(map(len, lines)) <= 80
        assert lines[0].split()[:4] == ["handoff", "state", "reason", "from"]
        whole = (await out(address, "handoffs", "-o", "name")).split()
        beginnings = [line.split()[0] for line in lines[1 : 1 + len(whole)]]
        for beginning, name in zip(beginnings, whole, strict=True):
            found = json.loads(await out(address, "handoff", beginning, "--json"))
            assert found["handoff_id"] == name
        assert len(beginnings[0]) < len(WAITS)
        assert "NOT_PUBLISHED" in shown
        assert "…" not in shown


@pytest.mark.parametrize("command", ["handoffs", "leases", "engines", "agents", "costs"])
async def test_nothing_is_cut_in_a_pipe(command: str) -> None:
    async with some() as (address, both):
        for options in ((), ("-o", "wide")):
            shown = await out(address, command, *options)
            assert "…" not in shown
            assert not any(line.endswith(" ") for line in shown.splitlines())
            if command == "handoffs":
                assert all(name in shown.split() for name in (*UUIDS, *LONG, WAITS))
                assert " 100 B" in shown
                assert ("nobody published it" in shown) == bool(options)
            if command == "leases":
                assert f"{WAITS}  " in shown
                assert shown.splitlines()[1].endswith("ranks [0, 1] of engine p have not fenced it")
            if command == "engines":
                assert both.p.ref.incarnation in shown


async def test_a_wide_terminal_has_room_for_more() -> None:
    async with some() as (address, _):
        shown = await aside(on_terminal, "handoffs", "--broker", address, columns=200)
        assert "nobody published it" in shown
        assert WAITS in shown
        assert "beginnings of ids" not in shown
        assert max(map(len, shown.splitlines())) <= 200
        wide = await aside(on_terminal, "handoffs", "-o", "wide", "--broker", address, columns=80)
        assert WAITS in wide
        assert wide.splitlines()[0].split()[-3:] == ["lease", "by", "detail"]


async def test_a_beginning_names_one_handoff_or_none() -> None:
    async with some() as (address, _):
        assert (await out(address, "handoff", "request-4")).startswith("request-4711  EXPIRED")
        assert (await out(address, "handoff", LONG[1])).startswith(f"{LONG[1]}  DONE")
        several = await aside(run, address, "handoff", "request-", "-o", "json")
        assert getattr(several.exception, "reason", None) == "HANDOFF_AMBIGUOUS"
        assert "a beginning of the ids of 3 handoffs: request-4711, " in str(several.exception)
        none = await aside(run, address, "handoff", "nothing")
        assert getattr(none.exception, "reason", None) == "HANDOFF_UNKNOWN"
        listed = json.loads(await out(address, "handoffs", "request-0001", "--json"))
        assert {one["handoff_id"] for one in listed["handoffs"]} == set(LONG)
        _, asked = await aside(
            asked_on_terminal, "release", "waits", "--broker", address, typed="y\n"
        )
        assert f"Handoff {WAITS} is WAITING" in " ".join(asked.split())
        ended = json.loads(await out(address, "handoff", WAITS, "--json"))
        assert ended["reason"] == "RELEASED"
        assert (await aside(run, address, "release", "request-", "--yes")).exit_code == 1


@pytest.mark.parametrize("command", ["status", "engines", "agents", "handoffs", "leases", "costs"])
async def test_one_value_in_every_form(command: str) -> None:
    async with some() as (address, _):
        found = json.loads(await out(address, command, "--json"))
        again = json.loads(await out(address, command, "-o", "json"))
        read = yaml.safe_load(await out(address, command, "--output=yaml"))
        assert found.keys() == again.keys() == read.keys()
        assert type(next(iter(found.values()))) is type(next(iter(read.values())))
        gotten = await out(
            address, *(("get",) if command != "status" else ()), command, "-o", "json"
        )
        assert json.loads(gotten).keys() == found.keys()
        names = await aside(run, address, command, "-o", "name")
        if command in ("status", "costs"):
            assert names.exit_code == 2
        else:
            key = {"engines": "engine_id", "agents": "agent_name"}.get(command, "handoff_id")
            assert names.stdout.split() == [one[key] for one in found[command]]


@pytest.mark.parametrize("form", ["json", "yaml"])
async def test_errors_have_the_form_that_was_asked_for(form: str, fail: Callable[..., Any]) -> None:
    outcome = fail("status", "-o", form, "--broker", "127.0.0.1:1")
    assert outcome.code == 3
    error = yaml.safe_load(outcome.out)["error"]  # JSON is YAML
    assert (error["status"], error["reason"]) == ("UNAVAILABLE", "BROKER_UNREACHABLE")


async def lines_of(*arguments: str, until: Callable[[list[str]], bool]) -> list[str]:
    """Return the lines that a following command prints into a pipe; stop it by Ctrl-C.

    The command is stopped when ``until`` holds for its lines.
    """
    process = await asyncio.create_subprocess_exec(
        *COMMAND, *arguments, stdout=subprocess.PIPE, stderr=subprocess.PIPE, env=environment()
    )
    assert process.stdout is not None
    lines: list[str] = []
    async with asyncio.timeout(60):
        while not until(lines):
            line = await process.stdout.readline()
            assert line, (await process.communicate())[1]
            lines.append(line.decode().removesuffix("\n"))
    process.send_signal(signal.SIGINT)
    _, errors = await process.communicate()
    assert (process.returncode, errors) == (0, b"")
    return lines


async def test_looks_come_out_of_a_pipe_one_by_one() -> None:
    async with some() as (address, _):
        top = ("top", "-b", "--every-s", "0.2", "--broker", address)
        shown = await lines_of(
            *top, until=lambda lines: sum(line.startswith("broker ") for line in lines) == 2
        )
        assert any(line.startswith(f"{WAITS}  WAITING") for line in shown)
        assert any(line.startswith("p     d   ") and "/s " in line for line in shown)
        once = await out(address, "top", "-n", "1")
        assert once.startswith("broker ")


async def test_events_are_followed_through_a_pipe() -> None:
    async with some() as (address, both):
        ends = [
            json.loads(line) for line in (await out(address, "events", "-o", "json")).splitlines()
        ]
        assert [one["handoff_id"] for one in ends] == [*UUIDS, *LONG, "request-4711", "last"]
        assert [one["at"] for one in ends] == sorted(one["at"] for one in ends)
        follow = asyncio.create_task(
            lines_of(
                *("events", "--follow", "--since-s", "0", "--broker", address),
                until=lambda lines: len(lines) >= 2,
            )
        )
        number = 0
        while not follow.done():  # what ended before it began to look is none of its
            await both.hand_over(f"news-{number}")
            number += 1
            await asyncio.wait([follow], timeout=0.2)
        lines = await follow
        told = [line.split()[2] for line in lines]
        assert told == [f"news-{int(told[0][5:]) + at}" for at in range(len(told))]
        assert all("DONE" in line and "from p to d, 100 B read in " in line for line in lines)


@pytest.mark.parametrize("command", [("events", "--follow"), ("top", "-b")])
async def test_who_closes_a_pipe_ends_what_goes_on(command: tuple[str, ...]) -> None:
    async with some() as (address, _):
        process = await asyncio.create_subprocess_exec(
            *(*COMMAND, *command, "--broker", address),
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            env=environment(),
        )
        assert process.stdout is not None
        async with asyncio.timeout(60):
            assert await process.stdout.readline()
            process.stdout._transport.close()  # type: ignore[attr-defined]
            assert process.stderr is not None
            assert await process.stderr.read() == b""
            assert await process.wait() in (0, 1)
