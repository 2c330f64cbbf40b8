"""Examines why speculation with a drafter is not faster, by five checks.

fit             what configs and tensors say, and whether it loads
dtype           data types and quantised weights of the two
vocabulary      tokenizers, and the tokens that can be drafted
chat template   acceptance with and without it
acceptance      by position, where the target goes on from a few prompts and the drafter drafts at every token

Nothing here raises for what is wrong with the pair; it becomes a finding, with what was found and what to do.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, field, replace
from typing import Any

import torch
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from ..bench.prompts import Batch, Prompt, as_chat, general_prompts, make_batches
from ..checkpoints.files import RepoFiles
from ..errors import SpecDecError
from ..loader import load_speculator
from ..method import methods
from ..settings import SpeculativeConfig
from ..speculator import Speculator
from ..target_facts import model_name, num_embeddings
from .checks import (
    Finding,
    Status,
    checkpoint_findings,
    machine_findings,
    network_findings,
    token_ids,
    tokenizer_findings,
)
from .probe import FEWEST_DRAFTS, Acceptance, measure_acceptance


# Below this share acceptance is no better than guessing.
_GUESSING = 0.05

# A second position that is accepted this much more rarely than the first is no slow decline.
_FALL = 0.5

# Prompts of the probe that are generated together.
_BATCH_SIZE = 4

# Of what the target writes, tokens that a draft vocabulary may lack.
_MOST_MISSING = 0.1


@dataclass
class Diagnosis:
    """Findings about a target and a drafter."""

    target: str
    drafter: str
    findings: list[Finding] = field(default_factory=list)  # in the order of the checks
    # By the form of prompts: "raw", "chat", "chat, no thinking", "sampled".
    acceptance: dict[str, Acceptance] = field(default_factory=dict)

    @property
    def status(self) -> Status:
        """The worst of all findings."""
        found = {finding.status for finding in self.findings}
        return next(status for status in ("error", "warning", "ok") if status in found or status == "ok")

    @property
    def causes(self) -> list[Finding]:
        """What is wrong."""
        return [finding for finding in self.findings if finding.status != "ok"]

    def to_dict(self) -> dict[str, Any]:
        """Converts to plain Python and JSON types."""
        return {
            "target": self.target,
            "drafter": self.drafter,
            "status": self.status,
            "findings": [asdict(finding) for finding in self.findings],
            "acceptance": {form: found.to_dict() for form, found in self.acceptance.items()},
        }


def diagnose(
    target_model: PreTrainedModel,
    spec: Any,
    tokenizer: PreTrainedTokenizerBase,
    *,
    prompts: Sequence[Prompt] | None = None,
    max_new_tokens: int = 64,
    on_step: Callable[[str], None] | None = None,
) -> Diagnosis:
    """Checks a drafter against a target, and probes what is accepted.

    Args:
        target_model (`PreTrainedModel`): The target.
        spec (`Any`): What `load_speculator` takes: a config, dict, JSON, method, repo id or path.
        tokenizer (`PreTrainedTokenizerBase`): The target's.
        prompts (`Sequence[Prompt]`, *optional*): What to probe with, without a chat template. `None`: a few general
            ones, of `max_new_tokens` tokens.
        max_new_tokens (`int`): See there.
        on_step (`Callable`, *optional*): Called with the name of each step as it begins.
    """
    say = on_step or (lambda step: None)
    found = Diagnosis(model_name(target_model), str(spec))
    found.findings += machine_findings(target_model)
    add = found.findings.append
    say("Checking the checkpoint")
    try:
        # Without the target's limits: those are for loading to refuse.
        config = SpeculativeConfig.resolve(spec)
    except (SpecDecError, OSError) as error:
        add(Finding("fit", "error", str(error)))
        return found
    found.drafter = config.model or config.method
    files = None
    if config.model is not None:
        files = RepoFiles.of(config)
        found.findings += checkpoint_findings(files, config, target_model)
    found.findings += tokenizer_findings(config, tokenizer)
    say("Loading the drafter")
    try:
        speculator = load_speculator(target_model, config)
    except (SpecDecError, OSError, torch.OutOfMemoryError) as error:
        add(Finding("fit", "error", " ".join(str(error).split())))
        return found
    found.drafter = speculator.config.model or speculator.method
    add(Finding("fit", "ok", f"It loads as '{speculator.method}'."))
    found.findings += network_findings(speculator, target_model, files)
    prompts = general_prompts(max_new_tokens) if prompts is None else prompts
    try:
        batches = _batches(prompts, tokenizer, target_model, speculator)
        found.findings += _probed(found.acceptance, batches, target_model, speculator, say)
    except SpecDecError as error:
        add(Finding("acceptance", "error", str(error)))
    return found


def _batches(
    prompts: Sequence[Prompt], tokenizer: PreTrainedTokenizerBase, model: PreTrainedModel, speculator: Speculator
) -> dict[str, list[Batch]]:
    """The prompts by their form: "raw", and in the chat template and its modes where there is one."""
    # Without a network a batch saves nothing, and its rows share a draft length.
    can_pad = tokenizer.padding_side == "left" and tokenizer.pad_token is not None
    has_network = speculator.generator_class.network(speculator.resources) is not None
    size = _BATCH_SIZE if has_network and can_pad else 1
    # Of one kind, so that they can be generated together.
    prompts = [replace(prompt, kind="") for prompt in prompts]
    batches = {"raw": make_batches(tokenizer, prompts, size, device=model.device)}
    template, modes = tokenizer.chat_template or "", {"chat": {}, "chat, no thinking": {"enable_thinking": False}}
    for form, mode in modes.items():
        if template and all(argument in template for argument in mode):
            chats = as_chat(prompts, tokenizer, **mode)
            batches[form] = make_batches(tokenizer, chats, size, device=model.device, add_special_tokens=False)
    return batches


def _probed(
    measured: dict[str, Acceptance],
    batches: dict[str, list[Batch]],
    model: PreTrainedModel,
    speculator: Speculator,
    say: Callable[[str], None],
) -> Iterator[Finding]:
    """Findings of the probe, whose acceptance by form of prompts is put into `measured`."""
    num_tokens = num_embeddings(model.get_input_embeddings())
    largest = max(int(batch.inputs["input_ids"].max()) for group in batches.values() for batch in group)
    if largest >= num_tokens:
        yield Finding(
            "vocabulary",
            "error",
            f"The tokenizer writes a prompt with the token {largest}, and the target knows the tokens 0 to "
            f"{num_tokens - 1}.",
            "Pass the tokenizer that the target was trained with.",
        )
        return
    for form, group in batches.items():
        say(f"Probing the acceptance, {form} prompts")
        measured[form] = measure_acceptance(model, speculator, group)
    # Where one form of prompts is worse, the other tells more about the pair.
    form = max(measured, key=lambda name: (measured[name].num_drafts >= FEWEST_DRAFTS, measured[name].first_rate))
    best = measured[form]
    if best.num_drafts < FEWEST_DRAFTS:
        yield Finding(
            "acceptance",
            "warning",
            f"Only {best.num_drafts} drafts in {best.num_places} places: too few to tell anything.",
            "Probe with more or longer prompts.",
        )
        return
    network = speculator.generator_class.network(speculator.resources)
    yield from _vocabulary_findings(best, None if network is None else token_ids(network))
    yield from _template_findings(measured)
    method = methods().get(speculator.method)
    yield _acceptance_finding(best, None if method is None else method.healthy_first_rate)
    settings = model.generation_config
    if not settings.do_sample:
        return
    say("Probing the acceptance, sampled")
    with torch.random.fork_rng():
        torch.manual_seed(0)
        sampled = measured["sampled"] = measure_acceptance(model, speculator, batches[form], do_sample=True)
    if best.is_above(sampled):
        temperature = 1.0 if settings.temperature is None else settings.temperature
        yield Finding(
            "acceptance",
            "warning",
            f"The target's generation config samples (temperature {temperature:g}): {sampled.acceptance_length:.2f} "
            f"tokens a cycle, and {best.acceptance_length:.2f} for greedy text. What is drawn at random is hard to "
            "foresee.",
            "Lower the temperature if the task allows it, and speculate fewer tokens.",
        )


def _acceptance_finding(found: Acceptance, healthy: float | None) -> Finding:
    """What the acceptance by position tells; `healthy` is a first rate that drafters in order have at least."""
    first, rates = found.first_rate, found.rates
    complaint, remedy = "", ""
    if healthy is None:
        remedy = "" if first >= _GUESSING else "These prompts repeat little. Try a method with a drafter."
    elif first < healthy:
        complaint = f" Healthy drafters of this method have at least {100 * healthy:.0f} % at the first position."
        if first < _GUESSING:
            complaint = " The first position is hardly better than guessing."
        remedy = (
            "Most likely it was trained for another model, another version of this one or another kind of text, or "
            "reads other states of the target than in its training. Compare the target, its revision and the layers "
            "in the drafter's config with its card."
        )
    elif len(rates) > 1 and found.reached[1] >= FEWEST_DRAFTS and rates[1] < _FALL * rates[0]:
        complaint = " It is high at the first position and falls at once."
        remedy = (
            "The drafter was trained for one step only, or its positions or its recurrence are not those of its "
            "training. Draft one token (num_speculative_tokens=1), or train it to draft several."
        )
    shown = f"{found.acceptance_length:.2f} tokens a cycle; accepted by position: "
    shown += f"{', '.join(f'{100 * rate:.0f}' for rate in rates[:8])} %."
    return Finding("acceptance", "warning" if remedy else "ok", shown + complaint, remedy)


def _vocabulary_findings(found: Acceptance, draft_ids: torch.LongTensor | None) -> Iterator[Finding]:
    """How much of what the target writes a smaller draft vocabulary lacks."""
    if draft_ids is None:
        return
    known = set(draft_ids.tolist())
    missing = sum(token not in known for token in found.tokens) / max(len(found.tokens), 1)
    shown = f"{100 * missing:.1f} % of the tokens that the target wrote are not in the draft vocabulary"
    if missing <= _MOST_MISSING:
        yield Finding("vocabulary", "ok", f"{shown}.")
        return
    yield Finding(
        "vocabulary",
        "warning",
        f"{shown} ({len(known)} tokens): each of them ends a draft.",
        "Use a drafter whose vocabulary was chosen on text of this kind, or has all tokens.",
    )


def _template_findings(measured: dict[str, Acceptance]) -> Iterator[Finding]:
    """Which form of prompts, and of answers, is drafted for better."""
    raw, chat, silent = (measured.get(form) for form in ("raw", "chat", "chat, no thinking"))
    if chat is None:
        return
    figures = f"{chat.acceptance_length:.2f} tokens a cycle with it, {raw.acceptance_length:.2f} without"
    if silent is not None and (silent.is_above(chat) or chat.is_above(silent)):
        better, worse = ("without", "with") if silent.is_above(chat) else ("with", "without")
        cause = (
            f"Answers {worse} thinking are drafted for less well: {chat.acceptance_length:.2f} tokens a cycle with "
            f"it, {silent.acceptance_length:.2f} without. The drafter was trained on answers {better} it."
        )
        remedy = f"Pass enable_thinking={better == 'with'} to the chat template where the task allows it."
    elif chat.is_above(raw):
        cause = f"Prompts without the chat template are drafted for less well: {figures}."
        remedy = "Put prompts into the chat template, as in the drafter's training."
    elif raw.is_above(chat):
        cause = (
            f"Prompts in the target's chat template are drafted for less well: {figures}. The drafter was trained on "
            "text without it, or with another one."
        )
        remedy = "Use a drafter that was trained on chats with this template."
    else:
        yield Finding("chat template", "ok", f"It makes no difference: {figures}.")
        return
    yield Finding("chat template", "warning", cause, remedy)
