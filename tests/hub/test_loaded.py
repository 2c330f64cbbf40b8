"""Drafters that stay loaded for a target: how many, how long, and that they are those on the disk."""

import copy
import gc
import os
import pickle
import shutil
import weakref
from functools import partial

import pytest
import torch
from safetensors.torch import load_file, save_file

from hf_specdec import (
    CheckpointFormatError,
    SpecConfigError,
    demo,
    forget_speculators,
    load_speculator,
)
from hf_specdec.candidate_generators import register_candidate_generator, unregister_candidate_generator
from hf_specdec.candidate_generators.ngram.generator import NgramCandidateGenerator
from hf_specdec.drafts import chain_topology
from hf_specdec.loaded import all_loaded, num_bytes, record_of
from hf_specdec.target.masks import _block
from hf_specdec.transfers import keepers
from tests.helpers.levels import full, in_full
from tests.helpers.methods import CHECKPOINTS as HEADS
from tests.helpers.models import tiny_llama
from tests.helpers.threads import in_threads


GREEDY = {"do_sample": False, "max_new_tokens": 8}
OTHERS = [method for method in HEADS if method != "eagle3"]
TOKENS = torch.arange(1, 30)[None]


@pytest.fixture(scope="module")
def shared_target():
    return demo.load_target()


@pytest.fixture
def target(shared_target):
    yield shared_target
    forget_speculators(shared_target)


@pytest.fixture
def copied(tmp_path):
    """Settings that name a copy of a method's drafter, and the copy."""

    def copied(method):
        folder = shutil.copytree(HEADS[method.rpartition("+")[2]], tmp_path / method)
        return {"method": method, "model": str(folder)}, max(folder.glob("*.safetensors"), key=os.path.getsize)

    return copied


def load_demo(target, method, **settings):
    return load_speculator(target, {"method": method, "model": HEADS[method.rpartition("+")[2]], **settings})


def weights_of(speculator):
    network = speculator.generator_class.network(speculator.resources)
    return torch.cat([parameter.detach().flatten().float() for parameter in network.parameters()])


def change_weights(path, factor, dtype=None):
    """Writes other weights to the file of a checkpoint, of the same size unless their type changes."""
    tensors = load_file(path)
    weights = {name: (factor * tensor).to(dtype) for name, tensor in tensors.items() if tensor.is_floating_point()}
    save_file({**tensors, **weights}, path, metadata={"format": "pt"})


@pytest.mark.parametrize("method", ["eagle3", *in_full("suffix+eagle3", *OTHERS)])
def test_replaced_weights_are_loaded_and_old_ones_are_freed(method, target, copied):
    settings, path = copied(method)
    first = load_speculator(target, settings)
    old = weights_of(first)
    # Other files are of no interest.
    (path.parent / "train.log").write_text("step 1")
    assert load_speculator(target, settings).resources is first.resources
    change_weights(path, 0.5)
    second = load_speculator(target, settings)
    assert torch.equal(weights_of(second), 0.5 * old)
    # What the user holds stays as it was.
    assert torch.equal(weights_of(first), old)
    gone = weakref.ref(first.generator_class.network(first.resources))
    del first
    gc.collect()
    assert gone() is None
    assert load_speculator(target, settings).resources is second.resources
    shutil.rmtree(path.parent)
    assert load_speculator(target, settings).resources is second.resources


@pytest.mark.parametrize("method", ["eagle3", *in_full("mlp_speculator", "dflash", "mtp", "medusa")])
def test_overwritten_and_half_written_weights(method, target, copied):
    """A file that is mapped into memory must not change what was loaded from it."""
    settings, path = copied(method)
    # As the target's, so that nothing is converted.
    change_weights(path, 1.0, target.dtype)
    held, content = load_speculator(target, settings), path.read_bytes()
    expected, half = weights_of(held), len(content) // 2
    with path.open("r+b") as file:
        file.seek(half)
        file.write(bytes(len(content) - half))
    assert torch.equal(weights_of(held), expected)
    assert not torch.equal(weights_of(load_speculator(target, settings)), expected)
    path.write_bytes(content[:half])
    with pytest.raises(CheckpointFormatError, match=settings["model"]):
        load_speculator(target, settings)
    path.write_bytes(content)
    assert torch.equal(weights_of(load_speculator(target, settings)), expected)


def test_files_that_change_while_they_are_read(tmp_path):
    """The next call reads them anew."""
    file = tmp_path / "model.bin"
    changes = [2]

    class Written(NgramCandidateGenerator):
        @classmethod
        def loaded_from(cls, config, target_model):
            return config.replace(model=str(tmp_path))

        @classmethod
        def load(cls, config, target_model):
            found = file.read_text()
            if changes:
                file.write_text(found + " " * changes.pop())
            return found

    register_candidate_generator("written", Written)
    try:
        file.write_text("0")
        target = tiny_llama()
        assert [load_speculator(target, "written").resources for _ in range(3)] == ["0", "0  ", "0  "]
    finally:
        unregister_candidate_generator("written")


def test_least_recently_used_leaves(target):
    depths = range(4, 8)
    first, *others = [load_speculator(target, "suffix", suffix_decoding_max_tree_depth=depth) for depth in depths]
    # The first is used again, so that the second leaves.
    assert load_speculator(target, first.config).resources is first.resources
    new = load_speculator(target, "ngram")
    assert [entry.resources for entry in record_of(target).loaded] == [
        *(speculator.resources for speculator in (*others[1:], first, new))
    ]


def test_speculator_that_is_held_keeps_working(target):
    plain = target.generate(TOKENS, **GREEDY)
    held = load_demo(target, "eagle3")
    network = weakref.ref(held.resources)
    for depth in range(4, 8):
        load_speculator(target, "suffix", suffix_decoding_max_tree_depth=depth)
    assert held.resources not in [entry.resources for entry in record_of(target).loaded]
    assert torch.equal(target.generate(TOKENS, **GREEDY, assistant=held), plain)
    del held
    gc.collect()
    assert network() is None


def test_shared_weights_are_counted_once_and_texts_too(target):
    alone = load_demo(target, "eagle3")
    for method in ("suffix+eagle3", "ngram+eagle3"):
        load_demo(target, method)
    tensors = [*alone.resources.parameters(), *alone.resources.buffers()]
    before = num_bytes(record_of(target).loaded)
    assert before == sum(tensor.nbytes for tensor in tensors)
    assert len(record_of(target).loaded) == 3
    for _ in range(2):
        target.generate(TOKENS, **GREEDY, spec_method="suffix")
        assert num_bytes(record_of(target).loaded) > before
        before = num_bytes(record_of(target).loaded)


def test_of_draft_models_that_are_passed_the_last_stays():
    target, drafts = tiny_llama(), [tiny_llama(seed=seed) for seed in range(1, 4)]
    references = [weakref.ref(draft) for draft in drafts]
    while drafts:
        load_speculator(target, draft_model=drafts.pop(0))
    gc.collect()
    assert [reference() is None for reference in references] == [True, True, False]


@pytest.mark.parametrize("method", ["eagle3", *in_full("ngram", "suffix", *OTHERS)])
def test_target_is_freed_with_its_drafters(method, shared_target):
    target = copy.deepcopy(shared_target)
    place = {"model": HEADS[method]} if method in HEADS else {"method": method}
    for k in (2, "auto"):
        target.generate(TOKENS, **GREEDY, speculative={**place, "num_speculative_tokens": k})
    reference = weakref.ref(target)
    del target
    gc.collect()
    assert reference() is None


def test_copies_and_pickles_of_a_target_have_no_record():
    target = tiny_llama()
    load_speculator(target, "suffix")
    for twin in (copy.deepcopy(target), pickle.loads(pickle.dumps(target))):
        assert record_of(twin) is not record_of(target)
        assert not record_of(twin).loaded
    assert b"hf_specdec.loaded" not in pickle.dumps(target)


@pytest.mark.parametrize("method", ["medusa", *in_full("suffix+medusa", "mlp_speculator")])
def test_settings_beyond_what_was_loaded(method, target):
    for _ in range(2):
        with pytest.raises(SpecConfigError, match="=9 is more than the 4 heads"):
            load_demo(target, method, num_speculative_tokens=9)
        # Also beside what is loaded.
        assert load_demo(target, method).method == method


@full
def test_threads_that_push_each_other_out(target, copied):
    """Drafters leave, and are written anew, while others are loaded and used."""
    drafters = [copied(method) for method in ("medusa", "eagle3", "mlp_speculator")]
    plain, texts = target.generate(TOKENS, **GREEDY).tolist(), []

    def generate(number):
        for turn in range(4):
            settings, path = drafters[(number + turn) % len(drafters)]
            method = f"suffix+{settings['method']}" if turn % 2 else settings["method"]
            texts.append(target.generate(TOKENS, **GREEDY, speculative={**settings, "method": method}).tolist())
            os.utime(path.parent / "config.json", ns=(number, 1000 * number + turn))
            num_bytes(all_loaded())

    in_threads(*(partial(generate, number) for number in range(3)))
    assert texts
    assert all(text == plain for text in texts)
    assert len(record_of(target).loaded) == 4


def test_tensors_that_are_kept_for_all_are_forgotten_with_all():
    _block(chain_topology(2, torch.device("cpu")), torch.float32, 1)
    assert _block.cache_info().currsize
    forget_speculators()
    assert not any(keeper.cache_info().currsize for keeper in keepers)


@pytest.mark.parametrize("is_inside", [True, False])
def test_models_that_hold_each_other_are_freed(is_inside):
    first, second = tiny_llama(), tiny_llama(1)
    if is_inside:
        second.teacher = first
    else:
        load_speculator(second, draft_model=first)
    load_speculator(first, draft_model=second)
    assert not record_of(first).loaded
    references = [weakref.ref(first), weakref.ref(second)]
    del first, second
    gc.collect()
    assert [reference() for reference in references] == [None, None]
