"""`restow router`, as it is typed."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
from asyncio.subprocess import PIPE, Process
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path

import pytest
from aiohttp import ClientSession, web

from cli.broker_process import COMMAND, serving
from cli.typed import failed
from forked.ports import free_port
from router.fake_engine import COMPLETIONS, Answer, FakeEngine, fake_engine, well
from router.test_moves import PROMPT, REPLY, computes_on, text

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
        ((*ENGINES, "--decode", "@no/such"), "no/such can't be read: No such file or directory"),
        ((*ENGINES[:2], "--decode", "@/dev/null"), "@/dev/null names no engine"),
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


@asynccontextmanager
async def router_of_files(
    folder: Path, p: str, d: str | Callable[[Process], None]
) -> AsyncIterator[tuple[str, Process]]:
    """Run a router whose D's stand in the file ``decode``; yield its address and its process.

    If ``d`` is called, it has the router, which starts, read them.
    """
    if isinstance(d, str):
        (folder / "decode").write_text(d)
    address = f"127.0.0.1:{free_port()}"
    words = ["--listen", address, "--prefill", p, "--decode", f"@{folder / 'decode'}"]
    process = await asyncio.create_subprocess_exec(
        *COMMAND, "router", *words, stdout=PIPE, stderr=PIPE
    )
    assert process.stdout is not None
    try:
        if not isinstance(d, str):
            await asyncio.to_thread(d, process)
        await process.stdout.readline()
        yield f"http://{address}", process
    finally:
        process.terminate()
        await process.communicate()


async def asked(http: ClientSession, url: str) -> str:
    """Return the D that a router asks."""
    async with http.get(f"{url}/health") as response:
        d: str = (await response.json())["url"]
    return d


async def test_a_reply_goes_on_at_an_engine_that_a_file_named_later(tmp_path: Path) -> None:
    drained = asyncio.Event()

    async def leaves(engine: FakeEngine, request: web.Request) -> web.StreamResponse:
        await drained.wait()
        return await computes_on(3)(engine, request)

    async with (
        fake_engine(well) as p,
        fake_engine(replies(leaves)) as d0,
        fake_engine(replies(computes_on())) as d1,
        router_of_files(tmp_path, p.url, d0.url) as (url, process),
        ClientSession() as http,
    ):
        body = {"prompt": PROMPT, "max_tokens": len(REPLY)}
        reply = asyncio.create_task(http.post(f"{url}{COMPLETIONS}", json=body))
        await d0.came.wait()
        (tmp_path / "decode").write_text(f"d1={d1.url}\n")
        process.send_signal(signal.SIGHUP)
        while await asked(http, url) != d1.url:
            pass
        drained.set()
        async with await reply as response:
            (choice,) = (await response.json())["choices"]
        assert choice["text"] == text(REPLY)
        assert d1.bodies[-1]["prompt"] == [*PROMPT, *REPLY[:3]]


async def test_a_signal_before_it_serves_has_files_read_again_too(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "decode")

    def signalled(process: Process) -> None:
        with (tmp_path / "decode").open("w") as pipe:  # once the router reads it
            (tmp_path / "later").write_text(d1.url)
            (tmp_path / "later").replace(tmp_path / "decode")
            process.send_signal(signal.SIGHUP)
            pipe.write(d0.url)

    async with (
        fake_engine(well) as p,
        fake_engine(well) as d0,
        fake_engine(well) as d1,
        router_of_files(tmp_path, p.url, signalled) as (url, _),
        ClientSession() as http,
    ):
        assert await asked(http, url) == d1.url


@pytest.mark.parametrize("broken", ["", "d1", "http://me:key@d:1"])
async def test_engines_stay_if_a_file_is_wrong(tmp_path: Path, broken: str) -> None:
    async with (
        fake_engine(well) as p,
        fake_engine(well) as d,
        router_of_files(tmp_path, p.url, d.url) as (url, process),
        ClientSession() as http,
    ):
        (tmp_path / "decode").write_text(broken)
        process.send_signal(signal.SIGHUP)
        assert process.stderr is not None
        async with asyncio.timeout(20):
            while b"engines stay" not in await process.stderr.readline():
                pass
        assert await asked(http, url) == d.url


def replies(to_prompts: Answer) -> Answer:
    """Answer prompts in one way, and all else as an engine does when nothing is wrong."""

    async def answer(engine: FakeEngine, request: web.Request) -> web.StreamResponse:
        return await (to_prompts if request.method == "POST" else well)(engine, request)

    return answer
