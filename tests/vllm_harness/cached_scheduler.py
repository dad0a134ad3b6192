"""vLLM's own scheduler and prefix cache without an engine, and memory that knows what is in it."""

from __future__ import annotations

import json
import random
import sys
import tempfile
from collections import Counter, deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from vllm.config import KVTransferConfig
from vllm.engine.arg_utils import EngineArgs
from vllm.sampling_params import SamplingParams
from vllm.utils.hashing import get_hash_fn_by_name
from vllm.v1.core.kv_cache_utils import (
    get_request_block_hasher,
    init_none_hash,
    resolve_kv_cache_block_sizes,
)
from vllm.v1.core.sched.async_scheduler import AsyncScheduler
from vllm.v1.core.sched.scheduler import Scheduler
from vllm.v1.core.single_type_kv_cache_manager import register_all_kvcache_specs
from vllm.v1.kv_cache_interface import (
    FullAttentionSpec,
    KVCacheConfig,
    KVCacheGroupSpec,
    KVCacheSpec,
    MambaSpec,
    SlidingWindowSpec,
)
from vllm.v1.outputs import KVConnectorOutput, ModelRunnerOutput
from vllm.v1.request import Request, RequestStatus
from vllm.v1.structured_output import StructuredOutputManager

from restow.agents.engines.common.blocks import Group, UnwrittenTokens
from restow.broker.client import ContentChain

WINDOW_TOKENS = 40
STEP_TOKENS = 64
LLAMA = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 1,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 128,
    "max_position_embeddings": 512,
}
"""vLLM wants the config of some model: none is ever made of it."""


def spec(kind: str, block_tokens: int) -> KVCacheSpec:
    """Return vLLM's spec for the layers of a group: ``full``, ``window`` or ``states``."""
    if kind == "states":
        return MambaSpec(
            block_size=block_tokens,
            shapes=((8, 8),),
            dtypes=(torch.float32,),
            mamba_cache_mode="align",
        )
    heads: dict[str, Any] = {"num_kv_heads": 2, "head_size": 16, "dtype": torch.float32}
    if kind == "window":
        return SlidingWindowSpec(block_size=block_tokens, sliding_window=WINDOW_TOKENS, **heads)
    return FullAttentionSpec(block_size=block_tokens, **heads)


@dataclass(frozen=True, slots=True, eq=False)
class Step:
    """What was scheduled: of each request the tokens, its blocks, and whether one is drawn."""

    output: Any
    parts: dict[str, tuple[int, int, tuple[list[int], ...], bool]]


class CachedScheduler:
    """Schedules requests step by step; the tokens of replies are drawn.

    ``cells`` is the memory by group and block: for each of a block's tokens the name of all tokens
    up to it (`content_of`), and of a block of states the name of those that it has absorbed.
    """

    def __init__(
        self,
        kinds: Sequence[tuple[str, int]],
        blocks: int,
        match_unit: int | None,
        ahead: bool,
        seed: int,
        transfer: dict[str, Any] | None = None,
    ) -> None:
        """Serve groups of ``kinds`` and block sizes, which share ``blocks``.

        ``ahead``: a step is scheduled before the previous step was computed, as on a GPU. There a
        consumer's blocks are freed when the steps that write them are over: by the role in
        ``transfer``, which has vLLM make a connector (``kv_transfer_config``).
        """
        self.kinds = tuple(kinds)
        with tempfile.TemporaryDirectory() as folder:
            (Path(folder) / "config.json").write_text(json.dumps(LLAMA))
            config = EngineArgs(
                model=folder,
                skip_tokenizer_init=True,
                max_num_batched_tokens=STEP_TOKENS,
                max_num_seqs=8,
                max_model_len=512,
                enable_prefix_caching=True,
                async_scheduling=ahead,
                block_size=max(size for _, size in kinds),
                prefix_match_unit=match_unit,
                kv_transfer_config=transfer and KVTransferConfig(**transfer),
            ).create_engine_config()
        register_all_kvcache_specs(config)
        if any(kind == "states" for kind, _ in kinds):
            config.cache_config.mamba_cache_mode = "align"
        config.cache_config.num_gpu_blocks = blocks
        groups = [
            KVCacheGroupSpec([f"layer{index}"], spec(*kind)) for index, kind in enumerate(kinds)
        ]
        caches = KVCacheConfig(num_blocks=blocks, kv_cache_tensors=[], kv_cache_groups=groups)
        block_tokens, self.hash_block_tokens = resolve_kv_cache_block_sizes(caches, config)
        function = get_hash_fn_by_name(config.cache_config.prefix_caching_hash_algo)
        init_none_hash(function)
        self._hasher = get_request_block_hasher(self.hash_block_tokens, function)
        self.scheduler = (AsyncScheduler if ahead else Scheduler)(
            config,
            caches,
            StructuredOutputManager(config),
            block_size=block_tokens,
            hash_block_size=self.hash_block_tokens,
        )
        if transfer and ahead:  # On the CPU vLLM has one batch at a time, and defers nothing.
            self.scheduler.defer_block_free = config.kv_transfer_config.is_kv_consumer
        self.manager = self.scheduler.kv_cache_manager
        self._draw = random.Random(seed)  # noqa: S311
        self.requests: dict[str, Request] = {}
        self._texts: dict[str, tuple[ContentChain, list[bytes]]] = {}
        self.cells: list[dict[int, Any]] = [{} for _ in kinds]

    def add(
        self, tokens: list[int], reply_tokens: int, stop_token_ids: Sequence[int] = ()
    ) -> Request:
        """Add a request."""
        request = Request(
            f"r{len(self.requests)}",
            list(tokens),
            SamplingParams(
                max_tokens=reply_tokens, ignore_eos=True, stop_token_ids=[*stop_token_ids]
            ),
            None,
            block_hasher=self._hasher,
        )
        self.requests[request.request_id] = request
        self.scheduler.add_request(request)
        return request

    def abort(self, request_id: str) -> None:
        """End a request."""
        self.scheduler.finish_requests(request_id, RequestStatus.FINISHED_ABORTED)

    def under_way(self) -> list[str]:
        """Return the requests that have not ended."""
        return list(self.scheduler.requests)

    def names(self, request: Request) -> list[bytes]:
        """Return for each token the name of all tokens up to it."""
        text, names = self._texts.setdefault(request.request_id, (ContentChain(), []))
        names += text.extend(request._all_token_ids[len(names) :], 1)
        return names

    def schedule(self) -> Step:
        """Begin a step. At its end vLLM calls the connector's `build_connector_meta`."""
        output = self.scheduler.schedule()
        parts = {}
        for request_id, count in output.num_scheduled_tokens.items():
            request = self.requests[request_id]
            stop = request.num_computed_tokens
            tables = self.manager.get_block_ids(request_id)
            parts[request_id] = (stop - count, stop, tables, not request.is_prefill_chunk)
        return Step(output, parts)

    def run(self, step: Step, begun: Callable[[int], None] = lambda mark: None) -> None:
        """Compute a step that was begun, and take its tokens.

        ``begun`` is told the step's write mark where vLLM gives workers its metadata: from then on
        states are loaded into blocks, however far the step is.
        """
        for copy in step.output.kv_cache_block_copies or ():
            for cells in self.cells:
                if copy.src_block_id in cells:
                    cells[copy.dst_block_id] = dict(cells[copy.src_block_id])
        metadata = step.output.kv_connector_metadata
        if metadata is not None:
            begun(metadata.step.write_mark)
        sampled = []
        for request_id, (start, stop, tables, more) in step.parts.items():
            names = self.names(self.requests[request_id])
            self.check(names, start, tables)
            self._write(names, start, stop, tables)
            sampled.append([self._draw.randrange(4)] if more else [])
        places = {request_id: index for index, request_id in enumerate(step.parts)}
        said = ModelRunnerOutput(list(step.parts), places, sampled)
        if metadata is not None:
            told = metadata.step
            self._zero(told.unwritten)
            said.kv_connector_output = KVConnectorOutput(
                finished_sending=set(told.sent),
                finished_recving=set(told.received),
                failed_recving={one for one, arrived in told.received.items() if not arrived},
            )
        self.scheduler.update_from_output(step.output, said)

    def _zero(self, unwritten: Sequence[UnwrittenTokens]) -> None:
        for some in unwritten:
            cells = self.cells[int(some.group.removeprefix("group."))]
            zeroes = dict.fromkeys(range(some.start, some.stop), b"zero")
            cells.setdefault(some.block, {}).update(zeroes)

    def check(self, names: Sequence[bytes], start: int, tables: tuple[list[int], ...]) -> None:
        """Fail unless a request goes on at ``start`` from a state that is its own, all of it."""
        if not start:
            return
        for (kind, size), cells, table in zip(self.kinds, self.cells, tables, strict=True):
            if kind == "states":
                assert cells[table[(start - 1) // size]][0] == names[start - 1], "read: states"
                continue
            first = max(start - WINDOW_TOKENS + 1, 0) if kind == "window" else 0
            for token in range(first, start):
                found = cells[table[token // size]][token % size]
                assert found == names[token], f"read: {kind}, token {token} of {start}"

    def _write(
        self, names: Sequence[bytes], start: int, stop: int, tables: tuple[list[int], ...]
    ) -> None:
        # Of a request that has ended meanwhile nobody knows the last token.
        names = [*names, b"unknown"][:stop]
        for (kind, size), cells, table in zip(self.kinds, self.cells, tables, strict=True):
            if kind == "states":
                cells[table[(stop - 1) // size]] = {0: names[-1]}
                continue
            for token in range(start, stop):
                cells.setdefault(table[token // size], {})[token % size] = names[token]


GROUPS: dict[str, tuple[list[tuple[str, int]], int | None]] = {
    "attention": ([("full", 16)], None),
    "windows": ([("full", 16), ("window", 16)], None),
    "small windows": ([("full", 32), ("window", 16)], None),
    "states": ([("full", 32), ("states", 32)], None),
    "states inside of blocks": ([("full", 32), ("states", 32)], 8),
    "large states": ([("full", 16), ("states", 48)], None),
    "all": ([("full", 16), ("window", 16), ("states", 16)], None),
}
"""Kinds and block sizes, and after how many tokens vLLM hashes, if it is told."""


class SchedulerHistory:
    """One scheduler of groups of these names, and requests that a seed draws."""

    continued, cut = 0.7, 0.7
    """How often a prompt continues an earlier request, and how often without the end of that."""

    def __init__(
        self, name: str, seed: int, blocks: int, transfer: dict[str, Any] | None = None
    ) -> None:
        self.label = f"{name}, seed {seed}"
        self.draw = random.Random(seed)  # noqa: S311
        kinds, unit = GROUPS[name]
        self.ahead = seed % 2
        """How many steps vLLM schedules before one was computed."""
        self.engine = CachedScheduler(kinds, blocks, unit, bool(self.ahead), seed, transfer)
        self.groups = [
            Group(
                f"group.{index}",
                size,
                0 if kind == "states" else None,
                WINDOW_TOKENS - 1 if kind == "window" else 0,
                whole_blocks=True,
            )
            for index, (kind, size) in enumerate(kinds)
        ]
        self.steps: deque[Step] = deque()
        self.seen: Counter[str] = Counter()

    def run(self) -> Counter[str]:
        """Live, and return what was seen how often."""
        raise NotImplementedError

    def prompt(self) -> list[int]:
        """Draw a new prompt, or a prompt that continues an earlier request."""
        count = self.draw.randrange(2, 150)
        old = list(self.engine.requests.values())
        said: list[int] = []
        if old and self.draw.random() < self.continued:
            said = list(self.draw.choice(old)._all_token_ids)
            if self.cut == 1 or self.draw.random() < self.cut:
                said = said[: self.draw.randrange(len(said) + 1)]
        return (said + [self.draw.randrange(4) for _ in range(count)])[: max(count, len(said) + 1)]


def play(
    history: Callable[[str, int], SchedulerHistory], faults: Mapping[str, Callable[[], None]]
) -> None:
    """Play histories: ``PROGRAM GROUPS,... SEED HISTORIES FAULT``; print how much was seen.

    For the fault of that name a part of Restow that must be there is removed first.
    """
    names, seed, histories, fault = sys.argv[1:]
    if fault:
        faults[fault]()
    seen: Counter[str] = Counter()
    for name in names.split(","):
        for one in range(int(histories)):
            seen += history(name, int(seed) + one).run()
    print(json.dumps(seen))
