"""The examples of docs/client.md: each prints what its comments say."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from cli.broker_process import broker_process

PAGE = Path(__file__).resolve().parents[2] / "docs" / "client.md"
EXAMPLES = re.findall(r"^```python\n(.*?)^```$", PAGE.read_text(), re.DOTALL | re.MULTILINE)


def test_there_are_examples() -> None:
    assert len(EXAMPLES) == 8


@pytest.mark.parametrize("number", range(8))
def test_an_example_prints_what_it_says(number: int) -> None:
    expected = re.findall(r"print\(.*\)  # (.+)$", EXAMPLES[number], re.MULTILINE)
    with broker_process() as address:
        done = subprocess.run(
            [sys.executable, "-c", EXAMPLES[number]],
            env={**os.environ, "RESTOW_BROKER": address},
            capture_output=True,
            text=True,
            timeout=60,
            check=False,
        )
    assert done.returncode == 0, done.stderr
    assert expected
    assert done.stdout.splitlines() == expected
