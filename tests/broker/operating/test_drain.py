"""SIGTERM: reads under way end, nothing is begun, and what waits goes on with the next broker."""

from __future__ import annotations

import asyncio
import contextlib
import signal
import sys
from collections.abc import AsyncIterator
from pathlib import Path

import grpc
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc

from broker.fakes import D_BLOCKS, Pair, answer_at_once, pair, silent
from restow.broker.client import HandoffEnded
from restow.broker.server.serve import RunningBroker

SERVE = (sys.executable, "-m", "restow.broker.cli.main", "serve", "--listen")


class Served:
    """A broker's process."""

    def __init__(self, process: asyncio.subprocess.Process, address: str) -> None:
        self.process, self.address = process, address

    def stop(self) -> None:
        self.process.send_signal(signal.SIGTERM)

    async def ends_within(self, seconds: float) -> None:
        assert await asyncio.wait_for(self.process.wait(), seconds) == 0

    async def drains(self) -> None:
        """Send SIGTERM, and wait until the broker says that it no longer serves."""
        async with grpc.aio.insecure_channel(self.address) as channel:
            watch = health_pb2_grpc.HealthStub(channel).Watch(health_pb2.HealthCheckRequest())
            self.stop()
            async for said in watch:
                if said.status == health_pb2.HealthCheckResponse.NOT_SERVING:
                    return


@contextlib.asynccontextmanager
async def served(path: Path, *options: str) -> AsyncIterator[Served]:
    """Run a broker on a socket, so that another one can take its place at once."""
    address = f"unix:{path}"
    process = await asyncio.create_subprocess_exec(
        *SERVE, address, *options, stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.DEVNULL
    )
    try:
        assert process.stdout is not None
        assert b"listening on" in await process.stdout.readline()
        yield Served(process, address)
    finally:
        with contextlib.suppress(ProcessLookupError):
            process.kill()
        await process.wait()


async def reading(both: Pair, name: str) -> asyncio.Future[HandoffEnded]:
    """Begin a handoff, wait until D reads it, and return the future of its end at D."""
    both.d_agents[0].answers = lambda order: (
        silent(order) if order.WhichOneof("body") == "execute" else answer_at_once(order)
    )
    await both.published(name)
    ended = asyncio.ensure_future(both.d.request(name, D_BLOCKS))
    await both.d_agents[0].order("execute")
    return ended


async def test_a_read_under_way_ends_well_and_what_is_asked_meanwhile_is_the_next_brokers(
    tmp_path: Path,
) -> None:
    async with served(tmp_path / "b", "--strategy", "slices") as one, pair(one.address) as both:
        ended = await reading(both, "a")
        await one.drains()
        await both.published("b")
        later = asyncio.ensure_future(both.d.request("b", D_BLOCKS))
        # What is said after it has ended: so the broker has heard it, and thought about it.
        assert (await both.d.request("c", D_BLOCKS, timeout_ms=50)).reason == "NOT_PUBLISHED"
        (execute,) = [o for o in both.d_agents[0].orders if o.HasField("execute")]
        assert execute.execute.handoff_id == "a"
        assert not ended.done()
        await both.d_agents[0].say(*answer_at_once(execute))
        assert (await asyncio.wait_for(ended, 5)).done
        await one.ends_within(8)
        assert not later.done()


@pytest.mark.parametrize("again", [False, True])
async def test_a_read_that_does_not_end_is_not_waited_for_for_ever(
    tmp_path: Path, again: bool
) -> None:
    drain_s = 60.0 if again else 0.5
    options = ("--strategy", "slices", "--drain-s", str(drain_s))
    async with served(tmp_path / "b", *options) as one, pair(one.address) as both:
        await reading(both, "a")
        await one.drains()
        assert one.process.returncode is None
        if again:
            one.stop()
        await one.ends_within(8)


async def test_a_broker_with_nothing_to_do_has_drained_at_once(running: RunningBroker) -> None:
    await asyncio.wait_for(running.hub.drain(), 1)
