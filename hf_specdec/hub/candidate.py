"""Drafters for a target and their order of preference."""

from __future__ import annotations

import math
import os
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from typing import Any

from ..method import methods, parts_of, takes_model
from ..settings import AUTO, SpeculativeConfig, describe_settings
from .trust import one_line, owner_of


# The places where drafters are found, the first one first, for people.
FOUND = {
    "target": "in the target's own checkpoint",
    "entry": "named by the target",
    "cache": "in the local cache",
    "hub": "on the Hub",
    "none": "without weights",
}
PLACES = tuple(FOUND)

_REASONS = {
    **FOUND,
    "cache": f"{FOUND['cache']}, made for the target",
    "hub": f"{FOUND['hub']}, made for the target",
    "none": "needs no weights",
}


@dataclass(frozen=True)
class Candidate:
    """A drafter for a target."""

    method: str | None  # `None` where it could not be read
    model: str | None = None  # repo id or folder of its weights; `None`: none, or the target's own
    place: str = "none"  # where it was found, one of `PLACES`
    settings: Mapping[str, Any] = field(default_factory=dict)  # that come with it, such as its revision
    format: str | None = None  # layout of its checkpoint
    num_bytes: int | None = None  # of its weights
    num_draft_tokens: int | None = None  # of a draft that it was made for, as far as it says
    downloads: int = 0  # from the Hub within a month; 0 where not known
    is_trusted: bool = False  # named by the target's files, or of the target's owner or one that the user trusts
    problems: tuple[str, ...] = ()  # why it is never chosen; empty where it can be
    left_out: tuple[str, ...] = ()  # settings that came with it and are not for it to say

    def __str__(self) -> str:
        return f"{self.method or 'unknown format'} '{one_line(self.model)}'" if self.model else str(self.method)

    @property
    def origin(self) -> dict[str, str | None]:
        """Source of the drafter: `model`, `owner` and `revision` (of a repository), `place`."""
        is_repository = self.model is not None and not os.path.isdir(self.model)
        return {
            "model": self.model,
            "owner": owner_of(self.model) if is_repository else None,
            "revision": self.settings.get("revision") if is_repository else None,
            "place": self.place,
        }

    @property
    def is_downloaded(self) -> bool:
        """Using it may download it."""
        return self.place in ("entry", "hub") and self.origin["owner"] is not None

    @property
    def title(self) -> str:
        """The name with owner and revision."""
        of = {"owner": self.origin["owner"], "revision": self.origin["revision"]}
        known = ", ".join(f"{name} '{one_line(value, 60)}'" for name, value in of.items() if value)
        return f"{self} ({known})" if known else str(self)

    @property
    def reason(self) -> str:
        """Where it was found, and what it was made for, for people."""
        return _REASONS[self.place]

    def configured(self, asked: SpeculativeConfig) -> SpeculativeConfig:
        """The settings of a call for this drafter: its own, and over them those of the call that its method has."""
        # A method that is named may be a combination with that of the drafter.
        method = self.method if asked.method == AUTO else asked.method
        own = {"model": self.model, **self.settings}
        # It has been found.
        asked = asked.replace(trusted_owners=None)
        options = asked.to_dict().keys() - {setting.key for setting in describe_settings()}
        if asked.num_speculative_tokens or (takes_model(method) and (asked.speculative_token_tree or options)):
            # The call says itself what shape its drafts have.
            own = without(own, "num_speculative_tokens", "speculative_token_tree")
        config = asked.for_method(method, **own)
        if asked.method == AUTO and method in methods() and methods()[method].drafts_one_token_per_head:
            most, length = self.num_draft_tokens, config.fixed_length
            if most and length is not None and not config.speculative_token_tree and length > most:
                config = config.replace(num_speculative_tokens=most)
        return config

    def to_dict(self) -> dict[str, Any]:
        """Converts to plain Python and JSON types."""
        lists = {"problems": list(self.problems), "left_out": list(self.left_out)}
        return {**asdict(self), "settings": dict(self.settings), **lists}


def rank(candidate: Candidate) -> tuple[Any, ...]:
    """Sort key of candidates, the best first; unusable ones come last."""
    # A combination comes before its first part alone.
    parts = [] if candidate.method is None else parts_of(candidate.method)
    return (
        bool(candidate.problems),
        not candidate.is_trusted,
        PLACES.index(candidate.place),
        [*(methods()[part].preference if part in methods() else math.inf for part in parts), math.inf],
        -candidate.downloads,
        candidate.model or "",
    )


def without(settings: Mapping[str, Any], *names: str) -> dict[str, Any]:
    return {key: value for key, value in settings.items() if key not in names}
