"""A CUDA device, as far as an agent needs it: its stream, and its context on a thread."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Iterator

import torch

from restow.agents.errors import CopyFailedError, CudaUnavailableError
from restow.agents.memory.regions import MemoryKind, MemoryPlace


def require(place: MemoryPlace) -> None:
    """Raise `CudaUnavailableError` where this process has no such device."""
    count = torch.cuda.device_count()
    if place.kind is MemoryKind.CUDA and not 0 <= place.device_id < count:
        raise CudaUnavailableError(
            f"memory lies on CUDA device {place.device_id}, but this process sees {count} devices: "
            f"check the driver, CUDA_VISIBLE_DEVICES, and that torch is a CUDA build",
            device=place.device_id,
        )


def bind_thread(place: MemoryPlace) -> None:
    """Make the device's context this thread's, for NIXL and the driver work in the current one.

    Raises `CopyFailedError` if the device is broken.
    """
    if place.kind is MemoryKind.CUDA:
        with _failures():
            torch.cuda.set_device(place.device)
            torch.cuda.current_stream(place.device).query()  # only a call of the runtime binds it


@contextlib.contextmanager
def finished(device: torch.device) -> Iterator[None]:
    """Run what is queued inside on a stream of the agent's own; return or raise when it has ended.

    On the default stream it would wait for the engine's kernels, and they for it. Where something
    fails, what was queued before is waited for as well: nobody may have its memory earlier. Raises
    `CopyFailedError` for whatever torch or the device can't do.
    """
    with _failures():
        if device.type != "cuda":
            yield
            return
        stream = _own_stream(device)
        try:
            with torch.cuda.stream(stream):
                yield
        finally:
            stream.synchronize()


@contextlib.contextmanager
def _failures() -> Iterator[None]:
    """Give their type to errors of torch and of a full or broken device: a `RuntimeError` each."""
    try:
        yield
    except RuntimeError as error:
        raise CopyFailedError(f"torch or the device failed: {error}") from error


@functools.cache
def _own_stream(device: torch.device) -> torch.cuda.Stream:
    return torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
