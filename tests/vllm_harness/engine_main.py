"""A real vLLM engine in a process of its own, told in lines of JSON. Runs in vLLM's environment.

``engine_main.py SOCKET`` imports vLLM, and forks a process for each message of the socket: an
engine, or a command of vLLM's own. ``engine_main.py FD ARGUMENTS`` is one engine, which answers on
the descriptor.

An engine reads ``{"id": 1, "op": "generate", "prompt": [...], "max_tokens": 8, "params": {...}}``,
``{"id": 1, "op": "abort"}``, ``{"id": 1, "op": "forget"}``, ``{"op": "hold"}``,
``{"op": "resume"}``, ``{"id": 1, "op": "call", "method": ..., "arguments": {...}}`` and
``{"id": 1, "op": "version", "version": ...}`` on stdin.
"""

from __future__ import annotations

import asyncio
import json
import os
import signal
import socket
import sys
import time
from inspect import signature
from typing import Any

import torch
import vllm.entrypoints.cli.main
import vllm.entrypoints.cli.serve
import vllm.v1.worker.cpu_worker
from vllm import SamplingParams
from vllm.engine.arg_utils import AsyncEngineArgs
from vllm.lora.request import LoRARequest
from vllm.v1.engine.async_llm import AsyncLLM

import restow.agents.engines.vllm.connector
from restow.broker.families.hf.config import MODELS

__all__ = ["restow", "vllm"]
"""Imported for the processes that are forked."""


class Engine:
    """The engine, and the requests under way."""

    def __init__(self, answers_fd: int, arguments: dict[str, Any]) -> None:
        self._answers = os.fdopen(answers_fd, "w", buffering=1)
        self._engine = AsyncLLM.from_engine_args(AsyncEngineArgs(**arguments))
        self._tasks: dict[int, asyncio.Task[None]] = {}

    async def serve(self) -> None:
        """Serve requests from stdin until it ends."""
        self._answer({"ready": os.getpid()})
        loop = asyncio.get_running_loop()
        reader = asyncio.StreamReader(limit=1 << 26)
        orders = os.fdopen(0, "rb", closefd=False)
        await loop.connect_read_pipe(lambda: asyncio.StreamReaderProtocol(reader), orders)
        while line := await reader.readline():
            told = json.loads(line)
            if told["op"] == "generate":
                self._tasks[told["id"]] = asyncio.create_task(self._generate(told))
            elif told["op"] == "abort":
                await self._engine.abort(f"{told['id']}")
            elif told["op"] == "hold":
                await self._engine.pause_generation(mode="keep", clear_cache=False)
            elif told["op"] == "resume":
                await self._engine.resume_generation()
            elif told["op"] == "forget":
                forgotten = await self._engine.reset_prefix_cache(reset_connector=told["connector"])
                self._answer({"id": told["id"], "forgotten": forgotten})
            elif told["op"] == "call":
                await self._engine.collective_rpc(told["method"], kwargs=told["arguments"])
                self._answer({"id": told["id"]})
            elif told["op"] == "version":
                await self._engine.update_weight_version(told["version"])
                self._answer({"id": told["id"]})
        self._engine.shutdown()

    async def _generate(self, told: dict[str, Any]) -> None:
        sampling = SamplingParams(
            temperature=told.get("temperature", 0.0),
            seed=told.get("seed"),
            max_tokens=told["max_tokens"],
            ignore_eos=True,
            # vLLM has logprobs only of answers that it puts into words.
            detokenize="logprobs" in told,
            logprobs=told.get("logprobs"),
            extra_args={"kv_transfer_params": told["params"]} if told.get("params") else None,
        )
        prompt: dict[str, Any] = {"prompt_token_ids": told["prompt"]}
        if told.get("embeds"):
            prompt = {"prompt_embeds": torch.load(told["embeds"], weights_only=True)}
        if told.get("salt"):
            prompt["cache_salt"] = told["salt"]
        more: dict[str, Any] = {}
        if (hints := told.get("hints")) and "kv_hints" in signature(
            self._engine.generate
        ).parameters:
            from vllm.v1.kv_hints import KvHintAction, KvHintsEnvelope

            actions = [KvHintAction(**action) for action in hints["actions"]]
            more["kv_hints"] = KvHintsEnvelope(**{**hints, "actions": actions})
        elif hints:  # as Dynamo gives them to an engine without an envelope
            params = {**(told.get("params") or {}), "kv_hint": hints}
            sampling.extra_args = {"kv_transfer_params": params}
        lora = LoRARequest(*told["lora"]) if told.get("lora") else None
        answer: dict[str, Any] = {"id": told["id"], "tokens": [], "finish": None, "params": None}
        try:
            async for output in self._engine.generate(
                prompt,
                sampling,
                f"{told['id']}",
                lora_request=lora,
                trace_headers=told.get("trace_headers"),
                **more,
            ):
                (one,) = output.outputs
                answer["tokens"] = list(one.token_ids)
                answer["done_s"] = time.monotonic()
                answer.setdefault("first_s", answer["done_s"])
                if len(one.token_ids) > 1:
                    answer.setdefault("second_s", answer["done_s"])
                answer["finish"] = one.finish_reason
                answer["stop_reason"] = one.stop_reason
                answer["cached"] = output.num_cached_tokens
                answer["logprobs"] = [
                    {token: value.logprob for token, value in step.items()}
                    for step in one.logprobs or ()
                ]
                answer["params"] = output.kv_transfer_params
        except Exception as error:  # noqa: BLE001 - the test sees it
            answer["error"] = f"{type(error).__name__}: {error}"
        self._answer(answer)

    def _answer(self, message: dict[str, Any]) -> None:
        self._answers.write(json.dumps(message) + "\n")


async def serve(answers_fd: int, arguments: dict[str, Any]) -> None:
    """Run an engine until its stdin ends."""
    await Engine(answers_fd, arguments).serve()


def fork_all(control: socket.socket) -> None:
    """Fork a process for each message and its descriptors, and answer with its id.

    ``{"environment": {...}, "arguments": {...}}`` is an engine, ``{"command": [...]}`` a command of
    vLLM's. With NO_FAMILIES_IN_TESTS the connector knows no type of model by its config.
    """
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # the kernel reaps them
    while True:
        message, fds, _, _ = socket.recv_fds(control, 1 << 16, 3)
        if not message:
            return
        if pid := os.fork():
            for fd in fds:
                os.close(fd)
            control.send(str(pid).encode())
            continue
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)
        control.close()
        os.setsid()
        orders, output, *answers = fds
        for fd, place in ((orders, 0), (output, 1), (output, 2)):
            os.dup2(fd, place)
        os.close(orders)
        os.close(output)
        told = json.loads(message)
        os.environ.update(told.get("environment", {}))
        if "NO_FAMILIES_IN_TESTS" in os.environ:
            MODELS.clear()
        if "command" in told:
            sys.argv = ["vllm", *told["command"]]
            vllm.entrypoints.cli.main.main()
        else:
            (answers_fd,) = answers
            asyncio.run(serve(answers_fd, told["arguments"]))
        return


if __name__ == "__main__":
    if len(sys.argv) == 2:
        fork_all(socket.socket(fileno=int(sys.argv[1])))
    else:
        asyncio.run(serve(int(sys.argv[1]), json.loads(sys.argv[2])))
