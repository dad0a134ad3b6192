"""A rank's memory, and the transports over which peers read it."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

from restow.agents.copying.device_copies import queue_pieces
from restow.agents.link.settings import AgentSettings
from restow.agents.memory import cuda as device
from restow.agents.memory.errors import AgentError
from restow.agents.memory.regions import (
    MemoryKind,
    MemoryPlace,
    RegionMemory,
    common_place,
    registrations,
)
from restow.agents.memory.shared_memory import mappable
from restow.agents.memory.staging import Staging
from restow.agents.reading.host_memory import HostMark, HostRanges
from restow.agents.reading.lane import Transport
from restow.agents.reading.nixl_transport import NixlTransport
from restow.agents.reading.same_device import SameDevice
from restow.agents.reading.same_host import SameHost
from restow.agents.reading.ucx import InterfaceWatch
from restow.broker.logs import get_logger


class ServedMemory:
    """Regions and staging that peers read, by NIXL or, on the same host, directly."""

    def __init__(
        self, label: str, regions: Sequence[RegionMemory], settings: AgentSettings
    ) -> None:
        """Start NIXL and register the memory.

        Raises `TransportFailedError`, `CudaUnavailableError`, `CopyFailedError` if the device has
        no room, and `RegionInvalidError` if regions lie at several places.
        """
        self.place = common_place(regions)
        """Place of the regions and the staging."""
        device.require(self.place)
        self._label = label
        self._registrations = registrations(regions)
        self._settings = settings
        self.gather = Staging(self.place, settings.staging_bytes)
        self.scatter = Staging(self.place, settings.staging_bytes)
        self._interfaces = InterfaceWatch()
        self._nixl = self._open_nixl(self.gather)
        self._mark = self._set_mark() if settings.host_reads else None

    @property
    def name(self) -> str:
        """The NIXL name under which the memory is read."""
        return self._nixl.name

    def metadata(self) -> bytes:
        """Return NIXL's metadata for peers."""
        return self._nixl.metadata()

    def shown(self) -> bytes:
        """Return what processes of the same host need to read; empty if they must use NIXL."""
        return b"" if self._mark is None else self._mark.show().encoded()

    def open_lane(self) -> list[Transport]:
        """Open the transports that read from peers, in order of preference."""
        nixl = self._open_nixl(self.scatter)
        if self._mark is None:
            return [nixl]
        registered, place = self._registered(self.scatter), self.place
        own = HostRanges.of(registered)
        transports: list[Transport] = [SameHost(own, self._settings.read_threads), nixl]
        if self._maps_devices:
            copy = partial(queue_pieces, device=place.device)
            transports.insert(0, SameDevice(place, HostRanges.of(registered, place), copy))
        return transports

    def progress(self) -> None:
        """Let peers read. Raises `TransportFailedError` if no peer can read any more."""
        self._interfaces.check()
        self._nixl.progress()

    def wipe_mark(self) -> None:
        """Make reads by processes of the same host fail from now on."""
        if self._mark is not None:
            self._mark.wipe()

    def close(self) -> None:
        """Stop all reading of the memory. May be called again."""
        self.wipe_mark()
        self._nixl.close()

    @property
    def _maps_devices(self) -> bool:
        return self._settings.device_reads and self.place.kind is MemoryKind.CUDA

    def _set_mark(self) -> HostMark:
        registered = self._registered(self.gather)
        ranges = HostRanges.of(registered)
        if self._maps_devices:
            try:
                return HostMark(self.name, ranges, mappable(registered))
            except AgentError as error:
                get_logger("restow.agent").warning(
                    "no process maps this rank's device memory", reason=str(error)
                )
        return HostMark(self.name, ranges)

    def _open_nixl(self, staging: Staging) -> NixlTransport:
        nixl = NixlTransport(self._label)
        for registered in self._registered(staging):
            nixl.register(*registered)
        return nixl

    def _registered(self, staging: Staging) -> list[tuple[int, int, MemoryPlace]]:
        """Return address, bytes and place of the regions and a staging pool."""
        if not staging.size_bytes:
            return self._registrations
        return [*self._registrations, (staging.address, staging.size_bytes, self.place)]
