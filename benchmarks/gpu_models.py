"""Targets and drafters of random weights at public sizes, made in memory on a device, and texts for them.

A target of random weights writes a text that is known beforehand: its head has the rows of its embedding in another
order, so that the next token follows from the last one by a wide margin, in bfloat16 too. All tokens make up one ring,
so no text repeats itself. A draft model of another size with the same ring, wrong after a share of the tokens, drafts
with any given accuracy, in transformers' loop and in ours alike. Draft networks that read the target's states are
as their training begins, and `rejection_sample_method="synthetic"` accepts their drafts at the lengths published.

Shapes: B rows of a batch, P prompt length, N new tokens, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from common import without_end
from torch import nn
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel

from hf_specdec import (
    CandidateGenerator,
    DraftTree,
    SpeculativeConfig,
    Speculator,
    load_speculator,
    register_candidate_generator,
)
from hf_specdec.candidate_generators.dflash.recipe import DFlashRecipe
from hf_specdec.candidate_generators.eagle.recipe import Eagle1Recipe, Eagle3Recipe
from hf_specdec.candidate_generators.medusa.recipe import MedusaRecipe
from hf_specdec.candidate_generators.mlp_speculator.network import MLPSpeculator, MLPSpeculatorConfig
from hf_specdec.candidate_generators.mtp.recipe import MtpRecipe
from hf_specdec.candidate_generators.none.generator import NoDrafts
from hf_specdec.drafts import TokenTree
from hf_specdec.method import methods
from hf_specdec.protocol import DraftStep
from hf_specdec.target_facts import hidden_size, vocabulary_size


GREEDY = {"do_sample": False}

# As in the generation config of Llama 3.1. The next token of the ring is all but certain, so the text stays the same.
SAMPLED = {"do_sample": True, "temperature": 0.6, "top_p": 0.9}

# Of transformers' and of our draft model; the length of transformers' prompt lookup and its longest n-gram.
DRAFT_LENGTH = 5
LOOKUP_LENGTH, LOOKUP_NGRAM = 10, 2

# Vicuna-7B with a draft model of 68 M (Spec-Bench).
DRAFT_MODEL_LENGTH = 2.28

# The prompts hold the text to come, with one of so many tokens changed: what n-grams draft from.
CHANGED_TOKEN_OF = 6

# ------------------------------------------------------------------------------------------------------------- targets


@dataclass(frozen=True)
class Size:
    """Sizes of a target and of the draft model beside it, as arguments of their configs.

    Attributes:
        kind (`str`): transformers' model type.
        target, draft (`Mapping`): The sizes.
    """

    kind: str
    target: Mapping[str, int]
    draft: Mapping[str, int]


def model_sizes(
    vocab: int, hidden: int, intermediate: int, layers: int, heads: int, kv_heads: int, head_dim: int
) -> dict[str, int]:
    """Sizes as arguments of a config."""
    return {
        "vocab_size": vocab,
        "hidden_size": hidden,
        "intermediate_size": intermediate,
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "num_key_value_heads": kv_heads,
        "head_dim": head_dim,
    }


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


def random_ring(vocab_size: int, seed: int = 0) -> torch.LongTensor:
    """All tokens `(V,)` in the order of the text: each is followed by the next one, the last by the first."""
    return torch.randperm(vocab_size, generator=torch.Generator().manual_seed(seed))


@torch.no_grad()
def random_model(
    kind: str,
    sizes: Mapping[str, int],
    ring: torch.LongTensor,
    dtype: torch.dtype,
    device: torch.device,
    accuracy: float = 1.0,
) -> PreTrainedModel:
    """A model of random weights that writes the ring.

    Embedding and head are two matrices also where the public model ties them: what a forward reads is the same.

    Args:
        kind (`str`): transformers' model type.
        sizes (`Mapping`): Arguments of its config.
        ring (`torch.LongTensor` of shape `(V,)`): From [`random_ring`].
        dtype (`torch.dtype`): Of the weights.
        device (`torch.device`): Where they are made.
        accuracy (`float`): Share of the tokens after which it writes the right one.
    """
    torch.manual_seed(0)
    ends = dict.fromkeys(("bos_token_id", "eos_token_id", "pad_token_id"))
    config = AutoConfig.for_model(kind, **sizes, **ends, max_position_embeddings=32768, tie_word_embeddings=False)
    with torch.device(device):
        model = AutoModelForCausalLM.from_config(config, dtype=dtype)
    for layer in model.get_decoder().layers:
        # What the layers add must not drown the embedding.
        for projection in (layer.self_attn.o_proj, layer.mlp.down_proj):
            projection.weight.mul_((2 * config.num_hidden_layers) ** -0.5)
    successors = torch.empty_like(ring).scatter_(0, ring, ring.roll(-1))
    wrong = ring[torch.rand(len(ring), generator=torch.Generator().manual_seed(1)) >= accuracy]
    successors[wrong] = successors[wrong.roll(1)]
    embedding = model.get_input_embeddings().weight.normal_()
    model.get_output_embeddings().weight[successors.to(device)] = 0.1 * embedding
    return without_end(model.eval().requires_grad_(False))


def accuracy_of_length(length: float, num_draft_tokens: int) -> float:
    """Accuracy at which drafts of this many tokens commit `length` tokens a cycle, on average."""
    low, high = 0.0, 1.0
    for _ in range(50):
        middle = (low + high) / 2
        committed = sum(middle**depth for depth in range(num_draft_tokens + 1))
        low, high = (middle, high) if committed < length else (low, middle)
    return low


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


@dataclass(frozen=True)
class Text:
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


@dataclass(frozen=True)
class Drafter:
    """A way to draft, at the acceptance length that was published for it.

    Attributes:
        name (`str`): In the tables.
        settings (`Mapping`): Flat settings, the method among them.
        length (`float`, *optional*): Tokens committed per cycle; `None`: the drafts are judged by the standard rule.
        source (`str`): Where the length is from.
        network (`str`, *optional*): The draft network, by its name in `NETWORKS`, or "draft_model".
    """

    name: str
    settings: Mapping[str, Any]
    length: float | None = None
    source: str = "as measured"
    network: str | None = None


_EAGLE_TREE = {"draft_tree_depth": 8, "draft_tree_top_k": 10, "num_draft_nodes": 59}
_STOCK_RULE = {"num_speculative_tokens": LOOKUP_LENGTH, "prompt_lookup_min": 1, "prompt_lookup_max": LOOKUP_NGRAM}
_DRAFT_CHAIN = {"num_speculative_tokens": DRAFT_LENGTH, "same_tokenizer": True}

# Shapes are those of the published figures.
DRAFTERS = (
    Drafter("ngram, transformers' rule", {"method": "ngram", **_STOCK_RULE}),
    Drafter("ngram", {"method": "ngram"}),
    # Without past responses: the same text was written before.
    Drafter("suffix", {"method": "suffix", "suffix_decoding_max_cached_requests": 0}),
    Drafter(
        "draft_model, chain of 5",
        {"method": "draft_model", **_DRAFT_CHAIN},
        source="accuracy for 2.28: Spec-Bench, Vicuna-7B",
        network="draft_model",
    ),
    Drafter(
        "medusa, tree of 63",
        {"method": "medusa", "speculative_token_tree": "mc_sim_7b_63"},
        2.3,
        "Spec-Bench, Vicuna-7B",
        "medusa",
    ),
    Drafter(
        "mlp_speculator, chain of 4",
        {"method": "mlp_speculator", "num_speculative_tokens": 4},
        2.5,
        "assumed: only speeds are published",
        "mlp_speculator",
    ),
    Drafter("eagle, tree of 59", {"method": "eagle", **_EAGLE_TREE}, 4.34, "EAGLE-2, Spec-Bench, Vicuna-7B", "eagle"),
    Drafter("eagle3, tree of 59", {"method": "eagle3", **_EAGLE_TREE}, 3.40, "DFlash paper, Qwen3-8B", "eagle3"),
    Drafter(
        "eagle3, chain of 3",
        {"method": "eagle3", "num_speculative_tokens": 3},
        3.34,
        "SpecForge, Llama-3.1-8B, HumanEval",
        "eagle3",
    ),
    Drafter("mtp, chain of 3", {"method": "mtp", "num_speculative_tokens": 3}, 2.94, "DeepSeek-R1, GSM8K", "mtp"),
    Drafter("dflash, block of 16", {"method": "dflash"}, 6.49, "DFlash paper, Qwen3-8B", "dflash"),
)


def _mlp_speculator(target: PreTrainedModel) -> MLPSpeculator:
    """Four stages that share their weights, of three quarters of the target's width: our guess of usual sizes."""
    size = hidden_size(target)
    return MLPSpeculator(
        MLPSpeculatorConfig(
            emb_dim=size,
            inner_dim=3 * size // 4,
            vocab_size=vocabulary_size(target),
            n_predict=4,
            top_k_tokens_per_head=(4, 3, 2, 2),
            tie_weights=True,
            scale_input=True,
        )
    )


# Five Medusa heads share the target's head, as its second format has them: own ones of 150k tokens would be as large
# as half of the target. EAGLE-3 knows 32,000 tokens. All else is of the target's sizes.
NETWORKS: dict[str, Callable[[PreTrainedModel], nn.Module]] = {
    "medusa": lambda target: MedusaRecipe(num_heads=5).build(target),
    "mlp_speculator": _mlp_speculator,
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
    """A target and what was made for it so far.

    Args:
        size (`Size`): Of the target and its draft model.
        dtype (`torch.dtype`): Of all weights.
        device (`torch.device`): Where they are made.
        decoding (`Mapping`): How the calls choose tokens, `GREEDY` or `SAMPLED`.
    """

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
        accuracy = accuracy_of_length(DRAFT_MODEL_LENGTH, DRAFT_LENGTH)
        model = random_model(self.size.kind, self.size.draft, self.ring, self.dtype, self.device, accuracy)
        model.generation_config.num_assistant_tokens = DRAFT_LENGTH
        model.generation_config.num_assistant_tokens_schedule = "constant"
        model.generation_config.assistant_confidence_threshold = 0.0
        return model

    def speculator(self, drafter: Drafter) -> Speculator:
        """The drafter as a speculator of our loop."""
        settings = dict(drafter.settings)
        if drafter.length is not None:
            settings |= synthetic(drafter.length)
        network = self.network(drafter.network) if drafter.network else None
        return load_speculator(self.target, **settings, **({"draft_model": network} if network else {}))


def synthetic(length: float) -> dict[str, Any]:
    """Settings that commit so many tokens a cycle, whatever they are."""
    return {"rejection_sample_method": "synthetic", "synthetic_acceptance_length": length}


def no_drafts() -> Speculator:
    """Plain decoding in our loop."""
    return Speculator(SpeculativeConfig(method="none"), NoDrafts, None)


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


def random_nodes(shape: TokenTree, vocab_size: int) -> Speculator:
    """Drafts of one shape, all but a few of which are rejected."""
    if "random_nodes_benchmark" not in methods():
        register_candidate_generator("random_nodes_benchmark", RandomNodesCandidateGenerator)
    config = SpeculativeConfig(method="random_nodes_benchmark")
    return Speculator(config, RandomNodesCandidateGenerator, (shape, vocab_size))
