"""What operators do to a broker, as commands; nothing is done that nobody agreed to."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from typing import Any

import pytest

from agent_harness.waiting import until
from broker.fakes import D_BLOCKS, P_BLOCKS, POSITION, Pair, broker, engine, pair
from cli.broker_process import broker_process, run_restow
from cli.terminals import asked_on_terminal
from cli.typed import document_aside, printed_aside, reason_of, typed, typed_aside


@pytest.fixture(scope="module")
def address() -> Iterator[str]:
    with broker_process("--log-format", "json") as where:
        yield where


async def on_terminal(*arguments: str, typed: str) -> tuple[int, str]:
    """Run a command and answer its question; return its exit status, and what it shows."""
    return await asyncio.to_thread(asked_on_terminal, *arguments, typed=typed)


async def state(address: str, name: str) -> str:
    return str((await document_aside("handoff", name, "--broker", address))["state"])


@asynccontextmanager
async def waiting(address: str, name: str) -> AsyncIterator[Pair]:
    """Run a pair whose P has published a state that no rank has fenced."""
    async with pair(address, 1, 1) as both:
        both.p.publish(name, P_BLOCKS, POSITION)
        asked = both.d.request(name, D_BLOCKS)
        await both.hand_over(f"after {name}")  # sessions keep their order: it is known by now
        yield both
        both.d.cancel(name)
        await asked


async def test_a_release_that_nobody_agrees_to_is_none(address: str) -> None:
    async with waiting(address, "kept"):
        for typed in ("n\n", "\x04"):
            code, shown = await on_terminal("release", "kept", "--broker", address, typed=typed)
            assert code == 1
            assert "Handoff kept is WAITING, from p to d." in " ".join(shown.split())
            assert await state(address, "kept") == "WAITING"


async def test_a_script_does_nothing_that_is_not_agreed_to_beforehand(address: str) -> None:
    async with waiting(address, "unasked"):
        for command, words in (
            (("release", "unasked"), "Handoff unasked is WAITING"),
            (("drain", "--wait"), "will grant no handoff until"),
            (("drain", "--engine", "p", "--wait"), "Engine p will take part in nothing new"),
            (("forget", "p"), "Engine p has 1 handoffs that have not ended"),
        ):
            found = await asyncio.to_thread(run_restow, *command, "--broker", address)
            assert (found.returncode, found.stdout) == (2, "")
            told = " ".join(found.stderr.replace("│", " ").split())
            assert all(one in told for one in ("nothing was done", "with --yes", words)), told
        assert await state(address, "unasked") == "WAITING"
        listed = await document_aside("engines", "--broker", address)
        assert not any(one["draining"] for one in listed["engines"])
        assert not (await document_aside("status", "--broker", address))["draining"]


@pytest.mark.parametrize("command", ["release", "handoff"])
async def test_an_empty_id_names_no_handoff(command: str) -> None:
    # A variable of the shell that is not set gives an empty id, and every id begins with that.
    async with broker() as running, engine(running.address, "d") as (d, _):
        d.request("the-only-one", D_BLOCKS)
        assert (await d.request("known by then", D_BLOCKS, timeout_ms=1)).reason == "NOT_PUBLISHED"
        options = ("--yes",) if command == "release" else ()
        result = await typed_aside(command, "", *options, "--broker", running.address)
        assert result.exit_code == 2, result.output
        assert await state(running.address, "the-only-one") == "WAITING"


@pytest.mark.parametrize("typed", ["", "y\n"])
async def test_a_release_ends_it_and_says_how(address: str, typed: str) -> None:
    name = f"given up {len(typed)}"
    async with waiting(address, name):
        options = () if typed else ("--yes",)
        code, shown = await on_terminal("release", name, *options, "--broker", address, typed=typed)
        assert code == 0
        words = " ".join(shown.split())
        assert "RELEASED: an operator released it" in words
        assert await state(address, name) == "CANCELLED"
        # Again: it has ended, and nothing is asked.
        again = await document_aside("release", name, "--broker", address)
        assert again["reason"] == "RELEASED"


async def test_leases_show_what_they_wait_for(address: str) -> None:
    async with waiting(address, "leased"):
        for columns in (80, 200):
            shown = await printed_aside("leases", "--broker", address, columns=columns)
            words = " ".join(shown.split())
            assert "leased" in words
            assert "ranks [0] of engine p have not" in words
        listed = await document_aside("leases", "--broker", address)
        (lease,) = listed["leases"]
        assert (lease["handoff_id"], listed["left_out"]) == ("leased", 0)
        assert 0 < lease["lease_s"] <= 30
        text = await printed_aside("handoff", "leased", "--broker", address)
        assert "waits: ranks [0] of engine p have not fenced it" in " ".join(text.split())
    assert await printed_aside("leases", "--broker", address) == "No lease.\n"


async def test_draining_is_agreed_to_shown_and_ended(address: str) -> None:
    refused, _ = await on_terminal("drain", "--broker", address, typed="n\n")
    assert refused == 1
    assert "draining" not in await printed_aside("status", "--broker", address)
    done = await document_aside("drain", "--yes", "--wait", "--broker", address)
    assert done == {"draining": True, "granted": 0}
    shown = await printed_aside("status", "--broker", address)
    assert "nothing is granted: restow drain --off" in shown
    assert (await document_aside("status", "--broker", address))["draining"]
    over = await printed_aside("drain", "--off", "--broker", address)
    assert "The broker grants again" in over
    async with pair(address, 1, 1) as both:
        await both.hand_over("granted again")


async def test_one_engine_is_drained(address: str) -> None:
    async with pair(address, 1, 1) as both:
        held = both.p.publish("held", P_BLOCKS, POSITION)
        await both.p_agents[0].fence("held")
        of_p = ("drain", "--engine", "p", "--broker", address)
        assert await printed_aside(*of_p, "--yes") == (
            "Engine p takes part in nothing new any more; 1 of its handoffs have not ended.\n"
        )
        shown = await printed_aside("engines", "--broker", address)
        assert "draining" in next(line for line in shown.splitlines() if line.startswith("p "))
        (one,) = (await document_aside("engines", "p", "--broker", address))["engines"]
        assert (one["draining"], one["open"]) == (True, 1)
        waits = asyncio.create_task(document_aside(*of_p, "-y", "--wait"))
        assert (await both.d.request("held", D_BLOCKS)).done
        await held
        assert await waits == {"engine": "p", "draining": True, "open": 0}
        assert "Engine p takes part in handoffs again" in await printed_aside(*of_p, "--off")
        await both.hand_over("taken again")


async def test_an_engine_that_is_there_is_not_forgotten(address: str) -> None:
    async with pair(address, 1, 1):
        result = await typed_aside("forget", "p", "--broker", address)
        assert reason_of(result) == "ENGINE_CONNECTED"
    assert reason_of(await typed_aside("forget", "p", "--broker", address)) == "ENGINE_UNKNOWN"


async def test_stores_are_told_to_drop_the_states_of_a_revision(address: str) -> None:
    dropped: list[str] = []
    keeps: dict[str, Any] = {"on_keep": lambda _: None, "on_forget": dropped.append}
    async with engine(address, "store", agents=False, **keeps):
        found = await document_aside("forget", "--revision", "v1", "-y", "--broker", address)
        assert found == {"revision": "v1", "stores": 1}
        await until(lambda: dropped == ["v1"])
    for named in ((), ("p", "--revision", "v1")):
        assert (await typed_aside("forget", *named, "--broker", address)).exit_code == 2


@pytest.mark.parametrize("options", [("--tenant", "a", "--yes"), ("--off", "--wait")], ids=str)
def test_options_of_draining_that_contradict_each_other_are_refused(
    options: tuple[str, ...],
) -> None:
    assert typed("drain", *options).exit_code == 2


async def test_an_audit_of_a_sound_broker_says_so(address: str) -> None:
    async with pair(address, 1, 1) as both:
        await both.hand_over("audited")
        assert (await printed_aside("check", "--broker", address)).startswith("All is well: ")
        value = await document_aside("check", "--broker", address)
        assert value["findings"] == []
        assert value["handoffs"] > 0


async def test_a_release_of_what_is_not_known(address: str) -> None:
    result = await typed_aside("release", "never heard of", "--yes", "--broker", address)
    assert reason_of(result) == "HANDOFF_UNKNOWN"
