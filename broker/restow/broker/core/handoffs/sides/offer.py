"""An offer: a demand by prefix on its way through the engines that say that they hold it."""

from __future__ import annotations

from dataclasses import dataclass, field

from restow.broker.core.actions import EngineKey


@dataclass(slots=True, eq=False)
class Offer:
    """What operators see of it too, also after the end."""

    tokens: int
    """Of the prefix that is asked for."""
    revision: str = ""
    """Of the weights that computed it."""
    left: list[EngineKey] = field(default_factory=list)
    """To whom it was not offered yet; the best is the last."""
    engine: EngineKey | None = None
    """Who has it now."""
    until_s: float = 0.0
    """When it goes to the next."""
    made: int = 0
    declined: int = 0

    def close(self) -> None:
        """Be offered to nobody any more."""
        self.left, self.engine = [], None
