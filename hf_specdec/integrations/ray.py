"""Ray Data: a class for `map_batches`, and a processor in the shape of `ray.data.llm`.

Settings travel to the actors, never loaded models: each actor loads target and drafter once.
"""

from __future__ import annotations

import hashlib
import secrets
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from ..errors import MissingDependencyError, SpecConfigError, shown
from ..many.generate import generate_many
from ..many.row import error_text
from ..settings import SpeculativeConfig
from ..settings.checks import Bounds, checked


# How a row names its prompt: the first of these columns that it has.
_PROMPTS = ("messages", "prompt", "input_ids")

# Arguments of [`SpecGenerate`] in the configuration of a processor.
_OF_ACTORS = (
    *("model_source", "speculative", "num_places", "max_tokens_in_flight"),
    *("seed", "id_column", "model_kwargs"),
)


class SpecGenerate:
    """Generates for batches of rows, with speculation.

    ```python
    ds.map_batches(SpecGenerate, fn_constructor_kwargs={"model_source": path, "speculative": "ngram"}, batch_size=256,
                   compute=ray.data.ActorPoolStrategy(size=2))
    ```

    A row has its prompt as `messages`, `prompt` or `input_ids`, and optionally `sampling_params`, a dict of what
    `generate()` takes. All columns are kept, and these are added: `generated_text`, `generated_tokens`,
    `finish_reason` ("stop", "length" or "error"), `generation_error` (empty where there is none), `num_prompt_tokens`,
    `num_generated_tokens`, `num_draft_tokens` and `num_accepted_tokens`.

    A batch should have many times the rows that are decoded at a time: a finished row's place is filled by the next
    row of the batch.

    Args:
        model_source (`str`): Target: a repo id or a folder.
        speculative (`dict`, `str` or `SpeculativeConfig`, *optional*): The drafter's settings; without them nothing is
            drafted.
        num_places (`int`): Rows that are decoded at a time.
        max_tokens_in_flight (`int`, *optional*): Most tokens of these together.
        seed (`int`, *optional*): Of rows that sample and have no `seed` in their `sampling_params`. Needs `id_column`:
            batches come to actors in any order. Without it every batch has numbers of its own.
        id_column (`str`, *optional*): Column whose values tell rows apart.
        model_kwargs (`dict`, *optional*): For `from_pretrained()` of the target.
        generate_arguments: Everything else that `generate()` takes, for all rows.

    Raises:
        SpecConfigError: The settings cannot be honoured.
    """

    def __init__(
        self,
        model_source: str,
        speculative: Any = None,
        num_places: int = 16,
        max_tokens_in_flight: int | None = None,
        seed: int | None = None,
        id_column: str | None = None,
        model_kwargs: dict[str, Any] | None = None,
        **generate_arguments: Any,
    ):
        _check_travels(speculative)
        if seed is not None and id_column is None:
            raise SpecConfigError(
                "`seed` needs `id_column`, which tells rows apart wherever they are decoded. Name a column, or give "
                "rows a `seed` in their `sampling_params`."
            )
        import torch
        from transformers import AutoModelForCausalLM, AutoTokenizer

        device = "cuda" if torch.cuda.is_available() else "cpu"
        self._tokenizer = AutoTokenizer.from_pretrained(model_source)
        options = {"dtype": "auto", "device_map": device, **(model_kwargs or {})}
        self._model = AutoModelForCausalLM.from_pretrained(model_source, **options).eval()
        self._seed, self._id_column = seed, id_column
        self._arguments = {
            "batch_size": num_places,
            "max_tokens_in_flight": max_tokens_in_flight,
            "tokenizer": self._tokenizer,
            **({"spec_method": "off"} if speculative is None else {"speculative": speculative}),
            **generate_arguments,
        }
        # Wrong settings end the actor now, and not each row later.
        generate_many(self._model, [], **self._arguments).close()

    def __call__(self, batch: Mapping[str, Any]) -> dict[str, Any]:
        columns = {name: _plain(values) for name, values in batch.items()}
        size = len(next(iter(columns.values()), []))
        requests = [self._request({name: values[row] for name, values in columns.items()}) for row in range(size)]
        # Torch begins with the same numbers in all actors, which would give the same texts to copies of a prompt.
        seed = secrets.randbits(63)
        results = list(generate_many(self._model, requests, in_order=True, seed=seed, **self._arguments))
        return {
            **batch,
            "generated_text": [result.text or "" for result in results],
            "generated_tokens": [result.tokens for result in results],
            "finish_reason": [result.finish_reason for result in results],
            "generation_error": [error_text(result.error) or "" for result in results],
            "num_prompt_tokens": [result.num_prompt_tokens for result in results],
            "num_generated_tokens": [len(result.tokens) for result in results],
            "num_draft_tokens": [result.stats.num_draft_tokens for result in results],
            "num_accepted_tokens": [result.stats.num_accepted_tokens for result in results],
        }

    def _request(self, row: dict[str, Any]) -> dict[str, Any]:
        """The request of a row; one without a prompt is refused there like all that are wrong."""
        named = next((name for name in _PROMPTS if row.get(name) is not None), None)
        # Where rows have different settings, tables have all names in all rows.
        settings = {name: value for name, value in (row.get("sampling_params") or {}).items() if value is not None}
        if self._seed is not None:
            digest = hashlib.sha256(f"{self._seed} {row[self._id_column]!r}".encode()).digest()
            settings.setdefault("seed", int.from_bytes(digest[:7], "big"))
        return settings if named is None else {named: row[named], **settings}


@dataclass
class HFSpecProcessorConfig:
    """Configuration of [`build_processor`].

    Args:
        model_source, speculative, num_places, max_tokens_in_flight, seed, id_column, model_kwargs: As for
            [`SpecGenerate`].
        generate_arguments (`dict`): What `generate()` takes, for all rows, such as `max_new_tokens`.
        batch_size (`int`): Rows that an actor gets at a time.
        concurrency (`int` or `tuple[int, int]`): Actors, or fewest and most of them.
        num_cpus, num_gpus (`float`, *optional*): What an actor reserves.
        runtime_env (`dict`, *optional*): Of the actors, as Ray takes it.
    """

    model_source: str
    speculative: Any = None
    num_places: int = 16
    max_tokens_in_flight: int | None = None
    seed: int | None = None
    id_column: str | None = None
    model_kwargs: dict[str, Any] = field(default_factory=dict)
    generate_arguments: dict[str, Any] = field(default_factory=dict)
    batch_size: int = 256
    concurrency: int | tuple[int, int] = 1
    num_cpus: float | None = None
    num_gpus: float | None = None
    runtime_env: dict[str, Any] | None = None

    def __post_init__(self) -> None:
        _check_travels(self.speculative)
        checked("batch_size", self.batch_size, int, Bounds(least=1))
        checked("num_places", self.num_places, int, Bounds(least=1))


def build_processor(
    config: HFSpecProcessorConfig,
    preprocess: Callable[[dict[str, Any]], dict[str, Any]] | None = None,
    postprocess: Callable[[dict[str, Any]], dict[str, Any]] | None = None,
) -> Callable[[Any], Any]:
    """A function from data set to data set, as `ray.data.llm.build_processor` makes them.

    Args:
        config (`HFSpecProcessorConfig`): The model, its drafter, and the actors.
        preprocess (`Callable`, *optional*): From a row to the columns that it gets, such as `messages` and
            `sampling_params`.
        postprocess (`Callable`, *optional*): From a row with all columns to what is kept of it.

    Raises:
        MissingDependencyError: Ray Data is not installed.
    """
    try:
        from ray.data import ActorPoolStrategy
    except ImportError as error:
        raise MissingDependencyError(
            f"Processors need Ray Data ({error}). Install it: pip install 'ray[data]'"
        ) from error
    actors = config.concurrency
    least, most = (actors, actors) if isinstance(actors, int) else actors
    settings = {name: getattr(config, name) for name in ("num_cpus", "num_gpus", "runtime_env")}
    arguments = {name: getattr(config, name) for name in _OF_ACTORS} | config.generate_arguments

    def process(dataset: Any) -> Any:
        if preprocess is not None:
            dataset = dataset.map(lambda row, add=preprocess: {**row, **add(row)})
        dataset = dataset.map_batches(
            SpecGenerate,
            fn_constructor_kwargs=arguments,
            batch_size=config.batch_size,
            compute=ActorPoolStrategy(min_size=least, max_size=most),
            **{name: value for name, value in settings.items() if value is not None},
        )
        return dataset if postprocess is None else dataset.map(postprocess)

    return process


def _check_travels(speculative: Any) -> None:
    if speculative is not None and not isinstance(speculative, (str, Mapping, SpeculativeConfig)):
        raise SpecConfigError(
            f"`speculative` takes settings, which travel to the actors, got {shown(speculative)}. Pass a method, a "
            "dict or a SpeculativeConfig; each actor loads the drafter itself."
        )


def _plain(values: Any) -> Any:
    """Arrays, also inside of others, as lists."""
    if hasattr(values, "tolist"):
        values = values.tolist()
    if isinstance(values, (list, tuple)):
        return [_plain(value) for value in values]
    if isinstance(values, Mapping):
        return {key: _plain(value) for key, value in values.items()}
    return values
