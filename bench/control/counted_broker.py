"""A broker that counts the calls of its own Python functions from `BEGIN` to `END`.

Run as a module with the path of a file, to which it then writes the counts by function as JSON, and
with the arguments of `restow`.
"""

from __future__ import annotations

import json
import signal
import sys
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from types import CodeType, FrameType

from restow.broker.cli import main as command_line

BEGIN, END = signal.SIGUSR1, signal.SIGUSR2
BROKER = Path(command_line.__file__).parents[1]


def run(file: Path, arguments: Sequence[str]) -> None:
    """Run `restow` with the arguments, and count."""
    counts: Counter[CodeType] = Counter()

    def see(frame: FrameType, event: str, _: object) -> None:
        if event == "call":
            counts[frame.f_code] += 1

    def begin(*_: object) -> None:
        counts.clear()
        sys.setprofile(see)

    def end(*_: object) -> None:
        sys.setprofile(None)
        named = {
            f"{Path(code.co_filename).relative_to(BROKER)}:{code.co_qualname}": count
            for code, count in counts.items()
            if Path(code.co_filename).is_relative_to(BROKER)
        }
        written = file.with_suffix(".new")
        written.write_text(json.dumps(named))
        written.rename(file)

    signal.signal(BEGIN, begin)
    signal.signal(END, end)
    command_line.main(arguments)


if __name__ == "__main__":
    run(Path(sys.argv[1]), sys.argv[2:])
