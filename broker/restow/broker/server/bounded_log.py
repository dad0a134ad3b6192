"""The broker's log of what peers bring about: however often they do, it is read by people."""

from __future__ import annotations

import logging
from collections import OrderedDict
from collections.abc import Callable

from restow.broker.logs import Allowance, get_logger

AT_ONCE, EACH_S = 20, 1.0
"""Lines of one event and one tenant."""
MAX_KEPT = 1024
"""Allowances; who has not been heard of for longest begins anew."""
LOOK_S = 10.0


class BoundedLog:
    """Has so many lines of each event and tenant; what goes beyond is counted, and said later.

    All methods belong to one event loop.
    """

    def __init__(self, now_s: Callable[[], float]) -> None:
        """Nothing was said."""
        self._log = get_logger("restow.broker")
        self._now_s = now_s
        self._allowances: OrderedDict[tuple[str, str], Allowance] = OrderedDict()
        self._look_at_s = now_s() + LOOK_S

    def info(self, event: str, tenant: str = "", **values: object) -> None:
        """Say what belongs to the broker's day."""
        self._say(logging.INFO, event, tenant, values)

    def warning(self, event: str, tenant: str = "", **values: object) -> None:
        """Say what somebody should look at; without a ``tenant`` it is of those not known."""
        self._say(logging.WARNING, event, tenant, values)

    def tick(self, now_s: float) -> None:
        """Say what was left out, where no line has come since that could say it."""
        if now_s >= self._look_at_s:
            self._look_at_s = now_s + LOOK_S
            for (event, tenant), allowance in self._allowances.items():
                self._tell(event, tenant, allowance)

    def _say(self, level: int, event: str, tenant: str, values: dict[str, object]) -> None:
        key = event, tenant
        allowance = self._allowances.get(key)
        if allowance is None:
            allowance = self._allowances[key] = Allowance(AT_ONCE, EACH_S)
            if len(self._allowances) > MAX_KEPT:
                (old, whose), former = self._allowances.popitem(last=False)
                self._tell(old, whose, former)
        self._allowances.move_to_end(key)
        left_out = allowance.take(self._now_s())
        if left_out is None:
            return
        if tenant:
            values["tenant"] = tenant
        if left_out:
            values["left_out"] = left_out
        self._log.log(level, event, **values)

    def _tell(self, event: str, tenant: str, allowance: Allowance) -> None:
        if count := allowance.forget():
            self._log.warning("lines left out", of=event, tenant=tenant, count=count)
