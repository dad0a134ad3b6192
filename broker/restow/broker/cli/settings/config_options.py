"""What options of ``restow layout from-config`` mean, and what they are where nobody says."""

from __future__ import annotations

from pathlib import Path

import typer

from restow.broker.families import EngineSettings, ModelSpec, ScaleKind, Scales
from restow.broker.families.hf import Reading, Readings


def default_page_tokens(model: ModelSpec, readings: Readings) -> int:
    """Return how many tokens a page has where nobody says."""
    if not (tokens := model.page_tokens):
        return EngineSettings().page_tokens
    note = "pages of the kernels of an indexer (else: --page-tokens)"
    readings.add(Reading("page_tokens", tokens, note=note))
    return tokens


def weights_fingerprint(config: Path, readings: Readings) -> str:
    """Return a word for the weights in a folder; "" where there are none, or a file was given."""
    from restow.agents.engines.common.checkpoint import CheckpointInvalidError, checkpoint_revision

    try:
        found = checkpoint_revision(config) if config.is_dir() else ""
    except CheckpointInvalidError:
        return ""
    if found:
        readings.add(Reading("revision", found, str(config), "a fingerprint of its weights"))
    return found


def scales_of(kind: str | None, fingerprint: str | None, revision: str) -> Scales | None:
    """Return the scales that two options name, or else the revision; None where nobody says."""
    static = kind in ("static", "per-16")
    if (not static and fingerprint) or (static and not (fingerprint or revision)):
        raise typer.BadParameter(
            "static scales and per-16 need a fingerprint, or a revision, and no others have one",
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
