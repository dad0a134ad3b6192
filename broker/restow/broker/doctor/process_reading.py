"""Whether one process may read another's memory on this host, as UCX's CMA and our agents do.

It is tried, for many things may forbid it, and none says so by itself.
"""

from __future__ import annotations

import ctypes
import errno
import os
import re
import subprocess
import sys
from contextlib import suppress
from pathlib import Path

from restow.broker.doctor.finding import Finding, bad, ok, warn

SUBJECT = "other processes' memory"
MARK = b"restow doctor\0"
OWNER = f"""
import ctypes, sys
mark = ctypes.create_string_buffer({MARK!r})
ctypes.CDLL(None).prctl(0x59616d61, ctypes.c_ulong(-1), 0, 0, 0)  # as UCX lets others read it
print(ctypes.addressof(mark), flush=True)
sys.stdin.read()
"""
FIRST_NAMESPACE = 0xEFFFFFFC
"""The number of the host's own process ids (PROC_PID_INIT_INO)."""
SYS_PTRACE = 19
_PTRACE_SCOPE = Path("/proc/sys/kernel/yama/ptrace_scope")
_STATUS = Path("/proc/self/status")


class _Piece(ctypes.Structure):
    """A `struct iovec`."""

    _fields_ = (("address", ctypes.c_void_p), ("length_bytes", ctypes.c_size_t))


def look_at_process_reading() -> Finding:
    """Try, and say why not."""
    failure = try_to_read()
    if failure is None:
        return _may(_text(Path("/proc/self/ns/pid")))
    return judge_failure(failure, _text(_PTRACE_SCOPE) or "0", _text(_STATUS))


def try_to_read() -> int | None:
    """Read the memory of another process of this user; the system's number of an error, or None."""
    command = [sys.executable, "-Ic", OWNER]
    with subprocess.Popen(  # noqa: S603 - a program of ours
        command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as owner:
        if owner.stdout is None or not (address := owner.stdout.readline().strip()):
            return errno.ESRCH
        seen = ctypes.create_string_buffer(len(MARK))
        here = _Piece(ctypes.addressof(seen), len(MARK))
        there = _Piece(int(address), len(MARK))
        library = ctypes.CDLL(None, use_errno=True)
        read = library.process_vm_readv
        read.restype = ctypes.c_ssize_t
        got = read(
            owner.pid,
            ctypes.byref(here),
            ctypes.c_ulong(1),
            ctypes.byref(there),
            ctypes.c_ulong(1),
            ctypes.c_ulong(0),
        )
        number = ctypes.get_errno()
        owner.communicate()
    if got == len(MARK) and seen.raw == MARK:
        return None
    return number if got < 0 else errno.EIO


def judge_failure(number: int, ptrace_scope: str, status: str) -> Finding:
    """Given the error, and what the kernel says of this process."""
    words = f"may not be read ({os.strerror(number)})"
    if number == errno.ESRCH:
        return bad(SUBJECT, f"{words}: no process could be started", "see what limits this user")
    found = []
    if ptrace_scope.strip() != "0":
        found.append(f"kernel.yama.ptrace_scope is {ptrace_scope.strip()}")
    if re.search(r"^Seccomp:\s*2", status, re.MULTILINE):
        found.append("a seccomp filter is on")
    held = re.search(r"^CapEff:\s*([0-9a-f]+)", status, re.MULTILINE)
    if held is not None and not int(held[1], 16) >> SYS_PTRACE & 1:
        found.append("there is no capability SYS_PTRACE")
    return warn(
        SUBJECT,
        f"{words}{': ' if found else ''}{', '.join(found)}; so UCX reads over TCP between "
        f"processes of one host",
        "`sysctl kernel.yama.ptrace_scope=1` or 0; in a container a seccomp profile that allows "
        "process_vm_readv, or the capability SYS_PTRACE",
    )


def _may(namespace: str) -> Finding:
    words = "may be read by processes of the same user (tried)"
    number = re.search(r"\d+", namespace)
    if number is not None and int(number[0]) != FIRST_NAMESPACE:
        words += ", inside this container: with others only where they share its process ids"
    return ok(SUBJECT, words)


def _text(path: Path) -> str:
    """What a file or a link of the kernel's says; nothing where there is none."""
    with suppress(OSError):
        return os.readlink(path) if path.is_symlink() else path.read_text()
    return ""
