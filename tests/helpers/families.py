"""A tiny model of an architecture with what plain generation writes, and what is known about its hidden states."""

from __future__ import annotations

from dataclasses import dataclass, field

import torch

from hf_specdec.target.states import captured_states
from hf_specdec.target_facts import decoder_layers
from tests.helpers.models import scripted_for
from tests.helpers.scripted import scripted_speculator


# Architectures that have no single stream of one vector a token, and what the error says.
WITHOUT = {
    "gemma3n_text": r"states of the shape \[4, 2, 9, 64\]",
    "hrm_text": "decoder layers of HrmTextForCausalLM cannot be found",
    "hy_v4": r"states of the shape \[2, 9, 4, 64\]",
}

# Architectures whose head does more with the last state than multiply it.
WITHOUT_LAST = set(
    "bert bert-generation bert-two_way_prompt big_bird camembert data2vec-text electra ernie megatron-bert "
    "modernbert-decoder rembert roberta roberta-prelayernorm roc_bert roformer xlm-roberta xlm-roberta-xl xmod".split()
)
# They divide the state in front of the head, which leaves the order of the logits.
SCALED = ("inkling_text", "minicpm3")
# Models whose final norm reads a mixture of several layers' outputs.
MIXED = ("inkling2_text",)
# Their own record has what leaves the layers.
RECORDS_OUTPUTS = ("falcon_mamba", "mamba", "mamba2")

TOKENS = torch.randint(3, 90, (2, 9), generator=torch.Generator().manual_seed(0))

# A batch of equal lengths takes other ways than one with padding.
PROMPT_LENGTHS = {1: [14], 2: [9, 9], 4: [14, 5, 9, 12]}
NEW_TOKENS = 16
TREE = (-1, -1, 0, 0, 1, 2)


@dataclass
class Case:
    """One model and what plain generation says."""

    name: str
    model: torch.nn.Module
    plain: dict[int, torch.LongTensor] = field(default_factory=dict)
    new_tokens: int = NEW_TOKENS

    @property
    def vocab_size(self) -> int:
        return self.model.config.get_text_config(decoder=True).vocab_size

    def prompts(self, batch_size: int) -> dict[str, torch.Tensor]:
        """Left-padded random prompts."""
        lengths, width = PROMPT_LENGTHS[batch_size], max(PROMPT_LENGTHS[batch_size])
        draw = torch.Generator().manual_seed(1)
        input_ids = torch.randint(3, self.vocab_size, (batch_size, width), generator=draw)
        mask = torch.arange(width) >= width - torch.tensor(lengths)[:, None]
        return {"input_ids": input_ids * mask, "attention_mask": mask.long()}

    def expected(self, batch_size: int) -> torch.LongTensor:
        if batch_size not in self.plain:
            self.plain[batch_size] = self.generate(batch_size)
        return self.plain[batch_size]

    def starts(self, batch_size: int) -> list[int]:
        lengths = PROMPT_LENGTHS[batch_size]
        return [max(lengths) - length for length in lengths]

    def speculate(self, batch_size: int, **script):
        speculator = scripted_speculator(self.expected(batch_size), self.starts(batch_size), self.vocab_size, **script)
        return self.generate(batch_size, assistant=speculator, return_dict_in_generate=True)

    def generate(self, batch_size: int, **arguments):
        call = {"max_new_tokens": self.new_tokens, "do_sample": False, **arguments}
        return self.model.generate(**self.prompts(batch_size), **call)


@torch.no_grad()
def outputs_and_states(model, keys, **inputs):
    with captured_states(model, keys) as states:
        output = model(**inputs, output_hidden_states=True, use_cache=False)
    return output, states


def assert_boundaries(model, ends_plainly=True, first_recorded=0, **inputs):
    """Against transformers' own record of what enters the layers, and what leaves the last one."""
    layers = decoder_layers(model)
    last_layer = []
    handle = layers[-1].register_forward_hook(
        lambda module, args, output: last_layer.append(output if torch.is_tensor(output) else output[0])
    )
    keys = tuple(range(len(layers) + 1))
    output, states = outputs_and_states(model, keys, **inputs)
    handle.remove()
    assert set(states) == set(keys)
    for index in range(first_recorded, len(layers)):
        assert torch.equal(states[index], output.hidden_states[index - first_recorded])
    assert torch.equal(states[len(layers)], last_layer[-1]) == ends_plainly


def implementations(model) -> list[str]:
    """The attention implementation that every module's config names."""
    configs = [getattr(module, "config", None) for module in model.modules()]
    return [config._attn_implementation for config in configs if hasattr(config, "_attn_implementation")]


def assert_ragged_acceptance(stats, new_tokens: int) -> None:
    """Tells that drafts were accepted and rejected, so that both ways through a cycle were taken."""
    assert 0 < stats.num_accepted_tokens < stats.num_draft_tokens
    assert stats.num_target_forwards < new_tokens


def assert_drafts_change_nothing(
    model, inputs: dict, trees=(None, "random"), accuracy: float = 0.8, k: int = 5, others=(), **settings
) -> torch.LongTensor:
    """Plain generation's text, which neither chains and trees of drafts, partly right, nor other methods change."""
    plain = model.generate(**inputs, **settings)
    texts = {key: inputs[key] for key in ("input_ids", "attention_mask")}
    for tree in trees:
        script = scripted_for(plain, texts, k=k, accuracy=accuracy, tree=tree)
        output = model.generate(**inputs, **settings, assistant=script, return_dict_in_generate=True)
        assert output.sequences.tolist() == plain.tolist(), tree
        assert 0 < output.speculative.num_accepted_tokens < output.speculative.num_draft_tokens
    for method in others:
        assert model.generate(**inputs, **settings, spec_method=method).tolist() == plain.tolist(), method
    return plain
