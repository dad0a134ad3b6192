"""A scheduler's side, its requests, and a session that writes down what the side says."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import Any

from restow.agents.engines.common.blocks import Group
from restow.agents.engines.common.prefill_decode import Scheduled
from restow.agents.engines.common.registration import ConnectorSettings
from restow.agents.engines.vllm.scheduler.scheduler_side import SchedulerSide
from restow.broker.client import (
    BlockingDelivery,
    BlockingSession,
    HandoffEnded,
    HashForm,
    Prefix,
    PrefixChain,
)
from restow.broker.client.engine.chains import Holders
from restow.broker.state_commands import Answer

GROUPS = (Group("group.0", 4), Group("group.1", 4, 0))
PROMPT = list(range(10))
BLOCKS = ([1, 2, 3], [0, 0, 5])
PUBLISHED = ("publish", "h", {"group.0": [1, 2, 3], "group.1": [5]}, 9, True)
"""What P says of a computed prompt."""


@dataclass
class Request:
    """What of a vLLM request is looked at."""

    prompt_token_ids: list[int] | None
    kv_transfer_params: dict[str, Any] | None
    request_id: str = "r"
    num_computed_tokens: int = 0
    max_tokens: int = 16
    prompt_embeds: Any = None
    mm_features: list[Any] = field(default_factory=list)
    lora_request: Any = None
    cache_salt: str | None = None
    trace_headers: dict[str, str] | None = None
    block_hashes: Sequence[bytes] = field(default_factory=list)
    resumable: bool = False
    sampling_params: Any = None
    skip: bool = False
    _all_token_ids: list[int] = field(default_factory=list)
    num_prompt_tokens: int = 0
    client_index: int = 0
    output_token_ids: Sequence[int] = field(default_factory=list)
    kv_hints: Any = None
    shared_prefix_boundary: int = 0

    def record_event(self, event_type: Any) -> None:
        """Ignore the event: nobody counts."""

    def take_events(self) -> None:
        """Return nothing: no event was noted."""

    def take_prefill_stats(self) -> None:
        """Return nothing: no statistics were noted."""

    def update_block_hashes(self) -> None:
        """Do nothing: there are no hashes."""

    def __post_init__(self) -> None:
        known = self.prompt_token_ids if self.prompt_embeds is None else self.prompt_embeds
        assert known is not None
        self.num_prompt_tokens = len(known)
        self._all_token_ids = list(self.prompt_token_ids or [0] * len(known))

    def get_skip_reading_prefix_cache(self) -> bool:
        return self.skip


@dataclass
class Session(BlockingSession):
    """Writes down what is said; ends come when the test says so."""

    is_open = True
    said: list[tuple[Any, ...]] = field(default_factory=list)
    ends: dict[str, Future[HandoffEnded]] = field(default_factory=dict)
    more: list[tuple[str, dict[str, Any]]] = field(default_factory=list)
    """The named arguments of each publication, request and decline."""
    asked: int = 0
    given_up: list[int] = field(default_factory=list)
    """The numbers of demands that were cancelled."""
    questions: list[tuple[PrefixChain, Future[Holders]]] = field(default_factory=list)
    answers: list[tuple[str, Answer]] = field(default_factory=list)
    """The answers to commands."""

    def publish(
        self, handoff_id: str, blocks: Any, position_tokens: int, **more: Any
    ) -> Future[HandoffEnded]:
        self.more.append(("publish", more))
        words = handoff_id, dict(blocks), position_tokens, more.get("final", True)
        self.said.append(("publish", *words))
        self.ends[handoff_id] = Future()
        return self.ends[handoff_id]

    def answer_command(self, command_id: str, answer: Answer) -> None:
        self.answers.append((command_id, answer))

    def take_back(self, handoff_id: str, detail: str = "") -> None:
        self.said.append(("take back", handoff_id))

    def request(self, handoff_id: str, blocks: Any, **more: Any) -> BlockingDelivery:
        self.more.append(("request", more))
        prefix, held_tokens = more["prefix"], more["held_tokens"]
        position_tokens = prefix.position_tokens if prefix else more["position_tokens"]
        self.said.append(("request", handoff_id, dict(blocks), held_tokens, position_tokens))
        return self._delivery(handoff_id)

    def find(
        self, chains: Sequence[PrefixChain], *, limit: int = 8, timeout_s: float = 1.0
    ) -> Future[Holders]:
        answer: Future[Holders] = Future()
        self.questions.append((chains[0], answer))
        return answer

    def hold(
        self,
        form: HashForm,
        group: str,
        hashes: Iterable[bytes],
        *,
        parent: bytes = b"",
        salt: str = "",
        revision: str = "",
    ) -> None:
        self.said.append(("hold", group, tuple(hashes), parent))

    def evict(
        self,
        form: HashForm,
        group: str,
        hashes: Iterable[bytes],
        *,
        salt: str = "",
        revision: str = "",
    ) -> None:
        self.said.append(("evict", group, tuple(hashes)))

    def keep(self, prefix: Prefix) -> None:
        self.said.append(("keep", prefix))

    def decline_offer(self, handoff_id: str, detail: str = "") -> None:
        self.said.append(("decline offer", handoff_id))

    def set_revision(self, revision: str) -> None:
        self.said.append(("revise", revision))

    def forget_states(self, revision: str = "") -> None:
        self.said.append(("forget", revision))

    def cancel(self, handoff_id: str, detail: str = "") -> None:
        self.said.append(("cancel", handoff_id))

    def decline(self, handoff_id: str, detail: str = "", **more: Any) -> BlockingDelivery:
        self.more.append(("decline", more))
        self.said.append(("decline", handoff_id))
        return self._delivery(handoff_id)

    def end(self, handoff_id: str, state: str = "DONE", reason: str = "") -> None:
        end = self.ends[handoff_id]
        end.set_result(HandoffEnded(handoff_id, state, reason, "", 100, 7))
        if isinstance(end, BlockingDelivery):
            end.pages_free.set_result(None)

    def take(self) -> list[tuple[Any, ...]]:
        said, self.said = self.said, []
        return said

    def given(self, name: str, *words: str) -> list[Any]:
        """Return an argument of all publications, requests and declines, or of these ``words``."""
        return [more.get(name) for word, more in self.more if not words or word in words]

    def _delivery(self, handoff_id: str) -> BlockingDelivery:
        number, self.asked = self.asked, self.asked + 1

        def cancelled() -> None:
            self.given_up.append(number)
            self.said.append(("cancel", handoff_id))

        self.ends[handoff_id] = delivery = BlockingDelivery(cancelled)
        return delivery


def side(session: Session, role: str = "kv_both", lookahead_tokens: int = 0) -> SchedulerSide:
    settings = ConnectorSettings()
    return SchedulerSide("E", "life", role, GROUPS, lookahead_tokens, session, settings)


def chunk(tokens: int, *kv: int, request_id: str = "r") -> list[Scheduled]:
    """Return a step in which a request's first ``tokens`` are computed, in further blocks."""
    return [Scheduled(request_id, tokens, {"group.0": kv, "group.1": (5,)})]


def prefill(**params: Any) -> Request:
    return Request(list(PROMPT), {"do_remote_decode": True, "handoff_id": "h", **params})


def decode(request_id: str = "r", **params: Any) -> Request:
    named = {"do_remote_prefill": True, "handoff_id": "h", **params}
    return Request(list(PROMPT), named, request_id=request_id)


def begun(request: Request, role: str = "kv_both") -> tuple[Session, SchedulerSide]:
    """Return a side to which a request has come, and its session, which has said nothing since."""
    session = Session()
    made = side(session, role)
    made.new_request(request)
    session.take()
    return session, made


def computed(
    p: SchedulerSide, request: Request, tokens: int = 9, blocks: Any = BLOCKS
) -> dict[str, Any] | None:
    """End a request whose first ``tokens`` are computed; return P's answer."""
    request.num_computed_tokens = tokens
    return p.finished(request, blocks, computed=True)
