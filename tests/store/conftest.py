"""A broker with engines, for all tests of a file."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack

import pytest
import torch

from restow.broker.planner import Strategy
from restow.demo.experiment import running_broker_process
from restow.demo.recall.model import load_model
from restow.demo.transformers.rank_processes import ForkServer
from store.engine_house import House


@pytest.fixture(scope="module")
def whole_house() -> Iterator[House]:
    torch.set_num_threads(1)
    with ExitStack() as stack:
        # However busy the machine is: what P holds meanwhile it computes first.
        stack.enter_context(pytest.MonkeyPatch.context()).setenv("RESTOW_OFFER_S", "60")
        broker = stack.enter_context(running_broker_process(Strategy.AUTO))
        forks = stack.enter_context(ForkServer())
        yield House(load_model(), broker, forks, stack, {})


@pytest.fixture
def house(whole_house: House) -> Iterator[House]:
    """Yield the house, and empty its engines after each test."""
    yield whole_house
    for engine in whole_house.engines.values():
        engine.silent = False
        engine.evict_all()
        engine.offers.clear()
