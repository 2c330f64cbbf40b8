"""The recipe of the embedded demo: a byte-level BPE tokenizer, a small Llama target, and its drafts.

The target learns next-token prediction on Python sources and editing documents. The draft model learns the same, then
is distilled on sources and on the target's own continuations, which is what it will have to predict. Heads (Medusa,
MLP speculator, EAGLE, DFlash, MTP) learn from these continuations. All use the frame and the recipes of
`hf-specdec train`.

    python -m hf_specdec.training.demo --output DIR

writes `DIR/target` (with the tokenizer), `DIR/draft` and a folder for each kind of heads, in bfloat16.
"""

from __future__ import annotations

import argparse
import copy
import itertools
import math
import random
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, fields
from pathlib import Path

import torch
import torch.nn.functional as F
from rich.console import Console
from rich.progress import Progress, track
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedModel, PreTrainedTokenizerFast, set_seed

from hf_specdec.candidate_generators.dflash.recipe import DFlashRecipe
from hf_specdec.candidate_generators.draft_model.recipe import DraftModelRecipe
from hf_specdec.candidate_generators.eagle.recipe import Eagle1Recipe, Eagle3Recipe
from hf_specdec.candidate_generators.mtp.recipe import MtpRecipe
from hf_specdec.errors import SpecConfigError
from hf_specdec.training import attention as _attention  # noqa: F401 - registers blockwise_causal
from hf_specdec.training.data import (
    Corpus,
    EditDocuments,
    Encode,
    Mixture,
    TokenRows,
    collect_snippets,
    python_sources,
)
from hf_specdec.training.heads import MedusaRecipe, MLPSpeculatorRecipe
from hf_specdec.training.recipe import Acceptance, Batch, Recipe, TargetReader
from hf_specdec.training.text import Rows, continue_prompts
from hf_specdec.training.trainer import TrainingOptions, train


END_OF_TEXT = "<|endoftext|>"
CONTEXT_LENGTH = 2048
CONTINUATIONS = "continuations.pt"
HEADS = ("medusa", "mlp_speculator", "eagle", "eagle3", "dflash", "mtp")
STAGES = ("target", "refine", "draft", "continue", "distill", *HEADS, "evaluate")
TRAINED = ("target", "refine", "draft", "distill", *HEADS)
# Names keep their underscores and a leading blank or dot; digits come in threes; indentation is one token.
WORDS = r"[ .]?[\p{L}_]+| ?\p{N}{1,3}| ?[^\s\p{L}\p{N}_]+|\s+(?!\S)|\s+"


@dataclass(frozen=True)
class DemoRecipe:
    """
    Sizes and lengths of the recipe of the shipped models.

    Args:
        vocab_size (`int`): Tokens of the tokenizer, with its one special token.
        target, draft (`dict`): Arguments of `LlamaConfig`.
        medusa ([`MedusaRecipe`]), mlp_speculator ([`MLPSpeculatorRecipe`]), eagle ([`Eagle1Recipe`]), eagle3
            ([`Eagle3Recipe`]), dflash ([`DFlashRecipe`]), mtp ([`MtpRecipe`]): Sizes and losses of the heads.
        target_steps, refine_steps, draft_steps, distill_steps, medusa_steps, mlp_speculator_steps, eagle_steps,
            eagle3_steps, dflash_steps, mtp_steps (`int`): Training steps of the stages.
        target_minutes, refine_minutes, draft_minutes, distill_minutes, medusa_minutes, mlp_speculator_minutes,
            eagle_minutes, eagle3_minutes, dflash_minutes, mtp_minutes (`float`, *optional*): Their time limits.
        copying, code, refining ([`Mixture`]): Rows of the first steps, of the later steps, and of the refinement and
            distillation. Short rows that repeat a passage teach a model in minutes to look up what followed a token
            before; long rows of code alone would teach it in hours. At the end such rows are left out, because they
            also teach to repeat without need.
        target_copying_steps, draft_copying_steps (`int`): Length of the first phase, as part of the stage's steps. The
            smaller model needs more of them.
        generated_rows (`int`): Prompts that the target continues, for its drafts to learn from.
        generated_length (`int`): Most tokens of a prompt and its continuation.
        generated_tokens (`int`): Most tokens of a continuation.
        generated_share (`float`): How often a distillation batch is made of such rows.
        heads_rows (`int`): Rows of a batch of Medusa heads and of the MLP speculator.
        eagle_rows (`int`): Rows of a batch of EAGLE heads, of the DFlash draft and of the MTP layer.
        mlp_speculator_text_rows (`int`): Rows of sources and editing documents that the MLP speculator learns from
            besides the continuations. Medusa heads are too small to profit from them.
        checkpoint_every (`int`): Steps after which the target is written in between.
        seed (`int`): Seed of weights and data.
        bf16 (`bool`): Train in bfloat16 autocast.
    """

    vocab_size: int = 4096
    target: dict = field(
        default_factory=lambda: {
            "hidden_size": 256,
            "intermediate_size": 480,
            "num_hidden_layers": 5,
            "num_attention_heads": 4,
            "num_key_value_heads": 2,
        }
    )
    draft: dict = field(
        default_factory=lambda: {
            "hidden_size": 128,
            "intermediate_size": 256,
            "num_hidden_layers": 2,
            "num_attention_heads": 4,
            "num_key_value_heads": 2,
        }
    )
    medusa: MedusaRecipe = MedusaRecipe(num_heads=4, max_positions=1024)
    mlp_speculator: MLPSpeculatorRecipe = MLPSpeculatorRecipe(n_predict=4, inner_dim=64, max_positions=1024)
    eagle: Eagle1Recipe = Eagle1Recipe(ttt_steps=3, intermediate_size=160, noise=0.0, token_weight=1.0)
    eagle3: Eagle3Recipe = Eagle3Recipe(ttt_steps=4, intermediate_size=128, own_head=False, aux_layer_ids=(1, 3, 5))
    dflash: DFlashRecipe = DFlashRecipe(
        block_size=8,
        num_layers=2,
        intermediate_size=80,
        target_layer_ids=(0, 2, 4),
        head_decay=0.8,
        num_anchors=32,
    )
    mtp: MtpRecipe = MtpRecipe(intermediate_size=380)
    target_steps: int = 2082
    refine_steps: int = 1184
    draft_steps: int = 2300
    distill_steps: int = 827
    medusa_steps: int = 1903
    mlp_speculator_steps: int = 5426
    eagle_steps: int = 2244
    eagle3_steps: int = 2280
    dflash_steps: int = 4823
    mtp_steps: int = 2600
    target_minutes: float | None = None
    refine_minutes: float | None = None
    draft_minutes: float | None = None
    distill_minutes: float | None = None
    medusa_minutes: float | None = None
    mlp_speculator_minutes: float | None = None
    eagle_minutes: float | None = None
    eagle3_minutes: float | None = None
    dflash_minutes: float | None = None
    mtp_minutes: float | None = None
    copying: Mixture = Mixture({128: 1.0}, tokens_per_batch=2048, repeat_share=0.75)
    code: Mixture = Mixture({256: 0.25, 512: 0.5, 1024: 0.17, 2048: 0.08}, edit_share=0.4, repeat_share=0.05)
    refining: Mixture = Mixture({256: 0.2, 512: 0.5, 1024: 0.22, 2048: 0.08}, edit_share=0.45)
    target_copying_steps: int = 600
    draft_copying_steps: int = 1500
    generated_rows: int = 16384
    generated_length: int = 576
    generated_tokens: int = 128
    generated_share: float = 0.3
    heads_rows: int = 64
    eagle_rows: int = 8
    mlp_speculator_text_rows: int = 4000
    checkpoint_every: int = 500
    seed: int = 0
    bf16: bool = True


def train_tokenizer(texts: Sequence[str], vocab_size: int) -> PreTrainedTokenizerFast:
    """
    Trains a byte-level BPE tokenizer that gives every text back exactly.

    Args:
        texts (`Sequence[str]`): Training texts.
        vocab_size (`int`): Number of tokens, at least 257: all bytes and `<|endoftext|>`, which has id 0.
    """
    if vocab_size < 257:
        raise SpecConfigError(f"`vocab_size` must be at least 257 (all bytes and {END_OF_TEXT}), got {vocab_size}.")
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


def new_model(sizes: dict, tokenizer: PreTrainedTokenizerFast) -> LlamaForCausalLM:
    """Returns a freshly initialised Llama model that trains with blockwise attention."""
    config = LlamaConfig(
        vocab_size=len(tokenizer),
        max_position_embeddings=CONTEXT_LENGTH,
        tie_word_embeddings=True,
        bos_token_id=tokenizer.bos_token_id,
        eos_token_id=tokenizer.eos_token_id,
        attn_implementation="blockwise_causal",
        **sizes,
    )
    model = LlamaForCausalLM(config)
    model.generation_config.pad_token_id = tokenizer.pad_token_id
    return model


def save_checkpoint(model: PreTrainedModel, folder: Path, tokenizer: PreTrainedTokenizerFast | None = None) -> None:
    """Writes a bfloat16 copy of `model`, and the tokenizer if given, to `folder`."""
    copy.deepcopy(model).to(torch.bfloat16).save_pretrained(folder)
    if tokenizer is not None:
        tokenizer.save_pretrained(folder)


def load_checkpoint(
    folder: Path, attention: str = "blockwise_causal", dtype: torch.dtype = torch.float32
) -> LlamaForCausalLM:
    """Loads a checkpoint, by default with the attention for training."""
    return LlamaForCausalLM.from_pretrained(folder, dtype=dtype, attn_implementation=attention)


def next_token_objective(model: LlamaForCausalLM):
    """Plain language-model training, as a recipe: the loss of a batch."""
    return DraftModelRecipe(from_scratch={}, kl_weight=0.0).objective(model, TargetReader(None, ()))


class DemoTraining:
    """
    The stages of the recipe, each of which reads and writes the folder `output`.

    Args:
        recipe ([`DemoRecipe`]): Sizes and lengths.
        output (`Path`): Folder for the checkpoints.
        corpus ([`Corpus`], *optional*): Texts; the standard library's sources by default.
        console (`Console`, *optional*): Where progress is told.
    """

    def __init__(
        self, recipe: DemoRecipe, output: str | Path, corpus: Corpus | None = None, console: Console | None = None
    ):
        self.recipe = recipe
        self.output = Path(output)
        self.console = console or Console()
        self.corpus = corpus or python_sources()
        self.tokenizer = train_tokenizer(self.corpus.train, recipe.vocab_size)
        self.encode = plain_encode(self.tokenizer)
        self.snippets = collect_snippets(self.corpus.train)
        self.console.print(
            f"{len(self.corpus.train)} files, {sum(map(len, self.corpus.train)) / 1e6:.1f} M characters, "
            f"{len(self.snippets)} functions and classes, {len(self.tokenizer)} tokens"
        )

    def rows(self, stage: int) -> TokenRows:
        """Returns the rows of a stage; every stage has its own order of data."""
        seed = 1000 * self.recipe.seed + stage
        return TokenRows(
            self.corpus.train,
            EditDocuments(self.snippets, seed),
            self.encode,
            self.tokenizer.eos_token_id,
            seed,
        )

    def batches(self, stage: int, copying_steps: int) -> Iterator[torch.Tensor]:
        """Returns the batches of a stage that starts from scratch: first copying, then code."""
        rows = self.rows(stage)
        copying = itertools.islice(rows.batches(self.recipe.copying), copying_steps)
        return itertools.chain(copying, rows.batches(self.recipe.code))

    def train_target(self) -> LlamaForCausalLM:
        set_seed(self.recipe.seed)
        model = new_model(self.recipe.target, self.tokenizer)
        folder = self.output / "target"

        def checkpoint(step: int) -> None:
            if step % self.recipe.checkpoint_every == 0:
                save_checkpoint(model, folder, self.tokenizer)

        options = TrainingOptions(
            steps=self.recipe.target_steps,
            learning_rate=3e-3,
            muon=True,
            max_minutes=self.recipe.target_minutes,
            bf16=self.recipe.bf16,
        )
        batches = self.batches(1, self.recipe.target_copying_steps)
        train(model, batches, next_token_objective(model), options, description="target", on_step=checkpoint)
        save_checkpoint(model, folder, self.tokenizer)
        return model

    def refine_target(self) -> LlamaForCausalLM:
        """Trains the target of the output folder on, at a lower learning rate and without repeated passages."""
        model = load_checkpoint(self.output / "target")
        options = TrainingOptions(
            steps=self.recipe.refine_steps,
            learning_rate=2e-3,
            muon=True,
            max_minutes=self.recipe.refine_minutes,
            bf16=self.recipe.bf16,
        )
        batches = self.rows(4).batches(self.recipe.refining)
        train(model, batches, next_token_objective(model), options, description="refine")
        save_checkpoint(model, self.output / "target", self.tokenizer)
        return model

    def train_draft(self) -> LlamaForCausalLM:
        set_seed(self.recipe.seed + 1)
        model = new_model(self.recipe.draft, self.tokenizer)
        options = TrainingOptions(
            steps=self.recipe.draft_steps,
            learning_rate=4e-3,
            final_learning_rate=0.25,
            muon=True,
            max_minutes=self.recipe.draft_minutes,
            bf16=self.recipe.bf16,
        )
        batches = self.batches(2, self.recipe.draft_copying_steps)
        train(model, batches, next_token_objective(model), options, description="draft")
        save_checkpoint(model, self.output / "draft")
        return model

    def frozen_target(self, attention: str = "blockwise_causal") -> LlamaForCausalLM:
        """The target of the output folder as its drafts learn from it."""
        dtype = torch.bfloat16 if self.recipe.bf16 else torch.float32
        return load_checkpoint(self.output / "target", attention, dtype).requires_grad_(False).eval()

    def continue_text(self) -> Rows:
        """Lets the target write what its drafts learn from, and keeps it beside the checkpoints."""
        recipe = self.recipe
        set_seed(recipe.seed + 3)
        prompts = self.prompts(recipe.generated_rows, recipe.generated_length)
        with Progress(console=self.console) as bar:
            task = bar.add_task("target's continuations", total=len(prompts))
            rows = continue_prompts(
                self.frozen_target("sdpa"),
                prompts,
                recipe.generated_length,
                sampled_share=1 / 4,
                max_new_tokens=recipe.generated_tokens,
                batch_size=64,
                on_step=lambda done: bar.update(task, completed=done),
            )
        torch.save((rows.tokens, rows.counted), self.output / CONTINUATIONS)
        return rows

    def prompts(self, count: int, length: int) -> list[list[int]]:
        """
        Draws prompts like those of the demo: half of them edits to be made, the others windows of the sources and
        beginnings of files and definitions, all of at most 60 % of `length` tokens.
        """
        rows = self.rows(5)
        choose = random.Random(self.recipe.seed)
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

    def continuations(self) -> tuple[Rows, Rows]:
        """What [`continue_text`] wrote: rows to train on, and rows to measure acceptance on."""
        path = self.output / CONTINUATIONS
        rows = Rows(*torch.load(path, weights_only=True)) if path.is_file() else self.continue_text()
        return rows.split(0.04, self.recipe.seed)

    def text_rows(self, count: int, length: int) -> Rows:
        """Returns rows of sources and editing documents: much of an edit is what the target would write too."""
        rows = self.rows(8)
        tokens = torch.stack([rows.row(length, self.recipe.refining) for _ in range(count)])
        return Rows(tokens, torch.ones_like(tokens, dtype=torch.bool))

    def distill(self) -> LlamaForCausalLM:
        """Brings the draft model of the output folder closer to the target beside it."""
        set_seed(self.recipe.seed + 2)
        draft = load_checkpoint(self.output / "draft")
        recipe = DraftModelRecipe(draft_model=str(self.output / "draft"))
        reader = TargetReader(self.frozen_target(), recipe.target_hidden_states)
        options = TrainingOptions(
            steps=self.recipe.distill_steps,
            muon=True,
            max_minutes=self.recipe.distill_minutes,
            bf16=self.recipe.bf16,
        )
        rows, _ = self.continuations()
        batches = mixed_batches(self.rows(3), rows, self.recipe)
        train(draft, batches, recipe.objective(draft, reader), options, description="distill")
        save_checkpoint(draft, self.output / "draft")
        return draft

    def train_medusa(self) -> Acceptance:
        """Trains Medusa heads for the target of the output folder."""
        rows, held_out = self.continuations()
        return self._train_heads(self.recipe.medusa, 6, rows, held_out, self.recipe.heads_rows, learning_rate=6e-3)

    def train_mlp_speculator(self) -> Acceptance:
        """Trains an MLP speculator for the target of the output folder."""
        recipe = self.recipe
        rows, held_out = self.continuations()
        rows += self.text_rows(recipe.mlp_speculator_text_rows, recipe.generated_length)
        return self._train_heads(recipe.mlp_speculator, 7, rows, held_out, recipe.heads_rows, learning_rate=1e-2)

    def train_eagle(self) -> Acceptance:
        """Trains an EAGLE-1 head for the target of the output folder."""
        rows, held_out = self.continuations()
        return self._train_heads(
            self.recipe.eagle, 9, rows, held_out, self.recipe.eagle_rows, learning_rate=8e-3, muon=True
        )

    def train_eagle3(self) -> Acceptance:
        """Trains an EAGLE-3 head for the target of the output folder."""
        rows, held_out = self.continuations()
        return self._train_heads(
            self.recipe.eagle3, 10, rows, held_out, self.recipe.eagle_rows, learning_rate=1.5e-2, muon=True
        )

    def train_dflash(self) -> Acceptance:
        """Trains a DFlash draft for the target of the output folder."""
        rows, held_out = self.continuations()
        return self._train_heads(
            self.recipe.dflash, 11, rows, held_out, self.recipe.eagle_rows, learning_rate=1.5e-2, muon=True
        )

    def train_mtp(self) -> Acceptance:
        """Trains a multi-token-prediction layer for the target of the output folder."""
        rows, held_out = self.continuations()
        return self._train_heads(
            self.recipe.mtp, 12, rows, held_out, self.recipe.eagle_rows, learning_rate=8e-3, muon=True
        )

    def _train_heads(
        self, heads: Recipe, stage: int, rows: Rows, held_out: Rows, batch_size: int, **options
    ) -> Acceptance:
        set_seed(self.recipe.seed + stage)
        target = self.frozen_target()
        network = heads.build(target)
        heads.prepare(network, target, rows.tokens[rows.counted])
        reader = TargetReader(target, heads.states_for(network))
        options = TrainingOptions(
            steps=getattr(self.recipe, f"{heads.method}_steps"),
            max_minutes=getattr(self.recipe, f"{heads.method}_minutes"),
            warmup_steps=50,
            weight_decay=heads.weight_decay,
            bf16=self.recipe.bf16,
            **options,
        )
        if len(reader.states) == 1:
            # Several states of every token would fill the memory.
            reader.keep(rows.once(8))
        train(
            network,
            rows.batches(batch_size, self.recipe.seed + stage),
            heads.objective(network, reader),
            options,
            description=heads.method,
            measure=lambda: heads.measure(network, reader, held_out[:32].once(8)).tokens_per_cycle,
        )
        # As it will draft: from rounded weights.
        network.to(target.dtype)
        acceptance = heads.measure(network, reader, held_out.once(8))
        heads.save(network, self.output / heads.method, target_name="hf_specdec/demo/target", acceptance=acceptance)
        self.console.print(
            f"{heads.method}: {acceptance.tokens_per_cycle:.3f} tokens per cycle on held-out continuations; drafts "
            f"right at depth 1, 2, ...: {', '.join(f'{share:.3f}' for share in acceptance.accuracies)}"
        )
        return acceptance

    def evaluate(self, prompts_per_kind: int = 8) -> dict[str, float]:
        """Returns the figures of both models on the held-out files, and prints them."""
        figures = {}
        target, draft = (load_checkpoint(self.output / name, "sdpa").eval() for name in ("target", "draft"))
        for name, model in (("target", target), ("draft", draft)):
            loss, bits = validation_loss(model, self.encode, self.corpus.validation, self.tokenizer.eos_token_id)
            figures |= {f"{name}_loss": loss, f"{name}_bits_per_byte": bits}
        for kind, prompts in self.held_out_prompts(prompts_per_kind).items():
            lengths = [acceptance_length(target, draft, prompt) for prompt in track(prompts, f"{kind} prompts")]
            figures[f"{kind}_acceptance_length"] = sum(lengths) / len(lengths)
        for name, figure in figures.items():
            self.console.print(f"{name}: {figure:.3f}")
        return figures

    def held_out_prompts(self, count: int = 8, max_tokens: int = 400) -> dict[str, list[torch.Tensor]]:
        """Returns prompts from the validation files: windows to complete, and editing documents without their end."""
        choose = random.Random(self.recipe.seed)
        complete, edit = [], []
        for text in choose.choices(self.corpus.validation, k=count):
            tokens = self.encode(text)
            start = choose.randrange(max(1, len(tokens) - max_tokens))
            complete.append(torch.tensor([tokens[start : start + max_tokens // 2]]))
        documents = EditDocuments(collect_snippets(self.corpus.validation), self.recipe.seed)
        while len(edit) < count:
            tokens = self.encode(edit_prompt(documents.draw(2400)))
            if len(tokens) <= max_tokens:
                edit.append(torch.tensor([tokens]))
        return {"complete": complete, "edit": edit}


def edit_prompt(document: str) -> str:
    """Cuts an editing document behind its last heading, where the edited code is to be written."""
    headings = ("\n# copy\n", "\n# rename ", "\n# remove the ")
    start = max(document.rfind(heading) for heading in headings)
    return document[: document.index("\n", start + 1) + 1]


def mixed_batches(rows: TokenRows, generated: Rows, recipe: DemoRecipe) -> Iterator[torch.Tensor | Batch]:
    """Yields batches of the sources, and now and then a batch of the target's continuations."""
    choose = torch.Generator().manual_seed(recipe.seed)
    count = max(1, recipe.refining.tokens_per_batch // recipe.generated_length)
    continued = generated.batches(count, recipe.seed)
    for batch in rows.batches(recipe.refining):
        yield next(continued) if torch.rand((), generator=choose) < recipe.generated_share else batch


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


@torch.no_grad()
def acceptance_length(
    target: PreTrainedModel, draft: PreTrainedModel, prompt: torch.Tensor, k: int = 4, max_new_tokens: int = 128
) -> float:
    """
    Mean number of committed tokens per target forward when `draft` drafts `k` tokens greedily.

    Greedy verification commits exactly the target's greedy text, so that text is generated first and the drafts are
    compared with it.

    Args:
        prompt (`torch.LongTensor` of shape `(1, T)`): Token ids.
    """
    length = prompt.shape[1]
    mask = torch.ones_like(prompt)
    text = target.generate(prompt, attention_mask=mask, max_new_tokens=max_new_tokens, do_sample=False)[0].tolist()
    position, steps = length + 1, 0
    while position < len(text):
        context = torch.tensor([text[:position]])
        drafted = draft.generate(
            context,
            attention_mask=torch.ones_like(context),
            max_new_tokens=k,
            do_sample=False,
            eos_token_id=draft.config.vocab_size,
            pad_token_id=0,
        )[0, position:].tolist()
        accepted = next((i for i, (a, b) in enumerate(zip(drafted, text[position:])) if a != b), k)
        position += accepted + 1
        steps += 1
    return (min(position, len(text)) - length - 1) / max(steps, 1)


def main(arguments: Sequence[str] | None = None) -> dict[str, float]:
    """Runs the recipe from command line arguments and returns the figures of the evaluation, if it was run."""
    options = _parser().parse_args(arguments)
    torch.set_num_threads(options.threads)
    recipe = DemoRecipe(
        **{item.name: getattr(options, item.name) for item in fields(DemoRecipe) if item.name in options}
    )
    console = Console()
    start = time.monotonic()
    corpus = python_sources(options.sources) if options.sources else None
    training = DemoTraining(recipe, options.output, corpus, console)
    stages = {
        "target": training.train_target,
        "refine": training.refine_target,
        "draft": training.train_draft,
        "continue": training.continue_text,
        "distill": training.distill,
        "medusa": training.train_medusa,
        "mlp_speculator": training.train_mlp_speculator,
        "eagle": training.train_eagle,
        "eagle3": training.train_eagle3,
        "dflash": training.train_dflash,
        "mtp": training.train_mtp,
        "evaluate": training.evaluate,
    }
    results = {name: stages[name]() for name in STAGES if name in options.stages}
    console.print(f"finished after {(time.monotonic() - start) / 60:.1f} minutes")
    return results.get("evaluate", {})


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m hf_specdec.training.demo",
        description="Train the embedded demo: tokenizer, target, draft model, and heads of every kind.",
    )
    recipe = DemoRecipe()
    parser.add_argument("--output", required=True, type=Path, help="folder for the checkpoints")
    parser.add_argument("--sources", type=Path, help="folder of .py files (default: the standard library)")
    parser.add_argument(
        "--stages",
        nargs="+",
        choices=STAGES,
        default=STAGES,
        help="which stages to run; later ones read what earlier ones left in the output folder",
    )
    for stage in TRAINED:
        name = stage.replace("_", "-")
        parser.add_argument(f"--{name}-steps", type=int, default=getattr(recipe, f"{stage}_steps"))
        parser.add_argument(f"--{name}-minutes", type=float, help=f"time limit of the {stage} stage")
    parser.add_argument("--seed", type=int, default=recipe.seed)
    parser.add_argument("--threads", type=int, default=1, help="threads of torch")
    parser.add_argument("--no-bf16", dest="bf16", action="store_false", help="train in float32")
    return parser


if __name__ == "__main__":
    main()
