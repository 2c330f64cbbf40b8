"""Compares the texts of speculative calls with those of plain generation, and tells numerical ties from bugs.

Two ways to compute the same logits round differently, in bfloat16 visibly so. Where two tokens are equally likely up
to that error, either may win, and from there on the texts are different ones. A wrong token wins by more.

The first token that differs is judged by logits z of the text before it, from one plain forward of the target in
float32, which knows nothing of speculation:

    margin = max z - min(z[plain token], z[speculative token])
    numerical tie: margin <= 2 e,  bug: margin > 2 e

where e is the rounding error of the target's own data type: the largest difference from z, over all places from the
prompt's end on and the likeliest tokens of each, of the logits of one forward in that type, and at least the error of
numbers of their size. Where there is no room for a copy in float32, z is in the target's own type. Logits are those
after the logits processors of the call.

Shapes: P tokens of the prompt, N generated ones in common, V vocabulary.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

import torch
from transformers import LogitsProcessorList, PreTrainedModel
from transformers.utils import logging

from ..arguments import original_generate
from ..bench.engine import first_difference, greedy_texts
from ..bench.prompts import Batch
from ..loader import load_speculator
from ..machine import free_bytes
from ..target.facts import model_profile
from ..target_facts import quantisation


logger = logging.get_logger(__name__)

TIE, BUG = "numerical tie", "bug"

# Rounding errors are looked at where they matter: at the likeliest tokens.
_LIKELY_TOKENS = 8

# Least rounding error of float32, in units of the last place of the largest logit: it adds up over the layers.
_LEAST_ERROR = 512

# Of a copy's bytes, what its forward needs beside it.
_ROOM = 1.2


@dataclass(frozen=True)
class Difference:
    """First place where a text differs from that of plain generation."""

    prompt: str
    index: int  # of the generated token, from 0
    plain_token: int | None  # `None` where that text has ended before
    speculative_token: int | None
    plain_logit: float | None = None  # in float32
    speculative_logit: float | None = None
    margin: float | None = None  # what the less likely of them lacks to the likeliest token
    tolerance: float | None = None  # the largest margin of a tie: 2 e
    verdict: str = BUG


@dataclass
class Verification:
    """The texts of one way of speculating beside those of plain generation."""

    method: str
    num_texts: int = 0  # that were compared
    num_tokens: int = 0  # that plain generation wrote in them
    differences: list[Difference] = field(default_factory=list)  # one for each text that differs

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
            "differences": [asdict(item) for item in self.differences],
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
    judge = _Judge(target_model)
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
                    result.differences.append(judge(batch.names[row], prompt, expected, tokens, batch.max_new_tokens))
            on_step()
    return list(results.values())


class _Judge:
    """Judges texts by plain forwards of a model; its float32 copy is made when it is needed, and once."""

    def __init__(self, model: PreTrainedModel):
        self.model = model
        self.reference: PreTrainedModel | None = None

    def __call__(
        self, name: str, prompt: torch.LongTensor, plain: list[int], speculative: list[int], max_new_tokens: int
    ) -> Difference:
        """Judges two texts `plain` and `speculative` that follow a prompt `(1, P)`."""
        index = first_difference(plain, speculative)
        assert index is not None, "the texts are equal"
        tokens = [text[index] if index < len(text) else None for text in (plain, speculative)]
        if None in tokens:
            # The same tokens, and one of them goes on: no logit decides that.
            return Difference(name, index, *tokens)
        text = torch.cat([prompt, prompt.new_tensor([plain[:index]])], dim=1)
        self.reference = self.reference or _in_float32(self.model) or self.model
        logits = _logits(self.reference, text, index + 1)
        scores = _processors(self.model, prompt, max_new_tokens)(text, logits[-1:])[0]
        plain_logit, speculative_logit = scores[tokens].tolist()
        error = torch.finfo(self.model.dtype).eps * scores.max().abs().item()
        if self.model.dtype.itemsize >= 4:
            error *= _LEAST_ERROR
        elif self.reference is not self.model:
            likely = logits.topk(min(_LIKELY_TOKENS, logits.shape[1]), dim=1).indices
            own = _logits(self.model, text, index + 1).to(logits)
            error = max(error, (own - logits).abs().gather(1, likely).max().item())
        margin = scores.max().item() - min(plain_logit, speculative_logit)
        verdict = TIE if margin <= 2 * error else BUG
        return Difference(name, index, *tokens, plain_logit, speculative_logit, margin, 2 * error, verdict)


def _in_float32(model: PreTrainedModel) -> PreTrainedModel | None:
    """A copy of a model of a narrower type in float32; `None` for others, or where there is no room."""
    parameters = list(model.parameters())
    is_whole = len({parameter.device for parameter in parameters}) == 1
    if model.dtype.itemsize >= 4 or not is_whole or quantisation(model) is not None:
        return None
    size = sum(parameter.numel() for parameter in parameters) * 4
    if size * _ROOM > free_bytes(model.device):
        logger.info(f"No copy in float32: {size / 1e9:.1f} GB do not fit beside the model.")
        return None
    return copy.deepcopy(model).float()


@torch.no_grad()
def _logits(model: PreTrainedModel, text: torch.LongTensor, length: int) -> torch.Tensor:
    """Logits `(length, V)` of one forward over a text `(1, T)`, those at its end, in float32 or wider."""
    kept = {"logits_to_keep": length} if model_profile(model).takes_logits_to_keep else {}
    output = model(input_ids=text, attention_mask=torch.ones_like(text), use_cache=False, **kept)
    logits = output.logits[0, -length:]
    return logits if logits.dtype == torch.float64 else logits.float()


def _processors(model: PreTrainedModel, prompt: torch.LongTensor, max_new_tokens: int) -> LogitsProcessorList:
    """The logits processors that `generate()` prepares for a greedy call."""
    prepared = []

    def decode(model, input_ids, logits_processor, **kwargs):
        prepared.append(logits_processor)
        return input_ids

    call = {"attention_mask": torch.ones_like(prompt), "do_sample": False, "max_new_tokens": max_new_tokens}
    original_generate(type(model))(model, input_ids=prompt, **call, custom_generate=decode)
    return prepared[0]
