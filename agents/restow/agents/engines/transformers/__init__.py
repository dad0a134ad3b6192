"""A Hugging Face model on torch CPU as an engine: prefill and decode on paged, TP-cut memory."""

from restow.agents.engines.transformers.engine import Engine, EngineOptions
from restow.agents.engines.transformers.stored import StoredTypes

__all__ = ["Engine", "EngineOptions", "StoredTypes"]
