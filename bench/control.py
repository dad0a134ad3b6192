"""Full handoffs through one broker, beside gRPC that does nothing.

The load generator shares the machine with the broker: simulated engines and agents, one stream
each, real messages, page lists of an 8,192-token prompt.
"""

from __future__ import annotations

import statistics
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import uvloop
from echo import batches_seconds, unary_seconds
from rows import Row, Yield, compared
from simulated import PROMPT_TOKENS, run_handoffs

BROKER = [sys.executable, "-m", "restow.broker.cli.main", "serve", "--listen", "127.0.0.1:0"]
ECHO = [sys.executable, str(Path(__file__).with_name("echo.py"))]
UNDER_WAY = 1024
HANDOFFS = 20_000
STEADY_PER_S = 500
MESSAGES_PER_HANDOFF = 7
"""publish, fenced, request, execute, settled, and an end told to each side."""
RATE_GOAL_PER_S = 10_000
LATENCY_GOAL_S = 0.0015


def run(put: Yield, repeats: int) -> None:
    """Rates in turn with the echoes, then the latency at a steady rate."""
    rates: list[float] = []
    short: list[float] = []
    unary: list[float] = []
    stream: list[float] = []
    with listening(BROKER) as broker, listening(ECHO) as echo:
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
            put(compared("control", name, seconds, "10,000 a second", wanted, goal=1.0, note=rate))
            put(compared("control", name, seconds, "a bare unary echo", unary, note=rate))
            of_echoes = [MESSAGES_PER_HANDOFF * s for s in stream]
            reference = f"{MESSAGES_PER_HANDOFF} messages of a batched stream echo"
            put(compared("control", name, seconds, reference, of_echoes, note=rate))
        for row in _steady(broker, echo):
            put(row)


def _steady(broker: str, echo: str) -> list[Row]:
    """From publication to D's engine knowing the end, with agents that take no time.

    That is two round trips, one after the other: to the agent's order, and to the end.
    """
    _took_s, latencies = uvloop.run(
        run_handoffs(broker, 6 * STEADY_PER_S, UNDER_WAY, PROMPT_TOKENS, STEADY_PER_S)
    )
    echoes = [2 * uvloop.run(unary_seconds(echo, 500, 1)) / 500 for _ in range(5)]
    name = f"added latency at {STEADY_PER_S} handoffs a second"
    note = f"99 % within {statistics.quantiles(latencies, n=100)[98] * 1e3:.2f} ms"
    budget = [LATENCY_GOAL_S]
    return [
        compared("control", name, latencies, "budget of 1.5 ms", budget, goal=1.0, note=note),
        compared("control", name, latencies, "two bare unary echoes", echoes, note=note),
    ]


@contextmanager
def listening(command: list[str]) -> Iterator[str]:
    """A server process; yields the address that it prints."""
    process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    try:
        line = process.stdout.readline() if process.stdout else ""
        if "listening on" not in line:
            raise RuntimeError(f"{command[1:]} did not start")
        yield line.split()[-1]
    finally:
        process.terminate()
        process.wait()
