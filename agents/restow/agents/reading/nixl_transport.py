"""Read, and be read, by NIXL.

A transport is one NIXL agent, with a name that is never used again. It belongs to one thread. It
has no progress thread, which would spin on a core and halve the rate of small pieces
(docs/benchmarks.md). So the owner of a transport calls `progress`: often while it reads, and every
few milliseconds while it is read from.
"""

from __future__ import annotations

import json
import os
import secrets
import sys
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np

from restow.agents.binding.reads import Descriptors
from restow.agents.memory.cuda import bind_thread
from restow.agents.memory.errors import PeerLostError, ReadFailedError, TransportFailedError
from restow.agents.memory.regions import MemoryKind, MemoryPlace
from restow.agents.reading.lane import NIXL, Flight, Known, Read
from restow.agents.reading.ucx import loaded_ucx, ucx_settings

# Without this setting UCX reads GPU memory over TCP if a GPU has no NVLink (docs/benchmarks.md);
# later NIXL releases set it too (NIXL's pull request 2208). Without a GPU, UCX would print a
# warning about it on stdout.
_OF_A_GPU = {"UCX_CUDA_IPC_ENABLE_GET_ZCOPY": "on"} if Path("/dev/nvidiactl").exists() else {}
# UCX reads these variables when it is loaded. With the TCP settings a silent partition ends a read
# after about 5 s, and does not block a connecting thread; without them it takes minutes, in which
# the thread blocks. Over TCP a peer sends what is read in segments of 8 KiB unless they are set.
for _name, _value in {
    **_OF_A_GPU,
    "UCX_TCP_KEEPIDLE": "2s",
    "UCX_TCP_KEEPINTVL": "1s",
    "UCX_TCP_KEEPCNT": "3",
    "UCX_TCP_CONN_NB": "y",
    "UCX_TCP_SYN_CNT": "2",
    "UCX_TCP_TX_SEG_SIZE": "64k",
    "NIXL_LOG_LEVEL": "WARN",
}.items():
    os.environ.setdefault(_name, _value)

import nixl._api as nixl_api  # noqa: E402
import nixl._bindings as nixl_bindings  # noqa: E402

NIXL_MODULE: str = nixl_api.__name__
"""The NIXL module in use. Several may be installed; NIXL loads torch to choose."""
_SEGMENTS = {MemoryKind.HOST: "DRAM", MemoryKind.CUDA: "VRAM"}
_LOST = (nixl_bindings.nixlRemoteDisconnectError, nixl_bindings.nixlCancelledError)
_FAILURES = (
    nixl_bindings.nixlBackendError,
    nixl_bindings.nixlInvalidParamError,
    nixl_bindings.nixlMismatchError,
    nixl_bindings.nixlNotAllowedError,
    nixl_bindings.nixlNotFoundError,
    nixl_bindings.nixlNotPostedError,
    nixl_bindings.nixlNotSupportedError,
    nixl_bindings.nixlRepostActiveError,
    nixl_bindings.nixlUnknownError,
)


class NixlTransport:
    """A NIXL agent over UCX, as a `Transport` that takes every read."""

    kind = NIXL

    def __init__(self, label: str) -> None:
        """Start NIXL. Raises `TransportFailedError`."""
        self.name = f"{label}-{secrets.token_hex(6)}"
        config = nixl_api.nixl_agent_config(enable_prog_thread=False, backends=["UCX"])
        try:
            self._agent = nixl_api.nixl_agent(self.name, config)
        except _FAILURES as error:
            words = f"NIXL can't start with UCX: {error}{ucx_settings()}"
            raise TransportFailedError(words) from None
        self._registered: list[Any] = []
        self._peers: set[str] = set()

    def register(self, address: int, length_bytes: int, place: MemoryPlace) -> None:
        """Let peers read these bytes, and reads land in them. Raises `TransportFailedError`."""
        bind_thread(place)
        descriptors = self._agent.get_reg_descs(
            [(address, length_bytes, place.device_id, "")], _SEGMENTS[place.kind]
        )
        try:
            self._registered.append(self._agent.register_memory(descriptors))
        except _FAILURES as error:
            raise TransportFailedError(
                f"NIXL refuses to register {length_bytes} bytes of {place.kind} memory: {error}"
            ) from None

    def metadata(self) -> bytes:
        """Return what a peer needs to read everything that is registered so far."""
        metadata: bytes = self._agent.get_agent_metadata()
        return metadata

    def prepare(self, peer: str, known: Known) -> None:
        """Add the peer's metadata and begin to connect the peer. Raises `PeerLostError`."""
        if peer in self._peers:
            return
        try:
            name = self._agent.add_remote_agent(known.metadata)
        except (*_LOST, *_FAILURES, UnicodeDecodeError) as error:
            raise PeerLostError(f"agent {peer} can't be connected: {error}", agent=peer) from None
        name = name.decode() if isinstance(name, bytes) else name
        if name != peer:
            self._agent.remove_remote_agent(name)
            raise PeerLostError(f"the metadata of agent {peer} is of agent {name}", agent=peer)
        with suppress(*_LOST, *_FAILURES):  # the first read connects the peer then
            self._agent.make_connection(peer)
        self._peers.add(peer)

    def takes(self, read: Read) -> bool:
        """Return True: NIXL takes every read."""
        return True

    def forget(self, peer: str) -> None:
        """Drop a peer's metadata. May be called again.

        Bytes of a read in flight still land afterwards, and nothing reports when the last byte has
        landed. So wait for the end of all reads of the peer first, or close the transport.
        """
        if peer in self._peers:
            self._peers.discard(peer)
            self._agent.remove_remote_agent(peer)

    def post(self, read: Read, check: Callable[[], None]) -> Flight:
        """Begin a read; over CMA the bytes are copied before this returns.

        Raises `PeerLostError` and `ReadFailedError`.
        """
        agent, peer, descriptors = self._agent, read.peer, read.descriptors
        bind_thread(read.dst)
        try:
            handle = agent.initialize_xfer(
                "READ",
                agent.get_xfer_descs(
                    _rows(descriptors.dst_address, descriptors, read.dst), _SEGMENTS[read.dst.kind]
                ),
                agent.get_xfer_descs(
                    _rows(descriptors.src_address, descriptors, read.src), _SEGMENTS[read.src.kind]
                ),
                peer,
            )
            state = agent.transfer(handle)
        except _LOST as error:
            raise PeerLostError(f"agent {peer} is gone: {error}", agent=peer) from None
        except _FAILURES as error:
            raise ReadFailedError(
                f"NIXL refuses a read of {len(descriptors.length_bytes)} pieces from agent "
                f"{peer}: {error}",
                agent=peer,
            ) from None
        if state == "ERR":
            raise ReadFailedError(f"a read from agent {peer} failed at once", agent=peer)
        return Flight(peer, handle, state == "DONE")

    def poll(self, flight: Flight) -> bool:
        """Return whether every byte is in place, and make progress.

        Raises `PeerLostError` and `ReadFailedError`; then the read has ended.
        """
        if flight.done:
            return True
        try:
            state = self._agent.check_xfer_state(flight.handle)
        except _LOST as error:
            raise PeerLostError(
                f"agent {flight.peer} went away during a read: {error}", agent=flight.peer
            ) from None
        except _FAILURES as error:
            raise ReadFailedError(
                f"a read from agent {flight.peer} failed: {error}", agent=flight.peer
            ) from None
        if state == "ERR":
            raise ReadFailedError(f"a read from agent {flight.peer} failed", agent=flight.peer)
        flight.done = state == "DONE"
        return flight.done

    def release(self, flight: Flight) -> None:
        """Free what NIXL keeps for a read that has ended. May be called again."""
        handle, flight.handle = flight.handle, None
        if handle is not None:
            self._agent.release_xfer_handle(handle)

    def progress(self) -> None:
        """Serve peers that read from here over transports that need it, and new connections."""
        if self._agent is not None:
            self._agent.get_new_notifs()

    def close(self) -> None:
        """End the NIXL agent: no byte of any of its reads lands after this. May be called again.

        Release every flight before.
        """
        if self._agent is None:
            return
        for peer in list(self._peers):
            self.forget(peer)
        for descriptors in self._registered:
            self._agent.deregister_memory(descriptors)
        self._registered.clear()
        self._agent = None


def _rows(
    address: np.ndarray[Any, np.dtype[np.int64]], descriptors: Descriptors, place: MemoryPlace
) -> np.ndarray[Any, np.dtype[np.uint64]]:
    """Return the pieces in NIXL's form: address, length, device."""
    rows = np.empty((len(address), 3), np.uint64)
    rows[:, 0] = address
    rows[:, 1] = descriptors.length_bytes
    rows[:, 2] = place.device_id
    return rows


def main() -> None:
    """Start NIXL, and print the paths of the UCX libraries that it loads.

    Raises `TransportFailedError`.
    """
    transport = NixlTransport("doctor")
    sys.stdout.write("\n" + json.dumps(loaded_ucx(Path("/proc/self/maps").read_text())) + "\n")
    transport.close()


if __name__ == "__main__":
    main()
