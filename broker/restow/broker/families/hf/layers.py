"""`layers_by_kind` says what each layer of a model keeps."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace

from restow.broker.families.hf.keys import Keys
from restow.broker.families.hf.nested import Whole
from restow.broker.families.hf.types import Types
from restow.broker.families.recurrent import RecurrentSpec
from restow.broker.families.specs import AttentionSpec, LayerSpec, MlaSpec

Layers = list[tuple[LayerSpec, ...]]
"""What each layer of a model keeps, those that keep nothing included."""
Reader = Callable[[Keys, Types], Layers]
ModelTable = dict[str, Reader]
"""What reads the config of a language model, by its ``model_type``."""
WholeTable = dict[str, Whole]
"""What is known of models with a language model among their parts, by their ``model_type``."""


def layers_by_kind(
    keys: Keys,
    kinds: Sequence[str],
    attention: AttentionSpec | MlaSpec | None,
    recurrent: RecurrentSpec | None,
    sliding: AttentionSpec | None = None,
) -> Layers:
    """Return what layers keep, by their kinds. Raises `LayoutFormError` for one the model lacks."""
    by_kind: dict[str, tuple[LayerSpec | None, ...]] = {
        "attention": (attention,),
        "recurrent": (recurrent,),
        "both": (attention, recurrent),
        "sliding": (sliding,),
        "none": (),
    }
    layers: Layers = []
    for index, kind in enumerate(kinds):
        specs: list[LayerSpec] = []
        for spec in by_kind[kind]:
            if spec is None:
                said = f": layer {index}: this model type has no layers of that kind ({kind})"
                raise keys.fault("layer_types", said)
            specs.append(replace(spec, layer=index))
        layers.append(tuple(specs))
    return layers
