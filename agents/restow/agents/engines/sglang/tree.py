"""Find the tokens and slots that a call of SGLang's cache is about.

SGLang gives a linker hashes of pages, and the slots of a single node of its tree. A state's name
needs all tokens before it, and its publication all their slots. So `TreeWatch` looks at the calls
around the linker, by SGLang's own `HookRegistry` and the interface that both of its trees have.
"""

from __future__ import annotations

import pkgutil
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import torch
from sglang.srt.mem_cache.hicache_storage import PoolName
from sglang.srt.mem_cache.unified_cache.component_type import ComponentType
from sglang.srt.mem_cache.utils import get_storage_hash_str
from sglang.srt.plugins.hook_registry import HookRegistry, HookType

from restow.agents.engines.common.adapter_errors import BlocksError, EngineUnsupportedError
from restow.agents.engines.sglang.keeping import Tokens

WRAPPER = "sglang.srt.mem_cache.unified_cache.unified_cache_linker.UnifiedCacheLinkerWrapper"
CACHE = "sglang.srt.mem_cache.unified_radix_cache.UnifiedRadixCache"
UPDATER = "sglang.srt.managers.scheduler_components.weight_updater.SchedulerWeightUpdaterManager"
UPDATES = (
    *("update_weights_from_disk", "update_weights_from_distributed"),
    *("update_weights_from_tensor", "update_weights_from_ipc", "begin_weight_update"),
)


class NodePath(NamedTuple):
    """A node of the tree with its ancestors: all tokens, and by pool the slots of the last ones."""

    tokens: Tokens
    slots: Mapping[PoolName, torch.Tensor]


class TreeWatch:
    """Looks at the calls around a linker. Belongs to the scheduler's thread."""

    def __init__(self, vocabulary: int, page_tokens: int) -> None:
        """Look at nothing yet."""
        self._vocabulary, self._page_tokens = vocabulary, page_tokens
        self._match: tuple[Any, int] | None = None
        self._inserted: Any = None
        self._node: tuple[Any, Any] | None = None

    def begin(self, linker: Any, replaced: Callable[[], None]) -> None:
        """Look at the calls around ``linker``; call ``replaced`` before weights are replaced.

        Raises `EngineUnsupportedError` that names what this version of SGLang does not have.
        """

        def match(wrapper: Any, key: Any, req: Any, result: Any) -> None:
            if wrapper.cache_linker is linker:
                self._match = key, result.device_prefix_len

        def insert(cache: Any, params: Any) -> None:
            if cache.linker is not None and cache.linker.cache_linker is linker:
                self._inserted = params.key

        def offload(wrapper: Any, node_id: Any, transfers: Any) -> None:
            if wrapper.cache_linker is linker:
                self._node = wrapper.cache, node_id

        hooks: dict[str, Callable[..., None]] = {
            f"{WRAPPER}.match": match,
            f"{CACHE}.insert": insert,
            f"{WRAPPER}._offload_node": offload,
            **{f"{UPDATER}.{name}": lambda *_, **__: replaced() for name in UPDATES},
        }
        for target, hook in hooks.items():
            try:
                before = pkgutil.resolve_name(target)
            except (ImportError, AttributeError):
                raise EngineUnsupportedError(f"this version of SGLang has no {target}") from None
            HookRegistry.register(target, hook, HookType.BEFORE)
            HookRegistry.apply_hooks()
            if pkgutil.resolve_name(target) is before:
                raise EngineUnsupportedError(f"SGLang's HookRegistry does not hook {target}")

    def asked(self, pages: int) -> tuple[Tokens, int] | None:
        """Return the tokens that a lookup of ``pages`` is about, and how many are here."""
        found, self._match = self._match, None
        if found is None:
            return None
        key, here = found
        tokens = self._tokens(key, here + pages * self._page_tokens)
        return None if tokens is None else (tokens, here)

    def path(self, last_key: str) -> NodePath | None:
        """Return the path of the node that is offloaded; ``last_key`` is SGLang's hash of its end.

        None: its tokens are not known. The hash proves that they are the node's.
        """
        found, self._node = self._node, None
        if found is None:
            return None
        cache, node_id = found
        core, key = cache.tree_core, self._inserted
        (nodes,) = core.collect_path_info([node_id])
        end = nodes[-1].path_end
        tokens = self._tokens(key, end)
        if tokens is None:
            return None
        if get_storage_hash_str(key[:end], page_size=self._page_tokens)[-1] != last_key:
            return None
        slots = {PoolName.KV: core.collect_full_device_indices(node_id, nodes[0].parent_id)}
        if ComponentType.SWA in cache.tree_components:
            window: list[torch.Tensor] = []
            for node in reversed(nodes):
                value = core.get_component_device_value(node.node_id, ComponentType.SWA)
                window = window if value is None else [value, *window]
                if value is None or len(value) < node.path_end - node.path_start:
                    break
            slots[PoolName.SWA] = torch.cat(window) if window else torch.empty(0)
        if ComponentType.MAMBA in cache.tree_components:
            state = core.get_component_device_value(node_id, ComponentType.MAMBA)
            slots[PoolName.MAMBA] = torch.empty(0) if state is None else state
        return NodePath(tokens, slots)

    def _tokens(self, key: Any, count: int) -> Tokens | None:
        """Return the first tokens of SGLang's key; None: nothing but SGLang knows what they mean.

        An ``extra_key`` stands for an adapter or for what a user says; ids beyond the vocabulary
        stand for images.
        """
        if key is None or key.extra_key is not None or count > len(key.raw_token_ids()):
            return None
        ids = key.raw_token_ids()[:count].tolist()
        return Tokens(ids, key.cache_salt or "") if max(ids) < self._vocabulary else None


def blocks_of(slots: torch.Tensor, page_tokens: int) -> list[int]:
    """Return the pages that slots of tokens lie in, in their order.

    Raises `BlocksError` for slots that are no whole pages.
    """
    pages = slots.to("cpu", torch.int64).reshape(-1, page_tokens)
    firsts = pages[:, :1]
    if (firsts % page_tokens).any() or (pages != firsts + torch.arange(page_tokens)).any():
        raise BlocksError(f"SGLang gave slots that are no whole pages of {page_tokens} tokens")
    blocks: list[int] = (firsts[:, 0] // page_tokens).tolist()
    return blocks
