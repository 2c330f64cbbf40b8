"""Compares the texts of speculative calls with those of plain generation, and tells numerical ties from bugs.

Two ways to compute the same logits round differently, in bfloat16 visibly so. Where two tokens are equally likely up
to that error, either may win, and from there on the texts are different ones. A wrong token wins by more.

The first token that differs is judged by reference logits z of the text before it, from plain forwards that know
nothing of speculation:

    margin = max z - min(z[plain token], z[speculative token])
    numerical tie: margin <= 2 e,  bug: margin > 2 e

where e is the rounding error as measured on this text: the largest difference from z, over all positions from the
prompt's end to the token in question and the likeliest tokens of each, of the model's own logits, once computed token
by token and once for the whole text at once. z is computed in the next wider data type if the memory allows it, else
for the whole text at once in the model's own. Logits are those after the logits processors of the call.

Shapes: P tokens of the prompt, N generated ones in common, V vocabulary.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

import torch
from transformers import LogitsProcessor, LogitsProcessorList, PreTrainedModel, StoppingCriteria, StoppingCriteriaList
from transformers.utils import logging

from ..bench.engine import first_difference, greedy_texts
from ..bench.prompts import Batch
from ..loader import load_speculator
from ..machine import free_bytes
from ..patching import original_generate
from ..target.facts import model_profile
from ..target_facts import quantisation
from ..threads import cached_property


logger = logging.get_logger(__name__)

TIE, BUG = "numerical tie", "bug"

# Rounding errors are looked at where they matter: at the likeliest tokens.
_LIKELY_TOKENS = 8

# The reference for each data type.
_WIDER = {torch.bfloat16: torch.float32, torch.float16: torch.float32, torch.float32: torch.float64}

# Of a copy's bytes, what its forward needs beside it.
_ROOM = 1.2


@dataclass(frozen=True)
class Difference:
    """First place where a text differs from that of plain generation.

    Attributes:
        prompt (`str`): Name of the prompt.
        index (`int`): Of the generated token, from 0.
        plain_token, speculative_token (`int`, *optional*): The two; `None` where that text has ended before.
        plain_logit, speculative_logit (`float`, *optional*): Their reference logits.
        margin (`float`, *optional*): What the less likely of them lacks to the likeliest token.
        rounding_error (`float`, *optional*): e, as measured.
        reference_dtype (`str`, *optional*): Data type of the reference.
        verdict (`str`): "numerical tie" or "bug".
    """

    prompt: str
    index: int
    plain_token: int | None
    speculative_token: int | None
    plain_logit: float | None
    speculative_logit: float | None
    margin: float | None
    rounding_error: float | None
    reference_dtype: str | None
    verdict: str

    @property
    def tolerance(self) -> float | None:
        """The largest margin of a tie: 2 e."""
        return None if self.rounding_error is None else 2 * self.rounding_error


@dataclass
class Verification:
    """The texts of one way of speculating beside those of plain generation.

    Attributes:
        method (`str`): Its name.
        num_texts (`int`): Texts that were compared.
        num_tokens (`int`): Tokens that plain generation wrote in them.
        differences (`list[Difference]`): One for each text that differs.
    """

    method: str
    num_texts: int = 0
    num_tokens: int = 0
    differences: list[Difference] = field(default_factory=list)

    @property
    def bugs(self) -> list[Difference]:
        """Differences that no rounding explains."""
        return [difference for difference in self.differences if difference.verdict == BUG]

    def to_dict(self) -> dict[str, Any]:
        """Converts to plain Python and JSON types."""
        return {
            "method": self.method,
            "num_texts": self.num_texts,
            "num_tokens": self.num_tokens,
            "num_equal": self.num_texts - len(self.differences),
            "num_ties": len(self.differences) - len(self.bugs),
            "num_bugs": len(self.bugs),
            "differences": [{**asdict(item), "tolerance": item.tolerance} for item in self.differences],
        }


def verify(
    target_model: PreTrainedModel,
    methods: Mapping[str, Any],
    batches: Sequence[Batch],
    *,
    on_step: Callable[[], None] = lambda: None,
) -> list[Verification]:
    """Compares greedy texts with those of plain generation, and judges every difference.

    Args:
        target_model (`PreTrainedModel`): The target.
        methods (`Mapping[str, Any]`): For each name what `load_speculator` takes as `config`, or a `Speculator`.
        batches (`Sequence[Batch]`): What to generate, from [`~bench.prompts.make_batches`].
        on_step (`Callable`): Called after every `generate()` call.

    Returns:
        One [`Verification`] for each of the methods, in their order.

    Raises:
        SpecConfigError: A method cannot be loaded or does not fit the target.
    """
    # All of them first: what is wrong shall show before anything is generated.
    speculators = {
        # All that may ever be drafted is judged, not the part that pays.
        name: spec if hasattr(spec, "candidate_generator") else load_speculator(target_model, spec).at_full_length()
        for name, spec in methods.items()
    }
    results = {name: Verification(name) for name in speculators}
    reference = _Reference(target_model)
    for batch in batches:
        # The settings of a generation config must not speed up what the others are compared with.
        plain = greedy_texts(target_model, batch, spec_method="off")
        on_step()
        for name, speculator in speculators.items():
            found = greedy_texts(target_model, batch, assistant=speculator)
            result = results[name]
            result.num_texts += len(plain)
            result.num_tokens += sum(map(len, plain))
            for row, (expected, tokens) in enumerate(zip(plain, found)):
                if tokens != expected:
                    prompt = batch.inputs["input_ids"][row, batch.inputs["attention_mask"][row].bool()][None]
                    judged = reference.judge(batch.names[row], prompt, expected, tokens, batch.max_new_tokens)
                    result.differences.append(judged)
            on_step()
    return list(results.values())


class _Reference:
    """Judges texts by plain forwards of a model; its wider copy is made when it is needed, and once."""

    def __init__(self, model: PreTrainedModel):
        self.model = model

    def judge(
        self, name: str, prompt: torch.LongTensor, plain: list[int], speculative: list[int], max_new_tokens: int
    ) -> Difference:
        """Judges two texts `plain` and `speculative` that follow a prompt `(1, P)`."""
        index = first_difference(plain, speculative)
        assert index is not None, "the texts are equal"
        tokens = [text[index] if index < len(text) else None for text in (plain, speculative)]
        if None in tokens:
            # The same tokens, and one of them goes on: no logit decides that.
            return Difference(name, index, *tokens, None, None, None, None, None, BUG)
        common, dtype = plain[:index], self.model.dtype
        processors = _processors(self.model, prompt, max_new_tokens)
        others = [_stepwise_scores(self.model, prompt, common, max_new_tokens)]
        reference = _scores_at_once(self.model, processors, prompt, common)
        wide = self._wide_scores(processors, prompt, common)
        if wide is not None:
            others, reference, dtype = [*others, reference], wide, _WIDER[dtype]
        last = reference[-1]
        plain_logit, speculative_logit = last[tokens].tolist()
        margin = (last.max() - last[tokens].min()).item()
        error = max(_largest_error(other, reference, tokens) for other in others)
        # Logits themselves are numbers of the data type.
        error = max(error, torch.finfo(self.model.dtype).eps * max(abs(plain_logit), abs(speculative_logit)))
        return Difference(
            name,
            index,
            *tokens,
            plain_logit,
            speculative_logit,
            margin,
            error,
            str(dtype).removeprefix("torch."),
            TIE if margin <= 2 * error else BUG,
        )

    @cached_property
    def _wide(self) -> PreTrainedModel | None:
        return _wider_copy(self.model)

    def _wide_scores(
        self, processors: LogitsProcessorList, prompt: torch.LongTensor, common: list[int]
    ) -> torch.Tensor | None:
        if self._wide is None:
            return None
        try:
            return _scores_at_once(self._wide, processors, prompt, common)
        except (RuntimeError, TypeError) as error:
            logger.warning(f"{type(self.model).__name__} does not run in {self._wide.dtype}: {error}")
            self._wide = None
            return None


def _wider_copy(model: PreTrainedModel) -> PreTrainedModel | None:
    """The model in the next wider data type, `None` where there is none, or no room."""
    wider = _WIDER.get(model.dtype)
    parameters = list(model.parameters())
    is_whole = len({parameter.device for parameter in parameters}) == 1 and all(
        map(torch.is_floating_point, parameters)
    )
    if wider is None or not is_whole or quantisation(model) is not None:
        return None
    size = sum(parameter.numel() for parameter in parameters) * wider.itemsize
    if size * _ROOM > free_bytes(model.device):
        logger.info(f"No reference in {wider}: {size / 1e9:.1f} GB do not fit beside the model.")
        return None
    return copy.deepcopy(model).to(wider)


def _processors(model: PreTrainedModel, prompt: torch.LongTensor, max_new_tokens: int) -> LogitsProcessorList:
    """The logits processors that `generate()` prepares for a greedy call."""
    prepared = []

    def decode(model, input_ids, logits_processor, **kwargs):
        prepared.append(logits_processor)
        return input_ids

    _plainly(model, prompt, max_new_tokens, custom_generate=decode)
    return prepared[0]


class _Followed(LogitsProcessor):
    """Makes a call write given tokens, and keeps the scores at each of them and after the last one."""

    def __init__(self, tokens: list[int]):
        self.tokens, self.scores = tokens, []

    def __call__(self, input_ids, scores):
        index = len(self.scores)
        self.scores.append(scores[0].float().cpu())
        if index == len(self.tokens):
            return scores
        return torch.full_like(scores, -torch.inf).index_fill_(1, input_ids.new_tensor(self.tokens[index]), 0.0)


class _HasFollowed(StoppingCriteria):
    """Ends the call one token after the given ones; processors may look at its maximal length."""

    def __init__(self, followed: _Followed):
        self.followed = followed

    def __call__(self, input_ids, scores, **kwargs):
        is_done = len(self.followed.scores) > len(self.followed.tokens)
        return torch.full((input_ids.shape[0],), is_done, dtype=torch.bool, device=input_ids.device)


def _stepwise_scores(
    model: PreTrainedModel, prompt: torch.LongTensor, tokens: list[int], max_new_tokens: int
) -> torch.Tensor:
    """Scores `(N + 1, V)` of plain generation, which reads one token after the other."""
    followed = _Followed(tokens)
    _plainly(
        model,
        prompt,
        max_new_tokens,
        logits_processor=LogitsProcessorList([followed]),
        stopping_criteria=StoppingCriteriaList([_HasFollowed(followed)]),
    )
    return torch.stack(followed.scores)


def _plainly(model: PreTrainedModel, prompt: torch.LongTensor, max_new_tokens: int, **arguments: Any) -> None:
    """Calls transformers' own greedy `generate()`."""
    original_generate(type(model))(
        model,
        input_ids=prompt,
        attention_mask=torch.ones_like(prompt),
        do_sample=False,
        max_new_tokens=max_new_tokens,
        **arguments,
    )


@torch.no_grad()
def _scores_at_once(
    model: PreTrainedModel, processors: LogitsProcessorList, prompt: torch.LongTensor, tokens: list[int]
) -> torch.Tensor:
    """Scores `(N + 1, V)` of one forward over the whole text, in float32 or wider."""
    text, length = torch.cat([prompt, prompt.new_tensor([tokens])], dim=1), len(tokens) + 1
    kept = {"logits_to_keep": length} if model_profile(model).takes_logits_to_keep else {}
    output = model(input_ids=text, attention_mask=torch.ones_like(text), use_cache=False, **kept)
    logits = output.logits[:, -length:]
    logits = logits if logits.dtype == torch.float64 else logits.float()
    first = prompt.shape[1]
    return torch.cat([processors(text[:, : first + n], logits[:, n]) for n in range(length)]).cpu()


def _largest_error(scores: torch.Tensor, reference: torch.Tensor, tokens: list[int]) -> float:
    """The largest difference of the scores `(N + 1, V)` of likely tokens, and of `tokens` at the last position."""
    likely = reference.topk(min(_LIKELY_TOKENS, reference.shape[1]), dim=1).indices
    differences = (scores.to(reference) - reference).abs()
    found = torch.cat([differences.gather(1, likely).flatten(), differences[-1, tokens]])
    # Tokens that processors forbid have none.
    return found[found.isfinite()].max().item() if bool(found.isfinite().any()) else 0.0
