"""Where logs go: through Python's logging, in the style of whoever runs the process.

Our programs have one line for each record on stderr, whoever made it, for people or as JSON; stdout
stays for answers. Inside of an engine its own logging shows our lines. What peers said is shown
with escapes everywhere.
"""

from __future__ import annotations

import json
import logging
import sys
from datetime import UTC, datetime
from typing import Any, TextIO

import structlog

from restow.broker.printable import shown

ROOT = "restow"
TOLD = "told"
"""The attribute of a record that has event and values, for our own form of a line."""
_CALLERS_FRAME = 4
"""Above are those of structlog."""
MAX_LINE = 8192


def get_logger(name: str) -> structlog.stdlib.BoundLogger:
    """A logger that takes an event and values, whatever the process has set up of structlog."""
    logger: structlog.stdlib.BoundLogger = structlog.wrap_logger(
        logging.getLogger(name),
        processors=[structlog.stdlib.filter_by_level, _as_record],
        wrapper_class=structlog.stdlib.BoundLogger,
        context_class=dict,
    )
    return logger


def _as_record(
    logger: Any, method: str, values: structlog.typing.EventDict
) -> tuple[tuple[str], dict[str, Any]]:
    """The arguments of logging's own call: a text for handlers of others, what it says for ours."""
    exc_info, event = values.pop("exc_info", None), str(values.pop("event"))
    told = {name: _plain(value) for name, value in values.items()}
    text = " ".join([shown(event), *(f"{name}={value!r}" for name, value in told.items())])
    more = {TOLD: (event, told)}
    return (text,), {"extra": more, "exc_info": exc_info, "stacklevel": _CALLERS_FRAME}


def _plain(value: object) -> Any:
    """As JSON has it."""
    if value is None or isinstance(value, str | int | float):
        return value
    if isinstance(value, list | tuple):
        return [_plain(one) for one in value]
    return str(value)


class LineFormatter(logging.Formatter):
    """Makes one line of a record (an exception adds its own), of ours and of others' alike."""

    def __init__(self, as_json: bool = False, colors: bool = False) -> None:
        """For programs, or for people."""
        super().__init__()
        self._as_json = as_json
        self._people = structlog.dev.ConsoleRenderer(
            colors=colors,
            repr_native_str=True,
            exception_formatter=structlog.dev.plain_traceback,
        )

    def format(self, record: logging.LogRecord) -> str:
        """Show a record."""
        told: tuple[str, dict[str, Any]] | None = getattr(record, TOLD, None)
        event, values = told or (record.getMessage()[:MAX_LINE], {})
        at = datetime.fromtimestamp(record.created, UTC)
        line: dict[str, Any] = {
            **values,
            "timestamp": at.isoformat().replace("+00:00", "Z"),
            "level": record.levelname.lower(),
            "logger": record.name,
        }
        if record.exc_info and record.exc_info[0] is not None:
            line["exception"] = self.formatException(record.exc_info)
        if self._as_json:
            return json.dumps({"event": event, **line})
        trace = line.pop("exception", "")
        text = str(self._people(None, "", {"event": shown(event), **line}))[:MAX_LINE]
        return "\n".join([text, *map(shown, trace.splitlines())])


class Allowance:
    """So many lines at once, and so many a second: what goes beyond is counted."""

    def __init__(self, at_once: int, each_s: float) -> None:
        """Begin with all that may come at once."""
        self.left_out = 0
        self._at_once, self._each_s = at_once, each_s
        self._left = float(at_once)
        self._at_s: float | None = None

    def take(self, now_s: float) -> int | None:
        """How many were left out before this one; None: it is left out, too."""
        passed_s = 0.0 if self._at_s is None else now_s - self._at_s
        self._at_s = now_s
        self._left = min(self._left + passed_s * self._each_s, self._at_once)
        if self._left < 1:
            self.left_out += 1
            return None
        self._left -= 1
        return self.forget()

    def forget(self) -> int:
        """How many were left out, which has been said then."""
        before, self.left_out = self.left_out, 0
        return before


def log_to_stderr(
    as_json: bool = False, level: int = logging.INFO, stream: TextIO | None = None
) -> None:
    """Have this process log to stderr alone, or to a stream; programs call it."""
    stream = stream or sys.stderr
    handler = logging.StreamHandler(stream)
    handler.setFormatter(LineFormatter(as_json, colors=stream.isatty()))
    use_handler(handler, level)


def use_handler(handler: logging.Handler, level: int) -> None:
    """Have one handler show all: ours from a level on, of others what they warn of."""
    logging.basicConfig(handlers=[handler], level=max(level, logging.WARNING), force=True)
    logging.getLogger(ROOT).setLevel(level)
    logging.captureWarnings(True)


def log_as(name: str) -> None:
    """Have our lines look as those of another logger, the engine's, on stderr.

    The engine's level counts; where it has no handlers there is nothing to follow.
    """
    theirs, ours = logging.getLogger(name), logging.getLogger(ROOT)
    if ours.handlers or not theirs.handlers:
        return
    handler = logging.StreamHandler()
    handler.setFormatter(theirs.handlers[0].formatter)
    ours.addHandler(handler)
    ours.setLevel(theirs.getEffectiveLevel())
    ours.propagate = False
