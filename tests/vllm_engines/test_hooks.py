"""The page names every hook of vLLM's connector classes, and who answers it."""

from __future__ import annotations

import json
import re
import subprocess
from pathlib import Path

from vllm_harness.engine import environment_of_vllm

PAGE = Path(__file__).parents[2] / "docs" / "vllm.md"
HEADING = "## Every hook of vLLM's connector"
ROW = re.compile(r"\| `(\w+)` \| (Restow|vLLM)(?:, from (\S+))? \| (.+) \|")
PROGRAM = """
import json, sys, vllm
from vllm.distributed.kv_transfer.kv_connector.v1 import base
from restow.agents.engines.vllm import RestowConnector

classes = [
    one for one in vars(base).values()
    if isinstance(one, type) and one.__module__ == base.__name__ and not hasattr(one, "__members__")
]
hooks = {
    name for one in classes for name, value in vars(one).items()
    if not name.startswith(("__", "_abc"))
    and (callable(value) or isinstance(value, (property, classmethod)))
} | {"_cache_hit_source"}
own = {name for name in vars(RestowConnector) if not name.startswith("__")}
print(json.dumps([vllm.__version__, sorted(hooks), sorted(own), [one.__name__ for one in classes]]))
"""
CLASSES = {
    *("KVConnectorBase_V1", "SupportsHMA", "KVConnectorTransferResults"),
    *("KVConnectorHandshakeMetadata", "KVConnectorMetadata", "KVConnectorWorkerMetadata"),
}
"""Those of which the page's rows speak."""


def test_the_page_names_every_hook_and_who_answers_it(vllm_python: Path) -> None:
    # A hook that a later vLLM adds is missing in the table: decide what Restow answers.
    told = subprocess.run(
        [vllm_python, "-c", PROGRAM], capture_output=True, text=True, env=environment_of_vllm()
    )
    assert told.returncode == 0, told.stderr[-2000:]
    version, hooks, own, classes = json.loads(told.stdout.splitlines()[-1])
    section = PAGE.read_text().partition(f"{HEADING}\n")[2].partition("\n## ")[0]
    rows = {name: (who, since) for name, who, since, _ in ROW.findall(section)}
    assert set(classes) == CLASSES, "another class that a connector may be"
    come = {name for name, (_, since) in rows.items() if not since or _at_least(version, since)}
    assert come == set(hooks)
    by_restow = {name for name, (who, _) in rows.items() if who == "Restow"}
    assert by_restow == {name for name in own if name in rows}


def _at_least(version: str, since: str) -> bool:
    return tuple(map(int, version.split(".")[:2])) >= tuple(map(int, since.split(".")[:2]))
