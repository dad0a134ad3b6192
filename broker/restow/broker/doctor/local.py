"""Hold findings, and check this host: its limits, packages and certificates."""

from __future__ import annotations

import ctypes
import errno
import json
import os
import re
import resource
import socket
import ssl
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from enum import StrEnum
from importlib.metadata import PackageNotFoundError, version
from importlib.util import find_spec
from pathlib import Path

from restow.broker.addresses import host_and_port
from restow.broker.client.connection.channel import Credentials
from restow.broker.client.connection.errors import way_note
from restow.broker.draw.bytes_and_seconds import size_text
from restow.broker.errors import RestowError
from restow.broker.trust.errors import READ_STEP, is_readable_by_all
from restow.broker.trust.key_files import authorities_end, end_of, read_authorities, read_key_pair
from restow.broker.trust.tokens import read_secret
from restow.broker.versions import own_version


class Verdict(StrEnum):
    """The result of a check."""

    OK = "ok"
    WARN = "warn"
    """It works, but could be better, or will soon fail."""
    BAD = "bad"
    """It does not work."""


@dataclass(frozen=True, slots=True)
class Finding:
    """Hold what was checked, the result, and what to do."""

    subject: str
    verdict: Verdict
    words: str
    next_step: str = ""


def ok(subject: str, words: str) -> Finding:
    """Return a finding that needs no action."""
    return Finding(subject, Verdict.OK, words)


def warn(subject: str, words: str, next_step: str) -> Finding:
    """Return a finding that needs attention."""
    return Finding(subject, Verdict.WARN, words, next_step)


def bad(subject: str, words: str, next_step: str) -> Finding:
    """Return the finding that something does not work."""
    return Finding(subject, Verdict.BAD, words, next_step)


FEW_FILES, MANY_FILES = 1024, 4096
"""UCX opens sockets and event descriptors for each peer and transport."""
SHARED_MEMORY = Path("/dev/shm")  # noqa: S108 - where POSIX shared memory lives on Linux
SMALL_SHARED_MEMORY_BYTES = 1 << 30
"""Containers have 64 MiB unless they are given more."""


def look_at_host() -> Iterator[Finding]:
    """Check the limits of this host, and the way to the broker."""
    yield files(resource.getrlimit(resource.RLIMIT_NOFILE))
    yield locked_memory(resource.getrlimit(resource.RLIMIT_MEMLOCK)[0])
    yield shared_memory(_free_bytes(SHARED_MEMORY))
    yield look_at_process_reading()
    if note := way_note():
        yield ok("way to the broker", note)


def files(limits: tuple[int, int]) -> Finding:
    """Check the soft and the hard limit of open files."""
    soft, hard = limits
    words = f"{_limit(soft)} may be open"
    if soft != resource.RLIM_INFINITY and soft < MANY_FILES:
        step = f"`ulimit -n {hard if hard >= MANY_FILES else 65536}`, or LimitNOFILE= of the unit"
        return (bad if soft < FEW_FILES else warn)("open files", words, step)
    return ok("open files", words)


def locked_memory(soft: int) -> Finding:
    """Check how many bytes may be locked."""
    if soft == resource.RLIM_INFINITY:
        return ok("locked memory", "unlimited")
    return warn(
        "locked memory",
        f"{size_text(soft)}: RDMA registers no more pages than that",
        "`ulimit -l unlimited`, or LimitMEMLOCK=infinity; without RDMA it does not matter",
    )


def shared_memory(free_bytes: int | None) -> Finding:
    """Check the free bytes where processes of an engine share memory."""
    if free_bytes is None:
        return bad("shared memory", f"there is no {SHARED_MEMORY}", "mount a tmpfs there")
    words = f"{size_text(free_bytes)} free in {SHARED_MEMORY}"
    if free_bytes < SMALL_SHARED_MEMORY_BYTES:
        return warn(
            "shared memory",
            words,
            "regions of CPU engines lie there: in a container, --shm-size, or a Memory emptyDir",
        )
    return ok("shared memory", words)


def _limit(value: int) -> str:
    return "unlimited" if value == resource.RLIM_INFINITY else str(value)


def _free_bytes(folder: Path) -> int | None:
    try:
        statistics = os.statvfs(folder)
    except FileNotFoundError:
        return None
    return statistics.f_bavail * statistics.f_frsize


ALWAYS = ("restow", "grpcio", "protobuf", "numpy")
OF_AGENTS = ("nixl", "torch", "triton")
START_S = 60.0


def look_at_packages() -> Iterator[Finding]:
    """Show versions, and start NIXL where agents are installed."""
    versions = {name: _version(name) for name in (*ALWAYS, *OF_AGENTS)}
    versions["restow"] = own_version()
    yield ok(
        "packages",
        ", ".join(f"{name} {installed}" for name, installed in versions.items() if installed),
    )
    if any(versions[name] for name in OF_AGENTS) and find_spec("restow.agents") is not None:
        yield start_nixl()
    else:
        yield ok("NIXL", "not installed here: a broker can run here, but no agent")


def start_nixl() -> Finding:
    """Start a NIXL agent in another process, and check which UCX it loads."""
    try:
        done = subprocess.run(
            [sys.executable, "-m", "restow.agents.reading.nixl_transport"],
            capture_output=True,
            text=True,
            timeout=START_S,
            check=False,
        )
    except subprocess.TimeoutExpired:
        return bad("NIXL", f"did not start in {START_S:g} s", "is this machine overloaded?")
    if done.returncode:
        lines = (done.stderr or done.stdout).strip().splitlines() or [f"status {done.returncode}"]
        step = "install it anew, from its checkout: `pip install --force-reinstall '.[agent]'`"
        return bad("NIXL", f"does not start: {lines[-1][:1000]}", step)
    return judge_ucx(json.loads(done.stdout.splitlines()[-1]))


def judge_ucx(libraries: list[str]) -> Finding:
    """Judge the paths of the UCX libraries that a process has loaded."""
    if not libraries:
        return bad("NIXL", "started without UCX", "install nixl from its wheel")
    if len(libraries) > 1:
        return bad(
            "NIXL",
            f"{len(libraries)} UCX in one process: {', '.join(libraries)}",
            "keep other UCX out of LD_LIBRARY_PATH and LD_PRELOAD: two UCX break each other",
        )
    (path,) = libraries
    if "nixl" not in path:
        return warn(
            "NIXL",
            f"started, with a UCX that is not its own: {path}",
            "what was measured here was measured with the UCX that NIXL's wheel brings",
        )
    return ok("NIXL", f"starts, with its own UCX alone ({path.rpartition('/')[2]})")


def _version(name: str) -> str | None:
    try:
        return version(name)
    except PackageNotFoundError:
        return None


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
    """Check whether processes of one user may read each other's memory."""
    failure = try_to_read()
    if failure is None:
        return _may(_text(Path("/proc/self/ns/pid")))
    return judge_failure(failure, _text(_PTRACE_SCOPE) or "0", _text(_STATUS))


def try_to_read() -> int | None:
    """Read another process's memory; return the system's error number, or None."""
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
    """Name the causes of an error number, from what the kernel says about this process."""
    words = f"may not be read ({os.strerror(number)})"
    if number == errno.ESRCH:
        return bad(SUBJECT, f"{words}: no process could be started", "see what limits this user")
    causes = []
    if ptrace_scope.strip() != "0":
        causes.append(f"kernel.yama.ptrace_scope is {ptrace_scope.strip()}")
    if re.search(r"^Seccomp:\s*2", status, re.MULTILINE):
        causes.append("a seccomp filter is on")
    held = re.search(r"^CapEff:\s*([0-9a-f]+)", status, re.MULTILINE)
    if held is not None and not int(held[1], 16) >> SYS_PTRACE & 1:
        causes.append("there is no capability SYS_PTRACE")
    return warn(
        SUBJECT,
        f"{words}{': ' if causes else ''}{', '.join(causes)}; so UCX reads over TCP between "
        f"processes of one host",
        "`sysctl kernel.yama.ptrace_scope=1` or 0; in a container a seccomp profile that allows "
        "process_vm_readv, or the capability SYS_PTRACE",
    )


def _may(namespace: str) -> Finding:
    words = "may be read by processes of the same user (tried)"
    number = re.search(r"\d+", namespace)
    if number is not None and int(number[0]) != FIRST_NAMESPACE:
        words += ", inside this container; other containers must share its process ids"
    return ok(SUBJECT, words)


def _text(path: Path) -> str:
    """Return the content of a file or link of the kernel; empty if it is not there."""
    with suppress(OSError):
        return os.readlink(path) if path.is_symlink() else path.read_text()
    return ""


DAY_S = 86400.0
SOON_S = 7 * DAY_S
ANSWER_S = 5.0
"""How long to wait for the broker's certificate."""


def look_at_trust(credentials: Credentials) -> Iterator[Finding]:
    """Check the files of TLS and tokens."""
    if credentials.tls_ca is None:
        yield warn(
            "trust",
            "plaintext: whoever reaches the broker may do everything",
            "see docs/security.md, if others can reach the broker",
        )
        return
    try:
        read_authorities(credentials.tls_ca)
        if credentials.tls_cert is not None and credentials.tls_key is not None:
            read_key_pair(credentials.tls_cert, credentials.tls_key)
        if credentials.token_file is not None:
            read_secret(credentials.token_file)
    except RestowError as error:
        yield bad("trust", error.message, "mend the file")
        return
    yield ok("trust", f"TLS, the broker checked against {credentials.tls_ca}")
    for secret in (credentials.tls_key, credentials.token_file):
        if secret is not None and is_readable_by_all(secret):
            yield warn(f"secret {secret}", "every user of this host may read it", READ_STEP)
    for path, ends_s in _ends(credentials):
        if ends_s is not None:
            yield judge_end(str(path), ends_s, time.time())


def look_at_shown(address: str, credentials: Credentials) -> Iterator[Finding]:
    """Check how long the broker's certificate is valid; yield nothing if TLS fails.

    The calls to the broker say why TLS fails.
    """
    if credentials.tls_ca is None:
        return
    try:
        host, port = host_and_port(address)
        context = ssl.create_default_context(cafile=credentials.tls_ca)
        context.set_alpn_protocols(["h2"])
        with (
            socket.create_connection((host, port), ANSWER_S) as wire,
            context.wrap_socket(wire, server_hostname=host) as secured,
        ):
            shown = secured.getpeercert()
    except (RestowError, OSError, UnicodeError):  # a name with an empty label can't be encoded
        return
    if shown:
        ends_s = ssl.cert_time_to_seconds(str(shown["notAfter"]))
        yield judge_end("of the broker", ends_s, time.time())


def judge_end(whose: str, ends_s: float, now_s: float) -> Finding:
    """Check a certificate that is valid until ``ends_s``."""
    subject = f"certificate {whose}"
    if ends_s <= now_s:
        return bad(
            subject, "is not valid now", "issue a new certificate: the broker reads it by itself"
        )
    days = (ends_s - now_s) / DAY_S
    until = time.strftime("%Y-%m-%d %H:%M UTC", time.gmtime(ends_s))
    words = f"is valid until {until}, for {days:.0f} days"
    if ends_s - now_s < SOON_S:
        return warn(subject, words, "issue a new certificate: the broker reads it by itself")
    return ok(subject, words)


def _ends(credentials: Credentials) -> Iterator[tuple[Path, float | None]]:
    if credentials.tls_ca is not None:
        yield credentials.tls_ca, authorities_end(credentials.tls_ca)
    if credentials.tls_cert is not None and credentials.tls_key is not None:
        yield credentials.tls_cert, end_of(credentials.tls_cert, credentials.tls_key)
