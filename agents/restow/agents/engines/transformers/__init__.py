"""This engine runs a Hugging Face model on torch CPU, with state in paged, TP-cut memory."""

from restow.agents.engines.transformers.engine import Engine, EngineOptions
from restow.agents.engines.transformers.stored_types import StoredTypes

__all__ = ["Engine", "EngineOptions", "StoredTypes"]
