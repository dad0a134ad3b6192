"""vLLM's own servers, and routers before some of them, each in a process of its own."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import signal
import sys
from collections.abc import AsyncIterator, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from aiohttp import ClientError, ClientSession

from forked.ports import free_port
from vllm_harness.engine import BLOCKS, HERE, PATIENT, START_S, kill_group, vllm_forks


@dataclass(frozen=True)
class Server:
    """A server of vLLM's, whose process leads a session."""

    url: str
    pid: int

    def terminate(self) -> None:
        """Tell the server to end."""
        os.kill(self.pid, signal.SIGTERM)

    def stop(self) -> None:
        """Stop all processes of the server, so that it answers nobody."""
        os.killpg(self.pid, signal.SIGSTOP)

    def kill(self) -> None:
        """Kill all processes of the server."""
        os.killpg(self.pid, signal.SIGKILL)


@contextlib.asynccontextmanager
async def vllm_servers(
    python: Path,
    model: Path,
    engine_ids: Iterable[str],
    broker: str,
    logs: Path,
    *more: str,
    prefix: str = "find+tell",
) -> AsyncIterator[list[Server]]:
    """Serve a model, named "model", by engines of both sides, started at once.

    With ``prefix`` "off" nothing is cached of prompts.
    """
    async with contextlib.AsyncExitStack() as stack:
        begun = (
            stack.enter_async_context(
                _vllm_server(python, model, one, broker, logs / one, *more, prefix=prefix)
            )
            for one in engine_ids
        )
        yield await asyncio.gather(*begun)


@contextlib.asynccontextmanager
async def _vllm_server(
    python: Path, model: Path, engine_id: str, broker: str, log: Path, *more: str, prefix: str
) -> AsyncIterator[Server]:
    url = f"http://127.0.0.1:{(port := free_port())}"
    caching = "--no-enable-prefix-caching" if prefix == "off" else "--enable-prefix-caching"
    transfer = {
        "kv_connector": "RestowConnector",
        "kv_connector_module_path": "restow.agents.engines.vllm",
        "kv_role": "kv_both",
        "kv_load_failure_policy": "recompute",
        "engine_id": engine_id,
        "kv_connector_extra_config": {"broker": broker, "prefix": prefix, **PATIENT},
    }
    words = [
        *("serve", str(model), "--served-model-name", "model", "--port", str(port)),
        *("--host", "127.0.0.1", "--enforce-eager", "--dtype", "float32", "--max-num-seqs", "8"),
        *("--num-gpu-blocks-override", str(BLOCKS), caching),
        *("--kv-transfer-config", json.dumps(transfer), *more),
    ]
    nothing = os.open(os.devnull, os.O_RDONLY)
    with log.open("wb") as out:
        pid = await vllm_forks(python).fork({"command": words}, nothing, out.fileno())
    os.close(nothing)
    async with _ended_after(pid):
        await _well(url, pid, log)
        yield Server(url, pid)


@contextlib.asynccontextmanager
async def router(
    broker: str,
    prefill: Sequence[str],
    decode: Sequence[str],
    log: Path,
    find_ms: int = 1000,
    silence_s: float = 600.0,
) -> AsyncIterator[str]:
    """Run a router before engines that are named ``ID=URL``, and yield its address.

    The router finds who holds prompts, if that is known within ``find_ms``; 0: the router does not
    ask. It gives up an engine that sends nothing for ``silence_s``.
    """
    listen = f"127.0.0.1:{free_port()}"
    words = ["router", "--listen", listen, "--silence-s", f"{silence_s:g}"]
    words += ["--find-ms", str(find_ms), "--broker", broker] if find_ms else []
    for side, engines in (("--prefill", prefill), ("--decode", decode)):
        words += [word for one in engines for word in (side, one)]
    command = [sys.executable, "-m", "restow.broker.cli.main", *words]
    async with _process(command, log, url := f"http://{listen}"):
        yield url


async def others_folder() -> Path:
    """Return the environment of others' routers, with Dynamo in its folder ``dynamo``."""
    setup = [str(HERE / "other_routers.sh"), sys.executable]
    done = await asyncio.create_subprocess_exec(*setup, stdout=asyncio.subprocess.PIPE)
    told, _ = await done.communicate()
    if done.returncode:
        raise RuntimeError("others' routers can't be installed")
    return Path(told.decode().split()[-1])


@contextlib.asynccontextmanager
async def other_router(name: str, prefill: str, decode: str, log: Path) -> AsyncIterator[str]:
    """Run another project's router before a P and a D, and yield its address."""
    program = await others_folder() / "bin" / name
    base = f"http://127.0.0.1:{(port := free_port())}"
    at = ["--host", "127.0.0.1", "--port", str(port)]
    if name == "vllm-router":
        pair = ["--vllm-pd-disaggregation", "--prefill", prefill, "--decode", decode]
        async with _process([str(program), *pair, *at], log, base):
            yield base
        return
    command = [str(program), "launch", "--pd-disaggregation", "--backend", "vllm", *at]
    async with _process(command, log, base, "/liveness"), ClientSession() as http:
        for url, side in ((prefill, "prefill"), (decode, "decode")):
            said = {"url": url, "worker_type": side, "runtime_type": "vllm"}
            # It marks P's requests for those connectors alone that it knows by name.
            asked = {**said, "kv_connector": "NixlConnector"}
            async with http.post(f"{base}/workers", json=asked) as response:
                response.raise_for_status()
        async with asyncio.timeout(START_S):
            while not await _is_well(http, base, "/readiness"):  # noqa: ASYNC110 - no event tells
                await asyncio.sleep(0.2)
        yield base


async def complete(http: ClientSession, base: str, prompt: list[int], **more: Any) -> list[int]:
    """Return the tokens that follow a prompt, of which ``max_tokens`` says how many."""
    body = {"model": "model", "prompt": prompt, "temperature": 0.0, "ignore_eos": True}
    said = {**body, "return_token_ids": True, **more}
    async with http.post(f"{base}/v1/completions", json=said) as response:
        answer: Any = await response.json()
        assert response.ok, answer
    (choice,) = answer["choices"]
    ids: list[int] = choice["token_ids"]
    return ids


@contextlib.asynccontextmanager
async def _process(
    command: Sequence[str], log: Path, url: str, well: str = "/health"
) -> AsyncIterator[None]:
    with log.open("wb") as out:
        process = await asyncio.create_subprocess_exec(
            *command,
            stdout=out,
            stderr=out,
            env={k: v for k, v in os.environ.items() if k != "PYTHONSAFEPATH"},
            start_new_session=True,
        )
    async with _ended_after(process.pid):
        await _well(url, process.pid, log, well)
        yield


@contextlib.asynccontextmanager
async def _ended_after(pid: int) -> AsyncIterator[None]:
    try:
        yield
    finally:
        kill_group(pid)


async def _well(url: str, pid: int, log: Path, path: str = "/health") -> None:
    """Wait until a process says that it is well. Fail if it has ended."""
    async with ClientSession() as http, asyncio.timeout(START_S):
        while not await _is_well(http, url, path):
            try:
                os.kill(pid, 0)
            except ProcessLookupError:
                raise RuntimeError(f"it ended: its words are in {log}") from None
            await asyncio.sleep(0.2)


async def _is_well(http: ClientSession, base: str, path: str) -> bool:
    try:
        async with http.get(base + path) as response:
            return bool(response.ok)
    except (ClientError, TimeoutError):
        return False
