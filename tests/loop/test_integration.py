"""The hook: what it takes, what it leaves alone, and that it can be taken back."""

import copy
import functools
import gc
import inspect
import os
import pydoc
import subprocess
import sys
import threading
import warnings
import weakref
from functools import partial
from types import SimpleNamespace

import pytest
import torch
from transformers import GenerationConfig, GenerationMixin, LlamaForCausalLM, TextIteratorStreamer, pipeline
from transformers.generation.candidate_generator import AssistedCandidateGenerator, PromptLookupCandidateGenerator
from transformers.modeling_layers import GradientCheckpointingLayer

import hf_specdec
from hf_specdec import (
    SpecConfigError,
    SpeculativeConfig,
    UnsupportedModelError,
    forget_speculators,
    integration,
    load_speculator,
    record,
    register_candidate_generator,
)
from hf_specdec.arguments import ARGUMENTS
from hf_specdec.candidate_generators import unregister_candidate_generator
from hf_specdec.candidate_generators.medusa.network import MedusaHeads
from hf_specdec.candidate_generators.ngram.generator import NgramCandidateGenerator
from hf_specdec.decoding import functional
from hf_specdec.loaded import record_of
from hf_specdec.patching import original_generate
from tests.helpers.models import prompts, scripted_for, tiny_llama
from tests.helpers.paths import ROOT
from tests.helpers.threads import in_threads


SETTINGS = {"do_sample": False, "max_new_tokens": 24}


@pytest.fixture
def inputs():
    return prompts(1, length=9)


@pytest.fixture
def plain(model, inputs):
    return model.generate(**inputs, **SETTINGS)


def run_python(code: str, **environment) -> str:
    result = subprocess.run(
        [sys.executable, "-c", code],
        capture_output=True,
        text=True,
        cwd=ROOT,
        env={**os.environ, **environment},
        check=False,
    )
    assert result.returncode == 0, result.stderr
    return result.stdout


class TestInstall:
    def test_install_twice_and_uninstall(self):
        patched = GenerationMixin.generate
        original = original_generate(GenerationMixin)
        assert patched is not original
        hf_specdec.install()
        assert GenerationMixin.generate is patched
        try:
            hf_specdec.uninstall()
            assert GenerationMixin.generate is original
            hf_specdec.uninstall()
            assert GenerationMixin.generate is original
            with pytest.raises(ValueError, match="model_kwargs"):
                tiny_llama().generate(**prompts(1), max_new_tokens=2, spec_method="ngram")
        finally:
            hf_specdec.install()
        assert GenerationMixin.generate is not original
        assert GenerationMixin.generate.__wrapped__ is original

    def test_signature_and_docstring_show_the_arguments(self):
        original = original_generate(GenerationMixin)
        before = inspect.signature(original)
        assert GenerationMixin.generate.__name__ == "generate"
        for method in (GenerationMixin.generate, LlamaForCausalLM.generate, tiny_llama().generate):
            shown = inspect.signature(method)
            assert [name for name in shown.parameters if name not in before.parameters] == list(ARGUMENTS)
            assert list(shown.parameters)[-1] == "kwargs"
            text = inspect.getdoc(method)
            assert text.startswith(inspect.getdoc(original)[:60])
            assert all(f"{name} (`" in text for name in ARGUMENTS)
        assert list(inspect.signature(hf_specdec.generate).parameters)[2:7] == list(ARGUMENTS)
        assert pydoc.render_doc(GenerationMixin.generate).count("num_speculative_tokens") >= 2
        hf_specdec.uninstall()
        try:
            assert inspect.signature(GenerationMixin.generate) == before
            assert "spec_method" not in GenerationMixin.generate.__doc__
        finally:
            hf_specdec.install()

    def test_a_class_with_a_generate_of_its_own(self, inputs, plain):
        class Own(LlamaForCausalLM):
            def generate(self, inputs=None, flavour=None, **kwargs):
                """Generates in a way of its own."""
                return super().generate(inputs, **kwargs)

        model = tiny_llama()
        model.__class__ = Own
        assert list(inspect.signature(model.generate).parameters) == ["inputs", "flavour", "kwargs"]
        assert torch.equal(model.generate(**inputs, **SETTINGS, spec_method="ngram", flavour=1), plain)
        assert torch.equal(model.generate(**inputs, **SETTINGS), plain)
        with record() as made:
            assert torch.equal(hf_specdec.generate(model, **inputs, **SETTINGS, spec_method="ngram"), plain)
        assert len(made.calls) == 1

    @pytest.mark.parametrize("says_what_it_wraps", [True, False])
    def test_patches_of_other_packages_survive(self, model, inputs, plain, says_what_it_wraps):
        calls = []
        original, ours = original_generate(GenerationMixin), GenerationMixin.generate

        def other(self, *given, **named):
            calls.append(sorted(named))
            return ours(self, *given, **named)

        def speculates():
            calls.clear()
            with record() as made:
                assert torch.equal(model.generate(**inputs, **SETTINGS, spec_method="ngram"), plain)
                mask = inputs["attention_mask"]
                ids = model.generate(inputs["input_ids"], attention_mask=mask, **SETTINGS, spec_method="ngram")
                assert torch.equal(ids, plain)
                config = GenerationConfig(**SETTINGS, pad_token_id=0)
                ids = model.generate(**inputs, generation_config=config, spec_method="ngram")
                assert torch.equal(ids, plain)
            assert len(calls) == 3
            return len(made.calls) == 3

        other = functools.wraps(ours)(other) if says_what_it_wraps else other
        GenerationMixin.generate = other
        try:
            hf_specdec.install()
            assert GenerationMixin.generate is other
            assert speculates()
            for _ in range(2):
                hf_specdec.uninstall()
                assert GenerationMixin.generate is other
                assert torch.equal(model.generate(**inputs, **SETTINGS), plain)
                with pytest.raises(ValueError, match="spec_method"):
                    model.generate(**inputs, **SETTINGS, spec_method="ngram")
                assert inspect.signature(ours) == inspect.signature(original)
                hf_specdec.install()
                assert speculates()
            # The other package takes its own back, to what it found: ours of that time.
            GenerationMixin.generate = ours
            hf_specdec.install()
            with record() as made:
                assert torch.equal(model.generate(**inputs, **SETTINGS, spec_method="ngram"), plain)
            assert len(made.calls) == 1
            hf_specdec.uninstall()
            with pytest.raises(ValueError, match="spec_method"):
                model.generate(**inputs, **SETTINGS, spec_method="ngram")
        finally:
            hf_specdec.uninstall()
            GenerationMixin.generate = original
            hf_specdec.install()

    def test_installs_again_where_the_original_was_put_back(self, model, inputs, plain):
        GenerationMixin.generate = original_generate(GenerationMixin)
        hf_specdec.install()
        with record() as made:
            assert torch.equal(model.generate(**inputs, **SETTINGS, spec_method="ngram"), plain)
        assert len(made.calls) == 1

    def test_explicit_form_without_the_patch(self, model, inputs, plain):
        hf_specdec.uninstall()
        try:
            assert torch.equal(hf_specdec.generate(model, **inputs, **SETTINGS, spec_method="ngram"), plain)
            assert torch.equal(hf_specdec.generate(model, **inputs, **SETTINGS), plain)
            assert torch.equal(hf_specdec.generate(model, inputs["input_ids"], **SETTINGS, speculative="ngram"), plain)
        finally:
            hf_specdec.install()

    def test_explicit_form_with_the_patch(self, model, inputs, plain):
        with record() as made:
            assert torch.equal(hf_specdec.generate(model, **inputs, **SETTINGS, spec_method="ngram"), plain)
            assert torch.equal(hf_specdec.generate(model, **inputs, **SETTINGS), plain)
        assert len(made.calls) == 1

    def test_environment_variable(self):
        code = (
            "import os, sys; from transformers import GenerationMixin; before = GenerationMixin.generate;"
            "import hf_specdec; print(GenerationMixin.generate is before);"
            "hf_specdec.install(); print(GenerationMixin.generate is before);"
            "hf_specdec.uninstall(); print(GenerationMixin.generate is before);"
            "os.environ['HF_SPECDEC_DISABLE'] = '';"
            "[sys.modules.pop(name) for name in list(sys.modules) if name.startswith('hf_specdec')];"
            "import hf_specdec; print(GenerationMixin.generate is before)"
        )
        assert run_python(code, HF_SPECDEC_DISABLE="1").split() == ["True", "False", "True", "False"]

    def test_whoever_looks_for_the_module_need_not_load_it(self):
        code = (
            "import importlib.util, sys, hf_specdec; name = 'transformers.generation.utils';"
            "assert name not in sys.modules; assert importlib.util.find_spec(name).name == name;"
            "from transformers import GenerationMixin;"
            "print('spec_method' in str(__import__('inspect').signature(GenerationMixin.generate)));"
            "print(any(type(finder).__module__ == 'hf_specdec.hook' for finder in sys.meta_path))"
        )
        assert run_python(code).split() == ["True", "False"]

    def test_import_is_light(self):
        code = "import sys, hf_specdec; print(*sorted(m for m in sys.modules if m.startswith('hf_specdec') or m in "
        code += "('triton', 'arctic_inference', 'numba', 'prometheus_client', 'typer', 'rich', 'datasets')))"
        imported = set(run_python(code).split())
        assert "hf_specdec.hook" in imported
        heavy = {"triton", "arctic_inference", "numba", "prometheus_client", "typer", "datasets"}
        methods = {f"hf_specdec.candidate_generators.{name}.generator" for name in ("ngram", "suffix", "draft_model")}
        assert not imported & (heavy | methods)
        parts = ("hf_specdec.checkpoints", "hf_specdec.layers", "hf_specdec.training", "hf_specdec.demo")
        assert not any(name.startswith(parts) for name in imported)

    def test_public_names(self):
        for name in hf_specdec.__all__:
            assert getattr(hf_specdec, name) is not None
        with pytest.raises(AttributeError, match="no attribute 'generator'"):
            _ = hf_specdec.generator


class TestPlainCalls:
    def test_go_to_the_original_as_they_are(self, model, monkeypatch):
        """Objects that were passed arrive themselves."""
        seen = []

        def stub(self, *args, **kwargs):
            seen.append((self, args, kwargs))
            return "result"

        hf_specdec.uninstall()
        original = GenerationMixin.generate
        try:
            GenerationMixin.generate = stub
            hf_specdec.install()
            inputs, config = torch.ones(1, 2), object()
            assert model.generate(inputs, generation_config=config, streamer=3) == "result"
            hf_specdec.uninstall()
        finally:
            GenerationMixin.generate = original
            hf_specdec.install()
        caller, args, kwargs = seen[0]
        assert caller is model
        assert args[0] is inputs
        assert kwargs == {"generation_config": config, "streamer": 3}

    @pytest.mark.parametrize("off", ["off", False])
    def test_switched_off(self, model, inputs, plain, off):
        with record() as made:
            for argument in ("spec_method", "speculative"):
                assert torch.equal(model.generate(**inputs, **SETTINGS, **{argument: off}), plain)
            assert torch.equal(model.generate(**inputs, **SETTINGS, spec_method=off, num_speculative_tokens=3), plain)
        assert not made.calls

    def test_sampling_and_beams_without_speculation(self, model, inputs):
        for settings in ({"do_sample": True}, {"num_beams": 3, "do_sample": False}):
            outputs = []
            for generate in (model.generate, partial(original_generate(GenerationMixin), model)):
                torch.manual_seed(3)
                outputs.append(generate(**inputs, max_new_tokens=12, **settings))
            assert torch.equal(*outputs)

    def test_stock_assisted_generation_still_works(self, model, inputs, plain):
        assert torch.equal(model.generate(**inputs, **SETTINGS, prompt_lookup_num_tokens=3), plain)


class TestWaysToAsk:
    @pytest.mark.parametrize(
        "speculative",
        [
            {"spec_method": "ngram"},
            {"spec_method": "prompt_lookup"},
            {"spec_method": "ngram", "num_speculative_tokens": 2},
            {"speculative": "ngram"},
            {"speculative": {"method": "ngram", "prompt_lookup_max": 3}},
            {"speculative": '{"method": "ngram", "num_speculative_tokens": 4}'},
            {"speculative": SpeculativeConfig(method="ngram")},
            {"speculative": {"method": "ngram"}, "num_speculative_tokens": 4},
        ],
    )
    def test_ngram(self, model, inputs, plain, speculative):
        with record() as made:
            assert torch.equal(model.generate(**inputs, **SETTINGS, **speculative), plain)
        assert made.calls[0].stats.method == "ngram"

    def test_draft_model(self, model, inputs, plain, tmp_path):
        draft = tiny_llama(seed=1, num_hidden_layers=1)
        draft.save_pretrained(tmp_path)
        for speculative in (
            {"assistant": draft},
            {"spec_model": draft},
            {"spec_method": "draft_model", "spec_model": draft, "num_speculative_tokens": 2},
            {"spec_method": "draft_model", "assistant": draft},
            {"spec_method": "draft_model", "spec_model": str(tmp_path)},
            {"spec_method": "draft_model", "spec_model": tmp_path},
            {"speculative": {"method": "draft_model", "model": str(tmp_path)}},
        ):
            with record() as made:
                assert torch.equal(model.generate(**inputs, **SETTINGS, **speculative), plain)
            assert made.calls[0].stats.method == "draft_model"

    def test_speculator(self, model, inputs, plain):
        speculator = load_speculator(model, "ngram", num_speculative_tokens=5)
        assert torch.equal(model.generate(**inputs, **SETTINGS, assistant=speculator), plain)
        assert "ngram" in repr(speculator)

    def test_candidate_generators_of_transformers(self, model, inputs, plain):
        repeated = {name: value.repeat(1, 2) for name, value in inputs.items()}
        expected = model.generate(**repeated, **SETTINGS)
        lookup = PromptLookupCandidateGenerator(
            num_output_tokens=4, max_matching_ngram_size=2, max_length=18 + 24, vocab_size=64
        )
        with record() as made:
            assert torch.equal(model.generate(**repeated, **SETTINGS, assistant=lookup), expected)
        assert made.calls[0].stats.num_draft_tokens > 0

        draft = copy.deepcopy(model)
        config = copy.deepcopy(model.generation_config)
        config.min_length, config.max_length, config.num_assistant_tokens = 0, 64, 4
        assistant = AssistedCandidateGenerator(
            inputs["input_ids"], draft, config, {"attention_mask": inputs["attention_mask"]}
        )
        with record() as made:
            assert torch.equal(model.generate(**inputs, **SETTINGS, assistant=assistant), plain)
        assert made.calls[0].stats.num_accepted_tokens > 0

    def test_a_candidate_generator_takes_one_row(self, model):
        lookup = PromptLookupCandidateGenerator(num_output_tokens=4, max_length=40)
        with pytest.raises(SpecConfigError, match="one row, the batch has 2"):
            model.generate(**prompts(2), **SETTINGS, assistant=lookup)

    def test_contradictions(self, model, inputs):
        speculator = load_speculator(model, "ngram")
        draft = tiny_llama(seed=1)
        heads = MedusaHeads(32, 64, 2, own_lm_heads=False)
        for speculative, match in (
            ({"assistant": torch.nn.Linear(2, 2)}, "A Linear is no draft model"),
            ({"assistant": heads, "spec_method": "draft_model"}, "MedusaHeads, which is for method='medusa'"),
            ({"assistant": draft, "spec_method": "ngram"}, "drafts without a model, and got a Llama"),
            ({"assistant": speculator, "num_speculative_tokens": 3}, "together with other speculative arguments"),
            ({"assistant": speculator, "spec_method": "ngram"}, "together with other speculative arguments"),
            ({"assistant": draft, "spec_model": draft}, "both name a draft model"),
            ({"assistant": "some/model"}, "got str.*spec_model"),
            ({"spec_method": "ngram", "assistant_model": draft}, "assistant_model.*assistant"),
            ({"spec_method": "ngram", "custom_generate": "transformers-community/dola"}, "custom_generate"),
            ({"num_speculative_tokens": 3}, "method"),
            ({"spec_method": "draft_model"}, "model"),
        ):
            with pytest.raises(SpecConfigError, match=match):
                model.generate(**inputs, **SETTINGS, **speculative)

    def test_what_was_loaded_is_remembered(self):
        model, draft = tiny_llama(), tiny_llama(seed=1)
        memory = load_speculator(model, "suffix").resources
        # Settings that matter only while generating share it; those that loading reads do not.
        assert load_speculator(model, {"method": "suffix", "num_speculative_tokens": 5}).resources is memory
        assert load_speculator(model, "suffix", suffix_decoding_max_spec_factor=2.0).resources is memory
        assert load_speculator(model, "suffix", suffix_decoding_max_tree_depth=32).resources is not memory
        of_draft, twin = load_speculator(model, draft_model=draft).resources, copy.deepcopy(draft)
        assert load_speculator(model, draft_model=draft, num_speculative_tokens=3).resources is of_draft
        assert load_speculator(model, draft_model=twin).resources.model is twin
        forget_speculators(model)
        assert load_speculator(model, "suffix").resources is not memory

    def test_what_was_loaded_is_forgotten_when_its_method_is_gone(self):
        class PassingMethod(NgramCandidateGenerator):
            pass

        model = tiny_llama()
        register_candidate_generator("passing", PassingMethod)
        load_speculator(model, "passing")
        unregister_candidate_generator("passing")
        forget_speculators(model)
        assert not record_of(model).loaded

    def test_speculator_without_texts(self):
        model, draft = tiny_llama(), tiny_llama(seed=1)
        suffix = load_speculator(model, "suffix")
        fresh = suffix.without_texts(model)
        assert fresh.resources is not suffix.resources
        assert (fresh.config, fresh.profile) == (suffix.config, suffix.profile)
        of_draft = load_speculator(model, draft_model=draft)
        assert of_draft.without_texts(model).resources is of_draft.resources
        combined = load_speculator(model, "suffix+draft_model", draft_model=draft)
        fresh = combined.without_texts(model)
        assert fresh.resources.retrieval is not combined.resources.retrieval
        assert fresh.resources.model is combined.resources.model

    def test_targets_that_draft_for_themselves_can_be_freed(self):
        model = tiny_llama()
        model.generate(torch.tensor([[3, 4]]), max_new_tokens=3, do_sample=False, assistant=model)
        freed = weakref.ref(model)
        del model
        gc.collect()
        assert freed() is None


class TestPipelines:
    prompts = ["abcabcab", "xyz"]

    def texts(self, pipe, **settings):
        results = pipe(self.prompts, max_new_tokens=20, do_sample=False, return_full_text=False, **settings)
        return [result[0]["generated_text"] for result in results]

    @pytest.mark.parametrize("batch_size", [1, 2])
    def test_argument_of_the_pipeline_and_of_the_call(self, model, tokenizer, batch_size):
        # Plain in the same batches: the padding of a batch must not differ.
        expected = self.texts(pipeline("text-generation", model=model, tokenizer=tokenizer), batch_size=batch_size)
        always = pipeline("text-generation", model=model, tokenizer=tokenizer, speculative="ngram")
        per_call = pipeline("text-generation", model=model, tokenizer=tokenizer)
        with record() as made:
            assert self.texts(always, batch_size=batch_size) == expected
            settings = {"spec_method": "ngram", "num_speculative_tokens": 3}
            assert self.texts(per_call, batch_size=batch_size, **settings) == expected
        assert [call.stats.batch_size for call in made.calls] == [batch_size] * (4 // batch_size)

    def test_switched_off_for_a_call(self, model, tokenizer):
        always = pipeline("text-generation", model=model, tokenizer=tokenizer, speculative="ngram")
        with record() as made:
            self.texts(always, speculative="off")
        assert not made.calls

    def test_stop_sequence(self, model, tokenizer):
        plain = pipeline("text-generation", model=model, tokenizer=tokenizer)
        stop = self.texts(plain)[0][7:9]
        ours = pipeline("text-generation", model=model, tokenizer=tokenizer, speculative="ngram")
        assert self.texts(ours, stop_sequence=stop) == self.texts(plain, stop_sequence=stop)
        # Up to 5.17 the host stops at the first token of the sequence alone.
        assert len(self.texts(ours, stop_sequence=stop)[0]) < len(self.texts(ours)[0])


class TestThreads:
    @pytest.fixture(autouse=True)
    def frequent_switches(self):
        """Threads take turns inside a forward, not only between them."""
        interval = sys.getswitchinterval()
        sys.setswitchinterval(1e-5)
        yield
        sys.setswitchinterval(interval)

    @pytest.mark.parametrize("method", ["ngram", "draft_model"])
    @pytest.mark.parametrize("lean", [True, False], ids=["lean_forward", "own_forward"])
    def test_one_speculator(self, model, method, lean, monkeypatch):
        if not lean:
            monkeypatch.setattr(functional, "has_lean_forward", lambda model: False)
        calls = [prompts(1 + index % 2, length=6 + index, seed=index) for index in range(4)]
        expected = [model.generate(**call, do_sample=False, max_new_tokens=24) for call in calls]
        settings = {} if method == "ngram" else {"draft_model": tiny_llama(seed=1, num_hidden_layers=1)}
        speculator = load_speculator(model, method, **settings)
        functions = [
            lambda call=call: model.generate(**call, do_sample=False, max_new_tokens=24, assistant=speculator)
            for call in calls
        ]
        # One thread generates plainly on the same model.
        functions.append(lambda: model.generate(**calls[0], do_sample=False, max_new_tokens=24))
        for ours, plain in zip(in_threads(*functions), [*expected, expected[0]]):
            assert torch.equal(ours, plain)
        assert model.config._attn_implementation == "sdpa"

    def test_captured_states_belong_to_their_call(self, model, monkeypatch):
        """Two calls that both capture the target's hidden states see their own."""
        calls = [prompts(1, length=6 + 3 * index, seed=index) for index in range(3)]
        expected = [model.generate(**call, do_sample=False, max_new_tokens=24) for call in calls]

        def generate(call, text):
            seen = []
            speculator = scripted_for(text, call, accuracy=0.7)
            base = speculator.generator_class

            class Watching(base):
                target_hidden_states = ("last", 0)

                def observe(self, commit):
                    seen.append(commit.hidden_states["last"][0, : len(commit.token_lists[0])])
                    super().observe(commit)

            speculator.generator_class = Watching
            output = model.generate(
                **call, do_sample=False, max_new_tokens=24, assistant=speculator, output_logits=True,
                return_dict_in_generate=True,
            )  # fmt: skip
            return output, torch.cat(seen)

        functions = [lambda call=call, text=text: generate(call, text) for call, text in zip(calls, expected)]
        for result, text in zip(in_threads(*functions), expected):
            output, states = result
            assert torch.equal(output.sequences, text)
            with torch.no_grad():
                logits = model.lm_head(states)
            # The head in one forward over many tokens rounds differently.
            torch.testing.assert_close(logits, torch.cat(output.logits), rtol=1e-4, atol=1e-4)

    def test_iterator_streamer(self, model, tokenizer, inputs, plain):
        streamer = TextIteratorStreamer(tokenizer, skip_prompt=True)
        thread = threading.Thread(
            target=model.generate, kwargs={**inputs, **SETTINGS, "streamer": streamer, "spec_method": "ngram"}
        )
        thread.start()
        text = "".join(streamer)
        thread.join()
        assert text == tokenizer.decode(plain[0, 9:])


def test_prompts_on_another_device_are_moved_to_the_model():
    """Plain generate() moves them before every forward."""
    arguments = {"input_ids": torch.tensor([[3, 4]]), "attention_mask": torch.ones(1, 2, device="meta"), "top_k": 5}
    elsewhere = torch.nn.Linear(2, 2, device="meta")
    elsewhere.device, elsewhere.config = torch.device("meta"), SimpleNamespace(is_encoder_decoder=False)
    assert integration._move_to_model(elsewhere, arguments) == torch.device("cpu")
    assert {arguments[name].device.type for name in ("input_ids", "attention_mask")} == {"meta"}
    assert integration._move_to_model(elsewhere, arguments) is None


def test_gradient_checkpointing_is_named(inputs):
    model = tiny_llama(seed=7)
    with warnings.catch_warnings():
        # transformers is about to rename it.
        warnings.simplefilter("ignore", FutureWarning)
        model.gradient_checkpointing_enable()
    model.train()
    if "is_grad_enabled" in inspect.getsource(GradientCheckpointingLayer):
        # Since 5.24 it does so where there are gradients alone.
        plain = model.generate(**inputs, max_new_tokens=4, do_sample=False)
        assert torch.equal(model.generate(**inputs, max_new_tokens=4, do_sample=False, spec_method="ngram"), plain)
    else:
        with pytest.raises(UnsupportedModelError, match="gradient checkpointing turns the cache off"):
            model.generate(**inputs, max_new_tokens=4, spec_method="ngram")
    model.eval()
    assert model.generate(**inputs, max_new_tokens=4, spec_method="ngram").shape[1] > inputs["input_ids"].shape[1]
