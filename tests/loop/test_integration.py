"""The hook into generate(): what it takes, what it leaves alone, and that it can be taken back."""

import copy
import functools
import gc
import inspect
import os
import subprocess
import sys
import warnings
import weakref
from functools import partial
from types import SimpleNamespace

import pytest
import torch
from transformers import GenerationMixin, LlamaForCausalLM, pipeline
from transformers.generation.candidate_generator import AssistedCandidateGenerator, PromptLookupCandidateGenerator
from transformers.modeling_layers import GradientCheckpointingLayer

import hf_specdec
from hf_specdec import (
    SpecConfigError,
    SpeculativeConfig,
    UnsupportedModelError,
    forget_speculators,
    load_speculator,
    record,
)
from hf_specdec.arguments import ARGUMENTS, original_generate
from hf_specdec.call import entry
from hf_specdec.candidate_generators.medusa.network import MedusaHeads
from hf_specdec.loaded import record_of
from hf_specdec.target import lean
from tests.helpers.levels import full, in_full
from tests.helpers.models import prompts, tiny_llama
from tests.helpers.paths import ROOT
from tests.helpers.threads import in_threads


SETTINGS = {"do_sample": False, "max_new_tokens": 24}
NGRAM = {**SETTINGS, "spec_method": "ngram"}


@pytest.fixture
def inputs():
    return prompts(1, length=9)


@pytest.fixture
def plain(model, inputs):
    return model.generate(**inputs, **SETTINGS)


def num_calls(run, expected) -> int:
    """Speculative calls among those that `run` makes; each of them gives the expected text."""
    with record() as made:
        for text in run():
            assert torch.equal(text, expected)
    return len(made.calls)


def test_install_twice_and_uninstall_twice(model, inputs, plain):
    patched, original = GenerationMixin.generate, original_generate(GenerationMixin)
    assert patched is not original
    hf_specdec.install()
    assert GenerationMixin.generate is patched
    try:
        for _ in range(2):
            hf_specdec.uninstall()
            assert GenerationMixin.generate is original
        with pytest.raises(ValueError, match="model_kwargs"):
            model.generate(**inputs, **NGRAM)
        # The explicit form needs no patch.
        assert num_calls(lambda: [hf_specdec.generate(model, inputs["input_ids"], **NGRAM)], plain) == 1
        assert num_calls(lambda: [hf_specdec.generate(model, **inputs, **SETTINGS)], plain) == 0
    finally:
        hf_specdec.install()
    assert GenerationMixin.generate.__wrapped__ is original
    assert all(getattr(hf_specdec, name) is not None for name in hf_specdec.__all__)


def test_signature_and_docstring_show_the_arguments():
    before = inspect.signature(original_generate(GenerationMixin))
    for method in (GenerationMixin.generate, LlamaForCausalLM.generate, tiny_llama().generate):
        shown = inspect.signature(method)
        assert [name for name in shown.parameters if name not in before.parameters] == list(ARGUMENTS)
        assert list(shown.parameters)[-1] == "kwargs"
        assert all(f"{name} (`" in inspect.getdoc(method) for name in ARGUMENTS)
    assert list(inspect.signature(hf_specdec.generate).parameters)[2:7] == list(ARGUMENTS)


@full
def test_class_with_a_generate_of_its_own(inputs, plain):
    class Own(LlamaForCausalLM):
        def generate(self, inputs=None, flavour=None, **kwargs):
            """Generates in a way of its own."""
            return super().generate(inputs, **kwargs)

    model = tiny_llama()
    model.__class__ = Own
    assert num_calls(lambda: [model.generate(**inputs, **NGRAM, flavour=1)], plain) == 1
    assert num_calls(lambda: [model.generate(**inputs, **SETTINGS)], plain) == 0
    assert num_calls(lambda: [hf_specdec.generate(model, **inputs, **NGRAM)], plain) == 1


@pytest.mark.parametrize("says_what_it_wraps", [True, *in_full(False)])
def test_patches_of_other_packages_survive(model, inputs, plain, says_what_it_wraps):
    passed = []
    original, ours = original_generate(GenerationMixin), GenerationMixin.generate

    def other(self, *given, **named):
        passed.append(sorted(named))
        return ours(self, *given, **named)

    def assert_speculates(number=1):
        passed.clear()
        assert num_calls(lambda: [model.generate(**inputs, **NGRAM)], plain) == 1
        assert len(passed) == number

    def assert_does_not():
        assert torch.equal(model.generate(**inputs, **SETTINGS), plain)
        with pytest.raises(ValueError, match="spec_method"):
            model.generate(**inputs, **NGRAM)

    GenerationMixin.generate = other = functools.wraps(ours)(other) if says_what_it_wraps else other
    try:
        hf_specdec.install()
        assert_speculates()
        for _ in range(2):
            hf_specdec.uninstall()
            assert GenerationMixin.generate is other
            assert_does_not()
            hf_specdec.install()
            assert_speculates()
        # The other package takes its own back, to what it found: ours of that time.
        GenerationMixin.generate = ours
        hf_specdec.install()
        assert_speculates(0)
        hf_specdec.uninstall()
        assert_does_not()
    finally:
        hf_specdec.uninstall()
        GenerationMixin.generate = original
        hf_specdec.install()


# Whoever looks for the module that is patched need not load it, and importing the package loads little.
LIGHT_IMPORT = """
import importlib.util, inspect, sys, hf_specdec
name = "transformers.generation.utils"
heavy = ("triton", "arctic_inference", "numba", "prometheus_client", "typer", "datasets", name)
parts = tuple(f"hf_specdec.{part}" for part in ("checkpoints", "layers", "training", "demo"))
print([module for module in sys.modules if module in heavy or module.startswith(parts)])
print(importlib.util.find_spec(name).name == name)
from transformers import GenerationMixin
print("spec_method" in str(inspect.signature(GenerationMixin.generate)))
"""
SWITCHED_OFF = """
from transformers import GenerationMixin
before = GenerationMixin.generate
import hf_specdec
print(GenerationMixin.generate is before)
hf_specdec.install()
print(GenerationMixin.generate is before)
"""


@full
@pytest.mark.parametrize(
    ("code", "disabled", "printed"), [(LIGHT_IMPORT, "", "[] True True"), (SWITCHED_OFF, "1", "True False")]
)
def test_import(code, disabled, printed):
    environment = {**os.environ, "HF_SPECDEC_DISABLE": disabled}
    command = [sys.executable, "-c", code]
    result = subprocess.run(command, capture_output=True, text=True, cwd=ROOT, env=environment, check=False)
    assert result.stdout.split() == printed.split(), result.stderr


def test_calls_without_speculation(model, inputs, plain):
    def calls():
        yield model.generate(**inputs, **SETTINGS, speculative=False)
        yield model.generate(**inputs, **SETTINGS, spec_method="off", num_speculative_tokens=3)
        yield model.generate(**inputs, **SETTINGS, prompt_lookup_num_tokens=3)

    assert num_calls(calls, plain) == 0
    for settings in ({"do_sample": True}, {"num_beams": 3, "do_sample": False}):
        outputs = []
        for generate in (model.generate, partial(original_generate(GenerationMixin), model)):
            torch.manual_seed(3)
            outputs.append(generate(**inputs, max_new_tokens=12, **settings))
        assert torch.equal(*outputs)


def test_ways_to_name_a_drafter(model, inputs, plain, tmp_path):
    draft = tiny_llama(seed=1, num_hidden_layers=1)
    draft.save_pretrained(tmp_path)
    speculator = load_speculator(model, "ngram", num_speculative_tokens=5)
    for method, call in (
        ("ngram", {"spec_method": "prompt_lookup"}),
        ("ngram", {"spec_method": "ngram", "num_speculative_tokens": 2}),
        ("ngram", {"speculative": "ngram"}),
        ("ngram", {"speculative": {"method": "ngram", "prompt_lookup_max": 3}, "num_speculative_tokens": 4}),
        ("ngram", {"speculative": '{"method": "ngram", "num_speculative_tokens": 4}'}),
        ("ngram", {"speculative": SpeculativeConfig(method="ngram")}),
        ("ngram", {"assistant": speculator}),
        ("draft_model", {"assistant": draft}),
        ("draft_model", {"spec_model": draft}),
        ("draft_model", {"spec_method": "draft_model", "assistant": draft, "num_speculative_tokens": 2}),
        ("draft_model", {"spec_method": "draft_model", "spec_model": tmp_path}),
        ("draft_model", {"speculative": {"method": "draft_model", "model": str(tmp_path)}}),
    ):
        with record() as made:
            assert torch.equal(model.generate(**inputs, **SETTINGS, **call), plain)
        assert made.calls[0].stats.method == method


def test_candidate_generators_of_transformers(model, inputs, plain):
    repeated = {name: value.repeat(1, 2) for name, value in inputs.items()}
    expected = model.generate(**repeated, **SETTINGS)
    lookup = PromptLookupCandidateGenerator(
        num_output_tokens=4, max_matching_ngram_size=2, max_length=18 + 24, vocab_size=64
    )
    with record() as made:
        assert torch.equal(model.generate(**repeated, **SETTINGS, assistant=lookup), expected)
    assert made.calls[0].stats.num_draft_tokens > 0
    with pytest.raises(SpecConfigError, match="one row, the batch has 2"):
        model.generate(**prompts(2), **SETTINGS, assistant=lookup)
    config = copy.deepcopy(model.generation_config)
    config.min_length, config.max_length, config.num_assistant_tokens = 0, 64, 4
    mask = {"attention_mask": inputs["attention_mask"]}
    assistant = AssistedCandidateGenerator(inputs["input_ids"], copy.deepcopy(model), config, mask)
    with record() as made:
        assert torch.equal(model.generate(**inputs, **SETTINGS, assistant=assistant), plain)
    assert made.calls[0].stats.num_accepted_tokens > 0


def test_contradictory_and_wrong_arguments(model, inputs):
    speculator, draft = load_speculator(model, "ngram"), tiny_llama(seed=1)
    heads = MedusaHeads(32, 64, 2, own_lm_heads=False)
    for speculative, match in (
        ({"assistant": torch.nn.Linear(2, 2)}, "A Linear is no draft model"),
        ({"assistant": heads, "spec_method": "draft_model"}, "MedusaHeads, which is for method='medusa'"),
        ({"assistant": draft, "spec_method": "ngram"}, "drafts without a model, and got a Llama"),
        ({"assistant": speculator, "num_speculative_tokens": 3}, "together with other speculative arguments"),
        ({"assistant": draft, "spec_model": draft}, "both name a draft model"),
        ({"assistant": "some/model"}, "got str.*spec_model"),
        ({"spec_method": "ngram", "assistant_model": draft}, "assistant_model.*assistant"),
        ({"spec_method": "ngram", "custom_generate": "transformers-community/dola"}, "custom_generate"),
        ({"num_speculative_tokens": 3}, "method"),
        ({"spec_method": "draft_model"}, "model"),
        ({"spec_method": "OFF"}, "Did you mean 'off'"),
    ):
        with pytest.raises(SpecConfigError, match=match):
            model.generate(**inputs, **SETTINGS, **speculative)
    for given in (torch.nn.DataParallel(model), torch.compile(model), None, torch.nn.Linear(2, 2)):
        with pytest.raises(SpecConfigError):
            hf_specdec.generate(given, inputs["input_ids"], spec_method="ngram")


def test_targets_are_freed_without_the_garbage_collector(inputs):
    gc.disable()
    try:
        target = tiny_llama()
        hf_specdec.generate(target, **inputs, **NGRAM)
        forget_speculators(target)
        reference = weakref.ref(target)
        del target
        assert reference() is None
    finally:
        gc.enable()


def test_loaded_drafters_are_remembered():
    model, draft = tiny_llama(), tiny_llama(seed=1)
    memory = load_speculator(model, "suffix").resources
    # Settings that matter only while generating share it; those that loading reads do not.
    assert load_speculator(model, {"method": "suffix", "num_speculative_tokens": 5}).resources is memory
    assert load_speculator(model, "suffix", suffix_decoding_max_tree_depth=32).resources is not memory
    of_draft, twin = load_speculator(model, draft_model=draft).resources, copy.deepcopy(draft)
    assert load_speculator(model, draft_model=draft, num_speculative_tokens=3).resources is of_draft
    assert load_speculator(model, draft_model=twin).resources.model is twin
    forget_speculators(model)
    assert not record_of(model).loaded
    assert load_speculator(model, "suffix").resources is not memory


def test_pipeline(model, tokenizer):
    """The drafter is an argument of the pipeline or of the call."""

    def texts(pipe, **settings):
        settings = {"max_new_tokens": 20, "do_sample": False, "return_full_text": False, **settings}
        return [result[0]["generated_text"] for result in pipe(["abcabcab", "xyz"], **settings)]

    plain = pipeline("text-generation", model=model, tokenizer=tokenizer)
    always = pipeline("text-generation", model=model, tokenizer=tokenizer, speculative="ngram")
    # Plain in the same batches: the padding of a batch must not differ.
    expected = texts(plain, batch_size=2)
    with record() as made:
        assert texts(always, batch_size=2) == expected
        assert texts(plain, batch_size=2, spec_method="ngram", num_speculative_tokens=3) == expected
        assert texts(always, batch_size=2, speculative="off") == expected
    assert [call.stats.batch_size for call in made.calls] == [2, 2]
    stop = {"stop_sequence": texts(plain)[0][7:9]}
    assert texts(always, **stop) == texts(plain, **stop)


@full
@pytest.mark.parametrize(("method", "is_lean"), [("ngram", True), ("draft_model", False)])
def test_threads_share_one_speculator(model, method, is_lean, monkeypatch):
    if not is_lean:
        monkeypatch.setattr(lean, "has_lean_forward", lambda model: False)
    # Threads take turns inside a forward, not only between them.
    interval = sys.getswitchinterval()
    sys.setswitchinterval(1e-5)
    calls = [{**prompts(1 + index % 2, length=6 + index, seed=index), **SETTINGS} for index in range(4)]
    expected = [model.generate(**call) for call in calls]
    settings = {} if method == "ngram" else {"draft_model": tiny_llama(seed=1, num_hidden_layers=1)}
    speculator = load_speculator(model, method, **settings)
    functions = [partial(model.generate, **call, assistant=speculator) for call in calls]
    # One thread generates plainly on the same model.
    functions.append(partial(model.generate, **calls[0]))
    try:
        assert all(map(torch.equal, in_threads(*functions), [*expected, expected[0]]))
    finally:
        sys.setswitchinterval(interval)
    assert model.config._attn_implementation == "sdpa"


def test_prompts_on_another_device_are_moved_to_the_model():
    """Plain generate() moves them before every forward."""
    arguments = {"input_ids": torch.tensor([[3, 4]]), "attention_mask": torch.ones(1, 2, device="meta"), "top_k": 5}
    elsewhere = torch.nn.Linear(2, 2, device="meta")
    elsewhere.device, elsewhere.config = torch.device("meta"), SimpleNamespace(is_encoder_decoder=False)
    assert entry._move_to_model(elsewhere, arguments) == torch.device("cpu")
    assert {arguments[name].device.type for name in ("input_ids", "attention_mask")} == {"meta"}
    assert entry._move_to_model(elsewhere, arguments) is None


@full
def test_gradient_checkpointing_is_named(inputs):
    model = tiny_llama(seed=7)
    with warnings.catch_warnings():
        # transformers is about to rename it.
        warnings.simplefilter("ignore", FutureWarning)
        model.gradient_checkpointing_enable()
    model.train()
    # Since 5.24 it does so where there are gradients alone.
    if "is_grad_enabled" in inspect.getsource(GradientCheckpointingLayer):
        assert torch.equal(model.generate(**inputs, **NGRAM), model.generate(**inputs, **SETTINGS))
    else:
        with pytest.raises(UnsupportedModelError, match="gradient checkpointing turns the cache off"):
            model.generate(**inputs, **NGRAM)
