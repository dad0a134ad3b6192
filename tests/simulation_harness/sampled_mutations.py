"""Promises about the token that P samples, taken out of the code."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from unittest.mock import patch

from restow.broker.core.engines.engine import EngineRecord
from restow.broker.core.handoffs.demand import Demand
from restow.broker.core.handoffs.handoff import Handoff
from restow.broker.core.handoffs.publication import Publication
from simulation_harness.history import History


@contextlib.contextmanager
def of_any_content(history: History) -> Iterator[None]:
    """Tell D the token that P sampled behind another prompt."""

    def fits(self: Demand, handoff_id: str, published: Publication) -> bool:
        return self.takes_sampled and published.sampled_token is not None

    with patch.object(Demand, "fits_sampled", fits):
        yield


@contextlib.contextmanager
def told_once(history: History) -> Iterator[None]:
    """Do not tell the token to a D again whose stream broke."""
    add = Handoff.add_demand_message

    def keep(self: Handoff, engine: EngineRecord, number: int) -> None:
        told = self.sampled_told
        add(self, engine, number)
        self.sampled_told = told

    with patch.object(Handoff, "add_demand_message", keep):
        yield


SAMPLED = {"sampled of any": of_any_content, "sampled once": told_once}
