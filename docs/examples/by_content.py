"""A state that is asked for by its content: nobody is told who has it, or by which name.

    restow serve &
    python docs/examples/by_content.py hold --tp 4 &
    python docs/examples/by_content.py ask --tp 2

The engines are those of engine.py. One has computed a prompt, keeps its state and says so; the
other, of another layout, has a prompt that begins alike, and computes only what is new.
"""

import argparse
import json
import signal
import sys
import time
import uuid
from contextlib import ExitStack, suppress
from pathlib import Path

import numpy as np

from restow.broker.client import Offer, Prefix, chain_of

HERE = Path(__file__).parent
sys.path.append(str(HERE))
from engine import HEADS, Engine, step  # noqa: E402


class Holder(Engine):
    """Keeps the state of one prompt, and gives it to whoever asks."""

    def __init__(self, tp: int, broker: str | None) -> None:
        """Prepare an engine that answers offers."""
        super().__init__("holder", tp, broker, on_offer=self.answer)
        self.held: Prefix | None = None

    def hold(self, prompt: list[int]) -> None:
        """Compute the prompt up to its last hash, and say that the state after it is here."""
        chain = chain_of(prompt)  # a hash after every 16 tokens
        self.held = chain.prefix(len(chain.hashes) * 16)
        h = np.zeros(HEADS)
        for token in prompt[: self.held.position_tokens]:
            h = step(h, token)
        for memory, part in zip(self.memory, np.split(h, len(self.memory)), strict=True):
            memory[1] = part
        self.session.hold(chain.form, "state", chain.hashes[-1:])  # of attention, every block

    def answer(self, offer: Offer) -> None:
        """Publish the state that an offer asks for.

        The block stays as it is until the publication's future is done.
        """
        id_, at = offer.handoff_id, offer.prefix.position_tokens
        if offer.prefix != self.held:  # an engine may have evicted it meanwhile
            self.session.decline_offer(id_, "it is not here any more")
            return
        self.session.publish(id_, {"state": [1]}, at, content=offer.content)
        for agent in self.agents:
            agent.fence(id_)


def ask(engine: Engine, prompt: list[int], within_s: float, steps: int) -> list[int]:
    """Take what another engine holds of a prompt, compute the rest, and go on."""
    chain, late_s = chain_of(prompt), time.monotonic() + within_s
    while not (found := engine.session.find([chain]).result()[0]) and time.monotonic() < late_s:
        time.sleep(0.1)  # the holder may just be starting
    h, held = np.zeros(HEADS), 0
    if found:
        prefix = chain.prefix(found[0].tokens)
        ended = engine.session.request(uuid.uuid4().hex, {"state": [2]}, prefix=prefix).result()
        if ended.done:  # NOT_HELD, at once, where it is gone since: then all is computed
            held, h = prefix.position_tokens, np.concatenate([one[2] for one in engine.memory])
        print(f"{held} of {len(prompt)} tokens from {found[0].engine_id}: {ended.state}")
    for token in prompt[held:]:
        h = step(h, token)
    tokens: list[int] = []
    for _ in range(steps):
        tokens.append(int(h.sum()) % 1000)
        h = step(h, tokens[-1])
    return tokens


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("side", choices=["hold", "ask"])
    parser.add_argument("--tp", type=int, default=1)
    parser.add_argument("--broker", help="HOST:PORT, else RESTOW_BROKER.")
    parser.add_argument("--prompt", type=Path, default=HERE / "prompt.json", help="Token ids.")
    parser.add_argument("--within-s", type=float, default=20.0, help="So long ask for a holder.")
    options = parser.parse_args()
    prompt = json.loads(options.prompt.read_text())
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    with ExitStack() as stack:
        engine: Engine
        if options.side == "hold":
            engine = Holder(options.tp, options.broker)
        else:
            engine = Engine("asker", options.tp, options.broker)
        for part in (engine.session, *engine.agents):
            stack.enter_context(part)
        if isinstance(engine, Holder):
            engine.hold(prompt)
            with suppress(KeyboardInterrupt):
                signal.pause()
        else:
            print(ask(engine, prompt, options.within_s, steps=8))
