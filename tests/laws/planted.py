"""Faults that are planted in the product, so that a law must find them."""

from __future__ import annotations

import pkgutil
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import pytest
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st

from laws.checks import check_cover, check_digests, check_minimality
from laws.strategies import Case, any_cases, family_cases
from restow.broker.planner import Strategy

SLICES, WHOLE, PACK = Strategy.SLICES, Strategy.WHOLE, Strategy.PACK
INTERLEAVE = Strategy.INTERLEAVE
BINDING, EXECUTE = "restow.agents.binding", "restow.agents.execute"
PLANNER = "restow.broker.planner"
TAKEN_PLANS = "laws.transfers.make_plan"

Law = Callable[[Case], object]
Change = Callable[..., Any]


def minimality(strategy: Strategy) -> Law:
    return partial(check_minimality, strategy=strategy)


def digests(strategy: Strategy) -> Law:
    return partial(check_digests, strategy=strategy)


def in_one_pipeline() -> st.SearchStrategy[Case]:
    return family_cases(pipelines=False)


@dataclass(frozen=True, slots=True)
class Fault:
    """A fault: ``change`` takes the place of what lies at ``places``, and ``law`` must break."""

    places: tuple[str, ...]
    change: Change
    law: Law
    cases: Callable[[], st.SearchStrategy[Case]]
    tries: int
    by: tuple[type[Exception], ...]

    def plant(self, monkeypatch: pytest.MonkeyPatch) -> None:
        """Put the change in place."""
        for place in self.places:
            owner, _, name = place.rpartition(".")
            right = pkgutil.resolve_name(place)
            wrong = self._instead_of(right) if callable(right) else self.change(right)
            monkeypatch.setattr(pkgutil.resolve_name(owner), name, wrong)

    def _instead_of(self, right: Any) -> Any:
        # A class binds a function to its instances, and would not bind a partial.
        return lambda *args: self.change(right, *args)

    def find(self) -> None:
        """Try the law until it breaks with one of the errors that may show the fault."""

        @settings(
            max_examples=self.tries,
            derandomize=True,
            database=None,
            phases=[Phase.generate],
            report_multiple_bugs=False,
            suppress_health_check=list(HealthCheck),
        )
        @given(self.cases())
        def tried(case: Case) -> None:
            self.law(case)

        with pytest.raises(self.by):
            tried()


class Faults:
    """The faults of a file, for `pytest.mark.parametrize`."""

    def __init__(self) -> None:
        self.params: list[Any] = []

    def planted(
        self,
        *places: str,
        laws: Sequence[Law | Strategy],
        cases: Callable[[], st.SearchStrategy[Case]] = any_cases,
        tries: int = 400,
        by: tuple[type[Exception], ...] = (AssertionError,),
        each: Sequence[Any] = (),
    ) -> Callable[[Change], Change]:
        """Register a fault, once for each law; a strategy stands for `check_cover` by it.

        The change gets what is right first, and then the arguments of the call. With ``each``, the
        fault has as many variants, and the change gets the variant before all else.
        """

        def register(change: Change) -> Change:
            variants: list[tuple[str, Change]]
            variants = [(f"-{one}", partial(change, one)) for one in each]
            for name, variant in variants or [("", change)]:
                for law in laws:
                    fault = Fault(places, variant, _law(law), cases, tries, by)
                    told = f"{change.__name__}{name}-{_law_name(fault.law)}"
                    self.params.append(pytest.param(fault, id=told))
            return change

        return register


def _law(law: Law | Strategy) -> Law:
    return partial(check_cover, strategy=law) if isinstance(law, Strategy) else law


def _law_name(law: Law) -> str:
    """Return the name of a law's function, and the strategy that it is asked with."""
    if isinstance(law, partial):
        return f"{getattr(law.func, '__name__', law)}-{law.keywords['strategy']}"
    return str(getattr(law, "__name__", law))
