"""A small disk of its own, that a test fills, takes the room of, and pulls out. It takes root."""

from __future__ import annotations

import contextlib
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest


class Disk:
    """A file system in memory, mounted at a folder."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._filler = folder / "another program's"

    def fill(self) -> None:
        """Fill the disk, as another program does that has files there."""
        with self._filler.open("ab", buffering=0) as file, contextlib.suppress(OSError):
            while True:
                file.write(bytes(4096))

    def empty(self) -> None:
        """Give the room back that `fill` took."""
        self._filler.unlink()

    def make_read_only(self) -> None:
        """Make the disk read-only. No file of the disk may be open for writing."""
        _run("mount", "-o", "remount,ro", f"{self.folder}")

    def pull_out(self) -> None:
        """Unmount the disk and remove its folder; open files stay open."""
        _run("umount", "--lazy", f"{self.folder}")
        self.folder.rmdir()


@contextmanager
def mounted_or_skipped(folder: Path, size_bytes: int) -> Iterator[Disk]:
    """Mount a disk of ``size_bytes``; skip the test where this user may not mount."""
    folder.mkdir(exist_ok=True)
    try:
        _run("mount", "-t", "tmpfs", "-o", f"size={size_bytes}", "restow-test", f"{folder}")
    except PermissionError as error:
        pytest.skip(f"no disk can be mounted: {error}")
    try:
        yield Disk(folder)
    finally:
        if folder.is_mount():
            _run("umount", "--lazy", f"{folder}")


def _run(*command: str) -> None:
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        raise PermissionError(done.stderr.strip())
