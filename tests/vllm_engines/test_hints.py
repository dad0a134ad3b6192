"""KV hints that an orchestrator gives a real engine with a request are answered, each by itself."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from restow.broker.core.common.keys import State
from vllm_harness.engine import Options
from vllm_harness.house import STEPS, TELL, both_sides, drawn, vllm_house
from vllm_harness.tiny_models import tiny_model

pytestmark = pytest.mark.timeout(600)


def hint(kind: str, **payload: Any) -> dict[str, Any]:
    """Return an action as an orchestrator writes it."""
    action = {"action_id": f"a {kind}", "action_type": f"kv.{kind}", "action_version": "1.0"}
    return {**action, "payload": payload}


async def test_a_fetch_is_carried_out_and_the_rest_is_answered(
    vllm_python: Path, tmp_path: Path
) -> None:
    one = Options(tiny_model("llama", tmp_path / "model"), prefix_caching=True, extra=TELL)
    wanted = both_sides(one=one, other=one, alone=replace(one, extra={}))
    kinds = ("fetch", "retain", "pin", "demote", "dream")
    envelope = {
        "protocol_version": "0.1",
        "message_id": "m1",
        "actions": [hint(kind) for kind in kinds],
    }
    ids = drawn(150)
    async with vllm_house(vllm_python, tmp_path, wanted) as house:
        await house["one"].ask(ids, STEPS)
        await house.told("one", ids, 128)
        answer = await house["other"].ask(ids, STEPS, hints=envelope)
        assert (answer.error, answer.cached) == ("", 128)
        assert house.ended == {State.DONE: 1}
        assert answer.params is not None
        said = answer.params["kv_hints"]
        assert said["message_id"] == "m1"
        by_id = {one["action_id"]: one for one in said["actions"]}
        assert list(by_id) == [f"a {kind}" for kind in kinds]
        assert by_id["a fetch"]["outcome"] == "carried_out"
        assert by_id["a fetch"]["tokens"] == 128
        for kind in kinds[1:]:
            assert by_id[f"a {kind}"]["outcome"] == "not_supported"
            assert by_id[f"a {kind}"]["reason"]
        # An engine that looks for no prefixes says so, and answers the request all the same.
        answer = await house["alone"].ask(ids, STEPS, hints=envelope)
        assert (answer.error, answer.cached, len(answer.tokens)) == ("", 0, STEPS)
        assert answer.params is not None
        fetch, *_ = answer.params["kv_hints"]["actions"]
        assert (fetch["outcome"], "prefix is off" in fetch["reason"]) == ("not_supported", True)
        plain = await house["other"].ask(drawn(20, 3), STEPS)
        assert plain.params is None
