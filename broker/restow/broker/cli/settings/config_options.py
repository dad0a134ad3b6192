"""Turn options of ``restow layout from-config`` into values, and find their defaults."""

from __future__ import annotations

from pathlib import Path

import typer

from restow.broker.families import EngineSettings, ModelSpec, ScaleKind, Scales
from restow.broker.families.hf import Reading, Readings


def default_page_tokens(model: ModelSpec, readings: Readings) -> int:
    """Return how many tokens a page has without --page-tokens."""
    if not (tokens := model.page_tokens):
        return EngineSettings().page_tokens
    note = "pages of the kernels of an indexer (else: --page-tokens)"
    readings.add(Reading("page_tokens", tokens, note=note))
    return tokens


def weights_fingerprint(config: Path, readings: Readings) -> str:
    """Return a fingerprint of the weights in a folder; "" for a file, or without weights."""
    from restow.agents.engines.common.checkpoint import CheckpointInvalidError, checkpoint_revision

    try:
        revision = checkpoint_revision(config) if config.is_dir() else ""
    except CheckpointInvalidError:
        return ""
    if revision:
        readings.add(Reading("revision", revision, str(config), "a fingerprint of its weights"))
    return revision


def scales_of(kind: str | None, fingerprint: str | None, revision: str) -> Scales | None:
    """Return the scales that the options name; None if ``kind`` is None.

    Without a ``fingerprint``, the revision identifies static scales.
    """
    static = kind in ("static", "per-16")
    if (not static and fingerprint) or (static and not (fingerprint or revision)):
        raise typer.BadParameter(
            "static scales and per-16 need a fingerprint, or a revision; other scales have none",
            param_hint="--kv-scales-fingerprint",
        )
    if kind is None:
        return None
    return Scales(ScaleKind(kind), (fingerprint or revision) if static else "")


def counts_of(text: str | None) -> tuple[int, ...]:
    """Return the numbers of a list such as 12,14."""
    try:
        return tuple(int(word) for word in text.split(",")) if text else ()
    except ValueError:
        raise typer.BadParameter(
            f"{text!r} is not a list of numbers such as 12,14", param_hint="--layers-per-stage"
        ) from None
