"""The simulation's event loop does what asyncio's does, in its own time."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator

import pytest

from simulation_harness.virtual_loop import Process, VirtualLoop


def test_timers_run_in_order_and_those_of_one_moment_as_they_were_set() -> None:
    loop, said = VirtualLoop(), list[str]()

    async def main() -> float:
        loop.call_later(2.0, said.append, "late")
        for name in ("a", "b", "c"):
            loop.call_at(1.0, said.append, name)
        loop.call_later(1.0, said.append, "never").cancel()
        loop.call_soon(said.append, "soon")
        await asyncio.sleep(3.0)
        return loop.time()

    assert loop.run_until_complete(main()) == 3.0
    assert said == ["soon", "a", "b", "c", "late"]
    loop.close()


def test_a_generator_that_nobody_holds_is_closed() -> None:
    # The broker's streams are closed in this way when a client is cut off.
    loop, closed = VirtualLoop(), list[bool]()

    async def numbers() -> AsyncIterator[int]:
        try:
            yield 1
        finally:
            closed.append(True)

    async def main() -> None:
        held = numbers()
        assert await anext(aiter(held)) == 1
        del held
        await asyncio.sleep(0.1)

    loop.run_until_complete(main())
    assert closed == [True]
    loop.close()


def test_a_paused_process_goes_on_where_it_was_and_a_killed_one_does_not() -> None:
    loop, said = VirtualLoop(), list[str]()

    async def count(name: str) -> None:
        for number in range(3):
            await asyncio.sleep(1.0)
            said.append(f"{name}{number}")

    async def main() -> None:
        paused, killed = (Process(loop, name, "host") for name in ("paused", "killed"))
        for process in (paused, killed):
            process.spawn(count(process.name))
        await asyncio.sleep(1.5)
        paused.pause()
        killed.kill()
        await asyncio.sleep(10.0)
        assert said == ["paused0", "killed0"]
        paused.resume()
        await asyncio.sleep(2.5)

    loop.run_until_complete(main())
    assert said == ["paused0", "killed0", "paused1", "paused2"]
    loop.close()


def test_nothing_left_to_happen_is_an_error() -> None:
    loop = VirtualLoop()
    with pytest.raises(RuntimeError, match="stands still"):
        loop.run_until_complete(loop.create_future())
    loop.close()
