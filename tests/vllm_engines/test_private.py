"""A vLLM without a hook or an attribute that Restow uses is refused at its start, by name."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from restow.agents.engines.vllm.private import HOOKS_SINCE_0_33, SUPPORTED_VERSIONS
from vllm_harness.programs import answers

REFUSED = "ENGINE_UNSUPPORTED: this version of vLLM has no {}, which Restow needs: supported are"


@pytest.fixture(scope="module")
def said(vllm_python: Path) -> dict[str, Any]:
    """Return what the connector says of this vLLM, whole and with something taken away."""
    (told,) = answers(vllm_python, "private_main.py")
    assert isinstance(told, dict)
    return told


def test_this_version_is_supported_and_has_all_that_is_used(said: dict[str, Any]) -> None:
    assert said["version"].rpartition(".")[0] in SUPPORTED_VERSIONS
    assert said["whole"] == ""
    newest = said["version"].startswith(SUPPORTED_VERSIONS[-1])
    assert said["since"] == (sorted(HOOKS_SINCE_0_33) if newest else [])


def test_a_missing_hook_is_refused_by_name(said: dict[str, Any]) -> None:
    assert len(said["hooks"]) > 20
    for hook, words in said["hooks"].items():
        assert words.startswith(REFUSED.format(f"hook {hook} of connectors"))
        assert all(version in words for version in SUPPORTED_VERSIONS)


def test_a_missing_attribute_is_refused_by_name(said: dict[str, Any]) -> None:
    assert {"EngineCoreProc.input_queue", "BlockHashToBlockMap._cache"} <= set(said["attributes"])
    for attribute, words in said["attributes"].items():
        assert words.startswith(f"{REFUSED.partition('{}')[0]}{attribute} (vllm.")


def test_a_missing_name_is_refused_by_name(said: dict[str, Any]) -> None:
    assert said["name"].startswith("ENGINE_UNSUPPORTED: this version of vLLM has no module or name")
    assert "'KVConnectorTransferResults'" in said["name"]
    assert said["class"].startswith(
        "ENGINE_UNSUPPORTED: this version of vLLM has no module or name"
    )
    assert "'BlockHashToBlockMap'" in said["class"]


def test_what_objects_are_given_when_they_are_made_counts(said: dict[str, Any]) -> None:
    assert said["found"] == [True, False]
