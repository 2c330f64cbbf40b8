"""Files of a checkpoint are opened with care: none outside of it, no pipe, none that unpacks itself."""

import json
import os
import pickle
import shutil
import socket
import zipfile
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import LlamaForCausalLM

from hf_specdec import CheckpointFormatError, SpeculativeConfig, demo, load_speculator
from hf_specdec.candidate_generators.draft_model.network import load_draft_model
from hf_specdec.candidate_generators.eagle.network import load_eagle
from hf_specdec.checkpoints.checkpoint import Checkpoint
from hf_specdec.checkpoints.files import RepoFiles, only_safetensors
from hf_specdec.hub.detect import detect_checkpoint, detect_method
from tests.helpers.models import tiny_llama
from tests.helpers.paths import FIXTURES


EAGLE = FIXTURES / "eagle" / "eagle1_llama"


@pytest.fixture
def no_unpickling(monkeypatch):
    """Fails where anything is unpickled."""

    def refuse(*args, **options):
        raise AssertionError("something was unpickled")

    monkeypatch.setattr(torch, "load", refuse)
    monkeypatch.setattr(pickle, "load", refuse)
    monkeypatch.setattr(pickle, "loads", refuse)
    monkeypatch.setattr(pickle, "Unpickler", refuse)


@pytest.fixture
def pickled_head(tmp_path):
    """An EAGLE head in a pickle, whose config says nothing of its method."""
    folder = tmp_path / "head"
    folder.mkdir()
    shutil.copy(EAGLE / "config.json", folder)
    torch.save(load_file(EAGLE / "model.safetensors"), folder / "pytorch_model.bin")
    return folder


@pytest.fixture
def draft(tmp_path):
    """A whole model, in a folder."""
    folder = tmp_path / "draft"
    tiny_llama().save_pretrained(folder)
    return folder


def config_of(folder, method="draft_model"):
    return SpeculativeConfig(method, str(folder))


class TestDetectionDoesNotUnpickle:
    @pytest.mark.parametrize("use", ["key", "global", "storage"])
    def test_nested_tuples_take_no_time(self, pickled_head, use):
        """Hashes, comparisons and texts of nested tuples would take twice the time for each level."""
        nested = b"K\x01\x85q\x00" + b"".join(b"h%c\x86q%c" % (level, level + 1) for level in range(60))
        pickled = {
            "key": b"\x80\x02}" + nested + b"K\x01s.",
            "global": b"\x80\x04" + nested + b"\x8c\x01x\x93.",
            "storage": b"\x80\x02(X\x07\x00\x00\x00storagectorch\nFloatStorage\n" + nested + b"tQ.",
        }[use]
        with zipfile.ZipFile(pickled_head / "pytorch_model.bin", "w") as archive:
            archive.writestr("archive/data.pkl", pickled)
        assert RepoFiles(str(pickled_head)).tensors("pytorch_model.bin") is None

    def test_names_and_sizes(self, pickled_head, no_unpickling):
        found = detect_checkpoint(pickled_head)
        assert (found.method, found.format, found.is_pickled) == ("eagle", "eagle-safeailab", True)
        assert found.num_bytes == sum(tensor.nbytes for tensor in load_file(EAGLE / "model.safetensors").values())
        assert found.problems == ()

    def test_on_the_hub(self, hub, pickled_head, no_unpickling):
        hub.add("user/head", pickled_head)
        assert detect_checkpoint("user/head") == detect_checkpoint(pickled_head)
        assert detect_method(SpeculativeConfig(model="user/head")) == "eagle"

    @pytest.mark.parametrize(
        "dtype", [torch.float64, torch.float16, torch.bfloat16, torch.int32, torch.bool, torch.float8_e4m3fn]
    )
    def test_shapes_and_bytes_are_those_of_torch(self, tmp_path, dtype):
        made = {
            "plain": torch.ones(3, 4).to(dtype),
            "empty": torch.ones(0, 4).to(dtype),
            "scalar": torch.ones(()).to(dtype),
            "cut": torch.ones(8, 4).to(dtype)[2:4],
        }
        module = torch.nn.Linear(3, 2)
        for tensors in (made, module.state_dict(), dict(module.named_parameters())):
            torch.save(tensors, tmp_path / "pytorch_model.bin")
            header = RepoFiles(tmp_path).header("pytorch_model.bin")
            assert {name: (part.dtype, part.shape, part.num_bytes) for name, part in header.items()} == {
                name: (str(tensor.dtype).removeprefix("torch."), tuple(tensor.shape), tensor.nbytes)
                for name, tensor in tensors.items()
            }


class TestTheDetectedFileIsTaken:
    """A decoy in a format of another method does not decide what is loaded."""

    @pytest.fixture
    def with_decoy(self, pickled_head):
        shutil.copy(EAGLE / "model.safetensors", pickled_head / "medusa_lm_head.safetensors")
        return pickled_head

    def test_detection_names_the_file_of_the_loader(self, with_decoy):
        found = detect_checkpoint(with_decoy)
        assert (found.weight_file, found.is_pickled) == ("pytorch_model.bin", True)
        assert Checkpoint(config_of(with_decoy, "eagle")).header.file == found.weight_file

    def test_what_the_loader_does_not_look_at_is_no_evidence(self, pickled_head):
        """Tensors show another method, whose loader takes this very file, or looks elsewhere."""
        heads = FIXTURES / "medusa" / "v2_shared_lm_head_safetensors" / "medusa_lm_head.safetensors"
        shutil.copy(heads, pickled_head)
        found = detect_checkpoint(pickled_head)
        assert (found.method, found.weight_file) == ("medusa", heads.name)
        os.rename(pickled_head / heads.name, pickled_head / "x-mtp.safetensors")
        found = detect_checkpoint(pickled_head)
        assert (found.method, found.weight_file) == ("eagle", "pytorch_model.bin")

    def test_two_methods_side_by_side_are_ambiguous(self, pickled_head):
        heads = load_file(FIXTURES / "eagle" / "eagle3_llama" / "model.safetensors")
        save_file(heads, pickled_head / "medusa_lm_head.safetensors")
        with pytest.raises(CheckpointFormatError, match=r"ambiguous: medusa_lm_head.*eagle3.*pytorch_model.bin of"):
            detect_checkpoint(pickled_head)

    def test_auto_unpickles_nothing(self, with_decoy, tmp_path, no_unpickling):
        tiny_llama(hidden_size=64, vocab_size=256).save_pretrained(tmp_path / "target")
        shutil.copytree(with_decoy, tmp_path / "target" / "head")
        target = LlamaForCausalLM.from_pretrained(tmp_path / "target")
        target.generation_config.speculative = {"method": "eagle", "model": "head"}
        speculator = load_speculator(target, "auto", cache_dir=str(tmp_path / "cache"), local_files_only=True)
        assert speculator.config.model is None

    def test_nobody_named_it(self, with_decoy, no_unpickling):
        target = tiny_llama(hidden_size=64, vocab_size=256)
        with only_safetensors(), pytest.raises(CheckpointFormatError, match="none of the weight files"):
            load_eagle(config_of(with_decoy, "eagle"), target)

    def test_nobody_named_a_model(self, draft, no_unpickling):
        torch.save(load_file(draft / "model.safetensors"), draft / "pytorch_model.bin")
        os.remove(draft / "model.safetensors")
        with only_safetensors(), pytest.raises(CheckpointFormatError, match="none of the weight files that are read"):
            load_draft_model(config_of(draft), tiny_llama())

    def test_named_pickles_are_loaded_as_ever(self, with_decoy):
        target = tiny_llama(hidden_size=64, vocab_size=256)
        plain, decoyed = (load_eagle(config_of(path, "eagle"), target) for path in (EAGLE, with_decoy))
        assert torch.equal(plain.fc.weight, decoyed.fc.weight)

    def test_a_config_that_names_other_weights(self, draft):
        settings = json.loads((draft / "config.json").read_text())
        shutil.copy(draft / "model.safetensors", draft / "other.safetensors")
        (draft / "config.json").write_text(json.dumps({**settings, "transformers_weights": "other.safetensors"}))
        with pytest.raises(CheckpointFormatError, match="names other weights than model.safetensors"):
            load_draft_model(config_of(draft), tiny_llama())


class TestDraftModelsInFolders:
    """Draft models in folders pass the checks of repositories."""

    def test_an_index_that_leads_out(self, draft):
        shutil.move(draft / "model.safetensors", draft.parent / "outside.safetensors")
        names = load_file(draft.parent / "outside.safetensors")
        weight_map = dict.fromkeys(names, "../outside.safetensors")
        (draft / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": weight_map}))
        with pytest.raises(CheckpointFormatError, match="names the file '../outside.safetensors'"):
            load_draft_model(config_of(draft), tiny_llama())

    @pytest.mark.parametrize("name", ["model.safetensors", "config.json", "generation_config.json", "tokenizer.json"])
    def test_a_link_that_leads_out(self, draft, name):
        outside = draft.parent / name
        shutil.move(draft / name, outside) if (draft / name).exists() else outside.write_text("{}")
        os.symlink(outside, draft / name)
        with pytest.raises(CheckpointFormatError, match=f"{name} is a link that leads out of the folder"):
            load_draft_model(config_of(draft), tiny_llama())

    @pytest.mark.parametrize("name", ["config.json", "model.safetensors", "pytorch_model.bin"])
    @pytest.mark.parametrize("kind", ["pipe", "socket", "device"])
    def test_what_is_no_ordinary_file_is_not_opened(self, draft, name, kind, monkeypatch):
        (draft / "config.json").exists() and name == "config.json" and os.remove(draft / name)
        (draft / "model.safetensors").unlink(missing_ok=True) if name != "config.json" else None
        if kind == "pipe":
            os.mkfifo(draft / name)
        elif kind == "device":
            os.symlink("/dev/zero", draft / name)
        else:
            monkeypatch.chdir(draft)
            with socket.socket(socket.AF_UNIX) as made:
                made.bind(name)
        # An open would wait for ever, or read for ever.
        with pytest.raises(CheckpointFormatError, match="ordinary file|none of the weight files"):
            load_draft_model(config_of(draft), tiny_llama())
        with pytest.raises(CheckpointFormatError, match="ordinary file|none of the weight files"):
            Checkpoint(config_of(draft, "eagle"))
        if name != "config.json":
            assert "no weights of a known name" in detect_checkpoint(draft).problems[0]
        else:
            with pytest.raises(CheckpointFormatError, match="no readable config.json"):
                detect_checkpoint(draft)

    def test_a_snapshot_of_the_cache_has_links(self, hub, draft):
        hub.add("user/draft", draft)
        path = RepoFiles("user/draft").path("config.json")
        RepoFiles("user/draft").path("model.safetensors")
        assert path.is_symlink()
        assert load_draft_model(config_of(path.parent), tiny_llama()).num_parameters() > 0

    def test_an_adapter_in_a_repository_names_another_model(self, hub, draft):
        (draft / "adapter_config.json").write_text('{"base_model_name_or_path": "user/other"}')
        hub.add("user/draft", draft)
        with pytest.raises(CheckpointFormatError, match="holds an adapter"):
            load_draft_model(config_of("user/draft"), tiny_llama())


class TestArchivesThatUnpackThemselves:
    """A small file must not become a large one."""

    @pytest.fixture(params=["compressed data", "compressed instructions", "shared data"])
    def bomb(self, request, tmp_path):
        name = "pytorch_model.bin"
        torch.save({"a": torch.zeros(5_000_000)}, tmp_path / "large.bin")
        with zipfile.ZipFile(tmp_path / "large.bin") as source, zipfile.ZipFile(tmp_path / name, "w") as made:
            for part in source.infolist():
                compressed = request.param == "compressed data" or part.filename.endswith("data.pkl")
                kind = zipfile.ZIP_DEFLATED if compressed and request.param != "shared data" else zipfile.ZIP_STORED
                content = source.read(part)
                if part.filename.endswith("data/0") and request.param != "compressed data":
                    content = content[:4]
                made.writestr(part.filename, content, compress_type=kind)
            if request.param == "compressed instructions":
                made.writestr("large/notes", bytes(20_000_000), compress_type=zipfile.ZIP_DEFLATED)
        os.remove(tmp_path / "large.bin")
        (tmp_path / "config.json").write_text('{"architectures": ["LlamaForCausalLM"]}')
        assert (tmp_path / name).stat().st_size < 100_000
        return tmp_path

    @pytest.fixture
    def fails_if_unpacked(self, monkeypatch):
        read = zipfile.ZipFile.read

        def small(self, name, *args):
            content = read(self, name, *args)
            assert len(content) < 1_000_000
            return content

        monkeypatch.setattr(zipfile.ZipFile, "read", small)

    def test_loaders(self, bomb, fails_if_unpacked):
        with pytest.raises(CheckpointFormatError, match=r"pytorch_model.bin (holds|is damaged)"):
            Checkpoint(config_of(bomb, "eagle"))
        with pytest.raises(CheckpointFormatError, match="pytorch_model.bin holds"):
            load_draft_model(config_of(bomb), tiny_llama())

    def test_detection(self, bomb, fails_if_unpacked):
        found = detect_checkpoint(bomb)
        assert any("pytorch_model.bin holds" in problem for problem in found.problems)

    def test_ordinary_files_are_read(self, draft):
        torch.save(load_file(draft / "model.safetensors"), draft / "pytorch_model.bin")
        os.remove(draft / "model.safetensors")
        assert load_draft_model(config_of(draft), tiny_llama()).num_parameters() > 0


def test_the_embedded_demo_passes_these_checks():
    folder = Path(demo.target_path()).parent
    for method in ("eagle", "eagle3", "medusa"):
        names = ("medusa_lm_head.safetensors", "model.safetensors")
        assert Checkpoint(config_of(folder / method, method), names).header.shapes
