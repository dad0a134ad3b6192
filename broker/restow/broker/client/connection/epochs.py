"""Epochs: what a broker says that does not own the pool any more is not taken."""

from __future__ import annotations

from restow.broker.errors import RestowError


class EpochOverError(RestowError, status="UNAVAILABLE", reason="EPOCH_OVER"):
    """A broker speaks in an epoch of the pool that is over: another one owns it."""


class Epochs:
    """The highest epoch that was heard of, in the fleet that was heard last."""

    def __init__(self) -> None:
        """Nothing was heard."""
        self._fleet = ""
        self._highest = 0

    def opened(self, fleet: str) -> None:
        """A stream to a broker of ``fleet`` begins: epochs of two fleets are not compared."""
        if fleet != self._fleet:
            self._fleet, self._highest = fleet, 0

    def take(self, epoch: int) -> None:
        """Take what is said in ``epoch``. Raises `EpochOverError`."""
        if epoch == self._highest:
            return
        if epoch < self._highest:
            raise EpochOverError(
                f"the broker speaks in epoch {epoch}, and the pool is in epoch {self._highest}: "
                f"it was stopped or cut off, and another one owns the pool",
                epoch=epoch,
                highest=self._highest,
            )
        self._highest = epoch
