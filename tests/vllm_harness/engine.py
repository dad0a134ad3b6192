"""The test's end of a vLLM engine: start it, ask it, end it and all its processes."""

from __future__ import annotations

import asyncio
import contextlib
import functools
import json
import os
import signal
import socket
import subprocess
import threading
from collections.abc import AsyncIterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

START_S = 240.0
ANSWER_S = 240.0
END_S = 20.0
BLOCKS = 512
"""Enough for every test, and soon zeroed."""
PATIENT = {"lease_ms": 240_000, "request_timeout_ms": 240_000}
"""A small machine that runs six engines' processes may keep one from running for half a minute."""
HERE = Path(__file__).parent
MAIN = HERE / "engine_main.py"
OURS = [str(HERE.parent)] + [
    str(HERE.parents[1] / name) for name in ("broker", "agents", "kernels", "proto")
]
"""The code of this tree, wherever vLLM's environment has another."""
TWO_ENGINES: dict[str, Any] = {
    "engine": {"data_parallel_size": 2},
    "environment": {"VLLM_CPU_SIM_MULTI_NUMA": "0"},
}
"""Options for two data-parallel ranks, each of which vLLM 0.33 else wants on a memory node of its
own; few machines have two."""
RESTING = {
    "PYTHONPATH": os.pathsep.join((*OURS, str(HERE / "every_process"))),
    "TORCH_COMPILE_DISABLE": "1",
}
"""For a dozen processes of vLLM on few processors: they are forked, spin nowhere, compile
nothing (vLLM compiles small functions at their first use, eager or not)."""
ENVIRONMENT = {
    "PYTHONPATH": os.pathsep.join(OURS),
    "VLLM_CPU_KVCACHE_SPACE": "1",
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    "OMP_NUM_THREADS": "1",
    "HF_HUB_OFFLINE": "1",
    "VLLM_NO_USAGE_STATS": "1",
    "TOKENIZERS_PARALLELISM": "false",
}


def environment_of_vllm(**more: str) -> dict[str, str]:
    """Return the environment of a process that runs vLLM with the code of this tree."""
    left_out = ("PYTHONPATH", "PYTHONSAFEPATH")
    return {k: v for k, v in os.environ.items() if k not in left_out} | ENVIRONMENT | more


@dataclass(frozen=True)
class Options:
    """What engines differ in."""

    model: Path
    tp: int = 1
    role: str = ""
    broker: str = ""
    conv_layout: str = "SD"
    connector: str = "restow"
    prefix_caching: bool = False
    policy: str = "fail"
    engine_id: str = ""
    extra: dict[str, Any] = field(default_factory=dict)
    engine: dict[str, Any] = field(default_factory=dict)
    environment: dict[str, str] = field(default_factory=dict)
    resting: bool = True
    """As `RESTING` says; a benchmark may take vLLM as it is."""

    def arguments(self) -> dict[str, Any]:
        """Return vLLM's arguments for these options."""
        arguments: dict[str, Any] = {
            "model": str(self.model),
            "tensor_parallel_size": self.tp,
            "skip_tokenizer_init": True,
            "enforce_eager": True,
            "max_model_len": 256,
            "max_num_seqs": 32,
            "num_gpu_blocks_override": BLOCKS,
            "dtype": "float32",
            "enable_prefix_caching": self.prefix_caching,
            "disable_log_stats": False,
        }
        if self.role:
            transfer: dict[str, Any] = {
                "kv_role": self.role,
                "kv_load_failure_policy": self.policy,
                "kv_buffer_device": "cpu",
            }
            if self.engine_id:
                transfer["engine_id"] = self.engine_id
            if self.connector == "restow":
                transfer |= {
                    "kv_connector": "RestowConnector",
                    "kv_connector_module_path": "restow.agents.engines.vllm",
                    "kv_connector_extra_config": {"broker": self.broker, **PATIENT, **self.extra},
                }
            else:
                transfer |= {
                    "kv_connector": self.connector,
                    "kv_connector_extra_config": self.extra,
                }
            arguments["kv_transfer_config"] = transfer
        return arguments | self.engine


@dataclass(frozen=True)
class Answer:
    """What an engine said to a prompt."""

    tokens: tuple[int, ...]
    finish: str | None
    params: dict[str, Any] | None
    error: str = ""
    cached: int = 0
    """Tokens of the prompt that the engine did not compute."""
    logprobs: tuple[dict[int, float], ...] = ()
    """Of each token said, those of the likeliest; asked for with ``logprobs=2`` or more."""
    first_s: float = 0.0
    second_s: float = 0.0
    done_s: float = 0.0
    """When the first, the second and the last token came, on the host's monotonic clock."""
    stop_reason: int | str | None = None


class VllmForks:
    """A process that has imported vLLM, and forks engines and servers that so start sooner.

    More than half of what an engine's start costs on a CPU is importing vLLM. The process ends with
    this one, and its engines with their standard input.
    """

    def __init__(self, python: Path) -> None:
        self._lock = threading.Lock()
        self._control, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        with theirs:
            self._process = subprocess.Popen(
                [python, MAIN, str(theirs.fileno())],
                pass_fds=(theirs.fileno(),),
                env=environment_of_vllm(**RESTING),
            )

    async def fork(self, told: Mapping[str, Any], *fds: int) -> int:
        """Have a process forked that does what it is told, and return its id.

        ``fds`` are its standard input, its output, and where an engine answers.
        """
        async with asyncio.timeout(START_S):
            return await asyncio.to_thread(self._fork, json.dumps(told).encode(), fds)

    def _fork(self, told: bytes, fds: tuple[int, ...]) -> int:
        with self._lock:
            socket.send_fds(self._control, [told], fds)
            return int(self._control.recv(64))


@functools.cache
def vllm_forks(python: Path) -> VllmForks:
    """Return the process that forks engines of an environment; the first call starts it."""
    return VllmForks(python)


def kill_group(pid: int) -> None:
    """Kill a process that leads a session, and all processes in it, at once."""
    with contextlib.suppress(ProcessLookupError):
        os.killpg(pid, signal.SIGKILL)


class VllmEngine:
    """A running engine."""

    def __init__(
        self, pid: int, orders: asyncio.WriteTransport, answers: asyncio.StreamReader
    ) -> None:
        self.pid = pid
        self._orders, self._answers = orders, answers
        self._next = 0
        self._waiting: dict[int, asyncio.Future[dict[str, Any]]] = {}
        self._listening = asyncio.create_task(self._listen())

    async def ask(
        self, prompt: list[int], max_tokens: int, params: dict[str, Any] | None = None, **more: Any
    ) -> Answer:
        """Generate greedily, and return the answer."""
        return await self.answer(self.begin(prompt, max_tokens, params, **more))

    def begin(
        self, prompt: list[int], max_tokens: int, params: dict[str, Any] | None = None, **more: Any
    ) -> int:
        """Begin to generate; `answer` waits for the result."""
        told = {"prompt": prompt, "max_tokens": max_tokens, "params": params}
        return self._begin("generate", **told, **more)

    async def answer(self, number: int) -> Answer:
        told = await asyncio.wait_for(self._waiting[number], ANSWER_S)
        return Answer(
            tuple(told["tokens"]),
            told["finish"],
            told["params"],
            told.get("error", ""),
            told.get("cached") or 0,
            tuple(
                {int(token): value for token, value in step.items()}
                for step in told.get("logprobs", ())
            ),
            told.get("first_s", 0.0),
            told.get("second_s", 0.0),
            told.get("done_s", 0.0),
            told.get("stop_reason"),
        )

    async def call(self, method: str, **arguments: Any) -> None:
        """Call a method of all workers."""
        await self._done("call", method=method, arguments=arguments)

    async def version(self, version: str) -> None:
        """Tell the engine which version its weights are."""
        await self._done("version", version=version)

    async def forget(self, connector: bool = False) -> bool:
        """Reset the prefix cache; return whether that was done: not while blocks are in use.

        With ``connector`` the connector's cache is reset, too.
        """
        return bool((await self._done("forget", connector=connector))["forgotten"])

    def abort(self, number: int) -> None:
        self._tell({"id": number, "op": "abort"})

    def hold(self) -> None:
        """Compute nothing until `resume`; requests are taken, and wait."""
        self._tell({"op": "hold"})

    def resume(self) -> None:
        self._tell({"op": "resume"})

    def kill(self) -> None:
        """Kill the engine and its workers at once."""
        kill_group(self.pid)

    async def close(self) -> None:
        self._orders.close()
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(self._listening, END_S)
        self.kill()

    def _begin(self, op: str, **more: Any) -> int:
        """Send a message that the engine answers; return the number of the answer."""
        self._next += 1
        self._waiting[self._next] = asyncio.get_running_loop().create_future()
        self._tell({"id": self._next, "op": op, **more})
        return self._next

    async def _done(self, op: str, **more: Any) -> dict[str, Any]:
        return await asyncio.wait_for(self._waiting[self._begin(op, **more)], ANSWER_S)

    def _tell(self, message: dict[str, Any]) -> None:
        self._orders.write(json.dumps(message).encode() + b"\n")

    async def _listen(self) -> None:
        while line := await self._answers.readline():
            told = json.loads(line)
            waiting = self._waiting.get(told["id"])
            if waiting is not None and not waiting.done():
                waiting.set_result(told)
        for waiting in self._waiting.values():
            if not waiting.done():
                waiting.set_exception(ConnectionError("the engine has ended"))


@contextlib.asynccontextmanager
async def vllm_engine(python: Path, options: Options, log: Path) -> AsyncIterator[VllmEngine]:
    """Start an engine whose output goes to ``log``."""
    loop = asyncio.get_running_loop()
    (their_orders, our_orders), (our_answers, their_answers) = os.pipe(), os.pipe()
    orders, _ = await loop.connect_write_pipe(asyncio.BaseProtocol, os.fdopen(our_orders, "wb"))
    answers = asyncio.StreamReader(limit=1 << 26)
    await loop.connect_read_pipe(
        lambda: asyncio.StreamReaderProtocol(answers), os.fdopen(our_answers, "rb")
    )
    own = {"VLLM_SSM_CONV_STATE_LAYOUT": options.conv_layout, **options.environment}
    arguments = options.arguments()
    with log.open("wb") as out:
        if options.resting:
            told = {"arguments": arguments, "environment": own}
            fds = their_orders, out.fileno(), their_answers
            pid = await vllm_forks(python).fork(told, *fds)
        else:
            pid = subprocess.Popen(  # noqa: ASYNC220 - it is asked later
                [python, MAIN, str(their_answers), json.dumps(arguments)],
                stdin=their_orders,
                stdout=out,
                stderr=out,
                pass_fds=(their_answers,),
                env=environment_of_vllm(**own),
                start_new_session=True,
            ).pid
    os.close(their_orders)
    os.close(their_answers)
    try:
        if not await asyncio.wait_for(answers.readline(), START_S):
            raise RuntimeError(f"the engine did not start: its words are in {log}")
        engine = VllmEngine(pid, orders, answers)
    except BaseException:
        kill_group(pid)
        raise
    try:
        yield engine
    finally:
        await engine.close()
