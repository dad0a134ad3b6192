"""`restow router`, as it is typed."""

from __future__ import annotations

import asyncio
import subprocess
import sys

import pytest
from aiohttp import ClientSession

from cli.broker_process import serving
from cli.typed import failed
from forked.ports import free_port
from router.fake_engine import COMPLETIONS, fake_engine, well

ENGINES = ("--prefill", "http://127.0.0.1:1", "--decode", "http://127.0.0.1:2")


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (("--prefill", "http://h:1"), "Missing option '--decode'"),
        ((*ENGINES, "--listen", "8000"), "it has no host; write 127.0.0.1:8000"),
        ((*ENGINES, "--listen", "127.0.0.1:99999"), "its port is no number of 0 to 65535"),
        ((*ENGINES, "--decode", "d:8100"), "d:8100 is not an http:// or https:// URL"),
        ((*ENGINES, "--decode", "d1=d:8100"), "d1=d:8100 is not an http:// or https:// URL"),
        ((*ENGINES, "--decode", "http://me:key@d:1"), "URL without a user"),
        ((*ENGINES, "--find-ms", "20"), "each prefill engine needs its id (ID=URL)"),
    ],
)
def test_wrong_options_are_named(options: tuple[str, ...], words: str) -> None:
    outcome = failed("router", *options)
    assert outcome.code == 2
    assert words in " ".join(outcome.err.replace("│", " ").split())


def test_without_its_extra_it_says_what_to_install() -> None:
    program = (
        "import sys; sys.modules['aiohttp'] = None\n"
        f"from restow.broker.cli.main import main; main(['router', *{ENGINES!r}])"
    )
    command = [sys.executable, "-c", program]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 1
    assert "EXTRA_MISSING: the router needs module aiohttp" in done.stderr
    assert "restow[router]" in done.stderr


async def test_it_serves_with_and_without_a_broker_until_it_is_told_to_stop() -> None:
    async with fake_engine(well) as p, fake_engine(well) as d, ClientSession() as http:
        for more in ((), ("--find-ms", "100", "--broker", "127.0.0.1:1")):
            address = f"127.0.0.1:{free_port()}"
            words = ["--listen", address, "--prefill", f"p0={p.url}", "--decode", d.url, *more]
            with serving("router", *words) as stdout:
                assert f"http://{address}" in await asyncio.to_thread(stdout.readline)
                body = {"prompt": [*range(20)]}
                async with http.post(f"http://{address}{COMPLETIONS}", json=body) as response:
                    assert response.status == 200
