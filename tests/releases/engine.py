"""An engine of the release that stands first on PYTHONPATH; a test drives it by its input.

    python engine.py SIDE NAME TP BROKERS

A line of its input is a handoff to take part in, and its end drains the engine. For each handoff
that ends it prints a line: the id, the state and the reason. It uses only what releases promise to
engines.
"""

from __future__ import annotations

import queue
import sys
import uuid
import zlib
from concurrent.futures import Future
from contextlib import ExitStack
from typing import Any

import numpy as np

from restow.agents import Agent, RegionMemory
from restow.broker.client import BlockingSession, content_of
from restow.broker.families import (
    AttentionSpec,
    ConvLayout,
    EngineSettings,
    Mamba2Spec,
    ModelSpec,
    build_layout,
)
from restow.broker.layout import DType, Kind, Layout, RankLayout

SAYS = "engine: "
POSITION, PAGE_TOKENS, STATES = 40, 16, 12
PAGES = -(-POSITION // PAGE_TOKENS)
NUMBERS = {2: np.uint16, 4: np.uint32}


def layout_of(side: str, tp: int) -> Layout:
    """Return the layout of a small hybrid; P and D differ in the order of conv states."""
    mamba = Mamba2Spec(
        layer=0,
        heads=8,
        head_dim=16,
        state=16,
        groups=2,
        conv_kernel=4,
        conv_dtype=DType.BFLOAT16,
        ssm_dtype=DType.FLOAT32,
    )
    attention = AttentionSpec(layer=1, kv_heads=4, head_dim=16, dtype=DType.BFLOAT16)
    spec = ModelSpec("hybrid", (mamba, attention), revision="1")
    conv = ConvLayout.DS if side == "p" else ConvLayout.SD
    return build_layout(spec, EngineSettings(tp=tp, page_tokens=PAGE_TOKENS, conv_layout=conv))


class Rank:
    """A rank's memory."""

    def __init__(self, layout: Layout, rank: RankLayout, counts: dict[str, int]) -> None:
        self._shapes = {field.name: field.shape for field in layout.model.fields}
        self._kinds = {field.name: field.kind for field in layout.model.fields}
        self._rank = rank
        self.memory = {
            region.name: np.zeros((counts[region.group], region.page_stride_bytes), np.uint8)
            for region in rank.regions
        }
        self.regions = [
            RegionMemory(name, of.ctypes.data, len(of), of.strides[0])
            for name, of in self.memory.items()
        ]

    def elements(self, seed: str, blocks: dict[str, list[int]]) -> list[tuple[Any, Any]]:
        """Return the elements of a state in their places, each with what it should be."""
        found = []
        for shard in self._rank.shards:
            region = self._rank.region(shard.region)
            number = NUMBERS[shard.dtype.itemsize_bytes]
            box = tuple(slice(span.start, span.stop) for span in shard.box)
            sizes = tuple(span.stop - span.start for span in shard.box)
            tokens = POSITION if self._kinds[shard.field] == Kind.PER_TOKEN else 1
            for at, block in enumerate(blocks[region.group]):
                first = at * PAGE_TOKENS if region.page_tokens else 0
                count = min(region.page_tokens or 1, tokens - first)
                places = np.ndarray(
                    (count, *sizes),
                    number,
                    self.memory[shard.region][block].data,
                    shard.offset_bytes,
                    (shard.token_stride_bytes or 0, *shard.strides_bytes),
                )
                rng = np.random.default_rng(zlib.crc32(f"{seed} {shard.field} {at}".encode()))
                whole = rng.integers(1, 1 << 16, (PAGE_TOKENS, *self._shapes[shard.field]))
                found.append((places, whole[(slice(count), *box)].astype(number)))
        return found


class Engine:
    """An engine whose states name the handoff that they belong to."""

    def __init__(self, side: str, name: str, tp: int, brokers: str) -> None:
        self.side = side
        layout, life = layout_of(side, tp), uuid.uuid4().hex
        groups = {region.group: region.page_tokens for region in layout.ranks[0].regions}
        counts = {group: STATES * (PAGES if tokens else 1) for group, tokens in groups.items()}
        self.ranks = [Rank(layout, rank, counts) for rank in layout.ranks]
        self.session = BlockingSession(name, life, layout, brokers, block_counts=counts)
        self.agents = [
            Agent(brokers, name, life, rank, one.regions) for rank, one in enumerate(self.ranks)
        ]
        self._free: queue.SimpleQueue[dict[str, list[int]]] = queue.SimpleQueue()
        for state in range(STATES):
            pages = list(range(state * PAGES, (state + 1) * PAGES))
            self._free.put({group: pages if of else [state] for group, of in groups.items()})

    def take_part(self, handoff_id: str) -> None:
        """Publish a state or ask for it, and say how that ends."""
        blocks = self._free.get()
        named: dict[str, Any] = {
            "position_tokens": POSITION,
            "content": content_of([7] * POSITION, POSITION),
        }
        if self.side == "p":
            for places, right in self._elements(handoff_id, blocks):
                places[...] = right
            ended = self.session.publish(handoff_id, blocks, **named)
            for agent in self.agents:
                agent.fence(handoff_id)
            ended.add_done_callback(lambda end: self._say(handoff_id, end, blocks))
        else:
            asked = self.session.request(handoff_id, blocks, **named)
            asked.pages_free.add_done_callback(lambda _: self._say(handoff_id, asked, blocks))

    def _say(self, handoff_id: str, end: Future[Any], blocks: dict[str, list[int]]) -> None:
        told = end.result()
        state, reason = told.state, f"{told.reason} {told.detail}"
        if self.side == "d" and told.done:
            elements = self._elements(handoff_id, blocks)
            if not all((places == right).all() for places, right in elements):
                state, reason = "WRONG", "other bytes than P's"
        self._free.put(blocks)
        say(f"{handoff_id} {state} {reason}")

    def _elements(self, handoff_id: str, blocks: dict[str, list[int]]) -> list[tuple[Any, Any]]:
        return [one for rank in self.ranks for one in rank.elements(handoff_id, blocks)]


def say(words: str) -> None:
    """Print a line for the test, which other libraries do not print."""
    sys.stdout.write(f"{SAYS}{words}\n")
    sys.stdout.flush()


if __name__ == "__main__":
    side, name, tp, brokers = sys.argv[1:]
    engine = Engine(side, name, int(tp), brokers)
    with ExitStack() as stack:
        engine.session.start(60.0)
        stack.callback(engine.session.close)
        for agent in engine.agents:
            try:
                agent.start(60.0)
            except Exception as error:
                say(f"refused {getattr(error, 'reason', error)} {error}")
                raise
            stack.callback(agent.close)
        say("ready")
        for line in sys.stdin:
            engine.take_part(line.strip())
        engine.session.drain(60.0)
