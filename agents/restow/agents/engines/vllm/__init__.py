"""Restow's connector for vLLM.

vLLM finds it by ``{"kv_connector": "RestowConnector",
"kv_connector_module_path": "restow.agents.engines.vllm", "kv_role": "kv_producer"}``. The connector
is loaded when its name is first used, so that submodules can be imported without vLLM.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from restow.agents.engines.vllm.connector import RestowConnector

__all__ = ["RestowConnector"]


def __getattr__(name: str) -> object:
    """Load the connector when it is asked for.

    Raises `EngineUnsupportedError` for a vLLM without something that it imports.
    """
    if name != "RestowConnector":
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from restow.agents.engines.vllm.private import missing_error

    try:
        from restow.agents.engines.vllm.connector import RestowConnector
    except ImportError as error:
        if not (error.name or "").startswith("vllm."):
            raise
        raise missing_error(f"module or name: {error}") from error
    return RestowConnector
