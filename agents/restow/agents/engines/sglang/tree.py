"""Find the tokens and slots that a call of SGLang's cache is about.

SGLang gives a linker hashes of pages, and the slots of a single node of its tree. A state's name
needs all tokens before it, and its publication all their slots. So `TreeWatch` looks at the calls
around the linker, by SGLang's own `HookRegistry` and the interface that both of its trees have.
"""

from __future__ import annotations

import pkgutil
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from sglang.srt.mem_cache.hicache_storage import PoolName
from sglang.srt.mem_cache.unified_cache.component_type import ComponentType
from sglang.srt.mem_cache.utils import get_storage_hash_str
from sglang.srt.plugins.hook_registry import HookRegistry, HookType

from restow.agents.engines.common.adapter_errors import BlocksError, EngineUnsupportedError

WRAPPER = "sglang.srt.mem_cache.unified_cache.unified_cache_linker.UnifiedCacheLinkerWrapper"
CACHE = "sglang.srt.mem_cache.unified_radix_cache.UnifiedRadixCache"
UPDATER = "sglang.srt.managers.scheduler_components.weight_updater.SchedulerWeightUpdaterManager"
UPDATES = (
    *("update_weights_from_disk", "update_weights_from_distributed"),
    *("update_weights_from_tensor", "update_weights_from_ipc", "begin_weight_update"),
)


@dataclass(frozen=True, slots=True)
class Tokens:
    """The tokens that a call is about, and the salt that keeps equal tokens apart."""

    ids: Sequence[int]
    salt: str

    @classmethod
    def of(cls, key: Any, count: int, vocabulary: int) -> Tokens | None:
        """Return the first tokens of SGLang's key; None: nothing but SGLang knows what they mean.

        An ``extra_key`` stands for an adapter or for what a user says; ids beyond the vocabulary
        stand for images.
        """
        if key is None or key.extra_key is not None or count > len(key.raw_token_ids()):
            return None
        ids = key.raw_token_ids()[:count].tolist()
        return None if max(ids, default=0) >= vocabulary else cls(ids, key.cache_salt or "")


@dataclass(frozen=True, slots=True)
class NodePath:
    """A node of the tree with all its ancestors: tokens from the prompt's beginning, and slots.

    ``slots`` has the first token that a pool has slots for without a gap, and these slots.
    """

    tokens: Tokens
    slots: Mapping[PoolName, tuple[int, torch.Tensor]]


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
        """Return the tokens that a lookup of so many pages is about, and how many are here."""
        found, self._match = self._match, None
        if found is None:
            return None
        key, here = found
        tokens = Tokens.of(key, here + pages * self._page_tokens, self._vocabulary)
        return None if tokens is None else (tokens, here)

    def path(self, last_key: str) -> NodePath | None:
        """Return the path of the node that is offloaded; ``last_key`` is SGLang's hash of its end.

        None: its tokens are not known. The hash proves that they are the node's.
        """
        found, self._node = self._node, None
        key = self._inserted
        if found is None or key is None:
            return None
        (cache, node_id), core = found, found[0].tree_core
        (nodes,) = core.collect_path_info([node_id])
        end = nodes[-1].path_end
        tokens = Tokens.of(key, end, self._vocabulary)
        if tokens is None:
            return None
        if get_storage_hash_str(key[:end], page_size=self._page_tokens)[-1] != last_key:
            return None
        slots = {PoolName.KV: (0, core.collect_full_device_indices(node_id, nodes[0].parent_id))}
        window: list[torch.Tensor] = []
        first = end
        for node in reversed(nodes if ComponentType.SWA in cache.tree_components else ()):
            value = core.get_component_device_value(node.node_id, ComponentType.SWA)
            if value is not None:
                window.insert(0, value)
                first -= len(value)
            if value is None or first != node.path_start:
                break
        if window:
            slots[PoolName.SWA] = (first, torch.cat(window))
        if ComponentType.MAMBA in cache.tree_components:
            state = core.get_component_device_value(node_id, ComponentType.MAMBA)
            if state is not None:
                slots[PoolName.MAMBA] = (end, state)
        return NodePath(tokens, slots)


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
