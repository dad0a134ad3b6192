"""Print the words that engines of one checkpoint have, each by the settings of a line of stdin.

Run by vLLM's Python. The words are asked for twice: as the scheduler has its configuration, and
after a model has changed it, as many do while they are loaded.
"""

from __future__ import annotations

import json
import sys
from typing import Any

from vllm.engine.arg_utils import EngineArgs

from restow.agents.engines.vllm.scheduler.weights import weights_revision
from restow.broker.errors import RestowError


def theta(config: Any) -> Any:
    """Change the config's positions, as a line's settings may do in words."""
    config.rope_parameters = {"rope_type": "default", "rope_theta": 5e4}
    return config


def odd(config: Any) -> Any:
    """Add a value that has no stable form."""
    config.odd = object()
    return config


FUNCTIONS = {"theta": theta, "odd": odd}


def words(settings: dict[str, Any]) -> list[str]:
    """Return the revision of an engine, and the revision after its model was loaded."""
    if isinstance(settings.get("hf_overrides"), str):
        settings["hf_overrides"] = FUNCTIONS[settings["hf_overrides"]]
    config = EngineArgs(**settings).create_engine_config()
    try:
        before = weights_revision(config)
        rope = config.model_config.hf_config.rope_parameters
        if rope["rope_type"] != "default":  # as in vLLM's `deepseek_v2`
            rope["rope_type"] = "deepseek_yarn"
        config.model_config.hf_config.rms_norm_eps = 0.5
        return [before, weights_revision(config)]
    except RestowError as error:
        return [error.reason, error.message]


for line in sys.stdin:
    print(json.dumps(words(json.loads(line))), flush=True)
