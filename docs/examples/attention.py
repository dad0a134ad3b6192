"""Attention: a state that grows with the prompt, in pages, whose sizes differ between P and D.

    restow serve &
    python docs/examples/attention.py prefill --tp 4 --page-tokens 4 &
    python docs/examples/attention.py decode --tp 2 --page-tokens 8

Every token leaves a number per head, and the next token is drawn from all of them. The layout has
one per-token field; engine.py has the other kind, a snapshot, and both may stand in one layout.
"""

import argparse
import uuid
from contextlib import ExitStack

import numpy as np

from restow.agents import Agent, RegionMemory
from restow.broker.client import BlockingSession, content_of
from restow.broker.layout import DType, Field, Kind, Layout, Model, RankLayout, Region, Shard, Span

HEADS, BLOCKS, ITEM_BYTES = 8, 16, 4
MODEL = Model("toy-attention", (Field("kv", Kind.PER_TOKEN, ("head",), (HEADS,)),), revision="1")
PROMPT = [3, 1, 4, 1, 5, 9, 2, 6, 5, 3, 5]


def kv(tokens: list[int]) -> np.ndarray:
    """Return what tokens leave behind: ``[token, head]``."""
    return np.multiply.outer(tokens, np.arange(1, HEADS + 1)).astype(np.float32)


def rank_layout(rank: int, own: int, page_tokens: int) -> RankLayout:
    """Return which heads a rank holds, and where in a page: ``[token, head]``."""
    token_bytes = own * ITEM_BYTES
    region = Region("kv", "attention", page_tokens * token_bytes, page_tokens)
    heads = (Span(rank * own, (rank + 1) * own),)
    shard = Shard("kv", heads, DType.FLOAT32, "kv", 0, (ITEM_BYTES,), token_bytes)
    return RankLayout(rank, (region,), (shard,))


def main(side: str, tp: int, page_tokens: int, broker: str | None) -> None:
    """Hand the state of `PROMPT` over, from P or to D."""
    life, own, position = uuid.uuid4().hex, HEADS // tp, len(PROMPT) - 1
    layout = Layout(MODEL, tuple(rank_layout(rank, own, page_tokens) for rank in range(tp)))
    session = BlockingSession(side, life, layout, broker, block_counts={"attention": BLOCKS})
    memory = [np.zeros((BLOCKS, page_tokens, own), np.float32) for _ in range(tp)]
    regions = [RegionMemory("kv", m.ctypes.data, BLOCKS, m.strides[0]) for m in memory]
    agents = [Agent(broker, side, life, rank, [one]) for rank, one in enumerate(regions)]
    # As many blocks as the tokens need, in any order; every rank has its part in the same blocks.
    blocks = list(range(BLOCKS))[: -len(range(0, position, page_tokens)) - 1 : -1]
    named = {"position_tokens": position, "content": content_of(PROMPT, position)}
    with ExitStack() as stack:
        for part in (session, *agents):
            stack.enter_context(part)
        if side == "prefill":
            for token, entry in enumerate(kv(PROMPT[:-1])):
                for m, part in zip(memory, np.split(entry, tp), strict=True):
                    m[blocks[token // page_tokens], token % page_tokens] = part
            end = session.publish("attention", {"attention": blocks}, **named)
            for agent in agents:
                agent.fence("attention")
            print(end.result())
            return
        ended = session.request("attention", {"attention": blocks}, **named).result()
        if not ended.done:
            raise SystemExit(f"{ended.state}: {ended.reason}: {ended.detail}")
        heads = [m[blocks].reshape(-1, own)[:position] for m in memory]
        entries = np.concatenate([np.concatenate(heads, axis=1), kv(PROMPT[-1:])])
        print([int(np.arange(1, len(PROMPT) + 1) @ entries @ np.arange(HEADS)) % 1000])


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("side", choices=["prefill", "decode"])
    parser.add_argument("--tp", type=int, default=1)
    parser.add_argument("--page-tokens", type=int, default=4)
    parser.add_argument("--broker", help="HOST:PORT, else RESTOW_BROKER.")
    options = parser.parse_args()
    main(options.side, options.tp, options.page_tokens, options.broker)
