"""An agent's loop: each prompt is the one before it, the reply, and what a tool answered.

    restow store --engine p0 --memory 1GiB &
    python docs/examples/agent_loop.py --engines http://localhost:8100 http://localhost:8200

Engines and the store keep states where marks stand: behind the system prompt, behind the tools, and
where two forks go on from one state at the end. The store pins what all prompts begin with. Each
line says how many tokens of its prompt the engines have computed; the rest was found somewhere.

Needs engines with `find+tell` behind `restow router`, P first. What the tool answers is made up.
"""

import argparse
import json
import re
import time
import uuid
from concurrent.futures import ThreadPoolExecutor
from typing import Any
from urllib.request import Request, urlopen

from restow.broker.client import AdminClient, CommandStatus, Outcome, Prefix, Verb, chain_of

SYSTEM = "You plan journeys.\n" + "".join(
    f"Rule {n}: what you say about place {n} must come from a tool.\n" for n in range(30)
)
TOOLS = "".join(
    json.dumps({"name": name, "description": f"Look up the {name} of a place."}) + "\n"
    for name in ("weather", "trains", "sights", "hotels", "prices", "maps", "dates", "rules")
)
TASK = "Plan a day in Utrecht.\n"


def call(url: str, **body: Any) -> str:
    """Return what a server answers."""
    data = json.dumps(body).encode() if body else None
    request = Request(url, data, {"Content-Type": "application/json"})  # noqa: S310
    with urlopen(request) as answer:  # noqa: S310
        return str(answer.read().decode())


class Agent:
    """Asks a router, and counts what its engines compute."""

    def __init__(self, router: str, engines: list[str]) -> None:
        """Ask for the model's name."""
        self.router, self.engines = router, engines
        self.model = json.loads(call(f"{router}/v1/models"))["data"][0]["id"]

    def tokens(self, text: str) -> list[int]:
        """Return the tokens of a part of a prompt."""
        asked = {"model": self.model, "prompt": text, "add_special_tokens": False}
        return list(json.loads(call(f"{self.engines[0]}/tokenize", **asked))["tokens"])

    def reply(self, prompt: list[int], marks: list[int], url: str = "", tokens: int = 24) -> Any:
        """Return the reply to a prompt with marks."""
        asked = {"model": self.model, "prompt": prompt, "max_tokens": tokens}
        more = {"return_token_ids": True, "kv_transfer_params": {"marks": marks}}
        return json.loads(call(f"{url or self.router}/v1/completions", **asked, **more))

    def computed_tokens(self) -> int:
        """Return how many tokens of prompts the engines have computed since their start."""
        pages = "".join(call(f"{url}/metrics") for url in self.engines)
        counts = re.findall(r'prompt_tokens_by_source_total{.*"local_compute".*} (\S+)', pages)
        return sum(int(float(count)) for count in counts)


def pin(admin: AdminClient, state: Prefix, store: str) -> CommandStatus:
    """Pin a state at a store for an hour, as soon as an engine has told that it is there."""
    for _ in range(100):
        pinned = admin.command(uuid.uuid4().hex, Verb.PIN, state, store, for_s=3600, wait_s=30)
        if pinned.outcome is not Outcome.MISSING:
            break
        time.sleep(0.1)
    return pinned


def work(agent: Agent, prompt: list[int], marks: list[int], turns: int) -> None:
    """Call a tool in each turn; then go on in two ways at once."""
    for turn in range(1, turns + 1):
        before = agent.computed_tokens()
        called = agent.reply(prompt, [*marks, len(prompt)])["choices"][0]
        computed = agent.computed_tokens() - before
        print(f"turn {turn}: {computed} of {len(prompt)} tokens computed")
        result = f"\nThe tool was told {len(called['text'])} characters, and found {turn}.\n"
        prompt = [*prompt, *called["token_ids"], *agent.tokens(result)]
    agent.reply(prompt, [*marks, len(prompt)], tokens=1)  # the state where the forks part
    before, forks = agent.computed_tokens(), ["By train.\n", "On foot.\n"]
    prompts = [[*prompt, *agent.tokens(fork)] for fork in forks]
    with ThreadPoolExecutor() as pool:
        list(pool.map(agent.reply, prompts, [marks] * len(forks)))
    computed, asked = agent.computed_tokens() - before, sum(map(len, prompts))
    print(f"{len(forks)} forks: {computed} of {asked} tokens computed")


def main(agent: Agent, broker: str | None, store: str, turns: int) -> None:
    """Pin what all prompts begin with, and work."""
    system, tools = agent.tokens(SYSTEM), agent.tokens(TOOLS)
    begin, marks = [*system, *tools], [len(system), len(system) + len(tools)]
    # P itself answers where it keeps states: at the ends of the last blocks before the marks.
    kept = agent.reply(begin, marks, agent.engines[0], tokens=1)["kv_transfer_params"]["marks"]
    print(f"states are kept after {kept} of {len(begin)} tokens")
    state = chain_of(begin).prefix(kept[-1])
    with AdminClient(broker) as admin:
        print(f"pin: {pin(admin, state, store).outcome}")
        try:
            work(agent, [*begin, *agent.tokens(TASK)], marks, turns)
        finally:
            ended = admin.command(uuid.uuid4().hex, Verb.RELEASE, state, store, wait_s=30)
            print(f"release: {ended.outcome}")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--router", default="http://localhost:8000")
    parser.add_argument("--engines", nargs="+", default=["http://localhost:8100"])
    parser.add_argument("--store", default="store", help="The store's id at the broker.")
    parser.add_argument("--broker", help="HOST:PORT, else RESTOW_BROKER.")
    parser.add_argument("--turns", type=int, default=6)
    options = parser.parse_args()
    agent = Agent(options.router, options.engines)
    main(agent, options.broker, options.store, options.turns)
