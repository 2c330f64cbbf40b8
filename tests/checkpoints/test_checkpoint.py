"""Files of strangers are read safely: no code runs, and what is damaged or no tensors is said before it is loaded."""

import contextlib
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
from hf_specdec.checkpoints.header import Header
from hf_specdec.checkpoints.loading import head_placement
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


def write_as(kind, folder):
    if kind == "pickle":
        torch.save(TENSORS, folder / PICKLE)
    elif kind == "safetensors":
        save_file(TENSORS, folder / SAFE)
    else:
        files = {name: f"model-{index}.safetensors" for index, name in enumerate(TENSORS)}
        for name, file in files.items():
            save_file({name: TENSORS[name]}, folder / file)
        (folder / INDEX).write_text(json.dumps({"weight_map": files}))


@pytest.mark.parametrize("kind", ["safetensors", "shards", "pickle"])
def test_tensors_are_read_by_name(folder, kind):
    inner = folder / "heads"
    inner.mkdir()
    (inner / "config.json").write_text('{"hidden_size": 8}')
    if kind == "safetensors":
        # Which goes before.
        torch.save({"other": torch.zeros(1)}, inner / PICKLE)
    write_as(kind, inner)
    header = Header.of(settings(folder, subfolder="heads"))
    assert header.config == {"hidden_size": 8}
    assert header.tensors == {"a.weight": (3, 4), "b.weight": (5,), "ids": (6,)}
    assert torch.equal(header.tensors.read("b.weight", torch.float32), TENSORS["b.weight"].float())
    assert torch.equal(header.tensors.read("ids", torch.float32), TENSORS["ids"])
    assert header.tensors.read("b.weight").dtype == torch.float16


def test_code_in_a_pickle_does_not_run(folder, monkeypatch):
    monkeypatch.chdir(folder)
    for dump in (torch.save, lambda content, path: path.write_bytes(pickle.dumps(content))):
        dump({"a": Code()}, folder / PICKLE)
        with pytest.raises(CheckpointFormatError, match="more than tensors.*could run code"):
            Header.of(settings(folder))
        assert not (folder / "should_not_exist").exists()
    # Nor is anything else than a dict of dense tensors taken.
    others = [{"a": 3}, {"a": torch.zeros(1).expand(10**6, 10**6)}, [1, 2], torch.zeros(2), {0: torch.zeros(2)}]
    others += [{"state_dict": {"a": torch.zeros(2)}}, {"a": torch.eye(3).to_sparse()}]
    for content in (*others, {"a": torch.zeros(2, device="meta")}):
        torch.save(content, folder / PICKLE)
        with pytest.raises(CheckpointFormatError, match="not a state dict, a dict of dense tensors"):
            Header.of(settings(folder))


@pytest.mark.parametrize("seeds", [range(6), *in_full(range(6, 30))])
def test_damaged_bytes_in_a_pickle(folder, seeds):
    """Wherever they are, there is an error of this package or tensors that can be read."""
    for seed in seeds:
        torch.save(TENSORS, folder / PICKLE, _use_new_zipfile_serialization=seed % 2 == 0)
        content, numbers = bytearray((folder / PICKLE).read_bytes()), random.Random(seed)
        for _ in range(numbers.randrange(1, 8)):
            content[numbers.randrange(len(content))] = numbers.randrange(256)
        (folder / PICKLE).write_bytes(content)
        with contextlib.suppress(CheckpointFormatError):
            tensors = Header.of(settings(folder)).tensors
            assert {name: tuple(tensors.read(name).shape) for name in tensors} == tensors


DAMAGED = {
    PICKLE: (None, b"version https://git-lfs.github.com/spec/v1\nsize 12\n", b"", b"\x80\x02}q\x00."),
    SAFE: (None,),
    INDEX: (b'{"weight_map": {"a": ["x"]}}', b"[]", b"{", b'{"weight_map": 3}', b"\xff"),
    "config.json": (b"[1]", b'"medusa"', b"null"),
}


@pytest.mark.parametrize("file", DAMAGED)
def test_damaged_or_missing_files(folder, file):
    """`None` stands for the first half of the file."""
    if file != INDEX:
        write_as("pickle" if file == PICKLE else "safetensors", folder)
    for content in DAMAGED[file]:
        if content is None:
            content = (folder / file).read_bytes()
            content = content[: len(content) // 2]
        (folder / file).write_bytes(content)
        message = f"{file} is (damaged|a pickle)|damaged index|no readable config.json: .*must hold an object"
        with pytest.raises(CheckpointFormatError, match=message):
            Header.of(settings(folder))
    (folder / file).unlink()
    write_as("shards", folder)
    lacked = file if file == "config.json" else "model-1.safetensors"
    (folder / lacked).unlink(missing_ok=True)
    with pytest.raises(CheckpointFormatError, match=f"lacks {lacked}, which {INDEX}|no readable config.json"):
        Header.of(settings(folder), (INDEX,))


def test_placement_follows_the_target_unless_it_is_said(tmp_path):
    target, cpu = tiny_llama(), torch.device("cpu")
    target.save_pretrained(tmp_path)
    for device in ("cuda:77", "foo", "meta"):
        for place in (head_placement, load_draft_model):
            with pytest.raises(SpecConfigError, match=f"`device`='{device}'"):
                place(settings(tmp_path, device=device), target)
    target.to(torch.bfloat16)
    assert head_placement(settings("x"), target) == (torch.bfloat16, cpu)
    assert head_placement(settings("x", dtype="float32"), target)[0] == torch.float32
    assert head_placement(settings("x", dtype="auto", device="cpu"), target) == (None, cpu)
    with pytest.raises(SpecConfigError, match="quantization.*for draft models"):
        head_placement(settings("x", quantization="bitsandbytes_4bit"), target)
    # Of an offloaded target.
    for part in (target.lm_head, target):
        part.to("meta")
        assert head_placement(settings("x"), target)[1] == cpu
    for named in ("cuda:1", "cpu", cpu):
        target.lm_head._hf_hook = SimpleNamespace(execution_device=named)
        assert head_placement(settings("x"), target)[1] == torch.device(named)


def test_only_regular_files_and_links_are_read(tmp_path):
    file, link, pipe = (tmp_path / name for name in ("a.json", "link.json", "pipe.json"))
    file.write_text("ää", encoding="utf-8")
    link.symlink_to(file)
    for path in (file, str(file), link):
        assert read_text(path, max_bytes=4) == "ää"
    with pytest.raises(ValueError, match="more than 3 bytes"):
        read_text(file, max_bytes=3)
    os.mkfifo(pipe)
    file.write_bytes(b" " * (MAX_SETTINGS_BYTES + 1))
    for path in (pipe, file, tmp_path / "missing.json"):
        with pytest.raises((ValueError, OSError)):
            read_text(path)
        with pytest.raises(SpecConfigError, match="cannot be read"):
            SpeculativeConfig.resolve(path)


UNCLEAR = {
    '{"method": "ngram", "options": {"prompt_lookup_max": 3, "prompt_lookup_max": 4}}': "stands twice",
    '{"method": ' + "[" * 10**5: "nested too deeply",
    '{"method": "typical", "posterior_alpha": NaN}': "NaN is no number",
    "{'a': 1}": "double quotes",
}


def test_json_that_says_nothing_clear_is_an_error(tmp_path):
    for text, why in UNCLEAR.items():
        with pytest.raises(ValueError):  # noqa: PT011 - the words are looked at below
            parse_json(text)
        (tmp_path / "settings.json").write_text(text)
        for value in (text, tmp_path / "settings.json"):
            with pytest.raises(SpecConfigError, match=why) as caught:
                SpeculativeConfig.resolve(value)
            assert len(str(caught.value)) < 700
