"""The exact distribution of a small model's first tokens, and how often drafted calls write each of them.

It is enumerated with transformers' own processors, and compared by chi-square with the texts of many rows of one
prompt. Seeds are fixed, so the p-values are too.
"""

from __future__ import annotations

from functools import lru_cache
from itertools import product

import torch
import transformers

from hf_specdec import SpeculativeConfig, Speculator, load_speculator
from hf_specdec.candidate_generators.none.generator import NoDrafts
from tests.helpers.models import tiny_llama
from tests.helpers.scripted import scripted_speculator


V = 6
NUM_ROWS = 1200
PROMPT = [1, 4, 2]
# An exact sampler falls below it in one of a thousand seeds.
P_VALUE = 1e-3

SETTINGS = {
    "plain": {"top_k": 0},
    "temperature": {"top_k": 0, "temperature": 0.6},
    "top_k": {"top_k": 3},
    "top_p": {"top_k": 0, "top_p": 0.75},
    "repetition_penalty": {"top_k": 0, "repetition_penalty": 1.8},
    "repetition_penalty_and_top_p": {"repetition_penalty": 1.5, "top_k": 5, "top_p": 0.9, "temperature": 0.8},
}

SAMPLING = {"do_sample": True, "max_new_tokens": 24, "temperature": 0.8, "top_k": 20}


def sample(model, inputs, seed=0, **settings):
    transformers.set_seed(seed)
    return model.generate(**inputs, **{**SAMPLING, **settings})


def no_drafts(**settings) -> Speculator:
    return Speculator(SpeculativeConfig(method="none", **settings), NoDrafts, None)


_SMALL = {"vocab_size": V, "hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1}
_SMALL |= {"num_attention_heads": 2, "num_key_value_heads": 1, "initializer_range": 0.4}


@lru_cache(maxsize=1)
def small_model():
    return tiny_llama(seed=5, **_SMALL)


def exact_distribution(settings: dict, count: int = 3) -> torch.Tensor:
    """Probability of every sequence of `count` tokens after the prompt, shape `(V,) * count`."""
    prefixes, probs = torch.tensor([PROMPT]), torch.ones(1, dtype=torch.float64)
    for length in range(count):
        with torch.no_grad():
            logits = small_model()(prefixes).logits[:, -1].float()
        distribution = host_processors(settings, prefixes)(prefixes, logits).double().softmax(-1)
        probs = (probs[:, None] * distribution).flatten()
        tails = torch.tensor(list(product(range(V), repeat=length + 1)))
        prefixes = torch.cat([torch.tensor(PROMPT).expand(len(tails), -1), tails], dim=1)
    return probs.view((V,) * count)


def host_processors(settings: dict, prefixes: torch.Tensor):
    """The processors that plain generation uses."""

    def catch(model, input_ids, logits_processor, **kwargs):
        return logits_processor

    call = {"attention_mask": torch.ones_like(prefixes), "max_new_tokens": 4, "do_sample": True, **settings}
    return small_model().generate(prefixes, **call, custom_generate=catch)


def sampled_counts(settings: dict, speculator, seed: int = 0, num_rows: int = NUM_ROWS, count: int = 3):
    """Frequency of each sequence of the first tokens; texts are longer, so that drafts are not cut short."""
    inputs = torch.tensor([PROMPT]).repeat(num_rows, 1)
    call = {"attention_mask": torch.ones_like(inputs), "max_new_tokens": count + 3, "do_sample": True, **settings}
    torch.manual_seed(seed)
    output = small_model().generate(inputs, **call, assistant=speculator, return_dict_in_generate=True)
    tokens = output.sequences[:, len(PROMPT) : len(PROMPT) + count]
    cells = (tokens * torch.tensor([V**power for power in range(count)][::-1])).sum(1)
    return cells.bincount(minlength=V**count).view((V,) * count), output.speculative


def scripted_rows(tree=None, accuracy=0.5):
    """One-hot drafts around what the target most likely says, different in every row."""
    inputs = {"input_ids": torch.tensor([PROMPT]), "attention_mask": torch.ones(1, 3, dtype=torch.long)}
    text = small_model().generate(**inputs, max_new_tokens=9, do_sample=False)
    rows = text.repeat(NUM_ROWS, 1)
    return scripted_speculator(rows, [0] * NUM_ROWS, V, num_speculative_tokens=3, accuracy=accuracy, tree=tree)


def draft_model(vocab_size: int = V, **options):
    draft = tiny_llama(seed=11, **{**_SMALL, "vocab_size": vocab_size})
    return load_speculator(small_model(), draft_model=draft, num_speculative_tokens=3, **options)
