"""Files of a checkpoint are opened with care: none outside of it, no pipe, no pickle that runs code, no zip bomb."""

import json
import os
import pickle
import shutil
import zipfile
from functools import partial

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import LlamaForCausalLM

from hf_specdec import CheckpointFormatError, SpeculativeConfig, load_speculator
from hf_specdec.candidate_generators.draft_model.network import load_draft_model
from hf_specdec.candidate_generators.eagle.network import EagleNetwork
from hf_specdec.checkpoints.files import RepoFiles, only_safetensors
from hf_specdec.checkpoints.header import Header
from hf_specdec.checkpoints.loading import load as load_network
from hf_specdec.checkpoints.weights import TensorTable
from hf_specdec.hub.detect import detect_checkpoint, detect_method
from tests.helpers.levels import in_full
from tests.helpers.models import tiny_llama
from tests.helpers.paths import FIXTURES


EAGLE = FIXTURES / "eagle" / "eagle1_llama"
MEDUSA = FIXTURES / "medusa" / "v2_shared_lm_head_safetensors" / "medusa_lm_head.safetensors"
INDEX = "model.safetensors.index.json"
TENSORS = {"a": torch.ones(2, 3)}
SHAPES = {"a": (2, 3)}

# Names of files that lead out of a folder, or might.
OUTSIDE = ["../secret.safetensors", "/secret.safetensors", "a/../../secret.safetensors", "./../x.safetensors"]
OUTSIDE += ["a\\..\\secret.safetensors", "C:secret.safetensors", "x\0.safetensors", "", ".", "..", "a//b"]


@pytest.fixture
def no_unpickling(monkeypatch):
    """Fails where anything is unpickled."""
    # Functions that are compiled for drafts are kept in pickles of their own.
    load_speculator(tiny_llama(), "auto", local_files_only=True)
    for module, name in ((torch, "load"), (pickle, "load"), (pickle, "loads"), (pickle, "Unpickler")):
        monkeypatch.setattr(module, name, lambda *args, **options: pytest.fail("Something is unpickled."))


@pytest.fixture
def folder(tmp_path):
    """Weights in a folder, and others beside it."""
    folder = tmp_path / "head"
    folder.mkdir()
    save_file(TENSORS, folder / "model.safetensors")
    save_file(TENSORS, tmp_path / "secret.safetensors")
    return folder


@pytest.fixture
def pickled_head(tmp_path):
    """An EAGLE head in a pickle, whose config says nothing of its method."""
    folder = tmp_path / "eagle"
    folder.mkdir()
    shutil.copy(EAGLE / "config.json", folder)
    torch.save(load_file(EAGLE / "model.safetensors"), folder / "pytorch_model.bin")
    return folder


@pytest.fixture
def with_decoy(pickled_head):
    """Beside it a file whose name is that of another method."""
    shutil.copy(EAGLE / "model.safetensors", pickled_head / "medusa_lm_head.safetensors")
    return pickled_head


@pytest.fixture
def draft(tmp_path):
    """A whole model, in a folder."""
    tiny_llama().save_pretrained(tmp_path / "draft")
    return tmp_path / "draft"


def config_of(folder, method="draft_model"):
    return SpeculativeConfig(method, str(folder))


def load_draft(folder):
    return load_draft_model(config_of(folder), tiny_llama())


def write_index(folder, name):
    (folder / INDEX).write_text(json.dumps({"metadata": {}, "weight_map": {"a": name}}))


def test_names_that_lead_out_of_a_folder(hub, folder, draft):
    files = RepoFiles(folder)
    for name in OUTSIDE:
        for read in (files.path, partial(TensorTable, files)):
            with pytest.raises(CheckpointFormatError, match="no plain name inside of it"):
                read(name)
    # Names in an index.
    for name in (name for name in OUTSIDE if name.endswith(".safetensors")):
        write_index(folder, name)
        hub.add("user/head", folder)
        for place in (folder, "user/head"):
            with pytest.raises(CheckpointFormatError, match="no plain name inside of it.*that you trust"):
                TensorTable(RepoFiles(place), INDEX)
    shutil.move(draft / "model.safetensors", draft.parent / "outside.safetensors")
    write_index(draft, "../outside.safetensors")
    with pytest.raises(CheckpointFormatError, match="names the file '../outside.safetensors'"):
        load_draft(draft)


def test_links_that_lead_out_of_a_folder(hub, folder):
    hub.add("user/head", folder)
    outside, path = folder.parent / "secret.safetensors", folder / "model.safetensors"
    cached = RepoFiles("user/head").path("model.safetensors")
    # The cache is full of links.
    assert cached.is_symlink()
    assert TensorTable(RepoFiles(cached.parent), "model.safetensors") == SHAPES
    for link in (path, cached):
        link.unlink()
        link.symlink_to(outside)
        with pytest.raises(CheckpointFormatError, match="is a link that leads out of the folder, to .*secret"):
            TensorTable(RepoFiles(link.parent), "model.safetensors")
    # Inside of it they may lead anywhere, and it may be a link itself.
    (folder / "inner").mkdir()
    shutil.move(outside, folder / "inner" / "weights")
    path.unlink()
    path.symlink_to(folder / "inner" / "weights")
    (folder.parent / "link").symlink_to(folder)
    for place in (folder, folder.parent / "link"):
        assert TensorTable(RepoFiles(place), "model.safetensors") == SHAPES


def test_links_of_a_draft_model(draft, tmp_path):
    for name in ("model.safetensors", "config.json", "generation_config.json", "tokenizer.json"):
        folder, outside = shutil.copytree(draft, tmp_path / name.partition(".")[0]), tmp_path / name
        shutil.move(folder / name, outside) if (folder / name).exists() else outside.write_text("{}")
        (folder / name).symlink_to(outside)
        with pytest.raises(CheckpointFormatError, match=f"{name} is a link that leads out of the folder"):
            load_draft(folder)


def test_draft_model_that_names_other_weights_or_another_model(hub, draft):
    settings = json.loads((draft / "config.json").read_text())
    other = json.dumps({**settings, "transformers_weights": "other.safetensors"})
    weights = (draft / "model.safetensors").read_bytes()
    hub.add("user/other", draft, files={"config.json": other, "other.safetensors": weights})
    hub.add("user/adapter", draft, files={"adapter_config.json": '{"base_model_name_or_path": "user/draft"}'})
    for name, reason in (("other", "names other weights than model.safetensors"), ("adapter", "holds an adapter")):
        with pytest.raises(CheckpointFormatError, match=reason):
            load_draft(f"user/{name}")


@pytest.mark.parametrize(
    ("name", "kind"),
    [("config.json", "pipe"), *in_full(("model.safetensors", "pipe"), ("pytorch_model.bin", "device"))],
)
def test_what_is_no_ordinary_file_is_not_opened(draft, name, kind, monkeypatch):
    """An open would wait for ever, or read for ever."""
    (draft / ("config.json" if name == "config.json" else "model.safetensors")).unlink()
    monkeypatch.chdir(draft)
    if kind == "pipe":
        os.mkfifo(name)
    else:
        os.symlink("/dev/zero", name)
    for load in (lambda: load_draft(draft), lambda: Header.of(config_of(draft))):
        with pytest.raises(CheckpointFormatError, match="ordinary file|none of the weight files"):
            load()
    if name == "config.json":
        with pytest.raises(CheckpointFormatError, match="no readable config.json"):
            detect_checkpoint(draft)
    else:
        assert "no weights of a known name" in detect_checkpoint(draft).problems[0]


def test_code_in_a_pickle_does_not_run(hub, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)

    class Code:
        def __reduce__(self):
            return (open, ("should_not_exist", "w"))

    torch.save({"a": Code()}, tmp_path / "pytorch_model.bin")
    hub.add("user/head", tmp_path)
    for name in ("user/head", tmp_path):
        with pytest.raises(CheckpointFormatError, match="more than tensors.*could run code"):
            TensorTable(RepoFiles(name), "pytorch_model.bin")
    assert not (tmp_path / "should_not_exist").exists()


def test_detection_of_pickled_weights(hub, pickled_head):
    found = detect_checkpoint(pickled_head)
    assert (found.method, found.format, found.is_pickled) == ("eagle", "eagle-safeailab", True)
    assert found.num_bytes == (pickled_head / found.weight_file).stat().st_size
    assert found.problems == ()
    hub.add("user/head", pickled_head)
    assert detect_checkpoint("user/head") == found
    assert detect_method(SpeculativeConfig(model="user/head")) == "eagle"


def test_what_nobody_named_is_not_unpickled(with_decoy, draft, tmp_path, no_unpickling):
    target = tiny_llama(hidden_size=64, vocab_size=256)
    torch.save({}, draft / "pytorch_model.bin")
    os.remove(draft / "model.safetensors")
    for load in (
        lambda: load_network(EagleNetwork, config_of(with_decoy, "eagle"), target),
        lambda: load_draft(draft),
    ):
        with only_safetensors(), pytest.raises(CheckpointFormatError, match="none of the weight files"):
            load()
    target.save_pretrained(tmp_path / "target")
    shutil.copytree(with_decoy, tmp_path / "target" / "head")
    target = LlamaForCausalLM.from_pretrained(tmp_path / "target")
    target.generation_config.speculative = {"method": "eagle", "model": "head"}
    speculator = load_speculator(target, "auto", cache_dir=str(tmp_path / "cache"), local_files_only=True)
    assert speculator.config.model is None


def test_decoys_in_a_format_of_another_method(with_decoy):
    """What the loader does not look at is no evidence; it is where its loader would take this very file."""
    found = detect_checkpoint(with_decoy)
    assert (found.weight_file, found.is_pickled) == ("pytorch_model.bin", True)
    assert Header.of(config_of(with_decoy, "eagle")).file == found.weight_file
    shutil.copy(MEDUSA, with_decoy)
    found = detect_checkpoint(with_decoy)
    assert (found.method, found.weight_file) == ("medusa", MEDUSA.name)
    os.rename(with_decoy / MEDUSA.name, with_decoy / "x-mtp.safetensors")
    found = detect_checkpoint(with_decoy)
    assert (found.method, found.weight_file) == ("eagle", "pytorch_model.bin")
    shutil.copy(FIXTURES / "eagle/eagle3_llama/model.safetensors", with_decoy / MEDUSA.name)
    with pytest.raises(CheckpointFormatError, match=r"ambiguous: medusa_lm_head.*eagle3.*pytorch_model.bin of"):
        detect_checkpoint(with_decoy)


@pytest.mark.parametrize("kind", ["compressed data", *in_full("compressed instructions", "shared data")])
def test_archive_that_unpacks_itself(tmp_path, kind, monkeypatch):
    """A small file must not become a large one."""
    torch.save({"a": torch.zeros(5_000_000)}, tmp_path / "large")
    path = tmp_path / "pytorch_model.bin"
    with zipfile.ZipFile(tmp_path / "large") as source, zipfile.ZipFile(path, "w") as made:
        for part in source.infolist():
            is_packed = kind == "compressed data" or (kind != "shared data" and part.filename.endswith("data.pkl"))
            content = source.read(part)
            if part.filename.endswith("data/0") and kind != "compressed data":
                content = content[:4]
            made.writestr(part.filename, content, zipfile.ZIP_DEFLATED if is_packed else zipfile.ZIP_STORED)
        if kind == "compressed instructions":
            made.writestr("large/notes", bytes(20_000_000), zipfile.ZIP_DEFLATED)
    (tmp_path / "config.json").write_text('{"architectures": ["LlamaForCausalLM"]}')
    assert path.stat().st_size < 100_000
    read = zipfile.ZipFile.read

    def small(self, name, *args):
        content = read(self, name, *args)
        assert len(content) < 1_000_000
        return content

    monkeypatch.setattr(zipfile.ZipFile, "read", small)
    with pytest.raises(CheckpointFormatError, match=r"pytorch_model.bin (holds|is damaged)"):
        Header.of(config_of(tmp_path, "eagle"))
    with pytest.raises(CheckpointFormatError, match=r"pytorch_model.bin (holds|is damaged)"):
        load_draft(tmp_path)
    assert any("pytorch_model.bin" in problem for problem in detect_checkpoint(tmp_path).problems)
