"""What an engine tells of its prefix cache: values without page ids, made to be sent."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class HeldBlocks:
    """Full blocks of a group that follow each other in a chain.

    Each hash names the tokens up to the end of its block, the first of which is ``first_block`` of
    the prompt; ``parent`` names those before it (empty before the first token).
    """

    group: str
    first_block: int
    parent: bytes
    hashes: tuple[bytes, ...]


@dataclass(frozen=True, slots=True)
class HeldTail:
    """A group's block that is filled up to ``token`` only; ``hash`` names the tokens so far."""

    group: str
    token: int
    hash: bytes


@dataclass(frozen=True, slots=True)
class HeldSnapshot:
    """A group's states after exactly ``token`` tokens, which ``hash`` names."""

    group: str
    token: int
    hash: bytes


Held = HeldBlocks | HeldTail | HeldSnapshot


@dataclass(frozen=True, slots=True)
class Evicted:
    """Hashes of which a group has nothing any more, in any order."""

    group: str
    hashes: tuple[bytes, ...]


@dataclass(frozen=True, slots=True)
class HoldingsBatch:
    """What was evicted, and then what is held since the batch before it.

    Numbers rise by one. Number 1 begins anew: what was told before counts no more.
    """

    number: int
    evicted: tuple[Evicted, ...]
    held: tuple[Held, ...]
