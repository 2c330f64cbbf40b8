"""Drafters that stay loaded for a target: how many, how long, and that they are those on the disk."""

from __future__ import annotations

import copy
import gc
import os
import shutil
import weakref
from functools import partial
from pathlib import Path

import pytest
import torch
from prometheus_client import CollectorRegistry
from safetensors.torch import load_file, save_file

from hf_specdec import (
    CheckpointFormatError,
    SpecConfigError,
    SpeculativeConfig,
    demo,
    forget_speculators,
    load_speculator,
    metrics,
)
from hf_specdec.candidate_generators import register_candidate_generator, unregister_candidate_generator
from hf_specdec.candidate_generators.medusa.network import MedusaHeads
from hf_specdec.candidate_generators.ngram.generator import NgramCandidateGenerator
from hf_specdec.candidate_generators.suffix.generator import SuffixCache
from hf_specdec.checkpoints.files import ReadOfRepositories, RepoFiles
from hf_specdec.control import ControlProfile
from hf_specdec.control.store import profile_identity, save_profile
from hf_specdec.decoding.masks import _picture
from hf_specdec.drafts import chain_topology
from hf_specdec.loaded import cache_bytes, loaded_bytes, loaded_drafters, record_of
from hf_specdec.transfers import keepers
from tests.helpers.methods import CHECKPOINTS as HEADS
from tests.helpers.models import prompts, tiny_llama
from tests.helpers.threads import in_threads


GREEDY = {"do_sample": False, "max_new_tokens": 8}


@pytest.fixture(scope="module")
def shared_target():
    return demo.load_target()


@pytest.fixture
def target(shared_target):
    yield shared_target
    forget_speculators(shared_target)


def num_bytes(network):
    return sum(tensor.nbytes for tensor in [*network.parameters(), *network.buffers()])


def weights_of(speculator):
    network = speculator.generator_class.network(speculator.resources)
    return torch.cat([parameter.detach().flatten().float() for parameter in network.parameters()])


def change_weights(folder: Path, factor: float, dtype: torch.dtype | None = None) -> None:
    """Writes other weights to the files of a checkpoint, of the same size unless their type changes."""
    for path in folder.glob("*.safetensors"):
        tensors = {name: tensor.clone() for name, tensor in load_file(path).items()}
        for tensor in tensors.values():
            if tensor.is_floating_point():
                tensor *= factor
        if dtype is not None:
            tensors = {name: t.to(dtype) if t.is_floating_point() else t for name, t in tensors.items()}
        save_file(tensors, path, metadata={"format": "pt"})


class TestReplacedWeights:
    @pytest.mark.parametrize("method", [*HEADS, "suffix+eagle3"])
    def test_weights_of_the_same_folder(self, method, target, tmp_path):
        folder = tmp_path / "head"
        shutil.copytree(HEADS[method.rpartition("+")[2]], folder)
        settings = {"method": method, "model": str(folder)}
        first = load_speculator(target, settings)
        old = weights_of(first)
        assert load_speculator(target, settings).resources is first.resources
        change_weights(folder, 0.5)
        second = load_speculator(target, settings)
        assert torch.equal(weights_of(second), 0.5 * old)
        # What the user holds stays as it was.
        assert torch.equal(weights_of(first), old)
        gone = weakref.ref(first.generator_class.network(first.resources))
        del first
        gc.collect()
        assert gone() is None
        assert load_speculator(target, settings).resources is second.resources

    def test_calls_measure_the_present_checkpoint(self, target, tmp_path):
        folder = tmp_path / "head"
        shutil.copytree(HEADS["eagle3"], folder)
        tokens = torch.arange(1, 30)[None]
        call = {"do_sample": False, "max_new_tokens": 24, "return_dict_in_generate": True}

        def accepted():
            return target.generate(tokens, **call, spec_model=str(folder)).speculative.num_accepted_tokens

        good = accepted()
        change_weights(folder, -1.0)
        bad = accepted()
        change_weights(folder, -1.0)
        assert (accepted(), bad < good) == (good, True)

    @pytest.mark.parametrize("method", ["eagle3", "mlp_speculator", "dflash", "mtp", "medusa"])
    def test_weights_that_are_overwritten_in_place(self, method, target, tmp_path):
        """A file that is mapped into memory must not change what was loaded from it."""
        folder = tmp_path / "head"
        shutil.copytree(HEADS[method], folder)
        # As the target's, so that nothing is converted.
        change_weights(folder, 1.0, target.dtype)
        settings = {"method": method, "model": str(folder)}
        held = load_speculator(target, settings)
        path = max(folder.glob("*.safetensors"), key=os.path.getsize)
        content = path.read_bytes()
        half = len(content) // 2
        with path.open("r+b") as file:
            file.seek(half)
            file.write(bytes(len(content) - half))
        path.write_bytes(content)
        expected = weights_of(load_speculator(target, settings))
        assert torch.equal(weights_of(held), expected)
        with path.open("r+b") as file:
            file.seek(half)
            file.write(bytes(len(content) - half))
        assert torch.equal(weights_of(held), expected)
        assert not torch.equal(weights_of(load_speculator(target, settings)), expected)

    @pytest.mark.parametrize("method", ["eagle3", "draft_model"])
    def test_half_written_weights(self, method, target, tmp_path):
        folder = tmp_path / "head"
        shutil.copytree(HEADS[method], folder)
        settings = {"method": method, "model": str(folder)}
        expected = weights_of(load_speculator(target, settings))
        (path,) = folder.glob("*.safetensors")
        content = path.read_bytes()
        path.write_bytes(content[: len(content) // 3])
        with pytest.raises(CheckpointFormatError, match=str(folder)):
            load_speculator(target, settings)
        path.write_bytes(content)
        assert torch.equal(weights_of(load_speculator(target, settings)), expected)

    def test_settings_beside_the_weights(self, target, tmp_path):
        folder = load_speculator(target, "medusa", model=HEADS["medusa"]).save_pretrained(tmp_path / "head")
        for k in (2, 3):
            SpeculativeConfig("medusa", num_speculative_tokens=k).save_pretrained(folder)
            assert load_speculator(target, str(folder)).config.num_speculative_tokens == k

    def test_a_profile_that_is_named(self, target, tmp_path):
        path = tmp_path / "profile.json"
        config = SpeculativeConfig("ngram", num_speculative_tokens="auto", control_profile=str(path))
        save_profile(ControlProfile(), profile_identity(target, config, None), path)
        first = load_speculator(target, config)
        assert load_speculator(target, config).profile is first.profile
        tokens = torch.arange(1, 30)[None]
        plain = target.generate(tokens, **GREEDY)
        assert torch.equal(target.generate(tokens, **GREEDY, speculative=config), plain)
        os.utime(path, ns=(1, 1))
        assert load_speculator(target, config).profile is not first.profile

    def test_a_folder_that_is_gone(self, target, tmp_path):
        folder = tmp_path / "head"
        shutil.copytree(HEADS["medusa"], folder)
        settings = {"method": "medusa", "model": str(folder)}
        loaded = load_speculator(target, settings)
        shutil.rmtree(folder)
        assert load_speculator(target, settings).resources is loaded.resources

    def test_logs_beside_the_weights_change_nothing(self, tmp_path):
        (tmp_path / "config.json").write_text("{}")
        identity = RepoFiles(tmp_path).identity()
        (tmp_path / "train.log").write_text("step 1")
        assert RepoFiles(tmp_path).identity() == identity
        (tmp_path / "model.safetensors").write_text("")
        assert RepoFiles(tmp_path).identity() != identity


@pytest.fixture
def written_while_read(tmp_path):
    """A method whose file is replaced a number of times while it is read."""
    file = tmp_path / "model.bin"
    file.write_text("0")

    class WrittenCandidateGenerator(NgramCandidateGenerator):
        changes = 0
        loaded_by = ()

        @classmethod
        def loaded_from(cls, config, target_model):
            return config.replace(model=str(tmp_path))

        @classmethod
        def load(cls, config, target_model):
            found = int(file.read_text())
            if cls.changes:
                cls.changes -= 1
                file.write_text("9" * (found + 2))
                file.write_text(str(found + 1) + " " * found)
                if cls.changes % 2:
                    raise OSError("half a file")
            return found

    register_candidate_generator("written", WrittenCandidateGenerator)
    yield WrittenCandidateGenerator
    unregister_candidate_generator("written")


class TestFilesThatChangeWhileTheyAreRead:
    @pytest.mark.parametrize("changes", [0, 1, 2])
    def test_the_last_version_is_read_as_a_whole(self, changes, written_while_read):
        written_while_read.changes = changes
        assert load_speculator(tiny_llama(), "written").resources == changes

    def test_that_do_not_stop(self, written_while_read):
        written_while_read.changes = 100
        target = tiny_llama()
        with pytest.raises(CheckpointFormatError, match="change while they are read"):
            load_speculator(target, "written")
        assert not record_of(target).loaded


class TestLimits:
    def test_the_least_recently_used_leaves(self, target, monkeypatch):
        def load(method):
            return load_speculator(target, method, model=HEADS[method])

        first, second, third = "eagle3", "medusa", "mlp_speculator"
        sizes = {}
        for method in (first, second, third):
            load(method)
            sizes[method] = record_of(target).num_bytes
            forget_speculators(target)
        assert min(sizes.values()) > 0
        monkeypatch.setenv("HF_SPECDEC_CACHE_BYTES", str(sum(sizes.values()) - 1))
        kept = load(first)
        load(second)
        # Used again, so that the other one leaves.
        assert load(first).resources is kept.resources
        last = load(third)
        assert [entry.resources for entry in record_of(target).loaded] == [kept.resources, last.resources]
        assert record_of(target).num_bytes == sizes[first] + sizes[third]

    def test_a_speculator_that_is_held_keeps_working(self, target, monkeypatch):
        monkeypatch.setenv("HF_SPECDEC_CACHE_BYTES", "0")
        tokens = torch.arange(1, 30)[None]
        plain = target.generate(tokens, **GREEDY)
        held = load_speculator(target, "eagle3", model=HEADS["eagle3"])
        network = weakref.ref(held.resources)
        assert load_speculator(target, "eagle3", model=HEADS["eagle3"]).resources is held.resources
        load_speculator(target, "medusa", model=HEADS["medusa"])
        assert [type(entry.network) for entry in record_of(target).loaded] == [MedusaHeads]
        assert torch.equal(target.generate(tokens, **GREEDY, assistant=held), plain)
        del held
        gc.collect()
        assert network() is None

    def test_weights_that_several_have_are_counted_once(self, target):
        alone = load_speculator(target, "eagle3", model=HEADS["eagle3"])
        load_speculator(target, "suffix+eagle3", model=HEADS["eagle3"])
        load_speculator(target, "ngram+eagle3", model=HEADS["eagle3"])
        assert record_of(target).num_bytes == num_bytes(alone.resources)
        assert len(record_of(target).loaded) == 3

    def test_texts_count(self, target):
        tokens = torch.arange(1, 30)[None]
        target.generate(tokens, **GREEDY, spec_method="suffix")
        after_one = record_of(target).num_bytes
        target.generate(tokens, **GREEDY, spec_method="suffix")
        assert 0 < after_one < record_of(target).num_bytes

    def test_many_settings(self):
        target = tiny_llama()
        before = sum(type(item) is SuffixCache for item in gc.get_objects())
        for size in range(30):
            target.generate(
                **prompts(1), **GREEDY, speculative={"method": "suffix", "suffix_decoding_max_cached_tokens": 9 + size}
            )
            load_speculator(target, "ngram", num_speculative_tokens="auto", prompt_lookup_max=2 + size)
        assert len(record_of(target).loaded) == 16
        gc.collect()
        assert sum(type(item) is SuffixCache for item in gc.get_objects()) <= before + 16
        for size in range(100):
            load_speculator(target, "ngram", num_speculative_tokens="auto", prompt_lookup_max=2 + size)
        assert len(record_of(target).learnt) == 64

    def test_many_draft_models(self):
        target = tiny_llama()
        drafts = [tiny_llama(seed=seed) for seed in range(1, 4)]
        references = [weakref.ref(draft) for draft in drafts]
        for draft in drafts:
            load_speculator(target, draft_model=draft)
        del draft, drafts
        gc.collect()
        assert [reference() is None for reference in references] == [True, True, False]

    def test_many_repositories(self):
        read = ReadOfRepositories()
        for number in range(1000):
            read.keep(RepoFiles(f"user/{number}", local_files_only=True), number)
        assert len(read) == 256
        assert read.find(RepoFiles("user/999", local_files_only=True)) == 999
        read.forget_name("user/999")
        assert read.find(RepoFiles("user/999", local_files_only=True)) is None

    @pytest.mark.parametrize(
        ("text", "expected"),
        [
            ("0", 0),
            ("123", 123),
            ("512MB", 512 * 10**6),
            ("512 MiB", 512 * 2**20),
            ("2g", 2 * 10**9),
            ("1.5GiB", 3 * 2**29),
            (" 3kb ", 3000),
            ("", None),
        ],
    )
    def test_sizes(self, text, expected, monkeypatch):
        monkeypatch.setenv("HF_SPECDEC_CACHE_BYTES", text)
        assert cache_bytes() == expected

    @pytest.mark.parametrize("text", ["much", "-1", "1XB", "1e9", "GiB", "9" * 1000, "nan"])
    def test_no_sizes(self, text, monkeypatch):
        monkeypatch.setenv("HF_SPECDEC_CACHE_BYTES", text)
        with pytest.raises(SpecConfigError, match="HF_SPECDEC_CACHE_BYTES=.*is no number of bytes") as error:
            load_speculator(tiny_llama(), "ngram")
        assert len(str(error.value)) < 400

    def test_gauges(self, target):
        registry = CollectorRegistry()
        metrics.enable(registry)
        try:
            before = registry.get_sample_value("hf_specdec_loaded_drafters")
            before_bytes = registry.get_sample_value("hf_specdec_loaded_bytes")
            speculator = load_speculator(target, "eagle3", model=HEADS["eagle3"])
            assert registry.get_sample_value("hf_specdec_loaded_drafters") == before + 1 == loaded_drafters()
            added = registry.get_sample_value("hf_specdec_loaded_bytes") - before_bytes
            assert added == num_bytes(speculator.resources)
            assert loaded_bytes() == before_bytes + added
        finally:
            metrics.disable(registry)


class TestTargetsThatAreDropped:
    @pytest.mark.parametrize("method", [*HEADS, "ngram", "suffix"])
    def test_with_a_drafter_of_every_method(self, method, shared_target):
        target = copy.deepcopy(shared_target)
        tokens = torch.arange(1, 30)[None]
        place = {"model": HEADS[method]} if method in HEADS else {"method": method}
        for k in (2, "auto"):
            target.generate(tokens, **GREEDY, speculative={**place, "num_speculative_tokens": k})
        reference = weakref.ref(target)
        del target
        gc.collect()
        assert reference() is None


# Settings that the demo's drafters cannot follow, and the message.
TOO_MUCH = [
    ("medusa", {"num_speculative_tokens": 9}, "=9 is more than the 4 heads"),
    ("medusa", {"speculative_token_tree": [(0,) * depth for depth in range(1, 7)]}, "6 deep, .* has 4 heads"),
    ("medusa", {"num_speculative_tokens_per_batch_size": {1: 2, 4: 9}}, "=9 is more than the 4 heads"),
    ("suffix+medusa", {"num_speculative_tokens": 9}, "=9 is more than the 4 heads"),
    ("mlp_speculator", {"num_speculative_tokens": 9}, "=9 is more than the 4 heads"),
    ("mlp_speculator", {"top_k_tokens_per_head": [1] * 9}, "has 9 entries, and the checkpoint has 4 stages"),
    ("dflash", {"num_speculative_tokens": 40}, "must be at most 7, .* got 40"),
    ("dflash", {"dflash_block_size": 1000}, "must be from 2 to 8, .* got 1000"),
    ("dflash", {"dflash_mask_token_id": 10**6}, "mask token of '.*' is 1000000"),
    ("eagle3", {"num_speculative_tokens": 3, "draft_tree_top_k": 3}, "asks for a chain"),
    ("mtp", {"mtp_mode": "chain", "draft_tree_top_k": 3}, "`draft_tree_top_k` is about trees"),
]


class TestSettingsBeyondWhatWasLoaded:
    @pytest.mark.parametrize("is_loaded", [False, True])
    @pytest.mark.parametrize(("method", "settings", "match"), TOO_MUCH)
    def test_are_refused_in_loading(self, method, settings, match, is_loaded, target):
        place = {"method": method, "model": HEADS[method.rpartition("+")[2]]}
        if is_loaded:
            load_speculator(target, place)
        for _ in range(2):
            with pytest.raises(SpecConfigError, match=match):
                load_speculator(target, {**place, **settings})
        assert load_speculator(target, place).method == method

    def test_notes_of_the_check_are_not_those_of_a_call(self, target):
        settings = {"model": HEADS["dflash"], "num_draft_nodes": 20, "draft_sample_method": "probabilistic"}
        output = target.generate(
            torch.arange(1, 30)[None], **GREEDY, return_dict_in_generate=True, speculative=settings
        )
        assert len(output.speculative.notes) == len(set(output.speculative.notes))

    def test_other_weights_are_checked_anew(self, target, tmp_path):
        folder = tmp_path / "head"
        shutil.copytree(HEADS["medusa"], folder)
        settings = {"method": "medusa", "model": str(folder), "num_speculative_tokens": 4}
        load_speculator(target, settings)
        (path,) = folder.glob("*.safetensors")
        save_file({name: tensor for name, tensor in load_file(path).items() if not name.startswith("3.")}, path)
        (folder / "config.json").write_text("{}")
        with pytest.raises(SpecConfigError, match="=4 is more than the 3 heads"):
            load_speculator(target, settings)


def test_threads_that_push_each_other_out(target, tmp_path, monkeypatch):
    """Drafters leave, and are written anew, while others are loaded and used."""
    monkeypatch.setenv("HF_SPECDEC_CACHE_BYTES", "0")
    folders = {}
    for method in ("medusa", "eagle3", "mlp_speculator"):
        folders[method] = tmp_path / method
        shutil.copytree(HEADS[method], folders[method])
    tokens = torch.arange(1, 30)[None]
    plain = target.generate(tokens, **GREEDY).tolist()
    texts, errors = [], []

    def generate(number):
        try:
            for turn in range(5):
                method = list(folders)[(number + turn) % len(folders)]
                settings = {"method": f"suffix+{method}" if turn % 2 else method, "model": str(folders[method])}
                texts.append(target.generate(tokens, **GREEDY, speculative=settings).tolist())
                os.utime(folders[method] / "config.json", ns=(number, 1000 * number + turn))
                loaded_bytes()
        except Exception as error:  # noqa: BLE001 - for the test to show
            errors.append(error)

    in_threads(*(partial(generate, number) for number in range(4)))
    # A folder that others touch all the time is refused, which is no damage.
    assert [error for error in errors if "change while they are read" not in str(error)] == []
    assert texts
    assert all(text == plain for text in texts)
    assert len(record_of(target).loaded) == 1


def test_tensors_that_are_kept_for_all_are_forgotten_with_all():
    _picture(chain_topology(2, torch.device("cpu")), torch.float32, 1, 4)
    assert _picture.cache_info().currsize
    forget_speculators()
    assert not any(keeper.cache_info().currsize for keeper in keepers)
