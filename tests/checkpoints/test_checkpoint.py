"""Checkpoints of draft heads are read safely, and what is wrong with one is said before anything is loaded."""

import json
import pickle

import pytest
import torch
from safetensors.torch import save_file

from hf_specdec import CheckpointFormatError, SpecConfigError, SpeculativeConfig
from hf_specdec.models.checkpoint import Checkpoint, head_placement, hidden_size
from tests.models import tiny_llama


TENSORS = {"a.weight": torch.randn(3, 4), "b.weight": torch.randn(5).half(), "ids": torch.arange(6)}


class Code:
    """What a malicious pickle does when it is loaded."""

    def __reduce__(self):
        return (open, ("should_not_exist", "w"))


def settings(folder, **changes) -> SpeculativeConfig:
    return SpeculativeConfig(method="draft_model", model=str(folder), **changes)


@pytest.fixture
def folder(tmp_path):
    (tmp_path / "config.json").write_text('{"hidden_size": 4}')
    return tmp_path


def save_shards(folder):
    names = list(TENSORS)
    for index, name in enumerate(names):
        save_file({name: TENSORS[name]}, folder / f"model-{index}.safetensors")
    weight_map = {name: f"model-{index}.safetensors" for index, name in enumerate(names)}
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))


WRITERS = {
    "safetensors": lambda folder: save_file(TENSORS, folder / "model.safetensors"),
    "shards": save_shards,
    "pickle": lambda folder: torch.save(TENSORS, folder / "pytorch_model.bin"),
}


@pytest.mark.parametrize("write", WRITERS.values(), ids=WRITERS)
def test_tensors_are_read_by_name(folder, write):
    write(folder)
    checkpoint = Checkpoint(settings(folder))
    assert checkpoint.config == {"hidden_size": 4}
    assert checkpoint.shapes == {"a.weight": (3, 4), "b.weight": (5,), "ids": (6,)}
    found = checkpoint.read(["b.weight", "ids"], torch.float32)
    assert list(found) == ["b.weight", "ids"]
    assert torch.equal(found["b.weight"], TENSORS["b.weight"].float())
    assert torch.equal(found["ids"], TENSORS["ids"])
    assert checkpoint.read(["b.weight"])["b.weight"].dtype == torch.float16


def test_safe_files_come_first(folder):
    torch.save({"other": torch.zeros(1)}, folder / "pytorch_model.bin")
    save_file(TENSORS, folder / "model.safetensors")
    assert Checkpoint(settings(folder)).file == "model.safetensors"


def test_a_subfolder(folder):
    inner = folder / "heads"
    inner.mkdir()
    (inner / "config.json").write_text("{}")
    save_file(TENSORS, inner / "model.safetensors")
    assert Checkpoint(settings(folder, subfolder="heads")).config == {}


def test_no_weights(folder):
    with pytest.raises(CheckpointFormatError, match="none of the weight files.*heads.pt"):
        Checkpoint(settings(folder), ("heads.safetensors", "heads.pt"))


def test_no_config(tmp_path):
    with pytest.raises(CheckpointFormatError, match="no readable config.json"):
        Checkpoint(settings(tmp_path))


def test_code_in_a_pickle_does_not_run(folder, monkeypatch):
    monkeypatch.chdir(folder)
    with open(folder / "pytorch_model.bin", "wb") as file:
        pickle.dump({"a": Code()}, file)
    with pytest.raises(CheckpointFormatError, match="more than tensors.*could run code"):
        Checkpoint(settings(folder))
    torch.save({"a": Code()}, folder / "pytorch_model.bin")
    with pytest.raises(CheckpointFormatError, match="more than tensors.*could run code"):
        Checkpoint(settings(folder))
    assert not (folder / "should_not_exist").exists()


@pytest.mark.parametrize("content", [[1, 2], {"a": 3}, torch.zeros(2)])
def test_a_pickle_without_a_state_dict(folder, content):
    torch.save(content, folder / "pytorch_model.bin")
    with pytest.raises(CheckpointFormatError, match="not a state dict"):
        Checkpoint(settings(folder))


@pytest.mark.parametrize("file", ["model.safetensors", "pytorch_model.bin"])
def test_a_truncated_file(folder, file):
    WRITERS["safetensors" if file.endswith("safetensors") else "pickle"](folder)
    content = (folder / file).read_bytes()
    (folder / file).write_bytes(content[: len(content) // 2])
    with pytest.raises(CheckpointFormatError, match=f"{file} is (damaged|a pickle)"):
        Checkpoint(settings(folder))


def test_a_missing_shard(folder):
    save_shards(folder)
    (folder / "model-1.safetensors").unlink()
    with pytest.raises(CheckpointFormatError, match=r"lacks model-1.safetensors, which model.safetensors.index.json"):
        Checkpoint(settings(folder))


@pytest.mark.parametrize("index", ["[]", "{}", "{", '{"weight_map": 3}'])
def test_a_damaged_index(folder, index):
    (folder / "model.safetensors.index.json").write_text(index)
    with pytest.raises(CheckpointFormatError, match="damaged index"):
        Checkpoint(settings(folder))


def test_missing_tensors_are_named(folder):
    save_file(TENSORS, folder / "model.safetensors")
    checkpoint = Checkpoint(settings(folder))
    checkpoint.require(["a.weight"], "the first head")
    with pytest.raises(CheckpointFormatError, match=r"lacks 4 tensors of the heads: x0, x1, x2, \.\.\. \(it has 3"):
        checkpoint.require(["a.weight", *(f"x{i}" for i in range(4))], "the heads")


def test_placement_follows_the_target_unless_it_is_said():
    target = tiny_llama().to(torch.bfloat16)
    assert head_placement(settings("x"), target) == (torch.bfloat16, torch.device("cpu"))
    assert head_placement(settings("x", dtype="float32"), target)[0] == torch.float32
    assert head_placement(settings("x", dtype="auto", device="meta"), target) == (None, torch.device("meta"))
    with pytest.raises(SpecConfigError, match="quantization.*for draft models"):
        head_placement(settings("x", quantization="bitsandbytes_4bit"), target)
    assert hidden_size(target) == 32
