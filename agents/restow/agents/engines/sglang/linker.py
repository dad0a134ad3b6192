"""The class that SGLang loads as its external cache linker: `RestowLinker`."""

from __future__ import annotations

import json
from collections import OrderedDict, deque
from collections.abc import Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, replace
from pathlib import Path
from threading import Event
from time import monotonic
from typing import TYPE_CHECKING, Any, NamedTuple
from uuid import uuid4

import torch
from sglang.srt.mem_cache.hicache_storage import PoolName, PoolTransfer
from sglang.srt.mem_cache.unified_cache.unified_cache_linker import (
    LayerWiseLoadCounter,
    UnifiedCacheLinker,
)

from restow.agents import Agent
from restow.agents.engines.common.adapter_errors import EngineUnsupportedError
from restow.agents.engines.common.blocks import NULL_BLOCK
from restow.agents.engines.common.chains import QUANTUM_TOKENS
from restow.agents.engines.common.checkpoint import checkpoint_revision, local_checkpoint
from restow.agents.engines.common.registration import ConnectorSettings, register_engine
from restow.agents.engines.sglang.keeping import StateSharing, Tokens
from restow.agents.engines.sglang.pools import ATTENTION, STATE, WINDOW, rank_pools
from restow.agents.engines.sglang.ranks import Ranks
from restow.agents.engines.sglang.tree import NodePath, TreeWatch, blocks_of
from restow.agents.link.settings import AgentSettings
from restow.broker.client import BlockingSession
from restow.broker.errors import RestowError
from restow.broker.layout import Layout
from restow.broker.logs import get_logger
from restow.broker.rpc import wire
from restow.v1 import layout_pb2

if TYPE_CHECKING:
    from sglang.srt.mem_cache.cache_init_params import CacheInitParams
    from sglang.srt.server_args import ServerArgs

GROUPS = {PoolName.KV: ATTENTION, PoolName.SWA: WINDOW, PoolName.MAMBA: STATE}
MAX_ASKED = 4096
"""Requests whose last lookup is remembered."""
AGAIN_S = 1.0
"""Time for which an answer holds: SGLang asks about waiting requests at each step."""
DONE = "done"
Slots = Mapping[PoolName, torch.Tensor]


class LoadFailedError(RestowError, status="UNAVAILABLE", reason="LOAD_FAILED"):
    """A state that did not arrive in SGLang's pools."""


@dataclass(slots=True)
class _Asked:
    """A lookup: tokens, how many of them were here, SGLang's hashes of the others, the answer."""

    tokens: Tokens
    here_tokens: int
    keys: list[str]
    pages: list[int]
    at_s: float


class _Load(NamedTuple):
    tokens: Tokens
    held_tokens: int
    slots: Slots


class RestowLinker(UnifiedCacheLinker):  # type: ignore[misc]
    """Finds, loads and stores prefixes through Restow, for one rank of SGLang.

    Rank 0 speaks with the broker for all ranks. The methods belong to the scheduler's thread.
    """

    def __init__(
        self,
        server_args: ServerArgs,
        params: CacheInitParams,
        *,
        components: set[Any],
        extra_config: Mapping[str, Any] | None = None,
        forward_stream: Any = None,
    ) -> None:
        """Register the rank's pools with the broker, as SGLang starts a worker.

        ``extra_config`` has the settings of `ConnectorSettings`, and ``engine_id``, the beginning
        of the engine's name. Raises `SettingsError`, `EngineUnsupportedError`, `CacheUnknownError`,
        and what `register_engine` raises.
        """
        given = dict(extra_config or {})
        name = str(given.pop("engine_id", "sglang"))
        settings = self._settings = ConnectorSettings.of({"prefix": "find+tell", **given})
        _check_engine(server_args, params, settings)
        self.forward_stream, self._page_tokens = forward_stream, params.page_size
        group = params.attn_tp_cache_group or params.tp_cache_group
        ranks = self._loading = Ranks(group)
        self._keeping = Ranks(group)
        where = server_args.model_path, server_args.revision, server_args.download_dir
        folder = local_checkpoint(*where)
        config = json.loads((folder / "config.json").read_text())
        self._pools = rank_pools(config, params, ranks.rank, ranks.count)
        self.pools = {pool: self._pools for pool, word in GROUPS.items() if word in self._groups}
        text = config.get("text_config", config)
        stop = text.get("eos_token_id") or []
        stop = [stop] if isinstance(stop, int) else stop
        self._tree = TreeWatch(text["vocab_size"], params.page_size)
        self._sharing = StateSharing([*self._groups.values()], stop, settings)
        self._session: BlockingSession | None = None
        self._engine_id, self._incarnation = self._registered(server_args, folder, name)
        self._log = get_logger("restow.sglang").bind(engine=self._engine_id)
        self._agent = Agent(
            *(settings.broker or None, self._engine_id, self._incarnation, ranks.rank),
            self._pools.memory,
            settings=AgentSettings(staging_bytes=settings.staging_mb << 20),
            credentials=settings.credentials(),
        )
        self._agent.begin()
        self.layer_done_counter = LayerWiseLoadCounter(self._pools.layer_count)
        if PoolName.MAMBA in self.pools:
            params.req_to_token_pool.register_layer_transfer_counter(self.layer_done_counter)
        self._asked: OrderedDict[str, _Asked] = OrderedDict()
        self._pending: dict[str, _Load] = {}
        self._loader = ThreadPoolExecutor(1, "restow-load")
        self._keeper = ThreadPoolExecutor(1, "restow-keep")
        self._offloads: deque[Future[bool]] = deque()
        self._stopping = Event()
        self._replaced = 0
        self._tree.begin(self, self._weights_replaced)

    def _registered(self, server_args: ServerArgs, folder: Path, name: str) -> tuple[str, str]:
        """Register the layout of all ranks; return the engine's id and incarnation."""
        revision = self._settings.model_revision or checkpoint_revision(folder)
        quantisation = server_args.quantization or self._pools.model.quantisation
        model = replace(self._pools.model, revision=revision, quantisation=quantisation).model()
        mine = wire.layout_to_proto(Layout(model, (self._pools.layout,)))
        parts = self._loading.gather(mine.SerializeToString())
        word = ""
        try:
            if self._loading.speaks:
                read = [wire.layout_from_proto(layout_pb2.Layout.FromString(p)) for p in parts]
                engine_id, incarnation = f"{name}-{uuid4().hex[:8]}", uuid4().hex
                self._session = register_engine(
                    *(engine_id, incarnation),
                    Layout(model, tuple(one.ranks[0] for one in read)),
                    self._settings,
                    get_logger("restow.sglang").bind(engine=engine_id),
                    publishes=self._settings.tells,
                    asks=self._settings.finds,
                    on_offer=self._sharing.offers.hear,
                )
                self._sharing.begin(self._session, engine_id)
                word = f"{engine_id} {incarnation}"
        finally:
            word = self._loading.tell(word)
        if not word:
            raise EngineUnsupportedError("rank 0 could not register the engine: its log says why")
        engine_id, incarnation = word.rsplit(" ", 1)
        return engine_id, incarnation

    @property
    def _groups(self) -> Mapping[str, Any]:
        return self._pools.groups

    # -- loads ------------------------------------------------------------------------------------

    def lookup(self, rid: str, transfers: list[PoolTransfer]) -> list[int]:
        """Return the numbers of pages that all pools can restore; rank 0 asks for all ranks."""
        keys = _keys(transfers)
        found, last = self._tree.asked(len(keys)), self._asked.pop(rid, None)
        if found is None or self._replaced or not self._settings.finds:
            return []
        tokens, here = found
        if last is None or last.keys != keys or monotonic() > last.at_s + AGAIN_S:
            pages = list(range(1, len(keys) + 1))
            if self._loading.speaks:
                counts = self._sharing.find(tokens, here)
                pages = [(count - here) // self._page_tokens for count in counts]
            last = _Asked(tokens, here, keys, pages, monotonic())
        self._asked[rid] = last
        if len(self._asked) > MAX_ASKED:
            self._asked.popitem(last=False)
        return last.pages

    def load(self, rid: str, transfers: list[PoolTransfer]) -> bool:
        """Queue a load of what was looked up for the request; False if it was something else."""
        asked, keys = self._asked.pop(rid, None), _keys(transfers)
        if asked is None or not keys or keys != asked.keys[: len(keys)]:
            return False
        count = asked.here_tokens + len(keys) * self._page_tokens
        slots = {one.name: one.device_indices for one in transfers}
        tokens = asked.tokens._replace(ids=asked.tokens.ids[:count])
        self._pending[rid] = _Load(tokens, asked.here_tokens, slots)
        return True

    def cancel_queued_load(self, rid: str) -> bool:
        """Forget a load that has not been started."""
        return self._pending.pop(rid, None) is not None

    def start_layer_wise_loading(self) -> int:
        """Request all queued states; return the index under which layers are awaited."""
        if not self._pending:
            return -1
        loads, self._pending = [*self._pending.values()], {}
        index: int = self.layer_done_counter.update_producer()
        done = self._loader.submit(self._load_all, loads, self._written())
        done.add_done_callback(lambda job: self._loaded(index, job))
        return index

    def finish_layer_wise_loading(self, counter_index: int) -> bool:
        """Return whether the states of a batch have arrived, when nothing writes them any more."""
        return bool(self.layer_done_counter.finish(counter_index))

    def _load_all(self, loads: Sequence[_Load], written: Sequence[Any]) -> None:
        """Return when all states have arrived on all ranks. Raises `LoadFailedError`."""
        for event in written:
            event.synchronize()
        wanted = [self._blocks(len(one.tokens.ids), one.slots) for one in loads]
        if not self._loading.agree(wanted):
            raise LoadFailedError("the ranks of SGLang name different slots")
        word = "rank 0 could not request them"
        try:
            if self._loading.speaks:
                word = self._requested(loads, wanted)
        finally:
            word = self._loading.tell(word)
        if word != DONE:
            raise LoadFailedError(f"states did not arrive: {word}")

    def _requested(self, loads: Sequence[_Load], wanted: Sequence[Any]) -> str:
        """Request the states, and return how that ended when their blocks are free."""
        deliveries = [
            self._sharing.request(one.tokens.state, blocks, one.held_tokens)
            for one, blocks in zip(loads, wanted, strict=True)
        ]
        word = DONE
        for delivery in deliveries:
            fault = delivery.exception()
            if fault is not None or not delivery.result().done:
                word = str(fault or delivery.result().detail or delivery.result().reason)
                delivery.pages_free.exception()
        return word

    def _loaded(self, index: int, job: Future[None]) -> None:
        """Let the forward go on, layer by layer; a failed load is told when the batch is over."""
        fault = job.exception()
        if fault is not None:
            self._log.error("states were not loaded", detail=str(fault))
            self.layer_done_counter.fail(index, fault)
            return
        for layer in range(self.layer_done_counter.num_layers):
            self.layer_done_counter.complete(index, layer)

    # -- offloads ---------------------------------------------------------------------------------

    def offload(self, transfers: list[PoolTransfer], session_id: str | None = None) -> bool:
        """Offer a node's state to stores; False if it is none that others can restore.

        A node without a snapshot, or without its whole window, is a part of later states.
        """
        keys = _keys(transfers)
        path = self._tree.path(keys[-1]) if keys else None
        if path is None or self._replaced or not self._settings.tells:
            return False
        count = len(path.tokens.ids)
        for pool in self.pools:
            group = self._groups[GROUPS[pool]]
            if len(path.slots[pool]) < (1 if group.is_state else count - group.first_token(count)):
                return False
        self._offloads.append(self._keeper.submit(self._keep, path, self._written()))
        return True

    def _keep(self, path: NodePath, written: Sequence[Any]) -> bool:
        """Return whether another engine holds the state in the end."""
        for event in written:
            event.synchronize()
        blocks = self._blocks(len(path.tokens.ids), path.slots)
        if not self._keeping.agree(blocks):
            self._log.error("a state is not kept: the ranks of SGLang name different slots")
            return False
        if not self._keeping.speaks:
            while (word := self._keeping.tell()).startswith("fence "):
                self._agent.fence(word.removeprefix("fence "))
            return word == DONE
        word = ""
        try:
            if self._sharing.keep(path.tokens.state, blocks, self._fence, self._stopping):
                word = DONE
        finally:
            self._keeping.tell(word)
        return word == DONE

    def _fence(self, handoff_id: str) -> None:
        self._keeping.tell(f"fence {handoff_id}")
        self._agent.fence(handoff_id)

    def num_completed_offloads(self) -> int:
        """Return how many offloads are over; they end in their order."""
        return sum(job.done() for job in self._offloads)

    def pop_completed_offload(self) -> bool:
        """Return whether the oldest offload was taken."""
        job = self._offloads.popleft()
        fault = job.exception()
        if fault is not None:
            self._log.error("a state was not kept", detail=str(fault))
        return fault is None and job.result()

    # -- life -------------------------------------------------------------------------------------

    def reset(self) -> None:
        """End what is open, and forget it."""
        self._pending.clear()
        self._asked.clear()
        self._stopping.set()
        for thread in (self._loader, self._keeper):
            thread.submit(lambda: None).result()
        self._stopping.clear()
        self._offloads.clear()
        self.layer_done_counter.reset()

    def close(self) -> None:
        """End what is open, and leave the broker."""
        self.reset()
        self._loader.shutdown()
        self._keeper.shutdown()
        self._agent.close()
        if self._session is not None:
            self._session.close()

    def _weights_replaced(self) -> None:
        """Share nothing any more: nobody says which weights the engine has now."""
        self._replaced += 1
        self._log.warning("the weights are replaced: nothing is shared until the engine restarts")
        if self._session is not None:
            self._session.set_revision(f"unknown {self._incarnation} {self._replaced}")

    def _blocks(self, count: int, slots: Slots) -> dict[str, list[int]]:
        """Return the blocks of a state's tokens by group, null where SGLang gave no slots."""
        blocks = {}
        for pool, given in slots.items():
            name = GROUPS[pool]
            if self._groups[name].is_state:
                blocks[name] = [int(given[0])]
                continue
            ids = blocks_of(given, self._page_tokens)
            blocks[name] = [NULL_BLOCK] * (count // self._page_tokens - len(ids)) + ids
        return blocks

    def _written(self) -> list[Any]:
        """Return events that come when all is done that the device was given so far."""
        return self.record_offload_ready() if self._pools.on_device else []


def _keys(transfers: Sequence[PoolTransfer]) -> list[str]:
    return next((list(one.keys or ()) for one in transfers if one.name == PoolName.KV), [])


def _check_engine(
    server_args: ServerArgs, params: CacheInitParams, settings: ConnectorSettings
) -> None:
    """Refuse an engine whose states cannot be shared. Raises `EngineUnsupportedError`."""
    page, unnamed = params.page_size, not settings.model_revision
    overridden = server_args.json_model_override_args not in (None, "", "{}")
    drafts = params.is_eagle or params.mtp_draft_device_pools or params.sidecar_draft_device_pools
    for what, there in {
        f"page_size {page}": QUANTUM_TOKENS % page and page % QUANTUM_TOKENS,
        "pipeline parallelism (pp_size)": params.pp_size > 1,
        "context parallelism (attn_cp_size)": params.attn_cp_size > 1,
        "enable_memory_saver, which takes registered memory away": server_args.enable_memory_saver,
        "speculative decoding with a draft model": drafts,
        "dummy weights without model_revision": server_args.load_format == "dummy" and unnamed,
        "json_model_override_args without model_revision": overridden and unnamed,
    }.items():
        if there:
            raise EngineUnsupportedError(f"SGLang with {what}: Restow's linker does not share that")
