"""An engine of a Hugging Face model, which prefills or decodes on its side of a handoff."""

from __future__ import annotations

import secrets
import uuid
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from contextlib import ExitStack
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Self

from torch import Tensor
from transformers import DynamicCache, NemotronHForCausalLM

from restow.agents.engines.common.blocks import NULL_BLOCK, backoff_tokens, position_tokens
from restow.agents.engines.common.checkpoint import checkpoint_revision
from restow.broker.client import BlockingDelivery, BlockingSession, HandoffEnded, content_of
from restow.broker.errors import LayoutFormError, RequestError, RestowError
from restow.broker.families import EngineSettings, build_layout
from restow.broker.families.hf import model_from_hf_config
from restow.broker.layout import DType, Layout
from restow.demo.transformers.generation import (
    AS_COMPUTED,
    Decoded,
    StoredTypes,
    decode_greedily,
    prefill,
    round_cache,
)
from restow.demo.transformers.model_state import (
    check_exact,
    conv_weights,
    export_state,
    import_state,
    kept_inputs,
)
from restow.demo.transformers.rank_processes import ForkServer, RankIdentity, WorkerAgent
from restow.demo.transformers.ranks import (
    BlockPool,
    RankAgent,
    RankMemory,
    serve_rank,
    take_from_each,
)
from restow.demo.transformers.state_io import RankTensors, collect, lay_out, lay_out_weights

State = Mapping[str, Tensor]


class HandoffFailedError(RestowError, status="ABORTED", reason="HANDOFF_FAILED"):
    """A handoff ended other than DONE: its state must not be used."""

    def __init__(self, ended: HandoffEnded) -> None:
        """Carry the broker's reason and detail."""
        super().__init__(
            f"handoff {ended.handoff_id} {ended.state}: {ended.reason}: {ended.detail}",
            handoff=ended.handoff_id,
            handoff_state=ended.state,
            handoff_reason=ended.reason,
        )


@dataclass(frozen=True, slots=True)
class EngineOptions:
    """The options of an engine.

    ``homes`` says where each rank's agent lives: a fork server starts a process that embeds it, a
    path is the socket of a daemon. ``capacity_tokens`` and ``capacity_requests`` size the memory.
    ``stored`` are the types of what lies in it. ``revision`` is a word for the model's weights;
    empty: a fingerprint of the checkpoint that it was loaded from, if it was.
    """

    engine_id: str
    broker: str
    settings: EngineSettings
    homes: tuple[ForkServer | Path, ...]
    capacity_tokens: int = 4096
    capacity_requests: int = 32
    stored: StoredTypes = AS_COMPUTED
    revision: str = ""


@dataclass(frozen=True, slots=True)
class Asked:
    """A handoff that D has asked for."""

    handoff_id: str
    token_ids: tuple[int, ...]
    blocks: Mapping[str, list[int]]
    end: BlockingDelivery


class Engine:
    """One engine of the recall model, cut for its own tensor parallelism."""

    def __init__(
        self,
        model: NemotronHForCausalLM,
        options: EngineOptions,
        announce: Callable[[Layout], Layout] = lambda layout: layout,
    ) -> None:
        """Prepare the engine; ``with`` starts it.

        ``announce`` returns the layout that the broker is told: the engine's own, unless a test
        lies. Raises `RebuildingInexactError`, and `LayoutFormError` for context parallelism.
        """
        self._model = model
        self._options = options
        if options.settings.mixer_inputs or options.settings.projections:
            check_exact(model)
        if options.settings.dcp > 1 or options.settings.pcp > 1:
            raise LayoutFormError(
                "this engine shares no tokens out over ranks: leave dcp and pcp 1"
            )
        stored = options.stored
        spec = model_from_hf_config(
            *(model.config.to_dict(), stored.kv, stored.conv, stored.ssm),
            dtype=DType.parse(str(model.dtype).removeprefix("torch.")),
        )
        spec = replace(spec, revision=options.revision or _revision(model))
        self._backoff = backoff_tokens(spec.recurrent)
        self.layout = build_layout(spec, replace(options.settings, null_block=NULL_BLOCK))
        seed = secrets.randbits(32)
        self._pools = {
            region.group: BlockPool(
                region, options.capacity_tokens, options.capacity_requests, seed
            )
            for region in self.layout.ranks[0].regions
            if not region.constant
        }
        self._memories: list[RankMemory] = []
        self._agents: list[RankAgent] = []
        self._incarnation = uuid.uuid4().hex
        self._session = BlockingSession(
            options.engine_id, self._incarnation, announce(self.layout), options.broker
        )
        self._stack = ExitStack()

    def __enter__(self) -> Self:
        """Register, allocate every rank's memory and start its agent."""
        with ExitStack() as stack:
            options = self._options
            stack.enter_context(self._session)
            counts = {group: pool.count for group, pool in self._pools.items()}
            for index, rank in enumerate(self.layout.ranks):
                memory = RankMemory(rank, counts)
                stack.callback(memory.close)
                self._memories.append(memory)
                identity = RankIdentity(
                    options.broker, options.engine_id, self._incarnation, rank.rank
                )
                agent = serve_rank(identity, memory.regions, options.homes[index])
                stack.callback(agent.close)
                self._agents.append(agent)
            lay_out_weights(conv_weights(self._model), self.pages)
            for agent in self._agents:
                agent.start()
            self._stack = stack.pop_all()
        return self

    def __exit__(self, *_: object) -> None:
        """Stop the agents, give the memory back, unregister."""
        self._stack.close()

    def prefill(
        self,
        handoff_id: str,
        token_ids: Sequence[int],
        *,
        position: int | None = None,
        alter: Callable[[State], State] = lambda state: state,
    ) -> Future[HandoffEnded]:
        """Compute the state of a prompt, lay it out on all ranks, publish and fence it.

        The future ends when the pages are free again and taken back. ``position`` and ``alter`` are
        for tests that break the rules. Raises `RequestError` as `ask` does.
        """
        stop = self._position(token_ids) if position is None else position
        state = alter(self.state_at(token_ids, stop))
        blocks = take_from_each(self._pools, stop)
        lay_out(state, self.pages, blocks)
        end = self._session.publish(handoff_id, blocks, stop, content=content_of(token_ids, stop))
        for agent in self._agents:
            agent.fence(handoff_id)
        end.add_done_callback(lambda _: self._give_back(blocks))
        return end

    def ask(self, handoff_id: str, token_ids: Sequence[int], *, named: bool = True) -> Asked:
        """Ask for the state of a prompt; may be called before P has begun.

        Not ``named``: whatever state P publishes is taken, for tests that break the rules. Raises
        `RequestError` for a prompt that is not handed over.
        """
        stop = self._position(token_ids) if named else 0
        blocks = take_from_each(self._pools, len(token_ids))
        content = content_of(token_ids, stop) if named else b""
        asked = self._session.request(handoff_id, blocks, position_tokens=stop, content=content)
        return Asked(handoff_id, tuple(token_ids), blocks, asked)

    def decode(self, asked: Asked, steps: int, timeout_s: float = 60.0) -> Decoded:
        """Wait for the state, then decode greedily from it.

        Raises `HandoffFailedError` for a handoff that is not DONE, the broker's refusal, and
        TimeoutError.
        """
        try:
            ended = asked.end.result(timeout_s)
            if not ended.done:
                raise HandoffFailedError(ended)
            held = self._position(asked.token_ids)
            state = collect(self.layout, self.pages, asked.blocks, held)
        except TimeoutError:
            self._session.cancel(asked.handoff_id)
            raise
        finally:
            self._give_back_when_free(asked)
        computed = {name: values.to(self._model.dtype) for name, values in state.items()}
        cache = import_state(computed, held, self._model.config)
        return self._continue(cache, asked.token_ids, steps)

    def forget(self, asked: Asked) -> None:
        """Give up what was asked for; its blocks are free when nobody may be writing to them."""
        self._session.cancel(asked.handoff_id)
        self._give_back_when_free(asked)

    def decode_alone(
        self, token_ids: Sequence[int], steps: int, prefilled_as: StoredTypes | None = None
    ) -> Decoded:
        """Decode from this engine's own state, which never left it: the reference for handoffs.

        ``prefilled_as``: the types in which a P would have stored the state before this engine
        stores it in its own.
        """
        held = position_tokens(len(token_ids), self._backoff)
        first = self._options.stored if prefilled_as is None else prefilled_as
        cache, _ = self._prefilled(token_ids[:held], first)
        round_cache(cache, self._model.config, self._options.stored)
        return self._continue(cache, token_ids, steps)

    def state_at(self, token_ids: Sequence[int], position: int) -> State:
        """Return the state after the first ``position`` tokens, as it is stored.

        It includes the inputs of mixers, where the engine keeps them.
        """
        cache, inputs = self._prefilled(token_ids[:position], self._options.stored)
        return export_state(cache, self._model.config) | inputs

    def _position(self, token_ids: Sequence[int]) -> int:
        """Return the position of a handed-over state."""
        position = position_tokens(len(token_ids), self._backoff)
        if not position:
            raise RequestError(
                f"a prompt of {len(token_ids)} tokens is not handed over: D computes it"
            )
        return position

    def _prefilled(
        self, token_ids: Sequence[int], stored: StoredTypes
    ) -> tuple[DynamicCache, dict[str, Tensor]]:
        """Return the cache as it is stored, and the inputs that the engine keeps."""
        if not self._options.settings.mixer_inputs:
            return prefill(self._model, token_ids, stored), {}
        with kept_inputs(self._model) as inputs:
            return prefill(self._model, token_ids, stored), inputs

    def _continue(self, cache: DynamicCache, token_ids: Sequence[int], steps: int) -> Decoded:
        stored = self._options.stored
        return decode_greedily(self._model, cache, token_ids[-1], steps, stored)

    @property
    def pages(self) -> list[RankTensors]:
        """The memory of every rank."""
        return [memory.pages for memory in self._memories]

    @property
    def lost_ranks(self) -> list[int]:
        """Ranks whose worker process has ended."""
        return [
            rank
            for rank, agent in enumerate(self._agents)
            if isinstance(agent, WorkerAgent) and agent.lost
        ]

    def _give_back_when_free(self, asked: Asked) -> None:
        def freed(pages_free: Future[None]) -> None:
            if pages_free.exception() is None:
                self._give_back(asked.blocks)

        asked.end.pages_free.add_done_callback(freed)

    def _give_back(self, blocks: Mapping[str, list[int]]) -> None:
        for group, ids in blocks.items():
            self._pools[group].give_back(ids)


def _revision(model: NemotronHForCausalLM) -> str:
    """Return the revision of the folder that the model was loaded from; "" if there is none."""
    name = model.name_or_path
    return checkpoint_revision(Path(name)) if name and Path(name).is_dir() else ""
