"""A drafter for tests that draws chains, or trees whose siblings are drawn without replacement, and hands over its
distribution, which is unlike the target's.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

import torch

from hf_specdec import CandidateGenerator, DraftTree, SpeculativeConfig, Speculator, register_candidate_generator
from hf_specdec.kernels.sampling import sample_from_probs
from hf_specdec.logits.randomness import DRAFT
from hf_specdec.method import methods
from hf_specdec.protocol import DraftStep
from hf_specdec.transfers import upload


@dataclass(frozen=True)
class SampledOptions:
    widths: tuple[int, ...] = field(default=(1, 1, 1), metadata={"help": "Children of each node, depth by depth."})
    seed: int = field(default=0, metadata={"help": "Seed of the distributions."})
    processed: bool = field(default=False, metadata={"help": "Apply the target's processors to the draft's scores."})
    claim: Literal["true", "uniform"] = field(default="true", metadata={"help": "Only the true one is right."})


class SampledCandidateGenerator(CandidateGenerator):
    """The distribution of the next draft token follows from the one before it, by a random table."""

    options_class = SampledOptions

    def __init__(self, config, resources, session):
        super().__init__(config, resources, session)
        size = session.sampler.vocab_size
        generator = torch.Generator().manual_seed(self.options.seed)
        self.table = torch.randn((size, size), generator=generator).to(session.device)

    def propose(self, step: DraftStep) -> DraftTree:
        depth = min(len(self.options.widths), self.num_speculative_tokens, max(step.max_draft_tokens))
        level, nodes = [(-1, step.anchor_tokens, [])], []
        for width in self.options.widths[:depth]:
            next_level = []
            for parent, token, path in level:
                for drawn, probs in self._children(step, width, len(nodes), token, path):
                    next_level.append((len(nodes), drawn, [*path, drawn]))
                    nodes.append((parent, drawn, probs, len(path) + 1))
            level = next_level
        device = self.session.device
        if not nodes:
            return DraftTree.empty(len(step.rows), device)
        parents, tokens, all_probs, depths = zip(*nodes)
        counts = [sum(d <= room for d in depths) for room in step.max_draft_tokens]
        tokens, all_probs = torch.stack(tokens, dim=1), torch.stack(all_probs, dim=1)
        if set(self.options.widths) == {1}:
            return DraftTree.chain(tokens, counts, all_probs)
        return DraftTree(tokens, upload(parents, device), counts, all_probs)

    def _children(self, step, width, first_node, token, path):
        """Draws `width` different tokens after `token` in every row: for each `(B,)` and its distribution `(B, V)`."""
        sampler, scores = self.session.sampler, self.table[token]
        if self.options.processed:
            scores = sampler.scores(step.rows, scores, path)
        probs = scores.softmax(-1)
        claimed = torch.full_like(probs, 1 / probs.shape[-1]) if self.options.claim == "uniform" else probs
        remaining, keys = probs.clone(), sampler.uniforms.keys(step.rows, step.lengths)
        for sibling in range(width):
            uniform = keys.for_nodes(1, DRAFT, first_node + sibling)[:, 0]
            # With fewer possible tokens than siblings the rest can be any: they are never tried.
            drawn = sample_from_probs(remaining, uniform).clamp(min=0)
            remaining = remaining.scatter(1, drawn[:, None], 0.0)
            yield drawn, claimed


def sampled_speculator(num_speculative_tokens: int = 3, **options) -> Speculator:
    """A speculator for `generate(do_sample=True, assistant=...)`; options are those of [`SampledOptions`]."""
    config = SpeculativeConfig(method="sampled", num_speculative_tokens=num_speculative_tokens, **options)
    return Speculator(config, SampledCandidateGenerator, None)


if "sampled" not in methods():
    register_candidate_generator("sampled", SampledCandidateGenerator)
