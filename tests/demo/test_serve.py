"""Two engines behind HTTP and a router, each a process: answers through a handoff are right."""

from __future__ import annotations

import contextlib
import itertools
import json
import os
import signal
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from cli.broker_process import broker_process
from forked.ports import free_port
from restow.broker.client import AdminClient
from restow.demo.experiment import SEED
from restow.demo.recall.task import decode, make_prompts

PROMPTS = make_prompts(6, SEED)
READY = ("Running on", "serving at")


@dataclass(frozen=True)
class Served:
    """Where everything listens."""

    broker: str
    p: str
    d: str
    router: str
    processes: dict[str, subprocess.Popen[str]]


@contextlib.contextmanager
def process(*command: str) -> Iterator[subprocess.Popen[str]]:
    """Start an engine's server or the router, and wait until it listens."""
    running = subprocess.Popen([sys.executable, *command], stdout=subprocess.PIPE, text=True)
    try:
        assert running.stdout is not None
        lines = list(
            itertools.takewhile(lambda line: not any(one in line for one in READY), running.stdout)
        )
        assert running.poll() is None, f"{command} did not start: {lines}"
        yield running
    finally:
        running.send_signal(signal.SIGTERM)
        with contextlib.suppress(subprocess.TimeoutExpired):
            running.wait(20)
        running.kill()
        running.wait()


@pytest.fixture(scope="module")
def house() -> Iterator[Served]:
    ports = [free_port() for _ in range(3)]
    p, d, router = (f"http://127.0.0.1:{port}" for port in ports)
    with contextlib.ExitStack() as stack:
        broker = stack.enter_context(broker_process())
        engine = ("-m", "restow.demo.serve", "--broker", broker, "--name")
        running = {
            name: stack.enter_context(process(*engine, name, "--port", str(port), *options))
            for name, port, options in (
                ("p", ports[0], ("--tp", "2")),
                ("d", ports[1], ("--tp", "1", "--conv-layout", "DS", "--page-tokens", "8")),
            )
        }
        way = ("--prefill", p, "--decode", d, "--listen", f"127.0.0.1:{ports[2]}")
        command = ("-m", "restow.broker.cli.main", "router", *way)
        running["router"] = stack.enter_context(process(*command))
        yield Served(broker, p, d, router, running)


def ask(base: str, **body: Any) -> tuple[int, dict[str, Any]]:
    """POST a completion, and return the status and the answer."""
    return post(base, json.dumps(body).encode())


def post(base: str, words: bytes) -> tuple[int, dict[str, Any]]:
    headers = {"Content-Type": "application/json"}
    request = urllib.request.Request(f"{base}/v1/completions", words, headers)  # noqa: S310
    try:
        with urllib.request.urlopen(request, timeout=60) as answer:  # noqa: S310
            return answer.status, json.load(answer)
    except urllib.error.HTTPError as error:
        with error:
            return error.code, json.load(error)


def said(answer: tuple[int, dict[str, Any]]) -> str:
    status, body = answer
    assert status == 200, body
    text: str = body["choices"][0]["text"]
    return text


def test_answers_through_the_router_are_right(house: Served) -> None:
    with ThreadPoolExecutor(len(PROMPTS)) as threads:
        answers = threads.map(lambda one: ask(house.router, prompt=one.text), PROMPTS)
        for prompt, answer in zip(PROMPTS, answers, strict=True):
            assert said(answer) == decode(prompt.answer_ids)
            moved = answer[1]["kv_transfer_params"]
            assert moved["bytes"] > 0
            with AdminClient(house.broker) as client:
                found = client.handoff(moved["handoff_id"]).handoff
            assert (found.source_engine, found.destination_engine) == ("p", "d")
            assert found.bytes == moved["bytes"]


def test_an_engine_serves_alone(house: Served) -> None:
    assert said(ask(house.d, prompt=PROMPTS[0].text)) == decode(PROMPTS[0].answer_ids)


def test_routers_that_carry_parameters(house: Served) -> None:
    # P makes the id, and its answer has the parameters that the router hands to D.
    prompt = PROMPTS[1]
    status, first = ask(house.p, prompt=prompt.text, kv_transfer_params={"do_remote_decode": True})
    assert status == 200
    second = ask(house.d, prompt=prompt.text, kv_transfer_params=first["kv_transfer_params"])
    assert said(second) == decode(prompt.answer_ids)


@pytest.mark.parametrize(
    ("words", "why"),
    [
        (b"{", "the body is no JSON"),
        (b"[]", "the body is no JSON object"),
        (b"{}", "prompt must be a string"),
        (b'{"prompt": "who?"}', "does not know the word"),
        (b'{"prompt": "anna"}', "the prompt has 1 words"),
        (b'{"prompt": "anna has apple .", "max_tokens": 0}', "max_tokens must be from 1 to 64"),
        (b'{"prompt": "anna has apple .", "kv_transfer_params": 1}', "is no JSON object"),
    ],
)
def test_bad_requests(house: Served, words: bytes, why: str) -> None:
    status, body = post(house.d, words)
    assert (status, body["error"]["type"]) == (400, "ARGUMENT_INVALID")
    assert why in body["error"]["message"]


def test_one_that_gives_up_frees_its_blocks(house: Served) -> None:
    # More requests come than D has blocks for, P hears of none, and the clients leave at once.
    body = json.dumps(
        {
            "prompt": PROMPTS[2].text,
            "kv_transfer_params": {"do_remote_prefill": True, "handoff_id": "never"},
        }
    ).encode()
    host, port = house.d.removeprefix("http://").split(":")
    head = f"POST /v1/completions HTTP/1.1\r\nHost: d\r\nContent-Length: {len(body)}\r\n\r\n"
    for index in range(40):
        with socket.create_connection((host, int(port))) as line:
            line.sendall(head.encode() + body.replace(b"never", f"never-{index}".encode()))
            time.sleep(0.05)
    prompt = PROMPTS[3]
    assert said(ask(house.router, prompt=prompt.text)) == decode(prompt.answer_ids)


def test_an_engine_ends_with_its_worker(house: Served) -> None:
    # Rank 1 of the test's own engine is killed, so that no other test waits for what can't come.
    port = free_port()
    command = ("-m", "restow.demo.serve", "--broker", house.broker, "--name", "ends")
    with process(*command, "--port", str(port), "--tp", "2") as running:
        base = f"http://127.0.0.1:{port}"
        assert said(ask(base, prompt=PROMPTS[0].text)) == decode(PROMPTS[0].answer_ids)
        os.kill(workers(running.pid)[1], signal.SIGKILL)
        running.wait(20)


def workers(pid: int) -> list[int]:
    """Return the processes that the engine's fork server has forked."""
    (server,) = children(pid)
    return children(server)


def children(pid: int) -> list[int]:
    return [int(one) for one in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]


def test_a_killed_p_is_named(house: Served) -> None:
    # This is the last test: P does not come back, and the router has D compute.
    prompt, lost = PROMPTS[4], {"do_remote_decode": True, "handoff_id": "lost"}
    status, first = ask(house.p, prompt=prompt.text, kv_transfer_params=lost)
    assert status == 200
    # P answers when it has said that the state is there, which the broker may hear a moment later.
    with AdminClient(house.broker) as client:
        while "lost" not in [one.handoff_id for one in client.handoffs("READY").handoffs]:
            time.sleep(0.05)
    house.processes["p"].kill()
    house.processes["p"].wait()
    status, body = ask(house.d, prompt=prompt.text, kv_transfer_params=first["kv_transfer_params"])
    # Who is first to notice: D's agent, which was ordered to read, or the broker.
    lost_to = {"PEER_LOST", "AGENT_LOST", "ENGINE_LOST"}
    assert status == 503
    assert body["error"]["type"] in lost_to
    assert said(ask(house.d, prompt=prompt.text)) == decode(prompt.answer_ids)
    assert said(ask(house.router, prompt=prompt.text)) == decode(prompt.answer_ids)
