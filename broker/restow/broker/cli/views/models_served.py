"""`models_json` says which models the engines serve, and `mixed_weights` which differ in weights.

While weights are rolled out engines of two revisions are there: no handoff goes between these.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

IDENTITY = ("tenant", "model", "revision", "adapter", "quantisation")


def models_json(engines: Iterable[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return each model with the ids of its engines, from what ``restow engines`` has of them."""
    found: dict[tuple[str, ...], list[str]] = {}
    for one in engines:
        found.setdefault(tuple(one[name] for name in IDENTITY), []).append(one["engine_id"])
    return [
        {**dict(zip(IDENTITY, model, strict=True)), "engines": sorted(ids)}
        for model, ids in sorted(found.items())
    ]


def mixed_weights(models: Iterable[dict[str, Any]]) -> list[str]:
    """Return a sentence for each model whose engines have different weights."""
    by_name: dict[tuple[str, str], list[str]] = {}
    for one in models:
        words = [one["revision"] or "no revision", one["adapter"], one["quantisation"]]
        who = f"{', '.join(one['engines'])} of {' '.join(filter(None, words))}"
        by_name.setdefault((one["tenant"], one["model"]), []).append(who)
    return [
        f"{name}: {'; '.join(who)}: nothing is handed over between these"
        for (_, name), who in by_name.items()
        if len(who) > 1
    ]
