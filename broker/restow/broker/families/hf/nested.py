"""`text_part` finds the language model in the config of a model that has other parts beside it."""

from __future__ import annotations

from restow.broker.errors import LayoutFormError
from restow.broker.families.hf.keys import Keys

TEXT_PARTS = ("text_config", "llm_config", "language_config", "thinker_config")
"""As vLLM and its configuration classes find them (`get_hf_text_config`); the last has a
``text_config`` of its own."""
_OTHER_PARTS = ("vision_config", "audio_config", "vit_config", "encoder_config")
_MAX_DEPTH = 3


def text_part(keys: Keys) -> Keys:
    """Return the keys of the language model: the same ones where the config has no parts.

    Raises `LayoutFormError` for a config that has parts, and no language model among them.
    """
    for _ in range(_MAX_DEPTH):
        found = [name for name in TEXT_PARTS if keys.has(name)]
        if not found:
            return _without_parts(keys)
        first = keys.config[found[0]]
        for name in found[1:]:
            if keys.config[name] != first:
                raise LayoutFormError(
                    f"config: {keys.path}{found[0]} and {keys.path}{name} are two language models: "
                    f"remove the one that the engine does not serve",
                    key=keys.path + name,
                )
        if first == {}:
            raise keys.wrong(found[0], first, "the config of a language model")
        keys = keys.part(found[0])
    raise LayoutFormError(f"config: {keys.path[:-1]}: parts are nested too deeply", key=keys.path)


def _without_parts(keys: Keys) -> Keys:
    """Return the keys, unless there are parts and the language model is none of them."""
    others = [name for name in _OTHER_PARTS if keys.has(name)]
    if others and not keys.has("num_hidden_layers") and not keys.has("num_layers"):
        raise LayoutFormError(
            f"config: {keys.path}{others[0]} is there, and no part of a language model: none of "
            f"{', '.join(TEXT_PARTS)}",
            key=keys.path + others[0],
        )
    return keys
