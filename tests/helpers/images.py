"""Prompts with an image for tiny models of `architectures.py`, whose image towers are made smaller still.

Most types read images in one of two ways: as squares, each of as many tokens as the model says, or as rows of patches
with the size of the grid they form.
"""

from __future__ import annotations

import inspect
from functools import lru_cache

import torch
from transformers import (
    AutoModelForImageTextToText,
    Gemma3Config,
    Gemma3ForConditionalGeneration,
    LlavaConfig,
    LlavaForConditionalGeneration,
    Qwen2_5_VLConfig,
    Qwen2_5_VLForConditionalGeneration,
    Qwen2VLConfig,
    Qwen2VLForConditionalGeneration,
    Qwen3VLConfig,
    Qwen3VLForConditionalGeneration,
)
from transformers.models.auto.configuration_auto import CONFIG_MAPPING

from tests.helpers.architectures import SPECIAL, tiny_model
from tests.helpers.models import TINY


# Below the 99 tokens of the vocabulary.
IMAGE, VISION_START, VISION_END, VIDEO = 98, 97, 96, 95
_TOKENS = {
    "image_token_id": IMAGE,
    "image_token_index": IMAGE,
    "vision_start_token_id": VISION_START,
    "image_start_token_id": VISION_START,
    "vision_end_token_id": VISION_END,
    "image_end_token_id": VISION_END,
    "video_token_id": VIDEO,
    "video_token_index": VIDEO,
}
_GRID = 4  # patches along a side

# Types that read images in one of these ways.
TYPES = (
    "aria cohere2_vision cohere_compass cosmos3_edge cosmos3_omni deepseek_vl ernie4_5_vl_moe exaone4_5 glm46v "
    "glm4v glm4v_moe glm_ocr glmga hyperclovax_vision_v2 idefics2 idefics3 internvl janus lfm3_vl lighton_ocr "
    "llava llava_next llava_next_video llava_onevision minimax_m3_vl ovis2 paligemma pp_chart2table qianfan_ocr "
    "qwen2_5_omni_thinker qwen2_5_vl qwen2_vl qwen3_omni_moe_thinker qwen3_vl qwen3_vl_moe smolvlm step3p7 "
    "video_llama_3 video_llava vipllava"
).split()

# Types that these inputs do not fit.
_PATCHES = "patches in a form of their own"
_BESIDE = "sizes or masks beside an image"
NOT_TRIED = {
    "apertus1p5": "images as tokens of the vocabulary",
    "aya_vision": "another number of patches",
    "chameleon": "images as tokens of the vocabulary",
    "deepseek_ocr2": _PATCHES,
    "deepseek_vl_hybrid": "an image in two sizes",
    "granite4_vision": _BESIDE,
    "granite_docling": _BESIDE,
    "hunyuan_vl": _PATCHES,
    "hy_v4_vl": _PATCHES,
    "inkling2": _PATCHES,
    "inkling_mm_model": _PATCHES,
    "kimi_k25": _PATCHES,
    "kosmos-2.5": _PATCHES,
    "lfm2_vl": _PATCHES,
    "minicpm_ocr": _BESIDE,
    "minicpmv4_6": _BESIDE,
    "minicpmv4_7": _BESIDE,
    "mistral3": _BESIDE,
    "mistral4": "no image tower by itself",
    "mistral_large4": _BESIDE,
    "molmo2": _PATCHES,
    "muse_glimmer": _PATCHES,
    "muse_spark": _PATCHES,
    "nemotron_h_omni": _PATCHES,
    "paddleocr_vl": _PATCHES,
    "shieldgemma2": "an image that changes the text of a model as small",
}

# Those that take several images of a row, each in a dimension more: how many.
_SEVERAL = {"idefics2": 1, "idefics3": 1, "smolvlm": 1, "llava_next": 2, "llava_next_video": 2, "llava_onevision": 2}

# Values that reading such small images needs.
_SPECIAL = {
    "aria": {"projector_patch_to_query_dict": {_GRID**2: 4}},
    "llava_next": {"image_grid_pinpoints": [[56, 56]]},
    "llava_next_video": {"image_grid_pinpoints": [[56, 56]]},
    "llava_onevision": {"image_grid_pinpoints": [[56, 56]]},
    "paligemma": {"projection_dim": 64},
    "vipllava": {"vision_feature_layers": [-1, -2]},
}


# Types whose own generate() reads the image, and passes all else on to that of their language model.
BY_LANGUAGE_MODEL = ("blip-2", "instructblip", "instructblipvideo")

# Gemma 3, whose image tokens see each other, is one of `MODELS`.
TESTED = sorted([*TYPES, *BY_LANGUAGE_MODEL, "gemma3"])

# Types that are refused when their language model gets the image: what the error says.
REFUSED = {"blip": "reads `encoder_hidden_states`"}


def model_around_language_model(name: str) -> tuple[torch.nn.Module, dict[str, torch.Tensor]]:
    """A tiny model of `BY_LANGUAGE_MODEL` or `REFUSED`, and a prompt for it."""
    sizes = {"hidden_size": 32, "intermediate_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2}
    heard = {**sizes, "vocab_size": 99, "encoder_hidden_size": 32, "initializer_range": 0.3}
    heard |= {"bos_token_id": 1, "sep_token_id": 2, "pad_token_id": 0}
    text = {**sizes, "ffn_dim": 48, "vocab_size": 99, "word_embed_proj_dim": 32, "init_std": 0.3}
    text |= {"model_type": "opt", "pad_token_id": 1, "eos_token_id": None}
    config = CONFIG_MAPPING[name](
        vision_config={**sizes, "image_size": 16, "patch_size": 8, "initializer_range": 0.3},
        **({"text_config": heard} if name in REFUSED else {"text_config": text, "qformer_config": heard}),
    )
    if name not in REFUSED:
        config.num_query_tokens, config.image_token_index, config.video_token_index = 4, IMAGE, IMAGE
    torch.manual_seed(0)
    model = AutoModelForImageTextToText.from_config(config).eval()
    model.generation_config.eos_token_id = None
    if name not in REFUSED:
        # The image counts beside the text.
        model.language_projection.weight.data.mul_(100)
    draw = torch.Generator().manual_seed(3)
    # Frames of a video are read one by one.
    frames = (2,) if name == "instructblipvideo" else ()
    tokens = torch.randint(3, VIDEO, (1, 8), generator=draw)
    inputs = {"pixel_values": torch.randn(1, *frames, 3, 16, 16, generator=draw)}
    if name.startswith("instructblip"):
        inputs |= {"qformer_input_ids": tokens, "qformer_attention_mask": torch.ones_like(tokens)}
    images = 0 if name in REFUSED else 4 * max(sum(frames), 1)
    inputs["input_ids"] = torch.cat([torch.full((1, images), IMAGE), tokens], dim=1)
    return model, {**inputs, "attention_mask": torch.ones_like(inputs["input_ids"])}


@lru_cache
def text_model(name: str) -> torch.nn.Module:
    """A model of `with_images()` that counts positions itself, with weights that let positions count."""
    is_kosmos = name == "kosmos-2.5"
    model = tiny_model(name, **({"text_config": {"pad_token_id": 1}} if is_kosmos else {}))
    if is_kosmos:
        # Otherwise a token's own embedding drowns its position.
        generator = torch.Generator().manual_seed(3)
        for parameter in model.parameters():
            if parameter.dim() > 1:
                parameter.data.normal_(0, 0.3, generator=generator)
    return model


def image_model(name: str) -> torch.nn.Module:
    """A model of `with_images()` whose image tokens are in its vocabulary."""
    default = CONFIG_MAPPING[name]()
    changes = {key: value for key, value in _TOKENS.items() if hasattr(default, key)} | _SPECIAL.get(name, {})
    vision, own = getattr(default, "vision_config", None), SPECIAL.get(name, {}).get("vision_config", {})
    size = getattr(vision, "image_size", None)
    patch = getattr(vision, "patch_size", None)
    if isinstance(size, int):
        own = {**own, "image_size": _GRID * patch}
    elif size is not None and patch is not None:
        own = {**own, "image_size": [_GRID * side for side in patch]}
    if hasattr(vision, "projection_dim"):
        own = {**own, "projection_dim": 64}
    if own:
        changes["vision_config"] = own
    model = tiny_model(name, **changes)
    model.generation_config.eos_token_id, model.generation_config.pad_token_id = None, 0
    return model


def prompts_with_images(model: torch.nn.Module, batch_size: int) -> dict[str, torch.Tensor]:
    """Left-padded prompts of text, an image and text."""
    draw = torch.Generator().manual_seed(3)
    vision, read = model.config.vision_config, set(inspect.signature(model.forward).parameters)
    features = inspect.signature(model.model.get_image_features).parameters
    inputs: dict[str, torch.Tensor] = {}
    if "image_grid_thw" in features:
        merge = getattr(vision, "spatial_merge_size", None) or getattr(vision, "merge_size", 1)
        channels, frames = getattr(vision, "in_channels", 3), getattr(vision, "temporal_patch_size", 1)
        columns = channels * frames * vision.patch_size**2
        inputs["pixel_values"] = torch.randn(batch_size * _GRID**2, columns, generator=draw)
        inputs["image_grid_thw"] = torch.tensor([[1, _GRID, _GRID]] * batch_size)
        if "image_merge_sizes" in features:
            inputs["image_merge_sizes"] = torch.tensor([merge] * batch_size)
        count = _GRID**2 // merge**2
    else:
        size = vision.image_size
        height, width = (size, size) if isinstance(size, int) else size
        several = _SEVERAL.get(model.config.model_type)
        images = () if several is None else (several,)
        inputs["pixel_values"] = torch.randn(batch_size, *images, 3, height, width, generator=draw)
        if "image_sizes" in features and features["image_sizes"].default is inspect.Parameter.empty:
            inputs["image_sizes"] = torch.tensor([[height, width]] * batch_size)
        with torch.no_grad():
            found = model.model.get_image_features(**{key: value[:1] for key, value in inputs.items()})
        found = getattr(found, "pooler_output", found)
        found = found if torch.is_tensor(found) else found[0]
        count = found.numel() // found.shape[-1]
    rows = []
    for row in range(batch_size):
        text = torch.randint(3, VIDEO, (8 + row,), generator=draw).tolist()
        rows.append([*text[5:], VISION_START, *[IMAGE] * count, VISION_END, *text[:5]])
    width = max(map(len, rows))
    inputs["input_ids"] = torch.tensor([[0] * (width - len(row)) + row for row in rows])
    inputs["attention_mask"] = torch.tensor([[0] * (width - len(row)) + [1] * len(row) for row in rows])
    for name in {"mm_token_type_ids", "token_type_ids"} & read:
        inputs[name] = (inputs["input_ids"] == IMAGE).int()
    return inputs


# Models made by hand.
TEXT = {**TINY, "vocab_size": 99, "head_dim": 8, "initializer_range": 0.3, "pad_token_id": 0}
# Sections of the rotary dimensions for time, height and width. Positions matter more with a small base.
_MULTIMODAL = {**TEXT, "rope_parameters": {"rope_type": "default", "rope_theta": 100.0, "mrope_section": [1, 1, 2]}}
_TOKEN_IDS = {
    "image_token_id": IMAGE,
    "video_token_id": VIDEO,
    "vision_start_token_id": VISION_START,
    "vision_end_token_id": VISION_END,
}
_PATCH_SIZES = {"patch_size": 4, "temporal_patch_size": 2, "spatial_merge_size": 2, "in_channels": 3}
_CLIP = {"model_type": "clip_vision_model", "image_size": 8, "patch_size": 4}
_SIGLIP = {"model_type": "siglip_vision_model", "image_size": 8, "patch_size": 4, "vision_use_head": False}
_TOWER = {
    "hidden_size": 32,
    "intermediate_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "initializer_range": 0.3,
}


def qwen2_vl(**text):
    vision = {**_PATCH_SIZES, "depth": 1, "embed_dim": 16, "hidden_size": 32, "num_heads": 2, "mlp_ratio": 2}
    return Qwen2VLForConditionalGeneration(
        Qwen2VLConfig(text_config={**_MULTIMODAL, **text}, vision_config=vision, **_TOKEN_IDS)
    )


def qwen2_vl_sliding():
    return qwen2_vl(use_sliding_window=True, sliding_window=8, max_window_layers=1)


def qwen2_5_vl():
    vision = {**_PATCH_SIZES, "depth": 1, "hidden_size": 16, "intermediate_size": 16, "num_heads": 2}
    vision |= {"out_hidden_size": 32, "window_size": 16, "fullatt_block_indexes": [0], "tokens_per_second": 2}
    return Qwen2_5_VLForConditionalGeneration(
        Qwen2_5_VLConfig(text_config=_MULTIMODAL, vision_config=vision, **_TOKEN_IDS)
    )


def qwen3_vl():
    # The states of the image come once more after the text model's first layer.
    vision = {**_PATCH_SIZES, "depth": 1, "hidden_size": 16, "intermediate_size": 16, "num_heads": 2}
    vision |= {"out_hidden_size": 32, "num_position_embeddings": 16, "deepstack_visual_indexes": [0]}
    return Qwen3VLForConditionalGeneration(Qwen3VLConfig(text_config=_MULTIMODAL, vision_config=vision, **_TOKEN_IDS))


def llava():
    text = {**TEXT, "model_type": "llama"}
    return LlavaForConditionalGeneration(
        LlavaConfig(text_config=text, vision_config={**_CLIP, **_TOWER}, image_token_index=IMAGE)
    )


def gemma3():
    text = {**TEXT, "sliding_window": 8, "layer_types": ["sliding_attention", "full_attention"]}
    tokens = {"image_token_id": IMAGE, "boi_token_id": VISION_START, "eoi_token_id": VISION_END}
    tokens["tie_word_embeddings"] = False
    return Gemma3ForConditionalGeneration(
        Gemma3Config(text_config=text, vision_config={**_SIGLIP, **_TOWER}, mm_tokens_per_image=4, **tokens)
    )


MULTIMODAL_ROTARY = [qwen2_vl, qwen2_vl_sliding, qwen2_5_vl, qwen3_vl]
MODELS = [*MULTIMODAL_ROTARY, llava, gemma3]


@lru_cache
def build(make):
    torch.manual_seed(0)
    model = make().eval()
    # Some vision towers have a range of their own, and would make an image whisper.
    generator = torch.Generator().manual_seed(0)
    for parameter in model.parameters():
        if parameter.dim() > 1:
            parameter.data.normal_(0, 0.3, generator=generator)
    model.generation_config.eos_token_id = None
    model.generation_config.pad_token_id = 0
    return model


def image_inputs(make, batch_size: int = 1, merged: tuple[int, int] = (2, 4), before: int = 3, after: int = 5) -> dict:
    """Prompts of text, an image and text; each row has a token of text less in front than the one after it.

    `merged` is the image's height and width in tokens; models that count like text take a fixed number of them.
    """
    generator = torch.Generator().manual_seed(1)
    is_grid = make in MULTIMODAL_ROTARY
    height, width = merged if is_grid else (2, 2)
    rows = []
    for row in range(batch_size):
        text = torch.randint(1, VIDEO, (before + after + row,), generator=generator).tolist()
        image = [VISION_START, *[IMAGE] * (height * width)]
        rows.append([*text[after:], *image, VISION_END, *text[:after]] if after else [*text, *image])
    length = max(map(len, rows))
    input_ids = torch.tensor([[0] * (length - len(row)) + row for row in rows])
    mask = torch.tensor([[0] * (length - len(row)) + [1] * len(row) for row in rows])
    inputs = {"input_ids": input_ids, "attention_mask": mask}
    if is_grid:
        patches = 4 * height * width * batch_size
        inputs["pixel_values"] = torch.randn(patches, 3 * 2 * 4 * 4, generator=generator)
        inputs["image_grid_thw"] = torch.tensor([[1, 2 * height, 2 * width]] * batch_size)
        inputs["mm_token_type_ids"] = (input_ids == IMAGE).int()
        return inputs
    inputs["pixel_values"] = torch.randn(batch_size, 3, 8, 8, generator=generator)
    if make is gemma3:
        inputs["token_type_ids"] = (input_ids == IMAGE).int()
    return inputs
