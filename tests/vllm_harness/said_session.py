"""A session whose broker is a die: it keeps what was said, and answers when the history says so."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Iterable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import Any

from restow.broker.client import (
    BlockingDelivery,
    BrokerCallError,
    HandoffEnded,
    HashForm,
    Prefix,
    PrefixChain,
    PrefixHolder,
)


@dataclass(eq=False)
class Load:
    """A state that was asked for."""

    handoff_id: str
    blocks: dict[str, list[int]]
    held_tokens: int
    prefix: Prefix
    delivery: BlockingDelivery
    fails: bool
    write_mark: int
    given_up: bool = False

    @property
    def failed(self) -> bool:
        """Return whether the load failed or was given up."""
        return self.fails or self.given_up


@dataclass(frozen=True)
class Said:
    """A publication."""

    blocks: dict[str, list[int]]
    position_tokens: int
    content: bytes
    end: Future[HandoffEnded]


@dataclass
class SaidSession:
    """Stands where a `BlockingSession` does."""

    draw: random.Random
    is_open = True
    told: set[tuple[str, bytes]] = field(default_factory=set)
    published: dict[str, Said] = field(default_factory=dict)
    loads: list[Load] = field(default_factory=list)
    questions: list[tuple[PrefixChain, Future[Any]]] = field(default_factory=list)
    seen: Counter[str] = field(default_factory=Counter)
    offers: int = 0

    def find(
        self, chains: Sequence[PrefixChain], *, limit: int = 8, timeout_s: float = 1.0
    ) -> Future[Any]:
        answer: Future[Any] = Future()
        self.questions.append((chains[0], answer))
        if self.draw.random() < 0.5:
            self.answer_some()
        return answer

    def answer_some(self) -> None:
        """Answer some questions; the others stay without an answer."""
        for chain, answer in self.questions:
            dice = self.draw.random()
            if dice < 0.1 or not answer.set_running_or_notify_cancel():
                self.seen["not answered"] += 1
            elif dice < 0.2:
                answer.set_exception(BrokerCallError("UNAVAILABLE", "X", "gone"))
            else:
                quanta = self.draw.randrange(len(chain.hashes) + 1)
                tokens = quanta * chain.form.quantum_tokens
                if chain.ends and self.draw.random() < 0.5:
                    tokens = self.draw.choice(chain.ends)[0]
                    self.seen["ends found"] += 1
                found = [PrefixHolder("other", tokens, "", 0, False)] if tokens else []
                mine = PrefixHolder("e0", len(chain.hashes) * 16, "", 0, False)
                answer.set_result([[mine, *found]])
                self.seen["found"] += bool(tokens)
        self.questions.clear()

    def request(
        self,
        handoff_id: str,
        blocks: dict[str, list[int]],
        *,
        held_tokens: int,
        prefix: Prefix,
        write_mark: int,
        **_: Any,
    ) -> BlockingDelivery:
        load: Load
        delivery = BlockingDelivery(lambda: setattr(load, "given_up", True))
        fails = self.draw.random() < 0.3
        load = Load(handoff_id, dict(blocks), held_tokens, prefix, delivery, fails, write_mark)
        self.loads.append(load)
        self.seen["loads"] += 1
        return delivery

    def due(self, reached: int) -> list[Load]:
        """Return some of the loads up to the write mark that is reached, whose end comes now."""
        return [one for one in self.loads if one.write_mark <= reached and self.draw.random() < 0.4]

    def end_load(self, load: Load) -> None:
        self.loads.remove(load)
        state, reason = ("CANCELLED", "NOT_HELD") if load.failed else ("DONE", "")
        self.seen["loads failed" if load.failed else "loads done"] += 1
        load.delivery.set_result(HandoffEnded(load.handoff_id, state, reason, "", 1, 1))
        load.delivery.pages_free.set_result(None)

    def next_offer(self) -> str:
        self.offers += 1
        return f"offer {self.offers}"

    def publish(
        self,
        handoff_id: str,
        blocks: dict[str, list[int]],
        position_tokens: int,
        *,
        content: bytes = b"",
        **_: Any,
    ) -> Future[HandoffEnded]:
        end: Future[HandoffEnded] = Future()
        self.published[handoff_id] = Said(dict(blocks), position_tokens, content, end)
        self.seen["published"] += 1
        return end

    def decline_offer(self, handoff_id: str, detail: str = "") -> None:
        self.seen["declined"] += 1

    def end_publication(self, handoff_id: str) -> None:
        said = self.published.pop(handoff_id)
        said.end.set_result(HandoffEnded(handoff_id, "DONE", "", "", 1, 1))

    def keep(self, prefix: Prefix) -> None:
        name = prefix.end_hash or prefix.hashes[-1]
        assert any(name == one for _, one in self.told), "it is not held"
        self.seen["kept"] += 1

    def hold(
        self, form: HashForm, group: str, hashes: Iterable[bytes], *, parent: bytes = b""
    ) -> None:
        self.told |= {(group, one) for one in hashes}

    def evict(self, form: HashForm, group: str, hashes: Iterable[bytes]) -> None:
        self.told -= {(group, one) for one in hashes}
