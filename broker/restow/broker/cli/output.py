"""Commands print JSON for scripts on stdout, and errors as JSON too or as a line on stderr."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from typing import Any

from restow.broker.errors import RestowError
from restow.broker.printable import shown_values

FOUND = 4
"""Exit status of a command that looked for something bad or different, and found it."""


def print_json(value: Any) -> None:
    """Print one JSON value."""
    sys.stdout.write(json.dumps(value, indent=1) + "\n")


def answer(value: Any, as_json: bool, show: Callable[[Any], None]) -> None:
    """Print what a command found: as JSON, or as ``show`` does for people, with escapes."""
    if as_json:
        print_json(value)
    else:
        show(shown_values(value))


def print_error(error: RestowError, as_json: bool) -> None:
    """Print an error as one line, or as a JSON object on stdout."""
    if as_json:
        print_json(
            {
                "error": {
                    "status": error.status,
                    "reason": error.reason,
                    "message": error.message,
                    "subject": error.subject,
                }
            }
        )
        return
    line = " ".join(f"{error.reason}: {error.message}".split())
    red, plain = ("\x1b[31m", "\x1b[0m") if sys.stderr.isatty() else ("", "")
    sys.stderr.write(f"{red}error{plain}: {line}\n")
