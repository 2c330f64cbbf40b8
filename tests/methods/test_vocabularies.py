"""Draft models with another tokenizer: tokens compared as bytes, drafts of shared tokens and of re-encoded text."""

import copy
import string

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import AutoTokenizer, PreTrainedTokenizerFast

from hf_specdec import CheckpointFormatError, SpecConfigError, demo, generate_many, load_speculator, record
from hf_specdec.candidate_generators.draft_model.vocabularies import (
    ReencodedText,
    RowText,
    SharedTokens,
    difference,
    relation,
    shared_tokens,
)
from hf_specdec.candidate_generators.draft_model.vocabulary import Vocabulary
from hf_specdec.decoding import graphs
from tests.helpers.distribution import NUM_ROWS, P_VALUE, SETTINGS, V, exact_distribution, sampled_counts, small_model
from tests.helpers.methods import OTHER_CHECKPOINTS, demo_inputs, demo_target, plain_text
from tests.helpers.models import nothing_runs
from tests.helpers.statistics import chi_square_pvalue
from tests.helpers.tape import spoil_inputs, tape_everything


DRAFT = OTHER_CHECKPOINTS["draft_model shared tokens"][1]
MAPPINGS = ("shared_tokens", "text")


def letters(text: str) -> PreTrainedTokenizerFast:
    """A tokenizer with a token for each character of a text, in this order."""
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


class TestVocabulary:
    @pytest.mark.parametrize("which", [0, 1], ids=["byte-level", "marked"])
    @given(before=st.text(max_size=12), text=st.text(max_size=40))
    @settings(max_examples=60, deadline=None)
    def test_texts_come_back(self, vocabularies, which, before, text):
        vocabulary = vocabularies[which]
        text, before = text.encode(errors="ignore"), before.encode(errors="ignore")
        assert vocabulary.text(vocabulary.encode(text, before)) == text

    @pytest.mark.parametrize("which", [0, 1], ids=["byte-level", "marked"])
    @given(data=st.binary(max_size=20), before=st.binary(max_size=6))
    @settings(max_examples=60, deadline=None)
    def test_any_bytes_come_back(self, vocabularies, which, data, before):
        """Tokens may begin and end inside of characters."""
        vocabulary = vocabularies[which]
        assert vocabulary.text(vocabulary.encode(data, before)) == data

    def test_segments_as_inside_of_a_text(self, vocabularies):
        for vocabulary in vocabularies:
            text = "def total(prices):\n    return sum(prices)\n"
            whole = vocabulary.tokenizer(text, add_special_tokens=False)["input_ids"]
            cut = len(vocabulary.text(whole[:6]))
            encoded = text.encode()
            assert vocabulary.encode(encoded[cut:], encoded[:cut]) == whole[6:]

    def test_tokens_of_both_have_the_same_bytes(self, vocabularies):
        target, draft = vocabularies
        shared = shared_tokens(target, draft)
        assert len(shared) > 1000
        assert len(set(shared.values())) == len(shared)
        ordinary = [(token, own) for token, own in shared.items() if token in target.texts]
        assert all(target.texts[token] == draft.texts[own] for token, own in ordinary)
        # A blank in front is written in two ways; what ends a text is called in two ways.
        blank = target.tokenizer.convert_tokens_to_ids("Ġself")
        assert shared[blank] == draft.tokenizer.convert_tokens_to_ids("▁self")
        assert shared[target.tokenizer.eos_token_id] == draft.tokenizer.bos_token_id or (
            shared[target.tokenizer.eos_token_id] == draft.tokenizer.eos_token_id
        )

    @pytest.mark.parametrize(
        ("decoder", "table"),
        [
            (decoders.WordPiece(), {"the": b" the", "##re": b"re"}),
            (decoders.BPEDecoder(), {"the</w>": b"the ", "re": b"re"}),
            (decoders.Metaspace(), {"▁the": b" the", "re": b"re", "<0x0A>": b"\n"}),
            (decoders.ByteLevel(), {"Ġthe": b" the", "Ċ": b"\n", "Ã©": "é".encode()}),
        ],
        ids=["WordPiece", "end of word", "SentencePiece", "byte-level"],
    )
    def test_kinds_of_tokenizers(self, decoder, table):
        tokenizer = Tokenizer(models.WordLevel({token: index for index, token in enumerate(table)}, unk_token="re"))
        tokenizer.decoder = decoder
        vocabulary = Vocabulary(PreTrainedTokenizerFast(tokenizer_object=tokenizer))
        assert vocabulary.texts == dict(enumerate(table.values()))


def speculator_of(draft, tokenizer, mapping, **options):
    return load_speculator(
        small_model(),
        {"method": "draft_model", "num_speculative_tokens": 3, "draft_vocabulary": mapping, **options},
        draft_model=draft,
        tokenizers=(letters("abcdef"), letters(tokenizer)),
    )


class TestTheTargetUnderOtherNumbers:
    """A draft model that is the target, with its tokens in another order."""

    @pytest.mark.parametrize("method", ["greedy", "probabilistic"])
    def test_drawn_among_shared_tokens_it_is_always_accepted(self, method):
        order = [4, 2, 0, 5, 3, 1]
        draft = renumbered(small_model(), order)
        names = "".join(string.ascii_lowercase[index] for index in order)
        speculator = speculator_of(draft, names, "shared_tokens", draft_sample_method=method)
        counts, stats = sampled_counts(SETTINGS["top_p"], speculator)
        assert chi_square_pvalue(counts, exact_distribution(SETTINGS["top_p"])) > P_VALUE
        assert (stats.acceptance_rate > 0.9999) == (method == "probabilistic")
        assert stats.acceptance_rate > 0.3

    @pytest.mark.parametrize("mapping", MAPPINGS)
    def test_greedy_every_draft_is_accepted(self, mapping):
        order = [4, 2, 0, 5, 3, 1]
        draft = renumbered(small_model(), order)
        speculator = speculator_of(draft, "".join(string.ascii_lowercase[index] for index in order), mapping)
        inputs = {"input_ids": torch.tensor([[1, 4, 2], [3, 3, 5]]), "attention_mask": torch.ones(2, 3).long()}
        arguments = {"max_new_tokens": 21, "do_sample": False}
        output = small_model().generate(**inputs, **arguments, assistant=speculator, return_dict_in_generate=True)
        assert torch.equal(output.sequences, small_model().generate(**inputs, **arguments))
        assert output.speculative.acceptance_rate == 1
        assert output.speculative.num_target_forwards == 6


class TestSampling:
    # The draft lacks "b", knows "x" and "y" that the target lacks, and has other numbers.
    @pytest.mark.parametrize(
        ("mapping", "method"), [("shared_tokens", "greedy"), ("shared_tokens", "probabilistic"), ("text", "greedy")]
    )
    @pytest.mark.parametrize("setting", ["plain", "repetition_penalty_and_top_p"])
    def test_joint_distribution(self, mapping, method, setting):
        draft = renumbered(small_model(), [4, 2, 0, 5, 3, 1])
        speculator = speculator_of(draft, "fxacdy", mapping, draft_sample_method=method)
        counts, stats = sampled_counts(SETTINGS[setting], speculator)
        assert chi_square_pvalue(counts, exact_distribution(SETTINGS[setting])) > P_VALUE
        assert stats.num_accepted_tokens > 0.1 * NUM_ROWS

    def test_tokens_of_one_of_them_are_never_drafted(self):
        draft = renumbered(small_model(), [4, 2, 0, 5, 3, 1])
        speculator = speculator_of(draft, "fxacdy", "shared_tokens", draft_sample_method="probabilistic")
        logits = speculator.resources.vocabularies.logits(torch.arange(6.0)[None])
        # a, c, d and f are the draft's tokens 2, 3, 4 and 0.
        never = float("-inf")
        assert logits.tolist() == [[2.0, never, 3.0, 4.0, never, 0.0]]


class TestGraphs:
    """A draft of each cycle is one graph, which the host starts when it knows the text."""

    @pytest.fixture(autouse=True)
    def on_tapes(self, monkeypatch):
        monkeypatch.setenv("HF_SPECDEC_CHECK", "0")
        spoil_inputs(monkeypatch)
        tape_everything(monkeypatch)
        yield
        graphs.forget_graphs()

    def calls(self, mapping, draft, tokenizer, **arguments):
        """Text, drafts and statistics of a call with graphs, and of one without."""
        inputs = {"input_ids": torch.tensor([[1, 4, 2], [3, 3, 5]]), "attention_mask": torch.ones(2, 3).long()}
        for eager in (False, True):
            speculator, model = speculator_of(draft, tokenizer, mapping, enforce_eager=eager), small_model()
            torch.manual_seed(0)
            with record(trace=True) as made:
                output = model.generate(**inputs, **arguments, assistant=speculator, return_dict_in_generate=True)
            yield output.sequences.tolist(), made.calls[0].cycles, output.speculative

    @pytest.mark.parametrize("mapping", MAPPINGS)
    @pytest.mark.parametrize("sampling", [{"do_sample": False}, {"do_sample": True, "temperature": 1.5, "top_k": 5}])
    def test_a_cycle_drafts_in_one(self, mapping, sampling):
        order = [4, 2, 0, 5, 3, 1]
        names, draft = "".join(string.ascii_lowercase[index] for index in order), renumbered(small_model(), order)
        found = self.calls(mapping, draft, names, max_new_tokens=21, **sampling)
        (text, cycles, stats), (eager_text, eager_cycles, _) = found
        assert text == eager_text
        assert cycles == eager_cycles
        assert stats.acceptance_rate > (0.3 if mapping == "text" and sampling["do_sample"] else 0.9999)
        assert stats.num_draft_graph_replays == len(
            [cycle for cycle in cycles if any(row.draft_tokens for row in cycle.rows)]
        )

    @pytest.mark.parametrize("mapping", MAPPINGS)
    def test_tokens_that_one_of_them_lacks(self, mapping):
        draft = renumbered(small_model(), [4, 2, 0, 5, 3, 1])
        speculator = speculator_of(draft, "fxacdy", mapping)
        drawn = [sampled_counts(SETTINGS["top_p"], speculator, seed, num_rows=64, count=2) for seed in range(4)]
        counts, stats = sum(counts for counts, _ in drawn), [stats for _, stats in drawn]
        assert chi_square_pvalue(counts, exact_distribution(SETTINGS["top_p"], 2)) > P_VALUE
        assert sum(call.num_accepted_tokens for call in stats) > 100
        assert all(call.num_draft_graph_replays > 1 for call in stats)


class TestDemo:
    """A trained draft model with another kind of tokenizer."""

    @pytest.mark.parametrize("batch_size", [1, 4])
    @pytest.mark.parametrize("mapping", MAPPINGS)
    def test_drafts_are_accepted(self, mapping, batch_size):
        output = demo_target().generate(
            **demo_inputs(batch_size),
            max_new_tokens=48,
            do_sample=False,
            return_dict_in_generate=True,
            speculative={"method": "draft_model", "model": DRAFT, "draft_vocabulary": mapping,
                         "num_speculative_tokens": 5},
        )  # fmt: skip
        assert torch.equal(output.sequences, plain_text(batch_size, 48))
        assert output.speculative.mean_acceptance_length > 2.1
        (note,) = output.speculative.notes
        assert "1406 tokens are in both (of the target's 4096, the draft's 1536)" in note
        assert ("re-encoded" in note) == (mapping == "text")

    @pytest.mark.parametrize("mapping", MAPPINGS)
    def test_models_stay_as_they_were(self, mapping):
        speculator = load_speculator(demo_target(), model=DRAFT, draft_vocabulary=mapping)
        draft = speculator.resources.model
        before = {name: tensor.clone() for name, tensor in draft.state_dict().items()}, str(draft), vars(draft.config)
        before = copy.deepcopy(before)
        demo_target().generate(**demo_inputs(2), max_new_tokens=12, do_sample=True, assistant=speculator)
        assert (str(draft), vars(draft.config)) == before[1:]
        assert all(torch.equal(tensor, before[0][name]) for name, tensor in draft.state_dict().items())

    def test_what_is_shared_decides(self, vocabularies):
        """Of a third of the target's tokens fewer drafts are accepted than of text."""
        target, draft = vocabularies
        sizes = 4096, 1536, 1536
        assert type(relation(target, draft, sizes, "auto", ["", ""])) is ReencodedText
        assert type(relation(draft, target, (1536, 4096, 4096), "auto", ["", ""])) is SharedTokens

    def test_an_end_that_both_have_is_drafted(self, vocabularies):
        target, draft = vocabularies
        found = relation(target, draft, (4096, 1536, 1536), "text", ["", ""])
        end = found.shared[target.tokenizer.eos_token_id]
        word = draft.ids[b" return"]
        text = RowText(drafted=[word, end, word])
        assert found._as_target(text) == [*target.encode(b" return"), target.tokenizer.eos_token_id]

    @pytest.mark.parametrize("num_accepted", [0, 1, 3])
    def test_fed_drafts_stay_as_far_as_the_text_agrees(self, vocabularies, num_accepted):
        target, draft = vocabularies
        found = relation(target, draft, (4096, 1536, 1536), "text", ["", ""])
        drafted = draft.encode(b" return self.name\n")
        text = RowText(drafted=list(drafted), num_fed=len(drafted) - 1)
        committed = target.encode(b" return self")[:num_accepted] + target.encode(b"!")
        kept = found.commit(text, committed, num_accepted)
        assert draft.text(drafted[:kept] + text.pending) == target.text(committed)
        assert kept == (0 if num_accepted == 0 else min(num_accepted, 2))
        assert text.pending


class TestTokenizersOfTheCall:
    """transformers' own spellings, and the setting."""

    def draft(self):
        return load_speculator(demo_target(), model=DRAFT).resources.model

    def test_given_to_generate(self):
        draft = self.draft()
        bare = copy.deepcopy(draft)
        bare.config._name_or_path = ""
        tokenizers = {"tokenizer": demo.load_tokenizer(), "assistant_tokenizer": AutoTokenizer.from_pretrained(DRAFT)}
        arguments = {**demo_inputs(2), "max_new_tokens": 24, "do_sample": False}
        with pytest.raises(CheckpointFormatError, match="4096 and 1536 tokens.*draft_tokenizer.*assistant_tokenizer"):
            demo_target().generate(**arguments, assistant=bare)
        output = demo_target().generate(**arguments, assistant=bare, **tokenizers, return_dict_in_generate=True)
        assert torch.equal(output.sequences, plain_text(2, 24))
        assert output.speculative.num_accepted_tokens > 10

    def test_of_a_folder(self):
        bare = copy.deepcopy(self.draft())
        bare.config._name_or_path = ""
        arguments = {**demo_inputs(2), "max_new_tokens": 24, "do_sample": False}
        named = {"method": "draft_model", "draft_tokenizer": DRAFT}
        output = demo_target().generate(**arguments, assistant=bare, speculative=named, return_dict_in_generate=True)
        assert torch.equal(output.sequences, plain_text(2, 24))
        assert output.speculative.num_accepted_tokens > 10

    def test_many_requests(self):
        tokenizer, other = demo.load_tokenizer(), AutoTokenizer.from_pretrained(DRAFT)
        bare = copy.deepcopy(self.draft())
        bare.config._name_or_path = ""
        texts = [prompt.text[-200:] for prompt in demo.prompts()[:3]]
        arguments = {"max_new_tokens": 16, "do_sample": False}
        drafted = {"assistant": bare, "num_speculative_tokens": 4, "assistant_tokenizer": other}
        ours = generate_many(
            demo_target(), texts, batch_size=2, tokenizer=tokenizer, in_order=True, **arguments, **drafted
        )
        plain = generate_many(demo_target(), texts, batch_size=2, tokenizer=tokenizer, in_order=True, **arguments)
        ours, plain = list(ours), list(plain)
        assert [result.tokens for result in ours] == [result.tokens for result in plain]
        assert sum(result.stats.num_accepted_tokens for result in ours) > 10

    def test_combined(self):
        settings = {"method": "ngram+draft_model", "model": DRAFT}
        tokenizers = {"tokenizer": demo.load_tokenizer(), "assistant_tokenizer": AutoTokenizer.from_pretrained(DRAFT)}
        arguments = {**demo_inputs(2), "max_new_tokens": 24, "do_sample": False}
        ours = demo_target().generate(**arguments, **tokenizers, speculative=settings)
        assert torch.equal(ours, plain_text(2, 24))

    @pytest.mark.parametrize(
        ("arguments", "message"),
        [
            ({"spec_model": DRAFT, "assistant_tokenizer": "mine"}, "without `tokenizer`"),
            ({"spec_method": "ngram", "assistant_tokenizer": "mine", "tokenizer": "mine"}, "method='ngram' drafts"),
            (
                {"speculative": {"method": "draft_model", "model": DRAFT, "draft_tokenizer": "/nowhere"}},
                "`draft_tokenizer`='/nowhere' holds no tokenizer",
            ),
            (
                {"speculative": {"method": "draft_model", "model": DRAFT, "draft_vocabulary": "bytes"}},
                "draft_vocabulary.*shared_tokens",
            ),
        ],
    )
    def test_errors(self, arguments, message):
        mine = AutoTokenizer.from_pretrained(DRAFT)
        arguments = {name: mine if value == "mine" else value for name, value in arguments.items()}
        with nothing_runs(demo_target()), pytest.raises(SpecConfigError, match=message):
            demo_target().generate(**demo_inputs(1), max_new_tokens=4, **arguments)

    def test_a_loaded_speculator_has_its_tokenizers(self):
        mine = AutoTokenizer.from_pretrained(DRAFT)
        speculator = load_speculator(demo_target(), model=DRAFT)
        with pytest.raises(SpecConfigError, match="loaded Speculator.*tokenizers="):
            demo_target().generate(**demo_inputs(1), assistant=speculator, tokenizer=mine, assistant_tokenizer=mine)


def test_nothing_in_common():
    with pytest.raises(CheckpointFormatError, match="different tokenizers without a common token"):
        speculator_of(renumbered(small_model(), [0] * V), "uvwxyz", "auto")


def test_tables_of_one_tokenizer_do_not_differ():
    table = {letter: index for index, letter in enumerate(string.ascii_letters)}
    assert difference(table, {**table, "<|tool|>": 52}) is None
    assert "'a' is 0 and 1" in difference(table, {**table, "a": 1, "b": 0})
