"""How much of a transfer real vLLM hides when D reads a long prompt that P computes in steps.

D requests the prompt at once, in turns with a D that requests it when P has finished. The model is
a hybrid of random weights in which each layer has attention and a Mamba state, so most bytes are
keys and values.
"""

from __future__ import annotations

import asyncio
import os
import tempfile
from collections.abc import Iterator
from contextlib import AsyncExitStack
from dataclasses import dataclass, field, replace
from pathlib import Path
from random import Random

from bench.report import Put, Row, compared
from restow.broker.core.handoffs.handoff import Handoff
from restow.broker.server.base.settings import BrokerSettings
from restow.broker.server.serve import running_broker
from restow.demo.recall.task import VOCABULARY_SIZE
from vllm_harness.checkpoints import write_checkpoint
from vllm_harness.engine import Options, vllm_engine
from vllm_harness.hybrid_checkpoints import HYBRIDS

SUITE = "vllm-early-reads"
TOKENS, STEP_TOKENS, SAID = 4096, 512, 4
STAGING_MB = 512
HIDDEN_GOAL = 0.8
"""Share of a transfer's time that is to be hidden."""
WARM = 1
MODEL = {
    "hidden_size": 256,
    "num_hidden_layers": 8,
    "num_attention_heads": 8,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "max_position_embeddings": 8192,
}
"""It has 64 KiB of keys and values a token; a model of 8 billion weights has 128."""
ENGINE = {
    "max_model_len": TOKENS + 128,
    "max_num_batched_tokens": STEP_TOKENS,
    "enable_chunked_prefill": True,
}


@dataclass
class ReadTimes:
    """Seconds of the last read and from P's finish to D's first token, and the bytes read."""

    read_s: list[float] = field(default_factory=list)
    first_s: list[float] = field(default_factory=list)
    early_bytes: int = 0
    bytes: int = 0

    def add(self, handoff: Handoff, first_s: float) -> None:
        """Add a handoff that has ended."""
        self.read_s.append(handoff.transfer_s or 0.0)
        self.first_s.append(first_s)
        self.early_bytes += handoff.early_bytes
        self.bytes += handoff.bytes_read


def run(put: Put, repeats: int) -> None:
    """Measure D of TP 1 and 2; RESTOW_VLLM_PYTHON names vLLM's interpreter."""
    python = Path(os.environ["RESTOW_VLLM_PYTHON"])
    for tp in (1, 2):
        for row in asyncio.run(_measure(python, tp, repeats)):
            put(row)


async def _measure(python: Path, decode_tp: int, repeats: int) -> list[Row]:
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        model = write_checkpoint(lambda: HYBRIDS["falcon_h1"].make(**MODEL), folder / "model")
        async with AsyncExitStack() as stack:
            settings = BrokerSettings(listen="127.0.0.1:0")
            broker = await stack.enter_async_context(running_broker(settings))
            options = Options(
                model,
                broker=broker.address,
                extra={"staging_mb": STAGING_MB},
                engine=ENGINE,
            )
            prefill, decode = await asyncio.gather(
                *(
                    stack.enter_async_context(
                        vllm_engine(python, replace(options, role=role, tp=tp), folder / role)
                    )
                    for role, tp in (("kv_producer", 1), ("kv_consumer", decode_tp))
                )
            )
            ledger, rng = broker.hub.directory.ledger, Random(0)  # noqa: S311 - no secret
            by_way = {"early": ReadTimes(), "routed": ReadTimes()}
            for turn in range(repeats + WARM):
                for way, times in by_way.items():
                    ids = [rng.randrange(3, VOCABULARY_SIZE) for _ in range(TOKENS)]
                    params = {"handoff_id": f"{way}/{turn}"}
                    number = prefill.begin(ids, 1, params)
                    if way == "routed":
                        first = await prefill.answer(number)
                        answer = await decode.ask(ids, SAID, params)
                    else:
                        answer = await decode.ask(ids, SAID, params)
                        first = await prefill.answer(number)
                    handoff = ledger.find("default", params["handoff_id"])
                    if handoff.failure is not None or len(answer.tokens) != SAID:
                        raise RuntimeError(f"{handoff.failure}: {answer.error}")
                    if turn >= WARM:
                        times.add(handoff, answer.first_s - first.done_s)
    return list(_rows(f"P1 to D{decode_tp}, {TOKENS} tokens in steps of {STEP_TOKENS}", by_way))


def _rows(case: str, by_way: dict[str, ReadTimes]) -> Iterator[Row]:
    early, routed = by_way["early"], by_way["routed"]
    share = early.early_bytes / early.bytes
    note = f"{100 * share:.0f} % of {early.bytes / len(early.read_s) / 1e6:.1f} MB read early"
    asked = "requested when P has finished"
    for what, ours, theirs, goal in (
        ("what is left to read when P has computed all", early.read_s, routed.read_s, HIDDEN_GOAL),
        ("from P's finish to D's first token", early.first_s, routed.first_s, None),
    ):
        ratio = None if goal is None else 1 / (1 - goal)
        yield compared(SUITE, f"{case}: {what}", ours, asked, theirs, goal=ratio, note=note)
