"""Handoffs over TCP between two hosts, beside one plain socket that moves the same bytes.

The hosts are two network namespaces of this machine with a virtual wire between them, which is
shaped to 10 Gb/s or not at all. The broker runs outside of both. Needs root and iproute2.
"""

from __future__ import annotations

import json
import os
import shutil
import socket
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

import uvloop

from bench.engine_pairs import EnginePair, contiguous, running_pairs
from bench.model_sizes import real_models
from bench.processes import module, running_broker
from bench.report import Put, compared
from bench.transfer.at_once import at_once
from bench.transfer.strategies import CONTIGUOUS, WARM_UPS
from restow.broker.families import ConvLayout, EngineSettings, build_layout
from restow.broker.planner import Plan, Strategy, make_plan

SUITE, MODEL, PAGE_TOKENS = "tcp", "nemotron3-nano-30b", 64
RANKS = ((1, 1), (2, 4))
COUNTS = ((1, 8192), (32, 1024))
"""Handoffs at once, and their tokens."""
RATES = ("10gbit", "")
"""Rates of the wire; empty: as fast as the machine."""
AUTO = Strategy.AUTO.value
SOCKET_PORT = 26233
CHUNK_BYTES = 4 << 20
GOAL = 0.9
IP = shutil.which("ip") or ""


@dataclass(frozen=True)
class Host:
    """A network namespace."""

    name: str
    number: int

    @property
    def device(self) -> str:
        """Return the name of its end of the wire."""
        return f"w{self.name}"

    @property
    def address(self) -> str:
        """Return its address on the wire."""
        return f"10.99.1.{self.number}"

    @property
    def outside(self) -> str:
        """Return the address that it reaches this process at."""
        return f"10.99.1{self.number}.9"

    @property
    def prefix(self) -> list[str]:
        """Return what a command begins with to run on the host."""
        return [IP, "netns", "exec", self.name, "env", f"UCX_NET_DEVICES={self.device}"]


@contextmanager
def two_hosts(rate: str) -> Iterator[tuple[Host, Host]]:
    """Make two hosts; both reach the first host's ``outside``."""
    hosts = tuple(Host(f"rb{os.getpid()}{side}", number) for number, side in enumerate("pd", 1))
    try:
        _ip(*(f"netns add {host.name}" for host in hosts))
        first, second = hosts
        _ip(f"-n {first.name} link add {first.device} type veth peer {second.device}")
        _ip(f"-n {first.name} link set {second.device} netns {second.name}")
        for host in hosts:
            up = f"u{host.name}"
            _ip(
                f"-n {host.name} addr add {host.address}/24 dev {host.device}",
                f"-n {host.name} link set {host.device} up",
                f"-n {host.name} link set lo up",
                f"link add {up} type veth peer name uplink netns {host.name}",
                f"addr add {host.outside}/24 dev {up}",
                f"link set {up} up",
                f"-n {host.name} addr add 10.99.1{host.number}.1/24 dev uplink",
                f"-n {host.name} link set uplink up",
            )
        _ip(f"-n {second.name} route add {first.outside}/32 via {second.outside}")
        if rate:
            words = f"netns exec {first.name} tc qdisc add dev {first.device} root tbf rate {rate}"
            _ip(f"{words} burst 4m latency 20ms")
        yield first, second
    finally:
        for host in hosts:  # devices outlive their namespace for a while
            for what in (f"link del u{host.name}", f"netns del {host.name}"):
                subprocess.run([IP, *what.split()], check=False, capture_output=True)


def _ip(*commands: str) -> None:
    for command in commands:
        done = subprocess.run([IP, *command.split()], capture_output=True, text=True, check=False)
        if done.returncode:
            raise RuntimeError(f"ip {command}: {done.stderr.strip()}")


def run(put: Put, repeats: int) -> None:
    """Measure each pair of TP sizes at each rate. Raises `RuntimeError` without root or `ip`."""
    if os.geteuid() or not IP:
        raise RuntimeError("network namespaces need root, and the command `ip` of iproute2")
    for rate in RATES:
        for p_tp, d_tp in RANKS:
            convs = ConvLayout.SD, ConvLayout.SD if p_tp == d_tp else ConvLayout.DS
            layouts = [
                build_layout(
                    real_models()[MODEL],
                    EngineSettings(tp=tp, page_tokens=PAGE_TOKENS, conv_layout=conv),
                )
                for tp, conv in zip((p_tp, d_tp), convs, strict=True)
            ]
            plan = make_plan(*layouts)
            for count, tokens in COUNTS:
                words = f"P{p_tp} to D{d_tp}, {count} at once, wire {rate or 'not shaped'}"
                uvloop.run(_measure(put, repeats, plan, count, tokens, rate, words))


async def _measure(
    put: Put, repeats: int, plan: Plan, count: int, tokens: int, rate: str, words: str
) -> None:
    size_bytes = plan.bytes_at(tokens)
    taken: dict[str, list[float]] = {AUTO: [], CONTIGUOUS: [], "socket": []}
    with two_hosts(rate) as (first, second):
        listen = ("--listen", f"{first.outside}:0", "--insecure")
        with running_broker(*listen) as broker, running_broker(*listen) as plain:
            pairs = {
                AUTO: EnginePair((plan.source, plan.destination), broker.address, 1),
                CONTIGUOUS: EnginePair(contiguous(plan, tokens), plain.address, 1),
            }
            async with running_pairs(
                SUITE,
                pairs,
                tokens,
                environment={"UCX_TLS": "tcp"},
                prompts=max(2, count),
                prefixes=(first.prefix, second.prefix),
            ) as engines:
                for repeat in range(-WARM_UPS, repeats):
                    for pair in pairs:
                        seconds = await at_once(engines, pair, f"{count}/{repeat}", count)
                        if repeat >= 0:
                            taken[pair].append(seconds)
                    if repeat >= 0:
                        taken["socket"].append(_socket_seconds(first, second, count * size_bytes))
        note = _iperf_words(first, second)
    reference, size_bytes = "one plain socket", count * size_bytes
    for pair, case in ((AUTO, words), (CONTIGUOUS, f"{words}: a contiguous READ")):
        row = compared(
            SUITE,
            case,
            taken[pair],
            reference,
            taken["socket"],
            size_bytes=size_bytes,
            goal=GOAL if pair == AUTO else None,
            note=note,
        )
        put(row)


def _socket_seconds(first: Host, second: Host, size_bytes: int) -> float:
    """Return the seconds in which one socket brings bytes from one host to the other."""
    this = module("bench.transfer.tcp")
    arguments = [str(size_bytes), first.address]
    with subprocess.Popen(
        [*first.prefix, *this, "send", *arguments], stdout=subprocess.PIPE, text=True
    ) as sender:
        if sender.stdout is not None:
            sender.stdout.readline()
        received = subprocess.run(
            [*second.prefix, *this, "receive", *arguments],
            capture_output=True,
            text=True,
            check=True,
        )
    return float(received.stdout)


def _iperf_words(first: Host, second: Host) -> str:
    """Return what iperf3 reaches, if it is installed."""
    if shutil.which("iperf3") is None:
        return ""
    rates = []
    for streams in ("1", "4"):
        server = subprocess.Popen([*first.prefix, "iperf3", "-s", "-1"], stdout=subprocess.DEVNULL)
        time.sleep(0.5)
        client = ["iperf3", "-c", first.address, "-R", "-t", "2", "-P", streams, "-J"]
        done = subprocess.run([*second.prefix, *client], capture_output=True, text=True, check=True)
        server.wait()
        rates.append(json.loads(done.stdout)["end"]["sum_received"]["bits_per_second"] / 8e9)
    return f"iperf3, 1 and 4 streams: {rates[0]:.2f} and {rates[1]:.2f} GB/s"


def main(arguments: Sequence[str]) -> None:
    """Send bytes to whoever connects, or receive them and print the seconds of the last time."""
    role, size_bytes, address = arguments[0], int(arguments[1]), arguments[2]
    if role == "send":
        with socket.create_server((address, SOCKET_PORT)) as listener:
            content = bytes(size_bytes)
            print("ready", flush=True)
            connection, _ = listener.accept()
            with connection:
                while connection.recv(1):
                    connection.sendall(content)
        return
    room = memoryview(bytearray(size_bytes))
    took_s = 0.0
    with socket.create_connection((address, SOCKET_PORT)) as connection:
        for _ in range(1 + WARM_UPS):
            begun_s = time.perf_counter()
            connection.sendall(b"x")
            received = 0
            while received < size_bytes:
                most = min(size_bytes - received, CHUNK_BYTES)
                received += connection.recv_into(room[received:], most)
            took_s = time.perf_counter() - begun_s
    print(took_s)


if __name__ == "__main__":
    main(sys.argv[1:])
