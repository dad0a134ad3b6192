"""Restow's entry point in vLLM's group ``vllm.general_plugins``: register the connector's name.

vLLM calls it in every process of an engine. `MultiConnector` looks up the statistics of its
connectors by their names alone, and Dynamo the requests that a connector takes.
"""

from __future__ import annotations

import contextlib

NAME = "RestowConnector"


def register() -> None:
    """Register ``"kv_connector": "RestowConnector"`` without loading the connector."""
    from vllm.distributed.kv_transfer.kv_connector.factory import KVConnectorFactory

    with contextlib.suppress(ValueError):  # the name is registered already
        KVConnectorFactory.register_connector(NAME, "restow.agents.engines.vllm", NAME)
    _register_in_dynamo()


def _register_in_dynamo() -> None:
    """Tell Dynamo, if it is installed, that the connector takes the requests of NixlConnector."""
    try:
        from dynamo.vllm.kv_connector_protocols import (
            KV_CONNECTOR_PROTOCOLS,
            NixlConnectorProtocol,
        )
    except ImportError:  # Dynamo is not installed, or keeps its table elsewhere and names us there
        return
    KV_CONNECTOR_PROTOCOLS.setdefault(NAME, NixlConnectorProtocol)
