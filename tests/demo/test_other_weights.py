"""Two checkpoints of one architecture: nothing is handed over between engines that serve them."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from transformers import NemotronHForCausalLM

from demo.house import demo_house
from restow.agents.engines.common.checkpoint import checkpoint_revision
from restow.broker.families import EngineSettings
from restow.demo.experiment import SEED
from restow.demo.recall.model import checkpoint_folder, load_model
from restow.demo.recall.task import make_prompts
from restow.demo.transformers.engine import HandoffFailedError


def trained_on(folder: Path) -> NemotronHForCausalLM:
    """Return the recall model with other weights, loaded from a checkpoint of its own."""
    model = load_model()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.full_like(parameter, 1e-3))
    model.save_pretrained(folder)
    return NemotronHForCausalLM.from_pretrained(folder, dtype="float32").eval()


def test_other_weights_of_the_same_shapes_are_refused(tmp_path: Path) -> None:
    (prompt,) = make_prompts(1, SEED)
    with demo_house() as house:
        place = house.broker(), EngineSettings()
        other = trained_on(tmp_path / "other")
        p, d = house.engine("P", *place, model=other), house.engine("D", *place)
        ours, theirs = p.layout.model, d.layout.model
        assert ours.fields == theirs.fields
        assert ours.name == theirs.name
        assert theirs.revision == checkpoint_revision(checkpoint_folder())
        asked = d.ask("h", prompt.token_ids)
        p.prefill("h", prompt.token_ids)
        with pytest.raises(HandoffFailedError) as caught:
            d.decode(asked, 2)
        assert caught.value.subject["handoff_reason"] == "MODEL_MISMATCH"
        assert ours.revision in caught.value.message
        assert theirs.revision in caught.value.message
        # Whoever knows better can say so: then it is on them.
        named = house.engine("P-named", *place, model=other, revision=theirs.revision)
        asked = d.ask("named", prompt.token_ids)
        named.prefill("named", prompt.token_ids)
        assert len(d.decode(asked, 2).token_ids) == 2
