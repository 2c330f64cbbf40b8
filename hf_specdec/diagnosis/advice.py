"""Which drafters there are for a target, and which of them pays on the user's own prompts.

What there is to choose from comes from discovery (MTP layers of the target's checkpoint, drafters that the target or
the Hub names, the methods without weights) and from the user. What does not fit into the memory or does not load is
left out, with the reason; all others are measured beside plain generation and the loop without drafts. A method is
recommended where it is faster than both.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, fields
from itertools import chain, count
from typing import Any

from transformers import PreTrainedModel

from ..bench.decoders import PLAIN, STOCK, Decoder, load_decoders, with_baselines
from ..bench.engine import Begin, measure, silently
from ..bench.prompts import Batch
from ..bench.report import make_report
from ..hub.discover import Search, Target
from ..hub.trust import one_line
from ..machine import free_bytes
from ..method import NO_DRAFTS, names_without_weights
from ..settings import AUTO, SpeculativeConfig
from ..target_facts import model_name


# A smaller gain, over plain generation or by drafts, is not worth a configuration.
_WORTHWHILE = 1.02

# Of the drafters that discovery has found, the best ones are measured.
DEFAULT_MOST_DRAFTERS = 4


@dataclass
class Option:
    """One way of speculating, as measured; figures are medians of the rounds, ranges their smallest and largest."""

    name: str  # short and unique
    settings: dict[str, Any]  # flat, of [`SpeculativeConfig`]
    origin: str  # where it comes from, for people
    speedup: float  # over plain generation in the same rounds
    speedup_range: tuple[float, float]
    over_none: float  # the same over the loop without drafts: what the drafts bring
    over_none_range: tuple[float, float]
    tokens_per_second: float
    mean_acceptance_length: float  # tokens of a row per verification
    acceptance_rate: float | None  # accepted draft tokens among those judged
    draft_share: float | None  # of the time of its calls, that spent drafting
    draft_bytes: int | None  # of weights beside the target's
    verdict: str = ""  # why it wins or loses

    @property
    def has_drafts(self) -> bool:
        return self.settings.get("method") != NO_DRAFTS

    @property
    def is_worthwhile(self) -> bool:
        """It is faster than both baselines in every round, and by enough to be worth a configuration."""
        gains = [(self.speedup, self.speedup_range)]
        if self.has_drafts:
            gains.append((self.over_none, self.over_none_range))
        return all(gain >= _WORTHWHILE and low > 1 for gain, (low, _) in gains)


@dataclass(frozen=True)
class Rejection:
    """One way of speculating that was not measured, and why."""

    name: str
    origin: str
    reason: str


@dataclass
class Advice:
    """Recommendation for a target."""

    target: str
    best: Option | None = None  # perhaps the loop without drafts; `None`: plain generation
    options: list[Option] = field(default_factory=list)  # all that was measured, the fastest first
    rejected: list[Rejection] = field(default_factory=list)  # what was not
    notes: list[str] = field(default_factory=list)  # what could not be searched
    rounds: int = 0
    environment: dict[str, Any] = field(default_factory=dict)  # hardware and versions that the figures hold for

    @property
    def snippets(self) -> dict[str, str]:
        """The recommended configuration as Python and as JSON."""
        if self.best is None:
            return {"python": "model.generate(**inputs)", "json": "null"}
        settings = self.best.settings
        return {"python": f"model.generate(**inputs, speculative={settings!r})", "json": json.dumps(settings)}

    def to_dict(self) -> dict[str, Any]:
        """Converts to plain Python and JSON types."""
        return {**asdict(self), "snippets": self.snippets}


class Choices:
    """Ways of speculating for a target: those that load, and why the others do not."""

    def __init__(self, model: PreTrainedModel):
        self.model = model
        self.decoders: list[Decoder] = []
        self.rejected: list[Rejection] = []
        self.notes: list[str] = []
        self._origins: dict[str, str] = {}
        self._room: int = free_bytes(model.device)

    def add(self, name: str, settings: Mapping[str, Any], origin: str) -> bool:
        """Loads one way of speculating, unless it is there already; `True` if that went well."""
        before = free_bytes(self.model.device)
        try:
            (decoder,) = load_decoders(self.model, [settings])
        except Exception as error:  # noqa: BLE001 - weights of strangers may trip anything
            self.rejected.append(Rejection(name, origin, one_line(error, 500)))
            return False
        if any(other.settings == decoder.settings for other in self.decoders):
            return False
        self._room -= max(before - free_bytes(self.model.device), 0)
        taken = {other.name for other in self.decoders}
        names = chain([name], (f"{name} ({number})" for number in count(2)))
        decoder.name = next(name for name in names if name not in taken)
        self.decoders.append(decoder)
        self._origins[decoder.name] = origin
        return True

    def add_named(self, specs: Sequence[Mapping[str, Any]], names: Sequence[str | None]) -> None:
        """Loads ways that the user names, who is to correct what is wrong with them."""
        decoders = load_decoders(self.model, specs, names=names)
        self.decoders += decoders
        self._origins |= {decoder.name: "named by the user" for decoder in decoders}

    def add_without_weights(self) -> None:
        """Adds the methods that need no weights, and their combinations."""
        for method in names_without_weights():
            self.add(method, {"method": method}, "needs no weights")

    def search(self, *, local_files_only: bool = False, most: int = DEFAULT_MOST_DRAFTERS) -> None:
        """Adds the drafters that discovery finds, the best ranked first, and the methods without weights."""
        search = Search(Target.of_model(self.model), SpeculativeConfig(AUTO, local_files_only=local_files_only))
        added = 0
        for candidate in search.all():
            if candidate.place == "none":
                continue
            reason = " ".join(candidate.problems)
            if not reason and added == most:
                reason = f"Only the {most} best ranked ones are measured."
            elif not reason and (size := candidate.num_bytes or 0) > self._room:
                reason = f"Its {size / 1e9:.2f} GB do not fit into the {self._room / 1e9:.2f} GB that are free."
            if reason:
                self.rejected.append(Rejection(str(candidate), candidate.reason, reason))
            else:
                settings = candidate.configured(SpeculativeConfig(method=AUTO)).to_dict()
                added += self.add(str(candidate), settings, candidate.reason)
        self.notes += [f"Less may have been found {note}." for note in search.notes]
        self.add_without_weights()

    def measured(
        self,
        batches: dict[int, list[Batch]],
        arguments: Mapping[str, Any],
        asked: Mapping[str, Any],
        *,
        rounds: int,
        seed: int = 0,
        max_seconds: float | None = None,
        stock: bool = False,
        begin: Begin = silently,
    ) -> dict[str, Any]:
        """The report of all ways beside the baselines, with transformers' own ones if asked for."""
        decoders = with_baselines(self.model, self.decoders, stock)
        found = measure(
            self.model, decoders, batches, rounds, arguments, seed=seed, max_seconds=max_seconds, begin=begin
        )
        missing = {item.name: item.reason for item in self.rejected}
        return make_report(self.model, decoders, found, missing, asked, sampling=arguments, seed=seed)

    def origin_of(self, name: str) -> str:
        """Where the way of this name comes from."""
        return self._origins.get(name, "the baseline")


def recommend(report: Mapping[str, Any], choices: Choices, batch_size: int) -> Advice:
    """Chooses from the rows of a report of one batch size, and says for each why it wins or loses."""
    rows = [row for row in report["rows"] if row["batch_size"] == batch_size and "speedup_over_none" in row]
    options = [_option(row, choices.origin_of(row["method"])) for row in rows if _is_own(row["method"])]
    options.sort(key=lambda option: -option.speedup)
    best = next((option for option in options if option.is_worthwhile), None)
    for option in options:
        option.verdict = _verdict(option, best)
    refused = [
        Rejection(row["method"], choices.origin_of(row["method"]), row["reason"])
        for row in report["unavailable"]
        if _is_own(row["method"]) and row["batch_size"] == batch_size
    ]
    return Advice(
        model_name(choices.model),
        best,
        options,
        [*choices.rejected, *refused],
        choices.notes,
        report["settings"]["rounds"],
        report["environment"],
    )


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
    begin: Begin = silently,
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
        max_seconds (`float`, *optional*): Time limit; no round begins that is likely to exceed it.
        begin (`Callable`): Shows progress: begins a step of so many calls, and returns what is called after each.

    Raises:
        SpecConfigError: Plain generation fails, or a way of `specs` has wrong settings.
    """
    choices = Choices(target_model)
    for name, spec in (specs or {}).items():
        choices.add(name, SpeculativeConfig.resolve(spec).to_dict(), "named by the user")
    if discover:
        choices.search(local_files_only=local_files_only, most=most_drafters)
    else:
        choices.add_without_weights()
    size, greedy = max(len(batch.names) for batch in batches), {"do_sample": False}
    by_size = {size: list(batches)}
    report = choices.measured(by_size, greedy, {}, rounds=rounds, max_seconds=max_seconds, begin=begin)
    return recommend(report, choices, size)


def _is_own(name: str) -> bool:
    """Neither plain generation nor another way of transformers."""
    return not name.startswith(STOCK) and name != PLAIN


def _option(row: Mapping[str, Any], origin: str) -> Option:
    speedup, over_none = row["spread"]["speedup"], row["spread"]["speedup_over_none"]
    # The other figures have the same names.
    same = {item.name: row[item.name] for item in fields(Option) if item.name in row}
    return Option(
        name=row["method"],
        origin=origin,
        over_none=row["speedup_over_none"],
        speedup_range=(speedup["low"], speedup["high"]),
        over_none_range=(over_none["low"], over_none["high"]),
        **same,
    )


def _verdict(option: Option, best: Option | None) -> str:
    if not option.has_drafts:
        return f"The loop without drafts: {option.speedup:.2f} times as fast as plain generation."
    facts = f"{option.mean_acceptance_length:.2f} tokens a cycle, {100 * (option.draft_share or 0):.0f} % drafting"
    if option is best:
        return f"The fastest: {facts}."
    if min(option.speedup, option.over_none) < _WORTHWHILE:
        return f"Its drafts do not pay: {option.over_none:.2f} times as fast as without them; {facts}."
    if not option.is_worthwhile:
        return f"Not surely faster: its drafts bring {option.over_none_range[0]:.2f}x in one round; {facts}."
    if option.speedup_range[1] >= best.speedup_range[0]:
        return f"As fast as the fastest, within the spread of the rounds: {facts}."
    return f"Slower than {best.name}: {facts}."
