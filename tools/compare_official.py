"""Compares whole greedy runs with those of z-lab's own package, on random weights: tokens, and what is accepted.

    pip install --no-deps --target DIR dflash==0.1.0
    PYTHONPATH=DIR python -m tools.compare_official              # exits with 1 where a run differs

Pairs of a tiny Qwen3 or Llama target and a DFlash or DFlash 2 draft for it are made from seeds and saved as
checkpoints, which both packages load. The target's lm_head has few directions, so that random drafts agree with it now
and then. Theirs shortens the last blocks of a text, so that only the cycles with room for a whole block are compared.
"""

from __future__ import annotations

import sys
import tempfile
import time
from itertools import accumulate
from pathlib import Path

import torch
from dflash import model as official
from rich.console import Console
from transformers import AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM, Qwen3Config, Qwen3ForCausalLM

from hf_specdec import record
from hf_specdec.candidate_generators.dflash.network import BlockView, DFlashConfig, DFlashNetwork


SIZES = {"hidden_size": 32, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 8, "intermediate_size": 48}
VOCAB_SIZE, NUM_LAYERS, BLOCK_SIZE, NEW_TOKENS = 24, 4, 6, 40
SELECTOR = {"conv_kernel_size": 2, "conv_group_size": 8, "selector_rank": 4, "selector_top_k": 5}
WINDOWS = {"views": (BlockView(6), BlockView(6))}

# Kinds of drafts: settings of their networks.
KINDS = {
    "dflash": {},
    "dflash, causal": {"views": (BlockView(None, True), BlockView(None, True))},
    "dflash2": SELECTOR,
    "dflash2, three taps": {**SELECTOR, "conv_kernel_size": 3, "selector_top_k": 24},
    "dflash2, windows": {**SELECTOR, **WINDOWS},
    "dflash2, scales": {**SELECTOR, "embedding_scale": 0.5, "logit_scale": 1.5, "logit_softcap": 5.0},
    "dflash2, last layer": {**SELECTOR, "target_layer_ids": (0, 3)},
}


@torch.no_grad()
def make_pair(folder: Path, seed: int, settings: dict) -> None:
    """Writes a target and a draft."""
    torch.manual_seed(seed)
    kinds = ((Qwen3Config, Qwen3ForCausalLM), (LlamaConfig, LlamaForCausalLM))
    config_class, model_class = kinds[seed % 2]
    target = model_class(config_class(**SIZES, vocab_size=VOCAB_SIZE, num_hidden_layers=NUM_LAYERS)).eval()
    for weight in target.parameters():
        if weight.dim() == 2:
            weight.normal_(0.0, 0.3)
    target.lm_head.weight.copy_(torch.randn(VOCAB_SIZE, 3) @ torch.randn(3, SIZES["hidden_size"]))
    target.save_pretrained(folder / "target")
    config = DFlashConfig(
        **SIZES,
        target_hidden_size=SIZES["hidden_size"],
        vocab_size=VOCAB_SIZE,
        draft_vocab_size=VOCAB_SIZE,
        num_hidden_layers=2,
        rope_parameters={"rope_type": "default", "rope_theta": 10000.0},
        block_size=BLOCK_SIZE,
        mask_token_id=VOCAB_SIZE - 1,
        **{"target_layer_ids": (0, 2), **settings},
        num_target_layers=NUM_LAYERS,
    )
    network = DFlashNetwork(config)
    for name, weight in network.named_parameters():
        if weight.dim() > 1:
            weight.normal_(0.0, 1.0 if "codebook" in name else 0.3)
    network.save(folder / "draft")


def official_run(folder: Path, prompt: torch.LongTensor) -> tuple[torch.LongTensor, list[int]]:
    target = AutoModelForCausalLM.from_pretrained(folder / "target", attn_implementation="sdpa").eval()
    is_second = "DFlash2" in (folder / "draft" / "config.json").read_text()
    kind = official.DFlash2DraftModel if is_second else official.DFlashDraftModel
    draft = kind.from_pretrained(folder / "draft", attn_implementation="sdpa", dtype=torch.float32).eval()
    # It times with a clock of CUDA.
    official._cuda_time = time.perf_counter
    found = official.dflash_generate(draft, target, prompt, NEW_TOKENS, None, return_stats=True)
    return found.output_ids, found.acceptance_lengths


def our_run(folder: Path, prompt: torch.LongTensor) -> tuple[torch.LongTensor, list[int]]:
    target = AutoModelForCausalLM.from_pretrained(folder / "target").eval()
    settings = {"model": str(folder / "draft"), "num_speculative_tokens": "fixed"}
    greedy = {"do_sample": False, "eos_token_id": None, "pad_token_id": 0, "max_new_tokens": NEW_TOKENS}
    with record(trace=True) as made:
        output = target.generate(prompt, attention_mask=torch.ones_like(prompt), **greedy, speculative=settings)
    return output, [len(row.committed_tokens) for cycle in made.calls[0].cycles for row in cycle.rows]


def with_room(lengths: list[int]) -> list[int]:
    """Committed tokens of the cycles before which a whole block still fits."""
    return [
        count for count, before in zip(lengths, accumulate(lengths, initial=1)) if before + BLOCK_SIZE <= NEW_TOKENS
    ]


def main() -> int:
    console, differing = Console(), 0
    for kind, settings in KINDS.items():
        counts: list[int] = []
        for seed in range(8):
            with tempfile.TemporaryDirectory() as name:
                folder = Path(name)
                make_pair(folder, seed, settings)
                prompt = torch.randint(1, VOCAB_SIZE, (1, 5 + 3 * seed), generator=torch.Generator().manual_seed(seed))
                (theirs, their_lengths), (ours, our_lengths) = official_run(folder, prompt), our_run(folder, prompt)
            same = torch.equal(theirs, ours) and with_room(their_lengths) == with_room(our_lengths)
            differing += not same
            counts += with_room(our_lengths)
            if not same:
                console.print(f"{kind}, seed {seed}: {their_lengths} and {our_lengths}")
        console.print(f"{kind}: {len(counts)} cycles, {sum(counts) / len(counts):.2f} tokens each")
    console.print("All runs agree." if not differing else f"{differing} runs differ.")
    return min(differing, 1)


if __name__ == "__main__":
    sys.exit(main())
