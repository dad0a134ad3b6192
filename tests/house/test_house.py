"""The house's own rules: what lies where, what imports what, and that generated code is fresh."""

from __future__ import annotations

import ast
import os
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from hypothesis import settings

ROOT = Path(__file__).resolve().parents[2]
SOURCE_ROOTS = ("proto", "broker", "agents", "kernels", "demo")
SUFFIXES = ("_pb2.py", "_pb2.pyi", "_pb2_grpc.py", "_pb2_grpc.pyi")


def sources(*folders: str) -> Iterator[Path]:
    """Yield every Python file that people wrote."""
    for folder in folders:
        for path in sorted((ROOT / folder).rglob("*.py")):
            if not path.name.endswith(SUFFIXES) and ".venv" not in path.parts:
                yield path


def modules_after(*statements: str) -> set[str]:
    """Return the top-level modules that a fresh interpreter has loaded after some imports."""
    program = "\n".join(
        (*statements, "import sys", "print(*{n.split('.')[0] for n in sys.modules})")
    )
    command = [sys.executable, "-c", program]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    return set(done.stdout.split())


@pytest.mark.parametrize("page", sorted([*(ROOT / "docs").glob("*.md"), ROOT / "README.md"]))
def test_tests_that_a_page_names_are_there(page: Path) -> None:
    for file, name in re.findall(r"`(tests/[\w/]+\.py)(?:::(\w+))?`", page.read_text()):
        assert (ROOT / file).is_file(), f"{page.name} names {file}"
        assert f"def {name}(" in (ROOT / file).read_text() or not name, f"{page.name}: {name}"


@pytest.mark.parametrize("root", SOURCE_ROOTS)
def test_a_source_root_is_no_package(root: str) -> None:
    for folder in (ROOT / root, ROOT / root / "restow"):
        assert folder.is_dir()
        assert not (folder / "__init__.py").exists(), (
            f"{folder.relative_to(ROOT)}/__init__.py hides the other parts of `restow`"
        )


@pytest.mark.parametrize(
    "package",
    [
        "restow.broker.planner",
        "restow.broker.draw",
        "restow.broker.layout",
        "restow.broker.core",
        "restow.broker.trust",
    ],
)
def test_the_mind_of_the_broker_knows_no_wire_and_no_device(package: str) -> None:
    names = modules_after(
        "import importlib, pkgutil",
        f"package = importlib.import_module({package!r})",
        "for one in pkgutil.walk_packages(package.__path__, package.__name__ + '.'):",
        "    importlib.import_module(one.name)",
    )
    assert not names & {"torch", "grpc", "nixl", "triton", "google", "asyncio"}


@pytest.mark.parametrize(
    "module",
    [
        "restow.broker.client",
        "restow.broker.cli.main",
        "restow.broker.server.serve",
        "restow.broker.rpc.wire",
    ],
)
def test_broker_client_and_commands_need_no_torch(module: str) -> None:
    assert not modules_after(f"import {module}") & {"torch", "nixl", "triton", "transformers"}


def test_help_needs_no_wire() -> None:
    assert not modules_after("import restow.broker.cli.main") & {"grpc", "numpy", "uvloop"}


def test_generated_modules_are_those_of_the_contract(tmp_path: Path) -> None:
    subprocess.run(
        [str(ROOT / "proto" / "generate"), str(tmp_path)],
        check=True,
        capture_output=True,
        env={**os.environ, "PYTHONPATH": ""},
    )
    fresh = {path.name: path.read_bytes() for path in tmp_path.rglob("*_pb2*.py*")}
    kept = {path.name: path.read_bytes() for path in (ROOT / "proto").rglob("*_pb2*.py*")}
    kept = {name: data for name, data in kept.items() if name.endswith(SUFFIXES)}
    assert fresh.keys() == kept.keys()
    stale = [name for name, data in fresh.items() if kept[name] != data]
    assert not stale, f"run proto/generate: {stale} are not what the .proto files say"


def test_no_law_has_a_time_limit() -> None:
    assert settings().deadline is None


def test_the_contract_is_commented_and_well_formed() -> None:
    buf = Path(sys.executable).with_name("buf")
    done = subprocess.run([str(buf), "lint"], cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr


BARRED = {
    "deserialize_descs": "it unpickles what a peer sent",
    "metadata_call_credentials": "the end of a channel may hang with it: see `authorized_channel`",
}


EDGES = {
    "agents/restow/agents/link/order_desk.py": 1,
    "agents/restow/agents/reading/reader.py": 2,
}
"""How many handlers may catch everything. An order ends in an answer whatever failed, and a read is
over before its failure is told."""


@pytest.mark.parametrize(
    "path", list(sources(*SOURCE_ROOTS)), ids=lambda path: str(path.relative_to(ROOT))
)
def test_nothing_of_a_peer_is_unpickled_and_no_error_is_swallowed(path: Path) -> None:
    tree = ast.parse(path.read_text())
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            assert "pickle" not in {alias.name.split(".")[0] for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert (node.module or "").split(".")[0] != "pickle"
        elif isinstance(node, ast.Attribute | ast.Name):
            name = node.attr if isinstance(node, ast.Attribute) else node.id
            assert name not in BARRED, BARRED.get(name)
    handlers = (one for one in ast.walk(tree) if isinstance(one, ast.ExceptHandler))
    swallowed = [one.lineno for one in handlers if _swallows(one)]
    edges = EDGES.get(str(path.relative_to(ROOT)), 0)
    assert len(swallowed) == edges, f"lines {swallowed} catch everything and go on"


def _swallows(handler: ast.ExceptHandler) -> bool:
    """Return whether a handler catches everything, and does not raise it again."""
    caught = handler.type
    everything = caught is None or (
        isinstance(caught, ast.Name) and caught.id in ("Exception", "BaseException")
    )
    return everything and not any(isinstance(node, ast.Raise) for node in ast.walk(handler))
