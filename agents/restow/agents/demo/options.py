"""What a demo run is asked to do."""

from __future__ import annotations

from dataclasses import dataclass

from restow.agents.engines.transformers import StoredTypes
from restow.agents.engines.transformers.stored_types import AS_COMPUTED
from restow.broker.families import EngineSettings
from restow.broker.planner import Strategy
from restow.broker.words import Worded

SEED = 26
"""Of the prompts. With most seeds a swap of B and C shows in the logits of every prompt but in the
words of none, because it spoils only the next three tokens; here it shows in the words of two."""
STEPS = 6
"""Tokens that are decoded of each answer."""


@dataclass(frozen=True, slots=True)
class DemoOptions(Worded):
    """Both engines, the way between them, and the prompts."""

    p: EngineSettings
    d: EngineSettings
    p_stored: StoredTypes = AS_COMPUTED
    d_stored: StoredTypes = AS_COMPUTED
    allow_narrowing: bool = False
    strategy: Strategy = Strategy.AUTO
    daemon: bool = False
    prompts: int = 16
    sabotage: bool = True
