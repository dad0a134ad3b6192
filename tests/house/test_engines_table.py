"""The table of engines says what tests install and run, and the connector knows these versions."""

from __future__ import annotations

import re
import tomllib
from importlib import util
from pathlib import Path
from types import ModuleType

import pytest

ROOT = Path(__file__).parents[2]
VERSIONS = ROOT / "agents" / "restow" / "agents" / "engines" / "vllm" / "private.py"


@pytest.fixture(scope="module")
def engines() -> ModuleType:
    """Return docs/engines.py, which is no module of a package."""
    spec = util.spec_from_file_location("engines", ROOT / "docs" / "engines.py")
    assert spec is not None
    assert spec.loader is not None
    module = util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_pages_have_the_table_of_the_engines_that_tests_run(engines: ModuleType) -> None:
    for path in engines.PAGES:
        page = path.read_text()
        assert engines.PLACE.search(page), f"{path.name} has no place for the table"
        assert engines.fresh(page) == page, f"{path.name} is old: python docs/engines.py"


def test_the_table_has_the_two_versions_of_vllm_that_the_connector_supports(
    engines: ModuleType,
) -> None:
    # Tests install these locks.
    setup = (ROOT / "tests" / "vllm_harness" / "setup.sh").read_text()
    (locks,) = re.findall(r"docker/locked/\{([^}]*)\}", setup)
    (words,) = re.findall(r"^SUPPORTED_VERSIONS = \((.*)\)", VERSIONS.read_text(), re.MULTILINE)
    listed = tomllib.loads((ROOT / "docs" / "engines.toml").read_text())["engine"]
    of_vllm = [one for one in listed if one["name"] == "vLLM"]
    versions = [engines.locked_version(one["lock"], one["package"]) for one in of_vllm]
    assert set(re.findall(r'"([\d.]+)"', words)) == {one.rpartition(".")[0] for one in versions}
    assert {one["lock"] for one in of_vllm} <= set(locks.split(","))
