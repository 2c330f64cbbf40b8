"""Files of strangers are read safely: no code runs, and what is damaged or no tensors is said before it is loaded."""

import json
import os
import pickle
import random
from types import SimpleNamespace

import pytest
import torch
from safetensors.torch import save_file

from hf_specdec import CheckpointFormatError, SpecConfigError, SpeculativeConfig
from hf_specdec.candidate_generators.draft_model.network import load_draft_model
from hf_specdec.checkpoints.checkpoint import Checkpoint, head_placement
from hf_specdec.reading import MAX_SETTINGS_BYTES, parse_json, read_text
from tests.helpers.levels import in_full
from tests.helpers.models import tiny_llama


TENSORS = {"a.weight": torch.randn(3, 4), "b.weight": torch.randn(5).half(), "ids": torch.arange(6)}
SAFE, PICKLE, INDEX = "model.safetensors", "pytorch_model.bin", "model.safetensors.index.json"


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
    (folder / INDEX).write_text(json.dumps({"weight_map": weight_map}))


WRITERS = {
    "safetensors": lambda folder: save_file(TENSORS, folder / SAFE),
    "shards": save_shards,
    "pickle": lambda folder: torch.save(TENSORS, folder / PICKLE),
}


# Formats


@pytest.mark.parametrize("write", WRITERS.values(), ids=WRITERS)
def test_tensors_are_read_by_name(folder, write):
    inner = folder / "heads"
    inner.mkdir()
    (inner / "config.json").write_text('{"hidden_size": 8}')
    write(inner)
    checkpoint = Checkpoint(settings(folder, subfolder="heads"))
    assert checkpoint.header.config == {"hidden_size": 8}
    assert checkpoint.header.shapes == {"a.weight": (3, 4), "b.weight": (5,), "ids": (6,)}
    assert torch.equal(checkpoint.read("b.weight", torch.float32), TENSORS["b.weight"].float())
    assert torch.equal(checkpoint.read("ids", torch.float32), TENSORS["ids"])
    assert checkpoint.read("b.weight").dtype == torch.float16


def test_safe_files_come_first(folder):
    torch.save({"other": torch.zeros(1)}, folder / PICKLE)
    save_file(TENSORS, folder / SAFE)
    assert Checkpoint(settings(folder)).header.file == SAFE


# Pickles


@pytest.mark.parametrize("dump", [torch.save, lambda content, path: path.write_bytes(pickle.dumps(content))])
def test_code_in_a_pickle_does_not_run(folder, monkeypatch, dump):
    monkeypatch.chdir(folder)
    dump({"a": Code()}, folder / PICKLE)
    with pytest.raises(CheckpointFormatError, match="more than tensors.*could run code"):
        Checkpoint(settings(folder))
    assert not (folder / "should_not_exist").exists()


@pytest.mark.parametrize(
    "content",
    [
        {"a": 3},
        {"a": torch.zeros(1).expand(10**6, 10**6)},
        *in_full([1, 2], torch.zeros(2), {"state_dict": {"a": torch.zeros(2)}}, {0: torch.zeros(2)}),
        *in_full({("a",): torch.zeros(2)}, {"a": torch.eye(3).to_sparse()}, {"a": torch.zeros(2, device="meta")}),
    ],
    ids=lambda content: str(type(content)),
)
def test_pickle_without_a_state_dict(folder, content):
    torch.save(content, folder / PICKLE)
    with pytest.raises(CheckpointFormatError, match="not a state dict, a dict of dense tensors"):
        Checkpoint(settings(folder))


@pytest.mark.parametrize("seed", [0, 1, 2, 3, *in_full(*range(4, 24))])
def test_damaged_bytes_in_a_pickle(folder, seed):
    """Wherever they are, there is an error of this package or tensors that can be read."""
    torch.save(TENSORS, folder / PICKLE, _use_new_zipfile_serialization=seed % 2 == 0)
    content, numbers = bytearray((folder / PICKLE).read_bytes()), random.Random(seed)
    for _ in range(numbers.randrange(1, 8)):
        content[numbers.randrange(len(content))] = numbers.randrange(256)
    (folder / PICKLE).write_bytes(content)
    try:
        checkpoint = Checkpoint(settings(folder))
        found = {name: checkpoint.read(name) for name in checkpoint.header.shapes}
    except CheckpointFormatError:
        return
    assert {name: tuple(tensor.shape) for name, tensor in found.items()} == checkpoint.header.shapes


# Other files that are damaged


POINTER = b"version https://git-lfs.github.com/spec/v1\nsize 12\n"


@pytest.mark.parametrize(
    ("file", "content", "message"),
    [
        (PICKLE, None, f"{PICKLE} is (damaged|a pickle)"),
        (SAFE, None, f"{SAFE} is damaged"),
        (PICKLE, POINTER, f"{PICKLE} is (damaged|a pickle)"),
        (INDEX, b'{"weight_map": {"a": ["x"]}}', "damaged index"),
        ("config.json", b"[1]", "no readable config.json: config.json must hold an object"),
        *in_full(*((PICKLE, content, f"{PICKLE} is (damaged|a pickle)") for content in (b"", b"\x80\x02}q\x00."))),
        *in_full(*((INDEX, content, "damaged index") for content in (b"[]", b"{", b'{"weight_map": 3}', b"\xff"))),
        *in_full(*(("config.json", content, "must hold an object") for content in (b'"medusa"', b"null"))),
    ],
)
def test_damaged_file(folder, file, content, message):
    if file != INDEX:
        WRITERS["pickle" if file == PICKLE else "safetensors"](folder)
    if content is None:
        content = (folder / file).read_bytes()
        content = content[: len(content) // 2]
    (folder / file).write_bytes(content)
    with pytest.raises(CheckpointFormatError, match=message):
        Checkpoint(settings(folder))


def test_missing_files(folder):
    with pytest.raises(CheckpointFormatError, match="none of the weight files.*heads.pt"):
        Checkpoint(settings(folder), ("heads.safetensors", "heads.pt"))
    save_shards(folder)
    (folder / "model-1.safetensors").unlink()
    with pytest.raises(CheckpointFormatError, match=f"lacks model-1.safetensors, which {INDEX}"):
        Checkpoint(settings(folder))
    (folder / "config.json").unlink()
    with pytest.raises(CheckpointFormatError, match="no readable config.json"):
        Checkpoint(settings(folder))


# What the readers of formats ask


# Dtype and device


CPU = torch.device("cpu")


def test_placement_follows_the_target_unless_it_is_said():
    target = tiny_llama().to(torch.bfloat16)
    assert head_placement(settings("x"), target) == (torch.bfloat16, CPU)
    assert head_placement(settings("x", dtype="float32"), target)[0] == torch.float32
    assert head_placement(settings("x", dtype="auto", device="cpu"), target) == (None, CPU)
    with pytest.raises(SpecConfigError, match="quantization.*for draft models"):
        head_placement(settings("x", quantization="bitsandbytes_4bit"), target)


def test_placement_of_an_offloaded_target():
    target = tiny_llama()
    for part in (target.lm_head, target):
        part.to("meta")
        assert head_placement(settings("x"), target)[1] == CPU
    for named in ("cuda:1", "cpu", CPU):
        target.lm_head._hf_hook = SimpleNamespace(execution_device=named)
        assert head_placement(settings("x"), target)[1] == torch.device(named)


@pytest.mark.parametrize("device", ["cuda:77", *in_full("foo", "meta")])
def test_device_that_is_not_there(device, tmp_path):
    target = tiny_llama()
    with pytest.raises(SpecConfigError, match=f"`device`='{device}'.*leave it out|Leave it out"):
        head_placement(settings("x", device=device), target)
    target.save_pretrained(tmp_path)
    with pytest.raises(SpecConfigError, match=f"`device`='{device}'"):
        load_draft_model(settings(tmp_path, device=device), target)


# Text and JSON that a user names: no pipe, device or flood is read, and no key is taken for another


def test_regular_files_and_links_are_read(tmp_path):
    file = tmp_path / "a.json"
    file.write_text("ää", encoding="utf-8")
    (tmp_path / "link.json").symlink_to(file)
    for path in (file, str(file), tmp_path / "link.json"):
        assert read_text(path, max_bytes=4) == "ää"
    with pytest.raises(ValueError, match="more than 3 bytes"):
        read_text(file, max_bytes=3)


UNREADABLE = {
    "pipe": os.mkfifo,
    "device": lambda path: path.symlink_to("/dev/zero"),
    "large": lambda path: path.write_bytes(b" " * (MAX_SETTINGS_BYTES + 1)),
    "folder": os.mkdir,
    "bytes": lambda path: path.write_bytes(b"\xff\xfe"),
    "missing": lambda path: None,
}


@pytest.mark.parametrize("kind", ["pipe", "device", "large", *in_full("folder", "bytes", "missing")])
def test_other_files_are_errors(tmp_path, kind):
    path = tmp_path / "a.json"
    UNREADABLE[kind](path)
    with pytest.raises((ValueError, OSError)):
        read_text(path)
    for value in (str(path), path):
        with pytest.raises(SpecConfigError, match=r"a\.json.*cannot be read"):
            SpeculativeConfig.resolve(value)


@pytest.mark.parametrize(
    ("text", "why"),
    [
        ('{"method": "ngram", "options": {"prompt_lookup_max": 3, "prompt_lookup_max": 4}}', "stands twice"),
        ('{"method": ' + "[" * 10**5, "nested too deeply"),
        ('{"method": "typical", "posterior_alpha": NaN}', "NaN is no number"),
        *in_full(('{"method": "ngram", "num_speculative_tokens": ' + "9" * 5000 + "}", "digits")),
        *in_full(
            ('{"' + "k" * 10**5 + '": 1, "' + "k" * 10**5 + '": 2}', "stands twice"), ("{'a': 1}", "double quotes")
        ),
    ],
    ids=lambda text: text[:20],
)
def test_json_that_says_nothing_clear_is_an_error(tmp_path, text, why):
    with pytest.raises(ValueError):  # noqa: PT011 - the words are looked at below
        parse_json(text)
    (tmp_path / "settings.json").write_text(text)
    for value in (text, tmp_path / "settings.json"):
        with pytest.raises(SpecConfigError, match=why) as caught:
            SpeculativeConfig.resolve(value)
        assert len(str(caught.value)) < 700
