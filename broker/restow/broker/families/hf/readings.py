"""`Readings` collects what was taken from a config, and what was assumed, for people to see."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field

CONFIG = "config.json"
QUANT_CONFIG = "hf_quant_config.json"
"""ModelOpt's, beside the former."""


@dataclass(frozen=True, slots=True)
class Reading:
    """Says which value a key has, in which file; no file: it was assumed.

    ``note`` says why it was assumed, or what was made of it if not what it says.
    """

    key: str
    value: object
    file: str = ""
    note: str = ""


@dataclass(slots=True)
class Readings:
    """Collects the readings of a config, in the order of the first of each key."""

    _by_key: dict[str, Reading] = field(default_factory=dict)

    def add(self, reading: Reading) -> None:
        """Keep what was read of a key; what a file says is kept before what was assumed."""
        known = self._by_key.get(reading.key)
        if known is None or (reading.file and (reading.note or not known.file)):
            self._by_key[reading.key] = reading

    def __iter__(self) -> Iterator[Reading]:
        """Iterate over what was read."""
        return iter(self._by_key.values())
