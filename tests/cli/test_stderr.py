"""Nobody who writes a log waits for who reads it; and it has one form, whoever writes."""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
import os
import socket
import ssl
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import IO, Any

import pytest

from broker.certificates import Authority
from broker.fakes import P_BLOCKS, POSITION, engine, model_layout, pair
from cli.broker_process import COMMAND, LINE
from restow.broker.logs import LineFormatter, get_logger, log_as
from restow.broker.stderr import ThreadedHandler

SERVE = [*COMMAND, "serve", "--listen", "127.0.0.1:0"]
WAIT_S = 30.0
WRITES = r"""
import logging, os, warnings
from restow.broker.logs import get_logger
from restow.broker.stderr import logging_to_stderr

with logging_to_stderr(as_json=AS_JSON):
    get_logger("restow.broker").info("a line", name="p\x1b[2J\nDONE \u202e", count=3)
    logging.getLogger("opentelemetry.exporter").warning("lost %s", "a trace\x1b[2J")
    logging.getLogger("other.library").info("not for operators")
    logging.getLogger("other.library").warning("%d of them", "no number")
    warnings.warn("old")
    os.write(2, b"E0000 00:00:1764145.1 42 ssl_transport_security.cc:1884] Handshake failed\n")
    os.write(2, b"ucx says \x1b[31m\xff\n" * 3 + b"no end")
    try:
        raise ValueError("no\x1b[2Jtext\nforged")
    except ValueError:
        get_logger("restow.broker").error("it failed", exc_info=True)
os.write(2, b"after\n")
"""


def written(as_json: bool) -> list[str]:
    program = WRITES.replace("AS_JSON", str(as_json))
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, check=True)
    *lines, last = done.stderr.decode().splitlines()
    assert last == "after"
    return lines


def test_whoever_writes_lines_have_one_form_for_programs() -> None:
    lines = [json.loads(line) for line in written(True)]
    by = {one["event"]: one for one in lines}
    assert all({"event", "timestamp", "level", "logger"} <= set(one) for one in lines)
    assert by["a line"]["name"] == "p\x1b[2J\nDONE \u202e"
    assert by["a line"]["count"] == 3
    assert by["lost a trace\x1b[2J"]["logger"] == "opentelemetry.exporter"
    failed = by["Handshake failed"]
    assert (failed["level"], failed["logger"]) == ("error", "grpc")
    assert failed["source"] == "ssl_transport_security.cc:1884"
    assert sum(one["event"].startswith("ucx says") for one in lines) == 3
    assert by["no end"]["logger"] == "stderr"
    assert "forged" in by["it failed"]["exception"]
    assert any("UserWarning: old" in event for event in by)
    assert "not for operators" not in by


def test_whoever_writes_no_line_steers_a_terminal() -> None:
    lines = written(False)
    assert all(line.isprintable() for line in lines)
    (line,) = [one for one in lines if "a line" in one]
    assert r"name='p\x1b[2J\nDONE \u202e'" in line
    assert any("Handshake failed" in one and "grpc" in one for one in lines)


def test_lines_that_nobody_reads_are_counted_and_said_later() -> None:
    begin, end = os.pipe()
    handler = ThreadedHandler(end, LineFormatter(as_json=True), max_lines=100)
    log = logging.Logger("unread")
    log.addHandler(handler)
    count = 20_000
    for number in range(count):
        log.warning("line %d of those that nobody reads", number)
    lost = said = 0
    with open(begin, encoding="utf-8") as lines:
        while lost + said < count:
            line: dict[str, Any] = json.loads(lines.readline())
            if line["event"] == "lines of the log could not be written":
                lost += line["count"]
            else:
                said += 1
        log.warning("the next")
        assert json.loads(lines.readline())["event"] == "the next"
    assert lost + said == count
    assert lost > count // 2
    os.close(end)


def test_who_has_left_stops_nobody() -> None:
    begin, end = os.pipe()
    handler = ThreadedHandler(end, LineFormatter())
    os.close(begin)
    handler.handle(logging.makeLogRecord({"msg": "for nobody"}))
    handler.flush()
    os.close(end)


@contextlib.contextmanager
def unread_broker(*options: str) -> Iterator[tuple[str, IO[str]]]:
    """Start a broker whose stderr nobody reads; yield its address, and its stderr."""
    process = subprocess.Popen(
        [*SERVE, *options], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )
    assert process.stdout is not None
    assert process.stderr is not None
    try:
        yield process.stdout.readline().removeprefix(LINE).strip(), process.stderr
    finally:
        process.kill()
        process.communicate()


def test_a_broker_whose_stderr_nobody_reads_goes_on() -> None:
    async def bring_lines_about(address: str) -> None:
        async with (
            asyncio.timeout(WAIT_S),
            pair(address, 1, 1) as both,
            engine(address, "other", layout=model_layout(1)) as (_, agents),
        ):
            both.p.publish("h", P_BLOCKS, POSITION)
            await both.p_agents[0].fence("h")
            for _ in range(3000):
                await agents[0].fence("h")
            await both.hand_over("next")

    with unread_broker() as (address, _):
        asyncio.run(bring_lines_about(address))


def test_grpcs_own_lines_have_the_brokers_form(tmp_path: Path) -> None:
    authority = Authority(tmp_path)
    own = authority.issue(server=True)
    files = {"--tls-cert": own.certificate, "--tls-key": own.key, "--client-ca": authority.path}
    options = [word for name, path in files.items() for word in (name, str(path))]
    with unread_broker("--log-format", "json", *options) as (address, stderr):
        shake_hands(address)
        line = next(one for one in map(json.loads, stderr) if one["logger"] == "grpc")
        assert "andshake" in line["event"]


def shake_hands(address: str) -> None:
    """Begin TLS without a certificate, and be refused."""
    host, _, port = address.rpartition(":")
    context = ssl.create_default_context()
    context.check_hostname, context.verify_mode = False, ssl.CERT_NONE
    with (
        contextlib.suppress(OSError),
        socket.create_connection((host, int(port)), timeout=WAIT_S) as plain,
    ):
        context.wrap_socket(plain).recv(1)


def test_inside_of_an_engine_lines_look_as_the_engines(
    capsys: pytest.CaptureFixture[str],
) -> None:
    theirs, ours = logging.getLogger("an.engine"), logging.getLogger("restow")
    handler = logging.StreamHandler(sys.stdout)
    handler.setFormatter(logging.Formatter("%(levelname)s engine [%(filename)s] %(message)s"))
    theirs.addHandler(handler)
    theirs.setLevel(logging.INFO)
    try:
        log_as("an.engine")
        get_logger("restow.agent").bind(engine="p").info("welcomed", broker="x\x1b[2J")
        get_logger("restow.agent").debug("not wanted")
        printed = capsys.readouterr()
        assert (
            printed.err == "INFO engine [test_stderr.py] welcomed engine='p' broker='x\\x1b[2J'\n"
        )
        assert not printed.out
    finally:
        theirs.handlers.clear()
        ours.handlers.clear()
        ours.propagate = True
        ours.setLevel(logging.NOTSET)
