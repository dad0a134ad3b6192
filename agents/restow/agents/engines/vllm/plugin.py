"""Restow's entry point in vLLM's group ``vllm.general_plugins``: register the connector's name.

vLLM calls it in every process of an engine. `MultiConnector` looks up the statistics of its
connectors by their names alone.
"""

from __future__ import annotations

import contextlib

NAME = "RestowConnector"


def register() -> None:
    """Register ``"kv_connector": "RestowConnector"`` without loading the connector."""
    from vllm.distributed.kv_transfer.kv_connector.factory import KVConnectorFactory

    with contextlib.suppress(ValueError):  # the name is registered already
        KVConnectorFactory.register_connector(NAME, "restow.agents.engines.vllm", NAME)
