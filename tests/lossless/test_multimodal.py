"""Prompts with images: models of multimodal rotary positions, and models that count an image's tokens like text."""

from __future__ import annotations

import pytest
import torch
import transformers

from hf_specdec import SpecConfigError, UnsupportedModelError, generate_many
from hf_specdec.decoding import contract
from hf_specdec.decoding.continuation import position_offsets
from hf_specdec.decoding.profile import model_profile
from hf_specdec.decoding.target import SlotModel
from tests.helpers import images
from tests.helpers.architectures import with_images
from tests.helpers.caches import CACHE
from tests.helpers.images import IMAGE, MODELS, MULTIMODAL_ROTARY, build, image_inputs, qwen2_vl
from tests.helpers.models import TINY, prompts, scripted_for


SETTINGS = {"do_sample": False, "max_new_tokens": 16}
TREE = (-1, -1, 0, 0, 1, 2, 5)


def speculators(plain, inputs):
    """Settings for `generate()` that draft by guess and partly right, in chains and in trees."""
    return {
        "ngram": {"spec_method": "ngram"},
        "chain": {"assistant": scripted_for(plain, inputs, accuracy=0.8)},
        "tree": {"assistant": scripted_for(plain, inputs, accuracy=0.9, tree=TREE)},
        "ragged_tree": {"assistant": scripted_for(plain, inputs, accuracy=0.9, tree="random")},
    }


def check_equals_plain(model, inputs):
    plain = model.generate(**inputs, **SETTINGS)
    assert len(set(plain[0, -24:].tolist())) > 4, "the text is too dull to show a wrong position"
    for name, how in speculators(plain, inputs).items():
        assert torch.equal(model.generate(**inputs, **SETTINGS, **how), plain), name
    return plain


class TestEqualsPlain:
    @pytest.mark.parametrize("batch_size", [1, 2])
    @pytest.mark.parametrize("make", MODELS)
    def test_image(self, make, batch_size):
        model, inputs = build(make), image_inputs(make, batch_size)
        plain = check_equals_plain(model, inputs)
        inputs["pixel_values"] = -inputs["pixel_values"]
        assert not torch.equal(model.generate(**inputs, **SETTINGS), plain), "the image makes no difference"

    @pytest.mark.parametrize("make", MODELS)
    def test_text_only(self, make):
        inputs = prompts(2)
        check_equals_plain(build(make), inputs)

    def test_two_images_and_text_between(self):
        model = build(qwen2_vl)
        first, second = image_inputs(qwen2_vl), image_inputs(qwen2_vl, merged=(3, 2))
        inputs = {
            key: torch.cat([first[key], second[key]], dim=0 if key in ("pixel_values", "image_grid_thw") else 1)
            for key in first
        }
        check_equals_plain(model, inputs)

    def test_second_turn(self):
        """State of the first prompt's image makes room for the second one's, whose positions have one row."""
        model, inputs = build(qwen2_vl), image_inputs(qwen2_vl)
        settings = {**SETTINGS, "return_dict_in_generate": True}
        first = model.generate(**inputs, **settings)
        turn = torch.tensor([[7, 8, 9]])
        whole = {"input_ids": torch.cat([first.sequences, turn], dim=1)}
        whole["attention_mask"] = torch.ones_like(whole["input_ids"])
        plain = model.generate(**whole, **{CACHE: first[CACHE]}, **SETTINGS)
        for tree in (None, TREE):
            how = scripted_for(first.sequences, inputs, accuracy=0.8, tree=tree)
            ours = model.generate(**inputs, **settings, assistant=how)
            assert torch.equal(ours.sequences, first.sequences)
            how = scripted_for(plain, whole, accuracy=0.8, tree=tree)
            again = model.generate(**whole, **{CACHE: ours[CACHE]}, **SETTINGS, assistant=how)
            assert torch.equal(again, plain)


@pytest.mark.thinned(2)
@pytest.mark.skipif(
    not transformers.__version__.startswith(contract.NEWEST), reason="the types are those of the newest transformers"
)
@pytest.mark.parametrize("name", images.TYPES)
def test_images_of_every_type(name):
    """Left-padded prompts, with chains and, where the type takes them, trees."""
    model = images.image_model(name)
    inputs = images.prompts_with_images(model, 2)
    settings = {"do_sample": False, "max_new_tokens": 8}
    plain = model.generate(**inputs, **settings)
    assert not torch.equal(model.generate(**{**inputs, "pixel_values": -inputs["pixel_values"]}, **settings), plain)
    assert model_profile(model).supports_trees
    for tree in (None, TREE):
        script = scripted_for(plain, inputs, accuracy=0.8, tree=tree)
        output = model.generate(**inputs, **settings, assistant=script, return_dict_in_generate=True)
        assert torch.equal(output.sequences, plain)
        assert output.speculative.num_accepted_tokens > 0


@pytest.mark.parametrize("name", ["llava", "qwen2_5_vl"])
def test_images_in_requests_of_many_are_refused(name):
    model = images.image_model(name)
    request = images.prompts_with_images(model, 1)
    request = {key: value for key, value in request.items() if key != "attention_mask"}
    text = [5, 6, 7]
    settings = {"spec_method": "ngram", "max_new_tokens": 6, "do_sample": False, "in_order": True}
    wrong, right = generate_many(model, [request, text], 2, **settings)
    assert isinstance(wrong.error, SpecConfigError)
    assert "would not be read" in str(wrong.error)
    plain = model.generate(torch.tensor([text]), max_new_tokens=6, do_sample=False)
    assert right.tokens == plain[0, 3:].tolist()


@pytest.mark.skipif(
    not transformers.__version__.startswith(contract.NEWEST), reason="the types are those of the newest transformers"
)
def test_types_without_an_image_have_a_reason():
    assert sorted([*images.TYPES, *images.NOT_TRIED]) == sorted(with_images())


def speech_model() -> tuple[torch.nn.Module, dict[str, torch.Tensor]]:
    """A tiny OmniASR, and left-padded prompts of speech and text."""
    audio = {"hidden_size": 32, "intermediate_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2}
    audio |= {"conv_dim": (16, 16), "conv_kernel": (10, 3), "conv_stride": (5, 2), "initializer_range": 0.3}
    audio |= {"num_conv_pos_embeddings": 8, "num_conv_pos_embedding_groups": 2}
    config = transformers.OmniASRConfig(
        audio_config=audio,
        text_config={
            **TINY,
            "vocab_size": 99,
            "head_dim": 8,
            "initializer_range": 0.3,
            "pad_token_id": 0,
            "model_type": "llama",
        },
        audio_token_id=IMAGE,
        initializer_range=0.3,
        bos_token_id=1,
        pad_token_id=0,
        eos_token_id=None,
    )
    torch.manual_seed(0)
    model = transformers.OmniASRForConditionalGeneration(config).eval()
    draw = torch.Generator().manual_seed(3)
    # 400 samples are 39 places after both convolutions.
    text = torch.randint(3, IMAGE, (2, 8), generator=draw)
    input_ids = torch.cat([text[:, :2], torch.full((2, 39), IMAGE), text[:, 2:]], dim=1)
    input_ids[0, :2] = 0
    return model, {
        "input_ids": input_ids,
        "attention_mask": input_ids.ne(0).long(),
        "input_values": torch.randn(2, 1, 400, generator=draw),
        "padding_mask": torch.ones((2, 400), dtype=torch.long),
    }


@pytest.mark.skipif(not hasattr(transformers, "OmniASRConfig"), reason="transformers has it since 5.24")
@pytest.mark.parametrize("tree", [None, TREE])
def test_speech_in_front_of_text(tree):
    model, inputs = speech_model()
    plain = model.generate(**inputs, **SETTINGS)
    other = model.generate(**{**inputs, "input_values": 1 - inputs["input_values"]}, **SETTINGS)
    assert not torch.equal(plain, other), "the speech makes no difference"
    script = scripted_for(plain, {key: inputs[key] for key in ("input_ids", "attention_mask")}, k=3, tree=tree)
    output = model.generate(**inputs, **SETTINGS, assistant=script, return_dict_in_generate=True)
    assert torch.equal(output.sequences, plain)
    assert output.speculative.num_accepted_tokens


@pytest.mark.parametrize("name", images.BY_LANGUAGE_MODEL)
def test_models_that_generate_with_their_language_model(name):
    """The arguments come to the language model, and so do the embeddings of the image."""
    model, inputs = images.model_around_language_model(name)
    plain = model.generate(**inputs, **SETTINGS)
    other = model.generate(**{**inputs, "pixel_values": 1 - inputs["pixel_values"]}, **SETTINGS)
    assert not torch.equal(plain, other), "the image makes no difference"
    for tree in (None, TREE):
        script = scripted_for(plain, {key: inputs[key] for key in ("input_ids", "attention_mask")}, k=3, tree=tree)
        output = model.generate(**inputs, **SETTINGS, assistant=script, return_dict_in_generate=True)
        assert output.sequences.tolist() == plain.tolist()
        assert 0 < output.speculative.num_accepted_tokens < output.speculative.num_draft_tokens


@pytest.mark.parametrize("name", images.REFUSED)
def test_language_models_that_are_refused_say_why(name):
    model, inputs = images.model_around_language_model(name)
    with pytest.raises(SpecConfigError, match=images.REFUSED[name]):
        model.generate(**inputs, **SETTINGS, spec_method="ngram")


class TestPositionsBehindAnImage:
    @pytest.mark.parametrize("make", MULTIMODAL_ROTARY)
    def test_they_are_not_the_number_of_tokens(self, make):
        """Height and width move the text by less than the image's tokens, and plain generation shows it."""
        model, inputs = build(make), image_inputs(make)
        plain = model.generate(**inputs, **SETTINGS)
        inputs["position_ids"] = torch.arange(inputs["input_ids"].shape[1])[None]
        assert not torch.equal(model.generate(**inputs, **SETTINGS), plain)

    @pytest.mark.parametrize(("merged", "after", "offset"), [((2, 4), 5, -4), ((3, 2), 1, -3), ((1, 4), 2, 0)])
    def test_offset(self, merged, after, offset, monkeypatch):
        seen, start_slots = [], SlotModel.start_slots

        def watched(slots, starts, offsets, *others):
            seen.append(offsets)
            start_slots(slots, starts, offsets, *others)

        monkeypatch.setattr(SlotModel, "start_slots", watched)
        inputs = image_inputs(qwen2_vl, 2, merged, after=after)
        build(qwen2_vl).generate(**inputs, **SETTINGS, spec_method="ngram")
        assert seen == [[offset, offset]]

    def test_prompt_that_ends_inside_the_image(self):
        inputs = image_inputs(qwen2_vl, after=0)
        model = build(qwen2_vl)
        assert model.generate(**inputs, **SETTINGS).shape[1] > inputs["input_ids"].shape[1]
        with pytest.raises(UnsupportedModelError, match=r"\[\[5, 6, 8\]\].*inside an image"):
            model.generate(**inputs, **SETTINGS, spec_method="ngram")

    def test_counts_in_floating_point(self):
        """Some models with sound and video count in fractions of a second; whole numbers stay exact."""
        whole = torch.tensor([2.0, 3.0, 4.0]).expand(3, 2, 3)
        assert position_offsets(whole, num_slots=8, starts=[0, 1]) == [-4, -3]
        with pytest.raises(UnsupportedModelError, match=r"4\.5.*fractions of a second"):
            position_offsets(whole + 0.5, num_slots=8, starts=[0, 1])
