"""Configs are read without transformers, unless a key is missing whose default it has."""

from __future__ import annotations

import subprocess
import sys
from typing import Any

import pytest

LLAMA: dict[str, Any] = {
    "model_type": "llama",
    "num_hidden_layers": 2,
    "hidden_size": 64,
    "num_attention_heads": 8,
    "num_key_value_heads": 2,
    "head_dim": 8,
}
NO_TRANSFORMERS = "sys.modules['transformers'] = None"
OLD_TRANSFORMERS = (
    "old = sys.modules['transformers'] = type(sys)('transformers'); old.__version__ = '4.57.1'"
)


def read_in_new_process(config: dict[str, Any], first: str = "") -> str:
    """Run ``first`` in a new process and read a config there.

    Returns what the process makes of the config, and which of the big packages it imported.
    """
    code = f"""
import sys
{first}
from restow.broker.errors import LayoutFormError
from restow.broker.families.hf import model_from_hf_config
try:
    found = str(model_from_hf_config({config!r}).depth)
except LayoutFormError as error:
    found = str(error)
loaded = [name for name in ("torch", "transformers") if sys.modules.get(name)]
print(found, *loaded, sep="|")
"""
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=120
    )
    return done.stdout.strip().splitlines()[-1]


def test_a_complete_config_needs_neither_torch_nor_transformers() -> None:
    assert read_in_new_process(LLAMA) == "2"


@pytest.mark.parametrize("first", [NO_TRANSFORMERS, OLD_TRANSFORMERS])
@pytest.mark.parametrize(
    ("config", "key"),
    [
        ({key: value for key, value in LLAMA.items() if key != "head_dim"}, "head_dim"),
        ({**LLAMA, "model_type": "mistral"}, "sliding_window"),  # the class has one
        ({**LLAMA, "model_type": "gemma2", "sliding_window": 32}, "layer_types"),
    ],
)
def test_a_missing_key_is_named_where_nothing_has_its_default(
    first: str, config: dict[str, Any], key: str
) -> None:
    told = read_in_new_process(config, first)
    assert told.startswith(f"config: '{key}' is missing: add it, or install restow[engine]")


def test_a_null_is_a_value_that_needs_no_default() -> None:
    config = {**LLAMA, "model_type": "mistral", "sliding_window": None}
    assert read_in_new_process(config, NO_TRANSFORMERS) == "2"
