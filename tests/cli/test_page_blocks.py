"""What the pages tell people to type is true: every block is run, or the table says why not."""

from __future__ import annotations

import re
import shlex
import uuid
from collections import Counter
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import typer

from broker.fakes import model_layout
from cli.broker_process import broker_process
from cli.page_blocks import PAGES, ROOT, Shell, blocks
from restow.broker.cli.main import app
from restow.broker.client import BlockingSession

CODE = ("bash", "python")
SHOWN = ("text", "json")
"""What programs print, and files: nothing to run."""
KNOWN = "request-4711"
"""A handoff that every page's broker has heard of: nobody published it."""


@dataclass(frozen=True, slots=True)
class Run:
    """Run here, after those above it on its page, with one broker for all of them."""

    beside: str = ""  # a command that is said meanwhile, until it succeeds
    fails: tuple[str, ...] = ()  # its commands that do not end with 0


@dataclass(frozen=True, slots=True)
class Elsewhere:
    """Another test runs the block as it stands, or reads it from the page."""

    test: str


@dataclass(frozen=True, slots=True)
class NotRun:
    """No test runs it as it stands."""

    why: str


GOES_ON = "goes on until it is ended"
SUITE = "takes minutes to hours: it is a suite of its own, of ./run nightly"
BLOCKS: dict[str, dict[str, Run | Elsewhere | NotRun]] = {
    "README.md": {
        "./run demo": NotRun("sets up an environment; ./run test runs the same demo (tests/demo)"),
        "pip install .": NotRun(
            "fetches the newest of an index: what is tested is locked (docker/locked)"
        ),
        "restow serve ": NotRun(GOES_ON + ", each of the three; the router needs engines"),
        "restow status": Run(),
        "python docs/examples/by_content.py hold": Run(),
        "from pathlib import Path": Run(beside="restow release request-7"),
        # As diff does, of what differs.
        "config=docs/pictures/nemotron3-nano.json": Run(
            fails=("restow layout diff p.json d.json",)
        ),
        "./run demo --p-tp 4": NotRun(SUITE),
    },
    "docs/benchmarks.md": {
        "./run bench --suite models": NotRun("measures for an hour"),
        "RESTOW_LMCACHE_PYTHON=": NotRun(
            "measures for minutes, with LMCache where it is installed"
        ),
    },
    "docs/client.md": {
        "from restow.broker.client import BlockingSession": Run(),
        "from restow.broker.client import EngineSession": Run(),
        "from restow.agents import AsyncAgent, RegionMemory": Run(),
        "# P gives up after its first chunk.": Run(),
        "# P gives up what it has published for two.": Run(),
        "from restow.broker.client import content_of": Run(),
        "from restow.broker.client import AdminClient": Run(),
        "from restow.broker.client import AdminClient, BlockingSession": Run(),
        "from restow.broker.client import AdminClient, BlockingSession, chain_of": Run(),
        "from restow.agents import Agent, RegionMemory": Run(),
        "from restow.broker.client import AdminClient, BrokerCallError": Run(),
    },
    "docs/layouts.md": {
        "restow layout from-config": Run(),
    },
    "docs/operators.md": {
        "restow serve --listen 0.0.0.0:7350": (
            NotRun(GOES_ON + "; tests/cli/test_security_page.py starts one with such files")
        ),
        "restow handoffs --state failed -o name | xargs -rn 1 restow handoff": Run(),
        "restow events --follow": NotRun(
            GOES_ON + ", and the other takes ten minutes; jq may not be here"
        ),
        "restow serve --listen 0.0.0.0:7350 --advertise": NotRun(
            GOES_ON + "; tests/operators_day has three of them, and tests/etcd such files"
        ),
        "pip install '.[trace]'": NotRun("needs a collector of traces"),
        "helm install": NotRun("needs Kubernetes"),
        "helm upgrade --install": NotRun("needs Kubernetes; tests/deployment render such values"),
        "helm upgrade restow": NotRun("needs Kubernetes; tests/deployment render such values"),
        "kubectl -n serving get leases": NotRun("needs Kubernetes"),
    },
    "docs/reliability.md": {
        "./run simulate": NotRun(SUITE),
        "./run chaos": NotRun(SUITE),
        "restow serve --digests": (
            NotRun(GOES_ON + "; tests/cli/test_digest_options.py starts such brokers")
        ),
        "./run fuzz": NotRun(SUITE),
    },
    "docs/peers.md": {
        "python -m venv lmcache": NotRun("installs LMCache beside vLLM, and starts its server")
    },
    "docs/router.md": {
        first: NotRun(GOES_ON + ", and needs engines; tests/router/test_command.py starts one")
        for first in ("restow router --prefill", "restow router --find-ms 50")
    },
    "docs/runbook.md": {"restow handoffs": Run()},
    "docs/security.md": {
        first: Elsewhere("tests/cli/test_security_page.py")
        for first in (
            "openssl req -x509",
            "restow serve --listen 0.0.0.0:7350 --tls-cert broker.pem --tls-key broker.key --c",
            "restow status --tls-ca ca.pem --tls-cert",
            "engine=$(restow token",
            "restow serve --listen 0.0.0.0:7350 --tls-cert broker.pem --tls-key broker.key --t",
            "restow status --tls-ca ca.pem --token-file",
        )
    },
    "docs/store.md": {
        "restow store --engine prefill-0": (
            NotRun(GOES_ON + "; tests/cli/test_store_command.py starts one")
        ),
        "from restow.agents.store.store import Store, StoreOptions": (
            NotRun("needs an engine's tokens; tests/store/test_store_engines.py does the same")
        ),
    },
    "docs/vllm.md": {
        first: Elsewhere("tests/vllm_engines/test_page.py")
        for first in (
            'eval "$(./run vllm --setup)"',
            "curl -s http://localhost:8000/v1/completions",
        )
    },
    "docker/README.md": {
        first: NotRun("needs a Docker engine and a registry; ./run containers does the same")
        for first in (
            "docker build -f docker/Dockerfile --target broker -t restow-broker .",
            "docker compose -f docker/compose.yaml up --build --detach --wait",
            "docker compose -f docker/daemons.yaml build",
        )
    },
}


@pytest.mark.parametrize("page", PAGES)
def test_every_block_is_in_the_table(page: str) -> None:
    """Check that the table has all blocks of the page in its order, and no others.

    Each is named by how its first line begins.
    """
    found = blocks(page)
    assert {one.language for one in found} <= {*CODE, *SHOWN}, "a block without its language"
    code = [one.first_line for one in found if one.language in CODE]
    table = list(BLOCKS.get(page, {}))
    named = [line for line, name in zip(code, table, strict=False) if line.startswith(name)]
    assert (named, len(table)) == (code, len(code)), f"{page}: {[*code[len(named) :], None][0]}"


def test_tests_that_the_table_names_read_the_page() -> None:
    for page, table in BLOCKS.items():
        for one in table.values():
            if isinstance(one, Elsewhere):
                assert f'"{Path(page).name}"' in (ROOT / one.test).read_text()


@pytest.mark.parametrize(
    "page", [page for page, table in BLOCKS.items() if Run in map(type, table.values())]
)
def test_what_a_page_says_is_what_happens(page: str, tmp_path: Path) -> None:
    """Run a page's blocks one after another, with one broker."""
    code = [one for one in blocks(page) if one.language in CODE]
    with broker_process() as broker:
        with BlockingSession("d", uuid.uuid4().hex, model_layout(), broker) as session:
            asked = session.request(KNOWN, {"attention": [1], "state": [1]}, timeout_ms=1)
            assert asked.result(30).reason == "NOT_PUBLISHED"
        shell = Shell(tmp_path, broker)
        for block, how in zip(code, BLOCKS[page].values(), strict=True):
            if isinstance(how, Run):
                out, failed = shell.run(block, how.beside)
                assert failed == list(how.fails), f"{page}: {block.first_line}"
                if block.printed:
                    assert out.splitlines() == block.printed, block.first_line


def test_no_two_examples_use_one_id() -> None:
    # A reader who types the pages' examples has one broker: an id that has ended can't be used
    # again.
    used = Counter(
        id_
        for page in PAGES
        for one in blocks(page)
        if one.language == "python"
        for id_ in {*re.findall(r'"(request-\w+)"', one.text)}
    )
    assert used
    assert [id_ for id_, times in used.items() if times > 1] == []


GROUP: Any = typer.main.get_command(app)


@pytest.mark.parametrize("page", PAGES)
def test_every_command_has_the_options_that_are_shown(page: str) -> None:
    """Check that no command of a page is refused for its options, also if it is not run."""
    for block in blocks(page):
        if block.language != "bash":
            continue
        text = block.text.replace("\\\n", " ")
        for words in re.findall(r"(?:^|\$\(|xargs -rn 1 )restow ([^|>#)&\n]+)", text, re.MULTILINE):
            name, *arguments = shlex.split(words)
            options = {one for one in arguments if one.startswith("-")}
            command = GROUP.commands[name]
            if arguments and arguments[0] in getattr(command, "commands", {}):
                command = command.commands[arguments[0]]
            params = command.get_params(typer.Context(command))
            known = {opt for one in params for opt in (*one.opts, *one.secondary_opts)}
            assert options <= known, f"{page}: restow {words}"
