"""What stands in place of the real clock, chance, network and NIXL while a history is played."""

from __future__ import annotations

import contextlib
import logging
import random
import secrets
import time
import uuid
from collections.abc import Iterator
from functools import cache, partial
from random import Random
from unittest.mock import patch

from restow.agents.execute.executor import Executor
from restow.agents.reading import lane as ticker
from restow.agents.reading import reader
from restow.agents.reading.reader import Reader
from restow.broker.client.connection.brokers import Backoff
from restow.broker.layout import Layout
from restow.broker.server.base import hub as hubs
from restow.broker.server.base import one_of_several, planning
from restow.broker.server.services.checked_messages import CheckedLayouts
from restow.v1 import layout_pb2
from simulation_harness.fabric import Fabric
from simulation_harness.network import Network


class _KeptLayouts(CheckedLayouts):
    """Layouts that are kept though no engine has them."""

    def __init__(self) -> None:
        super().__init__()
        self._kept: dict[str, Layout] = {}

    def of(self, message: layout_pb2.Layout) -> tuple[Layout, str]:
        layout, digest = super().of(message)
        return self._kept.setdefault(digest, layout), digest


plan_once = cache(planning.plan_pair)
"""Plans are pure: the same for every history."""
checked_once = _KeptLayouts()
"""So are a layout's checks."""


@contextlib.contextmanager
def simulated(seed: int, chance: Random, network: Network, fabric: Fabric) -> Iterator[None]:
    """Put the simulated clock, chance, network and NIXL in place of the real ones."""
    rng = Random(chance.random())  # noqa: S311
    clock, state = network.loop.time, random.getstate()
    random.seed(seed)
    log = logging.getLogger("restow")
    level = log.level
    log.setLevel(logging.CRITICAL)
    with contextlib.ExitStack() as stack:
        for target, name, value in (
            (time, "monotonic", clock),
            (time, "clock_gettime", network.own_time),
            (secrets, "token_hex", lambda n=8: f"{rng.getrandbits(8 * n):0{2 * n}x}"),
            (secrets, "randbits", rng.getrandbits),
            (uuid, "uuid4", lambda: uuid.UUID(int=rng.getrandbits(128))),
            (reader, "SPIN_S", 0.0),
            (reader, "POLL_S", 0.05),
            (hubs, "TICK_S", 0.25),
            (one_of_several, "TICK_S", 0.25),
            (hubs, "plan_pair", plan_once),
            (ticker.Ticker, "_plan", lambda self: None),
        ):
            stack.enter_context(patch.object(target, name, value))
        for where, stand_in in (
            ("restow.broker.client.connection.channel.open_channel", network.open_channel),
            # Histories are played in forked processes, and nothing of gRPC's is used there.
            ("restow.broker.client.connection.channel.OWN_PROCESS.check", lambda: None),
            ("restow.agents.link.transports.NixlTransport", fabric.transport),
            ("restow.broker.server.services.broker_service.CheckedLayouts", lambda: checked_once),
            # Their clocks are defaults, which were taken from `time` when it was imported.
            ("restow.agents.link.async_agent.Reader", partial(Reader, clock=clock)),
            ("restow.agents.link.async_agent.Executor", partial(Executor, clock=clock)),
            ("restow.broker.client.connection.kept_stream.Backoff", partial(Backoff, clock=clock)),
        ):
            stack.enter_context(patch(where, stand_in))
        try:
            yield
        finally:
            random.setstate(state)
            log.setLevel(level)
