"""Ask the connectors of the vLLM that is installed."""

from __future__ import annotations

from importlib.metadata import version

from bench.peers.probes import vllm_mooncake, vllm_moriio, vllm_nixl
from bench.peers.probes.asking import Peer, answer_all

if __name__ == "__main__":
    number = version("vllm")
    answer_all(
        [
            Peer("vLLM, NixlConnector", number, vllm_nixl.answer),
            Peer("vLLM, MooncakeConnector", number, vllm_mooncake.answer),
            Peer("vLLM, MoRIIOConnector", number, vllm_moriio.answer),
        ]
    )
