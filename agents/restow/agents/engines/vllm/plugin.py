"""`register` tells vLLM the connector's name: vLLM calls it in every process of an engine.

It is the entry point of Restow in vLLM's group ``vllm.general_plugins``. Whoever names a connector
without its module, as `MultiConnector` does for its statistics, finds it by that name alone.
"""

from __future__ import annotations

import contextlib

NAME = "RestowConnector"


def register() -> None:
    """Let ``"kv_connector": "RestowConnector"`` stand for the connector. Loads nothing of it."""
    from vllm.distributed.kv_transfer.kv_connector.factory import KVConnectorFactory

    with contextlib.suppress(ValueError):  # it is registered
        KVConnectorFactory.register_connector(NAME, "restow.agents.engines.vllm", NAME)
