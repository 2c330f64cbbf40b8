"""Prompts and commits of any size, with made-up states, for candidate generators that tests drive by hand."""

from __future__ import annotations

import torch

from hf_specdec import CandidateGenerator, SpeculativeConfig, Speculator
from hf_specdec.candidate_generators.dflash.network import DFlashNetwork
from hf_specdec.candidate_generators.mtp.network import MtpNetwork
from hf_specdec.method import resolve_candidate_generator
from hf_specdec.protocol import Commit, DraftStep, Prompt, Session


GREEDY = {"do_sample": False, "max_new_tokens": 30, "eos_token_id": None}
CPU = torch.device("cpu")


def speculator_for(network, **settings) -> Speculator:
    """Drafts with a network of DFlash, EAGLE or MTP."""
    names = {DFlashNetwork: "dflash", MtpNetwork: "mtp"}
    method = names.get(type(network)) or network.config.method
    config = SpeculativeConfig(method, "loaded", **settings)
    return Speculator(config, resolve_candidate_generator(method), network)


def generator_for(network, num_rows=1, session=None, **settings) -> CandidateGenerator:
    session = session or Session(num_rows, 1000, CPU)
    return speculator_for(network, **settings).candidate_generator(session)


def rows_of(call, row=0):
    """A row's drafts, cycle by cycle."""
    return [trace for cycle in call.cycles for trace in cycle.rows if trace.row == row]


def ragged(*rows):
    """What `generate()` takes of rows of different lengths: padded on the left."""
    return {
        "input_ids": padded(rows, left=True),
        "attention_mask": padded(list(map(torch.ones_like, rows)), left=True),
    }


def random_rows(network, lengths, seed):
    """Texts of these lengths, and states of the target for all but the last token of each."""
    generator = torch.Generator().manual_seed(seed)
    size = network.needs.hidden_size
    texts = [torch.randint(1, network.needs.vocab_size, (n,), generator=generator) for n in lengths]
    states = [
        {key: torch.randn((n - 1, size), generator=generator) for key in network.target_hidden_states} for n in lengths
    ]
    return texts, states


def padded(rows, left):
    """Rows of different length as one tensor."""
    size = max(map(len, rows))
    pads = [(size - len(row), 0) if left else (0, size - len(row)) for row in rows]
    return torch.stack([torch.nn.functional.pad(r, (0, 0) * (r.dim() - 1) + pad) for r, pad in zip(rows, pads)])


def prompt_of(rows) -> Prompt:
    """Lists of tokens as a prompt without states, padded on the left."""
    tokens = padded(list(map(torch.tensor, rows)), left=True)
    return Prompt(tokens, [tokens.shape[1] - len(row) for row in rows])


def commit_of(rows, token_lists) -> Commit:
    """All but the last of the tokens were drafted."""
    tokens = padded(list(map(torch.tensor, token_lists)), left=False)
    return Commit(rows, tokens, token_lists, [len(row) - 1 for row in token_lists])


def feed(generator, texts, states, prompt_lengths, parts=1):
    """Shows the texts to a generator: left-padded prompts, the token after each, and the rest in `parts` commits."""

    def part_of_states(ranges, left):
        keys = generator.target_hidden_states
        return {key: padded([s[key][begin:end] for s, (begin, end) in zip(states, ranges)], left) for key in keys}

    starts = [max(prompt_lengths) - n for n in prompt_lengths]
    tokens = padded([text[:n] for text, n in zip(texts, prompt_lengths)], left=True)
    generator.prefill(Prompt(tokens, starts, part_of_states([(0, n) for n in prompt_lengths], left=True)))
    # Entry t has the state of token t and token t + 1.
    begins = [n - 1 for n in prompt_lengths]
    for part in range(parts + 1):
        ends = [n + (len(text) - 1 - n) * part // parts for n, text in zip(prompt_lengths, texts)]
        ranges = list(zip(begins, ends))
        new = [text[begin + 1 : end + 1] for text, (begin, end) in zip(texts, ranges)]
        lists, begins = [row.tolist() for row in new], ends
        rows = list(range(len(texts)))
        generator.observe(Commit(rows, padded(new, False), lists, [0] * len(rows), part_of_states(ranges, False)))


def drafts_of(generator, texts, limits=None):
    """Each row's draft as paths of tokens, in the order of its nodes."""
    limits = limits or [generator.num_speculative_tokens] * len(texts)
    anchors = torch.stack([text[-1] for text in texts])
    draft = generator.propose(DraftStep(list(range(len(texts))), anchors, [len(text) for text in texts], limits))
    assert draft.size <= generator.num_draft_nodes
    return paths_of(draft)


def paths_of(draft):
    """Each row's nodes as paths of tokens."""
    found = []
    for tokens, parents in zip(draft.token_lists(), draft.parent_lists()):
        paths = []
        for token, parent in zip(tokens, parents):
            paths.append((*(paths[parent] if parent >= 0 else ()), token))
        found.append(paths)
    return found
