"""Positions and masks between the prompt and its text: models that count for themselves, masked tokens anywhere."""

from __future__ import annotations

from contextlib import suppress
from copy import deepcopy
from functools import lru_cache, wraps

import pytest
import torch
import transformers
from transformers import CONFIG_MAPPING, AutoConfig, LlamaForCausalLM, MixtralConfig, MixtralForCausalLM, TextStreamer

from hf_specdec import SpecConfigError, UnsupportedModelError, demo
from hf_specdec.decoding import check
from hf_specdec.decoding.cache import SlotCache
from hf_specdec.decoding.continuation import Continuation
from tests.helpers import methods
from tests.helpers.architectures import CHAINS_ONLY, tiny_model
from tests.helpers.caches import CACHE
from tests.helpers.models import TINY, VOCAB_SIZE, prompts, scripted_for, tiny_gpt2, tiny_llama, tiny_mistral
from tests.helpers.scripted import scripted_speculator


TREE = (-1, -1, 0, 0, 1, 2, 5)
SETTINGS = {"do_sample": False, "max_new_tokens": 20}

_TEXT = {**TINY, "head_dim": 8, "initializer_range": 0.3, "pad_token_id": 0}
_TOWER = {"hidden_size": 32, "intermediate_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2}
_PIXELS = {"image_size": 8, "patch_size": 4}
_QWEN_TOWER = {"depth": 1, "hidden_size": 32, "intermediate_size": 32, "num_heads": 2, "out_hidden_size": 32}
_SLIDING = {"sliding_window": 8, "layer_types": ["sliding_attention", "full_attention"]}
_KOSMOS_TEXT = {"vocab_size": VOCAB_SIZE, "embed_dim": 32, "layers": 2, "ffn_dim": 64, "attention_heads": 4}
_KOSMOS_TOWER = {"hidden_size": 32, "patch_embed_hidden_size": 32, "d_ff": 32, "d_kv": 8, "num_hidden_layers": 1}

# Model types that count positions themselves, each in a way of its own.
OWN_POSITIONS = {
    "paligemma": {
        "text_config": {**_TEXT, "model_type": "gemma"},
        "vision_config": {**_TOWER, **_PIXELS, "model_type": "siglip_vision_model", "projection_dim": 32},
        "image_token_index": 60,
        "projection_dim": 32,
        "hidden_size": 32,
    },
    "exaone4_5": {
        "text_config": {**_TEXT, **_SLIDING, "model_type": "exaone4"},
        "vision_config": {**_QWEN_TOWER, "fullatt_block_indexes": [0]},
        "image_token_id": 60,
        "video_token_id": 61,
    },
    "hyperclovax_vision_v2": {
        "text_config": _TEXT,
        "vision_config": {**_QWEN_TOWER, "fullatt_block_indexes": [0]},
        "image_token_id": 60,
        "video_token_id": 61,
    },
    "kosmos-2.5": {
        "text_config": {**_KOSMOS_TEXT, "max_position_embeddings": 256, "pad_token_id": 1},
        "vision_config": {**_KOSMOS_TOWER, "num_attention_heads": 2},
        "latent_query_num": 4,
    },
}


@lru_cache
def build(model_type: str):
    if model_type not in CONFIG_MAPPING:
        pytest.skip("this version of transformers has no such model")
    config = AutoConfig.for_model(model_type, **OWN_POSITIONS[model_type])
    torch.manual_seed(0)
    model = transformers.AutoModelForImageTextToText.from_config(config).eval()
    generator = torch.Generator().manual_seed(3)
    is_kosmos = model_type == "kosmos-2.5"
    for parameter in model.parameters():
        if parameter.dim() > 1:
            parameter.data.normal_(0, 0.9 if is_kosmos else 0.3, generator=generator)
    # Otherwise a token's own embedding, which is the head's, drowns its position.
    if is_kosmos:
        model.get_input_embeddings().weight.data.normal_(0, 0.05, generator=generator)
    settings = model.generation_config
    settings.eos_token_id, settings.bos_token_id, settings.pad_token_id = None, None, 0
    return model


def text_prompts(batch_size: int, padding: bool = True) -> dict[str, torch.Tensor]:
    inputs = prompts(batch_size, length=9, padding=padding)
    inputs["input_ids"].clamp_(max=57)
    return inputs


@pytest.fixture
def unchecked(monkeypatch):
    """Forgets which classes of models have been checked."""
    monkeypatch.setattr(check, "_checked", {})


def assert_some_accepted(stats) -> None:
    assert 0 < stats.num_accepted_tokens < stats.num_draft_tokens
    assert stats.num_target_forwards < SETTINGS["max_new_tokens"] * 3 / 4


class TestModelsThatCountThemselves:
    @pytest.mark.parametrize(("batch_size", "padding"), [(1, False), (2, False), (3, True)])
    @pytest.mark.parametrize("model_type", OWN_POSITIONS)
    def test_equal_plain(self, model_type, batch_size, padding, unchecked):
        model, inputs = build(model_type), text_prompts(batch_size, padding)
        plain = model.generate(**inputs, **SETTINGS)
        assert len(set(plain[:, -20:].flatten().tolist())) > 4, "the text is too dull to show a wrong position"
        for tree in (None, "random"):
            how = scripted_for(plain, inputs, accuracy=0.8, tree=tree)
            output = model.generate(**inputs, **SETTINGS, assistant=how, return_dict_in_generate=True)
            assert output.sequences.tolist() == plain.tolist(), tree
            assert_some_accepted(output.speculative)

    @pytest.mark.parametrize("padding", [False, True])
    def test_rows_of_a_text_model_as_its_own_draft_model(self, padding):
        """Its embedding of positions takes a view of them."""
        model, inputs = build("kosmos-2.5").text_model, text_prompts(2, padding)
        settings = {**SETTINGS, "pad_token_id": 0}
        plain = model.generate(**inputs, **settings)
        assert torch.equal(model.generate(**inputs, **settings, assistant=deepcopy(model)), plain)

    def test_a_padding_token_in_the_text(self):
        """The embedding of kosmos-2.5 gives it a position of its own."""
        model, inputs = build("kosmos-2.5"), text_prompts(1)
        settings = {**SETTINGS, "sequence_bias": [[[1], 3.0]]}
        plain = model.generate(**inputs, **settings)
        assert 1 in plain[0, 9:-1].tolist()
        for tree in (None, TREE):
            how = scripted_for(plain, inputs, accuracy=0.8, tree=tree)
            assert model.generate(**inputs, **settings, assistant=how).tolist() == plain.tolist()

    @pytest.mark.parametrize("model_type", OWN_POSITIONS)
    def test_nothing_stays_hooked(self, model_type):
        model = build(model_type)
        model.generate(**text_prompts(1), **SETTINGS, spec_method="ngram")
        assert not any(module._forward_pre_hooks or module._forward_hooks for module in model.modules())


def as_generate_prepared(monkeypatch) -> None:
    """Positions count each row's tokens from 0, as `generate()` prepares them and these models do not take them."""
    read = Continuation.read.__func__

    def count_tokens(cls, *args):
        found = read(cls, *args)
        found.offsets, found.counter = [0] * len(found.starts), None
        return found

    monkeypatch.setattr(Continuation, "read", classmethod(count_tokens))


class Shifty(LlamaForCausalLM):
    """Reads a token alone in another way than among others."""

    def forward(self, input_ids=None, position_ids=None, **kwargs):
        if input_ids.shape[1] == 1:
            position_ids = position_ids + 3
        return super().forward(input_ids, position_ids=position_ids, **kwargs)


class Forwards:
    """Counts a model's forwards, and those that read one token of every row."""

    def __init__(self, model):
        self.widths = []
        self._hook = model.register_forward_pre_hook(self._count, with_kwargs=True)

    def _count(self, module, args, kwargs):
        self.widths.append(kwargs["input_ids"].shape[1])

    def __enter__(self):
        return self

    def __exit__(self, *error):
        self._hook.remove()


class Heard(TextStreamer):
    def __init__(self):
        self.tokens = []

    def put(self, value):
        self.tokens += value.flatten().tolist()

    def end(self):
        pass


class Preparing(LlamaForCausalLM):
    """Prepares inputs with code of a user's own, as the test says."""

    change = staticmethod(lambda model, inputs: inputs)

    def prepare_inputs_for_generation(self, input_ids, **kwargs):
        return self.change(self, super().prepare_inputs_for_generation(input_ids, **kwargs))


def doubled_positions(model, inputs):
    return {**inputs, "position_ids": inputs["position_ids"] * 2}


def other_ids_later(model, inputs):
    is_late = int(inputs["position_ids"].max()) > 20
    return {**inputs, "input_ids": (inputs["input_ids"] + 1) % VOCAB_SIZE} if is_late else inputs


def length_for_the_forward(model, inputs):
    model.length = int(inputs["position_ids"].max())
    return inputs


def embeddings(model, inputs):
    return {**inputs, "input_ids": None, "inputs_embeds": model.get_input_embeddings()(inputs["input_ids"])}


class TestPreparationOfAUsersOwn:
    def model(self, change) -> Preparing:
        model = Preparing(tiny_llama().config).eval()
        model.load_state_dict(tiny_llama().state_dict())
        model.generation_config.pad_token_id = 0
        model.change = change
        return model

    @pytest.mark.parametrize("batch_size", [1, 3])
    def test_one_that_can_be_followed(self, batch_size):
        model, inputs = self.model(lambda model, inputs: inputs), prompts(batch_size)
        plain = model.generate(**inputs, **SETTINGS)
        for tree in (None, TREE):
            output = model.generate(**inputs, **SETTINGS, assistant=scripted_for(plain, inputs, tree=tree))
            assert torch.equal(output, plain)

    @pytest.mark.parametrize(
        ("change", "what"),
        [
            (doubled_positions, "2 tokens after the prompts.*`position_ids`"),
            (other_ids_later, r"1\d tokens after the prompts.*`input_ids`"),
            (length_for_the_forward, "tokens after the prompts.*attributes of the model"),
            (embeddings, ""),
        ],
    )
    def test_one_that_cannot_is_refused(self, change, what):
        with pytest.raises(UnsupportedModelError, match=f"Preparing.*prepare.*{what}"):
            self.model(change).generate(**prompts(1), do_sample=False, max_new_tokens=30, spec_method="ngram")


def test_a_decoding_loop_of_a_models_own_is_refused():
    class Looping(LlamaForCausalLM):
        def _sample(self, input_ids, **kwargs):
            return input_ids

    model = Looping(tiny_llama().config)
    with pytest.raises(UnsupportedModelError, match="Looping has a decoding loop of its own"):
        model.generate(**prompts(1), max_new_tokens=4, spec_method="ngram")


def put_late_forward(module, change: str) -> None:
    """A forward of the module, as a user may write it, that changes what it returns later than at its first step."""
    original, num_calls, first = type(module).forward, 0, None

    @wraps(original)
    def forward(*args, **kwargs):
        nonlocal num_calls, first
        output = original(module, *args, **kwargs)
        cache = kwargs.get(CACHE)
        length, num_calls = cache.get_seq_length(), num_calls + 1
        values = next(iter(output.values())) if isinstance(output, dict) else output
        width = (args[0] if args else kwargs["input_ids"]).shape[1]
        first = length if first is None else first
        if {
            "second step": first + 1 < length,
            "late": length > first + 12,
            "single tokens": width == 1,
            "later calls": num_calls > 3,
            "nothing": False,
        }[change]:
            values[..., ::2] *= -1
        return output

    module.forward = forward


def late(place: str, change: str):
    model = deepcopy(tiny_llama())
    part = {"class": model, "model": model, "decoder": model.model, "layer": model.model.layers[1]}[place]
    put_late_forward(part, change)
    if place in ("class", "layer"):
        # A class of the user's own.
        forward = vars(part).pop("forward")
        part.__class__ = type(
            "Own", (type(part),), {"forward": lambda self, *args, **kwargs: forward(*args, **kwargs)}
        )
    return model


@pytest.mark.usefixtures("unchecked")
class TestCheckOfTheContinuation:
    def test_another_config_is_checked_by_itself(self):
        for theta in (1e4, 1e5, 1e4):
            config = deepcopy(tiny_llama().config)
            config.rope_parameters = {"rope_type": "default", "rope_theta": theta}
            LlamaForCausalLM(config).eval().generate(**prompts(1), **SETTINGS, spec_method="ngram")
        assert len(check._checked) == 2

    def shifty(self) -> Shifty:
        model = Shifty(tiny_llama().config).eval()
        model.load_state_dict(tiny_llama().state_dict())
        model.generation_config.pad_token_id = 0
        return model

    @pytest.mark.parametrize(
        ("model_type", "batch_size"),
        [("paligemma", 1), ("exaone4_5", 3), ("hyperclovax_vision_v2", 3), ("kosmos-2.5", 1), ("kosmos-2.5", 2)],
    )
    def test_wrong_positions_are_refused(self, model_type, batch_size, monkeypatch):
        as_generate_prepared(monkeypatch)
        with pytest.raises(UnsupportedModelError, match=r"differ from those of plain generation by \d+\.\d% of"):
            build(model_type).generate(**text_prompts(batch_size), **SETTINGS, spec_method="ngram")

    def test_padding_is_checked_by_itself(self, monkeypatch):
        as_generate_prepared(monkeypatch)
        model, inputs = build("exaone4_5"), text_prompts(2, padding=False)
        plain = model.generate(**inputs, **SETTINGS)
        assert model.generate(**inputs, **SETTINGS, spec_method="ngram").tolist() == plain.tolist()
        with pytest.raises(UnsupportedModelError):
            model.generate(**text_prompts(2), **SETTINGS, spec_method="ngram")

    def test_nothing_is_shown_of_a_wrong_text(self):
        model, heard, inputs = self.shifty(), Heard(), prompts(1)
        how = scripted_for(model.generate(**inputs, **SETTINGS), inputs)
        with pytest.raises(UnsupportedModelError, match="HF_SPECDEC_CHECK=0"):
            model.generate(**inputs, **SETTINGS, streamer=heard, assistant=how)
        assert heard.tokens == inputs["input_ids"][0].tolist()
        assert not model._forward_pre_hooks

    @pytest.mark.parametrize("place", ["class", "model", "decoder", "layer"])
    @pytest.mark.parametrize("change", ["second step", "late", "single tokens", "later calls"])
    def test_forwards_of_others_are_watched_for_longer(self, change, place):
        """What differs from plain generation not at once is refused, and no other text is written."""
        model, inputs = late(place, change), prompts(2)
        settings = {**SETTINGS, "assistant": scripted_for(tiny_llama().generate(**inputs, **SETTINGS), inputs)}
        with pytest.raises(UnsupportedModelError, match="goes on after the prompt in a way"):
            model.generate(**inputs, **settings)
        assert not check._checked

    @pytest.mark.parametrize("place", ["class", "model", "decoder", "layer"])
    @pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
    def test_forwards_of_others_that_can_be_followed(self, place, dtype):
        model, inputs = late(place, "nothing").to(dtype), prompts(3)
        plain = model.generate(**inputs, **SETTINGS)
        # One forward for each token that is read after the prompts, and one over all of them.
        for extra in (SETTINGS["max_new_tokens"], 0):
            with Forwards(model) as forwards:
                output = model.generate(
                    **inputs, **SETTINGS, assistant=scripted_for(plain, inputs), return_dict_in_generate=True
                )
            if dtype == torch.float32:
                assert torch.equal(output.sequences, plain)
            if place != "model":
                assert len(forwards.widths) == output.speculative.num_target_forwards + extra

    def test_a_longer_call_is_checked_for_longer(self):
        model, inputs = late("class", "late"), prompts(1)
        text = tiny_llama().generate(**inputs, **SETTINGS)
        how = scripted_for(text, inputs)
        model.generate(**inputs, do_sample=False, max_new_tokens=4, assistant=how)
        with pytest.raises(UnsupportedModelError):
            model.generate(**inputs, **SETTINGS, assistant=how)

    def test_another_forward_is_checked_by_itself(self):
        model, inputs = late("model", "nothing"), prompts(1)
        how = scripted_for(model.generate(**inputs, **SETTINGS), inputs)
        model.generate(**inputs, **SETTINGS, assistant=how)
        put_late_forward(model, "late")
        with pytest.raises(UnsupportedModelError):
            model.generate(**inputs, **SETTINGS, assistant=how)

    def test_switched_off(self, monkeypatch):
        monkeypatch.setenv("HF_SPECDEC_CHECK", "0")
        model, inputs = self.shifty(), prompts(1)
        plain = model.generate(**inputs, **SETTINGS)
        with Forwards(model) as forwards:
            wrong = model.generate(**inputs, **SETTINGS, assistant=scripted_for(plain, inputs, accuracy=0.8))
        assert wrong.tolist() != plain.tolist()
        assert 1 not in forwards.widths[:2]

    def test_one_forward_for_a_class_and_one_with_padding(self):
        model = tiny_mistral()
        calls = [prompts(1), prompts(2, padding=False), prompts(2), prompts(3)]
        for inputs, extra in zip(calls, (1, 0, 1, 0)):
            plain = model.generate(**inputs, **SETTINGS)
            how = scripted_for(plain, inputs, accuracy=0.8)
            with Forwards(model) as forwards:
                output = model.generate(**inputs, **SETTINGS, assistant=how, return_dict_in_generate=True)
            assert output.sequences.tolist() == plain.tolist()
            assert len(forwards.widths) == output.speculative.num_target_forwards + extra

    def test_one_new_token_needs_no_check(self):
        model = tiny_mistral()
        with Forwards(model) as forwards:
            model.generate(**prompts(1), do_sample=False, max_new_tokens=1, spec_method="ngram")
        assert forwards.widths == [7]

    @pytest.mark.parametrize("name", ["llama", "qwen3_next", "moshi", "deepseek_v32"])
    def test_the_cache_is_as_before(self, name, monkeypatch):
        """The text and the cache that is returned do not show that a forward was checked."""
        model, inputs = tiny_model(name), prompts(2)
        outputs = []
        for value in ("1", "0"):
            monkeypatch.setenv("HF_SPECDEC_CHECK", value)
            settings = {**SETTINGS, "return_dict_in_generate": True}
            outputs.append(model.generate(**inputs, **settings, spec_method="ngram"))
        first, second = outputs
        assert first.sequences.tolist() == second.sequences.tolist()
        for layer, other in zip(first[CACHE].layers, second[CACHE].layers):
            if getattr(layer, "keys", None) is not None:
                assert torch.equal(layer.keys, other.keys)
                assert torch.equal(layer.values, other.values)

    def test_random_numbers_are_the_same(self, monkeypatch):
        texts = []
        for value in ("1", "0"):
            monkeypatch.setenv("HF_SPECDEC_CHECK", value)
            torch.manual_seed(5)
            text = tiny_llama().generate(**prompts(2), do_sample=True, max_new_tokens=20, spec_method="ngram")
            texts.append((text.tolist(), torch.rand(3).tolist()))
        assert texts[0] == texts[1]

    @pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
    def test_rounding_is_no_difference(self, dtype):
        for model in (tiny_llama(), tiny_mistral(), tiny_gpt2(), tiny_model("qwen3_moe")):
            text = prompts(1, length=40)["input_ids"]
            how = scripted_speculator(text, [0], VOCAB_SIZE, num_speculative_tokens=6)
            model.to(dtype).generate(**prompts(1), do_sample=False, max_new_tokens=4, assistant=how)
        assert len(check._checked) == 4

    def test_dropout_is_no_difference(self):
        model = MixtralForCausalLM(MixtralConfig(**TINY, num_local_experts=2, attention_dropout=0.5)).train()
        model.generate(**prompts(1), **SETTINGS, spec_method="ngram")
        assert not check._checked

    def test_an_error_in_the_forward_leaves_the_cache(self):
        cache = SlotCache(8)
        cache.update(*torch.ones(2, 1, 1, 4, 2), 0)
        with suppress(RuntimeError), cache.kept(cache):
            cache.update(*torch.ones(2, 1, 1, 1, 2), 0)
            raise RuntimeError
        assert cache.get_seq_length() == 4
        assert not cache.layers[0].is_sliding
        cache.start_slots(1)
        assert cache.lengths == [4]


def masked(kind: str, batch_size: int = 3, width: int = 14, vocab_size: int = VOCAB_SIZE) -> dict[str, torch.Tensor]:
    """Random prompts of this width with a mask of some kind."""
    generator = torch.Generator().manual_seed(2)
    input_ids = torch.randint(3, vocab_size, (batch_size, width), generator=generator)
    mask = torch.ones_like(input_ids)
    if kind == "mixed":
        # Gaps, nothing at all, and a second turn that is padded on the left after an answer.
        mask[0] = (torch.rand(width, generator=generator) > 0.35).long()
        mask[0, -1], mask[1], mask[2, :2], mask[2, 6:9] = 1, 0, 0, 0
    else:
        mask[0, -3:] = mask[1, -1] = 0
    return {"input_ids": input_ids, "attention_mask": mask}


def scripted_on(plain: torch.LongTensor, inputs: dict, vocab_size: int, **script):
    """A scripted speculator whose texts are what each row sees, one token at least."""
    speculator = scripted_speculator(plain, [0] * len(plain), vocab_size, num_speculative_tokens=4, **script)
    width = inputs["input_ids"].shape[1]
    seen = [
        [token for token, is_seen in zip(*row) if is_seen] for row in zip(*map(torch.Tensor.tolist, inputs.values()))
    ]
    seen = [row or [given[-1]] for row, given in zip(seen, inputs["input_ids"].tolist())]
    speculator.resources.texts[:] = [[*row, *text[width:]] for row, text in zip(seen, plain.tolist())]
    return speculator


# Rotary positions, windows, chunks, learned positions counted by the model, biases by distance, recurrent states, and
# windows by slot.
MIXED = ["llama", "mistral", "llama4_text", "gpt2", "opt", "bloom", "mpt", "gpt_neo", "qwen3_next", "gemma3_text"]
AFTER = ["llama", "mistral", "gpt2", "bloom"]
MASKED = [*((name, "mixed") for name in MIXED), *((name, "after") for name in AFTER)]


class TestMaskedTokens:
    @pytest.mark.parametrize(("name", "kind"), MASKED)
    def test_equal_plain(self, name, kind):
        model = tiny_model(name)
        vocab_size = model.config.get_text_config().vocab_size
        inputs = masked(kind, vocab_size=vocab_size)
        plain = model.generate(**inputs, **SETTINGS)
        for tree in (None,) if name in CHAINS_ONLY else (None, TREE, "random"):
            how = scripted_on(plain, inputs, vocab_size, tree=tree, accuracy=0.8)
            output = model.generate(**inputs, **SETTINGS, assistant=how, return_dict_in_generate=True)
            assert output.sequences.tolist() == plain.tolist(), tree
            assert_some_accepted(output.speculative)

    @pytest.mark.parametrize("kind", ["mixed", "after"])
    def test_eager_attention(self, kind):
        model = tiny_model("mistral", attn_implementation="eager")
        inputs = masked(kind, vocab_size=99)
        plain = model.generate(**inputs, **SETTINGS)
        how = scripted_on(plain, inputs, 99, accuracy=0.8)
        assert model.generate(**inputs, **SETTINGS, assistant=how).tolist() == plain.tolist()

    def test_rows_that_end_apart(self):
        model, inputs = tiny_llama(), masked("mixed")
        text = model.generate(**inputs, **SETTINGS)
        ends = [int(text[0, 18]), int(text[2, 24])]
        plain = model.generate(**inputs, **SETTINGS, eos_token_id=ends)
        for tree in (None, TREE):
            how = scripted_on(plain, inputs, VOCAB_SIZE, accuracy=0.8, tree=tree)
            assert model.generate(**inputs, **SETTINGS, eos_token_id=ends, assistant=how).tolist() == plain.tolist()

    def test_seeded_text_does_not_depend_on_the_drafts(self):
        model, inputs = tiny_llama(), masked("mixed")
        texts = []
        for how in (
            {"spec_method": "ngram"},
            {"spec_method": "ngram", "num_speculative_tokens": 1},
            {"tree": "random"},
        ):
            if "tree" in how:
                how = {"assistant": scripted_on(torch.tensor(texts[0]), inputs, VOCAB_SIZE, **how)}
            torch.manual_seed(3)
            texts.append(model.generate(**inputs, do_sample=True, max_new_tokens=20, **how).tolist())
        assert texts[0] == texts[1] == texts[2]

    @pytest.mark.parametrize("name", methods.METHODS)
    def test_drafters_see_each_rows_own_tokens(self, name):
        """The text and what is accepted of every method are those of the prompts without the masked tokens."""
        target, tokenizer = methods.demo_target(), demo.load_tokenizer()
        texts = [prompt.text[-160 + 16 * row :] for row, prompt in enumerate(demo.prompts()[-3:])]
        clean = dict(tokenizer(texts, return_tensors="pt", padding=True, padding_side="left"))
        rows, columns = clean["input_ids"].shape
        others = torch.randint(5, 50, (rows, columns), generator=torch.Generator().manual_seed(0))
        # Two tokens in a place of its own in every row, the last token always being one of the text.
        dirty = {"input_ids": [], "attention_mask": []}
        for row in range(rows):
            place = columns // 2 + 3 * row
            for key, fill in (("input_ids", others[row, :2]), ("attention_mask", torch.zeros(2, dtype=torch.long))):
                dirty[key].append(torch.cat([clean[key][row, :place], fill, clean[key][row, place:]]))
        dirty = {key: torch.stack(values) for key, values in dirty.items()}
        found = []
        for inputs in (clean, dirty):
            # The trees of past responses would remember the first call.
            how = {"assistant": methods.fresh_speculator(methods.settings_of(name)), "return_dict_in_generate": True}
            output = target.generate(**inputs, do_sample=False, max_new_tokens=24, **how)
            width = inputs["input_ids"].shape[1]
            stats = output.speculative
            counts = stats.num_draft_tokens, stats.num_accepted_tokens, stats.num_target_forwards
            # Windows of slots have masked ones, too.
            is_counted = "+" not in name and name != "sparse_kv"
            found.append((output.sequences[:, width:].tolist(), *(counts if is_counted else ())))
        assert found[0] == found[1]

    def test_a_chat_goes_on_from_its_cache(self):
        model, settings = tiny_llama(), {**SETTINGS, "return_dict_in_generate": True}
        inputs = prompts(3)
        text = model.generate(**inputs, **SETTINGS)
        ends = [int(text[0, 12]), int(text[2, 18])]
        first = model.generate(**inputs, **settings, eos_token_id=ends)
        answers = first.sequences[:, 7:]
        # The returned cache has zeros from the last token of a row on, where others go on.
        seen = torch.cat([answers[:, 1:], answers[:, -1:]], dim=1) != 0
        mask = torch.cat([inputs["attention_mask"], seen.long()], dim=1)
        turn = prompts(3, length=5, seed=3)
        whole = {
            "input_ids": torch.cat([first.sequences, turn["input_ids"]], dim=1),
            "attention_mask": torch.cat([mask, turn["attention_mask"]], dim=1),
        }
        assert bool((whole["attention_mask"].diff(dim=1) < 0).any())
        caches = [deepcopy(first[CACHE]) for _ in range(3)]
        plain = model.generate(**whole, **settings, **{CACHE: caches[0]})
        for tree in (None, TREE):
            how = scripted_for(first.sequences, inputs, accuracy=0.8, tree=tree)
            ours = model.generate(**inputs, **settings, eos_token_id=ends, assistant=how)
            assert ours.sequences.tolist() == first.sequences.tolist()
            caches.append(ours[CACHE])
        for tree, cache in zip((None, TREE, None, TREE), caches[1:]):
            how = scripted_on(plain.sequences, whole, VOCAB_SIZE, accuracy=0.8, tree=tree)
            again = model.generate(**whole, **settings, **{CACHE: cache}, assistant=how)
            assert again.sequences.tolist() == plain.sequences.tolist()
            assert_some_accepted(again.speculative)

    def test_masks_of_other_shapes_are_refused(self):
        mask = torch.ones(1, 1, 7, 7)
        with pytest.raises(SpecConfigError, match=r"`attention_mask`.*got the shape \[1, 1, 7, 7\]"):
            tiny_llama().generate(prompts(1)["input_ids"], attention_mask=mask, spec_method="ngram")

    def test_prefill_in_chunks(self):
        model, inputs = tiny_llama(), masked("mixed")
        plain = model.generate(**inputs, **SETTINGS, prefill_chunk_size=4)
        how = scripted_on(plain, inputs, VOCAB_SIZE, accuracy=0.8)
        assert model.generate(**inputs, **SETTINGS, prefill_chunk_size=4, assistant=how).tolist() == plain.tolist()
