"""The parts of one small handoff, beside four hops of bare gRPC and a READ.

Broker, P and D have a process each. D has requested the state when P publishes it; the time ends
when D's engine knows the end. All processes read the same clock of the host.
"""

from __future__ import annotations

import json
import subprocess
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from statistics import median

import uvloop

from bench.control.grpc_echo import ECHO, hops_seconds
from bench.processes import module, open_log, running, running_broker
from bench.report import Put, Row, compared
from restow.broker.client import AdminClient

SUITE, TOKENS = "handoff-parts", 32
ENGINE = module("bench.control.handoff_parts_engine")
WARM, SAMPLES_PER_REPEAT = 20, 20
PAUSE_S = 0.01
HOPS, GOAL_OF_FLOOR = 4, 2.2
KINDS = {"agents on their engines' loops": False, "agents on threads of their own": True}


class _Engine:
    """The process of one engine and its agent."""

    def __init__(self, broker: str, engine_id: str, thread: bool) -> None:
        with open_log("ranks") as log:
            self._process = subprocess.Popen(
                ENGINE, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=log, text=True
            )
        self.say({"broker": broker, "engine_id": engine_id, "tokens": TOKENS, "thread": thread})

    def say(self, message: object) -> None:
        """Send a message."""
        if self._process.stdin is not None:
            self._process.stdin.write(json.dumps(message) + "\n")
            self._process.stdin.flush()

    def hear(self) -> str:
        """Wait for a line."""
        line = self._process.stdout.readline() if self._process.stdout else ""
        if not line:
            raise RuntimeError("an engine's process has ended")
        return line.strip()

    def stamps(self) -> dict[str, float]:
        """Wait for the times at which the steps were done."""
        stamps: dict[str, float] = json.loads(self.hear())
        return stamps

    def end(self) -> None:
        """End the process."""
        if self._process.stdin is not None:
            self._process.stdin.close()
        self._process.wait()


def run(put: Put, repeats: int) -> None:
    """Measure handoffs of both kinds and hops, in turns."""
    with ExitStack() as stack:
        address = stack.enter_context(running_broker()).address
        echo = stack.enter_context(running(ECHO, "echo"))
        sides = {name: stack.enter_context(_pair(address, name)) for name in KINDS}
        admin = stack.enter_context(AdminClient(address))
        parts: dict[str, list[dict[str, float]]] = {name: [] for name in KINDS}
        hops: list[float] = []
        for turn in range(WARM + SAMPLES_PER_REPEAT * repeats):
            hop_s = uvloop.run(hops_seconds(echo, 1, PAUSE_S))
            for name, (p, d) in sides.items():
                seconds = _hand_over(p, d, f"{name}/{turn}", admin)
                if turn >= WARM:
                    parts[name].append(seconds)
            if turn >= WARM:
                hops.append(hop_s)
        busy = uvloop.run(hops_seconds(echo, 2000, 0.0))
    for name in KINDS:
        for row in _rows(name, parts[name], hops, busy):
            put(row)


@contextmanager
def _pair(broker: str, name: str) -> Iterator[tuple[_Engine, _Engine]]:
    sides = [_Engine(broker, f"{side} {name}", KINDS[name]) for side in "PD"]
    try:
        for side in sides:
            side.hear()
        yield sides[0], sides[1]
    finally:
        for side in sides:
            side.end()


def _hand_over(p: _Engine, d: _Engine, handoff_id: str, admin: AdminClient) -> dict[str, float]:
    """Return the seconds of each part of a handoff."""
    d.say({"ask": handoff_id})
    time.sleep(PAUSE_S)
    p.say({"publish": handoff_id})
    began, done = p.stamps(), d.stamps()
    at_ms = {entry.event: entry.at_ms for entry in admin.handoff(handoff_id).timeline}
    told_s = (at_ms["ended"] - at_ms["granted"]) / 1e3
    at_d_s = done["reported"] - done["ordered"]
    whole_s = done["ended"] - began["began"]
    return {
        "whole": whole_s,
        "P's publication, its grant, and the end told to D's engine": whole_s - told_s,
        "the order to D's agent, and its report to the broker": told_s - at_d_s,
        "D's agent, before the READ": done["posted"] - done["ordered"],
        "READ": done["landed"] - done["posted"],
        "D's agent, after the READ": done["reported"] - done["landed"],
    }


def _rows(
    name: str, parts: Sequence[dict[str, float]], hops: Sequence[float], busy: float
) -> Iterator[Row]:
    reads = [sample["READ"] for sample in parts]
    floor = [HOPS * median(hops) + median(reads)]
    goal = 1 / GOAL_OF_FLOOR
    note = f"a hop of a busy stream {1e6 * busy:.0f} us, in this rhythm {1e6 * median(hops):.0f}"
    whole = [sample["whole"] for sample in parts]
    reference = f"{HOPS} bare hops and the READ"
    yield compared(SUITE, f"{name}: whole", whole, reference, floor, goal=goal, note=note)
    two_hops = "2 bare hops", [2 * median(hops)]
    the_read = "the READ", reads
    for number, part in enumerate(key for key in parts[0] if key != "whole"):
        beside = two_hops if number < 2 else the_read
        yield compared(SUITE, f"{name}: {part}", [sample[part] for sample in parts], *beside)
