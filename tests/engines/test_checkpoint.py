"""The fingerprint of a checkpoint: other weights are another word, another place is not."""

from __future__ import annotations

import json
import shutil
import struct
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from restow.agents.engines.common.checkpoint import (
    CheckpointInvalidError,
    LoadedAdapters,
    checkpoint_revision,
    local_checkpoint,
)
from restow.demo.recall.model import checkpoint_folder

WEIGHTS = "model.safetensors"


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Copy the recall model's checkpoint, and return the copy's folder."""
    return Path(shutil.copytree(checkpoint_folder(), tmp_path / "copy"))


def test_where_it_lies_does_not_matter_and_another_model_does(folder: Path) -> None:
    assert checkpoint_revision(folder) == checkpoint_revision(checkpoint_folder())
    assert checkpoint_revision(folder) != checkpoint_revision(checkpoint_folder(1))
    (folder / "tokenizer.json").unlink()
    assert checkpoint_revision(folder) == checkpoint_revision(checkpoint_folder())


def test_the_word_of_a_checkpoint_is_the_same_in_every_version(tmp_path: Path) -> None:
    # A store on a disk, and engines of another version, find states by this word.
    header = b'{"a":{"data_offsets":[0,600]},"b":{"data_offsets":[600,608]}}'
    (tmp_path / WEIGHTS).write_bytes(struct.pack("<Q", len(header)) + header + bytes(range(76)) * 8)
    (tmp_path / "config.json").write_bytes(b'{"heads": 4}' * 100)
    assert checkpoint_revision(tmp_path) == "sha256-552a094651549f4fa1ffdc8b9be84870"
    words = {
        5: "sha256-24a6bd37d0040740f535a4a5c3a8a18b",
        300: "sha256-2b40ae67155ae3ab9999c410c705ee5f",
        100_003: "sha256-3679464456b712d4c6318b011edd81f3",
    }
    for size, word in words.items():
        file = tmp_path / f"{size}.bin"
        file.write_bytes((bytes(range(251)) * (size // 251 + 1))[:size])
        assert checkpoint_revision(file) == word


def test_another_name_of_a_file_is_another_revision(folder: Path) -> None:
    before = checkpoint_revision(folder)
    (folder / WEIGHTS).rename(folder / "other.safetensors")
    assert checkpoint_revision(folder) != before


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


@pytest.mark.parametrize("name", ["params.json", "hf_quant_config.json", "adapter_config.json"])
def test_other_files_that_say_how_weights_are_used_count(folder: Path, name: str) -> None:
    before = checkpoint_revision(folder)
    (folder / name).write_text('{"rope_theta": 1}')
    one = checkpoint_revision(folder)
    (folder / name).write_text('{"rope_theta": 2}')
    assert len({before, one, checkpoint_revision(folder)}) == 3


def test_files_that_engines_leave_out_do_not_count(folder: Path) -> None:
    # A clone of a checkpoint has these files; a checkpoint named as on the hub does not.
    config = folder / "config.json"
    quantised = json.loads(config.read_text()) | {"quantization_config": {"quant_method": "fp8"}}
    config.write_text(json.dumps(quantised))
    files = json.dumps({"weight_map": {"a": WEIGHTS}})
    (folder / "model.safetensors.index.json").write_text(files)
    before = checkpoint_revision(folder)
    for name in ("pytorch_model.bin", "consolidated.safetensors", "hf_quant_config.json"):
        (folder / name).write_text(name)
    assert checkpoint_revision(folder) == before
    (folder / WEIGHTS).rename(folder / "pytorch_model.bin")
    before = checkpoint_revision(folder)
    (folder / "training_args.bin").write_text("more")
    assert checkpoint_revision(folder) == before


def test_the_whole_of_an_adapter_is_read(folder: Path) -> None:
    # A tensor whose ends are as before differs in its middle.
    sampled, whole = checkpoint_revision(folder), checkpoint_revision(folder, whole=True)
    data = bytearray((folder / WEIGHTS).read_bytes())
    length = struct.unpack_from("<Q", data)[0]
    offsets = [
        v["data_offsets"] for k, v in json.loads(data[8 : 8 + length]).items() if k[0] != "_"
    ]
    begin, end = max(offsets, key=lambda span: span[1] - span[0])
    data[8 + length + (begin + end) // 2] ^= 1
    (folder / WEIGHTS).write_bytes(data)
    assert checkpoint_revision(folder) == sampled
    assert checkpoint_revision(folder, whole=True) != whole


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
    # The file has four terabytes of zeroes that take no room: reading all of them takes a day.
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


def test_the_whole_of_what_a_worker_loads_is_its_fingerprint(folder: Path) -> None:
    loaded = LoadedAdapters()
    with loaded.loading("a", str(folder)):
        pass
    (folder / WEIGHTS).unlink()
    with loaded.loading("empty", str(folder)):
        pass
    whole = checkpoint_revision(checkpoint_folder(), whole=True)
    assert loaded.take() == {"a": whole, "empty": ""}


def test_a_checkpoint_is_found_in_the_cache_of_the_hub(tmp_path: Path) -> None:
    cached = tmp_path / "models--owner--name"
    (cached / "snapshots" / "abc").mkdir(parents=True)
    (cached / "refs").mkdir()
    (cached / "refs" / "main").write_text("abc")
    found = local_checkpoint("owner/name", cache_dir=str(tmp_path))
    assert found == cached / "snapshots" / "abc"
    assert local_checkpoint(str(found)) == found
    with pytest.raises(CheckpointInvalidError, match="not in the cache of this host"):
        local_checkpoint("owner/other", cache_dir=str(tmp_path))
