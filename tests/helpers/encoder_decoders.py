"""Tiny random models of every architecture with an encoder and a decoder that writes text, and sources for them.

A type needs an entry here only where the common sizes do not fit it, or where it cannot be decoded speculatively.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from functools import cache

import torch
import transformers as hf
from transformers.models.auto.configuration_auto import CONFIG_MAPPING
from transformers.models.auto.modeling_auto import MODEL_FOR_SEQ_TO_SEQ_CAUSAL_LM_MAPPING_NAMES

from tests.helpers.architectures import build


# Weights with which most of these write varied texts.
_COMMON = {
    "encoder_layers": 2, "encoder_ffn_dim": 96, "encoder_attention_heads": 4, "num_layers": 2,
    "num_decoder_layers": 2, "d_kv": 16, "d_ff": 96, "num_heads": 4, "init_std": 0.05, "initializer_range": 0.05,
    "initializer_factor": 5.0, "is_decoder": False, "is_encoder_decoder": True,
}  # fmt: skip

# Values that a type needs besides or in place of these.
SPECIAL = {
    "bigbird_pegasus": {"attention_type": "original_full"},
    "blenderbot-small": {"init_std": 0.07, "initializer_range": 0.07},
    "blenderbot": {"init_std": 0.5, "initializer_range": 0.5, "encoder_no_repeat_ngram_size": 0},
    "led": {"attention_window": 4},
    "mt5": {"initializer_factor": 3.0},
    "pegasus": {"init_std": 1.0, "initializer_range": 1.0},
    "plbart": {"init_std": 0.07, "initializer_range": 0.07},
    "switch_transformers": {"initializer_factor": 3.0},
}

# Types that cannot be used: what the error says.
UNSUPPORTED = {
    "fsmt": "has no mask for several tokens after its cache",
    "prophetnet": "continues from its cache by one token at a time",
    "t5gemma2": "attends to its text and to its source under one mask",
}

# They count slots, and cannot be told positions.
CHAINS_ONLY = {"bert2bert", "bert2gpt2"}

ROWS = 4
_BERT = {
    "vocab_size": 99, "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2, "num_attention_heads": 4,
}  # fmt: skip
_WAVES = {"conv_dim": (32, 32), "conv_stride": (5, 2), "conv_kernel": (10, 3)}
_WAVES |= {"num_conv_pos_embeddings": 16, "num_conv_pos_embedding_groups": 4}
_BART = {"vocab_size": 99, "d_model": 64, "decoder_layers": 2, "decoder_attention_heads": 4, "decoder_ffn_dim": 64}
_BART |= {"init_std": 0.05, "max_position_embeddings": 128}


def text_types() -> list[str]:
    """Types that read text and are made by their config alone."""
    names = [name for name in MODEL_FOR_SEQ_TO_SEQ_CAUSAL_LM_MAPPING_NAMES if name != "encoder-decoder"]
    return [name for name in names if CONFIG_MAPPING[name]().is_encoder_decoder]


def _random(*shape: int) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(0))


@cache
def _text_source() -> dict[str, torch.Tensor]:
    """Sources of different lengths, padded on the right."""
    input_ids = torch.randint(3, 99, (ROWS, 12), generator=torch.Generator().manual_seed(1))
    mask = torch.ones_like(input_ids)
    mask[1, -5:] = mask[2, -2:] = 0
    return {"input_ids": input_ids * mask, "attention_mask": mask}


def text_model(name: str, **changes) -> tuple[torch.nn.Module, dict[str, torch.Tensor]]:
    """A model of `text_types()`; `changes` are config values."""
    torch.manual_seed(0)
    config_class = CONFIG_MAPPING[name]
    known = {*config_class.__dataclass_fields__, *config_class.attribute_map}
    values = {key: value for key, value in {**_COMMON, **SPECIAL.get(name, {}), **changes}.items() if key in known}
    return ready(hf.AutoModelForSeq2SeqLM.from_config(build(config_class, values))), _text_source()


def _of_two(kind: str, encoder: hf.PreTrainedConfig, decoder: hf.PreTrainedConfig) -> torch.nn.Module:
    config_class, model_class = getattr(hf, f"{kind}Config"), getattr(hf, f"{kind}Model")
    return model_class(config_class.from_encoder_decoder_configs(encoder, decoder))


def _speech_to_text() -> tuple[torch.nn.Module, dict[str, torch.Tensor]]:
    sizes = {**_BART, "encoder_layers": 2, "encoder_attention_heads": 4, "encoder_ffn_dim": 64, "init_std": 0.5}
    config = hf.Speech2TextConfig(
        **sizes, max_source_positions=50, max_target_positions=128, input_feat_per_channel=16, conv_channels=32
    )
    mask = torch.ones(ROWS, 40, dtype=torch.long)
    mask[1, 20:] = 0
    return hf.Speech2TextForConditionalGeneration(config), {
        "input_features": _random(ROWS, 40, 16),
        "attention_mask": mask,
    }


def _speech(name: str):
    config = build(CONFIG_MAPPING[name], {"initializer_range": 0.1})
    return hf.AutoModelForSpeechSeq2Seq.from_config(config), {"input_features": _random(ROWS, 40, 80)}


def _moonshine() -> tuple[torch.nn.Module, dict[str, torch.Tensor]]:
    heads = {"encoder_num_attention_heads": 4, "decoder_num_attention_heads": 4}
    heads |= {"encoder_num_key_value_heads": 4, "decoder_num_key_value_heads": 2}
    layers = {"encoder_num_hidden_layers": 2, "decoder_num_hidden_layers": 2}
    config = hf.MoonshineConfig(
        vocab_size=99, hidden_size=64, intermediate_size=96, initializer_range=0.2, **heads, **layers
    )
    return hf.MoonshineForConditionalGeneration(config), {"input_values": _random(ROWS, 4000)}


def _speecht5() -> tuple[torch.nn.Module, dict[str, torch.Tensor]]:
    parts = {f"{part}_{name}": size for part in ("encoder", "decoder") for name, size in _LAYERS.items()}
    config = hf.SpeechT5Config(
        vocab_size=99, hidden_size=64, initializer_range=0.1, max_text_positions=128, **parts, **_WAVES
    )
    return hf.SpeechT5ForSpeechToText(config), {"input_values": _random(ROWS, 400)}


_LAYERS = {"layers": 2, "ffn_dim": 64, "attention_heads": 4}


def whisper(**changes) -> tuple[hf.WhisperForConditionalGeneration, dict[str, torch.Tensor]]:
    """A model that transcribes windows of 40 frames; `changes` are config values."""
    sizes = {"encoder_layers": 2, "encoder_attention_heads": 4, "encoder_ffn_dim": 64, **_BART, "init_std": 0.1}
    frames = {"max_source_positions": 20, "max_target_positions": 128, "num_mel_bins": 16}
    tokens = {"suppress_tokens": None, "begin_suppress_tokens": None, "pad_token_id": 0, "bos_token_id": 1}
    tokens |= {"eos_token_id": 2, "decoder_start_token_id": 1}
    config = hf.WhisperConfig(**{**sizes, **frames, **tokens, **changes})
    return hf.WhisperForConditionalGeneration(config), {"input_features": _random(ROWS, 16, 40)}


def _udop() -> tuple[torch.nn.Module, dict[str, torch.Tensor]]:
    values = {"d_kv": 16, "d_ff": 64, "num_layers": 2, "num_heads": 4, "image_size": 32, "patch_size": 8}
    model = hf.UdopForConditionalGeneration(build(CONFIG_MAPPING["udop"], {**values, "initializer_factor": 5.0}))
    boxes = torch.rand(ROWS, 12, 4, generator=torch.Generator().manual_seed(0))
    return model, {**_text_source(), "bbox": boxes}


def _florence2() -> tuple[torch.nn.Module, dict[str, torch.Tensor]]:
    stages = {"embed_dim": (16, 32), "num_heads": (2, 4), "num_groups": (2, 4), "depths": (1, 1), "window_size": 4}
    stages |= {"patch_size": (7, 3), "patch_stride": (4, 2), "patch_padding": (3, 1), "patch_prenorm": (False, True)}
    vision = {**stages, "projection_dim": 64, "max_position_embeddings": 20}
    text = {"encoder_layers": 2, "encoder_attention_heads": 4, "encoder_ffn_dim": 64, **_BART, "model_type": "bart"}
    config = hf.Florence2Config(vision_config=vision, text_config={**text, "init_std": 0.1}, image_token_id=98)
    # Of an image of 32 pixels 16 places and their mean are left.
    image = torch.full((ROWS, 17), 98)
    tokens = torch.randint(3, 90, (ROWS, 8), generator=torch.Generator().manual_seed(1))
    source = {"input_ids": torch.cat([image, tokens], dim=1), "pixel_values": _random(ROWS, 3, 32, 32)}
    return hf.Florence2ForConditionalGeneration(config), source


def _bert(initializer_range: float) -> hf.BertConfig:
    return hf.BertConfig(**_BERT, initializer_range=initializer_range)


_OTHERS: dict[str, Callable] = {
    "bert2bert": lambda: (_of_two("EncoderDecoder", _bert(0.3), _bert(0.3)), _text_source()),
    "bert2gpt2": lambda: (
        _of_two(
            "EncoderDecoder",
            _bert(0.2),
            hf.GPT2Config(vocab_size=99, n_embd=64, n_layer=2, n_head=4, initializer_range=0.3),
        ),
        _text_source(),
    ),
    "vit2trocr": lambda: (
        _of_two(
            "VisionEncoderDecoder",
            hf.ViTConfig(**{k: v for k, v in _BERT.items() if k != "vocab_size"}, image_size=32, patch_size=8),
            hf.TrOCRConfig(**{**_BART, "init_std": 0.5}),
        ),
        {"pixel_values": _random(ROWS, 3, 32, 32)},
    ),
    "wav2vec2bart": lambda: (
        _of_two("SpeechEncoderDecoder", hf.Wav2Vec2Config(**_BERT, **_WAVES), hf.BartConfig(**_BART)),
        {"input_values": _random(ROWS, 400)},
    ),
    "canary": lambda: _speech("canary"),
    "cohere_asr": lambda: _speech("cohere_asr"),
    "florence2": _florence2,
    "moonshine": _moonshine,
    "speech_to_text": _speech_to_text,
    "speecht5": _speecht5,
    "udop": _udop,
    "whisper": whisper,
}


def supported() -> list[str]:
    """Names of all types, and of pairs of models, that must work."""
    return [*(name for name in text_types() if name not in UNSUPPORTED), *_OTHERS]


def tiny_model(name: str) -> tuple[torch.nn.Module, dict[str, torch.Tensor]]:
    """A model with fixed random weights, and arguments of `generate()` for four rows."""
    if name not in _OTHERS:
        return text_model(name)
    torch.manual_seed(0)
    model, source = _OTHERS[name]()
    return ready(model), source


def ready(model: torch.nn.Module) -> torch.nn.Module:
    """The model, with varied weights and open-ended texts."""
    with torch.no_grad():
        for parameter in model.parameters():
            # Norms and biases start as constants, which would hide their part.
            if parameter.dim() < 2:
                parameter.add_(0.1 * torch.randn_like(parameter))
    settings = {"pad_token_id": 0, "bos_token_id": 1, "decoder_start_token_id": 1, "num_beams": 1}
    open_ended = ("eos_token_id", "forced_eos_token_id", "forced_bos_token_id", "max_length")
    for key, value in {**settings, **dict.fromkeys(open_ended)}.items():
        setattr(model.generation_config, key, value)
    return model.eval()


def changed(model, share: float) -> torch.nn.Module:
    """A copy whose weights are a little different."""
    torch.manual_seed(5)
    other = copy.deepcopy(model)
    with torch.no_grad():
        for weight in other.parameters():
            if weight.dim() > 1:
                weight.add_(share * weight.std() * torch.randn_like(weight))
    return other


class CopySource:
    """A processor that lets a model write its source, a row of tokens."""

    def __init__(self, source: torch.LongTensor):
        self.source = source

    def __call__(self, input_ids, scores):
        scores[:, self.source[input_ids.shape[1] - 1]] += 1e4
        return scores


# Settings that read the source, force tokens, and end rows apart.
SETTINGS = {
    "ends": {"eos_token_id": [7, 11, 13, 17, 19, 23, 29, 31, 37, 41, 43, 47], "no_repeat_ngram_size": 2},
    "forced": {"forced_bos_token_id": 5, "forced_eos_token_id": 2, "no_repeat_ngram_size": 3},
    "source": {"encoder_no_repeat_ngram_size": 1, "encoder_repetition_penalty": 1.5, "repetition_penalty": 1.3},
}

# Three tokens, at a temperature at which models of random weights have a choice.
THREE = (5, 6, 7)


def sampling_of_three(model, temperature: float) -> dict:
    suppressed = [token for token in range(model.config.vocab_size) if token not in THREE]
    return {"do_sample": True, "max_new_tokens": 4, "suppress_tokens": suppressed, "temperature": temperature}


def probabilities_of_three(model, source: dict, temperature: float) -> dict[tuple[int, ...], float]:
    """Of all texts of three tokens out of three."""
    encoded, probs = model.get_encoder()(**source), {(): 1.0}
    for _ in range(3):
        texts = torch.tensor([[model.generation_config.decoder_start_token_id, *path] for path in probs])
        states = encoded.last_hidden_state.expand(len(texts), -1, -1)
        mask = source["attention_mask"].expand(len(texts), -1)
        with torch.no_grad():
            logits = model(encoder_outputs=(states,), attention_mask=mask, decoder_input_ids=texts).logits[:, -1]
        nexts = (logits[:, THREE].double() / temperature).softmax(-1).tolist()
        probs = {
            (*path, token): probs[path] * p for path, row in zip(list(probs), nexts) for token, p in zip(THREE, row)
        }
    return probs
