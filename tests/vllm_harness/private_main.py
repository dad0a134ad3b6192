"""What the connector says of a vLLM that lacks something. Runs beside vLLM.

Takes away each attribute and hook that it uses, one after another, and says what is refused.
"""

from __future__ import annotations

import inspect
import json
from typing import Any
from unittest.mock import patch

import vllm
from vllm.distributed.kv_transfer.kv_connector.v1 import base
from vllm.v1.core import block_pool

from restow.agents.engines import vllm as package
from restow.agents.engines.vllm import RestowConnector, private
from restow.broker.errors import RestowError


def _said() -> str:
    try:
        private.check_vllm(RestowConnector)
    except RestowError as error:
        return f"{error.reason}: {error.message}"
    return ""


def _without(owner: Any, name: str) -> str:
    """Return what is said where a class has no such attribute."""
    has = private._has

    def lacks(one: type, other: str) -> bool:
        return (one, other) != (owner, name) and has(one, other)

    with patch.object(private, "_has", lacks):
        return _said()


def _without_hook(hook: str) -> str:
    owner = next(one for one in RestowConnector.__mro__[1:] if hook in vars(one))
    kept = vars(owner)[hook]
    delattr(owner, hook)
    try:
        return _said()
    finally:
        setattr(owner, hook, kept)


def _without_class() -> str:
    """Return what is said where a module of vLLM's has no such class as is looked for."""
    kept = block_pool.BlockHashToBlockMap
    del block_pool.BlockHashToBlockMap
    try:
        return _said()
    finally:
        block_pool.BlockHashToBlockMap = kept


def _without_name(name: str) -> str:
    """Return what is said where a module of vLLM's has no such name."""
    kept = getattr(base, name)
    delattr(base, name)
    try:
        with patch.dict("sys.modules"):
            del __import__("sys").modules["restow.agents.engines.vllm.connector"]
            package.__getattr__("RestowConnector")
    except RestowError as error:
        return f"{error.reason}: {error.message}"
    finally:
        setattr(base, name, kept)
    return ""


class Assigned:
    """A class whose objects have an attribute that the class does not show."""

    def __init__(self) -> None:
        self.there = 1


def main() -> None:
    """Print what is said."""
    hooks = [
        name
        for name in vars(RestowConnector)
        if not name.startswith("_") and name not in private.HOOKS_SINCE_0_33
    ]
    used = [(owner, name) for owner, names in private._used_classes() for name in names.split()]
    print(
        json.dumps(
            {
                "version": vllm.__version__,
                "whole": _said(),
                "hooks": {hook: _without_hook(hook) for hook in hooks},
                "attributes": {
                    f"{owner.__qualname__}.{name}": _without(owner, name) for owner, name in used
                },
                "class": _without_class(),
                "name": _without_name("KVConnectorTransferResults"),
                "found": [private._has(Assigned, one) for one in ("there", "elsewhere")],
                "since": sorted(
                    one
                    for one in private.HOOKS_SINCE_0_33
                    if inspect.getattr_static(base.KVConnectorBase_V1, one, None) is not None
                ),
            }
        )
    )


if __name__ == "__main__":
    main()
