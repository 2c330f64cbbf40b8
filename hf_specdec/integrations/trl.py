"""TRL: what speculation brings while a model is trained on its own texts, and drafters that keep up with it.

`GRPOConfig(generation_kwargs={"spec_method": ...})` says how to draft, and the callback asks for it. Texts have the
distribution of the model as it is, so training stays on policy.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Mapping
from typing import Any

from transformers import TrainerCallback
from transformers.utils import logging

from ..arguments import ARGUMENTS, is_off
from ..errors import SpecConfigError, shown
from ..loader import age_texts, forget_speculators
from ..metrics import Record, SpecDecodingStats
from ..metrics.listeners import add_listener, remove_listener
from ..settings import SpeculativeConfig
from ..settings.checks import Bounds, checked
from ..target_facts import model_name


logger = logging.get_logger(__name__)


# Names of settings for the arguments of generate().
_KEYS = {"spec_method": "method", "spec_model": "model", "num_speculative_tokens": "num_speculative_tokens"}


class SpeculationCallback(TrainerCallback):
    """Has a trainer generate speculatively, logs what is accepted, and sees to drafters that the model leaves behind.

    ```python
    SpeculationCallback(most_text_age=4, least_acceptance_length=1.2).add_to(trainer)
    trainer.train()
    ```

    The log gets `speculation/acceptance_length` (tokens per verification and row), `speculation/acceptance_rate` and
    `speculation/draft_tokens`, of all generations since the last log.

    Args:
        most_text_age (`int`, *optional*): Steps for which `suffix` remembers a response; older ones are those of
            another policy. Without it all are kept that its settings allow.
        least_acceptance_length (`float`, *optional*): A drafter whose mean acceptance length over `window` steps falls
            below this has grown stale.
        window (`int`): Steps that are looked at together.
        refresh (`Callable`, *optional*): Called with the model when the drafter has grown stale, such as a function
            that trains the head anew and saves it in its place; then the drafter is loaded again. Without it
            speculation is switched off.
    """

    def __init__(
        self,
        most_text_age: int | None = None,
        least_acceptance_length: float | None = None,
        window: int = 16,
        refresh: Callable[[Any], None] | None = None,
    ):
        checked("most_text_age", most_text_age, int | None, Bounds(least=0))
        checked("window", window, int, Bounds(least=1))
        if least_acceptance_length is not None and not least_acceptance_length >= 1:
            raise SpecConfigError(
                f"`least_acceptance_length` is at least 1, a token per verification, got {least_acceptance_length}."
            )
        if refresh is not None and least_acceptance_length is None:
            raise SpecConfigError("`refresh` is called below `least_acceptance_length`. Say what is too little.")
        self._most_text_age, self._least, self._refresh = most_text_age, least_acceptance_length, refresh
        self._window, self._steps = window, deque[SpecDecodingStats](maxlen=window)
        self._record, self._unlogged = Record(), SpecDecodingStats()
        self._trainer: Any = None
        self._model_name: str | None = None

    def add_to(self, trainer: Any) -> SpeculationCallback:
        """Makes it the first callback of a trainer, which from then on speculates: those that report come after it.

        Raises:
            SpecConfigError: The trainer does not generate with transformers, without speculation, or off policy.
        """
        if getattr(trainer, "use_vllm", False):
            raise SpecConfigError("With `use_vllm` nothing is generated here. Set vLLM's own speculative decoding.")
        config = getattr(trainer, "generation_config", None)
        asked = {name: value for name in ARGUMENTS if (value := getattr(config, name, None)) is not None}
        if not asked or any(map(is_off, asked.values())):
            raise SpecConfigError(
                "The trainer generates without speculation. Pass `generation_kwargs` with a `spec_method` to its "
                "config."
            )
        settings = asked.get("speculative")
        rule = settings.get("rejection_sample_method") if isinstance(settings, Mapping) else None
        if rule not in (None, "standard", "block"):
            raise SpecConfigError(
                f"rejection_sample_method={shown(rule)} changes the distribution of texts, which would be off policy. "
                "Leave it out, or take 'block'."
            )
        if all(isinstance(value, (str, int, Mapping)) for value in asked.values()):
            # What is written in a generation config asks for nothing; here it is the user's own word.
            named = {key: asked.get(name) for name, key in _KEYS.items()}
            speculative = SpeculativeConfig.resolve(settings, target_config=trainer.model.config, **named)
            _switch_off(config)
            config.speculative = speculative
        model = trainer.accelerator.unwrap_model(trainer.model)
        # That of an adapter generates with the model inside.
        self._model_name = model_name(getattr(model, "get_base_model", lambda: model)())
        self._trainer = trainer
        trainer.callback_handler.callbacks.insert(0, self)
        return self

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        add_listener(self._record)

    def on_train_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        remove_listener(self._record)

    def on_step_end(self, args: Any, state: Any, control: Any, model: Any = None, **kwargs: Any) -> None:
        calls, self._record.calls = self._record.calls, []
        # A judge may generate speculatively, too.
        new = SpecDecodingStats.total(call.stats for call in calls if call.model_name == self._model_name)
        self._unlogged.add(new)
        model = self._trainer.accelerator.unwrap_model(model)
        if self._most_text_age is not None:
            age_texts(model, self._most_text_age)
        # Of steps that use earlier texts once more there is nothing to see.
        if self._least is None or not new.num_drafts:
            return
        self._steps.append(new)
        length = SpecDecodingStats.total(self._steps).mean_acceptance_length
        if len(self._steps) < self._window or length >= self._least:
            return
        self._steps.clear()
        finding = f"The drafter has grown stale: {length:.2f} tokens per verification over {self._window} steps"
        if self._refresh is None:
            logger.warning(f"{finding}. Speculation is switched off.")
            _switch_off(self._trainer.generation_config)
            return
        logger.warning(f"{finding}. It is refreshed.")
        self._refresh(model)
        forget_speculators(model)

    def on_log(self, args: Any, state: Any, control: Any, logs: dict[str, Any] | None = None, **kwargs: Any) -> None:
        taken, self._unlogged = self._unlogged, SpecDecodingStats()
        if logs is None or not taken.num_row_cycles:
            return
        figures = {
            "speculation/acceptance_length": taken.mean_acceptance_length,
            "speculation/acceptance_rate": taken.acceptance_rate,
            "speculation/draft_tokens": taken.num_draft_tokens,
        }
        logs.update(figures)
        if state.log_history:
            state.log_history[-1].update(figures)


def _switch_off(generation_config: Any) -> None:
    for name in ARGUMENTS:
        vars(generation_config).pop(name, None)
