"""Prompts with an image for tiny models of `architectures.py`, whose image towers are made smaller still.

Most types read images in one of two ways: as squares, each of as many tokens as the model says, or as rows of patches
with the size of the grid they form.
"""

from __future__ import annotations

import inspect
from functools import lru_cache

import torch
from transformers import AutoModelForImageTextToText
from transformers.models.auto.configuration_auto import CONFIG_MAPPING

from tests.helpers.architectures import SPECIAL, tiny_model


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
_BESIDE = "sizes or masks with an image"
NOT_TRIED = {
    **dict.fromkeys(
        (
            "deepseek_ocr2 hunyuan_vl hy_v4_vl inkling2 inkling_mm_model kimi_k25 kosmos-2.5 lfm2_vl molmo2 "
            "muse_glimmer muse_spark nemotron_h_omni paddleocr_vl"
        ).split(),
        _PATCHES,
    ),
    **dict.fromkeys(
        "granite4_vision granite_docling minicpm_ocr minicpmv4_6 minicpmv4_7 mistral3 mistral_large4".split(), _BESIDE
    ),
    "apertus1p5": "images as tokens of the vocabulary",
    "aya_vision": "another number of patches",
    "chameleon": "images as tokens of the vocabulary",
    "deepseek_vl_hybrid": "an image in two sizes",
    "mistral4": "no image tower by itself",
    "shieldgemma2": "an image that changes the text of a model as small",
}

# Those that take several images of a row, each in a dimension more: how many.
_SEVERAL = {"idefics2": 1, "idefics3": 1, "smolvlm": 1, "llava_next": 2, "llava_next_video": 2, "llava_onevision": 2}

# Values that reading such small images needs.
_SPECIAL = {
    "gemma3": {"mm_tokens_per_image": 4},
    # The states of the image come once more after the text model's first layer.
    "qwen3_vl": {"vision_config": {"deepstack_visual_indexes": [0]}},
    "aria": {"projector_patch_to_query_dict": {_GRID**2: 4}},
    "llava_next": {"image_grid_pinpoints": [[56, 56]]},
    "llava_next_video": {"image_grid_pinpoints": [[56, 56]]},
    "llava_onevision": {"image_grid_pinpoints": [[56, 56]]},
    "paligemma": {"projection_dim": 64},
    "vipllava": {"vision_feature_layers": [-1, -2]},
}


# Types whose own generate() reads the image, and passes all else on to that of their language model.
BY_LANGUAGE_MODEL = ("blip-2", "instructblip", "instructblipvideo")

# Multimodal rotary positions, some with windows or with states that come again between layers; positions like those of
# text; and image tokens that see each other.
MODELS = ["qwen2_vl", "qwen2_5_vl", "qwen3_vl", "llava", "gemma3"]

TESTED = sorted({*TYPES, *BY_LANGUAGE_MODEL, *MODELS})

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


@lru_cache(maxsize=8)
def build(name: str) -> torch.nn.Module:
    """A model of `TYPES` or `MODELS` whose image tokens are in its vocabulary."""
    default = CONFIG_MAPPING[name]()
    changes = {key: value for key, value in _TOKENS.items() if hasattr(default, key)} | _SPECIAL.get(name, {})
    vision, own = getattr(default, "vision_config", None), SPECIAL.get(name, {}).get("vision_config", {})
    own = {**own, **changes.get("vision_config", {})}
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
    # Gemma 3's projection of images begins as zeros.
    for parameter in model.parameters():
        if not parameter.any():
            parameter.data.normal_(0, 0.3, generator=torch.Generator().manual_seed(0))
    model.generation_config.eos_token_id, model.generation_config.pad_token_id = None, 0
    return model


def image_inputs(
    name: str, batch_size: int = 1, grid: tuple[int, int] = (_GRID, _GRID), after: int = 5
) -> dict[str, torch.Tensor]:
    """Left-padded prompts of text, an image of so many patches, where the type has a choice, and text."""
    model = build(name)
    draw = torch.Generator().manual_seed(3)
    vision, read = model.config.vision_config, set(inspect.signature(model.forward).parameters)
    features = inspect.signature(model.model.get_image_features).parameters
    inputs: dict[str, torch.Tensor] = {}
    if "image_grid_thw" in features:
        merge = getattr(vision, "spatial_merge_size", None) or getattr(vision, "merge_size", 1)
        channels, frames = getattr(vision, "in_channels", 3), getattr(vision, "temporal_patch_size", 1)
        columns = channels * frames * vision.patch_size**2
        inputs["pixel_values"] = torch.randn(batch_size * grid[0] * grid[1], columns, generator=draw)
        inputs["image_grid_thw"] = torch.tensor([[1, *grid]] * batch_size)
        if "image_merge_sizes" in features:
            inputs["image_merge_sizes"] = torch.tensor([merge] * batch_size)
        count = grid[0] * grid[1] // merge**2
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
        end = [VISION_END, *text[:after]] if after else []
        rows.append([*text[after:], VISION_START, *[IMAGE] * count, *end])
    width = max(map(len, rows))
    inputs["input_ids"] = torch.tensor([[0] * (width - len(row)) + row for row in rows])
    inputs["attention_mask"] = torch.tensor([[0] * (width - len(row)) + [1] * len(row) for row in rows])
    for name in {"mm_token_type_ids", "token_type_ids"} & read:
        inputs[name] = (inputs["input_ids"] == IMAGE).int()
    return inputs
