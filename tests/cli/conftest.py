"""Configs and layouts as files."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest

from cli.typed import printed

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


@pytest.fixture
def config(tmp_path: Path) -> Path:
    path = tmp_path / "config.json"
    path.write_text(json.dumps(CONFIG))
    return path


@pytest.fixture
def layout_file(tmp_path: Path, config: Path) -> Callable[..., Path]:
    """Make a layout file of the config with some settings."""

    def make(name: str, *settings: object) -> Path:
        path = tmp_path / f"{name}.json"
        path.write_text(printed("layout", "from-config", config, *settings))
        return path

    return make
