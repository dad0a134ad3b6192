"""Log through Python's logging, in the format of the program that owns the process.

Restow's programs write a line per record to stderr, for people or as JSON; stdout is for answers.
Inside an engine, the engine's own logging shows Restow's lines. Text that came from peers is always
shown with escapes.
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
"""Attribute of a record that holds the event and its values for `LineFormatter`."""
_CALLERS_FRAME = 4
"""Stack level of the caller; the frames above it belong to structlog."""
MAX_LINE = 8192


def get_logger(name: str) -> structlog.stdlib.BoundLogger:
    """Return a logger that takes an event and values, whatever structlog setup the process has."""
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
    """Return the arguments of logging's own call: text for other handlers, values for ours."""
    exc_info, event = values.pop("exc_info", None), str(values.pop("event"))
    told = {name: _plain(value) for name, value in values.items()}
    text = " ".join([shown(event), *(f"{name}={value!r}" for name, value in told.items())])
    more = {TOLD: (event, told)}
    return (text,), {"extra": more, "exc_info": exc_info, "stacklevel": _CALLERS_FRAME}


def _plain(value: object) -> Any:
    """Convert a value to a value that JSON can hold."""
    if value is None or isinstance(value, str | int | float):
        return value
    if isinstance(value, list | tuple):
        return [_plain(item) for item in value]
    return str(value)


class LineFormatter(logging.Formatter):
    """Format any record, Restow's or a library's, as a line; tracebacks add their own lines."""

    def __init__(self, as_json: bool = False, colors: bool = False) -> None:
        """Choose JSON lines for programs, or text with optional colors for people."""
        super().__init__()
        self._as_json = as_json
        self._people = structlog.dev.ConsoleRenderer(
            colors=colors,
            repr_native_str=True,
            exception_formatter=structlog.dev.plain_traceback,
        )

    def format(self, record: logging.LogRecord) -> str:
        """Format a record."""
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
    """Limit lines to a burst of ``at_once``, then ``each_s`` per second; count dropped lines."""

    def __init__(self, at_once: int, each_s: float) -> None:
        """Start with the whole burst available."""
        self.left_out = 0
        self._at_once, self._each_s = at_once, each_s
        self._left = float(at_once)
        self._at_s: float | None = None

    def take(self, now_s: float) -> int | None:
        """Return how many lines were dropped before this line; None if this line is dropped too."""
        passed_s = 0.0 if self._at_s is None else now_s - self._at_s
        self._at_s = now_s
        self._left = min(self._left + passed_s * self._each_s, self._at_once)
        if self._left < 1:
            self.left_out += 1
            return None
        self._left -= 1
        return self.forget()

    def forget(self) -> int:
        """Return the number of dropped lines and reset it."""
        before, self.left_out = self.left_out, 0
        return before


def log_to_stderr(
    as_json: bool = False, level: int = logging.INFO, stream: TextIO | None = None
) -> None:
    """Log to ``stream``, or stderr by default, and to nothing else. Programs call this function."""
    stream = stream or sys.stderr
    handler = logging.StreamHandler(stream)
    handler.setFormatter(LineFormatter(as_json, colors=stream.isatty()))
    use_handler(handler, level)


def use_handler(handler: logging.Handler, level: int) -> None:
    """Send all records to ``handler``: Restow's from ``level`` up, warnings of other libraries."""
    logging.basicConfig(handlers=[handler], level=max(level, logging.WARNING), force=True)
    logging.getLogger(ROOT).setLevel(level)
    logging.captureWarnings(True)


def log_as(name: str) -> None:
    """Format Restow's lines on stderr like those of the engine's logger ``name``.

    The engine's log level applies. Does nothing if that logger has no handlers.
    """
    theirs, ours = logging.getLogger(name), logging.getLogger(ROOT)
    if ours.handlers or not theirs.handlers:
        return
    handler = logging.StreamHandler()
    handler.setFormatter(theirs.handlers[0].formatter)
    ours.addHandler(handler)
    ours.setLevel(theirs.getEffectiveLevel())
    ours.propagate = False
