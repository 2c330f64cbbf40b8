"""Checkpoints of draft heads are read safely, and what is wrong with one is said before anything is loaded."""

import json
import pickle
import random

import pytest
import torch
from safetensors.torch import save_file

from hf_specdec import CheckpointFormatError, SpecConfigError, SpeculativeConfig
from hf_specdec.candidate_generators.draft_model.network import load_draft_model
from hf_specdec.checkpoints.checkpoint import Checkpoint, head_placement
from hf_specdec.checkpoints.reader import CheckpointReader
from hf_specdec.checkpoints.settings import NAME
from hf_specdec.target_facts import hidden_size
from tests.helpers.models import tiny_llama


TENSORS = {"a.weight": torch.randn(3, 4), "b.weight": torch.randn(5).half(), "ids": torch.arange(6)}


class Code:
    """Stands for the harm that a malicious pickle does when it is loaded."""

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
    assert checkpoint.header.config == {"hidden_size": 4}
    assert checkpoint.header.shapes == {"a.weight": (3, 4), "b.weight": (5,), "ids": (6,)}
    assert torch.equal(checkpoint.read("b.weight", torch.float32), TENSORS["b.weight"].float())
    assert torch.equal(checkpoint.read("ids", torch.float32), TENSORS["ids"])
    assert checkpoint.read("b.weight").dtype == torch.float16


def test_safe_files_come_first(folder):
    torch.save({"other": torch.zeros(1)}, folder / "pytorch_model.bin")
    save_file(TENSORS, folder / "model.safetensors")
    assert Checkpoint(settings(folder)).header.file == "model.safetensors"


def test_a_subfolder(folder):
    inner = folder / "heads"
    inner.mkdir()
    (inner / "config.json").write_text("{}")
    save_file(TENSORS, inner / "model.safetensors")
    assert Checkpoint(settings(folder, subfolder="heads")).header.config == {}


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


@pytest.mark.parametrize(
    "content",
    [
        [1, 2],
        {"a": 3},
        torch.zeros(2),
        {"state_dict": {"a": torch.zeros(2)}},
        {0: torch.zeros(2)},
        {("a",): torch.zeros(2)},
        {"a": torch.eye(3).to_sparse()},
        {"a": torch.zeros(2, device="meta")},
        {"a": torch.zeros(1).expand(10**6, 10**6)},
    ],
    ids=["list", "number", "tensor", "nested", "int_key", "tuple_key", "sparse", "meta", "expanded"],
)
def test_a_pickle_without_a_state_dict(folder, content):
    torch.save(content, folder / "pytorch_model.bin")
    with pytest.raises(CheckpointFormatError, match="not a state dict, a dict of dense tensors"):
        Checkpoint(settings(folder))


@pytest.mark.parametrize(
    "content",
    [b"", b"hello world", b"version https://git-lfs.github.com/spec/v1\nsize 12\n", b"\x80\x02}q\x00."],
    ids=["empty", "text", "pointer", "plain_pickle"],
)
def test_no_file_of_torch_save(folder, content):
    (folder / "pytorch_model.bin").write_bytes(content)
    with pytest.raises(CheckpointFormatError, match=r"pytorch_model\.bin is (damaged|a pickle)"):
        Checkpoint(settings(folder))


@pytest.mark.parametrize("new_format", [True, False])
@pytest.mark.parametrize("seed", range(60))
def test_damaged_bytes_in_a_pickle(folder, seed, new_format):
    """Wherever they are, there is an error of this package or tensors that can be read."""
    torch.save(TENSORS, folder / "pytorch_model.bin", _use_new_zipfile_serialization=new_format)
    content, numbers = bytearray((folder / "pytorch_model.bin").read_bytes()), random.Random(seed)
    for _ in range(numbers.randrange(1, 8)):
        content[numbers.randrange(len(content))] = numbers.randrange(256)
    (folder / "pytorch_model.bin").write_bytes(content)
    try:
        checkpoint = Checkpoint(settings(folder))
        found = {name: checkpoint.read(name) for name in checkpoint.header.shapes}
    except CheckpointFormatError:
        return
    assert {name: tuple(tensor.shape) for name, tensor in found.items()} == checkpoint.header.shapes


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


@pytest.mark.parametrize(
    "index", ["[]", "{}", "{", '{"weight_map": 3}', '{"weight_map": {"a": 5}}', '{"weight_map": {"a": ["x"]}}', "\xff"]
)
def test_a_damaged_index(folder, index):
    (folder / "model.safetensors.index.json").write_text(index)
    with pytest.raises(CheckpointFormatError, match="damaged index"):
        Checkpoint(settings(folder))


@pytest.mark.parametrize("content", ["[1]", '"medusa"', "null", "3"])
def test_a_config_that_is_no_object(folder, content):
    WRITERS["safetensors"](folder)
    (folder / "config.json").write_text(content)
    with pytest.raises(CheckpointFormatError, match="no readable config.json: config.json must hold an object"):
        Checkpoint(settings(folder))


def test_settings_are_checked(folder):
    WRITERS["safetensors"](folder)
    reader = CheckpointReader(Checkpoint(settings(folder)).header)
    assert reader.setting("hidden_size") == 4
    assert reader.setting("vocab_size") is None
    with pytest.raises(CheckpointFormatError, match="`hidden_size`=4 in its config.json, which must be a name"):
        reader.setting("hidden_size", NAME)


def test_only_real_numbers_are_weights(folder):
    others = {"int8": torch.zeros(2, 2).to(torch.int8), "bool": torch.zeros(2) > 0, "complex": torch.zeros(2) + 0j}
    save_file({**TENSORS, **others}, folder / "model.safetensors")
    checkpoint = Checkpoint(settings(folder))
    assert {checkpoint.read_weight(name, torch.float64).dtype for name in ("a.weight", "b.weight")} == {torch.float64}
    for name in ("int8", "bool", "complex", "ids"):
        with pytest.raises(CheckpointFormatError, match=f"{name} is stored as .*float16, bfloat16"):
            checkpoint.read_weight(name, torch.float32)


def test_matrices_and_counts(folder):
    WRITERS["safetensors"](folder)
    reader = CheckpointReader(Checkpoint(settings(folder)).header)
    assert reader.matrix("a.weight") == (3, 4)
    with pytest.raises(CheckpointFormatError, match=r"b\.weight must be a matrix, and has the shape \[5\]"):
        reader.matrix("b.weight")
    reader.check_count(3, "three heads")
    with pytest.raises(CheckpointFormatError, match="has 3 tensors in model.safetensors, and 9 heads need at least 9"):
        reader.check_count(9, "9 heads")


def test_missing_tensors_are_named(folder):
    save_file(TENSORS, folder / "model.safetensors")
    reader = CheckpointReader(Checkpoint(settings(folder)).header)
    reader.require(["a.weight"], "the first head")
    with pytest.raises(CheckpointFormatError, match=r"lacks 4 tensors of the heads: x0, x1, x2, \.\.\. \(it has 3"):
        reader.require(["a.weight", *(f"x{i}" for i in range(4))], "the heads")


def test_placement_follows_the_target_unless_it_is_said():
    target = tiny_llama().to(torch.bfloat16)
    assert head_placement(settings("x"), target) == (torch.bfloat16, torch.device("cpu"))
    assert head_placement(settings("x", dtype="float32"), target)[0] == torch.float32
    assert head_placement(settings("x", dtype="auto", device="cpu"), target) == (None, torch.device("cpu"))
    with pytest.raises(SpecConfigError, match="quantization.*for draft models"):
        head_placement(settings("x", quantization="bitsandbytes_4bit"), target)
    assert hidden_size(target) == 32


class Hook:
    def __init__(self, execution_device):
        self.execution_device = execution_device


@pytest.mark.parametrize("execution_device", ["cpu", torch.device("cpu")])
def test_an_offloaded_head_has_no_device_of_its_own(execution_device):
    target = tiny_llama()
    target.lm_head.to("meta")
    assert head_placement(settings("x"), target)[1] == torch.device("cpu")
    target.to("meta")
    assert head_placement(settings("x"), target)[1] == torch.device("cpu")
    target.lm_head._hf_hook = Hook("cuda:1")
    assert head_placement(settings("x"), target)[1] == torch.device("cuda:1")
    target.lm_head._hf_hook = Hook(execution_device)
    assert head_placement(settings("x"), target)[1] == torch.device("cpu")


@pytest.mark.parametrize("device", ["foo", "meta", "cuda:77"])
def test_a_device_that_is_not_there(device, tmp_path):
    target = tiny_llama()
    with pytest.raises(SpecConfigError, match=f"`device`='{device}'.*leave it out|Leave it out"):
        head_placement(settings("x", device=device), target)
    target.save_pretrained(tmp_path)
    with pytest.raises(SpecConfigError, match=f"`device`='{device}'"):
        load_draft_model(settings(tmp_path, device=device), target)
