"""A rank's regions on their way from the engine's process to the daemon's, and open there."""

from __future__ import annotations

from collections.abc import Sequence

from restow.agents.errors import AgentError, RegionInvalidError
from restow.agents.memory.cuda_driver import CudaDriver
from restow.agents.memory.cuda_ipc import CudaHandle, CudaRegion, OpenedAllocation
from restow.agents.memory.regions import RegionMemory
from restow.agents.memory.shared_memory import SharedMemory, SharedRegion
from restow.v1 import daemon_pb2 as pb


def region_to_proto(region: SharedRegion | CudaRegion) -> pb.SharedRegion:
    """A region as an engine hands it over."""
    message = pb.SharedRegion(
        name=region.name,
        offset_bytes=region.offset_bytes,
        page_count=region.page_count,
        page_stride_bytes=region.page_stride_bytes,
        private=region.private,
    )
    if isinstance(region, SharedRegion):
        message.shared_memory = region.shared_memory
    else:
        message.cuda.ipc_handle = region.handle.ipc_handle
        message.cuda.device_uuid = region.handle.device_uuid
    return message


def region_from_proto(message: pb.SharedRegion) -> SharedRegion | CudaRegion:
    """A region that was handed over. Raises `RegionInvalidError`."""
    where = (message.offset_bytes, message.page_count, message.page_stride_bytes, message.private)
    if bool(message.shared_memory) == message.HasField("cuda"):
        raise RegionInvalidError(
            f"region {message.name}: give either shared memory or a CUDA allocation",
            region=message.name,
        )
    if message.shared_memory:
        return SharedRegion(message.name, message.shared_memory, *where)
    handle = CudaHandle(message.cuda.ipc_handle, message.cuda.device_uuid)
    return CudaRegion(message.name, handle, *where)


class OpenedRegions:
    """The objects and allocations of a rank, each opened once, closed at the end."""

    def __init__(
        self, messages: Sequence[pb.SharedRegion], driver: CudaDriver | None = None
    ) -> None:
        """Prepare; ``with`` opens. Raises `RegionInvalidError`."""
        self._regions = [region_from_proto(message) for message in messages]
        self._driver = driver
        self._objects: dict[str, SharedMemory] = {}
        self._allocations: dict[CudaHandle, OpenedAllocation] = {}

    def __enter__(self) -> list[RegionMemory]:
        """The regions in this process. Raises `RegionInvalidError` and `CudaUnavailableError`."""
        try:
            return [self._open(region) for region in self._regions]
        except AgentError:
            self._close()
            raise

    def __exit__(self, *_: object) -> None:
        """Close."""
        self._close()

    def _open(self, region: SharedRegion | CudaRegion) -> RegionMemory:
        if isinstance(region, SharedRegion):
            name = region.shared_memory
            if name not in self._objects:
                self._objects[name] = SharedMemory.attach(name)
            return region.memory(self._objects[name])
        if region.handle not in self._allocations:
            self._allocations[region.handle] = OpenedAllocation(region.handle, self._driver)
        return region.memory(self._allocations[region.handle])

    def _close(self) -> None:
        for shared in self._objects.values():
            shared.close()
        for allocation in self._allocations.values():
            allocation.close()
