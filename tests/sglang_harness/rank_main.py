"""One rank of SGLang: its pools, its radix cache and Restow's linker, told what to do by a test.

Run as ``python -m sglang_harness.rank_main OPTIONS``; commands and answers are lines of JSON.
"""

from __future__ import annotations

import contextlib
import json
import os
import sys
import time
import traceback
from array import array
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch

sys.path.append(os.environ["RESTOW_SGLANG_PACKAGES"])  # behind all that is here already

from sglang_harness import stand_ins
from sglang_harness.values import Sizes

stand_ins.install()

from sglang.srt import runtime_context  # noqa: E402
from sglang.srt.configs.mamba_utils import (  # noqa: E402
    Mamba2CacheParams,
    Mamba2StateDType,
    Mamba2StateShape,
)
from sglang.srt.managers.schedule_batch import ReqKvInfo  # noqa: E402
from sglang.srt.managers.scheduler_components.weight_updater import (  # noqa: E402
    SchedulerWeightUpdaterManager,
)
from sglang.srt.mem_cache.allocator import (  # noqa: E402
    PagedTokenToKVPoolAllocator,
    TokenToKVPoolAllocator,
)
from sglang.srt.mem_cache.allocator.swa import SWATokenToKVPoolAllocator  # noqa: E402
from sglang.srt.mem_cache.base_prefix_cache import InsertParams, MatchPrefixParams  # noqa: E402
from sglang.srt.mem_cache.cache_init_params import CacheInitParams  # noqa: E402
from sglang.srt.mem_cache.memory_pool import (  # noqa: E402
    HybridLinearKVPool,
    HybridReqToTokenPool,
    MHATokenToKVPool,
    ReqToTokenPool,
)
from sglang.srt.mem_cache.radix_cache import RadixKey  # noqa: E402
from sglang.srt.mem_cache.swa_memory_pool import SWAKVPool  # noqa: E402
from sglang.srt.mem_cache.unified_cache.component_type import ComponentType  # noqa: E402
from sglang.srt.mem_cache.unified_cache.linker_factory import (  # noqa: E402
    create_unified_cache_linker,
)
from sglang.srt.mem_cache.unified_radix_cache import UnifiedRadixCache  # noqa: E402
from sglang.srt.server_args import ServerArgs  # noqa: E402

SLOTS = 2048
CPU = {"device": "cpu", "enable_memory_saver": False}


class Rank:
    """SGLang's pools and cache as a scheduler has them, without a model."""

    def __init__(self, options: dict[str, Any]) -> None:
        self.tp, self.rank = options["tp"], options["rank"]
        self.page: int = options["page"]
        self.sizes = Sizes.of(Path(options["model"]), options.get("truth", ""))
        self.dtype = getattr(torch, options.get("dtype", "float32"))
        group = None
        if self.tp > 1:
            torch.distributed.init_process_group(
                "gloo", f"file://{options['meet']}", rank=self.rank, world_size=self.tp
            )
            group = torch.distributed.group.WORLD
        self.options = options
        self.kv, self.requests, components = self._pools()
        params = CacheInitParams(
            disable=False,
            req_to_token_pool=self.requests,
            token_to_kv_pool_allocator=self.kv,
            page_size=self.page,
            tp_cache_group=group,
            # The token itself does not count (`get_attention_sliding_window_size`).
            sliding_window_size=options.get(
                "window", (self.sizes.config.get("sliding_window") or 1) - 1
            ),
            tree_components=components,
            is_eagle=options.get("eagle", False),
            tree_core_backend=options.get("tree"),
        )
        self.params, self.components = params, components
        self.cache = UnifiedRadixCache(params)
        self.held: dict[str, Any] = {}

    def start(self) -> dict[str, Any]:
        """Make the linker by SGLang's own factory."""
        server_args = ServerArgs(
            model_path=self.options["model"],
            device="cpu",
            enable_memory_saver=self.options.get("saver", False),
            json_model_override_args=self.options.get("override", "{}"),
        )
        linker = create_unified_cache_linker(
            server_args,
            self.params,
            backend="dynamic",
            config={
                "linker": "RestowLinker",
                "linker_module_path": "restow.agents.engines.sglang.linker",
                "linker_extra_config": self.options["extra"],
            },
            components=set(self.components),
        )
        self.cache.init_cache_linker(linker)
        counter = self.cache.linker.layer_done_counter
        self.kv.get_kvcache().register_layer_transfer_counter(counter)
        return {"tree": type(self.cache.tree_core).__name__}

    def _pools(self) -> tuple[Any, Any, tuple[ComponentType, ...]]:
        components: tuple[ComponentType, ...]
        sizes, tp = self.sizes, self.tp
        heads, dim = max(1, sizes.config["num_key_value_heads"] // tp), sizes.config["head_dim"]
        dim = self.options.get("head_dim", dim)
        shape = {"head_num": heads, "head_dim": dim, "dtype": self.dtype, "page_size": self.page}
        requests = ReqToTokenPool(8, 1024, **CPU)
        if sizes.mamba:
            requests = self._requests()
            pool = HybridLinearKVPool(
                SLOTS,
                full_attention_layer_ids=sizes.attention,
                mamba_pool=requests.mamba_pool,
                **shape,
                **CPU,
            )
            components = (ComponentType.FULL, ComponentType.MAMBA)
        elif sizes.windowed:
            full = [layer for layer in sizes.attention if layer not in sizes.windowed]
            pool = SWAKVPool(
                SLOTS,
                SLOTS // 2,
                swa_attention_layer_ids=sizes.windowed,
                full_attention_layer_ids=full,
                **shape,
                **CPU,
            )
            made = SWATokenToKVPoolAllocator(
                SLOTS, SLOTS // 2, self.page, self.dtype, "cpu", pool, False
            )
            return made, requests, (ComponentType.FULL, ComponentType.SWA)
        else:
            pool = MHATokenToKVPool(SLOTS, layer_num=len(sizes.attention), **shape, **CPU)
            components = (ComponentType.FULL,)
        if self.page == 1:
            return (
                TokenToKVPoolAllocator(SLOTS, self.dtype, "cpu", pool, False),
                requests,
                components,
            )
        made = PagedTokenToKVPoolAllocator(SLOTS, self.page, self.dtype, "cpu", pool, False)
        return made, requests, components

    def _requests(self) -> Any:
        config = self.sizes.config
        state = Mamba2StateShape.create(
            tp_world_size=self.tp,
            intermediate_size=self.sizes.channels,
            n_groups=config["n_groups"],
            num_heads=config["mamba_num_heads"],
            head_dim=config["mamba_head_dim"],
            state_size=config["ssm_state_size"],
            conv_kernel=config["conv_kernel"],
        )
        types = Mamba2StateDType(conv=self.dtype, temporal=torch.float32)
        return HybridReqToTokenPool(
            size=8,
            mamba_size=16,
            mamba_spec_state_size=8,
            max_context_len=1024,
            cache_params=Mamba2CacheParams(shape=state, layers=self.sizes.mamba, dtype=types),
            mamba_layer_ids=self.sizes.mamba,
            enable_mamba_extra_buffer=False,
            **CPU,
        )

    def _slots(self, count: int) -> Any:
        if not self.sizes.windowed:
            return self.kv.alloc(count)
        slots = self.kv.full_attn_allocator.alloc(count)
        self.kv.set_full_to_swa_mapping(slots, self.kv.swa_attn_allocator.alloc(count))
        return slots

    def _cells(self, tokens: list[int]) -> Any:
        """Yield each pool's tensor of the layers, its name, and what the tokens put there."""
        args = (tokens, self.tp, self.rank)
        kv = self.kv.get_kvcache()
        for layer in self.sizes.attention:
            for part, buffer in (
                ("k", kv.get_key_buffer(layer)),
                ("v", kv.get_value_buffer(layer)),
            ):
                yield (
                    "window" if layer in self.sizes.windowed else "kv",
                    buffer,
                    (lambda layer=layer, part=part: self.sizes.keys(layer, part, *args)),
                )
        for index, layer in enumerate(self.sizes.mamba):
            cache = self.requests.mamba_pool.mamba_cache
            yield "mamba", cache.conv[0][index], lambda layer=layer: self.sizes.window(layer, *args)
            yield "mamba", cache.temporal[index], lambda layer=layer: self.sizes.state(layer, *args)

    # -- what a scheduler does --------------------------------------------------------------------

    def compute(
        self, tokens: list[int], salt: str | None = None, extra_key: str | None = None
    ) -> dict[str, Any]:
        """Put a prompt's state into the pools, as a forward does, and insert it into the tree."""
        slots = self._slots(len(tokens))
        state = self.requests.mamba_allocator.alloc(1) if self.sizes.mamba else None
        places = {"kv": slots, "mamba": state}
        if self.sizes.windowed:
            places["window"] = self.kv.translate_loc_from_full_to_swa(slots)
        for kind, buffer, value in self._cells(tokens):
            buffer[places[kind]] = torch.from_numpy(value()).to(buffer.dtype)
        key = RadixKey(array("q", tokens), extra_key, cache_salt=salt)
        self.cache.insert(InsertParams(key=key, value=slots, mamba_value=state))
        return {"offloads": len(self.cache.linker.pending_offloads)}

    def settle(self) -> dict[str, Any]:
        """Poll as each step of a scheduler does, until all offloads are over."""
        linker, taken = self.cache.linker, list[bool]()
        finish = linker.commit_completed_offloads

        def commit(done: list[bool]) -> None:
            taken.extend(done)
            finish(done)

        linker.commit_completed_offloads = commit
        while linker.pending_offloads:
            self.cache.check_hicache_events()
            time.sleep(0.01)
        linker.commit_completed_offloads = finish
        return {"taken": taken}

    def load(
        self,
        tokens: list[int],
        rid: str = "r",
        salt: str | None = None,
        extra_key: str | None = None,
        cancel: bool = False,
        hold: bool = False,
    ) -> dict[str, Any]:
        """Match a prompt, load what others hold of it, and compare the pools with the truth."""
        key = RadixKey(array("q", tokens), extra_key, cache_salt=salt)
        req = SimpleNamespace(
            rid=rid, kv=ReqKvInfo(), swa_branching_seqlen=None, last_node=None, session=None
        )
        result = self.cache.match_prefix(MatchPrefixParams(key=key, req=req))
        here, found = result.device_prefix_len, result.host_hit_length
        answer = {"here": here, "found": found, "landed": False, "wrong": []}
        if not found:
            return answer
        req.last_node = result.last_device_node
        self.cache.linker.load_back(req)
        answer["queued"] = len(self.cache.linker.inflight_load_rids)
        if cancel:
            self.cache.linker.release_request(rid)
            answer["left"] = len(self.cache.linker.inflight_load_rids)
            return answer
        self.held[rid] = tokens[: here + found], here, req
        return answer if hold else answer | self.go_on(rid)

    def go_on(self, rid: str) -> dict[str, Any]:
        """Run a batch with a request that loads: wait for each layer, as a forward does."""
        tokens, here, req = self.held.pop(rid)
        slots = self.cache.linker.private_load_indices.get(rid)
        counter = self.cache.linker.layer_done_counter
        counter.set_consumer(self.cache.linker.start_layer_wise_loading())
        for layer in range(counter.num_layers):
            counter.wait_until(layer)
        landed = not self.cache.linker.finish_loads()
        return {"landed": landed, "wrong": self._wrong(tokens, here, slots, req) if landed else []}

    def start_empty(self) -> dict[str, Any]:
        """Start a batch in which nothing loads."""
        return {"index": self.cache.linker.cache_linker.start_layer_wise_loading()}

    def _wrong(self, tokens: list[int], here: int, slots: torch.Tensor, req: Any) -> list[str]:
        wrong = []
        for number, (kind, buffer, value) in enumerate(self._cells(tokens)):
            truth = torch.from_numpy(value()).to(buffer.dtype)
            if kind == "mamba":
                got = buffer[req.kv.mamba_pool_idx]
            else:
                truth = truth[here:]
                places = slots
                if kind == "window":
                    kept = req.kv.get_evicted_seqlen(ComponentType.SWA) - here
                    truth, places = truth[max(kept, 0) :], slots[max(kept, 0) :]
                    places = self.kv.translate_loc_from_full_to_swa(places)
                got = buffer[places]
            close = self.options.get("close", 0.0)
            if not torch.allclose(got, truth, rtol=close, atol=close):
                wrong.append(f"{kind} {number}: {(got - truth).abs().max()} of {truth.abs().max()}")
        return wrong

    def replace_weights(self) -> dict[str, Any]:
        """Call what SGLang calls to load other weights, on an updater without a model."""
        updater = SimpleNamespace(_assert_weight_cache_inactive=lambda *_: None)
        with contextlib.suppress(AttributeError):
            SchedulerWeightUpdaterManager.update_weights_from_disk(updater, None)
        return {}

    def reset(self) -> dict[str, Any]:
        """Flush the cache, as a scheduler does."""
        self.cache.reset()
        self.kv.clear()
        return {}

    def close(self) -> dict[str, Any]:
        self.cache.release_host_resources()
        return {}


def main() -> None:
    options = json.loads(sys.argv[1])
    torch.set_num_threads(1)
    runtime_context.publish(
        ServerArgs(model_path=options["context"], device="cpu", skip_tokenizer_init=True),
        role="scheduler",
    )
    rank = Rank(options)
    for line in sys.stdin:
        command = json.loads(line)
        name = command.pop("do")
        try:
            answer = getattr(rank, name)(**command)
        except Exception as error:  # noqa: BLE001 - the test hears of it
            traceback.print_exc()
            answer = {"error": str(error), "reason": getattr(error, "reason", "")}
        print("ANSWER " + json.dumps(answer), flush=True)


if __name__ == "__main__":
    main()
