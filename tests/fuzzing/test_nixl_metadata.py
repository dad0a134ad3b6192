"""With a peer's NIXL metadata changed a reader gets the right bytes or an error, and lives."""

from __future__ import annotations

import asyncio
import contextlib
import multiprocessing
import os
import time
from collections import Counter
from collections.abc import Iterator
from multiprocessing.connection import Connection
from random import Random

import numpy as np
import numpy.typing as npt

from agent_harness.processes import READY, READY_S, child
from fuzzing.rounds import FACTOR
from restow.agents.binding.reads import Descriptors
from restow.agents.memory.errors import AgentError
from restow.agents.memory.regions import HOST
from restow.agents.probing.peer_trial import PeerTrial
from restow.agents.reading.lane import Read, Transport
from restow.agents.reading.nixl_transport import NixlTransport
from restow.agents.reading.reader import Reader

SIZE_BYTES = 1 << 20
READ_BYTES = 4096
CHANGES = int(100 * FACTOR)
UNCHANGED_EVERY = 20
"""One of so many is as P gave it, and has to be read."""
SEED = 11 if "CI" in os.environ else int.from_bytes(os.urandom(4), "little")
RIGHT, WRONG = "right bytes", "wrong bytes"
READ_S, QUARANTINE_S = 0.5, 0.3
TRIES = 10
"""P may stand still for that long where others keep the machine busy."""


def _content() -> npt.NDArray[np.uint8]:
    return (np.arange(SIZE_BYTES) % 251).astype(np.uint8)


def _serve(pipe: Connection) -> None:
    """Serve P's memory until the pipe ends."""
    data = _content()
    transport = NixlTransport("P")
    transport.register(data.ctypes.data, SIZE_BYTES, HOST)
    pipe.send((transport.name, data.ctypes.data, transport.metadata()))
    while not pipe.poll(0.001):
        transport.progress()


@contextlib.contextmanager
def _source() -> Iterator[tuple[str, int, bytes]]:
    """Run P; yield its name, its bytes' address and its metadata.

    P is no fork, as D is: with another process number in P's metadata D reads that process
    (docs/security.md, a host's broker), and forks have memory at the same addresses.
    """
    context = multiprocessing.get_context("spawn")
    ours, theirs = context.Pipe()
    process = context.Process(target=_serve, args=(theirs,), daemon=True)
    process.start()
    theirs.close()
    try:
        assert ours.poll(READY_S), "P says nothing"
        yield ours.recv()
    finally:
        ours.close()
        process.join()


def _read(pipe: Connection, peer: str, address: int) -> None:
    """Read as D by each metadata that comes, and say what came of it."""
    asyncio.run(_read_by_each(pipe, peer, address))


async def _read_by_each(pipe: Connection, peer: str, address: int) -> None:
    got, wanted = np.zeros(SIZE_BYTES, np.uint8), _content()[:READ_BYTES]
    opened: list[NixlTransport] = []

    def lane() -> list[Transport]:
        opened.append(NixlTransport("D"))
        opened[-1].register(got.ctypes.data, SIZE_BYTES, HOST)
        return [opened[-1]]

    tried: list[PeerTrial] = []

    async def try_peer(name: str, metadata: bytes) -> None:
        await tried[0].load(name, metadata)

    reader = Reader(lane, QUARANTINE_S, try_peer=try_peer)
    tried.append(PeerTrial(opened[0].metadata()))
    where = [np.array([value], np.int64) for value in (address, got.ctypes.data, READ_BYTES)]
    reads = [Read(peer, Descriptors(*where), HOST, HOST)]
    pipe.send(READY)
    with contextlib.suppress(EOFError):
        while True:
            metadata = await asyncio.to_thread(pipe.recv)
            got[:] = 0
            reader.add_peer(peer, metadata)
            said = "READ_NOT_BEGUN"
            while said == "READ_NOT_BEGUN":  # a trial may take long on a busy machine
                try:
                    await reader.read(reads, time.monotonic() + READ_S)
                    said = RIGHT if (got[:READ_BYTES] == wanted).all() else WRONG
                except AgentError as error:
                    said = error.reason
            reader.forget_peer(peer)
            pipe.send(said)
    reader.close()
    await tried[0].close()


def _changed(metadata: bytes, rng: Random) -> bytes:
    """Change one byte, several, their number, or a byte behind the first list of ranges."""
    changed = bytearray(metadata)
    at = rng.randrange(len(changed))
    match rng.choices(range(5), (60, 15, 10, 7, 8))[0]:
        case 0:
            changed[at] ^= rng.randrange(1, 256)
        case 1:
            for _ in range(rng.randrange(2, 9)):
                changed[rng.randrange(len(changed))] = rng.randrange(256)
        case 2:
            del changed[at : at + rng.randrange(1, 40)]
        case 3:
            changed[at:at] = rng.randbytes(rng.randrange(1, 40))
        case _:
            at = rng.randrange(metadata.index(b"nixlSDList"), len(changed))
            changed[at] = rng.choice([0, 1, 2, 4, 5, 0x7F, 0x80, 0xFF])
    return bytes(changed)


async def test_changed_metadata_is_read_rightly_or_refused_and_ends_nobody() -> None:
    rng = Random(SEED)  # noqa: S311 - reproducible, not secret
    seen: Counter[str] = Counter()
    with _source() as (peer, address, metadata):
        async with child(_read, peer, address) as reader:
            for number in range(CHANGES):
                is_whole = number % UNCHANGED_EVERY == 0
                given = metadata if is_whole else _changed(metadata, rng)
                for _ in range(TRIES if is_whole else 1):
                    reader.tell(given)
                    try:
                        said = await asyncio.to_thread(reader.receive)
                    except EOFError:
                        said = "D died"
                    if said != "READ_DEADLINE":
                        break
                told = f"seed {SEED}, change {number}: {given.hex()}"
                assert said not in (WRONG, "D died"), told
                assert said == RIGHT or not is_whole, (said, told)
                seen[said] += 1
    print(f"{CHANGES} metadata: {dict(seen)}")
    assert seen["METADATA_REFUSED"], seen
    assert seen[RIGHT] > CHANGES // UNCHANGED_EVERY // 2, seen
