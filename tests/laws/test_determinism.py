"""Law: equal layouts give equal digests and equal plans, in every process."""

from __future__ import annotations

import os
import subprocess
import sys

from hypothesis import given

from laws.checks import check_determinism
from laws.rounds import tried
from laws.strategies import STRATEGIES, Case, any_cases
from restow.broker.planner import Strategy

_PRINT_PROGRAMS = """
from restow.broker.families import *
from restow.broker.layout import DType, digest
from restow.broker.planner import compile_programs, make_plan
layers = tuple(
    AttentionSpec(i, 2, 8, DType.BFLOAT16) if i % 3 == 2
    else Mamba2Spec(i, 8, 4, 4, 2, 4, DType.BFLOAT16, DType.FLOAT32)
    for i in range(6)
)
p = build_layout(ModelSpec("m", layers), EngineSettings(tp=2))
d = build_layout(ModelSpec("m", layers), EngineSettings(tp=8, conv_layout=ConvLayout.DS))
plan = make_plan(p, d)
print(digest(p), digest(d))
for program in compile_programs(plan):
    print(program.program_id)
"""


@tried("determinism")
@given(any_cases(), STRATEGIES)
def test_determinism(case: Case, strategy: Strategy) -> None:
    check_determinism(case, strategy)


def test_every_process_agrees() -> None:
    printed = {
        subprocess.run(
            [sys.executable, "-c", _PRINT_PROGRAMS],
            env={**os.environ, "PYTHONHASHSEED": str(seed)},
            capture_output=True,
            check=True,
            text=True,
        ).stdout
        for seed in (1, 2, 3)
    }
    assert len(printed) == 1
