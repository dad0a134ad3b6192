"""What the pages tell people to type is true: every block is run, or the table says why not."""

from __future__ import annotations

import re
import shlex
import uuid
from collections import Counter
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import typer

from broker.fakes import model_layout
from cli.broker_process import broker_process
from cli.page_blocks import PAGES, ROOT, Block, Shell, blocks
from forked.commands import restow_program
from restow.broker.cli.main import app
from restow.broker.client import BlockingSession

CODE = ("bash", "python")
SHOWN = ("text", "json", "yaml")
"""What programs print, and files: nothing to run."""
KNOWN = "request-4711"
"""A handoff that every page's broker has heard of: nobody published it."""
BESIDE = {"from pathlib import Path": "restow release request-7 --yes"}
"""Commands that are typed while a block runs, until they succeed."""
FAILS = {"config=docs/pictures/nemotron3-nano.json": ["restow layout diff p.json d.json"]}
"""Commands of a block that do not end with 0, as `diff` does not if there are differences."""

GOES_ON = "goes on until it is ended"
SUITE = "takes minutes to hours: it is a suite of its own, of ./run nightly"
CLUSTER = "needs Kubernetes; tests/deployment render such values"
SECURITY = "tests/cli/test_security_page.py"
SCALING = "tests/vllm_engines/test_scaling.py"
LEFT_OUT: dict[str, dict[str, str]] = {
    "README.md": {
        "./run demo": "sets up an environment; ./run test runs the same demo (tests/demo)",
        "pip install .": "fetches the newest of an index: what is tested is locked (docker/locked)",
        "restow serve ": GOES_ON + ", each of the three; the router needs engines",
    },
    "docs/benchmarks.md": {
        "./run bench --suite models": "measures for an hour",
        "./run bench --suite eviction": "needs a trace that is not in this repository; "
        "tests/bench/test_suites.py reads one of its form",
        "RESTOW_LMCACHE_PYTHON=": "measures for minutes, with LMCache where it is installed",
        "./run bench --suite vllm-moves": "measures for minutes, with a real vLLM",
    },
    "docs/operators.md": {
        "restow serve --listen 0.0.0.0:7350 --tls": GOES_ON + f"; {SECURITY} starts one",
        "restow events --follow": GOES_ON + ", and the other takes ten minutes",
        "start() {": SCALING,
        "start d1 8201": SCALING,
        "echo http://localhost:8201 > decode.txt": SCALING,
        "echo http://localhost:8200 > prefill.txt": SCALING,
        "restow serve --listen 0.0.0.0:7350 --advertise": (
            GOES_ON + "; tests/operators_day has three of them, and tests/etcd such files"
        ),
        "pip install '.[trace]'": "needs a collector of traces",
        "helm install": CLUSTER,
        "helm upgrade --install": CLUSTER,
        "helm upgrade restow": CLUSTER,
        "kubectl -n serving get leases": CLUSTER,
    },
    "docs/reliability.md": {
        "./run simulate": SUITE,
        "./run chaos": SUITE,
        "restow serve --digests": GOES_ON + "; tests/cli/test_settings_file.py starts such brokers",
        "./run fuzz": SUITE,
    },
    "docs/peers.md": {
        "python -m venv lmcache": "installs LMCache beside vLLM, and starts its server",
        "from probes.asking": "tests/conform/test_conform.py",
    },
    "docs/router.md": {
        "pip install '.[events]'": GOES_ON + "; tests/broker/observing/test_kv_events.py has some",
        "restow router": GOES_ON + ", and needs engines; tests/router/test_command.py starts one",
    },
    "docs/platforms.md": {
        "": "needs a platform; tests/vllm_engines/test_platforms.py makes its requests"
    },
    "docs/releasing.md": {"": "tests/releases/test_packages.py"},
    "docs/security.md": {"": SECURITY},
    "docs/store.md": {
        "restow store --engine prefill-0": GOES_ON + "; tests/cli/test_store_command.py starts one",
        "restow state prefetch": (
            "needs two stores and an engine's tokens; tests/store/test_commands.py gives them"
        ),
        "from restow.agents.store.store import Store": (
            "needs an engine's tokens; tests/store/test_store_engines.py does the same"
        ),
    },
    "docs/vllm.md": {"": "tests/vllm_engines/test_page.py"},
    "docker/README.md": {
        "": "needs a Docker engine and a registry; ./run containers does the same"
    },
}
"""Why blocks are not run, by how they begin; a test that stands alone reads or types the block."""


def code_of(page: str) -> list[Block]:
    found = blocks(page)
    assert {one.language for one in found} <= {*CODE, *SHOWN}, "a block without its language"
    return [one for one in found if one.language in CODE]


def of_block(table: Mapping[str, Any], block: Block) -> Any:
    """Return what a table has for a block, by how it begins; None if it has nothing."""
    return next((it for name, it in table.items() if block.first_line.startswith(name)), None)


def to_run(page: str) -> list[Block]:
    return [block for block in code_of(page) if not of_block(LEFT_OUT.get(page, {}), block)]


@pytest.mark.parametrize("page", LEFT_OUT)
def test_what_is_left_out_is_there(page: str) -> None:
    lines = [block.first_line for block in code_of(page)]
    for name, why in LEFT_OUT[page].items():
        assert [line for line in lines if line.startswith(name)], name
        if why.endswith(".py"):
            assert f'"{Path(page).name}"' in (ROOT / why).read_text()


@pytest.mark.parametrize("page", [*filter(to_run, PAGES)])
def test_what_a_page_says_is_what_happens(page: str, tmp_path: Path) -> None:
    """Run a page's blocks one after another, with one broker."""
    with broker_process() as broker, restow_program(tmp_path / "restow"):
        with BlockingSession("d", uuid.uuid4().hex, model_layout(), broker) as session:
            asked = session.request(KNOWN, {"attention": [1], "state": [1]}, timeout_ms=1)
            assert asked.result(30).reason == "NOT_PUBLISHED"
        shell = Shell(tmp_path, broker)
        for block in to_run(page):
            if block.language == "bash":
                assert shell.bash(block) == (of_block(FAILS, block) or [])
            else:
                lines = shell.python(block, of_block(BESIDE, block))
                assert block.printed in ([], lines), block.first_line


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
