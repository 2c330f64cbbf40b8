"""The way from data to a saved draft: the whole run of `hf-specdec train`, for every method.

    recipe = MedusaRecipe(num_heads=4)
    result = TrainingRun(recipe, RunOptions(data=("notes/",), self_generate=500), "heads").run(target, tokenizer)

The recipes are those that the methods' descriptors name.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, fields, replace
from pathlib import Path
from typing import Any

import torch
from accelerate import Accelerator
from accelerate.utils import gather_object
from rich.console import Console
from rich.progress import Progress
from transformers import PreTrainedModel, PreTrainedTokenizerBase, set_seed

from ..errors import SpecConfigError
from ..method import trainings
from ..target_facts import quantisation
from .continuations import continue_prompts, draw_prompts
from .options import RESULT_FILE, TextOptions, TrainingOptions
from .reading import Rows, TargetReader
from .recipe import Acceptance, Recipe
from .text import Document, find_sources, load_documents, pack
from .trainer import RunState, check_identity, train


STATE_FOLDER = "training_state"
CONTINUATIONS_FILE = "continuations.pt"

# Settings that a resumed run may change.
_FREE_SETTINGS = ("epochs", "keep_states", "resume", "save_every")


def recipes() -> dict[str, type[Recipe]]:
    """Imports the recipes, by name."""
    return {name: training.method.load(training.recipe) for name, training in trainings().items()}


def make_recipe(method: str, options: Mapping[str, Any]) -> Recipe:
    """
    Makes the recipe of this name with some of its options.

    Raises:
        SpecConfigError: There is no such recipe, or the options do not belong to it or contradict each other.
    """
    known = recipes()
    if method not in known:
        raise SpecConfigError(f"There is no training recipe for '{method}'. There is one for: {', '.join(known)}.")
    names = {name: {item.name for item in fields(recipe)} for name, recipe in known.items()}
    for option_name in options:
        if option_name not in names[method]:
            owners = " and ".join(name for name in known if option_name in names[name])
            hint = f" It is for {owners}." if owners else ""
            raise SpecConfigError(f"`{option_name}` is no option of the recipe for {method}.{hint}")
    return known[method](**options)


@dataclass(frozen=True)
class RunOptions(TrainingOptions, TextOptions):
    """Options that the recipes have in common: the rows of [`TextOptions`], and [`TrainingOptions`]."""

    def completed(self, num_rows: int, recipe: Recipe) -> RunOptions:
        """Fills in what is left out, for so many rows and a recipe."""
        steps = self.steps or max(1, round(self.epochs * num_rows / self.batch_size))
        return replace(
            self,
            steps=steps,
            warmup_steps=min(100, steps // 20) if self.warmup_steps is None else self.warmup_steps,
            weight_decay=recipe.weight_decay if self.weight_decay is None else self.weight_decay,
            muon=recipe.muon and hasattr(torch.optim, "Muon") if self.muon is None else self.muon,
        )


@dataclass(frozen=True)
class RunResult:
    """
    Attributes:
        folder (`str`): Folder of the draft.
        method (`str`): Its method.
        before, after ([`Acceptance`]): Acceptance on the held-out rows before and after training.
        losses (`list[float]`): The loss of every step.
        num_tokens (`int`): Tokens of the training rows that counted.
        num_parameters (`int`): Parameters that were trained.
        target_quantization (`str`, *optional*): The kind of the target's weights, if they are quantised.
    """

    folder: str
    method: str
    before: Acceptance
    after: Acceptance
    losses: list[float]
    num_tokens: int
    num_parameters: int
    target_quantization: str | None = None

    def to_dict(self) -> dict[str, Any]:
        return {
            "folder": self.folder,
            "method": self.method,
            "tokens_per_cycle": self.after.tokens_per_cycle,
            "accuracies": list(self.after.accuracies),
            "untrained_tokens_per_cycle": self.before.tokens_per_cycle,
            "held_out_positions": self.after.num_positions,
            "steps": len(self.losses),
            "loss": sum(self.losses[-50:]) / max(1, len(self.losses[-50:])),
            "training_tokens": self.num_tokens,
            "parameters": self.num_parameters,
            "target_quantization": self.target_quantization,
        }


class TrainingRun:
    """
    One run of a recipe.

    Args:
        recipe ([`Recipe`]): The method and its options.
        options ([`RunOptions`]): The rest.
        folder (`str` or `Path`): Folder for the draft and the training state.
        cpu (`bool`): Train on the CPU although there is a GPU.

    Raises:
        SpecDecError: The data are not there, or the folder holds something that is not to be written over.
    """

    def __init__(self, recipe: Recipe, options: RunOptions, folder: str | Path, cpu: bool = False):
        self.recipe = recipe
        self.options = options
        self.folder: Path = Path(folder)
        find_sources(options.data)
        self._check_folder()
        self.accelerator: Accelerator = Accelerator(cpu=cpu)
        if options.batch_size % self.accelerator.num_processes:
            raise SpecConfigError(
                f"`batch_size`={options.batch_size} cannot be divided among {self.accelerator.num_processes} "
                "processes. Choose a multiple of their number."
            )

    def _check_folder(self) -> None:
        if self.folder.is_file():
            raise SpecConfigError(f"The output '{self.folder}' is a file. Name a folder.")
        has_state = (self.folder / STATE_FOLDER).is_dir() or (self.folder / CONTINUATIONS_FILE).is_file()
        if self.options.resume and not has_state:
            raise SpecConfigError(f"There is no run to resume in '{self.folder}'. Leave out `resume` to begin one.")
        if not self.options.resume and self.folder.is_dir() and any(self.folder.iterdir()):
            raise SpecConfigError(
                f"The output folder '{self.folder}' is not empty. Name another one"
                + (", or resume the run in it." if has_state else ".")
            )

    def run(self, target: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, target_name: str = "") -> RunResult:
        """
        Trains, measures and saves.

        Args:
            target (`PreTrainedModel`): The target; frozen and left in evaluation mode.
            tokenizer (`PreTrainedTokenizerBase`): Its tokenizer.
            target_name (`str`): Its name, for the checkpoint.

        Raises:
            SpecDecError: The recipe does not suit the target, or the data have too little text.
        """
        target = target.requires_grad_(False).eval()
        self.recipe.check(target)
        set_seed(self.options.seed)
        network = self.recipe.build(target)
        if getattr(target, "hf_device_map", None) is None:
            target.to(self.accelerator.device)
        rows, held_out = self._rows(target, tokenizer).split(self.options.held_out, self.options.seed)
        recipe, accelerator = self.recipe, self.accelerator
        options = self.options.completed(len(rows), recipe)
        recipe.prepare(network, target, rows.tokens[rows.counted])
        reader = TargetReader(target, recipe.states_for(network))
        network.to(accelerator.device)
        if options.keep_states:
            reader.keep(rows.once(options.batch_size))

        def measure(rows: Rows) -> Acceptance:
            """Measures the acceptance on all rows, in every process, so that all know the figure."""
            network.eval()
            batches = (batch.to(accelerator.device) for batch in rows.once(options.batch_size))
            return recipe.measure(network, reader, batches)

        before = measure(held_out)
        losses = train(
            network,
            rows.batches(options.batch_size, options.seed),
            recipe.objective(network, reader),
            options,
            description=recipe.method,
            measure=lambda: measure(held_out[:32]).tokens_per_cycle,
            state=RunState(self.folder / STATE_FOLDER, self._identity(options, rows)),
            accelerator=accelerator,
        )
        after = measure(held_out)
        trained = sum(parameter.numel() for parameter in network.parameters() if parameter.requires_grad)
        count, kind = int(rows.counted.sum()), quantisation(target)
        result = RunResult(str(self.folder), recipe.method, before, after, losses, count, trained, kind)
        if accelerator.is_main_process:
            dtype = torch.bfloat16 if options.bf16 else torch.float32
            about = {"target_name": target_name, "tokenizer": tokenizer, "acceptance": after}
            recipe.save(network, self.folder, dtype, **about)
            report = json.dumps(result.to_dict(), indent=2) + "\n"
            (self.folder / RESULT_FILE).write_text(report, encoding="utf-8")
        accelerator.wait_for_everyone()
        return result

    def _rows(self, target: PreTrainedModel, tokenizer: PreTrainedTokenizerBase) -> Rows:
        options = self.options
        documents = list(load_documents(options.data, tokenizer, options.column, options.max_tokens))
        if not options.self_generate:
            return pack(documents, options.seq_length, tokenizer.eos_token_id, options.max_tokens)
        if not documents:
            raise SpecConfigError("The data have no text to make prompts of.")
        rows = self._continuations(target, documents)
        if options.keep_text:
            rows += pack(documents, options.seq_length, tokenizer.eos_token_id, options.max_tokens)
        return rows

    def _continuations(self, target: PreTrainedModel, documents: Sequence[Document]) -> Rows:
        """Returns the target's continuations, every process writing its share of them; kept for a resumed run."""
        options, accelerator = self.options, self.accelerator
        kept = self.folder / CONTINUATIONS_FILE
        names = ("self_generate", "seq_length", "temperature", "seed", "max_tokens", "max_new_tokens")
        settings = {name: getattr(options, name) for name in names} | {"data": list(options.data)}
        if options.resume and kept.is_file():
            found = torch.load(kept, weights_only=True)
            check_identity(settings, found["settings"])
            return Rows(found["tokens"], found["counted"])
        prompts = draw_prompts(documents, options.self_generate, options.seq_length, options.seed)
        share = prompts[accelerator.process_index :: accelerator.num_processes]
        set_seed(options.seed + accelerator.process_index)
        with Progress(console=Console(stderr=True), disable=not accelerator.is_main_process) as bar:
            task = bar.add_task("target's continuations", total=len(share))
            rows = continue_prompts(
                target,
                share,
                options.seq_length,
                temperature=options.temperature,
                max_new_tokens=options.max_new_tokens,
                on_step=lambda done: bar.update(task, completed=done),
            )
        if accelerator.num_processes > 1:
            parts = gather_object([(rows.tokens, rows.counted)])
            rows = Rows(*(torch.cat(tensors) for tensors in zip(*parts)))
        if accelerator.is_main_process:
            self.folder.mkdir(parents=True, exist_ok=True)
            torch.save({"tokens": rows.tokens, "counted": rows.counted, "settings": settings}, kept)
        # Generation has drawn another number of random numbers in every process.
        set_seed(options.seed)
        return rows

    def _identity(self, options: RunOptions, rows: Rows) -> dict[str, Any]:
        """Returns the settings that a resumed run must have in common with the one that it continues."""
        names = [item.name for item in fields(TrainingOptions) if item.name not in _FREE_SETTINGS]
        return {
            "method": self.recipe.method,
            **asdict(self.recipe),
            **{name: getattr(options, name) for name in names},
            "rows": [len(rows), int(rows.tokens.sum())],
        }
