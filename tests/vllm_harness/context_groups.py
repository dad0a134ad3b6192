"""vLLM's DCP groups, and which sizes it takes: run by vLLM's Python, says both as JSON.

No rank is started: what makes a group is replaced by what writes down its ranks.
"""

from __future__ import annotations

import itertools
import json
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import torch
from vllm.config import ParallelConfig, VllmConfig, set_current_vllm_config
from vllm.distributed import parallel_state


def main() -> None:
    """Print each rank's place in its group, for each TP, PCP, DCP and PP; null where refused."""
    found: dict[str, list[int] | None] = {}
    config = VllmConfig()
    sizes = itertools.product((1, 2, 4, 8), (1, 2, 4), (1, 2, 3, 4, 8, 16), (1, 2))
    for tp, pcp, dcp, pp in sizes:
        name = ",".join(map(str, (tp, pcp, dcp, pp)))
        try:
            ParallelConfig(
                tensor_parallel_size=tp,
                prefill_context_parallel_size=pcp,
                decode_context_parallel_size=dcp,
                pipeline_parallel_size=pp,
                distributed_executor_backend="mp",
                nnodes=1,
            )
        except ValueError as error:
            if "divisible" not in str(error) and "DCP" not in str(error):
                raise
            found[name] = None
            continue
        with set_current_vllm_config(config):
            found[name] = _places(tp, pcp, dcp, pp)
    print(json.dumps(found))


def _places(tp: int, pcp: int, dcp: int, pp: int) -> list[int]:
    groups: list[list[int]] = []

    def noted(ranks: list[list[int]], *rest: Any, group_name: str = "", **more: Any) -> Any:
        if group_name == "dcp":
            groups.extend(ranks)
        return SimpleNamespace(rank_in_group=0, world_size=1, destroy=lambda: None)

    world = tp * pcp * pp
    with (
        patch.object(torch.distributed, "is_initialized", lambda: True),
        patch.object(torch.distributed, "get_world_size", lambda: world),
        patch.object(torch.distributed, "get_rank", lambda: 0),
        patch.object(torch.distributed, "get_backend", lambda group: "gloo"),
        patch.object(
            parallel_state,
            "get_world_group",
            lambda: SimpleNamespace(local_rank=0, device_group=None),
        ),
        patch.object(parallel_state, "init_model_parallel_group", noted),
    ):
        parallel_state.initialize_model_parallel(tp, pp, pcp, dcp)
        parallel_state.destroy_model_parallel()
    places = {rank: place for group in groups for place, rank in enumerate(group)}
    return [places[rank] for rank in range(world)]


if __name__ == "__main__":
    main()
