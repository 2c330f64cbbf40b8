"""A draft model for the demo's target that has another tokenizer, for the tests of drafts of another vocabulary.

    python -m tools.build_demo.other_tokenizer --output tests/fixtures/other_tokenizer

Its tokenizer is of the kind of SentencePiece: blanks are written as U+2581, and rare characters are spelled as bytes,
where the target's is a byte-level BPE. It learns as the demo's own draft model does before that is distilled.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from tokenizers import Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, trainers
from transformers import PreTrainedModel, PreTrainedTokenizerFast

from .build import CONTEXT_LENGTH, STAGES, WORDS, Build, Plan, Stage, plain_encode


SPECIAL = ("<unk>", "<s>", "</s>")
BYTES = tuple(f"<0x{byte:02X}>" for byte in range(256))

PLAN = Plan(
    vocab_size=1536,
    draft={
        "hidden_size": 96,
        "intermediate_size": 192,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
    },
    stages={**STAGES, "draft": Stage(13, 1936, 5e-3, copying_steps=1600)},
)


def train_marked_tokenizer(texts: Sequence[str], vocab_size: int) -> PreTrainedTokenizerFast:
    """Trains a BPE tokenizer on characters, which spells those that it does not know as bytes."""
    words = WORDS
    for blank, marked in ((r"\S", r"[^\s▁]"), (r"[^\s\p", r"[^\s▁\p"), (" ", "▁"), (r"\s+", r"[\s▁]+")):
        words = words.replace(blank, marked)
    parts = {
        "normalizer": normalizers.Replace(" ", "▁"),
        "pre_tokenizer": pre_tokenizers.Split(Regex(words), behavior="isolated"),
        "decoder": decoders.Sequence([decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()]),
    }
    learner = _assembled(Tokenizer(models.BPE(unk_token=SPECIAL[0])), parts)
    size = vocab_size - len(BYTES)
    trainer = trainers.BpeTrainer(
        vocab_size=size, special_tokens=list(SPECIAL), limit_alphabet=128, show_progress=False
    )
    learner.train_from_iterator(texts, trainer)
    learnt = json.loads(learner.to_str())["model"]
    tokens = sorted(learnt["vocab"], key=learnt["vocab"].get)
    tokens[len(SPECIAL) : len(SPECIAL)] = BYTES
    model = models.BPE(
        vocab={token: index for index, token in enumerate(tokens)},
        merges=list(map(tuple, learnt["merges"])),
        unk_token=SPECIAL[0],
        byte_fallback=True,
    )
    unknown, begin, end = SPECIAL
    return PreTrainedTokenizerFast(
        tokenizer_object=_assembled(Tokenizer(model), parts),
        unk_token=unknown,
        bos_token=begin,
        eos_token=end,
        pad_token=end,
        clean_up_tokenization_spaces=False,
        model_max_length=CONTEXT_LENGTH,
        padding_side="left",
    )


def _assembled(tokenizer: Tokenizer, parts: dict) -> Tokenizer:
    for name, part in parts.items():
        setattr(tokenizer, name, part)
    return tokenizer


class OtherTokenizerBuild(Build):
    """Builds the draft model with the tokenizer beside it."""

    def __init__(self, plan: Plan, output: Path):
        super().__init__(plan, output)
        self.tokenizer = train_marked_tokenizer(self.corpus.train, plan.vocab_size)
        self.encode = plain_encode(self.tokenizer)

    def save(self, model: PreTrainedModel, name: str) -> None:
        super().save(model, ".")
        self.tokenizer.save_pretrained(self.output)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument("--output", type=Path, required=True, help="folder for model and tokenizer")
    parser.add_argument("--steps", type=int, help="training steps")
    given = parser.parse_args()
    plan = PLAN
    if given.steps:
        plan = replace(plan, stages={**plan.stages, "draft": replace(plan.stages["draft"], steps=given.steps)})
    OtherTokenizerBuild(plan, given.output).train_model("draft", plan.draft)


if __name__ == "__main__":
    main()
