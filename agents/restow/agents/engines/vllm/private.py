"""All that Restow uses of vLLM beyond its interfaces, each with the reason.

vLLM promises nothing about these places, and a new version may change them. `check_vllm` looks for
all of them, and for the hooks, when an engine starts. `tests/vllm_engines/test_private.py` runs
with every supported version. The module imports vLLM only when it is asked for something.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator, Mapping, Sequence
from queue import Queue
from typing import TYPE_CHECKING, Any

from restow.agents.engines.common.adapter_errors import EngineUnsupportedError
from restow.agents.engines.common.checkpoint import LoadedAdapters

if TYPE_CHECKING:
    from vllm.config import ModelConfig
    from vllm.v1.core.block_pool import BlockHashToBlockMap
    from vllm.v1.engine import EngineCoreOutput, EngineCoreOutputs, EngineCoreRequestType

SUPPORTED_VERSIONS = ("0.32", "0.33")
"""The two newest minor versions of vLLM: tests run with both."""
HOOKS_SINCE_0_33 = frozenset({"supports_sleep_mode", "unregister_kv_caches"})
"""Hooks that are answered where vLLM has them; docs/vllm.md says what happens elsewhere."""


def missing_error(what: str) -> EngineUnsupportedError:
    """Return the error to raise about something that this version of vLLM does not have."""
    return EngineUnsupportedError(
        f"this version of vLLM has no {what}, which Restow needs: supported are vLLM "
        f"{' and '.join(SUPPORTED_VERSIONS)}"
    )


def check_vllm(connector: type) -> None:
    """Refuse a vLLM without a hook that ``connector`` answers, or an attribute that it uses.

    Raises `EngineUnsupportedError` that names what is missing, and the supported versions.
    """
    bases = connector.__mro__[1:]
    for hook in vars(connector):
        asked = any(hook in vars(base) for base in bases)
        if not (asked or hook.startswith("_") or hook in HOOKS_SINCE_0_33):
            raise missing_error(f"hook {hook} of connectors")
    try:
        used = list(_used_classes())
    except ImportError as error:
        raise missing_error(f"module or name: {error}") from error
    for owner, names in used:
        for name in names.split():
            if not _has(owner, name):
                raise missing_error(f"{owner.__qualname__}.{name} ({owner.__module__})")


def _used_classes() -> Iterator[tuple[type, str]]:
    """Yield vLLM's classes, and what Restow uses of their objects that is no part of a hook."""
    from vllm.config import ModelConfig
    from vllm.lora.worker_manager import WorkerLoRAManager
    from vllm.v1.core.block_pool import BlockHashToBlockMap, BlockPool
    from vllm.v1.core.kv_cache_coordinator import KVCacheCoordinator
    from vllm.v1.core.kv_cache_manager import KVCacheManager
    from vllm.v1.core.kv_cache_utils import KVCacheBlock
    from vllm.v1.core.sched.scheduler import Scheduler
    from vllm.v1.engine.core import EngineCoreProc
    from vllm.v1.kv_cache_interface import KVCacheConfig
    from vllm.v1.request import Request

    # `CoreLoop` and `watch_calls`
    yield EngineCoreProc, "collective_rpc set_weight_version input_queue output_queue scheduler"
    # `watch_keys`, and the pins and reply ends of `prefix_cache`
    yield BlockHashToBlockMap, "_cache insert pop get_one_block __len__"
    yield BlockPool, "cached_block_hash_to_block touch free_blocks unpin_blocks blocks"
    yield BlockPool, "get_num_free_blocks num_gpu_blocks hash_block_size"
    yield KVCacheManager, "block_pool coordinator"
    yield KVCacheCoordinator, "single_type_managers find_longest_cache_hit"
    yield KVCacheBlock, "block_id ref_cnt block_hash_num_tokens"
    yield KVCacheConfig, "transfer_groups transfer_group_ids select_transfer_block_ids num_blocks"
    yield Scheduler, "_mamba_block_aligned_split"  # `keep_at_marks`
    # `token_ids`, and what `SampledTokens` does to a request
    yield Request, "_all_token_ids update_block_hashes take_prefill_stats take_events record_event"
    yield Request, "shared_prefix_boundary"
    yield Request, "block_hashes mm_features get_skip_reading_prefix_cache resumable client_index"
    yield ModelConfig, "_hf_config_revision _apply_dict_overrides"
    yield WorkerLoRAManager, "_load_adapter"


def _has(owner: type, name: str) -> bool:
    """Return whether objects of a class have an attribute: from the class, or since they are made.

    The names that a function uses are in its code, so no object has to be made.
    """
    if hasattr(owner, name):
        return True
    makers = (
        vars(base).get(one) for base in owner.__mro__ for one in ("__init__", "__post_init__")
    )
    codes = (getattr(inspect.unwrap(one), "__code__", None) for one in makers if one is not None)
    return any(code is not None and name in code.co_names for code in codes)


# -- the engine core ------------------------------------------------------------------------------


def core_of_caller() -> Any:
    """Return the engine core that makes this connector, and so stands among the callers.

    Why: vLLM gives connectors no way to the core, whose loop has to be woken for offers, and whose
    calls replace weights. Raises `EngineUnsupportedError` where there is none.
    """
    frame = inspect.currentframe()
    while frame is not None:
        core = frame.f_locals.get("self")
        if hasattr(core, "collective_rpc") and hasattr(core, "set_weight_version"):
            return core
        frame = frame.f_back
    raise missing_error("EngineCore with collective_rpc and set_weight_version above a connector")


class CoreLoop:
    """The loop of an engine core in this process. Any thread may use it.

    Why: a connector's part of the scheduler is only called in steps, and an idle engine takes none.
    The loop waits on its queue of requests; vLLM itself wakes it by a `WAKEUP` there when it is to
    end. Then it takes a step if the connector says that it has work (`has_pending_push_work`). And
    no hook lets a connector answer a client before a step has sampled.
    """

    def __init__(
        self,
        requests: Queue[tuple[EngineCoreRequestType, Any]],
        outputs: Queue[tuple[int, EngineCoreOutputs] | bytes],
    ) -> None:
        """Put requests into the core's queue, and outputs into the queue to its clients."""
        self._requests, self._outputs = requests, outputs

    @classmethod
    def of(cls, core: Any) -> CoreLoop | None:
        """Return the loop of an engine core; None: it has no process of its own."""
        requests = getattr(core, "input_queue", None)
        outputs = getattr(core, "output_queue", None)
        return None if requests is None or outputs is None else cls(requests, outputs)

    def wake(self) -> None:
        """Have the loop look whether there is work."""
        from vllm.v1.engine import EngineCoreRequestType

        self._requests.put_nowait((EngineCoreRequestType.WAKEUP, None))

    def send(self, client_index: int, output: EngineCoreOutput) -> None:
        """Send a client an output of a request, after those that were sent before."""
        from vllm.v1.engine import EngineCoreOutputs

        self._outputs.put_nowait((client_index, EngineCoreOutputs(outputs=[output])))

    def abort(self, request_id: str) -> None:
        """End a request as if its client had given it up."""
        from vllm.v1.engine import EngineCoreRequestType

        self._requests.put_nowait((EngineCoreRequestType.ABORT, [request_id]))


def watch_calls(
    core: Any,
    called: Callable[[str | Callable[..., Any], Callable[[], Any], Sequence[Any], Any], Any],
    versioned: Callable[[str], None],
) -> None:
    """Have ``called`` and ``versioned`` hear the calls of an engine core to its workers.

    ``called`` gets the method, a function that makes the call, and the arguments; ``versioned``
    gets a version of the weights after it was set. Why: vLLM tells connectors nothing when weights
    are replaced, and every call that may do so goes through these two methods.
    """
    call, set_version = core.collective_rpc, core.set_weight_version

    def collective_rpc(
        method: str | Callable[..., Any],
        timeout: float | None = None,
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        return called(method, lambda: call(method, timeout, args, kwargs), args, kwargs or {})

    def set_weight_version(weight_version: str) -> None:
        set_version(weight_version)
        versioned(weight_version)

    core.collective_rpc, core.set_weight_version = collective_rpc, set_weight_version


# -- the scheduler and its cache ------------------------------------------------------------------


def watch_keys(cached: BlockHashToBlockMap) -> dict[bytes, None]:
    """Return a dict to which a map from keys to blocks adds each key that is touched from now on.

    At first it has all keys. Why: vLLM's KV cache events are not enough. The scheduler takes them
    away, an event does not tell whether a block was the last of its hash, it carries all tokens,
    and no event says that a block has moved.
    """
    touched: dict[bytes, None] = dict.fromkeys(cached._cache)
    insert, pop = cached.insert, cached.pop

    def noted_insert(key: Any, block: Any) -> None:
        touched[key] = None
        insert(key, block)

    def noted_pop(key: Any, block_id: int) -> Any:
        touched[key] = None
        return pop(key, block_id)

    cached.insert, cached.pop = noted_insert, noted_pop
    return touched


def keep_at_marks(core: Any, marks_of: Callable[[str], Sequence[int]]) -> None:
    """Have the scheduler of an engine core keep recurrent states at the marks of its requests.

    ``marks_of`` returns the marks of a request, which are multiples of a block, in rising order.
    Why: vLLM ends a step, and keeps the state there, where it has seen that prompts part. It notes
    the place in the request, and no hook lets a connector note one. vLLM asks this method, for
    recurrent models alone, where the next step of a prompt ends.
    """
    scheduler = core.scheduler
    split = scheduler._mamba_block_aligned_split

    def aligned(request: Any, num_new_tokens: int, local: int = 0, external: int = 0) -> int:
        start = request.num_computed_tokens + local + external
        mark = next((mark for mark in marks_of(request.request_id) if mark > start), 0)
        if mark and not start < request.shared_prefix_boundary < mark:
            request.shared_prefix_boundary = mark
        tokens: int = split(request, num_new_tokens, local, external)
        return tokens

    scheduler._mamba_block_aligned_split = aligned


def keep_loaded(request: Any, position_tokens: int) -> None:
    """Have vLLM keep a recurrent state that a request loads in its cache, for other requests.

    Why: of the states in a prompt vLLM keeps only those where prompts part, and no hook lets a
    connector name another.
    """
    request.shared_prefix_boundary = position_tokens


def token_ids(request: Any) -> list[int]:
    """Return the list in which a request keeps its tokens.

    Why: P's prompt is cut and D's gets the token that P sampled. vLLM's public view of the list is
    for reading only, and reads it slowly.
    """
    ids: list[int] = request._all_token_ids
    return ids


# -- what a model is computed from ----------------------------------------------------------------


def config_revision(model: ModelConfig) -> str | None:
    """Return the revision of the checkpoint's configuration. Why: vLLM resolves it only there."""
    revision: str | None = model._hf_config_revision
    return revision


def override_config(model: ModelConfig, config: Any, nested: Mapping[str, Any]) -> None:
    """Apply nested ``--hf-overrides`` to a configuration. Why: vLLM merges them in its own way."""
    model._apply_dict_overrides(config, nested)


def static_scales(layer: Any) -> list[Any]:
    """Return the scales of a layer's keys and values. Why: no spec of a cache has their numbers."""
    return [getattr(layer, f"_{part}_scale_float", None) for part in ("k", "v")]


def watch_adapters(adapters: LoadedAdapters, manager: Any) -> None:
    """Note the adapters that a class of vLLM's (`lora/worker_manager.py`) loads from now on.

    Why: vLLM does not tell connectors when it loads an adapter: when it is asked to, or in the step
    of a request.
    """
    load = manager._load_adapter

    def noted(own: Any, request: Any) -> Any:
        with adapters.loading(request.lora_name, request.lora_path):
            return load(own, request)

    manager._load_adapter = noted
