"""Where logs go: stderr, so that stdout stays for answers."""

from __future__ import annotations

import logging
import sys

import structlog


def log_to_stderr(as_json: bool = False, level: int = logging.INFO) -> None:
    """Set structlog up for this process, for people or as JSON lines; programs call it."""
    renderer = (
        structlog.processors.JSONRenderer()
        if as_json
        else structlog.dev.ConsoleRenderer(colors=sys.stderr.isatty())
    )
    structlog.configure(
        processors=[
            structlog.contextvars.merge_contextvars,
            structlog.processors.add_log_level,
            structlog.processors.TimeStamper(fmt="iso", utc=True),
            structlog.processors.format_exc_info,
            renderer,
        ],
        wrapper_class=structlog.make_filtering_bound_logger(level),
        logger_factory=structlog.PrintLoggerFactory(sys.stderr),
    )
