"""What names the content of a vLLM request's state: all that it is computed from."""

from __future__ import annotations

import json
from collections import UserDict
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from engines.written_session import Request
from restow.agents.engines.common.chains import RequestChains
from restow.agents.engines.common.checkpoint import (
    MAX_ADAPTERS,
    LoadedAdapters,
    LoraAdapters,
    joined_fingerprints,
)
from restow.agents.engines.vllm.private import watch_adapters
from restow.agents.engines.vllm.scheduler.requests import content, followed_prompt

TOKENS = [5, 6, 7, 8]


@dataclass
class Lora:
    lora_path: str
    lora_name: str = "a"
    lora_int_id: int = 1
    load_inplace: bool = False


def adapter(folder: Path, seed: int = 0, alpha: int = 16) -> str:
    """Write an adapter as PEFT stores it, and return its folder."""
    folder.mkdir(exist_ok=True)
    weights = torch.randn(8, 4, generator=torch.Generator().manual_seed(seed))
    save_file({"base.q_proj.lora_A.weight": weights}, folder / "adapter_model.safetensors")
    (folder / "adapter_config.json").write_text(json.dumps({"r": 4, "lora_alpha": alpha}))
    return str(folder)


class Features(UserDict[str, Any]):
    """As vLLM's `MultiModalKwargsItem`: by key an element that has data."""

    def __init__(self, **data: Any) -> None:
        super().__init__({key: SimpleNamespace(data=one) for key, one in data.items()})


def image(offset: int, identifier: str, data: Any = None) -> Any:
    position = SimpleNamespace(offset=offset)
    return SimpleNamespace(mm_position=position, identifier=identifier, data=data)


def pixels(last: float = 1, dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:
    return torch.tensor([[0, 0.5], [2, last]], dtype=dtype)


def of_image(identifier: str = "a", **data: Any) -> bytes:
    return named(mm_features=[image(1, identifier, Features(**data))])


def named(position: int = 3, word: str = "", **more: Any) -> bytes:
    return content(Request(list(TOKENS), None, **more), position, word)


def test_what_follows_the_position_does_not_count() -> None:
    longer = Request([*TOKENS[:3], 9, 9], None, mm_features=[image(3, "cat")])
    assert content(longer, 3, "") == named() != named(4)


@pytest.mark.parametrize(
    "more",
    [
        {"cache_salt": "s"},
        {"mm_features": [image(1, "cat")]},
        {"mm_features": [image(1, "dog")]},
        {"mm_features": [image(2, "cat")]},
        {"prompt_embeds": torch.ones(4, 8)},
        {"prompt_embeds": torch.zeros(4, 8)},
    ],
    ids=str,
)
def test_whatever_else_a_state_is_computed_from_counts(more: dict[str, Any]) -> None:
    assert named(**more) != named()
    assert named(**more) == named(**more)


def test_embeddings_differ_where_one_element_does() -> None:
    ones, other = torch.ones(4, 8), torch.ones(4, 8)
    other[2, 7] = 2
    assert named(prompt_embeds=ones) != named(prompt_embeds=other)
    other = torch.ones(4, 8)
    other[3, 7] = 2
    assert named(prompt_embeds=ones) == named(prompt_embeds=other), "behind the position"


def test_an_image_is_named_by_its_features_and_not_by_the_engines_word_for_it() -> None:
    # The identifier of vLLM names the checkpoint by its path, which is another path at D.
    grid = torch.tensor([1, 2, 2])
    one = of_image("/models/a: cat", pixel_values=pixels(), image_grid_thw=grid)
    assert one == of_image("hub/a: cat", image_grid_thw=grid, pixel_values=pixels())
    assert one != of_image("/models/a: cat", pixel_values=pixels(2), image_grid_thw=grid)


def test_no_two_images_have_one_name() -> None:
    names = [
        of_image(pixel_values=pixels()),
        of_image(pixel_values=pixels(2)),
        of_image(pixel_values=pixels(dtype=torch.float32)),
        of_image(pixel_values=pixels().view(4)),
        of_image(pixel_values=pixels().T),
        of_image(pixel_embeds=pixels()),
        of_image(pixel_values=[pixels()]),
        of_image(pixel_values=[pixels(), pixels()]),
        of_image(pixel_values=[pixels(), pixels(2)]),
        of_image(pixel_values=pixels(), more=pixels()),
        of_image(pixel_values=pixels().float().numpy()),
        of_image(pixel_values=3),
        of_image(pixel_values="3"),
        of_image(pixel_values=torch.empty(0)),
    ]
    assert len(set(names)) == len(names)


def test_features_that_vllm_keeps_are_hashed_once() -> None:
    kept = Features(pixel_values=pixels())
    before = named(mm_features=[image(1, "a", kept)])
    kept["pixel_values"].data = None  # vLLM changes no item: this shows that it is not read again
    assert named(mm_features=[image(1, "b", kept)]) == before


def test_a_chain_has_the_same_words_for_images_as_content() -> None:
    features = [image(1, "a", Features(pixel_values=pixels()))]
    request = Request(list(TOKENS), None, mm_features=features)
    chains = RequestChains(2)
    prompt = followed_prompt(request, "")
    assert prompt is not None
    chains.begin(request.request_id, prompt)
    chain = chains.chain(request.request_id)
    assert chain is not None
    assert chain.hashes[-1] == content(request, 4, "")


def test_a_prompt_that_was_cut_is_named_up_to_where_it_was_cut() -> None:
    request = Request(list(TOKENS), {"_p_side_truncated": True})
    prompt = followed_prompt(request, "")
    assert prompt is not None
    assert prompt.limit_tokens == 4


@pytest.mark.parametrize("more", [{"prompt_embeds": torch.ones(4, 8)}, {"resumable": True}])
def test_what_has_no_chain_is_not_followed(more: dict[str, Any]) -> None:
    assert followed_prompt(Request(list(TOKENS), None, **more), "") is None


class Manager:
    """As vLLM's `WorkerLoRAManager`: what it reads of an adapter is told by ``reading``."""

    reading: Callable[[], object] = staticmethod(lambda: None)

    def _load_adapter(self, request: Lora) -> str:
        self.reading()
        return request.lora_path


def loaded(*adapters: Lora, reading: Callable[[], object] = lambda: None) -> dict[str, str]:
    """Return what a worker tells that loads adapters, one after the other."""
    manager = type("Loading", (Manager,), {"reading": staticmethod(reading)})
    noted = LoadedAdapters()
    watch_adapters(noted, manager)
    for one in adapters:
        assert manager()._load_adapter(one) == one.lora_path
    words = noted.take()
    assert noted.take() == {}
    return words


def test_adapters_count_by_their_weights_and_not_by_their_name(tmp_path: Path) -> None:
    one = Lora(adapter(tmp_path / "p", seed=1))
    same = Lora(adapter(tmp_path / "d", seed=1), "called otherwise", 7)
    other = Lora(adapter(tmp_path / "other", seed=2))
    stronger = Lora(adapter(tmp_path / "stronger", seed=1, alpha=32))
    words = [loaded(x)[x.lora_name] for x in (one, same, other, stronger)]
    assert words[0] == words[1]
    assert len({"", *words}) == 4
    assert len({named(word=word) for word in ("", *words)}) == 4


def test_an_adapter_has_the_word_of_what_was_loaded_and_not_of_what_lies_there(
    tmp_path: Path,
) -> None:
    one = Lora(adapter(tmp_path / "a", seed=1))
    before = loaded(one)
    adapter(tmp_path / "a", seed=2)
    adapters = LoraAdapters()
    assert adapters.fingerprint("a") is None, "no worker has loaded it"
    adapters.loaded(before)
    assert adapters.fingerprint("a") == before["a"] != loaded(one)["a"]
    assert adapters.fingerprint(None) == ""


@pytest.mark.parametrize("load_inplace", [False, True])
def test_a_name_that_stands_for_two_adapters_is_of_no_use(
    tmp_path: Path, load_inplace: bool, caplog: pytest.LogCaptureFixture
) -> None:
    # Under the name, vLLM finds prefixes of the old weights.
    adapters = LoraAdapters()
    one = Lora(adapter(tmp_path / "a", seed=1), load_inplace=load_inplace)
    assert adapters.loaded(loaded(one)) == set()
    assert adapters.loaded(loaded(one)) == set(), "the same, loaded again"
    assert adapters.fingerprint("a")
    adapter(tmp_path / "a", seed=2)
    assert adapters.loaded(loaded(one)) == {"a"}
    (record,) = caplog.records
    assert "loaded again with other weights" in record.getMessage()
    assert adapters.fingerprint("a") is None
    adapter(tmp_path / "a", seed=1)
    adapters.loaded(loaded(one))
    assert adapters.fingerprint("a") is None, "blocks of the second may still be cached"
    assert adapters.fingerprint("b") is None
    adapters.loaded(loaded(replace(one, lora_name="b")))
    assert adapters.fingerprint("b")


def test_what_changes_while_it_is_loaded_has_no_word(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    one, adapters = Lora(adapter(tmp_path / "a", seed=1)), LoraAdapters()
    words = loaded(one, reading=lambda: adapter(tmp_path / "a", seed=2))
    assert words == {"a": ""}
    assert adapters.loaded(words) == {"a"}
    (record,) = caplog.records
    assert "changed while it was loaded" in record.getMessage()
    assert adapters.fingerprint("a") is None
    assert loaded(Lora(str(tmp_path / "nowhere"))) == {"a": ""}


def test_two_loads_of_one_step_have_one_word_only_if_they_are_alike(tmp_path: Path) -> None:
    one, other = (Lora(adapter(tmp_path / str(seed), seed=seed)) for seed in (1, 2))
    assert loaded(one, one) == loaded(one)
    assert loaded(one, other) == {"a": ""}


def test_ranks_that_loaded_different_files_have_no_word() -> None:
    assert joined_fingerprints({"a": "1", "b": "2"}, {"a": "1", "b": "3", "c": "4"}) == {
        "a": "1",
        "b": "",
        "c": "4",
    }
    assert joined_fingerprints({"a": ""}, {"a": "1"}) == {"a": ""}


def test_the_names_that_are_kept_are_bounded() -> None:
    adapters = LoraAdapters()
    adapters.loaded({str(index): "w" for index in range(MAX_ADAPTERS + 1)})
    known = [adapters.fingerprint(str(index)) for index in (0, MAX_ADAPTERS - 1, MAX_ADAPTERS)]
    assert known == ["w", "w", None]
