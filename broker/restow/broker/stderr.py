"""Write to stderr from a separate thread, so that no other thread waits for it.

If whoever reads stderr stalls, a direct write would block the writer, and so the broker's event
loop. C libraries (gRPC, UCX) write to stderr directly; a pipe catches these lines and logs them.
"""

from __future__ import annotations

import contextlib
import faulthandler
import fcntl
import logging
import os
import queue
import re
import select
import threading
import time
from collections.abc import Iterator

from restow.broker.logs import MAX_LINE, TOLD, Allowance, LineFormatter, use_handler

MAX_LINES = 4096
"""Lines that may wait to be written."""
FLUSH_S = 1.0
"""Longest wait of a program that exits for the reader of its stderr."""
PIPE_BYTES = 1 << 20
AT_ONCE, EACH_S = 50, 5.0
"""Limit for lines of libraries, because strangers can cause them by failed handshakes."""
QUIET_S = 5.0
STDERR = 2
GRPC = "grpc"
_LINE_OF_GRPC = re.compile(r"([IWEF])\d{4} [\d:.]+ +\d+ (\S+:\d+)\] (.*)")
_LEVELS = {"I": logging.INFO, "W": logging.WARNING, "E": logging.ERROR, "F": logging.CRITICAL}


class ThreadedHandler(logging.Handler):
    """Write lines to a file in a thread; count and later log the lines that find no room."""

    def __init__(self, file: int, formatter: logging.Formatter, max_lines: int = MAX_LINES) -> None:
        """Write to the descriptor ``file``, which stays open."""
        super().__init__()
        self.setFormatter(formatter)
        self._file = file
        self._lines: queue.Queue[str | threading.Event] = queue.Queue(max_lines)
        self._lost, self._counting = 0, threading.Lock()
        threading.Thread(target=self._write_all, name="stderr", daemon=True).start()

    def emit(self, record: logging.LogRecord) -> None:
        """Queue a record without waiting for the file."""
        try:
            self._lines.put_nowait(self.format(record))
        except queue.Full:
            with self._counting:
                self._lost += 1
        except (TypeError, ValueError):  # the library's format does not match its arguments
            self.handleError(record)

    def flush(self) -> None:
        """Wait at most `FLUSH_S` until all queued lines are written."""
        written = threading.Event()
        with contextlib.suppress(queue.Full):
            self._lines.put(written, timeout=FLUSH_S)
            written.wait(FLUSH_S)

    def _write_all(self) -> None:
        while True:
            line = self._lines.get()
            if isinstance(line, threading.Event):
                line.set()
                continue
            self._write(line)
            if self._lost and self._lines.qsize() <= self._lines.maxsize // 2:
                with self._counting:
                    lost, self._lost = self._lost, 0
                self._write(self.format(_record("lines of the log could not be written", lost)))

    def _write(self, line: str) -> None:
        left = line.encode(errors="backslashreplace") + b"\n"
        while left:
            try:
                left = left[os.write(self._file, left) :]
            except BlockingIOError:
                select.select((), (self._file,), ())
            except OSError:  # the reader has closed its end
                with self._counting:
                    self._lost += 1
                return


def _record(event: str, count: int) -> logging.LogRecord:
    told = {"name": "restow.log", "levelno": logging.WARNING, "levelname": "WARNING", "msg": event}
    return logging.makeLogRecord({**told, TOLD: (event, {"count": count})})


@contextlib.contextmanager
def logging_to_stderr(as_json: bool = False, level: int = logging.INFO) -> Iterator[None]:
    """Log to stderr inside the ``with`` block, and log what libraries write to stderr."""
    real = os.dup(STDERR)
    handler = ThreadedHandler(real, LineFormatter(as_json, os.isatty(real)))
    use_handler(handler, level)
    logging.getLogger(GRPC).setLevel(level)  # gRPC filters by its own verbosity
    # faulthandler bypasses the log: a process that dies of a signal has no time to log.
    faulthandler.enable(real)
    begin, end = os.pipe()
    with contextlib.suppress(OSError):
        fcntl.fcntl(begin, fcntl.F_SETPIPE_SZ, PIPE_BYTES)
    # A full pipe must not block its writer, which may hold the GIL that the reading thread needs.
    os.set_blocking(end, False)
    os.dup2(end, STDERR)
    os.close(end)
    reader = threading.Thread(target=_log_all, args=(begin,), name="stderr-lines", daemon=True)
    reader.start()
    try:
        yield
    finally:
        os.dup2(real, STDERR)
        reader.join(FLUSH_S)
        handler.flush()


def _log_all(file: int) -> None:
    """Log the lines from the other end of the pipe until it is closed."""
    allowance, rest = Allowance(AT_ONCE, EACH_S), b""
    while True:
        if allowance.left_out and not select.select((file,), (), (), QUIET_S)[0]:
            count = allowance.forget()
            logging.getLogger("stderr").handle(_record("lines of libraries left out", count))
            continue
        data = os.read(file, 1 << 16)
        *lines, rest = (rest + data).split(b"\n")
        if not data or len(rest) > MAX_LINE:
            lines, rest = [*lines, rest], b""
        for line in lines:
            text = line[:MAX_LINE].decode(errors="backslashreplace").rstrip()
            if text and (before := allowance.take(time.monotonic())) is not None:
                _log_line(text, before)
        if not data:
            os.close(file)
            return


def _log_line(text: str, left_out: int) -> None:
    values: dict[str, object] = {"left_out": left_out} if left_out else {}
    match = _LINE_OF_GRPC.fullmatch(text)
    if match is None:
        logging.getLogger("stderr").warning(text, extra={TOLD: (text, values)})
        return
    level, source, words = match.groups()
    told = words, {**values, "source": source}
    logging.getLogger(GRPC).log(_LEVELS[level], words, extra={TOLD: told})
