"""`text_part` gives the reader of a text model what a config of several parts says of its text."""

from __future__ import annotations

from collections.abc import Callable, Mapping

from restow.broker.families.hf.keys import Keys, wrong
from restow.broker.families.hf.layers import Layers
from restow.broker.families.hf.types import Types

Reader = Callable[[Keys, Types], Layers]


def text_part(read: Reader) -> Reader:
    """Return a reader of configs whose ``text_config`` (or ``llm_config``) ``read`` reads.

    It raises `LayoutFormError` for a config without that part.
    """

    def read_text(keys: Keys, types: Types) -> Layers:
        text = keys.config.get("text_config") or keys.config.get("llm_config")
        if not isinstance(text, Mapping):
            raise wrong("text_config", text, "an object")
        return read(Keys(text), types)

    return read_text
