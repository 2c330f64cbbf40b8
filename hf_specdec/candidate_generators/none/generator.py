"""Plain decoding in the package's own loop: every cycle verifies the anchors alone."""

from __future__ import annotations

from typing import Any

from ...drafts import DraftTree
from ...protocol import DeviceCommit, DraftStep, Session
from ...settings import SpeculativeConfig
from ..base import CandidateGenerator


class NoDrafts(CandidateGenerator):
    """Drafts nothing, by request or because of the number of rows: `why`, for the statistics."""

    default_num_speculative_tokens = 0
    samples_drafts: bool | None = False
    drafts_ahead = True

    def __init__(
        self,
        config: SpeculativeConfig | None = None,
        resources: Any = None,
        session: Session | None = None,
        why: str = "not_asked",
    ):
        # Without settings: rules that change what is accepted, and lengths, are about drafts.
        super().__init__(None, resources, session)
        self.why = why

    def propose(self, step: DraftStep) -> DraftTree:
        return DraftTree.empty(len(step.rows), self.session.device, why=self.why)

    def draft_ahead(self, commit: DeviceCommit) -> DraftTree:
        return DraftTree.empty(len(commit.rows), self.session.device)
