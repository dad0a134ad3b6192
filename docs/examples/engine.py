"""An engine that is not vLLM, in under a hundred lines: all that it takes to hand a state over.

    restow serve &
    python docs/examples/engine.py prefill --tp 4 --handoff-id one &
    python docs/examples/engine.py decode --tp 2 --handoff-id one

Its model is a toy with recurrent state: every head keeps one number, h <- 31 h + token, and the
next token is drawn from all of them. P keeps the heads on four ranks and D on two, so each rank of
D reads from two ranks of P. Needs `restow[agent]`.
"""

import argparse
import uuid
from contextlib import ExitStack
from typing import Any

import numpy as np

from restow.agents import Agent, RegionMemory
from restow.broker.client import BlockingSession, content_of
from restow.broker.layout import DType, Field, Kind, Layout, Model, RankLayout, Region, Shard, Span

HEADS, BLOCKS, ITEM_BYTES = 8, 16, 4
MODEL = Model("toy", (Field("h", Kind.SNAPSHOT, ("head",), (HEADS,)),), revision="1")


def step(h: np.ndarray, token: int) -> np.ndarray:
    """Return the model's state after one more token."""
    return (31 * h + token * np.arange(1, HEADS + 1)) % 65_521


def rank_layout(rank: int, own: int) -> RankLayout:
    """Return which heads a rank holds, and where in a block of its memory."""
    region = Region("state", "state", own * ITEM_BYTES, None)
    heads = (Span(rank * own, (rank + 1) * own),)
    shard = Shard("h", heads, DType.FLOAT32, "state", 0, (ITEM_BYTES,))
    return RankLayout(rank, (region,), (shard,))


def named(prompt: list[int]) -> dict[str, Any]:
    """Return what both sides say of the state, so that the broker can compare them."""
    position = len(prompt) - 1
    return {"position_tokens": position, "content": content_of(prompt, position)}


class Engine:
    """One engine with its session, and for every rank its memory and its agent."""

    def __init__(self, name: str, tp: int, broker: str | None, **more: Any) -> None:
        """Allocate memory; the session and the agents are started later."""
        life = uuid.uuid4().hex
        layout = Layout(MODEL, tuple(rank_layout(rank, HEADS // tp) for rank in range(tp)))
        blocks = {"state": BLOCKS}
        self.session = BlockingSession(name, life, layout, broker, block_counts=blocks, **more)
        self.memory = [np.zeros((BLOCKS, HEADS // tp), np.float32) for _ in range(tp)]
        regions = [RegionMemory("state", m.ctypes.data, BLOCKS, m.strides[0]) for m in self.memory]
        self.agents = [Agent(broker, name, life, i, [one]) for i, one in enumerate(regions)]

    def prefill(self, handoff_id: str, prompt: list[int]) -> None:
        """Compute all tokens but the last, and keep the state until D has it."""
        h = np.zeros(HEADS)
        for token in prompt[:-1]:  # D takes the last one: a recurrence must not see it twice
            h = step(h, token)
        for memory, part in zip(self.memory, np.split(h, len(self.memory)), strict=True):
            memory[1] = part
        end = self.session.publish(handoff_id, {"state": [1]}, **named(prompt))
        for agent in self.agents:
            agent.fence(handoff_id)  # what was published is in memory
        print(end.result())

    def decode(self, handoff_id: str, prompt: list[int], steps: int) -> list[int]:
        """Take the state from P, and go on from it."""
        ended = self.session.request(handoff_id, {"state": [2]}, **named(prompt)).result()
        if not ended.done:  # nothing of the state may be used, nor the block before `pages_free`
            raise SystemExit(f"{handoff_id} {ended.state}: {ended.reason}: {ended.detail}")
        h, tokens = np.concatenate([memory[2] for memory in self.memory]), [prompt[-1]]
        for _ in range(steps):
            h = step(h, tokens[-1])
            tokens.append(int(h.sum()) % 1000)
        return tokens[1:]


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("side", choices=["prefill", "decode"])
    parser.add_argument("--tp", type=int, default=1)
    parser.add_argument("--broker", help="HOST:PORT, else RESTOW_BROKER.")
    parser.add_argument("--handoff-id", default="one")
    parser.add_argument("--prompt", type=int, nargs="+", default=[3, 1, 4, 1, 5, 9, 2, 6])
    options = parser.parse_args()
    engine = Engine(options.side, options.tp, options.broker)
    with ExitStack() as stack:
        for part in (engine.session, *engine.agents):
            stack.enter_context(part)
        if options.side == "prefill":
            engine.prefill(options.handoff_id, options.prompt)
        else:
            print(engine.decode(options.handoff_id, options.prompt, steps=8))
