"""Options of DFlash, and the trees that are drafted where they name none."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, NamedTuple

from ...drafts.static import MAX_NODES
from ...errors import SpecConfigError
from ...validation import Options, draft_sample_method_field, setting


class UsualTree(NamedTuple):
    """Tree of drafts that were made for trees, where the settings name nothing, and the largest batch that has it."""

    num_nodes: int
    most_rows: int


# By device type. Measured on a CPU (`benchmarks/blocks.py`); elsewhere half of JetSpec's own.
USUAL_TREE = UsualTree(num_nodes=63, most_rows=4)
USUAL_TREES = {"cpu": UsualTree(num_nodes=20, most_rows=1)}


@dataclass(frozen=True)
class DFlashOptions(Options):
    """Options of `spec_method="dflash"`.

    Raises:
        SpecConfigError: A value is out of range, or two of them exclude each other.
    """

    dflash_block_size: int | None = setting(
        None,
        "Tokens of a block, the last committed one included; at most what the draft was trained with. "
        "Left out, one more than `num_speculative_tokens`, or the trained size.",
        least=1,
        most=MAX_NODES + 1,
        published=True,
        engine_names={"speculative_num_draft_tokens": 0},
    )
    dflash_num_denoising_steps: int | None = setting(
        None,
        "Forwards of the draft for a block; between them the surest tokens are kept and the others are "
        "masked again. Left out, what the checkpoint declares, otherwise 1.",
        least=1,
        most=MAX_NODES,
        published=True,
    )
    dflash_mask_token_id: int | None = setting(
        None,
        "The token at positions that are to be filled. Left out, what the checkpoint says, or the "
        "tokenizer's mask token.",
        least=0,
        published=True,
    )
    num_draft_nodes: int | None = setting(
        None,
        "Nodes of the tree of the most probable prefixes of a block. 0 drafts the block as a chain. Left out, a "
        f"chain; for DFlash 2 and JetSpec drafts without a `num_speculative_tokens` {USUAL_TREES['cpu'].num_nodes} "
        f"for a single row on a CPU, {USUAL_TREE.num_nodes} for up to {USUAL_TREE.most_rows} rows elsewhere.",
        least=0,
        most=MAX_NODES,
        published=True,
    )
    draft_tree_top_k: int | None = setting(
        None,
        "With `num_draft_nodes`: children that a node of the tree gets at once, the most probable node first "
        "(JetSpec). Left out, the most probable prefixes, whatever their parents are.",
        least=1,
        most=64,
        published=True,
    )
    draft_confidence_threshold: float = setting(
        0.0,
        "For DSpark drafts with a confidence head: a row's draft ends before the first token that the head gives less "
        "probability of being accepted, once those before it are, in [0, 1]. 0 keeps all.",
        least=0,
        most=1,
        published=True,
    )
    draft_sample_method: Literal["greedy", "probabilistic"] | None = draft_sample_method_field("greedy")

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.num_draft_nodes and (self.dflash_num_denoising_steps or 1) > 1:
            raise SpecConfigError(
                f"`num_draft_nodes`={self.num_draft_nodes} makes a tree out of the probabilities of one "
                f"forward, and `dflash_num_denoising_steps`={self.dflash_num_denoising_steps} asks for several. Leave "
                "one out."
            )
        if self.num_draft_nodes and self.draft_confidence_threshold:
            raise SpecConfigError(
                f"`num_draft_nodes`={self.num_draft_nodes} makes a tree, and `draft_confidence_threshold`="
                f"{self.draft_confidence_threshold} ends chains. Leave one out."
            )
        # A 0 is a call's word against the tree that was saved with a draft.
        if self.draft_tree_top_k and self.num_draft_nodes is None:
            raise SpecConfigError(
                f"`draft_tree_top_k`={self.draft_tree_top_k} is about a tree, and without `num_draft_nodes` a chain "
                "is drafted. Name both, or neither."
            )
