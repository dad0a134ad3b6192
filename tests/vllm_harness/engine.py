"""The test's end of a vLLM engine: start it, ask it, end it and all its processes."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import signal
from collections.abc import AsyncIterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

START_S = 240.0
ANSWER_S = 240.0
BLOCKS = 512
"""Enough for every test, and soon zeroed."""
PATIENT = {"lease_ms": 240_000, "request_timeout_ms": 240_000}
"""A small machine that runs six engines' processes may keep one from running for half a minute."""
HERE = Path(__file__).parent
OURS = [str(HERE.parent)] + [
    str(HERE.parents[1] / name) for name in ("broker", "agents", "kernels", "proto")
]
"""The code of this tree, wherever vLLM's environment has another."""
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


class VllmEngine:
    """A running engine."""

    def __init__(self, process: asyncio.subprocess.Process, answers: asyncio.StreamReader) -> None:
        self.process = process
        self._reader = answers
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
        told = {"op": "generate", "prompt": prompt, "max_tokens": max_tokens, "params": params}
        return self._begin({**told, **more})

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
        )

    async def call(self, method: str, **arguments: Any) -> None:
        """Call a method of all workers."""
        number = self._begin({"op": "call", "method": method, "arguments": arguments})
        await asyncio.wait_for(self._waiting[number], ANSWER_S)

    async def version(self, version: str) -> None:
        """Tell the engine which version its weights are."""
        number = self._begin({"op": "version", "version": version})
        await asyncio.wait_for(self._waiting[number], ANSWER_S)

    async def forget(self, connector: bool = False) -> bool:
        """Reset the prefix cache; return whether that was done: not while blocks are in use.

        With ``connector`` the connector's cache is reset, too.
        """
        number = self._begin({"op": "forget", "connector": connector})
        told = await asyncio.wait_for(self._waiting[number], ANSWER_S)
        return bool(told["forgotten"])

    def abort(self, number: int) -> None:
        self._tell({"id": number, "op": "abort"})

    def hold(self) -> None:
        """Compute nothing until `resume`; requests are taken, and wait."""
        self._tell({"op": "hold"})

    def resume(self) -> None:
        self._tell({"op": "resume"})

    def kill(self) -> None:
        """Kill the engine and its workers at once."""
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.process.pid, signal.SIGKILL)

    async def close(self) -> None:
        self._listening.cancel()
        if self.process.stdin is not None:
            self.process.stdin.close()
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(self.process.wait(), 20)
        self.kill()

    def _begin(self, message: dict[str, Any]) -> int:
        """Send a message that the engine answers; return the number of the answer."""
        self._next += 1
        self._waiting[self._next] = asyncio.get_running_loop().create_future()
        self._tell({"id": self._next, **message})
        return self._next

    def _tell(self, message: dict[str, Any]) -> None:
        assert self.process.stdin is not None
        self.process.stdin.write(json.dumps(message).encode() + b"\n")

    async def _listen(self) -> None:
        while line := await self._reader.readline():
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
    read_fd, write_fd = os.pipe()
    environment = {
        **{k: v for k, v in os.environ.items() if k not in ("PYTHONPATH", "PYTHONSAFEPATH")},
        **ENVIRONMENT,
        **(RESTING if options.resting else {}),
        "VLLM_SSM_CONV_STATE_LAYOUT": options.conv_layout,
        **options.environment,
    }
    with log.open("wb") as out:
        process = await asyncio.create_subprocess_exec(
            python,
            HERE / "engine_main.py",
            str(write_fd),
            json.dumps(options.arguments()),
            stdin=asyncio.subprocess.PIPE,
            stdout=out,
            stderr=out,
            pass_fds=(write_fd,),
            env=environment,
            start_new_session=True,
        )
    os.close(write_fd)
    reader = asyncio.StreamReader(limit=1 << 26)
    await asyncio.get_running_loop().connect_read_pipe(
        lambda: asyncio.StreamReaderProtocol(reader), os.fdopen(read_fd, "rb")
    )
    try:
        first = await asyncio.wait_for(reader.readline(), START_S)
        if not first:
            raise RuntimeError(f"the engine did not start: its words are in {log}")
        engine = VllmEngine(process, reader)
    except BaseException:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        raise
    try:
        yield engine
    finally:
        await engine.close()
