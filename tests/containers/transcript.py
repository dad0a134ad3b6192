"""What an operator sees who looks for the cause of one failed request: P's container was killed.

`./run containers --transcript` has the images made, and prints it: docs/operators.md shows one.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys

from containers.compose import SERVICES, Compose, docker, until
from restow.demo.experiment import SEED
from restow.demo.recall.task import make_prompts

TERMINAL = {"COLUMNS": "110", "LINES": "40", "FORCE_COLOR": "1", "TERM": "dumb"}
"""It has no styles."""
CURL = ("curl", "-s", "-w", "\n%{http_code}", "-H", "Content-Type: application/json")


def answer_of_router(prompt: str) -> tuple[int, str]:
    """Return the status and the body that a client gets."""
    port = os.environ.get("RESTOW_ROUTER_PORT", "8000")
    url = f"http://127.0.0.1:{port}/v1/completions"
    words = [*CURL, url, "-d", json.dumps({"prompt": prompt})]
    done = subprocess.run(words, capture_output=True, text=True, check=True)
    body, _, code = done.stdout.rpartition("\n")
    return int(code), body.strip()


def failed_request(house: Compose) -> tuple[str, str]:
    """Kill P before D asks for P's state; return the handoff, and what a client hears."""
    prompts = [one.text for one in make_prompts(4, SEED)]
    for prompt in prompts[1:]:
        code, body = answer_of_router(prompt)
        if code != 200:
            raise RuntimeError(f"nothing is wrong yet, and a request failed: {body}")
    name = "request-4711"
    params: dict[str, object] = {"do_remote_decode": True, "handoff_id": name}
    house.ask("p0", prompt=prompts[0], kv_transfer_params=params)
    docker("kill", house.id_of("p0"))
    params = {"do_remote_prefill": True, "handoff_id": name}
    code, answer = house.ask("d0", prompt=prompts[0], kv_transfer_params=params)
    if code != 503:
        raise RuntimeError(f"D answered {code}: {answer}")
    return name, json.dumps(answer)


def show(house: Compose, *words: str) -> str:
    """Return an operator's command, and what it printed."""
    broker = house.id_of("broker")
    terminal = [f"-e{name}={value}" for name, value in TERMINAL.items()]
    printed = docker("exec", *terminal, broker, *words)
    lines = [line.rstrip() for line in printed.strip("\n").splitlines()]
    return "\n".join((f"$ docker compose exec broker {' '.join(words)}", *lines))


def main() -> None:
    """Print the transcript."""
    house = Compose.of(os.environ["RESTOW_COMPOSE"], f"restow-transcript-{os.getpid()}")
    try:
        house.do("up", "-d", "--no-build", *SERVICES)
        until(lambda: house.healthy, 180, "all containers are healthy")
        name, answer = failed_request(house)
        parts = [
            f"HTTP 503 {answer}",
            show(house, "restow", "handoffs"),
            show(house, "restow", "handoff", name),
            show(house, "restow", "engines"),
        ]
        sys.stdout.write("\n\n".join(parts) + "\n")
    finally:
        house.do("down", "-v", "--remove-orphans", "-t", "5", check=False)


if __name__ == "__main__":
    main()
