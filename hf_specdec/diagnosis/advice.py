"""Finds the fastest way of speculating for a target, by measuring on the user's own prompts.

What there is to choose from comes from discovery (MTP layers of the target's checkpoint, drafters that the target or
the Hub names, the methods without weights) and from the user. What does not fit into the memory or does not load is
left out, with the reason; all others generate the same prompts beside plain generation and the loop without drafts, in
turn. Of the fastest one other speculation lengths are then measured. A method is recommended where it is faster than
both. The equations of [`~control.theory`] say why the others lose.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from itertools import chain, count
from typing import Any

from transformers import PreTrainedModel

from ..bench.decoders import Decoder, load_decoders, with_baselines
from ..bench.engine import Call, measure
from ..bench.prompts import Batch
from ..bench.report import make_rows
from ..control.theory import break_even_acceptance, optimal_length
from ..hub.discover import Search
from ..hub.target import Access, Target
from ..hub.trust import one_line
from ..machine import describe_environment, free_bytes
from ..method import NO_DRAFTS, built_in_methods, names_without_weights
from ..metrics import SpecDecodingStats
from ..settings import AUTO, SpeculativeConfig
from ..target_facts import model_name


# A smaller gain, over plain generation or by drafts, is not worth a configuration.
_WORTHWHILE = 1.02

# Ways with this share of the largest speed-up are measured again beside other lengths of the fastest.
_NEAR = 0.8

# Of the drafters that discovery has found, the best ones are measured.
DEFAULT_MOST_DRAFTERS = 4

# The method that drafts whatever repeats, and needs nothing.
_REPEATING = {
    "method": next(
        method.name
        for method in built_in_methods()
        if not (method.takes_model or method.package or method.complements_copies)
        and not (method.needs_grammar or method.only_if_named)
    )
}

# The loop without drafts.
_NONE, _BASELINE = {"method": NO_DRAFTS}, "the baseline"

_GREEDY = {"do_sample": False}


@dataclass
class Option:
    """One way of speculating, as measured.

    Attributes:
        name (`str`): Short and unique.
        settings (`dict`): Flat settings of [`SpeculativeConfig`].
        origin (`str`): Where it comes from, for people.
        speedup (`float`): Over plain generation in the same rounds, the median.
        over_none (`float`): The same over the loop without drafts: what the drafts bring.
        speedup_range, over_none_range (`tuple[float, float]`): Smallest and largest of the rounds.
        tokens_per_second (`float`): The median of the rounds.
        mean_acceptance_length (`float`): Tokens of a row per verification.
        acceptance_rate (`float`): Accepted draft tokens among those judged.
        drafted_share (`float`): Of the cycles, those with a draft.
        draft_length (`float`): Draft tokens of a cycle, the deepest path of a tree, on average.
        draft_seconds, verify_seconds (`float`): Of a cycle, on average.
        step_seconds (`float`): Of a token in the loop without drafts, on average.
        break_even (`float`, *optional*): The acceptance rate from which on chains of this length and cost would be
            faster than that; `None` if not even 1 is enough.
        draft_bytes (`int`, *optional*): Weights that it needs beside the target's.
        verdict (`str`): Why it wins or loses.
    """

    name: str
    settings: dict[str, Any]
    origin: str
    speedup: float
    speedup_range: tuple[float, float]
    over_none: float
    over_none_range: tuple[float, float]
    tokens_per_second: float
    mean_acceptance_length: float
    acceptance_rate: float
    drafted_share: float
    draft_length: float
    draft_seconds: float
    verify_seconds: float
    step_seconds: float
    break_even: float | None
    draft_bytes: int | None
    verdict: str = ""


@dataclass(frozen=True)
class Rejection:
    """One way of speculating that was not measured, and why."""

    name: str
    origin: str
    reason: str


@dataclass
class Advice:
    """Recommendation for a target.

    Attributes:
        target (`str`): Its name.
        best (`Option`, *optional*): What to use, perhaps the loop without drafts; `None`: plain generation.
        options (`list[Option]`): All that was measured, the fastest first.
        rejected (`list[Rejection]`): What was not.
        notes (`list[str]`): What could not be searched, and other limits of the advice.
        rounds (`int`): Rounds that were measured.
        free_bytes (`int`): Memory that was free on the device.
        environment (`dict`): Hardware and versions that the figures hold for.
    """

    target: str
    best: Option | None = None
    options: list[Option] = field(default_factory=list)
    rejected: list[Rejection] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    rounds: int = 0
    free_bytes: int = 0
    environment: dict[str, Any] = field(default_factory=dict)

    @property
    def snippets(self) -> dict[str, str]:
        """The recommended configuration as Python and as JSON."""
        if self.best is None:
            return {"python": "model.generate(**inputs)", "json": "null"}
        settings = self.best.settings
        text = json.dumps(settings)
        return {"python": f"model.generate(**inputs, speculative={settings!r})", "json": text}

    def to_dict(self) -> dict[str, Any]:
        """Converts to plain Python and JSON types."""
        return {**asdict(self), "snippets": self.snippets}


def advise(
    target_model: PreTrainedModel,
    batches: Sequence[Batch],
    *,
    specs: Mapping[str, Any] | None = None,
    discover: bool = True,
    local_files_only: bool = False,
    most_drafters: int = DEFAULT_MOST_DRAFTERS,
    rounds: int = 3,
    max_seconds: float | None = None,
    try_lengths: bool = True,
    on_step: Callable[[str], None] | None = None,
) -> Advice:
    """Measures what there is for a target and recommends the fastest.

    Args:
        target_model (`PreTrainedModel`): The target.
        batches (`Sequence[Batch]`): What to generate, from [`~bench.prompts.make_batches`].
        specs (`Mapping[str, Any]`, *optional*): Further ways of speculating by name: what `load_speculator` takes.
        discover (`bool`): Look for drafters as spec_method="auto" does.
        local_files_only (`bool`): Not on the Hub.
        most_drafters (`int`): Of those found, how many are measured at most; methods without weights come on top.
        rounds (`int`): Of timing.
        max_seconds (`float`, *optional*): Begin no further round that is likely to end later.
        try_lengths (`bool`): Also measure other speculation lengths of the fastest one.
        on_step (`Callable`, *optional*): Called with the name of each step as it begins.

    Raises:
        SpecConfigError: Plain generation fails, or a way of `specs` has wrong settings.
    """
    found = Advice(model_name(target_model), free_bytes=free_bytes(target_model.device))
    adviser = _Adviser(target_model, list(batches), found, rounds, max_seconds, on_step or (lambda step: None))
    for name, spec in (specs or {}).items():
        adviser.add(name, SpeculativeConfig.resolve(spec).to_dict(), "named by the user")
    if discover:
        adviser.search(local_files_only, most_drafters)
    for method in names_without_weights():
        adviser.add(method, {"method": method}, "needs no weights")
    adviser.measure(list(adviser.decoders))
    if try_lengths:
        adviser.measure_lengths()
    adviser.judge()
    found.environment = describe_environment(target_model.device, target_model.dtype)
    return found


class _Adviser:
    """Gathers ways of speculating, measures and compares them."""

    def __init__(
        self,
        model: PreTrainedModel,
        batches: list[Batch],
        advice: Advice,
        rounds: int,
        max_seconds: float | None,
        say: Callable[[str], None],
    ):
        self.model, self.advice, self.say = model, advice, say
        self.rounds, self.max_seconds = rounds, max_seconds
        self.size = max(len(batch.names) for batch in batches)
        self.batches = {self.size: batches}
        self.room = advice.free_bytes
        self.decoders: dict[str, Decoder] = {}
        self.origins: dict[str, str] = {}

    def search(self, local_files_only: bool, most: int) -> None:
        """Adds the drafters that discovery finds, the best ranked first."""
        self.say("Looking for drafters")
        search = Search(Target.of_model(self.model), Access(local_files_only=local_files_only))
        count = 0
        for candidate in search.all():
            if candidate.place == "none":
                continue
            reason = " ".join(candidate.problems)
            if not reason and count == most:
                reason = f"Only the {most} best ranked ones are measured."
            elif not reason and (size := candidate.num_bytes or 0) > self.room:
                reason = f"Its {size / 1e9:.2f} GB do not fit into the {self.room / 1e9:.2f} GB that are free."
            if reason:
                self._reject(str(candidate), candidate.reason, reason)
            else:
                settings = candidate.configured(SpeculativeConfig(method=AUTO)).to_dict()
                count += self.add(str(candidate), settings, candidate.reason)
        self.advice.notes += [f"Less may have been found {note}." for note in search.notes]

    def add(self, name: str, settings: dict[str, Any], origin: str) -> bool:
        """Loads one way of speculating, unless it is there already; `True` if that went well."""
        if any(decoder.settings == settings for decoder in self.decoders.values()):
            return False
        self.say(f"Loading {name}")
        before = free_bytes(self.model.device)
        try:
            (decoder,), _ = load_decoders(self.model, [settings])
        except Exception as error:  # noqa: BLE001 - weights of strangers may trip anything
            self._reject(name, origin, one_line(error, 500))
            return False
        if decoder.max_batch_size is not None and self.size > decoder.max_batch_size:
            self._reject(name, origin, f"It drafts for {decoder.max_batch_size} row, and batches have {self.size}.")
            return False
        self.room -= max(before - free_bytes(self.model.device), 0)
        names = chain([name], (f"{name} ({number})" for number in count(2)))
        decoder.name = next(name for name in names if name not in self.decoders)
        self.decoders[decoder.name], self.origins[decoder.name] = decoder, origin
        return True

    def _reject(self, name: str, origin: str, reason: str) -> None:
        self.advice.rejected.append(Rejection(name, origin, reason))

    def measure(self, names: Sequence[str]) -> None:
        """Times ways of speculating beside the baselines and adds what was found."""

        def begin(title: str, steps: int) -> Callable[[], None]:
            self.say(title)
            return lambda: None

        decoders = with_baselines(self.model, [self.decoders[name] for name in names])
        found = measure(
            self.model, decoders, self.batches, self.rounds, _GREEDY, max_seconds=self.max_seconds, begin=begin
        )
        for name, reason in found.refused[self.size].items():
            self._reject(name, self.origins.get(name, _BASELINE), reason)
        self.advice.rounds = len(found.rounds)

        def calls_of(name: str) -> list[Call]:
            return [call for one in found.rounds for call in one[self.size][name]]

        # Of the tokens after the first one, which reads the prompt.
        _, *rows = make_rows(self.model, decoders, found, greedy=True)
        seconds = [second for call in calls_of(rows[0]["method"]) for second in call.cycle_seconds] if rows else []
        step_seconds = sum(seconds) / len(seconds) if seconds else 0.0
        # Once is enough for the baseline, in the rounds of the others that are still to be compared.
        self.advice.options = [option for option in self.advice.options if option.settings != _NONE]
        self.advice.options += [self._option(row, calls_of(row["method"]), step_seconds) for row in rows]
        self.advice.options.sort(key=lambda option: -option.speedup)

    def _option(self, row: dict[str, Any], calls: Sequence[Call], step_seconds: float) -> Option:
        # transformers' own assisted generation keeps none.
        stats = SpecDecodingStats.total([call.stats for call in calls if call.stats is not None])
        # Of a batch all rows that are active share a cycle.
        cycles = max(stats.num_target_forwards - len(calls), 1)
        draft_seconds, verify_seconds = stats.draft_seconds / cycles, stats.verify_seconds / cycles
        depths = sum(depth * count for depth, count in enumerate(stats.num_drafts_per_depth, start=1))
        length = depths / max(stats.num_drafts, 1)
        speedup, over_none = row["spread"]["speedup"], row["spread"]["speedup_over_none"]
        return Option(
            name=row["method"],
            settings=row["settings"],
            origin=self.origins.get(row["method"], _BASELINE),
            speedup=row["speedup"],
            speedup_range=(speedup["low"], speedup["high"]),
            over_none=row["speedup_over_none"],
            over_none_range=(over_none["low"], over_none["high"]),
            tokens_per_second=row["tokens_per_second"],
            mean_acceptance_length=row["mean_acceptance_length"],
            acceptance_rate=stats.acceptance_rate,
            drafted_share=stats.num_drafts / max(stats.num_row_cycles, 1),
            draft_length=length,
            draft_seconds=draft_seconds,
            verify_seconds=verify_seconds,
            step_seconds=step_seconds,
            break_even=break_even_acceptance(max(round(length), 1), draft_seconds, verify_seconds, step_seconds),
            draft_bytes=row["draft_bytes"],
        )

    def measure_lengths(self) -> None:
        """Measures other lengths of the fastest way, beside it and those that come near it."""
        options = [option for option in self.advice.options if option.settings != _NONE]
        if not options:
            return
        best, before = options[0], list(self.decoders)
        settings = {key: value for key, value in best.settings.items() if key != "speculative_token_tree"}
        others = [] if SpeculativeConfig.from_dict(best.settings).is_adaptive else [AUTO]
        for k in (_best_length(best), *others):
            if k and k != best.settings.get("num_speculative_tokens"):
                self.add(f"{best.name}, k={k}", {**settings, "num_speculative_tokens": k}, best.origin)
        added = [name for name in self.decoders if name not in before]
        if added:
            # Once more, so that all that may win is compared in the same rounds.
            near = [option for option in options if option.speedup >= _NEAR * best.speedup]
            self.advice.options = [option for option in options if option not in near]
            self.measure([*(option.name for option in near), *added])

    def judge(self) -> None:
        """Chooses, and says for each why it wins or loses."""
        advice = self.advice
        advice.best = next(filter(_is_worthwhile, advice.options), None)
        for option in advice.options:
            option.verdict = _verdict(option, advice.best)
            if option.settings == _REPEATING:
                advice.notes.append(
                    f"How repetitive the texts are: in {option.drafted_share:.0%} of the cycles {option.name} finds "
                    f"something to repeat, and {option.acceptance_rate:.0%} of what it drafts then is accepted."
                )


def _is_worthwhile(option: Option) -> bool:
    """Tells a way that is faster than both baselines in every round, and by enough to be worth a configuration."""
    gains = [(option.speedup, option.speedup_range)]
    if option.settings != _NONE:
        gains.append((option.over_none, option.over_none_range))
    return all(gain >= _WORTHWHILE and low > 1 for gain, (low, _) in gains)


def _best_length(option: Option) -> int:
    """The speculation length that the measured acceptance and costs make the best, by the equations."""
    k = max(option.draft_length, 1.0)

    # Between a step without drafts and the measured verification; beyond it on along the same line.
    slope = max(option.verify_seconds - option.step_seconds, 0.0) / k
    return optimal_length(
        option.acceptance_rate,
        lambda length: option.draft_seconds * length / k,
        lambda length: option.step_seconds + slope * length,
        most=max(2 * round(k), 4),
    )


def _verdict(option: Option, best: Option | None) -> str:
    seconds = option.step_seconds or float("inf")
    cost = (option.draft_seconds + option.verify_seconds) / seconds
    share = 100 * option.draft_seconds / max(option.draft_seconds + option.verify_seconds, 1e-12)
    facts = (
        f"{option.mean_acceptance_length:.2f} tokens a cycle, which costs {cost:.2f} steps without drafts "
        f"({share:.0f} % of it drafting)"
    )
    if option.settings == _NONE:
        return f"The loop without drafts: {option.speedup:.2f} times as fast as plain generation."
    if option is best:
        return f"The fastest: {facts}."
    if min(option.speedup, option.over_none) < _WORTHWHILE:
        if option.break_even is None:
            need = "no acceptance would be enough"
        else:
            need = f"chains of its length need an acceptance rate of {option.break_even:.2f}"
        return f"Not worth it: {facts}; {need}, and it has {option.acceptance_rate:.2f}."
    if best is None or best.settings == _NONE:
        return f"Not surely faster: its drafts bring {option.over_none_range[0]:.2f}x in one round; {facts}."
    if option.speedup_range[1] >= best.speedup_range[0]:
        return f"As fast as the fastest, within the spread of the rounds: {facts}."
    best_cost = (best.draft_seconds + best.verify_seconds) / seconds
    if option.mean_acceptance_length < best.mean_acceptance_length and cost < best_cost:
        return f"Fewer tokens a cycle than the fastest, which its lower cost does not make up for: {facts}."
    if option.mean_acceptance_length < best.mean_acceptance_length:
        return f"Fewer tokens a cycle than the fastest: {facts}."
    return f"A more expensive cycle than that of the fastest: {facts}."
