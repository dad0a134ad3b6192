"""A real vLLM takes no state of another checkpoint, however alike the two are in shape."""

from __future__ import annotations

import asyncio
import shutil
from contextlib import AsyncExitStack
from dataclasses import replace
from pathlib import Path

import pytest
from safetensors.torch import load_file, save_file

from restow.agents.engines.common.checkpoint import checkpoint_revision
from restow.agents.engines.recall.task import Prompt
from restow.broker.core.actions import State
from restow.broker.server.serve import running_broker
from restow.broker.server.settings import BrokerSettings
from vllm_harness.engine import Options, vllm_engine
from vllm_harness.pair import GRANT_S, MODEL

pytestmark = pytest.mark.timeout(600)
DUMMY = {"load_format": "dummy"}


def trained_on(folder: Path) -> Path:
    """The recall model's checkpoint with other weights."""
    shutil.copytree(MODEL, folder)
    file = folder / "model.safetensors"
    tensors = {name: tensor + 1e-3 for name, tensor in load_file(file).items()}
    save_file(tensors, file, {"format": "pt"})
    return folder


async def test_other_weights_are_refused(
    vllm_python: Path, tmp_path: Path, prompts: tuple[Prompt, ...]
) -> None:
    """Of three engines that would take it by its shapes: other weights, dummies, the same."""
    other = trained_on(tmp_path / "other")
    settings = BrokerSettings(listen="127.0.0.1:0", grant_s=GRANT_S)
    prompt = prompts[0]
    async with running_broker(settings) as broker, AsyncExitStack() as stack:
        options = Options(MODEL, role="kv_consumer", broker=broker.address)
        wanted = {
            "P": replace(options, role="kv_producer"),
            "other": replace(options, model=other),
            "dummy": replace(options, engine=DUMMY),
            "named": replace(
                options, model=other, extra={"model_revision": checkpoint_revision(MODEL)}
            ),
        }
        started = await asyncio.gather(
            *(
                stack.enter_async_context(vllm_engine(vllm_python, one, tmp_path / f"{name}.log"))
                for name, one in wanted.items()
            )
        )
        engines = dict(zip(wanted, started, strict=True))
        members = broker.hub.directory.members.engines.values()
        revisions = {one.layout.model.revision for one in members}
        dummy = "dummy-1234-tp1-float32-cpu"
        assert revisions == {checkpoint_revision(MODEL), checkpoint_revision(other), dummy}
        ended = broker.hub.directory.ledger.ended
        for name in ("other", "dummy", "named"):
            given = await engines["P"].ask(list(prompt.token_ids), 1, {"handoff_id": name})
            assert given.finish == "length"
            answer = await engines[name].ask(list(prompt.token_ids), 6, {"handoff_id": name})
            handoff = ended["default", name]
            if name == "named":  # the operator's word goes
                assert handoff.state is State.DONE
                continue
            assert answer.tokens == ()
            assert answer.finish == "error" or answer.error
            assert handoff.failure is not None
            assert handoff.failure.reason == "MODEL_MISMATCH"
            assert checkpoint_revision(MODEL) in handoff.failure.detail
