"""How many handoffs one broker serves a second, and the latency that it adds.

Simulated engines and agents send real messages with the page lists of a prompt of 8,192 tokens, one
stream each, and share the machine with the broker. The references are echoes of bare gRPC.
"""

from __future__ import annotations

import asyncio
import statistics

import uvloop

from bench.control.grpc_echo import ECHO, batches_seconds, unary_seconds
from bench.control.simulated_engines import PROMPT_TOKENS, run_handoffs
from bench.processes import cpu_seconds_of, running, running_broker
from bench.report import Put, Row, compared

SUITE = "handoff-rate"
UNDER_WAY = 1024
HANDOFFS = 20_000
STEADY_PER_S = 500
MANY_PAIRS = (1, 16, 128, 250)
FEW_HANDOFFS, MANY_HANDOFFS = 1024, 8192
MESSAGES_PER_HANDOFF = 7
"""Publication, fence, request, execute, settled, and the end for each side."""
RATE_GOAL_PER_S = 10_000
LATENCY_GOAL_S = 0.0015


def run(put: Put, repeats: int) -> None:
    """Measure rates in turns with the echoes, then the latency at a steady rate."""
    rates: list[float] = []
    short: list[float] = []
    unary: list[float] = []
    stream: list[float] = []
    with running_broker() as process, running(ECHO, "echo") as echo:
        broker = process.address
        for _ in range(repeats):
            took_s, _latencies = uvloop.run(
                run_handoffs(broker, HANDOFFS, UNDER_WAY, PROMPT_TOKENS)
            )
            rates.append(took_s / HANDOFFS)
            took_s, _latencies = uvloop.run(run_handoffs(broker, HANDOFFS, UNDER_WAY, 64))
            short.append(took_s / HANDOFFS)
            unary.append(uvloop.run(unary_seconds(echo, 4096, 64)) / 4096)
            stream.append(uvloop.run(batches_seconds(echo, 65_536)) / 65_536)
        for tokens, seconds in ((PROMPT_TOKENS, rates), (64, short)):
            name = f"a full handoff, {UNDER_WAY} under way, {tokens} tokens"
            rate = f"{1 / statistics.median(seconds):,.0f} a second"
            wanted = [1 / RATE_GOAL_PER_S]
            put(compared(SUITE, name, seconds, "10,000 a second", wanted, goal=1.0, note=rate))
            put(compared(SUITE, name, seconds, "a bare unary echo", unary, note=rate))
            of_echoes = [MESSAGES_PER_HANDOFF * s for s in stream]
            reference = f"{MESSAGES_PER_HANDOFF} messages of a batched stream echo"
            put(compared(SUITE, name, seconds, reference, of_echoes, note=rate))
        for row in _steady(broker, echo):
            put(row)
    for pairs in MANY_PAIRS:
        put(_many_engines(pairs))


def _steady(broker: str, echo: str) -> list[Row]:
    """Measure from the publication until D's engine knows the end, with agents that take no time.

    This is two round trips in succession: one to the agent's order, one to the end.
    """
    _took_s, latencies = uvloop.run(
        run_handoffs(broker, 6 * STEADY_PER_S, UNDER_WAY, PROMPT_TOKENS, STEADY_PER_S)
    )
    echoes = [2 * uvloop.run(unary_seconds(echo, 500, 1)) / 500 for _ in range(5)]
    name = f"added latency at {STEADY_PER_S} handoffs a second"
    note = f"99 % within {statistics.quantiles(latencies, n=100)[98] * 1e3:.2f} ms"
    budget = [LATENCY_GOAL_S]
    return [
        compared(SUITE, name, latencies, "budget of 1.5 ms", budget, goal=1.0, note=note),
        compared(SUITE, name, latencies, "two bare unary echoes", echoes, note=note),
    ]


def _many_engines(pairs: int) -> Row:
    """Measure the broker's CPU for a handoff if many engines send few messages each.

    The reference are echoes of single messages over as many streams: messages of different streams
    make no batches. Registrations are left out as the difference between two runs.
    """

    async def hand_over(handoffs: int) -> None:
        each, under_way = handoffs // pairs, max(1, UNDER_WAY // pairs)
        await asyncio.gather(
            *(run_handoffs(broker.address, each, under_way, 64) for _ in range(pairs))
        )

    async def echo_messages(handoffs: int) -> None:
        messages = handoffs * MESSAGES_PER_HANDOFF // 2
        await batches_seconds(echo.address, messages, 4 * pairs, batch=1)

    costs: dict[int, list[float]] = {}
    with running_broker() as broker, running_broker(command=ECHO) as echo:
        for process, work in ((broker, hand_over), (echo, echo_messages)):
            for handoffs in (FEW_HANDOFFS, MANY_HANDOFFS):
                begun_s = cpu_seconds_of(process.pid)
                uvloop.run(work(handoffs))
                costs.setdefault(process.pid, []).append(cpu_seconds_of(process.pid) - begun_s)
        ours, echoes = (
            (costs[process.pid][1] - costs[process.pid][0]) / (MANY_HANDOFFS - FEW_HANDOFFS)
            for process in (broker, echo)
        )
    name = f"the broker's CPU for a handoff, {2 * pairs} engines with an agent each, 64 tokens"
    reference = f"{MESSAGES_PER_HANDOFF} messages of unbatched echoes on {4 * pairs} streams"
    return compared(SUITE, name, [ours], reference, [echoes])
