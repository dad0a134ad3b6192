"""The lives of engines and of the broker, as processes of a cluster."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import signal
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from chaos_harness.engine import Life, Said, serve_rank, serve_scheduler
from chaos_harness.model import layout
from chaos_harness.process import Child, Member
from forked.server import pipe
from restow.broker.families import ConvLayout
from restow.broker.layout.json_form import layout_to_json
from stamped.memory import memory_bytes

STOP_S = 30.0
RESTOW = (sys.executable, "-m", "restow.broker.cli.main")
STORE, STORE_PAGE_TOKENS = "S", 8
STORE_SIZES = ("--memory", "16MiB", "--disk-size", "64MiB")
"""Room for about ten states, and for forty."""


class EngineLife:
    """The processes of one life of an engine."""

    def __init__(self, life: Life, hear: Callable[[EngineLife, Said], None]) -> None:
        """Start the scheduler and the workers; ``hear`` gets what they say."""
        self.life, self._hear = life, hear
        self.pending: dict[str, float] = {}
        """Handoffs that the scheduler has not yet told the end of, and since when."""
        self.connected = False
        self.crashed = False
        """Whether one of them has ended by itself."""
        self.free_staging: dict[str, tuple[int, int]] = {}
        self.reported: tuple[tuple[str, ...], bool] | None = None
        with open(life.memory, "wb") as file:
            file.truncate(memory_bytes(life.layout, life.page_counts))
        self.workers: list[Child] = []
        ends = []
        for rank in life.layout.ranks:
            ours, theirs = pipe()
            ends.append(ours)
            name = f"{life.side}.{rank.rank}"
            self.workers.append(Child(name, serve_rank, theirs, life, rank.rank))
            theirs.close()
        self.scheduler = Child(f"{life.side}.scheduler", serve_scheduler, ends, life)
        for end in ends:
            end.close()
        for child in self.members:
            self._listen(child)

    @property
    def members(self) -> list[Child]:
        return [self.scheduler, *self.workers]

    @property
    def answered(self) -> bool:
        """Return whether the scheduler and all workers have answered since they were asked."""
        return self.reported is not None and len(self.free_staging) == len(self.workers)

    @property
    def alive(self) -> bool:
        return self.scheduler.alive

    def kill(self) -> None:
        """Kill all processes of the engine. What it knew is lost, what it has said is not."""
        for child in self.members:
            child.kill()
        for child in self.members:
            self._drain(child)
            self._deafen(child)
            child.reap()
        self.pending.clear()
        with contextlib.suppress(FileNotFoundError):
            os.unlink(self.life.memory)

    def _listen(self, child: Child) -> None:
        asyncio.get_running_loop().add_reader(child.pipe.fileno(), self._take, child)

    def _deafen(self, child: Child) -> None:
        asyncio.get_running_loop().remove_reader(child.pipe.fileno())

    def _take(self, child: Child) -> None:
        try:
            said = child.pipe.recv()
        except (EOFError, OSError):
            self._deafen(child)
            if child.alive:
                self.crashed = True
                self._hear(self, ("crashed", child.name))
            return
        if said[0] == "staging":
            self.free_staging[child.name] = said[1]
        self._hear(self, said)

    def _drain(self, child: Child) -> None:
        """Read what a process had said before it died."""
        with contextlib.suppress(EOFError, OSError):
            while child.pipe.poll(0):
                self._hear(self, child.pipe.recv())


class ProgramLife(Member):
    """One life of a program that operators run."""

    def __init__(
        self,
        name: str,
        namespace: str,
        log: Path,
        environment: Mapping[str, str],
        command: Sequence[str],
    ) -> None:
        enter = ["ip", "netns", "exec", namespace] if namespace else []
        with log.open("ab") as file:
            self._process = subprocess.Popen(
                [*enter, *command],
                stdout=file,
                stderr=file,
                env={**os.environ, **environment},
            )
        super().__init__(name, self._process.pid)

    @property
    def ended(self) -> int | None:
        """Return the exit status, or None while the process runs."""
        return self._process.poll()

    def end(self, number: signal.Signals) -> int:
        """Send a signal that ends the process, wait, and return the exit status."""
        self.signal(number)
        self.alive = False
        return self._process.wait(STOP_S)


class BrokerLife(ProgramLife):
    """A broker."""

    def __init__(
        self,
        namespace: str,
        listen: str,
        log: Path,
        environment: Mapping[str, str],
        options: Sequence[str],
        name: str = "broker",
    ) -> None:
        early = ("--early-bytes", "0")  # states are small here
        command = (*RESTOW, "serve", "--insecure", "--listen", listen, *early, *options)
        super().__init__(name, namespace, log, environment, command)


class StoreLife(ProgramLife):
    """A store, with the disk of those before it."""

    def __init__(
        self, namespace: str, broker: str, folder: Path, environment: Mapping[str, str]
    ) -> None:
        file = folder / "store.json"
        file.write_text(json.dumps(layout_to_json(layout(1, ConvLayout.SD, STORE_PAGE_TOKENS))))
        command = [
            *RESTOW,
            "store",
            "--layout",
            f"{file}",
            "--block-tokens",
            f"{STORE_PAGE_TOKENS}",
        ]
        command += ["--engine-id", STORE, "--broker", broker, *STORE_SIZES]
        command += ["--disk", f"{folder / 'disk'}"]
        super().__init__("store", namespace, folder / "store.log", environment, command)
