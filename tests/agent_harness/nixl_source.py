"""A process whose memory NIXL reads: what it holds is known."""

from __future__ import annotations

from multiprocessing.connection import Connection

import numpy as np
import numpy.typing as npt

from agent_harness.processes import READY
from restow.agents.memory.regions import HOST
from restow.agents.reading.nixl_transport import NixlTransport

SIZE_BYTES = 1 << 20


def known_bytes(size_bytes: int = SIZE_BYTES) -> npt.NDArray[np.uint8]:
    return np.random.default_rng(7).integers(0, 256, size_bytes).astype(np.uint8)


def serve_known_bytes(pipe: Connection) -> None:
    """Send NIXL name, metadata and address of known bytes; serve them until the pipe ends."""
    data = known_bytes()
    transport = NixlTransport("source")
    transport.register(data.ctypes.data, len(data), HOST)
    pipe.send(READY)
    pipe.send((transport.name, transport.metadata(), data.ctypes.data))
    while not pipe.poll(0.001):
        transport.progress()
