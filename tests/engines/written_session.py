"""A scheduler's side, its requests, and a session that writes down what the side says."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import Any

from engines.test_vllm_parameters import Request
from restow.agents.engines.common.blocks import Group
from restow.agents.engines.common.registration import ConnectorSettings
from restow.agents.engines.vllm.scheduler.scheduler_side import SchedulerSide
from restow.broker.client import (
    BlockingDelivery,
    BlockingSession,
    HandoffEnded,
    Prefix,
    PrefixChain,
)
from restow.broker.client.engine.chains import Holders

GROUPS = (Group("group.0", 4), Group("group.1", 4, 0))
PROMPT = list(range(10))
BLOCKS = ([1, 2, 3], [0, 0, 5])


@dataclass
class Session(BlockingSession):
    """Writes down what is said; ends come when the test says so."""

    is_open = True
    said: list[tuple[Any, ...]] = field(default_factory=list)
    ends: dict[str, Future[HandoffEnded]] = field(default_factory=dict)
    patience_ms: list[int] = field(default_factory=list)
    traces: list[str] = field(default_factory=list)
    readers: list[int] = field(default_factory=list)
    contents: list[bytes] = field(default_factory=list)
    first_blocks: list[dict[str, int]] = field(default_factory=list)
    sampled: list[int | None] = field(default_factory=list)
    """Tokens, of publications."""
    takes: list[bool] = field(default_factory=list)
    """Of demands, whether they take one."""
    write_marks: list[int] = field(default_factory=list)
    asked: list[BlockingDelivery] = field(default_factory=list)
    given_up: list[int] = field(default_factory=list)
    """Which of those that were asked for."""
    questions: list[tuple[PrefixChain, Future[Holders]]] = field(default_factory=list)
    prefixes: list[Prefix | None] = field(default_factory=list)
    """Of those that were asked for."""

    def publish(
        self,
        handoff_id: str,
        blocks: Any,
        position_tokens: int,
        *,
        final: bool = True,
        first_blocks: Any = None,
        lease_ms: int = 0,
        hold_ms: int = 0,
        trace_parent: str = "",
        content: bytes = b"",
        readers: int = 0,
        sampled_token: int | None = None,
        revision: str = "",
    ) -> Future[HandoffEnded]:
        self.sampled.append(sampled_token)
        self.traces.append(trace_parent)
        self.readers.append(readers)
        if final:
            self.contents.append(content)
        self.first_blocks.append(dict(first_blocks or {}))
        self.said.append(("publish", handoff_id, dict(blocks), position_tokens, final))
        return self._end(handoff_id)

    def take_back(self, handoff_id: str, detail: str = "") -> None:
        self.said.append(("take back", handoff_id))

    def request(
        self,
        handoff_id: str,
        blocks: Any,
        *,
        held_tokens: int = 0,
        position_tokens: int = 0,
        timeout_ms: int = 0,
        trace_parent: str = "",
        content: bytes = b"",
        readers: int = 0,
        prefix: Prefix | None = None,
        takes_sampled_token: bool = False,
        write_mark: int = 0,
    ) -> BlockingDelivery:
        self.takes.append(takes_sampled_token)
        self.write_marks.append(write_mark)
        self.readers.append(readers)
        self.contents.append(content)
        self.prefixes.append(prefix)
        position_tokens = prefix.position_tokens if prefix else position_tokens
        self.said.append(("request", handoff_id, dict(blocks), held_tokens, position_tokens))
        self.patience_ms.append(timeout_ms)
        self.traces.append(trace_parent)
        return self._delivery(handoff_id)

    def find(
        self, chains: Sequence[PrefixChain], *, limit: int = 8, timeout_s: float = 1.0
    ) -> Future[Holders]:
        answer: Future[Holders] = Future()
        self.questions.append((chains[0], answer))
        return answer

    def set_revision(self, revision: str) -> None:
        self.said.append(("revise", revision))

    def forget_states(self, revision: str = "") -> None:
        self.said.append(("forget", revision))

    def cancel(self, handoff_id: str, detail: str = "") -> None:
        self.said.append(("cancel", handoff_id))

    def decline(self, handoff_id: str, detail: str = "", *, readers: int = 0) -> BlockingDelivery:
        self.readers.append(readers)
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

    def cancelled(self, number: int, handoff_id: str) -> None:
        self.given_up.append(number)
        self.said.append(("cancel", handoff_id))

    def _end(self, handoff_id: str) -> Future[HandoffEnded]:
        self.ends[handoff_id] = Future()
        return self.ends[handoff_id]

    def _delivery(self, handoff_id: str) -> BlockingDelivery:
        number = len(self.asked)
        delivery = BlockingDelivery(lambda: self.cancelled(number, handoff_id))
        self.asked.append(delivery)
        self.ends[handoff_id] = delivery
        return delivery


def side(session: Session, role: str = "kv_both", lookahead_tokens: int = 0) -> SchedulerSide:
    settings = ConnectorSettings()
    return SchedulerSide("E", "life", role, GROUPS, lookahead_tokens, session, settings)


def nothing() -> Iterator[tuple[str, int]]:
    return iter(())


def prefill() -> Request:
    return Request(list(PROMPT), {"do_remote_decode": True, "handoff_id": "h"})


def decode(request_id: str = "r") -> Request:
    named = {"do_remote_prefill": True, "handoff_id": "h"}
    return Request(list(PROMPT), named, request_id=request_id)
