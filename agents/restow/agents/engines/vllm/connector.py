"""The connector that vLLM loads: its hooks are served by `SchedulerSide` and `WorkerSide`.

The contract is vLLM's `distributed/kv_transfer/kv_connector/v1/base.py`. docs/vllm.md describes it
hook by hook.
"""

from __future__ import annotations

from collections.abc import Container, Iterator
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import torch
import vllm
from vllm.distributed.kv_transfer.kv_connector.v1.base import (
    KVConnectorBase_V1,
    KVConnectorHandshakeMetadata,
    KVConnectorMetadata,
    KVConnectorRole,
    KVConnectorTransferResults,
    KVConnectorWorkerMetadata,
    SupportsHMA,
)
from vllm.distributed.parallel_state import get_pp_group, get_tensor_model_parallel_rank
from vllm.lora.worker_manager import WorkerLoRAManager
from vllm.model_executor.layers.mamba.mamba_utils import get_conv_state_layout
from vllm.v1.metrics.cache_hit_source import CacheHitSource
from vllm.v1.request import RequestStatus

from restow.agents.engines.common.adapter_errors import EngineUnsupportedError
from restow.agents.engines.common.blocks import BlockLists
from restow.agents.engines.common.checkpoint import LoadedAdapters, joined_fingerprints
from restow.agents.engines.common.prefill_decode import Scheduled
from restow.agents.engines.common.registration import ConnectorSettings
from restow.agents.engines.vllm.engine_checks import (
    check_engine,
    check_groups,
    check_prefix,
    check_windows,
    has_windows,
    keeps_blocks,
)
from restow.agents.engines.vllm.private import SUPPORTED_VERSIONS, check_vllm, watch_adapters
from restow.agents.engines.vllm.scheduler.metrics import RestowPromMetrics, RestowStats
from restow.agents.engines.vllm.scheduler.scheduler_side import SchedulerSide
from restow.agents.engines.vllm.scheduler.start import start_scheduler_side
from restow.agents.engines.vllm.scheduler.weights import draft_name, served_identity
from restow.agents.engines.vllm.worker.kv_caches import groups_of, known_model, layer_caches
from restow.agents.engines.vllm.worker.layers_from_specs import group_windows, joined_model
from restow.agents.engines.vllm.worker.model_from_specs import rank_model
from restow.agents.engines.vllm.worker.rank_layout import DraftLayers, LayerNumbers, rank_layout
from restow.agents.engines.vllm.worker.worker_side import WorkerSide, WorkerStep
from restow.broker.families import ConvLayout, EngineSettings, ModelSpec
from restow.broker.layout import Layout, RankLayout
from restow.broker.logs import get_logger, log_as

if TYPE_CHECKING:
    from vllm.config import KVTransferConfig, VllmConfig
    from vllm.forward_context import ForwardContext
    from vllm.v1.core.kv_cache_manager import KVCacheBlocks
    from vllm.v1.core.sched.output import SchedulerOutput
    from vllm.v1.kv_cache_interface import KVCacheConfig
    from vllm.v1.outputs import KVConnectorOutput
    from vllm.v1.request import Request


@dataclass
class RestowMetadata(KVConnectorMetadata):  # type: ignore[misc]
    """The workers' part of a step."""

    step: WorkerStep


@dataclass
class RankHandshake(KVConnectorHandshakeMetadata):  # type: ignore[misc]
    """A worker's part of the engine's layout, and of its model."""

    layout: RankLayout
    model: ModelSpec


@dataclass
class RankNews(KVConnectorWorkerMetadata):  # type: ignore[misc]
    """What workers report of a step: the fingerprints of adapters that they have loaded."""

    adapters: dict[str, str]

    def aggregate(self, other: KVConnectorWorkerMetadata) -> RankNews:
        """Join the reports of two ranks."""
        return RankNews(joined_fingerprints(self.adapters, other.adapters))


class RestowConnector(KVConnectorBase_V1, SupportsHMA):  # type: ignore[misc]
    """Hands the state of prompts over through a Restow broker; each worker runs an agent."""

    _cache_hit_source = CacheHitSource.P2P

    def __init__(
        self, vllm_config: VllmConfig, role: KVConnectorRole, kv_cache_config: KVCacheConfig
    ) -> None:
        """Check the engine. Raises `SettingsError` and `EngineUnsupportedError`."""
        check_vllm(RestowConnector)
        super().__init__(vllm_config, role, kv_cache_config)
        transfer = vllm_config.kv_transfer_config
        log_as("vllm")
        self._log = get_logger("restow.vllm").bind(engine=transfer.engine_id)
        self._settings = ConnectorSettings.of(transfer.kv_connector_extra_config)
        check_engine(vllm_config)
        check_groups(kv_cache_config)
        check_windows(vllm_config, kv_cache_config)
        check_prefix(vllm_config, self._settings)
        text = vllm_config.model_config.hf_text_config
        self._name: str = text.model_type
        hf_config = text.to_dict()
        self._numbers = LayerNumbers.of(hf_config)
        self._known = known_model(hf_config, kv_cache_config)
        self._handshake: RankHandshake | None = None
        self._worker: WorkerSide | None = None
        self._scheduler: SchedulerSide | None = None
        self._group_names: list[str] = []
        self._adapters = LoadedAdapters()
        supported = any(vllm.__version__.startswith(f"{one}.") for one in SUPPORTED_VERSIONS)
        if not supported and role is KVConnectorRole.SCHEDULER:
            self._log.warning(
                "this version of vLLM was not tested, though it has all that is needed",
                version=vllm.__version__,
                tested=list(SUPPORTED_VERSIONS),
            )

    # -- what vLLM asks of the class ---------------------------------------------------------------

    @property
    def supports_divergent_local_hybrid_hits(self) -> bool:
        """Whether D may hold more keys and values than states when it loads the rest.

        It may, because a state is always loaded whole. With windows it may not, because the tokens
        of a window that D holds are not loaded. vLLM asks anew for each request, and gets another
        answer where a state stands among D's keys.
        """
        if self._scheduler is not None and self._scheduler.wants_whole_hits:
            return False
        return not has_windows(self._kv_cache_config)

    @classmethod
    def get_required_kvcache_layout(cls, vllm_config: VllmConfig) -> str | None:
        """Return a layout with heads outside of tokens: a rank's heads are one piece of a page."""
        return None if vllm_config.model_config.use_mla else "LBHNC"

    @classmethod
    def build_kv_connector_stats(cls, data: dict[str, Any] | None = None) -> RestowStats:
        """Make stats from their values, which another process sent."""
        stats = RestowStats()
        if data is None:
            stats.reset()
        else:
            stats.data = data
        return stats

    @classmethod
    def build_prom_metrics(
        cls,
        vllm_config: VllmConfig,
        metric_types: Any,
        labelnames: list[str],
        per_engine_labelvalues: dict[int, list[object]],
    ) -> RestowPromMetrics:
        """Make the Prometheus side of `RestowStats`."""
        return RestowPromMetrics(vllm_config, metric_types, labelnames, per_engine_labelvalues)

    def get_loaded_kv_cache_group_ids(self, request: Request) -> tuple[int, ...]:
        """Return all groups: a handoff carries all blocks of the request."""
        ids: tuple[int, ...] = self._kv_cache_config.transfer_group_ids
        return ids

    @classmethod
    def supports_sleep_mode(cls, kv_transfer_config: KVTransferConfig) -> bool:
        """Return False: agents have registered the caches' memory for as long as they live."""
        return False

    # -- worker ------------------------------------------------------------------------------------

    def register_kv_caches(self, kv_caches: dict[str, torch.Tensor]) -> None:
        """Check the layout of the caches, register their memory, and begin to connect."""
        config = self._vllm_config
        settings = EngineSettings(
            config.parallel_config.tensor_parallel_size,
            conv_layout=ConvLayout(get_conv_state_layout()),
            conv_rows_extra=config.num_speculative_tokens if config.speculative_config else 0,
            whole_blocks=keeps_blocks(config),
        )
        rank = get_pp_group().rank_in_group * settings.tp + get_tensor_model_parallel_rank()
        layers = config.compilation_config.static_forward_context
        numbers = self._numbers, DraftLayers.of(config)
        caches = list(layer_caches(self._kv_cache_config, kv_caches, layers, *numbers))
        draft = draft_name(config) if config.speculative_config else ""
        untested = self._settings.allow_untested
        named = self._name, self._known, caches, config, settings.conv_layout, draft
        model = rank_model(*named, allow_untested=untested)
        laid = [entry.cache for entry in caches]
        regions = rank_layout(model, settings, rank, laid)
        self._worker = WorkerSide(
            config.kv_transfer_config.engine_id, config.instance_id, regions, laid, self._settings
        )
        self._handshake = RankHandshake(regions.layout, model)
        if config.lora_config is not None:
            watch_adapters(self._adapters, WorkerLoRAManager)

    def unregister_kv_caches(self) -> None:
        """Refuse to give the caches' memory back. Raises `EngineUnsupportedError`."""
        raise EngineUnsupportedError(
            "the memory of the KV caches may not be given back while Restow serves it: other "
            "engines may be reading it"
        )

    def get_handshake_metadata(self) -> KVConnectorHandshakeMetadata | None:
        """Return the rank's layout, for the scheduler's side to register."""
        return self._handshake

    def bind_connector_metadata(self, connector_metadata: KVConnectorMetadata) -> None:
        """Begin a step; steps before it may still be writing to blocks that it loads."""
        super().bind_connector_metadata(connector_metadata)
        if self._worker is not None:
            self._worker.begin(self._step())

    def start_load_kv(self, forward_context: ForwardContext, **kwargs: Any) -> None:
        """Zero parts of blocks that arriving states do not write."""
        if self._worker is not None:
            self._worker.load(self._step())

    def wait_for_layer_load(self, layer_name: str) -> None:
        """Do nothing: states are there before a request is scheduled."""

    def save_kv_layer(
        self, layer_name: str, kv_layer: torch.Tensor, attn_metadata: Any, **kwargs: Any
    ) -> None:
        """Do nothing: D reads P's pages."""

    def wait_for_save(self) -> None:
        """Fence the prompts that this step has completed."""
        if self._worker is not None:
            self._worker.fence(self._step())

    def get_transfer_results(self, finished_req_ids: set[str]) -> KVConnectorTransferResults:
        """Return the ends of handoffs that the scheduler's side heard of since the last step."""
        step = self._step()
        return KVConnectorTransferResults(
            finished_sending=set(step.sent),
            finished_recving=set(step.received),
            failed_recving={
                request_id for request_id, arrived in step.received.items() if not arrived
            },
        )

    def build_connector_worker_meta(self) -> RankNews | None:
        """Return which adapters this rank has loaded since the last step."""
        fingerprints = self._adapters.take()
        return RankNews(fingerprints) if fingerprints else None

    # -- scheduler ---------------------------------------------------------------------------------

    def set_xfer_handshake_metadata_pp_aware(
        self, metadata: dict[tuple[int, int], KVConnectorHandshakeMetadata]
    ) -> None:
        """Register the engine with the broker, now that all ranks are known, and wait for that.

        Raises `SettingsError`, `BrokerUnreachableError`, and `BrokerCallError` with its reason.
        """
        config, caches = self._vllm_config, self._kv_cache_config
        ranks = sorted(metadata.values(), key=lambda rank: rank.layout.rank)
        joined = joined_model([rank.model for rank in ranks])
        identity = served_identity(config, joined.name, self._settings.model_revision)
        self._settings.check_weights(identity.revision)
        model = replace(joined, revision=identity.revision, quantisation=identity.quantisation)
        layout = Layout(model.model(), tuple(rank.layout for rank in ranks))
        if self._known is None:
            self._log.info("no family has this type: vLLM's specs are served", type=model.name)
        groups = groups_of(group_windows(layout), caches, keeps_blocks(config))
        self._group_names = [group.name for group in groups]
        self._scheduler = start_scheduler_side(
            config, self._settings, layout, caches, groups, self._kv_cache_manager
        )

    def on_new_request(self, request: Request) -> None:
        """Find the request's handoff; P's prompt is cut here."""
        self._side().new_request(request)

    def get_num_new_matched_tokens(
        self, request: Request, num_computed_tokens: int
    ) -> tuple[int | None, bool]:
        """Return how much of the prompt another engine has, or will have. None: ask again."""
        count = self._side().loadable_tokens(request, num_computed_tokens)
        return count, bool(count)

    def update_state_after_alloc(
        self, request: Request, blocks: KVCacheBlocks, num_external_tokens: int
    ) -> None:
        """Ask for the state, or decline it."""
        side = self._side()
        if side.decides(request.request_id):
            ids = self._kv_cache_config.select_transfer_block_ids(blocks.get_block_ids())
            side.allocated(request, ids, num_external_tokens)

    def has_pending_push_work(self) -> bool:
        """Return whether a step has something to do, though no request runs."""
        return self._scheduler is not None and self._scheduler.pending

    def build_connector_meta(self, scheduler_output: SchedulerOutput) -> KVConnectorMetadata:
        """Return what workers do in this step."""
        side = self._side()
        scheduled = self._scheduled(scheduler_output, side.computing)
        preempted = scheduler_output.preempted_req_ids or ()
        return RestowMetadata(side.step(scheduled, preempted))

    def update_connector_output(self, connector_output: KVConnectorOutput) -> None:
        """Hear of adapters that workers have loaded, after the ends of the step's requests."""
        news = connector_output.kv_connector_worker_meta
        self._side().loaded({} if news is None else news.adapters)

    def request_finished_all_groups(
        self, request: Request, block_ids: tuple[list[int], ...]
    ) -> tuple[bool, dict[str, Any] | None]:
        """Publish P's state, or forget D's request; answer its KV hints and marks."""
        computed = request.status in (
            RequestStatus.FINISHED_LENGTH_CAPPED,
            RequestStatus.FINISHED_STOPPED,
        )
        ids = self._kv_cache_config.select_transfer_block_ids(block_ids)
        answer = self._side().finished(request, ids, computed)
        more = self._side().answered(request.request_id)
        return answer is not None, {**(answer or {}), **more} or None

    def reset_cache(self) -> bool:
        """Have stores drop the states of this engine's weights: vLLM resets its own cache."""
        if self._scheduler is not None:
            self._scheduler.reset_cache()
        return True

    def get_kv_connector_stats(self) -> RestowStats | None:
        """Return the counts of this side: the scheduler's handoffs, or a worker's reads."""
        side = self._worker or self._scheduler
        data = None if side is None else side.counted()
        return None if data is None else RestowStats(data=data)

    def shutdown(self) -> None:
        """Leave the broker."""
        if self._worker is not None:
            self._worker.close()
        if self._scheduler is not None:
            self._scheduler.close()
        self._worker = None

    # -- inside ------------------------------------------------------------------------------------

    def _step(self) -> WorkerStep:
        metadata: RestowMetadata = self._get_connector_metadata()
        return metadata.step

    def _scheduled(
        self, scheduler_output: SchedulerOutput, wanted: Container[str]
    ) -> Iterator[Scheduled]:
        """Yield the step's parts of the ``wanted`` requests."""
        scheduled = scheduler_output.num_scheduled_tokens
        for new in scheduler_output.scheduled_new_reqs:
            if (request_id := new.req_id) in wanted:
                tokens = new.num_computed_tokens + scheduled[request_id]
                yield Scheduled(request_id, tokens, self._named(new.block_ids))
        cached = scheduler_output.scheduled_cached_reqs
        continued = zip(
            cached.req_ids, cached.num_computed_tokens, cached.new_block_ids, strict=True
        )
        for request_id, computed, ids in continued:
            if request_id in wanted:
                yield Scheduled(request_id, computed + scheduled[request_id], self._named(ids))

    def _named(self, block_ids: tuple[list[int], ...] | None) -> BlockLists:
        if block_ids is None:
            return {}
        ids = self._kv_cache_config.select_transfer_block_ids(block_ids)
        return dict(zip(self._group_names, ids, strict=True))

    def _side(self) -> SchedulerSide:
        if self._scheduler is None:
            raise EngineUnsupportedError("the engine asks before its workers have registered")
        return self._scheduler
