"""A Hugging Face ``config.json`` becomes a `ModelSpec` here."""

from restow.broker.families.hf.config import model_from_hf_config
from restow.broker.families.hf.keys import Reading, Readings

__all__ = ["Reading", "Readings", "model_from_hf_config"]
