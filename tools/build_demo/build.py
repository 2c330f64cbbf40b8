"""Stages that build the models of the embedded demo: a byte-level BPE tokenizer, a small Llama target, and its drafts.

    python -m tools.build_demo --output DIR

The target learns next-token prediction on Python sources and editing documents. The draft model learns the same, then
is distilled on sources and on the target's own continuations, which is what it will have to predict. Heads learn from
these continuations. All use the frame and the recipes of `hf-specdec train`. Written are `DIR/target` (with the
tokenizer), `DIR/draft` and a folder for each kind of heads, in bfloat16.
"""

from __future__ import annotations

import argparse
import copy
import itertools
import math
import random
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from datasets import Dataset, concatenate_datasets
from rich.console import Console
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers, trainers
from torch.utils.data import DataLoader
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedModel, PreTrainedTokenizerFast, set_seed

from hf_specdec import record
from hf_specdec.candidate_generators.dflash.recipe import DFlashRecipe
from hf_specdec.candidate_generators.draft_model.recipe import DraftModelRecipe
from hf_specdec.candidate_generators.eagle.recipe import Eagle1Recipe, Eagle3Recipe
from hf_specdec.candidate_generators.medusa.recipe import MedusaRecipe
from hf_specdec.candidate_generators.mlp_speculator.recipe import MLPSpeculatorRecipe
from hf_specdec.candidate_generators.mtp.recipe import MtpRecipe
from hf_specdec.training.arguments import DraftTrainingArguments
from hf_specdec.training.reading import collate
from hf_specdec.training.recipe import Acceptance, Recipe
from hf_specdec.training.text import continue_prompts, learned_tokens, rows_of, split
from hf_specdec.training.trainer import DraftTrainer

from . import attention as _attention  # noqa: F401 - registers blockwise_causal
from .data import (
    Batches,
    Corpus,
    EditDocuments,
    Encode,
    Mixture,
    TokenRows,
    collect_snippets,
    own_batch,
    python_sources,
)


END_OF_TEXT = "<|endoftext|>"
CONTEXT_LENGTH = 2048
CONTINUATIONS = "continuations.parquet"
# Names keep their underscores and a leading blank or dot; digits come in threes; indentation is one token.
WORDS = r"[ .]?[\p{L}_]+| ?\p{N}{1,3}| ?[^\s\p{L}\p{N}_]+|\s+(?!\S)|\s+"

# Numbers of the other seeded draws, beside those of the training stages.
CONTINUING, TEXT_ROWS = 5, 8


@dataclass(frozen=True)
class Stage:
    """
    A stage of training.

    Args:
        number (`int`): Distinguishes its draws of weights and data from those of the other stages.
        steps (`int`): Training steps.
        learning_rate (`float`): Peak learning rate.
        minutes (`float`, *optional*): Time limit.
        copying_steps (`int`): Steps of a first phase on short rows that repeat a passage: they teach a model in
            minutes to look up what followed a token before, and long rows of code alone would take hours. The smaller
            the model, the more of them it needs.
        recipe ([`Recipe`], *optional*): Sizes and losses of heads.
        batch_size (`int`): Rows of continuations in a batch of heads.
        text_rows (`int`): Rows of sources and editing documents for heads to learn from besides the continuations.
    """

    number: int
    steps: int
    learning_rate: float
    minutes: float | None = None
    copying_steps: int = 0
    recipe: Recipe | None = None
    batch_size: int = 8
    text_rows: int = 0


_MEDUSA = MedusaRecipe(num_heads=4, max_positions=1024)
_MLP_SPECULATOR = MLPSpeculatorRecipe(n_predict=4, inner_dim=64, max_positions=1024)
_EAGLE = Eagle1Recipe(ttt_steps=3, intermediate_size=160, noise=0.0, token_weight=1.0)
_EAGLE3 = Eagle3Recipe(ttt_steps=4, intermediate_size=128, own_head=False, aux_layer_ids=(1, 3, 5))
_DFLASH = DFlashRecipe(
    block_size=8, num_layers=2, intermediate_size=80, target_layer_ids=(0, 2, 4), head_decay=0.8, num_anchors=32
)
_MTP = MtpRecipe(intermediate_size=380)

STAGES: Mapping[str, Stage] = {
    "target": Stage(1, 2082, 3e-3, copying_steps=600),
    "refine": Stage(4, 1184, 2e-3),
    "draft": Stage(2, 2300, 4e-3, copying_steps=1500),
    "distill": Stage(3, 827, 2e-3),
    "medusa": Stage(6, 1903, 6e-3, recipe=_MEDUSA, batch_size=64),
    "mlp_speculator": Stage(7, 5426, 1e-2, recipe=_MLP_SPECULATOR, batch_size=64, text_rows=4000),
    "eagle": Stage(9, 2244, 8e-3, recipe=_EAGLE),
    "eagle3": Stage(10, 2280, 1.5e-2, recipe=_EAGLE3),
    "dflash": Stage(11, 4823, 1.5e-2, recipe=_DFLASH),
    "mtp": Stage(12, 2600, 8e-3, recipe=_MTP),
}
HEADS = tuple(name for name, stage in STAGES.items() if stage.recipe is not None)


@dataclass(frozen=True)
class Plan:
    """
    Sizes and lengths of the shipped models.

    Args:
        vocab_size (`int`): Tokens of the tokenizer: all bytes, `<|endoftext|>` with id 0, and merges.
        target, draft (`dict`): Arguments of `LlamaConfig`.
        stages (`dict[str, Stage]`): The stages of training.
        copying, code, refining ([`Mixture`]): Rows of the first steps, of the later steps, and of the refinement and
            distillation, which have no repeated passages: these also teach to repeat without need.
        num_prompts (`int`): Prompts that the target continues, for its drafts to learn from.
        row_length (`int`): Most tokens of a prompt and its continuation.
        new_tokens (`int`): Most tokens of a continuation.
        continued_share (`float`): How often a distillation batch is made of such rows.
        seed (`int`): Seed of weights and data.
        bf16 (`bool`): Train in bfloat16 autocast.
    """

    vocab_size: int = 4096
    target: Mapping[str, int] = field(
        default_factory=lambda: {
            "hidden_size": 256,
            "intermediate_size": 480,
            "num_hidden_layers": 5,
            "num_attention_heads": 4,
            "num_key_value_heads": 2,
        }
    )
    draft: Mapping[str, int] = field(
        default_factory=lambda: {
            "hidden_size": 128,
            "intermediate_size": 256,
            "num_hidden_layers": 2,
            "num_attention_heads": 4,
            "num_key_value_heads": 2,
        }
    )
    stages: Mapping[str, Stage] = field(default_factory=lambda: STAGES)
    copying: Mixture = Mixture({128: 1.0}, tokens_per_batch=2048, repeat_share=0.75)
    code: Mixture = Mixture({256: 0.25, 512: 0.5, 1024: 0.17, 2048: 0.08}, edit_share=0.4, repeat_share=0.05)
    refining: Mixture = Mixture({256: 0.2, 512: 0.5, 1024: 0.22, 2048: 0.08}, edit_share=0.45)
    num_prompts: int = 16384
    row_length: int = 576
    new_tokens: int = 128
    continued_share: float = 0.3
    seed: int = 0
    bf16: bool = True


# Plain language-model training.
NEXT_TOKEN = DraftModelRecipe(from_scratch={}, kl_weight=0.0)


class Build:
    """
    The stages, each of which reads and writes the folder `output`.

    Args:
        plan ([`Plan`]): Sizes and lengths.
        output (`Path`): Folder for the checkpoints.
        corpus ([`Corpus`], *optional*): Texts; the standard library's sources by default.
    """

    def __init__(self, plan: Plan, output: Path, corpus: Corpus | None = None):
        self.plan, self.output = plan, output
        self.console = Console()
        self.corpus = corpus or python_sources()
        self.tokenizer = train_tokenizer(self.corpus.train, plan.vocab_size)
        self.encode = plain_encode(self.tokenizer)
        self.snippets = collect_snippets(self.corpus.train)

    def run(self, name: str) -> None:
        """Runs one stage by its name."""
        if name in HEADS:
            self.train_heads(name)
        else:
            {
                "target": lambda: self.train_model("target", self.plan.target),
                "refine": self.refine_target,
                "draft": lambda: self.train_model("draft", self.plan.draft),
                "continue": self.continue_prompts,
                "distill": self.distill_draft,
                "evaluate": self.evaluate,
            }[name]()

    def rows(self, number: int) -> TokenRows:
        """Returns the rows of a stage; every stage has its own order of data."""
        seed = 1000 * self.plan.seed + number
        edits = EditDocuments(self.snippets, seed)
        return TokenRows(self.corpus.train, edits, self.encode, self.tokenizer.eos_token_id, seed)

    def arguments(self, name: str, **changed: Any) -> DraftTrainingArguments:
        stage = self.plan.stages[name]
        settings = {"max_steps": stage.steps, "learning_rate": stage.learning_rate, "max_minutes": stage.minutes}
        settings |= {"warmup_steps": 100, "weight_decay": 0.1, "muon": True, "bf16": self.plan.bf16}
        settings |= {"seed": self.plan.seed + stage.number, "save_strategy": "no", "use_cpu": True}
        return DraftTrainingArguments(str(self.output / f"{name}_training"), **settings | changed)

    def train_on_batches(
        self,
        recipe: Recipe,
        network: PreTrainedModel,
        target: PreTrainedModel | None,
        arguments: DraftTrainingArguments,
        batches: Iterator[dict[str, torch.Tensor]],
    ) -> None:
        """Trains a whole model on batches of any size."""
        arguments.per_device_train_batch_size = 1
        DraftTrainer(recipe, network, target, arguments, Batches(batches), data_collator=own_batch).train()
        network.eval()

    def train_model(self, name: str, sizes: Mapping[str, int]) -> None:
        """Trains the target or the draft model from scratch: first on copying, then on code."""
        stage = self.plan.stages[name]
        set_seed(self.plan.seed + stage.number)
        config = LlamaConfig(
            vocab_size=len(self.tokenizer),
            max_position_embeddings=CONTEXT_LENGTH,
            tie_word_embeddings=True,
            bos_token_id=self.tokenizer.bos_token_id,
            eos_token_id=self.tokenizer.eos_token_id,
            attn_implementation="blockwise_causal",
            **sizes,
        )
        model = LlamaForCausalLM(config)
        model.generation_config.pad_token_id = self.tokenizer.pad_token_id
        # The draft model is trained on in distillation, and so ends at a higher rate.
        arguments = self.arguments(name, lr_scheduler_kwargs={"min_lr_rate": 0.02 if name == "target" else 0.25})
        self.train_on_batches(NEXT_TOKEN, model, None, arguments, self.first_batches(stage))
        self.save(model, name)

    def first_batches(self, stage: Stage) -> Iterator[dict[str, torch.Tensor]]:
        rows = self.rows(stage.number)
        copying = itertools.islice(rows.batches(self.plan.copying), stage.copying_steps)
        return itertools.chain(copying, rows.batches(self.plan.code))

    def refine_target(self) -> None:
        """Trains the target on, at a lower learning rate and without repeated passages."""
        model = self.load("target")
        batches = self.rows(self.plan.stages["refine"].number).batches(self.plan.refining)
        self.train_on_batches(NEXT_TOKEN, model, None, self.arguments("refine"), batches)
        self.save(model, "target")

    def continue_prompts(self) -> Dataset:
        """Lets the target write what its drafts learn from, and keeps it beside the checkpoints."""
        plan = self.plan
        set_seed(plan.seed + CONTINUING)
        rows = continue_prompts(
            self.frozen_target("sdpa"),
            self.prompts(plan.num_prompts, plan.row_length),
            plan.row_length,
            sampled_share=1 / 4,
            max_new_tokens=plan.new_tokens,
            batch_size=64,
            show_progress=True,
        )
        continuations = rows_of(rows)
        continuations.to_parquet(str(self.output / CONTINUATIONS))
        return continuations

    def prompts(self, count: int, length: int) -> list[list[int]]:
        """
        Draws prompts like those of the demo: half of them edits to be made, the others windows of the sources and
        beginnings of files and definitions, all of at most 60 % of `length` tokens.
        """
        rows = self.rows(CONTINUING)
        choose = random.Random(self.plan.seed)
        longest = int(0.6 * length)
        found: list[list[int]] = []
        while len(found) < count:
            kind = choose.random()
            if kind < 0.5:
                size = int(choose.uniform(0.5, 2.0) * longest * rows.chars_per_token)
                prompt = self.encode(edit_prompt(rows.edits.draw(size)))
                if len(prompt) > longest:
                    continue
            else:
                size = choose.randint(min(24, longest // 2), longest)
                if kind < 0.8:
                    prompt = rows.source_row(size).tolist()
                else:
                    texts = self.corpus.train if kind < 0.9 else [choose.choice(self.snippets).text]
                    prompt = self.encode(choose.choice(texts)[: 8 * size])[:size]
            found.append(prompt)
        return found

    def continuations(self) -> tuple[Dataset, Dataset]:
        """Returns rows that the target wrote: those to train on, and those to measure acceptance on."""
        path = self.output / CONTINUATIONS
        rows = Dataset.from_parquet(str(path)) if path.is_file() else self.continue_prompts()
        return split(rows, 0.04, self.plan.seed)

    def distill_draft(self) -> None:
        """Brings the draft model closer to the target: on its continuations, and on the sources."""
        stage = self.plan.stages["distill"]
        draft = self.load("draft")
        recipe = DraftModelRecipe(draft_model=str(self.output / "draft"))
        batches = self.distillation_batches(self.rows(stage.number), self.continuations()[0])
        self.train_on_batches(recipe, draft, self.frozen_target(), self.arguments("distill"), batches)
        self.save(draft, "draft")

    def distillation_batches(self, rows: TokenRows, continued: Dataset) -> Iterator[dict[str, torch.Tensor]]:
        plan = self.plan
        choose = torch.Generator().manual_seed(plan.seed)
        count = max(1, plan.refining.tokens_per_batch // plan.row_length)
        continuations = itertools.chain.from_iterable(
            DataLoader(continued.shuffle(epoch), batch_size=count, collate_fn=collate) for epoch in itertools.count()
        )
        for batch in rows.batches(plan.refining):
            yield next(continuations) if torch.rand((), generator=choose) < plan.continued_share else batch

    def train_heads(self, name: str) -> Acceptance:
        """Trains heads on the target's continuations."""
        stage, plan = self.plan.stages[name], self.plan
        recipe = stage.recipe
        rows, held_out = self.continuations()
        if stage.text_rows:
            text = self.rows(TEXT_ROWS)
            tokens = (text.row(plan.row_length, plan.refining) for _ in range(stage.text_rows))
            rows = concatenate_datasets([rows, rows_of({"tokens": row, "prompt_length": 0} for row in tokens)])
        rows = rows.add_column("index", range(len(rows)))
        set_seed(plan.seed + stage.number)
        target = self.frozen_target()
        network = recipe.build(target)
        recipe.prepare(network, target, learned_tokens(rows))
        settings = {"warmup_steps": 50, "weight_decay": recipe.weight_decay, "muon": recipe.muon}
        # Several states of every token would fill the memory.
        settings |= {"keep_states": len(recipe.states_for(network)) == 1}
        arguments = self.arguments(name, per_device_train_batch_size=stage.batch_size, **settings)
        trainer = DraftTrainer(recipe, network, target, arguments, rows, held_out)
        trainer.train()
        # As it will draft: from rounded weights.
        network.to(target.dtype)
        acceptance = trainer.measure(held_out)
        recipe.save(network, self.output / name, target_name="hf_specdec/demo/target", acceptance=acceptance)
        depths = ", ".join(f"{share:.3f}" for share in acceptance.accuracies)
        self.console.print(
            f"{name}: {acceptance.tokens_per_cycle:.3f} tokens per cycle on held-out continuations; drafts right at "
            f"depth 1, 2, ...: {depths}"
        )
        return acceptance

    def evaluate(self, prompts_per_kind: int = 8) -> dict[str, float]:
        """Prints the figures of target and draft model on the held-out files, and returns them."""
        figures = {}
        target, draft = (self.load(name, "sdpa").eval() for name in ("target", "draft"))
        for name, model in (("target", target), ("draft", draft)):
            loss, bits = validation_loss(model, self.encode, self.corpus.validation, self.tokenizer.eos_token_id)
            figures |= {f"{name}_loss": loss, f"{name}_bits_per_byte": bits}
        for kind, prompts in self.held_out_prompts(prompts_per_kind).items():
            lengths = [acceptance_length(target, draft, prompt) for prompt in prompts]
            figures[f"{kind}_acceptance_length"] = sum(lengths) / len(lengths)
        for name, figure in figures.items():
            self.console.print(f"{name}: {figure:.3f}")
        return figures

    def held_out_prompts(self, count: int, max_tokens: int = 400) -> dict[str, list[torch.LongTensor]]:
        """Returns prompts from the validation files: windows to complete, and editing documents without their end."""
        choose = random.Random(self.plan.seed)
        complete, edit = [], []
        for text in choose.choices(self.corpus.validation, k=count):
            tokens = self.encode(text)
            start = choose.randrange(max(1, len(tokens) - max_tokens))
            complete.append(torch.tensor([tokens[start : start + max_tokens // 2]]))
        documents = EditDocuments(collect_snippets(self.corpus.validation), self.plan.seed)
        while len(edit) < count:
            tokens = self.encode(edit_prompt(documents.draw(2400)))
            if len(tokens) <= max_tokens:
                edit.append(torch.tensor([tokens]))
        return {"complete": complete, "edit": edit}

    def save(self, model: PreTrainedModel, name: str) -> None:
        """Writes a bfloat16 copy of a model, and the tokenizer beside target and draft model."""
        copy.deepcopy(model).to(torch.bfloat16).save_pretrained(self.output / name)
        if name in ("target", "draft"):
            self.tokenizer.save_pretrained(self.output / name)

    def load(self, name: str, attention: str = "blockwise_causal", dtype: torch.dtype = torch.float32):
        """Loads a model, by default to train it on."""
        return LlamaForCausalLM.from_pretrained(self.output / name, dtype=dtype, attn_implementation=attention)

    def frozen_target(self, attention: str = "blockwise_causal") -> LlamaForCausalLM:
        """Loads the target as its drafts learn from it."""
        dtype = torch.bfloat16 if self.plan.bf16 else torch.float32
        return self.load("target", attention, dtype).requires_grad_(False).eval()


def train_tokenizer(texts: Sequence[str], vocab_size: int) -> PreTrainedTokenizerFast:
    """Trains a byte-level BPE tokenizer that gives every text back exactly."""
    if vocab_size < 257:
        raise SystemExit(f"The vocabulary must hold all bytes and {END_OF_TEXT}: at least 257 tokens.")
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(WORDS), behavior="isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=[END_OF_TEXT],
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    tokenizer.train_from_iterator(texts, trainer)
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        bos_token=END_OF_TEXT,
        eos_token=END_OF_TEXT,
        pad_token=END_OF_TEXT,
        clean_up_tokenization_spaces=False,
        model_max_length=CONTEXT_LENGTH,
        padding_side="left",
    )


def plain_encode(tokenizer: PreTrainedTokenizerFast) -> Encode:
    """Returns a function from text to token ids that adds no special tokens and never warns of long texts."""
    return lambda text: tokenizer.backend_tokenizer.encode(text, add_special_tokens=False).ids


def edit_prompt(document: str) -> str:
    """Cuts an editing document after its last heading, where the edited code is to be written."""
    start = max(document.rfind(heading) for heading in ("\n# copy\n", "\n# rename ", "\n# remove the "))
    return document[: document.index("\n", start + 1) + 1]


@torch.no_grad()
def validation_loss(
    model: PreTrainedModel, encode: Encode, texts: Sequence[str], eos_token_id: int, length: int = 1024
) -> tuple[float, float]:
    """Returns the mean loss per token in nats and the bits per byte of `texts`, read in rows of `length` tokens."""
    tokens = torch.tensor([token for text in texts for token in [*encode(text), eos_token_id]])
    total, count = 0.0, 0
    for row in tokens.split(length):
        if len(row) > 1:
            logits = model(row[None, :-1], use_cache=False).logits[0].float()
            total += F.cross_entropy(logits, row[1:], reduction="sum").item()
            count += len(row) - 1
    num_bytes = sum(len(text.encode()) for text in texts)
    return total / count, total / math.log(2) / num_bytes


def acceptance_length(
    target: PreTrainedModel, draft: PreTrainedModel, prompt: torch.LongTensor, k: int = 4, max_new_tokens: int = 128
) -> float:
    """Returns the mean acceptance length of greedy generation with `k` draft tokens after a prompt `(1, T)`."""
    with record() as calls:
        target.generate(
            prompt,
            attention_mask=torch.ones_like(prompt),
            do_sample=False,
            max_new_tokens=max_new_tokens,
            spec_method="draft_model",
            spec_model=draft,
            num_speculative_tokens=k,
        )
    return calls.calls[0].stats.mean_acceptance_length


def main(arguments: Sequence[str] | None = None) -> None:
    names = ("target", "refine", "draft", "continue", "distill", *HEADS, "evaluate")
    parser = argparse.ArgumentParser(
        prog="python -m tools.build_demo",
        description="Train the embedded demo: tokenizer, target, draft model, and heads of every kind.",
    )
    parser.add_argument("--output", required=True, type=Path, help="folder for the checkpoints")
    parser.add_argument("--sources", type=Path, help="folder of .py files (default: the standard library)")
    parser.add_argument(
        "--stages",
        nargs="+",
        choices=names,
        default=names,
        help="stages to run; later ones read what earlier ones left in the output folder",
    )
    for name, stage in STAGES.items():
        flag = name.replace("_", "-")
        parser.add_argument(f"--{flag}-steps", type=int, default=stage.steps)
        parser.add_argument(f"--{flag}-minutes", type=float, help=f"time limit of the {name} stage")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--threads", type=int, default=1, help="threads of torch")
    parser.add_argument("--no-bf16", dest="bf16", action="store_false", help="train in float32")
    given = parser.parse_args(arguments)

    torch.set_num_threads(given.threads)
    stages = {
        name: replace(stage, steps=getattr(given, f"{name}_steps"), minutes=getattr(given, f"{name}_minutes"))
        for name, stage in STAGES.items()
    }
    build = Build(Plan(stages=stages, seed=given.seed, bf16=given.bf16), given.output, python_sources(given.sources))
    start = time.monotonic()
    for name in names:
        if name in given.stages:
            build.run(name)
    build.console.print(f"finished after {(time.monotonic() - start) / 60:.1f} minutes")
