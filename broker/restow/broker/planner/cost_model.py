"""What the ways of travelling cost, in seconds: by default, as measured, or as an operator says."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields, replace

from restow.broker.errors import CostsInvalidError


@dataclass(frozen=True, slots=True)
class CopyCosts:
    """What GATHER or SCATTER costs on one host.

    ``seconds_per_launch`` each however little they copy, ``seconds_per_copy`` for each piece and
    ``seconds_per_element`` for each element that lies apart from the next one; bytes are copied at
    ``copy_bytes_per_second``.
    """

    seconds_per_launch: float
    seconds_per_copy: float
    seconds_per_element: float
    copy_bytes_per_second: float


@dataclass(frozen=True, slots=True)
class ReadCosts:
    """What READ costs between two hosts.

    ``seconds_per_descriptor`` above its bytes, which travel at ``read_bytes_per_second``.
    """

    seconds_per_descriptor: float
    read_bytes_per_second: float


@dataclass(frozen=True, slots=True)
class CostModel:
    """What the ways cost between two hosts.

    See `CopyCosts` and `ReadCosts`; asking a source to gather costs ``seconds_per_stage`` besides.
    Rebuilding conv windows costs a launch, and reading their weights ``seconds_per_weight_byte``,
    which nobody measures. Costs are compared for prompts of ``nominal_tokens``. The defaults were
    fitted on CMA between two processes of one host (docs/benchmarks.md), and copies are as
    measuring finds them.
    """

    seconds_per_descriptor: float = 3.3e-6
    read_bytes_per_second: float = 6.0e9
    copy_bytes_per_second: float = 5.4e9
    seconds_per_launch: float = 0.5e-3
    seconds_per_copy: float = 0.28e-6
    seconds_per_element: float = 2.8e-9
    seconds_per_stage: float = 0.5e-3
    seconds_per_weight_byte: float = 2e-10
    nominal_tokens: int = 4096

    @property
    def gap_bytes(self) -> int:
        """So many bytes that nobody needs cost as much to read as one descriptor more."""
        return int(self.seconds_per_descriptor * self.read_bytes_per_second)

    @classmethod
    def measured(
        cls, source: CopyCosts, destination: CopyCosts, reading: ReadCosts, stage_s: float
    ) -> CostModel:
        """Between two hosts; copies cost what they do on the slower one."""
        return replace(
            cls(),
            seconds_per_stage=stage_s,
            copy_bytes_per_second=min(
                source.copy_bytes_per_second, destination.copy_bytes_per_second
            ),
            **asdict(reading),
            **{
                name: max(getattr(source, name), getattr(destination, name))
                for name in ("seconds_per_launch", "seconds_per_copy", "seconds_per_element")
            },
        ).checked()

    @classmethod
    def of(cls, values: Mapping[str, object]) -> CostModel:
        """The defaults with some values replaced. Raises `CostsInvalidError`."""
        known = {field.name for field in fields(cls)}
        for name, value in values.items():
            if name not in known:
                raise CostsInvalidError(
                    f"{name!r} is no cost; known are {', '.join(sorted(known))}", cost=name
                )
            if isinstance(value, bool) or not isinstance(value, int | float):
                raise CostsInvalidError(f"{name} is {value!r}, not a number", cost=name)
        made = replace(cls(), **values).checked()  # type: ignore[arg-type]
        return replace(made, nominal_tokens=int(made.nominal_tokens))

    def checked(self) -> CostModel:
        """The model itself. Raises `CostsInvalidError` for a value that can't be."""
        for name, value in asdict(self).items():
            least, most = _BOUNDS[name.partition("_per_")[0]]
            if not (math.isfinite(value) and least <= value <= most):
                raise CostsInvalidError(
                    f"{name} is {value}; it must be {least:g} to {most:g}", cost=name
                )
        return self


_BOUNDS = {
    "seconds": (0.0, 10.0),
    "read_bytes": (1.0, 1e15),
    "copy_bytes": (1.0, 1e15),
    "nominal_tokens": (1, 1 << 24),
}
