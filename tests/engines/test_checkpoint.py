"""The fingerprint of a checkpoint: other weights are another word, another place is not."""

from __future__ import annotations

import shutil
import struct
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from restow.agents.engines.common.checkpoint import CheckpointInvalidError, checkpoint_revision
from restow.agents.engines.recall.model import checkpoint_folder

WEIGHTS = "model.safetensors"


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A copy of the recall model's checkpoint."""
    return Path(shutil.copytree(checkpoint_folder(), tmp_path / "copy"))


def test_where_it_lies_does_not_matter_and_another_model_does(folder: Path) -> None:
    assert checkpoint_revision(folder) == checkpoint_revision(checkpoint_folder())
    assert checkpoint_revision(folder) != checkpoint_revision(checkpoint_folder(1))
    (folder / "tokenizer.json").unlink()
    assert checkpoint_revision(folder) == checkpoint_revision(checkpoint_folder())


@pytest.mark.parametrize("at", [0, -1], ids=["first element", "last element"])
def test_one_tensor_that_was_trained_on_is_another_revision(folder: Path, at: int) -> None:
    before = checkpoint_revision(folder)
    tensors = load_file(folder / WEIGHTS)
    for name in sorted(tensors)[:: max(1, len(tensors) // 5)]:
        changed = dict(tensors)
        changed[name] = tensors[name].clone()
        changed[name].view(-1)[at] += 1
        save_file(changed, folder / WEIGHTS, {"format": "pt"})
        assert checkpoint_revision(folder) != before, name


def test_another_config_of_the_same_weights_is_another_revision(folder: Path) -> None:
    before = checkpoint_revision(folder)
    config = folder / "config.json"
    config.write_text(config.read_text().replace('"num_attention_heads": 4', "", 1) + "\n")
    assert checkpoint_revision(folder) != before


@pytest.mark.parametrize("name", ["pytorch_model.bin", "model.pt", "model.gguf"])
def test_weights_whose_tensors_are_not_known_are_sampled(tmp_path: Path, name: str) -> None:
    data = bytearray(range(256)) * 4096
    file = tmp_path / name
    file.write_bytes(data)
    before = checkpoint_revision(tmp_path)
    assert checkpoint_revision(file) == before
    for at in (0, len(data) - 1):
        changed = bytearray(data)
        changed[at] ^= 1
        file.write_bytes(changed)
        assert checkpoint_revision(tmp_path) != before
    file.write_bytes(data[:-1])
    assert checkpoint_revision(tmp_path) != before


def test_little_of_a_large_checkpoint_is_read(tmp_path: Path) -> None:
    """Four terabytes of zeroes that take no room: who read them would not be done today."""
    size = 1 << 42
    header = b'{"a":{"dtype":"U8","shape":[%d],"data_offsets":[0,%d]}}' % (size, size)
    file = tmp_path / WEIGHTS
    with file.open("wb") as opened:
        opened.write(struct.pack("<Q", len(header)) + header)
        opened.truncate(8 + len(header) + size)
    before = checkpoint_revision(tmp_path)
    with file.open("r+b") as opened:
        opened.seek(-1, 2)
        opened.write(b"\1")
    assert checkpoint_revision(tmp_path) != before


@pytest.mark.parametrize(
    ("data", "words"),
    [
        (None, "it holds no weights"),
        (b"", "its header is not whole"),
        (struct.pack("<Q", 1 << 60) + b"{}", "its header is not whole"),
        (struct.pack("<Q", 9) + b"{}", "its header is not whole"),
        (struct.pack("<Q", 2) + b"[]", "is not that of safetensors"),
        (struct.pack("<Q", 8) + b'{"a": 1}', "is not that of safetensors"),
        (struct.pack("<Q", 29) + b'{"a": {"data_offsets":[0,8]}}', "ends before its tensors do"),
    ],
)
def test_no_word_is_made_of_what_is_no_checkpoint(
    tmp_path: Path, data: bytes | None, words: str
) -> None:
    if data is not None:
        (tmp_path / WEIGHTS).write_bytes(data)
    with pytest.raises(CheckpointInvalidError, match=words):
        checkpoint_revision(tmp_path)


def test_random_weights_of_one_architecture_are_many(tmp_path: Path) -> None:
    revisions = set()
    for seed in range(3):
        tensors = {"w": torch.empty(64, 64).uniform_(generator=torch.Generator().manual_seed(seed))}
        save_file(tensors, tmp_path / WEIGHTS)
        revisions.add(checkpoint_revision(tmp_path))
    assert len(revisions) == 3
