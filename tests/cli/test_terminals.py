"""What commands show at 80 columns, at 200 and in a pipe: nothing that can't be copied and used."""

from __future__ import annotations

import asyncio
import json
import signal
import subprocess
import uuid
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager

import pytest
import pytest_asyncio
import yaml

from broker.fakes import D_BLOCKS, P_BLOCKS, POSITION, Pair, broker, pair
from cli.broker_process import COMMAND
from cli.terminals import asked_on_terminal, environment, on_terminal
from cli.typed import document_aside, failed, printed_aside, reason_of, typed_aside

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


@pytest_asyncio.fixture(scope="module")
async def known() -> AsyncIterator[tuple[str, ...]]:
    """Yield the option of a broker that no test changes."""
    async with some() as (address, _):
        yield "--broker", address


async def shown_at(columns: int, *arguments: str) -> str:
    return await asyncio.to_thread(on_terminal, *arguments, columns=columns)


async def test_what_a_narrow_terminal_shows_of_an_id_is_enough_to_name_it(
    known: tuple[str, ...],
) -> None:
    shown = await shown_at(80, "handoffs", *known)
    lines = shown.splitlines()
    assert max(map(len, lines)) <= 80
    assert lines[0].split()[:4] == ["handoff", "state", "reason", "from"]
    whole = (await printed_aside("handoffs", *known, "-o", "name")).split()
    beginnings = [line.split()[0] for line in lines[1 : 1 + len(whole)]]
    for beginning, name in zip(beginnings, whole, strict=True):
        assert (await document_aside("handoff", beginning, *known))["handoff_id"] == name
    assert len(beginnings[0]) < len(WAITS)
    assert "NOT_PUBLISHED" in shown
    assert "…" not in shown


async def test_nothing_is_cut_in_a_pipe(known: tuple[str, ...]) -> None:
    for options in ((), ("-o", "wide")):
        shown = {
            command: await printed_aside(command, *known, *options)
            for command in ("handoffs", "leases", "engines", "agents", "costs")
        }
        for text in shown.values():
            assert "…" not in text
            assert not any(line.endswith(" ") for line in text.splitlines())
        assert all(name in shown["handoffs"].split() for name in (*UUIDS, *LONG, WAITS))
        assert " 100 B" in shown["handoffs"]
        assert ("nobody published it" in shown["handoffs"]) == bool(options)
        assert f"{WAITS}  " in shown["leases"]
        waits = "ranks [0, 1] of engine p have not fenced it"
        assert shown["leases"].splitlines()[1].endswith(waits)
        for engine in (await document_aside("engines", *known))["engines"]:
            assert engine["incarnation"] in shown["engines"]


async def test_a_wide_terminal_has_room_for_more(known: tuple[str, ...]) -> None:
    shown = await shown_at(200, "handoffs", *known)
    assert "nobody published it" in shown
    assert WAITS in shown
    assert "beginnings of ids" not in shown
    assert max(map(len, shown.splitlines())) <= 200
    wide = await shown_at(80, "handoffs", "-o", "wide", *known)
    assert WAITS in wide
    assert wide.splitlines()[0].split()[-3:] == ["lease", "by", "detail"]


async def test_a_beginning_names_one_handoff_or_none() -> None:
    async with some() as (address, _):
        at = ("--broker", address)
        shown = await printed_aside("handoff", "request-4", *at)
        assert shown.startswith("request-4711  EXPIRED")
        assert (await printed_aside("handoff", LONG[1], *at)).startswith(f"{LONG[1]}  DONE")
        several = await typed_aside("handoff", "request-", "-o", "json", *at)
        assert reason_of(several) == "HANDOFF_AMBIGUOUS"
        assert "a beginning of the ids of 3 handoffs: request-4711, " in str(several.exception)
        assert reason_of(await typed_aside("handoff", "nothing", *at)) == "HANDOFF_UNKNOWN"
        listed = await document_aside("handoffs", "request-0001", *at)
        assert {one["handoff_id"] for one in listed["handoffs"]} == set(LONG)
        _, asked = await asyncio.to_thread(asked_on_terminal, "release", "waits", *at, typed="y\n")
        assert f"Handoff {WAITS} is WAITING" in " ".join(asked.split())
        assert (await document_aside("handoff", WAITS, *at))["reason"] == "RELEASED"
        assert (await typed_aside("release", "request-", "--yes", *at)).exit_code == 1


@pytest.mark.parametrize(
    ("command", "key"),
    [
        ("status", None),
        ("engines", "engine_id"),
        ("agents", "agent_name"),
        ("handoffs", "handoff_id"),
        ("leases", "handoff_id"),
        ("costs", None),
    ],
)
async def test_one_value_in_every_form(
    command: str, key: str | None, known: tuple[str, ...]
) -> None:
    found = await document_aside(command, *known)
    again = json.loads(await printed_aside(command, *known, "-o", "json"))
    read = yaml.safe_load(await printed_aside(command, *known, "--output=yaml"))
    group = "describe" if command == "status" else "get"
    gotten = await document_aside(group, command, *known)
    assert found.keys() == again.keys() == read.keys() == gotten.keys()
    assert type(next(iter(found.values()))) is type(next(iter(read.values())))
    names = await typed_aside(command, "-o", "name", *known)
    if key is None:
        assert names.exit_code == 2
    else:
        assert names.stdout.split() == [one[key] for one in found[command]]


@pytest.mark.parametrize("form", ["json", "yaml"])
def test_errors_have_the_form_that_was_asked_for(form: str) -> None:
    outcome = failed("status", "-o", form, "--broker", "127.0.0.1:1")
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


async def test_looks_come_out_of_a_pipe_one_by_one(known: tuple[str, ...]) -> None:
    top = ("top", "-b", "--every-s", "0.2", *known)
    shown = await lines_of(
        *top, until=lambda lines: sum(line.startswith("broker ") for line in lines) == 2
    )
    assert any(line.startswith(f"{WAITS}  WAITING") for line in shown)
    assert any(line.startswith("p     d   ") and "/s " in line for line in shown)
    assert (await printed_aside("top", "-n", "1", *known)).startswith("broker ")


async def test_events_are_followed_through_a_pipe() -> None:
    async with some() as (address, both):
        at = ("--broker", address)
        ended = await printed_aside("events", "-o", "json", *at)
        ends = [json.loads(line) for line in ended.splitlines()]
        assert [one["handoff_id"] for one in ends] == [*UUIDS, *LONG, "request-4711", "last"]
        assert [one["at"] for one in ends] == sorted(one["at"] for one in ends)
        arguments = ("events", "--follow", "--since-s", "0", *at)
        follow = asyncio.create_task(lines_of(*arguments, until=lambda lines: len(lines) >= 2))
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
async def test_who_closes_a_pipe_ends_what_goes_on(
    command: tuple[str, ...], known: tuple[str, ...]
) -> None:
    process = await asyncio.create_subprocess_exec(
        *(*COMMAND, *command, *known),
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
