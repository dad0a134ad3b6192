"""Longer fuzzing: Hypothesis with new examples round by round, then libFuzzer through atheris.

./run fuzz --minutes 60
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
WORK = ROOT / ".work" / "fuzz"
FACTOR = 10


def hypothesis_rounds(until_s: float) -> int:
    """Run the tests with more examples, again and again; return the first failure's exit status."""
    rounds = 0
    while time.monotonic() < until_s or not rounds:
        rounds += 1
        command = [sys.executable, "-m", "pytest", "-q", "-x", "--timeout", "3600", "tests/fuzzing"]
        status = subprocess.run(
            command, cwd=ROOT, env={**os.environ, "RESTOW_FUZZ": str(FACTOR)}, check=False
        ).returncode
        print(f"fuzz: round {rounds} of {FACTOR} times the everyday examples: {status}", flush=True)
        if status:
            return status
    return 0


def guided(seconds: int) -> int:
    """Run the atheris target; it keeps the inputs that it finds useful for the next time."""
    corpus = WORK / "corpus"
    corpus.mkdir(parents=True, exist_ok=True)
    target = ROOT / "tests" / "fuzzing" / "atheris_target.py"
    command = [
        sys.executable,
        str(target),
        str(corpus),
        f"-max_total_time={seconds}",
        "-max_len=16384",
        "-rss_limit_mb=4096",
        "-timeout=60",
        f"-artifact_prefix={WORK}/",
        "-print_final_stats=1",
    ]
    return subprocess.run(command, cwd=ROOT, check=False).returncode


def main() -> int:
    """Fuzz the broker; return 0 if nothing was found."""
    parser = argparse.ArgumentParser(
        prog="./run fuzz", description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--minutes", type=float, default=10.0, help="in all, half of each kind")
    parser.add_argument("--only", choices=["hypothesis", "atheris"], help="one kind alone")
    asked = parser.parse_args()
    seconds = 60 * asked.minutes / (1 if asked.only else 2)
    if asked.only != "atheris":
        status = hypothesis_rounds(time.monotonic() + seconds)
        if status or asked.only:
            return status
    return guided(max(1, int(seconds)))


if __name__ == "__main__":
    sys.exit(main())
