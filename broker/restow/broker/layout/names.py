"""Names of fields, for people: with layers left out or drawn together."""

from __future__ import annotations

import re
from collections.abc import Sequence

_LAYER = re.compile(r"(.*\blayers)\.(\d+)\.(.+)")


def field_class(name: str) -> str:
    """A field's name without its layer.

    >>> field_class("layers.7.conv.x"), field_class("embedding")
    ('conv.x', 'embedding')
    """
    found = _LAYER.fullmatch(name)
    return found[3] if found else name


def field_layer(name: str) -> str | None:
    """A field's layer, if its name says so.

    >>> field_layer("layers.7.conv.x"), field_layer("embedding")
    ('7', None)
    """
    found = _LAYER.fullmatch(name)
    return found[2] if found else None


def joined_name(names: Sequence[str]) -> str:
    """One word for the same field of several layers.

    >>> joined_name(["layers.0.k", "layers.2.k", "layers.4.k", "layers.6.k"])
    'layers.{0,2,4..}.k'
    """
    found = [_LAYER.fullmatch(name) for name in names]
    layers = [match[2] for match in found if match]
    if len(layers) != len(names) or len(layers) == 1:
        return ", ".join(names)
    first = found[0]
    prefix = first[1] if first else ""
    shown = ",".join(layers[:3]) + (".." if len(layers) > 3 else "")
    return f"{prefix}.{{{shown}}}.{field_class(names[0])}"
