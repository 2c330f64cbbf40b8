"""Prompts with images and sound equal `generate()`: multimodal rotary positions, and positions counted like text."""

from __future__ import annotations

import pytest
import torch
import transformers

from hf_specdec import SpecConfigError, UnsupportedModelError, generate_many
from hf_specdec.target import contract
from hf_specdec.target.facts import model_profile
from hf_specdec.target.model import SlotModel
from hf_specdec.target.prompts import position_offsets
from tests.helpers import images
from tests.helpers.architectures import with_images
from tests.helpers.caches import CACHE
from tests.helpers.families import assert_drafts_change_nothing
from tests.helpers.images import IMAGE, MODELS, build, image_inputs
from tests.helpers.levels import full, split
from tests.helpers.models import TINY, prompts, scripted_for


SETTINGS = {"do_sample": False, "max_new_tokens": 16}
TREE = (-1, -1, 0, 0, 1, 2, 5)
IS_NEWEST = transformers.__version__.startswith(contract.NEWEST)


def check_equals_plain(model, inputs):
    plain = assert_drafts_change_nothing(model, inputs, (None, TREE, "random"), others=["ngram"], **SETTINGS)
    assert len(set(plain[0, -24:].tolist())) > 4, "the text is too dull to show a wrong position"
    return plain


@pytest.mark.parametrize("name", split(sorted({*MODELS, *images.TYPES}), short=["qwen2_vl", "llava", "gemma3"]))
def test_greedy_matches_generate(name):
    if name in images.TYPES and not IS_NEWEST:
        pytest.skip("the types are those of the newest transformers")
    model = build(name)
    assert model_profile(model).supports_trees
    for batch_size in (1, 2) if name in MODELS else (2,):
        inputs = image_inputs(name, batch_size)
        plain = check_equals_plain(model, inputs)
        other = {**inputs, "pixel_values": -inputs["pixel_values"]}
        assert not torch.equal(model.generate(**other, **SETTINGS), plain), "the image makes no difference"
    if name in MODELS:
        check_equals_plain(model, prompts(2))
    if name.startswith("qwen"):
        # Height and width move the text by less than the image's tokens, and plain generation shows it.
        counted = {**inputs, "position_ids": torch.arange(inputs["input_ids"].shape[1])[None]}
        assert not torch.equal(model.generate(**counted, **SETTINGS), plain)


@full
def test_two_images_and_text_between():
    first, second = image_inputs("qwen2_vl"), image_inputs("qwen2_vl", grid=(6, 4))
    inputs = {
        key: torch.cat([first[key], second[key]], dim=0 if key in ("pixel_values", "image_grid_thw") else 1)
        for key in first
    }
    check_equals_plain(build("qwen2_vl"), inputs)


def test_second_turn_with_the_returned_cache():
    """State of the first prompt's image makes room for the second one's, whose positions have one row."""
    model, inputs = build("qwen2_vl"), image_inputs("qwen2_vl")
    settings = {**SETTINGS, "return_dict_in_generate": True}
    first = model.generate(**inputs, **settings)
    whole = {"input_ids": torch.cat([first.sequences, torch.tensor([[7, 8, 9]])], dim=1)}
    whole["attention_mask"] = torch.ones_like(whole["input_ids"])
    plain = model.generate(**whole, **{CACHE: first[CACHE]}, **SETTINGS)
    for tree in (None, TREE):
        how = scripted_for(first.sequences, inputs, accuracy=0.8, tree=tree)
        ours = model.generate(**inputs, **settings, assistant=how)
        assert torch.equal(ours.sequences, first.sequences)
        how = scripted_for(plain, whole, accuracy=0.8, tree=tree)
        again = model.generate(**whole, **{CACHE: ours[CACHE]}, **SETTINGS, assistant=how)
        assert torch.equal(again, plain)


@full
@pytest.mark.skipif(not IS_NEWEST, reason="the types are those of the newest transformers")
def test_types_without_an_image_have_a_reason():
    assert sorted([*images.TYPES, *images.NOT_TRIED]) == sorted(with_images())


@full
def test_images_in_requests_of_many_are_refused():
    model, request = build("qwen2_5_vl"), image_inputs("qwen2_5_vl")
    request.pop("attention_mask")
    wrong, right = generate_many(model, [request, [5, 6, 7]], 2, **SETTINGS, spec_method="ngram", in_order=True)
    assert isinstance(wrong.error, SpecConfigError)
    assert "would not be read" in str(wrong.error)
    assert right.tokens == model.generate(torch.tensor([[5, 6, 7]]), **SETTINGS)[0, 3:].tolist()


def speech_model() -> tuple[torch.nn.Module, dict[str, torch.Tensor]]:
    """A tiny OmniASR, and left-padded prompts of speech and text."""
    audio = {"hidden_size": 32, "intermediate_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2}
    audio |= {"conv_dim": (16, 16), "conv_kernel": (10, 3), "conv_stride": (5, 2), "initializer_range": 0.3}
    audio |= {"num_conv_pos_embeddings": 8, "num_conv_pos_embedding_groups": 2}
    config = transformers.OmniASRConfig(
        audio_config=audio,
        text_config={**TINY, "vocab_size": 99, "initializer_range": 0.3, "model_type": "llama"},
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


@full
@pytest.mark.skipif(not hasattr(transformers, "OmniASRConfig"), reason="transformers has it since 5.24")
def test_speech_in_front_of_text():
    model, inputs = speech_model()
    plain = assert_drafts_change_nothing(model, inputs, (None, TREE), k=3, **SETTINGS)
    other = model.generate(**{**inputs, "input_values": 1 - inputs["input_values"]}, **SETTINGS)
    assert not torch.equal(plain, other), "the speech makes no difference"


@pytest.mark.parametrize("name", split(images.BY_LANGUAGE_MODEL, short=images.BY_LANGUAGE_MODEL[:1]))
def test_models_that_generate_with_their_language_model(name):
    """The arguments come to the language model, and so do the embeddings of the image."""
    model, inputs = images.model_around_language_model(name)
    plain = assert_drafts_change_nothing(model, inputs, (None, TREE), k=3, **SETTINGS)
    other = model.generate(**{**inputs, "pixel_values": 1 - inputs["pixel_values"]}, **SETTINGS)
    assert not torch.equal(plain, other), "the image makes no difference"


@full
@pytest.mark.parametrize("name", images.REFUSED)
def test_language_models_that_are_refused_say_why(name):
    model, inputs = images.model_around_language_model(name)
    with pytest.raises(SpecConfigError, match=images.REFUSED[name]):
        model.generate(**inputs, **SETTINGS, spec_method="ngram")


def test_offset_of_positions_behind_an_image(monkeypatch):
    seen, start_slots = [], SlotModel.start_slots

    def watched(slots, starts, offsets, *others):
        seen.append(offsets)
        start_slots(slots, starts, offsets, *others)

    monkeypatch.setattr(SlotModel, "start_slots", watched)
    for grid, after, _ in (shapes := [((4, 8), 5, -4), ((6, 4), 1, -3), ((2, 8), 2, 0)]):
        inputs = image_inputs("qwen2_vl", 2, grid, after)
        build("qwen2_vl").generate(**inputs, **SETTINGS, spec_method="ngram")
    assert seen == [[offset, offset] for _, _, offset in shapes]


@full
def test_positions_that_no_offset_describes_are_refused():
    inputs = image_inputs("qwen2_vl", after=0)
    model = build("qwen2_vl")
    assert model.generate(**inputs, **SETTINGS).shape[1] > inputs["input_ids"].shape[1]
    with pytest.raises(UnsupportedModelError, match=r"\[\[10, 11, 11\]\].*inside an image"):
        model.generate(**inputs, **SETTINGS, spec_method="ngram")
    # Some models with sound and video count in fractions of a second; whole numbers stay exact.
    whole = torch.tensor([2.0, 3.0, 4.0]).expand(3, 2, 3)
    assert position_offsets(whole, num_slots=8, starts=[0, 1]) == [-4, -3]
    with pytest.raises(UnsupportedModelError, match=r"4\.5.*fractions of a second"):
        position_offsets(whole + 0.5, num_slots=8, starts=[0, 1])
