"""Draft models with another tokenizer: tokens compared as bytes, drafts of shared tokens and of re-encoded text."""

import copy
import string

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import AutoTokenizer, PreTrainedTokenizerFast

from hf_specdec import CheckpointFormatError, demo, generate_many, load_speculator, record
from hf_specdec.candidate_generators.draft_model.vocabularies import (
    ReencodedText,
    RowText,
    SharedTokens,
    Vocabulary,
    difference,
    relation,
    shared_tokens,
)
from hf_specdec.drafts import DraftTree
from hf_specdec.target import graphs
from tests.helpers.chi_square import chi_square_pvalue
from tests.helpers.distribution import P_VALUE, SETTINGS, exact_distribution, sampled_counts, small_model
from tests.helpers.levels import full, in_full
from tests.helpers.methods import OTHER_CHECKPOINTS, demo_inputs, demo_target, plain_text
from tests.helpers.tape import spoil_inputs, tape_everything


DRAFT = OTHER_CHECKPOINTS["draft_model shared tokens"][1]


def letters(text: str) -> PreTrainedTokenizerFast:
    """Has a token for each character of a text, in this order."""
    tokenizer = Tokenizer(models.WordLevel({letter: index for index, letter in enumerate(text)}, unk_token=text[0]))
    tokenizer.pre_tokenizer = pre_tokenizers.Split("", "isolated")
    tokenizer.decoder = decoders.Fuse()
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer)


def renumbered(model: torch.nn.Module, order: list[int]) -> torch.nn.Module:
    """A copy of a model whose token i is the original's token `order[i]`."""
    twin = copy.deepcopy(model)
    with torch.no_grad():
        for embedding in (twin.get_input_embeddings(), twin.get_output_embeddings()):
            embedding.weight.copy_(embedding.weight[order].clone())
    return twin


@pytest.fixture(scope="module")
def vocabularies():
    return Vocabulary(demo.load_tokenizer()), Vocabulary(AutoTokenizer.from_pretrained(DRAFT))


few_bytes = st.text(max_size=20).map(lambda text: text.encode(errors="ignore")) | st.binary(max_size=20)


@given(which=st.integers(0, 1), before=few_bytes, text=few_bytes)
def test_texts_and_bytes_come_back(vocabularies, which, before, text):
    """Tokens may begin and end inside of characters."""
    vocabulary = vocabularies[which]
    assert vocabulary.text(vocabulary.encode(text, before)) == text


def test_segments_and_shared_tokens(vocabularies):
    for vocabulary in vocabularies:
        text = "def total(prices):\n    return sum(prices)\n"
        whole = vocabulary.tokenizer(text, add_special_tokens=False)["input_ids"]
        cut = len(vocabulary.text(whole[:6]))
        encoded = text.encode()
        assert vocabulary.encode(encoded[cut:], encoded[:cut]) == whole[6:]
    target, draft = vocabularies
    shared = shared_tokens(target, draft)
    assert len(shared) > 1000
    assert len(set(shared.values())) == len(shared)
    assert all(target.texts[token] == draft.texts[own] for token, own in shared.items() if token in target.texts)
    # A blank in front is written in two ways; what ends a text is called in two ways.
    blank = target.tokenizer.convert_tokens_to_ids("Ġself")
    assert shared[blank] == draft.tokenizer.convert_tokens_to_ids("▁self")
    assert shared[target.tokenizer.eos_token_id] in (draft.tokenizer.bos_token_id, draft.tokenizer.eos_token_id)


@full
def test_kinds_of_tokenizers():
    for decoder, table in (
        (decoders.WordPiece(), {"the": b" the", "##re": b"re"}),
        (decoders.BPEDecoder(), {"the</w>": b"the ", "re": b"re"}),
        (decoders.Metaspace(), {"▁the": b" the", "re": b"re", "<0x0A>": b"\n"}),
        (decoders.ByteLevel(), {"Ġthe": b" the", "Ċ": b"\n", "Ã©": "é".encode()}),
    ):
        tokenizer = Tokenizer(models.WordLevel({token: index for index, token in enumerate(table)}, unk_token="re"))
        tokenizer.decoder = decoder
        vocabulary = Vocabulary(PreTrainedTokenizerFast(tokenizer_object=tokenizer))
        assert vocabulary.texts == dict(enumerate(table.values()))
    # Tables of one tokenizer do not differ.
    table = {letter: index for index, letter in enumerate(string.ascii_letters)}
    assert difference(table, {**table, "<|tool|>": 52}) is None
    assert "'a' is 0 and 1" in difference(table, {**table, "a": 1, "b": 0})


# A draft model that is the target, with its tokens in another order

ORDER = [4, 2, 0, 5, 3, 1]
NAMES = "".join(string.ascii_lowercase[index] for index in ORDER)
# The draft lacks "b", knows "x" and "y" that the target lacks, and has other numbers.
PARTLY_SHARED = "fxacdy"
INPUTS = {"input_ids": torch.tensor([[1, 4, 2], [3, 3, 5]]), "attention_mask": torch.ones(2, 3).long()}


def speculator_of(names, mapping, **options):
    return load_speculator(
        small_model(),
        {"method": "draft_model", "num_speculative_tokens": 3, "draft_vocabulary": mapping, **options},
        draft_model=renumbered(small_model(), ORDER),
        tokenizers=(letters("abcdef"), letters(names)),
    )


@pytest.mark.parametrize("mapping", ["text", *in_full("shared_tokens")])
def test_greedy_drafts_of_the_renumbered_target_are_all_accepted(mapping):
    arguments = {**INPUTS, "max_new_tokens": 21, "do_sample": False}
    speculator = speculator_of(NAMES, mapping)
    output = small_model().generate(**arguments, assistant=speculator, return_dict_in_generate=True)
    assert torch.equal(output.sequences, small_model().generate(**arguments))
    assert output.speculative.acceptance_rate == 1
    assert output.speculative.num_target_forwards == 6


PENALTY = "repetition_penalty_and_top_p"


@pytest.mark.parametrize(
    ("names", "mapping", "method", "setting"),
    [
        (PARTLY_SHARED, "shared_tokens", "probabilistic", PENALTY),
        *in_full((PARTLY_SHARED, "shared_tokens", "greedy", PENALTY), (PARTLY_SHARED, "text", "greedy", PENALTY)),
        *in_full((NAMES, "shared_tokens", "probabilistic", "top_p")),
    ],
)
def test_joint_distribution(names, mapping, method, setting):
    speculator = speculator_of(names, mapping, draft_sample_method=method)
    counts, stats = sampled_counts(SETTINGS[setting], speculator)
    assert chi_square_pvalue(counts, exact_distribution(SETTINGS[setting])) > P_VALUE
    assert stats.acceptance_rate > (0.9999 if names == NAMES else 0.1)
    if mapping == "shared_tokens" and names == PARTLY_SHARED:
        # a, c, d and f are the draft's tokens 2, 3, 4 and 0.
        logits, never = speculator.resources.vocabularies.logits(torch.arange(6.0)[None]), float("-inf")
        assert logits.tolist() == [[2.0, never, 3.0, 4.0, never, 0.0]]


# Drafts of a cycle as one graph, which the host starts when it knows the text


@pytest.fixture
def on_tapes(monkeypatch):
    monkeypatch.setenv("HF_SPECDEC_CHECK", "0")
    spoil_inputs(monkeypatch)
    tape_everything(monkeypatch)
    yield
    graphs.forget_graphs()


GREEDY, DRAWN = {"do_sample": False}, {"do_sample": True, "temperature": 1.5, "top_k": 5}


@pytest.mark.parametrize(
    ("mapping", "sampling"),
    [("shared_tokens", DRAWN), *in_full(("shared_tokens", GREEDY), ("text", GREEDY), ("text", DRAWN))],
)
def test_a_cycle_drafts_in_one_graph(mapping, sampling, on_tapes):
    found = []
    for eager in (False, True):
        speculator = speculator_of(NAMES, mapping, enforce_eager=eager)
        arguments = {"max_new_tokens": 21, "assistant": speculator, "return_dict_in_generate": True, **sampling}
        torch.manual_seed(0)
        with record(trace=True) as made:
            output = small_model().generate(**INPUTS, **arguments)
        found.append((output.sequences.tolist(), made.calls[0].cycles, output.speculative))
    (text, cycles, stats), (eager_text, eager_cycles, _) = found
    assert text == eager_text
    assert cycles == eager_cycles
    assert stats.acceptance_rate > (0.3 if mapping == "text" and sampling is DRAWN else 0.9999)
    drafting = [cycle for cycle in cycles if any(row.draft_tokens for row in cycle.rows)]
    assert stats.num_draft_graph_replays == len(drafting)


# A trained draft model with another kind of tokenizer

SIZES = 4096, 1536, 1536


@pytest.mark.parametrize("mapping", ["text", *in_full("shared_tokens")])
def test_drafts_of_a_trained_model_are_accepted(mapping):
    speculator = load_speculator(demo_target(), model=DRAFT, draft_vocabulary=mapping, num_speculative_tokens=5)
    call = {**demo_inputs(4), "max_new_tokens": 32, "do_sample": False, "return_dict_in_generate": True}
    output = demo_target().generate(**call, assistant=speculator)
    assert torch.equal(output.sequences, plain_text(4, 32))
    assert output.speculative.mean_acceptance_length > 1.9
    (note,) = output.speculative.notes
    assert "1406 tokens are in both (of the target's 4096, the draft's 1536)" in note
    assert ("re-encoded" in note) == (mapping == "text")


def test_relations_to_the_targets_tokens(vocabularies):
    target, draft = vocabularies
    # Of a third of the target's tokens fewer drafts are accepted than of text.
    assert type(relation(target, draft, SIZES, "auto", ["", ""])) is ReencodedText
    assert type(relation(draft, target, (1536, 4096, 4096), "auto", ["", ""])) is SharedTokens
    # An end of the text that both have is drafted.
    found = relation(target, draft, SIZES, "text", ["", ""])
    end = found.shared[target.tokenizer.eos_token_id]
    word = draft.ids[b" return"]
    written = found.draft(DraftTree.from_lists([[word, end, word]], "cpu"), [9], [RowText()])
    assert written.token_lists()[0] == [*target.encode(b" return"), target.tokenizer.eos_token_id]
    # Fed drafts stay as far as the text agrees.
    drafted = draft.encode(b" return self.name\n")
    for num_accepted in (0, 1, 3):
        text = RowText(drafted=list(drafted))
        committed = target.encode(b" return self")[:num_accepted] + target.encode(b"!")
        kept, to_read = found.committed(text, committed, num_accepted, len(drafted) - 1)
        assert draft.text(drafted[:kept] + to_read) == target.text(committed)
        assert kept == min(num_accepted, 2)
        assert to_read


@full
def test_tokenizers_of_the_call():
    """Of a draft model that does not say where it comes from."""
    draft = copy.deepcopy(load_speculator(demo_target(), model=DRAFT).resources.model)
    draft.config._name_or_path = ""
    limits = {"max_new_tokens": 24, "do_sample": False, "assistant": draft}
    with pytest.raises(CheckpointFormatError, match="4096 and 1536 tokens.*draft_tokenizer.*assistant_tokenizer"):
        demo_target().generate(**demo_inputs(2), **limits)
    own = {"tokenizer": demo.load_tokenizer(), "assistant_tokenizer": AutoTokenizer.from_pretrained(DRAFT)}
    for arguments in (own, {"speculative": {"method": "draft_model", "draft_tokenizer": DRAFT}}):
        assert torch.equal(demo_target().generate(**demo_inputs(2), **limits, **arguments), plain_text(2, 24))
    rows = [row[mask.bool()].tolist() for row, mask in zip(*demo_inputs(2).values())]
    results = list(generate_many(demo_target(), rows, 2, in_order=True, **limits, **own))
    assert [result.tokens for result in results] == plain_text(2, 24)[:, -24:].tolist()
    assert sum(result.stats.num_accepted_tokens for result in results) > 10
