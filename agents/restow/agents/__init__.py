"""Agents run beside the engines and move their state.

The names below are loaded when they are first used, so that importing a submodule such as
`restow.agents.binding.copies` does not load torch and NIXL.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from restow.agents.agent import Agent
    from restow.agents.daemon.client import DaemonAgent
    from restow.agents.execute.fences import DeviceEvent
    from restow.agents.link.async_agent import AsyncAgent
    from restow.agents.link.settings import AgentSettings
    from restow.agents.memory.cuda import CudaRegion
    from restow.agents.memory.regions import MemoryKind, RegionMemory
    from restow.agents.memory.shared_memory import SharedMemory, SharedRegion

__all__ = [
    "Agent",
    "AgentSettings",
    "AsyncAgent",
    "CudaRegion",
    "DaemonAgent",
    "DeviceEvent",
    "MemoryKind",
    "RegionMemory",
    "SharedMemory",
    "SharedRegion",
]

_HOMES = {
    "Agent": "restow.agents.agent",
    "AgentSettings": "restow.agents.link.settings",
    "AsyncAgent": "restow.agents.link.async_agent",
    "CudaRegion": "restow.agents.memory.cuda",
    "DaemonAgent": "restow.agents.daemon.client",
    "DeviceEvent": "restow.agents.execute.fences",
    "MemoryKind": "restow.agents.memory.regions",
    "RegionMemory": "restow.agents.memory.regions",
    "SharedMemory": "restow.agents.memory.shared_memory",
    "SharedRegion": "restow.agents.memory.shared_memory",
}


def __getattr__(name: str) -> object:
    """Load a public name."""
    home = _HOMES.get(name)
    if home is None:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(home), name)
