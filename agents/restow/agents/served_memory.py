"""A rank's memory as an agent serves it: registered, shown to peers, and read into."""

from __future__ import annotations

from collections.abc import Sequence

from restow.agents.memory import device
from restow.agents.memory.regions import (
    MemoryPlace,
    RegionMemory,
    common_place,
    registrations,
)
from restow.agents.memory.staging import Staging
from restow.agents.reading.host_memory import HostMark, HostRanges
from restow.agents.reading.interfaces import InterfaceWatch
from restow.agents.reading.nixl_transport import NixlTransport
from restow.agents.reading.same_host import SameHost
from restow.agents.reading.transport import Transport
from restow.agents.settings import AgentSettings


class ServedMemory:
    """Regions and staging that peers read, by NIXL or, on the same host, by themselves."""

    def __init__(
        self, label: str, regions: Sequence[RegionMemory], settings: AgentSettings
    ) -> None:
        """Set NIXL up.

        Raises `TransportFailedError`, `CudaUnavailableError`, `CopyFailedError` for a device
        without room, and `RegionInvalidError` for regions at several places.
        """
        self.place = common_place(regions)
        """Where the regions are, and the staging."""
        device.require(self.place)
        self._label = label
        self._registrations = registrations(regions)
        self._settings = settings
        self.gather = Staging(self.place, settings.staging_bytes)
        self.scatter = Staging(self.place, settings.staging_bytes)
        self._interfaces = InterfaceWatch()
        self._nixl = self._open_nixl(self.gather)
        shown = HostRanges.of(self._registered(self.gather))
        self._mark = HostMark(self.name, shown) if settings.host_reads else None

    @property
    def name(self) -> str:
        """The NIXL name under which it is read."""
        return self._nixl.name

    def metadata(self) -> bytes:
        """NIXL's, for peers."""
        return self._nixl.metadata()

    def shown(self) -> bytes:
        """For processes of the same host. Empty: they read by NIXL."""
        return b"" if self._mark is None else self._mark.show().encoded()

    def open_lane(self) -> list[Transport]:
        """The ways to read from peers, the preferred one first."""
        nixl = self._open_nixl(self.scatter)
        if self._mark is None:
            return [nixl]
        own = HostRanges.of(self._registered(self.scatter))
        return [SameHost(own, self._settings.read_threads), nixl]

    def progress(self) -> None:
        """Let peers read. Raises `TransportFailedError` if none can any more."""
        self._interfaces.check()
        self._nixl.progress()

    def wipe_mark(self) -> None:
        """What processes of the same host read from now on, they do not take for good."""
        if self._mark is not None:
            self._mark.wipe()

    def close(self) -> None:
        """Let nobody read any more. May be repeated."""
        self.wipe_mark()
        self._nixl.close()

    def _open_nixl(self, staging: Staging) -> NixlTransport:
        nixl = NixlTransport(self._label)
        for registered in self._registered(staging):
            nixl.register(*registered)
        return nixl

    def _registered(self, staging: Staging) -> list[tuple[int, int, MemoryPlace]]:
        """Address, bytes and place of what is read, or read into."""
        if not staging.size_bytes:
            return self._registrations
        return [*self._registrations, (staging.address, staging.size_bytes, self.place)]
