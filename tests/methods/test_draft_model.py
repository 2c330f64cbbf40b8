"""A draft model beside the target: the target's text, whatever the draft says, and drafts that are the draft's own."""

import copy

import pytest
import torch
from transformers import (
    BloomConfig,
    BloomForCausalLM,
    Gemma2Config,
    Gemma2ForCausalLM,
    Gemma3ForCausalLM,
    Gemma3TextConfig,
    GPT2Config,
    GPT2LMHeadModel,
    GPTNeoConfig,
    GPTNeoForCausalLM,
    OpenAIGPTConfig,
    OpenAIGPTLMHeadModel,
    Qwen3Config,
    Qwen3ForCausalLM,
    T5Config,
    T5ForConditionalGeneration,
)

from hf_specdec import (
    SpecConfigError,
    UnsupportedModelError,
    load_speculator,
    record,
)
from hf_specdec.decoding.target import SlotModel
from tests.helpers.architectures import tiny_model
from tests.helpers.distribution import (
    NUM_ROWS,
    P_VALUE,
    SETTINGS,
    V,
    exact_distribution,
    sampled_counts,
    small_model,
)
from tests.helpers.models import TINY, VOCAB_SIZE, prompts, tiny_llama, tiny_mistral
from tests.helpers.pairs import every_pair
from tests.helpers.statistics import chi_square_pvalue


GREEDY = {"do_sample": False, "max_new_tokens": 25}
SHAPE = {name: value for name, value in TINY.items() if name != "max_position_embeddings"}


def perturbed(model, noise=0.05, seed=0):
    """A copy that agrees with the model more often than not."""
    twin = copy.deepcopy(model)
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in twin.parameters():
            parameter.add_(torch.randn(parameter.shape, generator=generator) * noise * parameter.std())
    return twin


def tiny_gpt2(seed=0, positions=512, vocab_size=VOCAB_SIZE):
    torch.manual_seed(seed)
    config = GPT2Config(
        vocab_size=vocab_size, n_embd=32, n_layer=2, n_head=4, n_positions=positions, initializer_range=0.3,
        bos_token_id=None, eos_token_id=None,
    )  # fmt: skip
    return GPT2LMHeadModel(config).eval()


def tiny(model_class, config_class, **settings):
    torch.manual_seed(1)
    return model_class(config_class(**{**SHAPE, **settings})).eval()


def plain_and_ours(target, draft, inputs, options=None, **settings):
    """A call without and with a draft model, and the statistics of the latter."""
    settings = {**GREEDY, **settings}
    speculator = load_speculator(target, {"method": "draft_model", **(options or {})}, draft_model=draft)
    with record(trace=True) as made:
        ours = target.generate(**inputs, **settings, assistant=speculator)
    return target.generate(**inputs, **settings), ours, made.calls[0]


def assert_own_drafts(draft, inputs, text, call, readable=None):
    """Every draft is what the draft model itself says after the text so far: its cache is never wrong."""
    starts = (inputs["attention_mask"] == 0).sum(1).tolist()
    lengths = [inputs["input_ids"].shape[1] + 1] * len(text)
    for cycle in call.cycles:
        for row in cycle.rows:
            so_far = text[row.row : row.row + 1, starts[row.row] : lengths[row.row]]
            if readable is not None:
                so_far = so_far.masked_fill(so_far >= readable, 0)
            if row.draft_tokens:
                drafted = torch.tensor([row.draft_tokens])
                with torch.no_grad():
                    logits = draft(torch.cat([so_far, drafted[:, :-1]], dim=1)).logits[:, so_far.shape[1] - 1 :]
                assert row.draft_tokens == logits.argmax(-1)[0].tolist()
            lengths[row.row] += len(row.committed_tokens)


@pytest.fixture(scope="module")
def drafts(model):
    return {"itself": model, "perturbed": perturbed(model), "unrelated": tiny_llama(seed=3, num_hidden_layers=1)}


class TestGreedyEqualsPlain:
    @every_pair(kind=["itself", "perturbed", "unrelated"], k=[1, 3, 6], batch_size=[1, 4])
    def test_every_draft_length(self, model, drafts, kind, k, batch_size):
        plain, ours, call = plain_and_ours(
            model, drafts[kind], prompts(batch_size), {"num_speculative_tokens": k}, max_new_tokens=1 + 4 * (k + 1)
        )
        assert torch.equal(ours, plain)
        stats = call.stats
        assert max(len(row.draft_tokens) for cycle in call.cycles for row in cycle.rows) == k
        if kind == "itself":
            assert stats.acceptance_rate == 1
            assert stats.mean_acceptance_length == k + 1
            assert stats.num_target_forwards == 1 + 4
        if batch_size > 1:
            low, high = {"itself": (1, 1), "perturbed": (0.4, 0.95), "unrelated": (0, 0.2)}[kind]
            assert low <= stats.acceptance_rate <= high

    def test_sliding_target_and_sliding_draft(self, sliding_model):
        draft = perturbed(sliding_model, 0.05)
        plain, ours, call = plain_and_ours(sliding_model, draft, prompts(4, length=13))
        assert torch.equal(ours, plain)
        assert_own_drafts(draft, prompts(4, length=13), ours, call)

    def test_repetition_penalty_reaches_the_draft(self, model):
        plain, ours, call = plain_and_ours(model, copy.deepcopy(model), prompts(3), repetition_penalty=1.4)
        assert torch.equal(ours, plain)
        assert call.stats.acceptance_rate == 1

    @pytest.mark.parametrize(
        ("begin", "first", "batch_size"),
        [({}, 0, 3), ({"bos_token_id": 5}, 5, 1), ({"eos_token_id": [7, 8]}, 7, 3)],
        ids=["none", "bos", "eos"],
    )
    def test_embeddings_alone(self, model, drafts, batch_size, begin, first):
        """The draft model reads what has been generated, after what a text of its own begins with."""
        inputs = prompts(batch_size)
        embeds = model.get_input_embeddings()(inputs["input_ids"]).detach()
        call = {"inputs_embeds": embeds, "attention_mask": inputs["attention_mask"]}
        plain = model.generate(**call, max_new_tokens=30, do_sample=False)
        assert plain.shape == (batch_size, 30)
        draft = copy.deepcopy(drafts["perturbed"])
        for name, value in begin.items():
            setattr(draft.config, name, value)
        read = []
        handle = draft.register_forward_pre_hook(
            lambda module, args, kwargs: read.append(kwargs["input_ids"].clone()), with_kwargs=True
        )
        output = model.generate(
            **call, max_new_tokens=30, do_sample=False, assistant=draft, return_dict_in_generate=True
        )
        handle.remove()
        assert torch.equal(output.sequences, plain)
        assert read[0].tolist() == [[first]] * batch_size
        assert read[1].tolist() == plain[:, :1].tolist()
        assert output.speculative.num_draft_tokens > 0
        # From the first cycle on.
        assert output.speculative.num_cycles_without_drafts.get("nothing_found", 0) == 0


class TestCache:
    def fed_tokens(self, monkeypatch, target, draft, k, max_new_tokens):
        """Shapes of the draft's forwards after its prompt."""
        shapes = []
        for kind in {SlotModel, *SlotModel.__subclasses__()}:
            if "forward" in vars(kind):

                def counted(self, tokens, topology, run=kind.forward, **wanted):
                    if self.model is draft:
                        shapes.append(tuple(tokens.shape))
                    return run(self, tokens, topology, **wanted)

                monkeypatch.setattr(kind, "forward", counted)
        options = {"num_speculative_tokens": k}
        _, _, call = plain_and_ours(target, draft, prompts(1), options, max_new_tokens=max_new_tokens)
        return shapes, call.stats

    def test_two_tokens_after_full_acceptance(self, model, monkeypatch):
        shapes, stats = self.fed_tokens(monkeypatch, model, copy.deepcopy(model), k=3, max_new_tokens=13)
        # The last draft token of a cycle is never fed in it.
        assert shapes == [(1, 1), (1, 1), (1, 1)] + 2 * [(1, 2), (1, 1), (1, 1)]
        assert stats.num_accepted_tokens == 9

    def test_one_token_after_a_rejection(self, model, monkeypatch):
        draft = tiny_llama(seed=3)
        with torch.no_grad():
            # Its best token is the target's least likely one.
            draft.load_state_dict({**model.state_dict(), "lm_head.weight": -model.lm_head.weight})
        shapes, stats = self.fed_tokens(monkeypatch, model, draft, k=3, max_new_tokens=8)
        assert stats.num_accepted_tokens == 0
        # Room for 3, 3, 3, 3, 3, 2, 1 and 0 draft tokens after the tokens 1, 2, ...
        assert shapes == [(1, 1)] * (3 * 4 + 2 + 1)

    @pytest.mark.parametrize(("k", "noise"), [(1, 0.05), (2, 0.2), (5, 0.05), (5, 0.2)])
    def test_drafts_are_the_drafts_own(self, model, noise, k):
        draft = perturbed(model, noise)
        inputs = prompts(4)
        plain, ours, call = plain_and_ours(model, draft, inputs, {"num_speculative_tokens": k})
        assert torch.equal(ours, plain)
        assert_own_drafts(draft, inputs, ours, call)
        accepted = {row.num_accepted for cycle in call.cycles for row in cycle.rows}
        assert len(accepted) >= min(k, 3)

    def test_drafts_of_rows_that_leave(self, model):
        draft, inputs = perturbed(model), prompts(4)
        text = model.generate(**inputs, **GREEDY)
        eos = [int(text[0, 12]), int(text[2, 18])]
        plain, ours, call = plain_and_ours(model, draft, inputs, eos_token_id=eos, pad_token_id=0)
        assert torch.equal(ours, plain)
        assert_own_drafts(draft, inputs, ours, call)


ARCHITECTURES = {
    "gpt2": tiny_gpt2,
    "mistral": lambda: tiny_mistral(seed=1, sliding_window=4),
    "qwen3": lambda: tiny(Qwen3ForCausalLM, Qwen3Config, head_dim=8),
    "gemma2": lambda: tiny(Gemma2ForCausalLM, Gemma2Config, head_dim=8, sliding_window=4, query_pre_attn_scalar=8),
    "gemma3": lambda: tiny(
        Gemma3ForCausalLM, Gemma3TextConfig, head_dim=8, num_hidden_layers=6, sliding_window=4, query_pre_attn_scalar=8
    ),
}
SLOT_COUNTERS = {
    "bloom": lambda: tiny(BloomForCausalLM, BloomConfig, n_layer=2, n_head=4),
    "gpt_neo": lambda: tiny(
        GPTNeoForCausalLM, GPTNeoConfig, num_layers=2, num_heads=4, attention_types=[[["global", "local"], 1]],
        window_size=4,
    ),
}  # fmt: skip


# Target and draft; `None` is a copy of the target that agrees with it more often than not.
PAIRS = {
    **{name: (tiny_llama, make) for name, make in ARCHITECTURES.items()},
    **{f"{name}-itself": (make, None) for name, make in SLOT_COUNTERS.items()},
    # Their rows are held to equal lengths: some commit accepted draft tokens only, and no new one.
    **{f"{name}-llama": (make, lambda: tiny_llama(seed=2)) for name, make in SLOT_COUNTERS.items()},
    **{name: (tiny_llama, make) for name, make in SLOT_COUNTERS.items()},
}


class TestArchitectures:
    @pytest.mark.parametrize(
        ("name", "batch_size"), [*((name, 3) for name in PAIRS), *((name, 1) for name in SLOT_COUNTERS)]
    )
    def test_any_draft_for_any_target(self, name, batch_size):
        make_target, make_draft = PAIRS[name]
        target, inputs = make_target(), prompts(batch_size)
        draft = perturbed(target) if make_draft is None else make_draft()
        plain, ours, call = plain_and_ours(target, draft, inputs, pad_token_id=0)
        assert torch.equal(ours, plain)
        assert_own_drafts(draft, inputs, ours, call)
        has_note = any("rows differ in length" in note for note in call.stats.notes)
        assert has_note == (name in SLOT_COUNTERS and batch_size > 1)

    @pytest.mark.parametrize("batch_size", [1, 3])
    def test_a_draft_of_recurrent_layers_alone(self, batch_size):
        """A draft model that is the target goes back to the committed text like it: all of its drafts are accepted."""
        target = tiny_model("xlstm")
        inputs = prompts(batch_size, padding=False)
        plain, ours, call = plain_and_ours(target, copy.deepcopy(target), inputs, pad_token_id=0)
        assert torch.equal(ours, plain)
        assert call.stats.num_accepted_tokens == call.stats.num_draft_tokens > 0

    @pytest.mark.parametrize(
        "draft",
        [
            OpenAIGPTLMHeadModel(OpenAIGPTConfig(vocab_size=VOCAB_SIZE, n_embd=16, n_layer=2, n_head=2)),
            T5ForConditionalGeneration(T5Config(vocab_size=VOCAB_SIZE, d_model=16, d_ff=16, num_layers=1)),
        ],
        ids=lambda draft: type(draft).__name__,
    )
    def test_drafts_that_are_refused(self, model, draft):
        with pytest.raises(UnsupportedModelError, match=f"{type(draft).__name__}.*draft model"):
            model.generate(**prompts(1), **GREEDY, assistant=draft)

    @pytest.mark.parametrize("make", [tiny_llama, tiny_gpt2, ARCHITECTURES["gemma2"]])
    def test_the_draft_stays_as_it_was(self, model, make):
        draft = make()
        draft.generation_config.update(num_assistant_tokens=7, temperature=0.3, max_length=9, eos_token_id=5)

        def state():
            weights = {name: tensor.clone() for name, tensor in draft.state_dict().items()}
            hooks = [len(module._forward_hooks) + len(module._forward_pre_hooks) for module in draft.modules()]
            settings = (draft.config.to_dict(), draft.generation_config.to_dict(), draft.config._attn_implementation)
            return weights, (hooks, settings, draft.training, sorted(vars(draft)))

        weights, rest = state()
        for settings in ({}, {"do_sample": True}):
            model.generate(**prompts(2), **{**GREEDY, **settings}, assistant=draft)
        weights_after, rest_after = state()
        assert rest_after == rest
        assert all(torch.equal(weights_after[name], tensor) for name, tensor in weights.items())
        assert draft.device == model.device


# Vocabularies

WIDTHS = [pytest.param(48, id="smaller_draft"), pytest.param(80, id="larger_draft")]


class TestPaddedVocabularies:
    @pytest.mark.parametrize("width", WIDTHS)
    @pytest.mark.parametrize("make", [tiny_llama, tiny_gpt2])
    def test_greedy(self, model, make, width):
        """Prompts and texts hold ids that the smaller draft's embedding lacks."""
        draft, inputs = make(seed=4, vocab_size=width), prompts(3)
        plain, ours, call = plain_and_ours(model, draft, inputs, {"same_tokenizer": True})
        assert torch.equal(ours, plain)
        assert (inputs["input_ids"] >= 48).any()
        drafted = [token for cycle in call.cycles for row in cycle.rows for token in row.draft_tokens]
        assert max(drafted) < min(width, VOCAB_SIZE)
        if width < VOCAB_SIZE:
            assert_own_drafts(draft, inputs, ours, call, readable=width)

    @pytest.mark.parametrize("width", WIDTHS)
    def test_the_same_model_in_another_width(self, model, width):
        draft = copy.deepcopy(model)
        draft.resize_token_embeddings(width, mean_resizing=False)
        if width > VOCAB_SIZE:
            with torch.no_grad():
                # Padding rows that the draft would often choose.
                draft.lm_head.weight[VOCAB_SIZE:] = draft.lm_head.weight[: width - VOCAB_SIZE] * 3
        plain, ours, call = plain_and_ours(model, draft, prompts(3), {"same_tokenizer": True})
        assert torch.equal(ours, plain)
        if width > VOCAB_SIZE:
            assert call.stats.acceptance_rate == 1

    @every_pair(width=[4, 9], settings=["top_k", "repetition_penalty_and_top_p"], method=["greedy", "probabilistic"])
    def test_sampling(self, width, settings, method):
        draft = small_draft(vocab_size=width)
        speculator = draft_speculator(draft, draft_sample_method=method, same_tokenizer=True)
        counts, stats = sampled_counts(SETTINGS[settings], speculator)
        assert chi_square_pvalue(counts, exact_distribution(SETTINGS[settings])) > P_VALUE
        assert stats.num_accepted_tokens > 0.1 * NUM_ROWS

    def test_penalties_of_tokens_that_the_draft_lacks(self, model):
        draft = tiny_llama(seed=4, vocab_size=48)
        plain, ours, _ = plain_and_ours(
            model, draft, prompts(3), {"same_tokenizer": True}, repetition_penalty=1.3, suppress_tokens=[60, 61]
        )
        assert torch.equal(ours, plain)


# Limits of length


class TestLimits:
    def drafted_lengths(self, call, prompt_lengths):
        """Length of each row, anchor included, at every draft; and of the text up to the draft's end."""
        lengths = [length + 1 for length in prompt_lengths]
        for cycle in call.cycles:
            for row in cycle.rows:
                if row.draft_tokens:
                    yield lengths[row.row], lengths[row.row] + len(row.draft_tokens)
                lengths[row.row] += len(row.committed_tokens)

    @pytest.mark.parametrize("batch_size", [1, 4])
    @pytest.mark.parametrize("own_limit", [True, False], ids=["position_table", "max_model_len"])
    def test_rows_go_on_without_drafts(self, model, own_limit, batch_size):
        """Rows cross the limit at different times: their prompts differ in length, and so does what they accept."""
        draft = tiny_gpt2(positions=32) if own_limit else perturbed(model)
        options = {} if own_limit else {"max_model_len": 32}
        inputs = prompts(batch_size, length=15)
        plain, ours, call = plain_and_ours(model, draft, inputs, options, max_new_tokens=40)
        assert torch.equal(ours, plain)
        assert_own_drafts(draft, inputs, ours, call)
        drafted = list(self.drafted_lengths(call, inputs["attention_mask"].sum(1).tolist()))
        assert max(end for _, end in drafted) == 32
        assert max(length for length, _ in drafted) > 25
        assert len(call.stats.notes) == 1
        assert "32 tokens" in call.stats.notes[0]
        assert ("max_position_embeddings" if own_limit else "max_model_len") in call.stats.notes[0]

    @pytest.mark.parametrize("length", [31, 32, 33, 40])
    def test_prompts_at_and_beyond_the_limit(self, model, length):
        draft, inputs = tiny_gpt2(positions=32), prompts(1, length=length)
        plain, ours, call = plain_and_ours(model, draft, inputs)
        assert torch.equal(ours, plain)
        assert call.stats.num_drafts == 0
        assert len(call.stats.notes) == 1

    def test_long_and_short_prompts_in_a_batch(self, model):
        """Rows other than the first have drafts from the start, and only some of them."""
        draft, inputs = tiny_gpt2(positions=32), prompts(4, length=40, padding=False)
        for row, length in enumerate((40, 20, 35, 6)):
            inputs["attention_mask"][row, : 40 - length] = 0
            inputs["input_ids"][row, : 40 - length] = 0
        plain, ours, call = plain_and_ours(model, draft, inputs)
        assert torch.equal(ours, plain)
        assert_own_drafts(draft, inputs, ours, call)
        assert {row.row for cycle in call.cycles for row in cycle.rows if row.draft_tokens} == {1, 3}

    def test_the_smaller_limit_counts(self, model):
        for limit, positions in ((20, 32), (None, 20)):
            inputs = prompts(2)
            _, _, call = plain_and_ours(model, tiny_gpt2(positions=positions), inputs, {"max_model_len": limit})
            ends = [end for _, end in self.drafted_lengths(call, inputs["attention_mask"].sum(1).tolist())]
            assert max(ends) == 20
        with pytest.raises(SpecConfigError, match="`max_model_len`=32 is longer than the draft model's context of 20"):
            load_speculator(model, draft_model=tiny_gpt2(positions=20), max_model_len=32)

    @pytest.mark.parametrize("batch_size", [1, 3])
    def test_position_table_of_the_target(self, batch_size):
        """The table ends where the text ends; so does the draft's."""
        target = tiny_gpt2(positions=32)
        for draft in (target, perturbed(target), tiny_gpt2(positions=64), tiny_llama()):
            plain, ours, call = plain_and_ours(target, draft, prompts(batch_size), max_new_tokens=None, max_length=32)
            assert ours.shape[1] == 32
            assert torch.equal(ours, plain)
            assert call.stats.num_drafts > 0


# Sampling


def small_draft(**settings):
    """About as near to `small_model` as draft models are to their targets."""
    return tiny_llama(
        seed=6, hidden_size=16, intermediate_size=16, num_hidden_layers=1, num_attention_heads=2,
        num_key_value_heads=1, initializer_range=0.4, **{"vocab_size": V, **settings},
    )  # fmt: skip


def draft_speculator(draft=None, k=3, **options):
    options = {"method": "draft_model", "num_speculative_tokens": k, **options}
    return load_speculator(small_model(), options, draft_model=draft or small_draft())


class TestSampling:
    @pytest.mark.parametrize(("method", "threshold"), [("greedy", 0.4), ("probabilistic", 0.7)])
    def test_joint_distribution_with_early_stops(self, method, threshold):
        speculator = draft_speculator(draft_sample_method=method, draft_confidence_threshold=threshold)
        counts, stats = sampled_counts(SETTINGS["top_p"], speculator)
        assert chi_square_pvalue(counts, exact_distribution(SETTINGS["top_p"])) > P_VALUE
        assert stats.num_draft_tokens < 0.9 * 3 * stats.num_drafts

    def test_the_target_itself_is_always_accepted(self):
        _, stats = sampled_counts(SETTINGS["repetition_penalty_and_top_p"], draft_speculator(small_model()))
        # Ratios of probabilities that were computed over other shapes may miss 1 by rounding.
        assert stats.acceptance_rate > 0.9999

    def test_drawn_drafts_are_accepted_as_often_as_the_distributions_overlap(self):
        """More often than the best token of the same draft."""
        rates = {
            method: sampled_counts(SETTINGS["plain"], draft_speculator(draft_sample_method=method))[1].acceptance_rate
            for method in ("greedy", "probabilistic")
        }
        assert rates["probabilistic"] > rates["greedy"] + 0.05


class TestConfidence:
    @pytest.mark.parametrize("batch_size", [1, 4])
    def test_improbable_tokens_end_a_draft(self, model, batch_size):
        draft, inputs = perturbed(model, 0.2), prompts(batch_size)
        threshold = 0.6
        options = {"num_speculative_tokens": 6, "draft_confidence_threshold": threshold}
        plain, ours, call = plain_and_ours(model, draft, inputs, options, max_new_tokens=40)
        assert torch.equal(ours, plain)
        lengths = [7 + 1] * batch_size
        starts = (inputs["attention_mask"] == 0).sum(1).tolist()
        sizes = set()
        for cycle in call.cycles:
            for row in cycle.rows:
                drafted, size = row.draft_tokens, len(row.draft_tokens)
                so_far = ours[row.row, starts[row.row] : lengths[row.row]]
                text = torch.cat([so_far, torch.tensor(drafted, dtype=torch.long)])
                lengths[row.row] += len(row.committed_tokens)
                with torch.no_grad():
                    distributions = draft(text[None]).logits[0, -1 - size : -1].softmax(-1)
                confidences = distributions.gather(1, text[-size:, None])[:, 0].tolist() if size else []
                assert all(confidence > threshold - 1e-4 for confidence in confidences[:-1])
                room = ours.shape[1] - starts[row.row] - len(so_far) - 1
                if size < min(6, room):
                    assert confidences[-1] < threshold + 1e-4
                sizes.add(size)
        assert len(sizes) > 2

    def test_bounds(self, model):
        draft = perturbed(model, 0.2)
        drafted = []
        for threshold in (0.0, 0.5, 1.0):
            plain, ours, call = plain_and_ours(model, draft, prompts(1), {"draft_confidence_threshold": threshold})
            assert torch.equal(ours, plain)
            drafted.append(call.stats.num_draft_tokens / call.stats.num_drafts)
        assert drafted[0] > drafted[1] > drafted[2]
        # The improbable token itself stays.
        assert drafted[2] == 1

    @pytest.mark.parametrize(
        "options",
        [
            {"draft_confidence_threshold": 1.5},
            {"draft_confidence_threshold": "0.5"},
            {"draft_sample_method": "random"},
            {"same_tokenizer": 1},
        ],
    )
    def test_bad_options(self, model, options):
        name, value = next(iter(options.items()))
        with pytest.raises(SpecConfigError, match=f"{name}.*{value!r}"):
            load_speculator(model, {"method": "draft_model", **options}, draft_model=model)


def test_slot_counting_draft_that_no_prompt_fits(model):
    """Rows longer than the draft's context go on without drafts, whatever kind of model it is."""
    draft = GPTNeoForCausalLM(
        GPTNeoConfig(
            vocab_size=VOCAB_SIZE,
            hidden_size=16,
            num_layers=2,
            attention_types=[[["global", "local"], 1]],
            num_heads=2,
            max_position_embeddings=5,
        )
    ).eval()
    inputs = prompts(2, length=9)
    settings = {"do_sample": False, "max_new_tokens": 8}
    plain = model.generate(**inputs, **settings)
    assert torch.equal(model.generate(**inputs, **settings, assistant=draft), plain)


def test_more_sampled_draft_tokens_than_there_are_numbers(model):
    inputs = prompts(1)
    settings = {"max_new_tokens": 4, "assistant": tiny_llama(seed=1), "num_speculative_tokens": 300}
    with pytest.raises(SpecConfigError, match="at most 256.*got 300.*draft_sample_method='greedy'"):
        model.generate(**inputs, do_sample=True, **settings)
    assert model.generate(**inputs, do_sample=False, **settings).shape[1] == 11
