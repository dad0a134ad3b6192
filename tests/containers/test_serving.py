"""docker/compose.yaml, up and running: right answers, and faults that end as they should.

Needs an engine and images: `tests/containers/run.sh` has both made, and calls this.
"""

from __future__ import annotations

import itertools
import json
import os
import re
import shlex
import subprocess
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

import pytest

from restow.demo.experiment import SEED
from restow.demo.recall.task import Prompt, decode, make_prompts

ROOT = Path(__file__).resolve().parents[2]
FILE = ROOT / "docker" / "compose.yaml"
SERVICES = ("broker", "p0", "p1", "d0", "d1", "router")
ENGINES = SERVICES[1:5]
ASK = """
import json, sys, urllib.error, urllib.request as r
base, seconds, body = sys.argv[1], float(sys.argv[2]), sys.argv[3].encode()
ask = r.Request(base + "/v1/completions", body, {"Content-Type": "application/json"})
try:
    with r.urlopen(ask, timeout=seconds) as answer:
        print(json.dumps([answer.status, json.load(answer)]))
except urllib.error.HTTPError as error:
    print(json.dumps([error.code, json.loads(error.read() or b"null")]))
except OSError as error:
    print(json.dumps([0, {"error": {"message": str(error), "type": type(error).__name__}}]))
"""

T = TypeVar("T")
Answer = tuple[int, dict[str, Any]]


@dataclass(frozen=True)
class Compose:
    """One project of them. ``command`` is `docker compose` or `docker-compose`, in words."""

    command: tuple[str, ...]
    project: str
    _ids: dict[str, str] = field(default_factory=dict)

    def do(self, *words: str, check: bool = True) -> str:
        """Run a compose command."""
        return docker(*self.command[1:], *self._where(), *words, first=self.command[0], check=check)

    def _where(self) -> tuple[str, ...]:
        return ("-p", self.project, "-f", str(FILE))

    def id_of(self, service: str) -> str:
        """Return the id of a service's container, also when the container does not run."""
        if service not in self._ids:
            self._ids[service] = self.do("ps", "-q", service).split()[0]
        return self._ids[service]

    @property
    def healthy(self) -> bool:
        """Return whether every container reports that it is healthy."""
        ids = [self.id_of(service) for service in SERVICES]
        found = docker("inspect", "-f", "{{.State.Health.Status}}", *ids).split()
        return found == ["healthy"] * len(ids)

    def restow(self, *words: str) -> str:
        """Run `restow` in the broker's container, as an operator types it."""
        return docker("exec", self.id_of("broker"), "restow", *words)

    def ask(
        self, service: str, seconds: float = 60.0, inside: str = "router", **body: Any
    ) -> Answer:
        """Ask a service for a completion from the container of ``inside``; status 0: no answer."""
        port = 8000 if service == "router" else 8100
        base = f"http://{service}:{port}" if service != "router" else f"http://127.0.0.1:{port}"
        words = ("python", "-c", ASK, base, f"{seconds:g}", json.dumps(body))
        status, answer = json.loads(docker("exec", self.id_of(inside), *words))
        return status, answer

    def logs(self, folder: Path) -> None:
        """Keep what all containers wrote."""
        folder.mkdir(parents=True, exist_ok=True)
        for service in SERVICES:
            text = self.do("logs", "--no-color", "--timestamps", service, check=False)
            (folder / f"{service}.log").write_text(text)


def docker(*words: str, first: str = "docker", check: bool = True) -> str:
    """Run a command, and return its output. Raises `RuntimeError` with the end of its stderr."""
    done = subprocess.run([first, *words], capture_output=True, text=True, check=False, timeout=300)
    if check and done.returncode:
        raise RuntimeError(f"{first} {' '.join(words)[:200]}: {done.stderr[-2000:]}")
    return done.stdout + ("" if check else done.stderr)


def until(true: Callable[[], T], seconds: float, what: str) -> T:
    """Return the first true value of ``true``. Raises `AssertionError` after ``seconds``."""
    ends_s = time.monotonic() + seconds
    while True:
        found = true()
        if found:
            return found
        assert time.monotonic() < ends_s, f"not within {seconds:g} s: {what}"
        time.sleep(0.5)


pytestmark = [
    pytest.mark.skipif(
        "RESTOW_COMPOSE" not in os.environ, reason="tests/containers/run.sh runs these"
    ),
    pytest.mark.timeout(600),
]
PROMPTS = make_prompts(8, SEED)
NAMES = itertools.count()
BACK_S = 120.0
"""By then everything that was lost is back, once nothing is in its way."""


@pytest.fixture(scope="module")
def house() -> Iterator[Compose]:
    command = tuple(shlex.split(os.environ["RESTOW_COMPOSE"]))
    made = Compose(command, f"restow-serving-{os.getpid()}")
    try:
        made.do("up", "-d", "--no-build", *SERVICES)
        until(lambda: made.healthy, 180, "all containers are healthy")
        yield made
    finally:
        made.logs(Path(os.environ["RESTOW_CONTAINER_LOGS"]))
        made.do("down", "-v", "--remove-orphans", "-t", "5", check=False)


def said(answer: Answer) -> str:
    status, body = answer
    assert status == 200, body
    text: str = body["choices"][0]["text"]
    return text


def through(house: Compose, p: str, d: str, prompt: Prompt) -> Answer:
    """Have P prefill and D answer, both by name."""
    name = f"{p}-{d}-{next(NAMES)}"
    status, body = published(house, p, name, prompt)
    assert status == 200, body
    return wanted(house, d, name, prompt)


def published(house: Compose, p: str, name: str, prompt: Prompt) -> Answer:
    params = {"do_remote_decode": True, "handoff_id": name}
    return house.ask(p, prompt=prompt.text, kv_transfer_params=params)


def wanted(house: Compose, d: str, name: str, prompt: Prompt, seconds: float = 60.0) -> Answer:
    params = {"do_remote_prefill": True, "handoff_id": name}
    return house.ask(d, seconds, prompt=prompt.text, kv_transfer_params=params)


def status(house: Compose) -> dict[str, Any]:
    found: dict[str, Any] = json.loads(house.restow("status", "--json"))
    return found


def fate(house: Compose, name: str) -> dict[str, Any]:
    found: dict[str, Any] = json.loads(house.restow("handoff", name, "--json"))
    return found


def works(house: Compose, p: str, d: str) -> bool:
    """Return whether a state gets from P to D."""
    name = f"{p}-{d}-{next(NAMES)}"
    return published(house, p, name, PROMPTS[0])[0] == 200 and (
        wanted(house, d, name, PROMPTS[0])[0] == 200
    )


def all_is_well(house: Compose) -> None:
    """Check that every pair hands over, nothing is left over, and `restow check` is content."""
    until(lambda: house.healthy, BACK_S, "all containers are healthy")
    for p, d in itertools.product(("p0", "p1"), ("d0", "d1")):
        until(partial(works, house, p, d), BACK_S, f"{p} to {d}")
        assert said(through(house, p, d, PROMPTS[1])) == decode(PROMPTS[1].answer_ids)
    until(lambda: status(house)["handoffs_live"] == 0, BACK_S, "no handoff is left")
    house.restow("check")


def test_one_curl_has_an_answer_from_d(house: Compose) -> None:
    """Run the curl command that compose.yaml shows."""
    (curl,) = re.findall(r"^#   (curl .*?\})'$", FILE.read_text(), re.MULTILINE | re.DOTALL)
    command = curl.replace("\\\n#", " ") + "'"
    done = subprocess.run(["bash", "-c", command], capture_output=True, text=True, check=True)  # noqa: S607
    assert json.loads(done.stdout)["choices"][0]["text"] == "stone . apple . river ."


@pytest.mark.parametrize(("p", "d"), [("p0", "d0"), ("p1", "d1"), ("p0", "d1"), ("p1", "d0")])
def test_every_pair_hands_over(house: Compose, p: str, d: str) -> None:
    """Check P2 to D1, P1 to D2, and pairs of equal size, over TCP between hosts."""
    for prompt in PROMPTS:
        status_, body = through(house, p, d, prompt)
        assert said((status_, body)) == decode(prompt.answer_ids)
        found = fate(house, body["kv_transfer_params"]["handoff_id"])
        assert (found["source_engine"], found["destination_engine"]) == (p, d)
        assert found["bytes"] > 0


def test_bytes_went_between_containers_by_tcp(house: Compose) -> None:
    # UCX says by which device bytes came, and the kernel how many.
    for d in ("d0", "d1"):
        id_ = house.id_of(d)
        came = docker("exec", id_, "sed", "-n", r"s/^ *eth0: *\([0-9]*\).*/\1/p", "/proc/net/dev")
        assert int(came) > 1_000_000
        assert docker("exec", id_, "printenv", "UCX_TLS").strip() == "tcp,self"


def test_the_doctor_finds_nothing_wrong(house: Compose) -> None:
    """Check the doctor in the broker's container; agents themselves say that they read over TCP."""
    until(lambda: house.healthy, BACK_S, "all containers are healthy")
    found = json.loads(house.restow("doctor", "--pair", "all", "--json"))
    assert found["sound"], found
    pairs = {
        one["subject"]: one["words"]
        for one in found["findings"]
        if one["subject"].startswith("pair ")
    }
    assert set(pairs) == {f"pair {p}:{d}" for p, d in itertools.permutations(ENGINES, 2)}
    assert {words.partition(" (")[0] for words in pairs.values()} == {"reads over tcp/eth0"}


def test_a_p_that_is_killed(house: Compose) -> None:
    name = f"killed-{next(NAMES)}"
    assert published(house, "p0", name, PROMPTS[2])[0] == 200
    docker("kill", house.id_of("p0"))
    began_s = time.monotonic()
    code, body = wanted(house, "d0", name, PROMPTS[2])
    assert code == 503
    assert body["error"]["type"] in ("ENGINE_LOST", "AGENT_LOST", "LEASE_EXPIRED", "NOT_PUBLISHED")
    assert time.monotonic() - began_s < 45
    assert fate(house, name)["reason"] == body["error"]["type"]
    assert said(through(house, "p1", "d0", PROMPTS[3])) == decode(PROMPTS[3].answer_ids)
    docker("start", house.id_of("p0"))
    all_is_well(house)


def test_a_d_that_is_paused(house: Compose) -> None:
    """Check that other engines go on while D is paused, and that D goes on afterwards."""
    id_, name = house.id_of("d0"), f"paused-{next(NAMES)}"
    assert published(house, "p0", name, PROMPTS[4])[0] == 200
    docker("pause", id_)
    try:
        code, _ = wanted(house, "d0", name, PROMPTS[4], seconds=3)
        assert code == 0
        assert said(through(house, "p0", "d1", PROMPTS[5])) == decode(PROMPTS[5].answer_ids)
    finally:
        docker("unpause", id_)
    until(partial(settled, house, "d0", name, PROMPTS[4]), BACK_S, "D has the state, or an error")
    all_is_well(house)


def settled(house: Compose, d: str, name: str, prompt: Prompt) -> bool:
    """Return whether the handoff has ended. The state is asked for again, as a router would do."""
    code, body = wanted(house, d, name, prompt)
    assert code != 200 or body["choices"][0]["text"] == decode(prompt.answer_ids)
    return fate(house, name)["state"] in ("DONE", "FAILED", "EXPIRED", "CANCELLED")


def test_a_host_that_is_cut_off(house: Compose) -> None:
    id_ = house.id_of("p1")
    (network,) = [
        one
        for one in json.loads(docker("inspect", id_))[0]["NetworkSettings"]["Networks"]
        if one.endswith("fabric")
    ]
    name = f"cut-{next(NAMES)}"
    assert published(house, "p1", name, PROMPTS[6])[0] == 200
    docker("network", "disconnect", network, id_)
    try:
        code, body = wanted(house, "d1", name, PROMPTS[6], seconds=90)
        assert code == 503, body
        assert fate(house, name)["state"] in ("FAILED", "EXPIRED")
        assert said(through(house, "p0", "d1", PROMPTS[7])) == decode(PROMPTS[7].answer_ids)
    finally:
        docker("network", "connect", "--alias", "p1", network, id_)
    all_is_well(house)


def test_a_broker_that_starts_again(house: Compose) -> None:
    docker("kill", house.id_of("broker"))
    docker("start", house.id_of("broker"))
    all_is_well(house)
    assert {
        one["engine_id"] for one in json.loads(house.restow("engines", "--json"))["engines"]
    } == set(ENGINES)


def test_metrics_count_all_that_was_handed_over(house: Compose) -> None:
    page = docker(
        *("exec", house.id_of("router"), "python", "-c"),
        "import urllib.request as r; print(r.urlopen('http://broker:9464/metrics').read().decode())",
    )
    done = re.search(r'restow_handoffs_ended_total\{reason="",state="DONE"\} (\S+)', page)
    assert done is not None, page[-2000:]
    assert float(done[1]) >= 8
