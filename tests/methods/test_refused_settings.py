"""Settings and networks that do not fit each other or the target are refused, by names and numbers of the user's."""

import pytest

from hf_specdec import CheckpointFormatError, SpecConfigError, SpeculativeConfig, load_speculator
from hf_specdec.protocol import Session
from tests.helpers.block_networks import draft
from tests.helpers.by_hand import CPU
from tests.helpers.draft_calls import speculator_of
from tests.helpers.draft_layers import head
from tests.helpers.levels import full
from tests.helpers.models import VOCAB_SIZE, nothing_runs, prompts, tiny_llama
from tests.helpers.paths import FIXTURES


DEEP = [[0] * depth for depth in range(1, 6)]


def test_settings_that_do_not_fit():
    for kind, settings, match in (
        ("dflash/full", {"dflash_block_size": 8}, "from 2 to 7, the block that the draft was trained with, got 8"),
        ("dflash/full", {"num_speculative_tokens": 7}, "at most 6, what the draft's block of 7 tokens yields"),
        ("dflash/full", {"dflash_block_size": 4, "num_speculative_tokens": 4}, "3, what `dflash_block_size`=4"),
        ("dflash/full", {"dflash_mask_token_id": 41}, "mask token of the draft is 41.*tokens 0 to 40"),
        ("dflash/xpress", {"dflash_block_size": 5}, "must be 7, the block .*`num_speculative_tokens`"),
        ("dflash/full", {"draft_confidence_threshold": 0.5}, "`draft_confidence_threshold`=0.5 .* has none"),
        ("dflash/full", {"num_draft_nodes": 4, "dflash_num_denoising_steps": 2}, "several. Leave one out"),
        ("dflash/domino", {"dflash_num_denoising_steps": 2}, "must be 1 .* positions predict the next token"),
        ("eagle/eagle1", {"num_speculative_tokens": 4, "draft_tree_depth": 3}, "a chain, and `draft_tree_depth` is"),
        ("eagle/eagle1", {"speculative_token_tree": [[0], [1]], "num_draft_nodes": 8}, "and `num_draft_nodes` is"),
        ("eagle/eagle1", {"speculative_token_tree": [(0,), (0, 40)]}, "rank 40, and the draft knows 40 tokens"),
        ("mtp", {"draft_tree_top_k": 3}, "`draft_tree_top_k`.*3 MTP layers.*mtp_mode='reuse'"),
        ("mtp", {"draft_confidence_threshold": 1.0}, "`draft_confidence_threshold` must be below 1, got 1"),
        ("medusa/own_lm_heads", {"num_speculative_tokens": 5}, "=5 is more than the 4 heads"),
        ("medusa/own_lm_heads", {"speculative_token_tree": DEEP}, "is 5 deep, .* has 4 heads"),
        ("medusa/own_lm_heads", {"speculative_token_tree": [[40]]}, "rank 40, and the draft knows 40 tokens"),
        ("medusa/own_lm_heads", {"num_speculative_tokens": 2, "medusa_tree": "measured"}, "fixes the draft tree"),
        (
            "medusa/own_lm_heads",
            {"draft_confidence_threshold": 0.1, "medusa_tree": "measured"},
            "and `medusa_tree`='measured'",
        ),
        ("mlp_speculator/tied", {"num_speculative_tokens": 5}, "`num_speculative_tokens`=5 is more than the 4 heads"),
        ("mlp_speculator/tied", {"top_k_tokens_per_head": [2] * 5}, "has 5 entries, .* has 4 stages"),
        ("mlp_speculator/tied", {"speculative_token_tree": DEEP}, "is 5 deep, .* has 4 heads"),
        ("mlp_speculator/tied", {"speculative_token_tree": [(0,), (0, 40)]}, "rank 40, and the draft knows 40 tokens"),
        ("mlp_speculator/tied", {"mlp_speculator_num_candidates": 2, "num_draft_nodes": 3}, "two ways to choose"),
    ):
        with pytest.raises(SpecConfigError, match=match):
            speculator_of(kind, **settings).candidate_generator(Session(1, 100, CPU))
    with pytest.raises(SpecConfigError, match="child of rank 8, and token recycling knows 8 successors"):
        load_speculator(tiny_llama(), {"method": "recycling", "speculative_token_tree": [[rank] for rank in range(9)]})
    with pytest.raises(SpecConfigError, match="'pangu_ultra_moe_mtp' cannot be used: transformers has no model"):
        SpeculativeConfig.resolve("suffix+pangu_ultra_moe_mtp")


@full
@pytest.mark.parametrize(
    ("method", "sizes", "settings", "match"),
    [
        ("dflash", {"vocab_size": 66}, {}, "vocabulary of 66 tokens, and LlamaForCausalLM has 64"),
        ("dflash", {"num_target_layers": 9}, {}, "a target with 9 decoder layers, and LlamaForCausalLM has 2"),
        ("eagle3", {"vocab_size": 66}, {}, "vocabulary of 66 tokens, and LlamaForCausalLM has 64"),
        ("eagle3", {"aux_layer_ids": (1, 5)}, {}, "states of 5 decoder layers, and LlamaForCausalLM has 2. Pass"),
        ("eagle3", {}, {"aux_layer_ids": [2]}, r"`aux_layer_ids`=\[2\] names the states.*reads \[0, 1\]"),
    ],
)
def test_networks_that_do_not_fit(model, method, sizes, settings, match):
    sizes = {"vocab_size": VOCAB_SIZE, **sizes}
    network = draft(32, **sizes) if method == "dflash" else head("eagle3", 32, **{"aux_layer_ids": (0, 1), **sizes})
    with pytest.raises(SpecConfigError, match=match):
        load_speculator(model, draft_model=network, method=method, **settings)


def test_heads_for_another_target_are_refused_before_any_forward():
    """Of another vocabulary, and of another width."""
    for model in (tiny_llama(), tiny_llama(hidden_size=64, intermediate_size=8)):
        with nothing_runs(model), pytest.raises(CheckpointFormatError, match="Pass the .* trained for this target"):
            model.generate(**prompts(1), max_new_tokens=9, spec_model=str(FIXTURES / "medusa" / "v01_heads_pt"))
