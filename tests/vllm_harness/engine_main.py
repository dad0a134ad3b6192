"""A real vLLM engine in a process of its own, told in lines of JSON. Runs in vLLM's environment.

Reads ``{"id": 1, "op": "generate", "prompt": [...], "max_tokens": 8, "params": {...}}``,
``{"id": 1, "op": "abort"}``, ``{"id": 1, "op": "forget"}``, ``{"op": "hold"}``,
``{"op": "resume"}``, ``{"id": 1, "op": "call", "method": ..., "arguments": {...}}`` and
``{"id": 1, "op": "version", "version": ...}`` on stdin, answers on the descriptor named first on
the command line.
"""

from __future__ import annotations

import asyncio
import json
import os
import sys
import time
from typing import Any

import torch
from vllm import SamplingParams
from vllm.engine.arg_utils import AsyncEngineArgs
from vllm.lora.request import LoRARequest
from vllm.v1.engine.async_llm import AsyncLLM


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
        await loop.connect_read_pipe(lambda: asyncio.StreamReaderProtocol(reader), sys.stdin)
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
                forgotten = await self._engine.reset_prefix_cache(
                    reset_connector=told.get("connector", False)
                )
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
            temperature=0.0,
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
        lora = LoRARequest(*told["lora"]) if told.get("lora") else None
        answer: dict[str, Any] = {"id": told["id"], "tokens": [], "finish": None, "params": None}
        try:
            async for output in self._engine.generate(
                prompt,
                sampling,
                f"{told['id']}",
                lora_request=lora,
                trace_headers=told.get("trace_headers"),
            ):
                (one,) = output.outputs
                answer["tokens"] = list(one.token_ids)
                answer["done_s"] = time.monotonic()
                answer.setdefault("first_s", answer["done_s"])
                if len(one.token_ids) > 1:
                    answer.setdefault("second_s", answer["done_s"])
                answer["finish"] = one.finish_reason
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


async def main() -> None:
    fd, arguments = int(sys.argv[1]), json.loads(sys.argv[2])
    await Engine(fd, arguments).serve()


if __name__ == "__main__":
    asyncio.run(main())
