"""Configs and layouts as files, and a way to run a command."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from restow.broker.cli.main import app, main

CONFIG = {
    "model_type": "nemotron_h",
    "hybrid_override_pattern": "MEM*MM-*",
    "mamba_num_heads": 16,
    "mamba_head_dim": 8,
    "ssm_state_size": 16,
    "n_groups": 2,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "dtype": "bfloat16",
}


@dataclass(frozen=True, slots=True)
class Outcome:
    code: int
    out: str
    err: str

    @property
    def json(self) -> Any:
        return json.loads(self.out)


@pytest.fixture
def run() -> Callable[..., str]:
    """Run a command that succeeds; returns its stdout."""

    def call(*arguments: object) -> str:
        result = CliRunner().invoke(app, [str(a) for a in arguments], catch_exceptions=False)
        assert result.exit_code == 0, result.output
        return result.stdout

    return call


@pytest.fixture
def fail(capsys: pytest.CaptureFixture[str]) -> Callable[..., Outcome]:
    """Run a command that fails, through `main`."""

    def call(*arguments: object) -> Outcome:
        with pytest.raises(SystemExit) as caught:
            main([str(argument) for argument in arguments])
        captured = capsys.readouterr()
        return Outcome(int(str(caught.value.code)), captured.out, captured.err)

    return call


@pytest.fixture
def config(tmp_path: Path) -> Path:
    path = tmp_path / "config.json"
    path.write_text(json.dumps(CONFIG))
    return path


@pytest.fixture
def layout_file(tmp_path: Path, config: Path, run: Callable[..., str]) -> Callable[..., Path]:
    """Make a layout file of the config with some settings."""

    def make(name: str, *settings: object) -> Path:
        path = tmp_path / f"{name}.json"
        path.write_text(run("layout", "from-config", config, *settings))
        return path

    return make
