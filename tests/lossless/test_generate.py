"""`generate()` as a whole: what plain generation says, whatever inputs, processors and caches it is given."""

import pytest
import torch
from transformers import (
    DynamicCache,
    EncoderDecoderCache,
    GenerationConfig,
    LogitsProcessor,
    StaticCache,
    SynthIDTextWatermarkingConfig,
    WatermarkingConfig,
)

from hf_specdec import SpecConfigError
from tests.helpers.architectures import tiny_model
from tests.helpers.caches import CACHE
from tests.helpers.levels import full, in_full, split
from tests.helpers.models import VOCAB_SIZE, nothing_runs, prompts, scripted_for, tiny_gpt2, tiny_llama


# Every depth has a wrong node beside the right one or before it, on a side of its own in each cycle.
TREE = (-1, -1, 0, 0, 1, 1, 2, 5)
CALL = {"max_new_tokens": 20, "do_sample": False}
CLOSE = {"rtol": 1e-4, "atol": 1e-4}
WHICH = pytest.mark.parametrize("which", ["sliding_model", *in_full("model")])


def plain_and_ours(model, inputs, tree=None, k=5, accuracy=0.8, **settings):
    """A call without and with speculation, drafts being good enough for accepted blocks of all lengths."""
    settings = {**CALL, **settings}
    plain = model.generate(**inputs, **settings)
    text = plain if torch.is_tensor(plain) else plain.sequences
    speculator = scripted_for(text, inputs, k=k, accuracy=accuracy, tree=tree)
    ours = model.generate(**inputs, **settings, assistant=speculator)
    assert torch.equal(ours if torch.is_tensor(ours) else ours.sequences, text)
    return plain, ours


# Inputs


def test_inputs_of_every_form(model):
    # By position, with padding that is found by its id, and none at all.
    for given in ([prompts(1)["input_ids"]], [prompts(3)["input_ids"]], []):
        settings = {**CALL, "bos_token_id": 5}
        assert torch.equal(model.generate(*given, **settings, spec_method="ngram"), model.generate(*given, **settings))
    # Embeddings other than the tokens': what is in `input_ids` must not decide.
    for batch_size, with_ids in ((3, False), (1, True)):
        inputs = prompts(batch_size)
        call = {**inputs, "inputs_embeds": model.get_input_embeddings()(inputs["input_ids"]).detach() * 1.5, **CALL}
        if not with_ids:
            call.pop("input_ids")
        plain = model.generate(**call)
        assert plain.shape[1] == 20 + 7 * with_ids
        text = torch.cat([inputs["input_ids"], plain[:, -20:]], dim=1)
        for speculative in ({"spec_method": "ngram"}, {"assistant": scripted_for(text, inputs, accuracy=0.8)}):
            assert torch.equal(model.generate(**call, **speculative), plain)


@full
def test_inside_and_outside_of_inference_mode(model):
    """Masks and indices that one call leaves behind for the next serve both."""
    for tree in (None, TREE, "random"):
        for mode in 2 * (torch.inference_mode, torch.enable_grad):
            with mode():
                plain_and_ours(model, prompts(3), tree, k=7)


@pytest.mark.parametrize("name", ["gpt2", *in_full("bert", "gpt_neo", "gptj", "codegen", "gpt_bigcode")])
def test_token_types(name):
    """New tokens get the type of the last one, in every row its own."""
    # Embeddings of types are those of tokens in most of these models.
    model = tiny_model(name, type_vocab_size=8)
    for batch_size in (1, 3):
        inputs = prompts(batch_size)
        without = model.generate(**inputs, **CALL, pad_token_id=0)
        types = torch.arange(inputs["input_ids"].numel()).view(batch_size, -1) * 3 % 8
        typed = {**inputs, "token_type_ids": types, "pad_token_id": 0}
        plain, _ = plain_and_ours(model, typed)
        assert not torch.equal(without, plain)
        # A row that leaves takes its own along.
        plain_and_ours(model, typed, eos_token_id=int(plain[0, 12]))


def test_position_ids_and_long_texts(model):
    for batch_size in (1, 3):
        inputs = prompts(batch_size)
        positions = (inputs["attention_mask"].cumsum(1) - 1).clamp(min=0)
        # Not a common shift, which rotary embeddings would not notice: the prompt is spread.
        plain, _ = plain_and_ours(model, {**inputs, "position_ids": positions * 3 + 40})
        assert not torch.equal(plain, model.generate(**inputs, **CALL))
        plain_and_ours(tiny_gpt2(), {**inputs, "position_ids": positions + 30})
    # Longer than the first buffers.
    plain_and_ours(model, prompts(2), accuracy=0.95, max_new_tokens=400)


# Errors

REFUSED = [
    ({"num_beams": 2}, ["num_beams", "2", "num_beams=1"]),
    ({"output_attentions": True, "return_dict_in_generate": True}, ["output_attentions", "leave it out"]),
    ({"use_cache": False}, ["use_cache", "False"]),
    ({"penalty_alpha": 0.6, "top_k": 4}, ["penalty_alpha", "Contrastive"]),
    ({"dola_layers": "high"}, ["dola_layers"]),
    ({"prompt_lookup_num_tokens": 3}, ["prompt_lookup_num_tokens", "ngram"]),
    ({"assistant_early_exit": 1}, ["assistant_early_exit"]),
    ({"cache_implementation": "quantized"}, ["cache_implementation", "quantized"]),
    ({"token_healing": True}, ["token_healing"]),
    ({"stop_strings": ["ab"]}, ["stop_strings", "tokenizer"]),
    ({"custom_generate": lambda *args, **kwargs: None}, ["custom_generate"]),
    ({"max_time": "5"}, ["`max_time`='5'", "number of seconds, got str"]),
    # All problems in one error.
    ({"generation_config": GenerationConfig(num_beams=2), "use_cache": False}, ["num_beams", "use_cache"]),
    ({CACHE: EncoderDecoderCache(DynamicCache(), DynamicCache())}, [CACHE, "DynamicCache", "got EncoderDecoderCache"]),
    ({"cache": DynamicCache(), "past_key_values": DynamicCache()}, ["`past_key_values` are names for one"]),
    ({"spec_method": "ngramm"}, ["Did you mean 'ngram'"]),
    ({"spec_method": None, "speculative": {"method": "ngram", "prompt_lookup_maxx": 3}}, ["mean 'prompt_lookup_max'"]),
    ({"spec_method": "mtp"}, ["was not loaded from a checkpoint"]),
    ({"num_speculative_tokens": 0}, ["an integer from 1 to 1024"]),
]


def test_requests_that_cannot_be_honoured_are_refused_before_anything_runs(model):
    for settings, words in REFUSED:
        with nothing_runs(model), pytest.raises(SpecConfigError) as caught:
            model.generate(**{**prompts(1), "max_new_tokens": 4, "spec_method": "ngram", **settings})
        assert [word for word in words if word not in str(caught.value)] == []


@full
def test_configs_of_models_and_errors_of_transformers(model):
    # A checkpoint that was saved without a cache is decoded with one.
    saved = tiny_llama()
    saved.generation_config.num_beams, saved.generation_config.use_cache = 3, False
    with pytest.raises(SpecConfigError, match="num_beams"):
        saved.generate(**prompts(1), spec_method="ngram")
    ours = saved.generate(**prompts(1), **CALL, num_beams=1, spec_method="ngram")
    assert torch.equal(ours, model.generate(**prompts(1), **CALL))
    for wrong, words in (({"num_return_sequences": 2}, "num_return_sequences"), ({"top_kk": 3}, "model_kwargs")):
        for how in ({}, {"spec_method": "ngram"}):
            with pytest.raises(ValueError, match=words):
                model.generate(**prompts(1), **CALL, **wrong, **how)
    # Inputs that drafts would need: dropped after the prompt they would change the text without a word.
    languages = tiny_model("xmod")
    settings = {**prompts(1), "lang_ids": torch.tensor([0]), "max_new_tokens": 4}
    with pytest.raises(SpecConfigError, match="XmodForCausalLM.*lang_ids.*plain generate"):
        languages.generate(**settings, spec_method="ngram")
    assert languages.generate(**settings).shape[1] == 11


# Processors


class Recorder(LogitsProcessor):
    """Keeps what it was shown, and changes the scores by all of it; and forbids what it chose two positions before."""

    def __init__(self):
        self.calls, self.best = [], []

    def __call__(self, input_ids, scores):
        self.calls.append(input_ids.tolist())
        shift = (torch.arange(scores.shape[-1]) * (len(self.calls) + input_ids.sum(1, keepdim=True))) % 7
        scores = scores + 2.0 * shift
        if len(self.best) >= 2:
            scores = scores.scatter(1, self.best[-2][:, None], float("-inf"))
        self.best.append(scores.argmax(-1))
        return scores


def even_after_even(batch_id, tokens):
    return list(range((batch_id + int(tokens[-1])) % 2, VOCAB_SIZE, 2))


SELFHASH = WatermarkingConfig(bias=3.0, seeding_scheme="selfhash", context_width=2)
PROCESSORS = {
    "several": {"repetition_penalty": 1.3, "no_repeat_ngram_size": 3, "bad_words_ids": [[11]], "guidance_scale": 1.4},
    "min_new_tokens": {"min_new_tokens": 12, "eos_token_id": [20, 61]},
    "exponential_decay": {"exponential_decay_length_penalty": (4, 1.2), "eos_token_id": 9},
    "watermarking_selfhash": {"watermarking_config": SELFHASH},
    "repetition_penalty": {"repetition_penalty": 1.7},
    "no_repeat_ngram_size": {"no_repeat_ngram_size": 2},
    "bad_words_ids": {"bad_words_ids": [[7], [20, 20], [61, 14, 30]]},
    "min_length": {"min_length": 15, "eos_token_id": [20, 61]},
    "forced_eos_token_id": {"forced_eos_token_id": 9, "eos_token_id": 9},
    "suppress_tokens": {"suppress_tokens": [20, 61, 14]},
    "begin_suppress_tokens": {"begin_suppress_tokens": [61, 20]},
    "sequence_bias": {"sequence_bias": [[[20], 3.0], [[61, 7], -9.0]]},
    "guidance_scale": {"guidance_scale": 1.8},
    "watermarking": {"watermarking_config": WatermarkingConfig(greenlist_ratio=0.4, bias=3.0)},
    "synthid": {"watermarking_config": SynthIDTextWatermarkingConfig(ngram_len=3, keys=[3, 5, 7], debug_mode=True)},
    "encoder_repetition_penalty": {"encoder_repetition_penalty": 1.5},
    "remove_invalid_values": {"remove_invalid_values": True, "renormalize_logits": True},
    "prefix_allowed_tokens_fn": {"prefix_allowed_tokens_fn": even_after_even},
}


@pytest.mark.parametrize("name", split(PROCESSORS, short=["several", "watermarking_selfhash"]))
def test_processors(model, name):
    for batch_size in (1, 3):
        inputs = prompts(batch_size)
        plain, _ = plain_and_ours(model, inputs, **PROCESSORS[name])
        plain_and_ours(model, inputs, "random", **PROCESSORS[name])
    has_no_effect = name == "remove_invalid_values"
    assert torch.equal(plain, model.generate(**inputs, **CALL)) == has_no_effect


@full
def test_processors_of_other_calls(model):
    # Rows are numbered by prompts or by sequences, as the installed transformers does it.
    settings = {**CALL, **PROCESSORS["prefix_allowed_tokens_fn"], "num_return_sequences": 3, "do_sample": True}
    settings["top_k"] = 1
    plain = model.generate(**prompts(2), **settings)
    assert torch.equal(model.generate(**prompts(2), **settings, spec_method="ngram"), plain)
    inputs = prompts(3, length=1, padding=False)
    plain, _ = plain_and_ours(model, inputs, forced_bos_token_id=9)
    assert plain[:, 1].tolist() == [9] * 3
    torch.set_default_dtype(torch.float64)
    try:
        scores = {"return_dict_in_generate": True, "output_scores": True}
        plain, ours = plain_and_ours(model, prompts(3), guidance_scale=1.5, **scores)
    finally:
        torch.set_default_dtype(torch.float32)
    assert ours.scores[0].dtype == plain.scores[0].dtype


def test_unknown_processors_see_every_position_once(model):
    for batch_size in (1, 3):
        inputs = prompts(batch_size)
        for settings in ({}, {"eos_token_id": [6, 15]}):
            recorders = [Recorder() for _ in range(4)]
            plain = model.generate(**inputs, **CALL, **settings, logits_processor=recorders[:1])
            assert len(recorders[0].calls) == plain.shape[1] - 7
            for tree, recorder in zip((None, TREE, "random"), recorders[1:]):
                call = {**inputs, **CALL, **settings, "logits_processor": [recorder]}
                how = scripted_for(plain, inputs, accuracy=0.9, tree=tree)
                assert torch.equal(model.generate(**call, assistant=how), plain)
                assert recorder.calls == recorders[0].calls


# Caches


@WHICH
def test_static_cache(which, request):
    """The cache comes back as plain generation leaves it, and goes on from call to call."""
    model = request.getfixturevalue(which)
    for batch_size, is_passed in ((1, False), (3, True)):
        inputs = prompts(batch_size, length=10)
        settings = {"max_new_tokens": 14, "do_sample": False, "disable_compile": True}

        def make(is_passed=is_passed):
            cache = StaticCache(config=model.config, max_cache_len=60)
            return {CACHE: cache} if is_passed else {"cache_implementation": "static", "max_cache_len": 60}

        text = model.generate(**inputs, **settings)
        call = {**inputs, **settings, "return_dict_in_generate": True}
        plain, given = model.generate(**call, **make()), make()
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
            torch.testing.assert_close(mine.keys[:, :, seen], its.keys[:, :, seen], **CLOSE)
        addresses = [layer.keys.data_ptr() for layer in cache.layers]
        # Five tokens more after the text.
        turn = {
            "input_ids": torch.cat([text, prompts(batch_size, length=5, seed=7, padding=False)["input_ids"]], dim=1),
            "attention_mask": torch.nn.functional.pad(inputs["attention_mask"], (0, 14 + 5), value=1),
        }
        whole = model.generate(**turn, **settings)
        how = scripted_for(whole, turn, accuracy=0.8)
        assert torch.equal(model.generate(**turn, **settings, **{CACHE: cache}, assistant=how), whole)
        assert [layer.keys.data_ptr() for layer in cache.layers] == addresses
        assert int(cache.get_seq_length()) == whole.shape[1] - 1


@full
def test_static_cache_that_is_too_small(model):
    settings = {"do_sample": False, "spec_method": "ngram", CACHE: StaticCache(model.config, max_cache_len=17)}
    with nothing_runs(model), pytest.raises(SpecConfigError, match="room for 17 tokens.*may read 18"):
        model.generate(**prompts(2), **settings, max_new_tokens=12)
    assert model.generate(**prompts(2), **settings, max_new_tokens=11).shape == (2, 18)
    with nothing_runs(model), pytest.raises(SpecConfigError, match="made for 2 rows.*this call has 1"):
        model.generate(**prompts(1, length=18), **settings, max_new_tokens=1)


def test_cache_of_rows_that_ended_apart(model):
    settings = {"max_new_tokens": 30, "return_dict_in_generate": True, "eos_token_id": [6, 15]}
    plain, ours = plain_and_ours(model, prompts(3), **settings)
    ends = [(row[7:] == 0).nonzero() for row in plain.sequences]
    ends = [int(end[0]) + 7 if len(end) else plain.sequences.shape[1] for end in ends]
    assert len(set(ends)) > 1
    assert type(ours[CACHE]) is type(plain[CACHE]) is DynamicCache
    for layers in zip(ours[CACHE].layers, plain[CACHE].layers):
        for mine, its in zip(*((layer.keys, layer.values) for layer in layers)):
            assert mine.shape == its.shape
            for row, end in enumerate(ends):
                # Batched and single-token forwards round differently.
                slots = slice(2 - row, end - 1)
                torch.testing.assert_close(mine[row, :, slots], its[row, :, slots], **CLOSE)
                assert not mine[row, :, end - 1 :].any()


@WHICH
def test_caches_of_the_user_are_filled(which, request):
    """Whatever the installed transformers calls them; one that holds the prompt is given the new tokens alone."""
    model, inputs = request.getfixturevalue(which), prompts(1, length=16)
    plain = model.generate(**inputs, **CALL)
    for name in ("cache", "past_key_values", "cache_params"):
        for cache in (DynamicCache(config=model.config), DynamicCache()):
            ours = model.generate(**inputs, **CALL, **{name: cache}, assistant=scripted_for(plain, inputs))
            assert torch.equal(ours, plain)
            assert cache.get_seq_length() == ours.shape[1] - 1
    for implementation in ("static", "hybrid", "sliding_window", "dynamic"):
        settings = {**CALL, "cache_implementation": implementation}
        assert torch.equal(model.generate(**inputs, **settings, assistant=scripted_for(plain, inputs)), plain)
    cache = DynamicCache(config=model.config)
    with torch.no_grad():
        model(inputs["input_ids"][:, :11], **{CACHE: cache})
    call = {**inputs, "input_ids": inputs["input_ids"][:, 11:], CACHE: cache}
    ours = model.generate(**call, **CALL, assistant=scripted_for(plain, inputs))
    assert torch.equal(ours, plain[:, 11:])
