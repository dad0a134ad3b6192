"""`text_part` finds the language model in the config of a model that has other parts beside it.

`Whole` is what a ``model_type`` says about that part.
"""

from __future__ import annotations

from dataclasses import dataclass

from restow.broker.errors import LayoutFormError
from restow.broker.families.hf.keys import Keys

TEXT_PARTS = ("text_config", "llm_config", "language_config", "thinker_config")
"""As vLLM and its configuration classes find them (`get_hf_text_config`); the last has a
``text_config`` of its own."""
_OTHER_PARTS = ("vision_config", "audio_config", "vit_config", "encoder_config")
_MAX_DEPTH = 3


@dataclass(frozen=True, slots=True)
class Whole:
    """A type of models that have their language model in a part.

    That is of type ``text``, or of any other that is known, which it says. If ``alone``, vLLM runs
    no other there, and its configuration class reads the part as ``text`` if it says one of
    ``as_well``. If ``fixed``, the class reads the part as ``text`` whatever type it says. ``name``
    is what the part is called then, if not ``text``. ``architecture`` is the language model's,
    where several have one type. Some configs have the part's keys beside the others (``flat``).
    """

    text: str
    as_well: tuple[str, ...] = ()
    alone: bool = False
    flat: bool = False
    name: str = ""
    fixed: bool = False
    architecture: str = ""

    def types(self, keys: Keys) -> tuple[str, str]:
        """Return what the part, whose keys these are, is called, and the type to read it as.

        Raises `LayoutFormError` if there is none, or of a type that vLLM does not run there.
        """
        found = self.text
        if not keys.path:
            if not self.flat or not keys.has("num_hidden_layers"):
                raise keys.wrong("text_config", None, "the config of a language model")
        elif keys.has("model_type"):
            found = keys.text("model_type")
        else:
            keys.assumed("model_type", self.text)
        if self.fixed:
            return self.name or found, self.text
        if not self.alone:
            return found, found
        if found not in (self.text, *self.as_well):
            known = ", ".join((self.text, *self.as_well))
            raise keys.wrong("model_type", found, f"one of {known}")
        return self.name or self.text, self.text


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
