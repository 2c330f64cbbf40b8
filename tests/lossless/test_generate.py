"""`generate()` as a whole: what plain generation says, whatever is asked of it, and nothing left changed."""

import copy

import pytest
import torch
from transformers import (
    DynamicCache,
    EncoderDecoderCache,
    GenerationConfig,
    LogitsProcessor,
    LogitsProcessorList,
    StaticCache,
    StoppingCriteria,
    StoppingCriteriaList,
    SynthIDTextWatermarkingConfig,
    WatermarkingConfig,
)
from transformers.generation import EncoderRepetitionPenaltyLogitsProcessor

from hf_specdec import SpecConfigError, UnsupportedModelError, generate_many, load_speculator
from tests.helpers.architectures import tiny_model
from tests.helpers.caches import CACHE
from tests.helpers.models import VOCAB_SIZE, nothing_runs, prompts, scripted_for, tiny_gpt2, tiny_llama
from tests.helpers.pairs import every_pair


# Every depth has a wrong node beside the right one or before it, on a side of its own in each cycle.
TREE = (-1, -1, 0, 0, 1, 1, 2, 5)
SHAPES = [pytest.param(None, id="chain"), pytest.param(TREE, id="tree"), pytest.param("random", id="ragged_tree")]
BATCH_SIZES = [1, 3]


def plain_and_ours(model, inputs, tree=None, k=5, accuracy=0.8, **settings):
    """A call without and with speculation, drafts being good enough for accepted blocks of all lengths."""
    settings = {"max_new_tokens": 20, "do_sample": False, **settings}
    plain = model.generate(**inputs, **settings)
    text = plain if torch.is_tensor(plain) else plain.sequences
    speculator = scripted_for(text, inputs, k=k, accuracy=accuracy, tree=tree)
    return plain, model.generate(**inputs, **settings, assistant=speculator)


class TestGreedyEqualsPlain:
    def test_positional_inputs_and_no_mask(self, model):
        input_ids = prompts(1)["input_ids"]
        plain = model.generate(input_ids, max_new_tokens=12, do_sample=False)
        assert torch.equal(model.generate(input_ids, max_new_tokens=12, do_sample=False, spec_method="ngram"), plain)
        # Without a mask, the padding is found by its id.
        padded = prompts(3)["input_ids"]
        plain = model.generate(padded, max_new_tokens=12, do_sample=False)
        assert torch.equal(model.generate(padded, max_new_tokens=12, do_sample=False, spec_method="ngram"), plain)

    def test_without_inputs(self, model):
        settings = {"bos_token_id": 5, "max_new_tokens": 12, "do_sample": False}
        assert torch.equal(model.generate(**settings, spec_method="ngram"), model.generate(**settings))

    @pytest.mark.parametrize("tree", SHAPES)
    def test_inside_and_outside_of_inference_mode(self, model, tree):
        """Masks and indices that one call leaves behind for the next serve both."""
        inputs = prompts(3)
        plain = model.generate(**inputs, max_new_tokens=20, do_sample=False)
        for _ in range(2):
            for mode in (torch.inference_mode, torch.enable_grad):
                with mode():
                    speculator = scripted_for(plain, inputs, k=7, tree=tree)
                    ours = model.generate(**inputs, max_new_tokens=20, do_sample=False, assistant=speculator)
                assert torch.equal(ours, plain)

    def test_text_longer_than_the_first_buffers(self, model):
        plain, ours = plain_and_ours(model, prompts(2), accuracy=0.95, max_new_tokens=400)
        assert torch.equal(ours, plain)


class TestWhatStockAssistedDecodingCannot:
    """Each of these raises or goes wrong in transformers' own assisted generation."""

    @pytest.mark.parametrize("implementation", ["static", "hybrid", "sliding_window", "dynamic"])
    def test_cache_implementation(self, sliding_model, implementation):
        inputs = prompts(2)
        plain = sliding_model.generate(**inputs, max_new_tokens=20, do_sample=False)
        speculator = scripted_for(plain, inputs, accuracy=0.8)
        ours = sliding_model.generate(
            **inputs, max_new_tokens=20, do_sample=False, cache_implementation=implementation, assistant=speculator
        )
        assert torch.equal(ours, plain)

    def test_num_return_sequences_greedy_raises_as_plain(self, model):
        settings = {**prompts(1), "max_new_tokens": 4, "do_sample": False, "num_return_sequences": 2}
        with pytest.raises(ValueError, match="num_return_sequences") as plain:
            model.generate(**settings)
        with pytest.raises(ValueError, match="num_return_sequences") as ours:
            model.generate(**settings, spec_method="ngram")
        assert str(ours.value) == str(plain.value)

    @pytest.mark.parametrize(
        ("with_ids", "batch_size"), [(False, 3), (True, 1)], ids=["embeds_alone", "embeds_and_ids"]
    )
    def test_inputs_embeds(self, model, batch_size, with_ids):
        inputs = prompts(batch_size)
        embeds = model.get_input_embeddings()(inputs["input_ids"]).detach()
        # Other embeddings than the tokens': what is in `input_ids` must not decide.
        call = {"inputs_embeds": embeds * 1.5, "attention_mask": inputs["attention_mask"]}
        if with_ids:
            call["input_ids"] = inputs["input_ids"]
        plain = model.generate(**call, max_new_tokens=20, do_sample=False)
        assert plain.shape[1] == 20 + 7 * with_ids
        text = torch.cat([inputs["input_ids"], plain[:, -20:]], dim=1)
        for speculative in ({"spec_method": "ngram"}, {"assistant": scripted_for(text, inputs, accuracy=0.8)}):
            ours = model.generate(**call, max_new_tokens=20, do_sample=False, **speculative)
            assert torch.equal(ours, plain)


class TestErrors:
    @pytest.mark.parametrize(
        ("settings", "words"),
        [
            ({"num_beams": 2}, ["num_beams", "2", "num_beams=1"]),
            ({"output_attentions": True, "return_dict_in_generate": True}, ["output_attentions", "leave it out"]),
            ({"use_cache": False}, ["use_cache", "False"]),
            ({"penalty_alpha": 0.6, "top_k": 4}, ["penalty_alpha", "Contrastive"]),
            ({"dola_layers": "high"}, ["dola_layers"]),
            ({"prompt_lookup_num_tokens": 3}, ["prompt_lookup_num_tokens", "ngram"]),
            ({"assistant_early_exit": 1}, ["assistant_early_exit"]),
            ({"cache_implementation": "quantized"}, ["cache_implementation", "quantized"]),
            ({"cache_implementation": "paged"}, ["cache_implementation", "paged"]),
            ({"token_healing": True}, ["token_healing"]),
            ({"custom_generate": lambda *args, **kwargs: None}, ["custom_generate"]),
            ({"max_time": "5"}, ["`max_time`='5'", "number of seconds, got str"]),
        ],
    )
    def test_requests_that_cannot_be_combined(self, model, settings, words):
        with pytest.raises(SpecConfigError) as caught:
            model.generate(**prompts(1), max_new_tokens=4, do_sample=False, **settings, spec_method="ngram")
        for word in words:
            assert word in str(caught.value)

    def test_all_problems_in_one_error(self, model):
        with pytest.raises(SpecConfigError, match="num_beams.*use_cache|use_cache.*num_beams"):
            model.generate(**prompts(1), num_beams=2, use_cache=False, spec_method="ngram")

    def test_settings_of_configs_count_too(self, model):
        config = GenerationConfig(num_beams=2, max_new_tokens=4)
        with pytest.raises(SpecConfigError, match="num_beams"):
            model.generate(**prompts(1), generation_config=config, spec_method="ngram")
        beams = tiny_llama()
        beams.generation_config.num_beams = 3
        with pytest.raises(SpecConfigError, match="num_beams"):
            beams.generate(**prompts(1), spec_method="ngram")
        assert beams.generate(**prompts(1), max_new_tokens=2, num_beams=1, spec_method="ngram").shape == (1, 9)

    @pytest.mark.parametrize(
        ("speculative", "hint"),
        [
            ({"spec_method": "ngramm"}, "Did you mean 'ngram'"),
            ({"speculative": {"method": "ngram", "num_speculative_token": 3}}, "mean 'num_speculative_tokens'"),
            ({"speculative": {"method": "ngram", "prompt_lookup_maxx": 3}}, "Did you mean 'prompt_lookup_max'"),
            ({"spec_method": "mtp"}, "was not loaded from a checkpoint"),
            ({"spec_method": "ngram", "num_speculative_tokens": 0}, "an integer from 1 to 1024"),
        ],
    )
    def test_misspelt_settings(self, model, speculative, hint):
        with pytest.raises(SpecConfigError, match=hint):
            model.generate(**prompts(1), max_new_tokens=4, **speculative)

    def test_misspelt_argument_raises_as_plain(self, model):
        with pytest.raises(ValueError, match="model_kwargs"):
            model.generate(**prompts(1), max_new_tokens=4, spec_method="ngram", top_kk=3)

    def test_inputs_that_drafts_would_need(self):
        """Dropped after the prompt they would change the text without a word."""
        model = tiny_model("xmod")
        settings = {**prompts(1), "lang_ids": torch.tensor([0]), "max_new_tokens": 4}
        with pytest.raises(SpecConfigError, match="XmodForCausalLM.*lang_ids.*plain generate"):
            model.generate(**settings, spec_method="ngram")
        assert model.generate(**settings).shape[1] == 11

    def test_cache_of_another_kind(self, model):
        cache = EncoderDecoderCache(DynamicCache(), DynamicCache())
        with pytest.raises(SpecConfigError, match=f"{CACHE}.*DynamicCache.*got EncoderDecoderCache"):
            model.generate(**prompts(1), max_new_tokens=4, **{CACHE: cache}, spec_method="ngram")

    def test_cache_by_two_names(self, model):
        caches = {"cache": DynamicCache(), "past_key_values": DynamicCache()}
        with (
            nothing_runs(model),
            pytest.raises(SpecConfigError, match="`cache` and `past_key_values` are names for one"),
        ):
            model.generate(**prompts(1), max_new_tokens=4, **caches, spec_method="ngram")

    def test_static_cache_that_is_too_small(self, model):
        settings = {"do_sample": False, "spec_method": "ngram"}
        cache = StaticCache(config=model.config, max_cache_len=17)
        too_small = pytest.raises(SpecConfigError, match="room for 17 tokens.*may read 18.*max_cache_len=18")
        with nothing_runs(model), too_small:
            model.generate(**prompts(2), **settings, max_new_tokens=12, **{CACHE: cache})
        assert model.generate(**prompts(2), **settings, max_new_tokens=11, **{CACHE: cache}).shape == (2, 18)
        with nothing_runs(model), pytest.raises(SpecConfigError, match="made for 2 rows.*this call has 1"):
            model.generate(**prompts(1, length=18), **settings, max_new_tokens=1, **{CACHE: cache})

    @pytest.mark.parametrize("settings", [{"num_beams": 2, "spec_method": "ngram"}, {"spec_method": "ngramm"}])
    def test_nothing_runs_before_the_error(self, model, settings):
        with nothing_runs(model), pytest.raises(SpecConfigError):
            model.generate(**prompts(1), **settings)


class Recorder(LogitsProcessor):
    """Keeps what it was shown, and changes the scores by all that it has been shown so far."""

    def __init__(self):
        self.calls = []

    def __call__(self, input_ids, scores):
        self.calls.append(input_ids.tolist())
        number = len(self.calls)
        shift = (torch.arange(scores.shape[-1]) * (number + input_ids.sum(1, keepdim=True))) % 7
        return scores + 2.0 * shift


class Stateful(LogitsProcessor):
    """Forbids what it chose two positions before; right only if it sees every position once and in order."""

    def __init__(self):
        self.best = []

    def __call__(self, input_ids, scores):
        if len(self.best) >= 2:
            scores = scores.scatter(1, self.best[-2][:, None], float("-inf"))
        self.best.append(scores.argmax(-1))
        return scores


def even_after_even(batch_id, tokens):
    return list(range((batch_id + int(tokens[-1])) % 2, VOCAB_SIZE, 2))


PROCESSORS = {
    "repetition_penalty": {"repetition_penalty": 1.7},
    "no_repeat_ngram_size": {"no_repeat_ngram_size": 2},
    "bad_words_ids": {"bad_words_ids": [[7], [20, 20], [61, 14, 30]]},
    "min_new_tokens": {"min_new_tokens": 12, "eos_token_id": [20, 61]},
    "min_length": {"min_length": 15, "eos_token_id": [20, 61]},
    "forced_eos_token_id": {"forced_eos_token_id": 9, "eos_token_id": 9},
    "suppress_tokens": {"suppress_tokens": [20, 61, 14]},
    "begin_suppress_tokens": {"begin_suppress_tokens": [61, 20]},
    "exponential_decay": {"exponential_decay_length_penalty": (4, 1.2), "eos_token_id": 9},
    "sequence_bias": {"sequence_bias": [[[20], 3.0], [[61, 7], -9.0]]},
    "guidance_scale": {"guidance_scale": 1.8},
    "watermarking": {"watermarking_config": WatermarkingConfig(greenlist_ratio=0.4, bias=3.0)},
    "watermarking_selfhash": {
        "watermarking_config": WatermarkingConfig(bias=3.0, seeding_scheme="selfhash", context_width=2)
    },
    "synthid": {
        "watermarking_config": SynthIDTextWatermarkingConfig(ngram_len=3, keys=[3, 5, 7, 11], debug_mode=True)
    },
    "encoder_repetition_penalty": {"encoder_repetition_penalty": 1.5},
    "remove_invalid_values": {"remove_invalid_values": True, "renormalize_logits": True},
    "prefix_allowed_tokens_fn": {"prefix_allowed_tokens_fn": even_after_even},
    "several": {"repetition_penalty": 1.3, "no_repeat_ngram_size": 3, "bad_words_ids": [[11]], "guidance_scale": 1.4},
}


class TestLogitsProcessors:
    @pytest.mark.parametrize(
        ("name", "batch_size"), [*((name, 3) for name in PROCESSORS), ("several", 1), ("guidance_scale", 1)]
    )
    def test_equals_plain(self, model, name, batch_size):
        settings, inputs = PROCESSORS[name], prompts(batch_size)
        plain, ours = plain_and_ours(model, inputs, **settings)
        assert torch.equal(ours, plain)
        unprocessed = model.generate(**inputs, max_new_tokens=20, do_sample=False)
        has_no_effect = "remove_invalid_values" in settings
        assert torch.equal(plain, unprocessed) == has_no_effect
        plain, ours = plain_and_ours(model, inputs, "random", **settings)
        assert torch.equal(ours, plain)

    def test_prefix_constraint_of_several_sequences(self, model):
        """Rows are numbered by prompts or by sequences, as the installed transformers does it."""
        settings = {**PROCESSORS["prefix_allowed_tokens_fn"], "num_return_sequences": 3, "do_sample": True, "top_k": 1}
        plain = model.generate(**prompts(2), **settings, max_new_tokens=16)
        assert torch.equal(model.generate(**prompts(2), **settings, max_new_tokens=16, spec_method="ngram"), plain)

    @pytest.mark.parametrize("batch_size", BATCH_SIZES)
    def test_forced_bos_token_id(self, model, batch_size):
        inputs = prompts(batch_size, length=1, padding=False)
        plain, ours = plain_and_ours(model, inputs, forced_bos_token_id=9)
        assert plain[:, 1].tolist() == [9] * batch_size
        assert torch.equal(ours, plain)

    @every_pair(
        settings={"all_to_the_end": {}, "eos": {"eos_token_id": [6, 15]}},
        tree={"chain": None, "tree": TREE, "ragged_tree": "random"},
        batch_size=BATCH_SIZES,
    )
    def test_custom_processor_is_shown_every_position_once(self, model, batch_size, tree, settings):
        inputs = prompts(batch_size)
        plain_recorder, our_recorder = Recorder(), Recorder()
        settings = {"max_new_tokens": 20, "do_sample": False, **settings}
        plain = model.generate(**inputs, **settings, logits_processor=LogitsProcessorList([plain_recorder]))
        speculator = scripted_for(plain, inputs, accuracy=0.9, tree=tree)
        ours = model.generate(
            **inputs, **settings, logits_processor=LogitsProcessorList([our_recorder]), assistant=speculator
        )
        assert torch.equal(ours, plain)
        assert our_recorder.calls == plain_recorder.calls
        assert len(our_recorder.calls) == plain.shape[1] - 7

    @pytest.mark.parametrize("batch_size", BATCH_SIZES)
    def test_stateful_processor(self, model, batch_size):
        inputs = prompts(batch_size)
        settings = {"max_new_tokens": 20, "do_sample": False}
        plain = model.generate(**inputs, **settings, logits_processor=LogitsProcessorList([Stateful()]))
        for tree in (None, "random"):
            ours = model.generate(
                **inputs,
                **settings,
                logits_processor=LogitsProcessorList([Stateful()]),
                assistant=scripted_for(plain, inputs, accuracy=0.9, tree=tree),
            )
            assert torch.equal(ours, plain)

    def test_other_default_dtype(self, model):
        inputs = prompts(3)
        torch.set_default_dtype(torch.float64)
        try:
            plain, ours = plain_and_ours(
                model, inputs, guidance_scale=1.5, return_dict_in_generate=True, output_scores=True
            )
        finally:
            torch.set_default_dtype(torch.float32)
        assert torch.equal(ours.sequences, plain.sequences)
        assert ours.scores[0].dtype == plain.scores[0].dtype

    def test_processor_object_that_generate_knows(self, model):
        inputs = prompts(1)
        processors = [EncoderRepetitionPenaltyLogitsProcessor(1.5, inputs["input_ids"])]
        plain, ours = plain_and_ours(model, inputs, logits_processor=processors)
        assert torch.equal(ours, plain)


class FailsAfter(StoppingCriteria):
    def __init__(self, calls, error):
        self.calls, self.error = calls, error

    def __call__(self, input_ids, scores, **kwargs):
        self.calls -= 1
        if self.calls == 0:
            raise self.error
        return torch.zeros(input_ids.shape[0], dtype=torch.bool)


class TestNothingIsLeftChanged:
    """Hooks, attention implementation, configs, the user's objects and tensors, also after an error."""

    def snapshot(self, model):
        return {
            "config": model.config.to_dict(),
            "attention": [m.config._attn_implementation for m in model.modules() if hasattr(m, "config")],
            "generation_config": copy.deepcopy(model.generation_config.to_dict()),
            "hooks": [(dict(m._forward_hooks), dict(m._forward_pre_hooks)) for m in model.modules()],
            "forwards": [m.__dict__.get("forward") for m in model.modules()],
            "attributes": [sorted(vars(m)) for m in model.modules()],
            "weights": sum(p.double().sum().item() for p in model.parameters()),
            "training": model.training,
        }

    @pytest.mark.parametrize("error", [None, RuntimeError("from a criterion"), KeyboardInterrupt()])
    @pytest.mark.parametrize("states", [(), ("last", 0)], ids=["", "captured_states"])
    def test_model_and_arguments(self, error, states, monkeypatch):
        model, draft = tiny_llama(), tiny_llama(seed=1)
        inputs = prompts(2)
        text = model.generate(**inputs, max_new_tokens=12, do_sample=False)
        if states:
            speculator = scripted_for(text, inputs)
            monkeypatch.setattr(speculator.generator_class, "target_hidden_states", states)
        else:
            speculator = load_speculator(model, "draft_model", draft_model=draft)
        generation_config = GenerationConfig(max_new_tokens=12, do_sample=False, stop_strings=None, pad_token_id=0)
        criteria = StoppingCriteriaList([FailsAfter(5, error)] if error else [])
        processors = LogitsProcessorList([Recorder()])
        call = {**inputs, "generation_config": generation_config}
        before = [self.snapshot(model), self.snapshot(draft), copy.deepcopy(call["generation_config"].to_dict())]
        tensors = {name: value.clone() for name, value in inputs.items()}

        def generate():
            return model.generate(
                **call, stopping_criteria=criteria, logits_processor=processors, assistant=speculator
            )

        if error is None:
            generate()
        else:
            with pytest.raises(type(error)):
                generate()
            assert criteria[0].calls == 0
        assert before == [self.snapshot(model), self.snapshot(draft), call["generation_config"].to_dict()]
        assert all(torch.equal(inputs[name], value) for name, value in tensors.items())
        assert (len(criteria), len(processors)) == (bool(error), 1)
        assert torch.equal(model.generate(**inputs, max_new_tokens=12, do_sample=False), text)

    def test_configs_and_criteria_beside_stop_strings(self, model, tokenizer):
        config = GenerationConfig(max_new_tokens=5, stop_strings=["k3"], pad_token_id=0)
        before = copy.deepcopy(config.to_dict())
        criteria = StoppingCriteriaList([FailsAfter(100, None)])
        call = {"generation_config": config, "tokenizer": tokenizer, "stopping_criteria": criteria}
        model.generate(**prompts(1), **call, spec_method="ngram")
        assert config.to_dict() == before
        assert len(criteria) == 1


class TestCaches:
    def second_turn(self, first: torch.Tensor, seed=7):
        new = torch.randint(1, VOCAB_SIZE, (first.shape[0], 5), generator=torch.Generator().manual_seed(seed))
        return torch.cat([first, new], dim=1)

    @every_pair(
        which=["model", "sliding_model"], batch_size=BATCH_SIZES, tree={"chain": None, "ragged_tree": "random"}
    )
    def test_second_turn_with_the_returned_cache(self, which, batch_size, tree, request):
        model = request.getfixturevalue(which)
        inputs = prompts(batch_size, length=10)
        settings = {"max_new_tokens": 14, "do_sample": False}
        plain, ours = plain_and_ours(model, inputs, tree, **settings, return_dict_in_generate=True)
        assert torch.equal(ours.sequences, plain.sequences)
        assert type(ours[CACHE]) is DynamicCache
        assert ours[CACHE].get_seq_length() == plain[CACHE].get_seq_length()
        assert [type(layer) for layer in ours[CACHE].layers] == [type(layer) for layer in plain[CACHE].layers]
        mask = torch.nn.functional.pad(inputs["attention_mask"], (0, 14 + 5), value=1)
        second = {"input_ids": self.second_turn(plain.sequences), "attention_mask": mask}
        whole = model.generate(**second, **settings)
        speculator = scripted_for(whole, second, accuracy=0.8, tree=tree)
        continued = model.generate(**second, **settings, **{CACHE: copy.deepcopy(ours[CACHE])})
        assert torch.equal(continued, whole)
        cache = ours[CACHE]
        continued = model.generate(**second, **settings, **{CACHE: cache}, assistant=speculator)
        assert torch.equal(continued, whole)
        # The user's object has been brought up to date: a third turn goes on from it.
        assert cache.get_seq_length() == whole.shape[1] - 1
        mask = torch.nn.functional.pad(mask, (0, 14 + 5), value=1)
        third = {"input_ids": self.second_turn(whole), "attention_mask": mask}
        whole = model.generate(**third, **settings)
        speculator = scripted_for(whole, third, accuracy=0.8, tree=tree)
        assert torch.equal(model.generate(**third, **settings, **{CACHE: cache}, assistant=speculator), whole)

    @every_pair(
        which=["model", "sliding_model"],
        batch_size=BATCH_SIZES,
        passed={"object": True, "cache_implementation": False},
    )
    def test_static_cache(self, which, batch_size, passed, request):
        """The cache comes back as plain generation leaves it, and goes on from call to call."""
        model = request.getfixturevalue(which)
        inputs = prompts(batch_size, length=10)
        settings = {"max_new_tokens": 14, "do_sample": False, "disable_compile": True}

        def make():
            cache = StaticCache(config=model.config, max_cache_len=60)
            return {CACHE: cache} if passed else {"cache_implementation": "static", "max_cache_len": 60}

        text = model.generate(**inputs, **settings)
        call = {**inputs, **settings, "return_dict_in_generate": True}
        plain = model.generate(**call, **make())
        given = make()
        ours = model.generate(**call, **given, assistant=scripted_for(text, inputs))
        assert torch.equal(ours.sequences, plain.sequences)
        cache = ours[CACHE]
        assert type(cache) is type(plain[CACHE]) is StaticCache
        assert cache is given.get(CACHE, cache)
        for mine, its in zip(cache.layers, plain[CACHE].layers):
            assert mine.keys.shape == its.keys.shape
            assert int(mine.get_seq_length()) == int(its.get_seq_length()) == 23
            # After padding the first slots hold nothing that counts.
            seen = slice(batch_size - 1, None)
            torch.testing.assert_close(mine.keys[:, :, seen], its.keys[:, :, seen], rtol=1e-4, atol=1e-4)
        addresses = [layer.keys.data_ptr() for layer in cache.layers]
        mask = torch.nn.functional.pad(inputs["attention_mask"], (0, 14 + 5), value=1)
        second = {"input_ids": self.second_turn(text), "attention_mask": mask}
        whole = model.generate(**second, **settings)
        again = {**second, **settings, CACHE: cache}
        assert torch.equal(model.generate(**again, assistant=scripted_for(whole, second, accuracy=0.8)), whole)
        assert [layer.keys.data_ptr() for layer in cache.layers] == addresses
        assert int(cache.get_seq_length()) == whole.shape[1] - 1

    def test_cache_of_rows_that_ended_apart(self, model):
        inputs = prompts(3)
        settings = {"max_new_tokens": 30, "do_sample": False, "return_dict_in_generate": True}
        settings["eos_token_id"] = [6, 15]
        plain, ours = plain_and_ours(model, inputs, **settings)
        assert torch.equal(ours.sequences, plain.sequences)
        ends = [(row[7:] == 0).nonzero() for row in plain.sequences]
        ends = [int(end[0]) + 7 if len(end) else plain.sequences.shape[1] for end in ends]
        assert len(set(ends)) > 1
        for ours_layer, plain_layer in zip(ours[CACHE].layers, plain[CACHE].layers):
            assert ours_layer.keys.shape == plain_layer.keys.shape
            for row, end in enumerate(ends):
                start = 2 - row
                for name in ("keys", "values"):
                    mine, its = (getattr(layer, name)[row, :, start : end - 1] for layer in (ours_layer, plain_layer))
                    # Batched and single-token forwards round differently.
                    torch.testing.assert_close(mine, its, rtol=1e-4, atol=1e-4)
                    assert not getattr(ours_layer, name)[row, :, end - 1 :].any()

    @pytest.mark.parametrize("name", ["cache", "past_key_values", "cache_params"])
    @pytest.mark.parametrize("with_config", [True, False])
    @pytest.mark.parametrize("which", ["model", "sliding_model"])
    def test_empty_cache_of_the_user_is_filled(self, which, with_config, name, request):
        """Whatever the installed transformers calls it."""
        model = request.getfixturevalue(which)
        inputs = prompts(1, length=12)
        cache = DynamicCache(config=model.config) if with_config else DynamicCache()
        plain = model.generate(**inputs, max_new_tokens=10, do_sample=False)
        speculator = scripted_for(plain, inputs)
        ours = model.generate(**inputs, max_new_tokens=10, do_sample=False, **{name: cache}, assistant=speculator)
        assert torch.equal(ours, plain)
        assert cache.get_seq_length() == ours.shape[1] - 1

    @pytest.mark.parametrize("which", ["model", "sliding_model"])
    def test_prefilled_cache_and_the_new_tokens_alone(self, which, request):
        model = request.getfixturevalue(which)
        inputs = prompts(1, length=16)
        whole = model.generate(**inputs, max_new_tokens=20, do_sample=False)
        cache = DynamicCache(config=model.config)
        with torch.no_grad():
            model(inputs["input_ids"][:, :11], **{CACHE: cache})
        call = {**inputs, "input_ids": inputs["input_ids"][:, 11:], CACHE: cache}
        ours = model.generate(**call, max_new_tokens=20, do_sample=False, assistant=scripted_for(whole, inputs))
        assert torch.equal(ours, whole[:, 11:])


class TestTokenTypes:
    """New tokens get the type of the last one, in every row its own."""

    @pytest.mark.parametrize(
        ("name", "batch_size"),
        [("gpt2", 1), *((name, 3) for name in ("gpt2", "gpt_neo", "gptj", "codegen", "gpt_bigcode", "bert"))],
    )
    def test_equals_plain(self, name, batch_size):
        # Embeddings of types are those of tokens in most of these models.
        model, inputs = tiny_model(name, type_vocab_size=8), prompts(batch_size)
        without = model.generate(**inputs, max_new_tokens=30, do_sample=False, pad_token_id=0)
        types = torch.arange(inputs["input_ids"].numel()).view(batch_size, -1) * 3 % 8
        plain, ours = plain_and_ours(model, {**inputs, "token_type_ids": types}, pad_token_id=0)
        assert torch.equal(ours, plain)
        assert not torch.equal(without, plain)

    def test_rows_that_leave_take_theirs_along(self):
        model, inputs = tiny_gpt2(), prompts(3)
        inputs["token_type_ids"] = torch.tensor([[4], [9], [30]]).expand(3, 7)
        text = model.generate(**inputs, max_new_tokens=30, do_sample=False)
        settings = {"eos_token_id": text[0, 12].item(), "return_dict_in_generate": True, "output_scores": True}
        plain, ours = plain_and_ours(model, inputs, **settings)
        assert torch.equal(ours.sequences, plain.sequences)
        assert not plain.sequences[0, 13:].any()
        for mine, its in zip(ours.scores, plain.scores, strict=True):
            torch.testing.assert_close(mine[1:], its[1:], rtol=1e-4, atol=1e-4)


class TestPositions:
    @pytest.mark.parametrize("batch_size", BATCH_SIZES)
    def test_position_ids_of_the_user(self, model, batch_size):
        inputs = prompts(batch_size)
        positions = (inputs["attention_mask"].cumsum(1) - 1).clamp(min=0)
        # Not a common shift, which rotary embeddings would not notice: the prompt is spread.
        inputs["position_ids"] = positions * 3 + 40
        plain, ours = plain_and_ours(model, inputs)
        assert torch.equal(ours, plain)
        inputs.pop("position_ids")
        assert not torch.equal(plain, model.generate(**inputs, max_new_tokens=30, do_sample=False))

    def test_learned_positions_that_start_elsewhere(self):
        model = tiny_gpt2()
        inputs = prompts(2)
        inputs["position_ids"] = (inputs["attention_mask"].cumsum(1) - 1).clamp(min=0) + 30
        plain, ours = plain_and_ours(model, inputs)
        assert torch.equal(ours, plain)


class TestSettingsOfCheckpoints:
    def test_a_checkpoint_saved_without_cache_is_decoded_with_one(self):
        model, inputs = tiny_llama(), prompts(1)
        plain = model.generate(**inputs, do_sample=False, max_new_tokens=12)
        model.generation_config.use_cache = False
        assert torch.equal(model.generate(**inputs, do_sample=False, max_new_tokens=12, spec_method="ngram"), plain)
        with pytest.raises(SpecConfigError, match="`use_cache`=False"):
            model.generate(**inputs, do_sample=False, max_new_tokens=12, spec_method="ngram", use_cache=False)

    def test_changes_of_rotary_frequencies_are_followed_and_not_crossed_beside_others(self):
        rope = {"rope_type": "dynamic", "factor": 2.0, "rope_theta": 10000.0}
        model, inputs = tiny_llama(max_position_embeddings=16, rope_parameters=rope), prompts(1)
        for new_tokens in (9, 40):
            plain = model.generate(**inputs, do_sample=False, max_new_tokens=new_tokens)
            ours = model.generate(**inputs, do_sample=False, max_new_tokens=new_tokens, spec_method="ngram")
            assert torch.equal(ours, plain)
        requests = inputs["input_ids"].tolist()
        with pytest.raises(UnsupportedModelError, match="changes with the length"):
            generate_many(model, requests, max_new_tokens=40, spec_method="ngram")
