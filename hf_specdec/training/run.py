"""The way from data to a saved draft: the whole run of `hf-specdec train`, for every method.

    text = TextOptions(data=("notes/",), self_generate=500)
    result = TrainingRun(MedusaRecipe(num_heads=4), text, DraftTrainingArguments("heads")).run(target, tokenizer)

The recipes are those that the methods' descriptors name.
"""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from accelerate.utils import gather_object
from transformers import PreTrainedModel, PreTrainedTokenizerBase, set_seed

from ..errors import SpecConfigError
from ..target_facts import quantisation
from .arguments import DraftTrainingArguments
from .options import RESULT_FILE, TextOptions
from .recipe import Recipe
from .text import (
    continue_prompts,
    datasets_library,
    draw_prompts,
    find_sources,
    learned_tokens,
    load_documents,
    pack,
    rows_of,
    split,
)
from .trainer import DraftTrainer


if TYPE_CHECKING:
    from datasets import Dataset

# What a resumed run must have in common with the one that it continues.
SETTINGS_FILE = "training_settings.json"
CONTINUATIONS_FILE = "continuations.parquet"


@dataclass(frozen=True)
class RunResult:
    """What `training.json` has beside a trained draft; acceptance is that of the held-out rows."""

    folder: str
    method: str
    tokens_per_cycle: float
    accuracies: tuple[float, ...]  # of the drafts at each depth
    untrained_tokens_per_cycle: float
    held_out_positions: int
    steps: int
    losses: list[float]  # as logged, each the mean of some steps
    training_tokens: int
    parameters: int
    target_quantization: str | None  # kind of the target's weights, if they are quantised


class TrainingRun:
    """
    One run of a recipe.

    Args:
        recipe ([`Recipe`]): The method and its options.
        text ([`TextOptions`]): The rows.
        arguments ([`DraftTrainingArguments`]): The training, and the folder of the draft.

    Raises:
        SpecDecError: The data are not there, or the folder holds something that is not to be written over.
    """

    def __init__(self, recipe: Recipe, text: TextOptions, arguments: DraftTrainingArguments):
        self.recipe = recipe
        self.text = text
        self.arguments = arguments
        self.folder: Path = Path(arguments.output_dir)
        self.processes: Any = arguments.distributed_state
        find_sources(text.data)
        if self.folder.is_file():
            raise SpecConfigError(f"The output '{self.folder}' is a file. Name a folder.")
        settings = self.folder / SETTINGS_FILE
        is_begun = settings.is_file() or (self.folder / CONTINUATIONS_FILE).is_file()
        if not self.arguments.resume:
            if self.folder.is_dir() and any(self.folder.iterdir()):
                hint = ", or resume the run in it." if is_begun else "."
                raise SpecConfigError(f"The output folder '{self.folder}' is not empty. Name another one{hint}")
        elif not is_begun:
            raise SpecConfigError(f"There is no run to resume in '{self.folder}'. Leave out `resume` to begin one.")
        elif settings.is_file():
            was, now = json.loads(settings.read_text(encoding="utf-8")), self._settings()
            changed = [name for name, value in now.items() if was.get(name) != value]
            if changed:
                details = "; ".join(f"{name} was {was.get(name)!r}, is {now[name]!r}" for name in changed)
                raise SpecConfigError(
                    f"What is to be resumed is another run: {details}. Resume with the settings it was begun with, or "
                    "begin a new run in another folder."
                )
        # None writes before all have looked.
        self.processes.wait_for_everyone()

    def _settings(self) -> dict[str, Any]:
        settings = {"method": self.recipe.method, **asdict(self.recipe), **asdict(self.text)}
        settings |= {name: getattr(self.arguments, name) for name in ("seed", "max_steps", "learning_rate")}
        return json.loads(json.dumps(settings))

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
        recipe, arguments = self.recipe, self.arguments
        target = target.requires_grad_(False).eval()
        recipe.check(target)
        set_seed(arguments.seed)
        network = recipe.build(target)
        if getattr(target, "hf_device_map", None) is None:
            target.to(arguments.device)
        rows, held_out = split(self._rows(target, tokenizer), self.text.held_out, arguments.seed)
        rows = rows.add_column("index", range(len(rows)))
        learned = learned_tokens(rows)
        recipe.prepare(network, target, learned)
        trainer = DraftTrainer(recipe, network, target, arguments, rows, held_out)
        before = trainer.measure(held_out)
        self._write(SETTINGS_FILE, self._settings())
        # Checkpoints of a run to resume that were written to their end.
        whole = [path.parent for path in self.folder.glob("checkpoint-*/trainer_state.json")]
        last = max(whole, key=lambda path: int(path.name.split("-")[1]), default=None)
        trainer.train(resume_from_checkpoint=arguments.resume_from_checkpoint or (last and str(last)))
        after = trainer.measure(held_out)
        result = RunResult(
            folder=str(self.folder),
            method=recipe.method,
            tokens_per_cycle=after.tokens_per_cycle,
            accuracies=after.accuracies,
            untrained_tokens_per_cycle=before.tokens_per_cycle,
            held_out_positions=after.num_positions,
            steps=trainer.state.global_step,
            losses=[entry["loss"] for entry in trainer.state.log_history if "loss" in entry],
            training_tokens=len(learned),
            parameters=sum(part.numel() for part in network.parameters() if part.requires_grad),
            target_quantization=quantisation(target),
        )
        if self.processes.is_main_process:
            about = {"target_name": target_name, "tokenizer": tokenizer, "acceptance": after}
            recipe.save(network, self.folder, arguments.saved_dtype, **about)
        self._write(RESULT_FILE, asdict(result))
        self.processes.wait_for_everyone()
        return result

    def _write(self, name: str, content: dict[str, Any]) -> None:
        if self.processes.is_main_process:
            self.folder.mkdir(parents=True, exist_ok=True)
            (self.folder / name).write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")

    def _rows(self, target: PreTrainedModel, tokenizer: PreTrainedTokenizerBase) -> Dataset:
        text = self.text
        with self.arguments.main_process_first(desc="reading text"):
            takes_prompts = text.self_generate > 0 and not text.keep_text
            documents = load_documents(text.data, tokenizer, text.column, text.max_tokens, takes_prompts)
        if not text.self_generate:
            return pack(documents, text.seq_length, tokenizer.eos_token_id, text.max_tokens)
        if not len(documents):
            raise SpecConfigError("The data have no text to make prompts of.")
        rows = self._continuations(target, documents)
        if text.keep_text:
            packed = pack(documents, text.seq_length, tokenizer.eos_token_id, text.max_tokens)
            rows = datasets_library().concatenate_datasets([rows, packed])
        return rows

    def _continuations(self, target: PreTrainedModel, documents: Dataset) -> Dataset:
        """Lets every process write its share of the target's continuations, which are kept for a resumed run."""
        text, seed, file = self.text, self.arguments.seed, self.folder / CONTINUATIONS_FILE
        if self.arguments.resume and file.is_file():
            return datasets_library().Dataset.from_parquet(str(file))
        prompts = draw_prompts(documents, text.self_generate, text.seq_length, seed)
        set_seed(seed + self.processes.process_index)
        share = continue_prompts(
            target,
            prompts[self.processes.process_index :: self.processes.num_processes],
            text.seq_length,
            temperature=text.temperature,
            max_new_tokens=text.max_new_tokens,
            show_progress=self.processes.is_main_process,
        )
        rows = rows_of(gather_object(share))
        self._write(SETTINGS_FILE, self._settings())
        if self.processes.is_main_process:
            rows.to_parquet(str(file))
        # Generation has drawn another number of random numbers in every process.
        set_seed(seed)
        return rows
