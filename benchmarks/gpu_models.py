"""Targets and drafters of random weights at public sizes, made on a device; their texts; and ways to decode them.

A target of random weights writes a text that is known beforehand (`common.random_model`), in bfloat16 too. All tokens
make up one ring, so no text repeats itself. A draft model of another size with the same ring, wrong after a share of
the tokens, drafts with any given accuracy, in transformers' loop and in ours alike. Draft networks that read the
target's states are as their training begins, and `rejection_sample_method="synthetic"` accepts their drafts at the
lengths published.

Shapes: B rows of a batch, P prompt length, N new tokens, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from time import perf_counter
from typing import Any, NamedTuple

import torch
from common import NONE, PLAIN, MarkingStreamer, Row, model_sizes, random_model, random_ring
from torch import nn
from transformers import PreTrainedModel

from hf_specdec import (
    CandidateGenerator,
    DraftTree,
    SpeculativeConfig,
    Speculator,
    generate,
    load_speculator,
    record,
    register_candidate_generator,
)
from hf_specdec.candidate_generators.dflash.recipe import DFlashRecipe
from hf_specdec.candidate_generators.eagle.recipe import Eagle1Recipe, Eagle3Recipe
from hf_specdec.candidate_generators.medusa.recipe import MedusaRecipe
from hf_specdec.candidate_generators.mtp.recipe import MtpRecipe
from hf_specdec.drafts import TokenTree
from hf_specdec.drafts.static import prior_accuracies
from hf_specdec.method import methods
from hf_specdec.protocol import DraftStep
from hf_specdec.target_facts import vocabulary_size


GREEDY = {"do_sample": False}

# As in the generation config of Llama 3.1. The next token of the ring is all but certain, so the text stays the same.
SAMPLED = {"do_sample": True, "temperature": 0.6, "top_p": 0.9}

# Of transformers' and of our draft model; the length of transformers' prompt lookup and its longest n-gram.
DRAFT_LENGTH = 5
LOOKUP_LENGTH, LOOKUP_NGRAM = 10, 2
LOOKUP, ASSISTED = "transformers: prompt lookup", "transformers: assistant model"
COMPILED = "transformers: static cache, compiled"

# At which chains of 5 commit 2.28 tokens a cycle, as for Vicuna-7B with a draft model of 68 M (Spec-Bench).
DRAFT_MODEL_ACCURACY = 0.5777

# The prompts hold the text to come, with one of so many tokens changed: what n-grams draft from.
CHANGED_TOKEN_OF = 6

# ------------------------------------------------------------------------------------------------------------- targets


class Size(NamedTuple):
    """transformers' model type, and arguments of the configs of a target and of the draft model beside it."""

    kind: str
    target: Mapping[str, int]
    draft: Mapping[str, int]


_LLAMA_1B = model_sizes(128256, 2048, 8192, 16, 32, 8, 64)
_QWEN_06B = model_sizes(151936, 1024, 3072, 28, 16, 8, 128)

# Llama 3.1 and 3.2, Qwen3; the draft model of the smallest Llama is that of 68 M, with the target's vocabulary.
SIZES = {
    "tiny": Size("llama", model_sizes(1024, 128, 256, 4, 4, 2, 32), model_sizes(1024, 64, 128, 2, 4, 2, 16)),
    "llama-1b": Size("llama", _LLAMA_1B, model_sizes(128256, 768, 3072, 2, 12, 12, 64)),
    "llama-8b": Size("llama", model_sizes(128256, 4096, 14336, 32, 32, 8, 128), _LLAMA_1B),
    "qwen3-1.7b": Size("qwen3", model_sizes(151936, 2048, 6144, 28, 16, 8, 128), _QWEN_06B),
    "qwen3-8b": Size("qwen3", model_sizes(151936, 4096, 12288, 36, 32, 8, 128), _QWEN_06B),
}


def bytes_of_weights(model: PreTrainedModel) -> int:
    """Bytes that a forward reads of the weights: all but the embedding, of which it reads a few rows."""
    total = sum(weight.numel() * weight.element_size() for weight in model.parameters())
    embedding = model.get_input_embeddings().weight
    return total - embedding.numel() * embedding.element_size()


def bytes_of_token(model: PreTrainedModel) -> int:
    """Bytes of the keys and values of one token, in all layers."""
    config = model.config
    per_layer = 2 * config.num_key_value_heads * config.head_dim * model.dtype.itemsize
    return per_layer * config.num_hidden_layers


# --------------------------------------------------------------------------------------------------------------- texts


class Text(NamedTuple):
    """Prompts `(B, P)`, and the tokens `(B, N)` with which a model that writes the ring continues them."""

    prompts: torch.LongTensor
    expected: torch.LongTensor


def ring_text(ring: torch.LongTensor, batch_size: int, prompt_length: int, new_tokens: int) -> Text:
    """Rows from different places of the ring. A prompt begins with the text to come, in which tokens are changed."""
    generator = torch.Generator().manual_seed(2)
    num_copied = min(new_tokens + 32, prompt_length // 2)
    rows = []
    for row in range(batch_size):
        where = torch.arange(num_copied - prompt_length, max(new_tokens, num_copied)) + row * (len(ring) // batch_size)
        tokens = ring[where % len(ring)]
        lead, future = tokens.split((prompt_length - num_copied, len(tokens) - prompt_length + num_copied))
        copied = future[:num_copied].clone()
        changed = copied[CHANGED_TOKEN_OF - 1 :: CHANGED_TOKEN_OF]
        changed.copy_(torch.randint(len(ring), changed.shape, generator=generator))
        rows.append((torch.cat([copied, lead]), future[:new_tokens]))
    prompts, expected = map(torch.stack, zip(*rows))
    return Text(prompts, expected)


# ------------------------------------------------------------------------------------------------------------ drafters


class Drafter(NamedTuple):
    """A way to draft; where drafts are not judged by the standard rule, the tokens a cycle that were published for it.

    The name begins with the method.
    """

    name: str
    settings: Mapping[str, Any] = {}
    length: float | None = None
    source: str = ""

    @property
    def method(self) -> str:
        return self.name.partition(",")[0]


_EAGLE_TREE = {"draft_tree_depth": 8, "draft_tree_top_k": 10, "num_draft_nodes": 59}
_STOCK_RULE = {"num_speculative_tokens": LOOKUP_LENGTH, "prompt_lookup_min": 1, "prompt_lookup_max": LOOKUP_NGRAM}

# Shapes are those of the published figures.
DRAFTERS = (
    Drafter("ngram, transformers' rule", _STOCK_RULE),
    Drafter("ngram"),
    # Without past responses: the same text was written before.
    Drafter("suffix", {"suffix_decoding_max_cached_requests": 0}),
    Drafter("draft_model, chain of 5", {"num_speculative_tokens": DRAFT_LENGTH, "draft_vocabulary": "same"}),
    Drafter("medusa, tree of 63", {"speculative_token_tree": "mc_sim_7b_63"}, 2.3, "Spec-Bench, Vicuna-7B"),
    Drafter("eagle, tree of 59", _EAGLE_TREE, 4.34, "EAGLE-2, Spec-Bench, Vicuna-7B"),
    Drafter("eagle3, tree of 59", _EAGLE_TREE, 3.40, "DFlash paper, Qwen3-8B"),
    Drafter("eagle3, chain of 3", {"num_speculative_tokens": 3}, 3.34, "SpecForge, Llama-3.1-8B, HumanEval"),
    Drafter("mtp, chain of 3", {"num_speculative_tokens": 3}, 2.94, "DeepSeek-R1, GSM8K"),
    Drafter("dflash, block of 16", {}, 6.49, "DFlash paper, Qwen3-8B"),
)


# Five Medusa heads share the target's head, as its second format has them: own ones of 150k tokens would be as large
# as half of the target. EAGLE-3 knows 32,000 tokens. All else is of the target's sizes.
NETWORKS: dict[str, Callable[[PreTrainedModel], nn.Module]] = {
    "medusa": lambda target: MedusaRecipe(num_heads=5).build(target),
    "eagle": lambda target: Eagle1Recipe().build(target),
    "eagle3": lambda target: Eagle3Recipe(draft_vocab_size=min(32000, vocabulary_size(target) // 2)).build(target),
    "mtp": lambda target: MtpRecipe().build(target),
    "dflash": lambda target: DFlashRecipe(mask_token_id=vocabulary_size(target) - 1).build(target),
}


def random_network(name: str, target: PreTrainedModel) -> nn.Module:
    """A draft network of `NETWORKS`, in the target's dtype and on its device."""
    torch.manual_seed(0)
    with torch.device(target.device):
        network = NETWORKS[name](target).eval().requires_grad_(False)
    for weight in network.parameters():
        # Not the buffers: frequencies of rotary embeddings stay as they are.
        weight.data = weight.data.to(target.dtype)
    return network.to(target.device)


@dataclass
class Models:
    """A target and what was made for it so far; its calls choose tokens `GREEDY` or `SAMPLED`."""

    size: Size
    dtype: torch.dtype
    device: torch.device
    decoding: Mapping[str, Any] = field(default_factory=lambda: GREEDY)
    ring: torch.LongTensor = field(init=False)
    target: PreTrainedModel = field(init=False)
    _networks: dict[str, nn.Module] = field(default_factory=dict)

    def __post_init__(self):
        self.ring = random_ring(self.size.target["vocab_size"])
        self.target = random_model(self.size.kind, self.size.target, self.ring, self.dtype, self.device)

    def network(self, name: str) -> nn.Module:
        """A draft network, or the draft model; made when it is first asked for."""
        if name not in self._networks:
            self._networks[name] = self._draft_model() if name == "draft_model" else random_network(name, self.target)
        return self._networks[name]

    def _draft_model(self) -> PreTrainedModel:
        given = self.size.kind, self.size.draft, self.ring, self.dtype, self.device, DRAFT_MODEL_ACCURACY
        model = random_model(*given)
        model.generation_config.num_assistant_tokens = DRAFT_LENGTH
        model.generation_config.num_assistant_tokens_schedule = "constant"
        model.generation_config.assistant_confidence_threshold = 0.0
        return model

    def arguments(self, drafter: Drafter) -> dict[str, Any]:
        """The drafter as an argument of `generate()`."""
        settings = dict(drafter.settings)
        if drafter.length is not None:
            settings |= synthetic(drafter.length)
        if drafter.method in ("draft_model", *NETWORKS):
            settings["draft_model"] = self.network(drafter.method)
        return {"assistant": load_speculator(self.target, drafter.method, **settings)}


def synthetic(length: float) -> dict[str, Any]:
    """Settings that commit so many tokens a cycle, whatever they are."""
    return {"rejection_sample_method": "synthetic", "rejection_sample_options": length}


class RandomNodesCandidateGenerator(CandidateGenerator):
    """Drafts random tokens in a shape of its own, at no cost."""

    samples_drafts = False

    def __init__(self, config, resources: tuple[TokenTree, int], session):
        super().__init__(config, resources, session)
        self.shape, self.vocab_size = resources
        self.num_speculative_tokens = self.shape.max_depth

    @property
    def num_draft_nodes(self) -> int:
        return len(self.shape)

    def propose(self, step: DraftStep) -> DraftTree:
        depths, device = self.draft_depths(step), self.session.device
        if max(depths) <= 0:
            return DraftTree.empty(len(depths), device)
        tokens = torch.randint(self.vocab_size, (len(depths), len(self.shape)), device=device)
        return DraftTree.of_shape(self.shape, tokens, depths)


def random_nodes(target: PreTrainedModel, shape: TokenTree | None) -> Speculator:
    """Drafts of one shape, all but a few of which are rejected; none without a shape."""
    if shape is None:
        return load_speculator(target, NONE)
    if "random_nodes_benchmark" not in methods():
        register_candidate_generator("random_nodes_benchmark", RandomNodesCandidateGenerator)
    config = SpeculativeConfig(method="random_nodes_benchmark")
    return Speculator(config, RandomNodesCandidateGenerator, (shape, target.config.vocab_size))


def draft_shapes(nodes: Sequence[int]) -> Iterator[tuple[str, TokenTree | None]]:
    """Chains, and from eight nodes on trees, by how many nodes are verified; `None`: the anchor alone."""
    for count in nodes:
        yield (f"chain, {count} nodes", TokenTree.chain(count - 1)) if count > 1 else (NONE, None)
        if count >= 8:
            yield f"tree, {count} nodes", TokenTree.from_accuracies(prior_accuracies(7, 10), count - 1)


# --------------------------------------------------------------------------------------------------------------- sides


class Side(NamedTuple):
    """One way of decoding: what makes the further arguments of `generate()`, and the drafter of one of ours."""

    name: str
    make: Callable[[], dict[str, Any]] = dict
    drafter: Drafter | None = None

    @property
    def is_exact(self) -> bool:
        """Tells if it must write the text of plain generation."""
        return self.drafter is None or self.drafter.length is None


def make_sides(models: Models, batch_size: int) -> dict[str, Side]:
    """All ways of decoding a batch by name, plain `generate()` first and what has to be compiled last."""
    rule = {"prompt_lookup_num_tokens": LOOKUP_LENGTH, "max_matching_ngram_size": LOOKUP_NGRAM}
    sides = [Side(PLAIN), Side(NONE, lambda: {"assistant": load_speculator(models.target, NONE)})]
    if batch_size == 1:
        # Their assisted generation takes one row.
        sides += [Side(LOOKUP, lambda: rule)]
        sides += [Side(ASSISTED, lambda: {"assistant_model": models.network("draft_model")})]
    for drafter in DRAFTERS:
        sides.append(Side(drafter.name, partial(models.arguments, drafter), drafter))
    sides.append(Side(COMPILED, lambda: {"cache_implementation": "static"}))
    return {side.name: side for side in sides}


def call_of(
    models: Models, arguments: Mapping[str, Any], prompts: torch.LongTensor, new_tokens: int
) -> Callable[..., torch.LongTensor]:
    """A call of `generate()`, to be made; without an `assistant` in the arguments transformers' own."""
    inputs = {"input_ids": prompts.to(models.device), "attention_mask": torch.ones_like(prompts).to(models.device)}
    return partial(generate, models.target, **inputs, max_new_tokens=new_tokens, **models.decoding, **arguments)


def run(models: Models, arguments: Mapping[str, Any], text: Text, new_tokens: int) -> Row:
    """One call: speed of its decoding part, without prefill and first cycle, and what it wrote and counted."""
    device, batch_size = models.device, len(text.prompts)
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(device)
    with record() as recorded:
        streamer = MarkingStreamer(recorded, perf_counter)
        output = call_of(models, arguments, text.prompts, new_tokens)(streamer=streamer)
    # Drafters read the prompt in the first cycle.
    first = next((mark for mark in streamer.marks if mark[1] > batch_size), None)
    ended, tokens = streamer.marks[-1]
    if first is None or first[1] == tokens:
        raise RuntimeError(f"the call ended within two cycles, after {tokens} tokens: raise --new-tokens")
    stats = recorded.calls[-1].stats if recorded.calls else None
    written = output[:, text.prompts.shape[1] :].cpu()
    return {
        "tokens_per_second": (tokens - first[1]) / (ended - first[0]),
        "tokens_per_cycle": stats and stats.mean_acceptance_length,
        "nodes": stats and stats.num_draft_tokens / max(stats.num_row_cycles, 1),
        "same_texts": sum(torch.equal(row, right) for row, right in zip(written, text.expected[:, :new_tokens])),
        "attention": stats and stats.attention,
        "graphs": stats and stats.graphs,
        "peak_gib": torch.cuda.max_memory_allocated(device) / 2**30 if device.type == "cuda" else None,
    }
