"""The end of generation: every stop inside an accepted block cuts the text exactly where plain generation ends it.

The stops are chosen for the texts of the prompts; `test_the_texts_that_stops_were_chosen_for` says where they lie.
"""

import copy
import time

import pytest
import torch
from transformers import GenerationConfig, StoppingCriteria, StoppingCriteriaList, StopStringCriteria
from transformers.generation.stopping_criteria import EosTokenCriteria, MaxLengthCriteria, MaxTimeCriteria
from transformers.generation.streamers import BaseStreamer, TextIteratorStreamer, TextStreamer

from hf_specdec import SpecConfigError
from hf_specdec.decoding.sequences import Sequences, StopRules
from tests.helpers.architectures import tiny_model
from tests.helpers.caches import CACHE
from tests.helpers.models import LETTERS, VOCAB_SIZE, prompts, scripted_for, tiny_llama
from tests.helpers.pairs import every_pair


PROMPT = 7
BATCH_SIZES = [1, 3]
TREES = {"chain": None, "ragged_tree": "random"}
SHAPES = [pytest.param(tree, id=name) for name, tree in TREES.items()]


@pytest.fixture(scope="module")
def texts(model):
    """Batch size -> prompts and 40 greedy tokens after them, without any stop."""
    texts = {}
    for size in BATCH_SIZES:
        inputs = prompts(size)
        texts[size] = inputs, model.generate(**inputs, max_new_tokens=40, do_sample=False)
    return texts


@pytest.fixture
def compare(model, texts):
    """Generates without and with speculation; drafts know the text without stops, so blocks run past the ends."""

    def compare(batch_size, tree=None, k=6, accuracy=1.0, make=dict, **settings):
        inputs, text = texts[batch_size]
        settings = {"max_new_tokens": 30, "do_sample": False, **settings}
        plain = model.generate(**inputs, **{**settings, **make()})
        speculator = scripted_for(text, inputs, k=k, accuracy=accuracy, tree=tree)
        ours = model.generate(**inputs, **{**settings, **make()}, assistant=speculator)
        assert torch.equal(ours, plain)
        return plain

    return compare


class TestEndOfSequence:
    @every_pair(
        # The last ones end rows with their first token.
        eos=[20, [6, 15], [6, 15, 3, 2], [55, 20], [63], 61, [55, 10], [55, 10, 20]],
        accuracy=[0.8, 1.0],
        tree=TREES,
        batch_size=BATCH_SIZES,
    )
    def test_equals_plain(self, compare, batch_size, tree, accuracy, eos):
        compare(batch_size, tree, accuracy=accuracy, eos_token_id=eos)

    def test_rows_end_apart_and_are_padded(self, compare):
        output = compare(3, eos_token_id=[6, 15])[:, PROMPT:]
        assert output.shape[1] == 11
        ends = [next(i for i, token in enumerate(row) if token in (6, 15)) for row in output.tolist()]
        assert len(set(ends)) == 3
        for row, end in zip(output, ends):
            assert not row[end + 1 :].any()

    @pytest.mark.parametrize(("eos", "pad"), [([6, 15], 5), ([6, 15], 62), (15, 15)])
    def test_other_padding(self, compare, eos, pad):
        output = compare(3, eos_token_id=eos, pad_token_id=pad)
        assert (output[:, -1] == pad).any()

    @pytest.mark.parametrize("accuracy", [0.0, 1.0])
    def test_at_every_place_of_a_block(self, compare, texts, accuracy):
        row = texts[1][1][0, PROMPT:].tolist()
        for index in range(14):
            output = compare(1, k=8, accuracy=accuracy, eos_token_id=row[index])
            assert output.shape[1] == PROMPT + row.index(row[index]) + 1

    def test_from_the_models_own_config(self, texts):
        model = tiny_llama()
        model.generation_config.eos_token_id = [6, 15]
        inputs, text = texts[3]
        plain = model.generate(**inputs, max_new_tokens=30, do_sample=False)
        speculator = scripted_for(text, inputs)
        assert torch.equal(model.generate(**inputs, max_new_tokens=30, do_sample=False, assistant=speculator), plain)
        assert plain.shape[1] < PROMPT + 30


class TestLengthAndTime:
    @pytest.mark.parametrize(
        ("max_new_tokens", "batch_size"), [(1, 3), (2, 1), (3, 3), (4, 1), (5, 3), (6, 3), (7, 1), (9, 3), (14, 3)]
    )
    def test_max_new_tokens_inside_a_block(self, compare, batch_size, max_new_tokens):
        output = compare(batch_size, max_new_tokens=max_new_tokens)
        assert output.shape[1] == PROMPT + max_new_tokens

    @pytest.mark.filterwarnings("ignore:Using the model-agnostic default `max_length`")
    def test_default_length(self, model, texts):
        inputs, text = texts[1]
        plain = model.generate(**inputs, do_sample=False)
        assert torch.equal(model.generate(**inputs, do_sample=False, assistant=scripted_for(text, inputs)), plain)
        assert plain.shape[1] == PROMPT + 20

    def test_max_length_criterion_of_the_user(self, compare):
        assert compare(3, stopping_criteria=[MaxLengthCriteria(17)]).shape[1] == 17
        assert compare(3, stopping_criteria=[MaxLengthCriteria(17), MaxLengthCriteria(13)]).shape[1] == 13

    def test_drafts_keep_within_max_new_tokens(self, model, texts):
        inputs, text = texts[1]
        output = model.generate(
            **inputs,
            max_new_tokens=9,
            do_sample=False,
            return_dict_in_generate=True,
            assistant=scripted_for(text, inputs, k=6, accuracy=1.0),
        )
        # The prefill gives one token, and of the other eight the last one of each cycle needs no draft.
        assert output.speculative.num_draft_tokens <= 7
        assert output.speculative.num_committed_tokens == 9

    @pytest.mark.parametrize("batch_size", BATCH_SIZES)
    def test_max_time(self, model, texts, batch_size):
        inputs, text = texts[batch_size]
        began = time.perf_counter()
        output = model.generate(
            **inputs, max_new_tokens=100_000, max_time=0.2, do_sample=False, assistant=scripted_for(text, inputs)
        )
        # A cycle takes milliseconds; the rest is for a busy machine.
        assert 0.2 < time.perf_counter() - began < 5
        length = min(output.shape[1], text.shape[1])
        assert PROMPT < output.shape[1] < 100_000
        assert torch.equal(output[:, :length], text[:, :length])

    def test_time_is_over_at_once(self, compare):
        assert compare(3, max_time=0.0).shape[1] == PROMPT + 1


class TestStopStrings:
    def strings(self, texts, batch_size, first=6, length=3):
        """A stop string for each row that begins at another place, inside a block."""
        rows = texts[batch_size][1][:, PROMPT:].tolist()
        return ["".join(LETTERS[t] for t in row[first + 2 * i :][:length]) for i, row in enumerate(rows)]

    @pytest.mark.parametrize("batch_size", BATCH_SIZES)
    @pytest.mark.parametrize("tree", SHAPES)
    @pytest.mark.parametrize("with_eos", [False, True])
    def test_argument(self, compare, texts, tokenizer, batch_size, tree, with_eos):
        strings = self.strings(texts, batch_size)
        eos = {"eos_token_id": 63} if with_eos else {}
        output = compare(batch_size, tree, stop_strings=strings, tokenizer=tokenizer, **eos)
        assert output.shape[1] == PROMPT + 9 + 2 * (batch_size - 1)
        # Without an end-of-sequence token plain generation goes on with rows that have stopped.
        assert bool((output[0, PROMPT + 9 :] == 0).all()) == (with_eos or batch_size == 1)

    @pytest.mark.parametrize("batch_size", BATCH_SIZES)
    def test_generation_config(self, compare, texts, tokenizer, batch_size):
        strings = self.strings(texts, batch_size)

        def make():
            config = GenerationConfig(
                stop_strings=strings, max_new_tokens=30, do_sample=False, eos_token_id=63, pad_token_id=0
            )
            return {"generation_config": config, "max_new_tokens": 30, "do_sample": False}

        output = compare(batch_size, make=make, tokenizer=tokenizer)
        assert output.shape[1] == PROMPT + 9 + 2 * (batch_size - 1)

    @pytest.mark.parametrize("given_config", [False, True])
    def test_the_models_generation_config(self, texts, tokenizer, given_config):
        model = tiny_llama()
        inputs, text = texts[3]
        model.generation_config.stop_strings = self.strings(texts, 3)
        before = copy.deepcopy(model.generation_config.to_dict())
        call = {**inputs, "tokenizer": tokenizer}
        if given_config:
            call["generation_config"] = GenerationConfig(max_new_tokens=30, do_sample=False)
        else:
            call |= {"max_new_tokens": 30, "do_sample": False}
        plain = model.generate(**call)
        ours = model.generate(**call, assistant=scripted_for(text, inputs))
        assert torch.equal(ours, plain)
        assert plain.shape[1] == PROMPT + 13
        assert model.generation_config.to_dict() == before

    def test_argument_none_switches_off(self, texts, tokenizer):
        model = tiny_llama()
        inputs, text = texts[1]
        model.generation_config.stop_strings = self.strings(texts, 1)
        call = {**inputs, "max_new_tokens": 30, "do_sample": False, "stop_strings": None}
        ours = model.generate(**call, assistant=scripted_for(text, inputs))
        assert torch.equal(ours, model.generate(**call))
        assert ours.shape[1] == PROMPT + 30

    def test_criterion_object_wins_over_the_argument(self, compare, texts, tokenizer):
        early, late = self.strings(texts, 1, first=4)[0], self.strings(texts, 1, first=9)[0]
        output = compare(
            1, stop_strings=early, tokenizer=tokenizer, stopping_criteria=[StopStringCriteria(tokenizer, [late])]
        )
        assert output.shape[1] == PROMPT + 12

    def test_string_across_the_prompts_end(self, compare, texts, tokenizer):
        row = texts[1][1][0].tolist()
        string = "".join(LETTERS[t] for t in row[PROMPT - 2 : PROMPT + 3])
        assert compare(1, stop_strings=[string], tokenizer=tokenizer).shape[1] == PROMPT + 3

    def test_they_are_looked_for_on_the_host(self, tokenizer):
        """Where the text is: it is not copied to a device at every token."""
        sequences = Sequences(torch.tensor([[5, 6, 7]]), 0)
        sequences.device = torch.device("meta")
        string = StopStringCriteria(tokenizer, [LETTERS[9] + LETTERS[4]])
        stop = StopRules([MaxLengthCriteria(20), MaxTimeCriteria(1e6), string], sequences)
        assert stop.append([0], [[8, 9, 4, 7]]) == [[8, 9, 4]]

    def test_no_tokenizer(self, model, tokenizer):
        call = {**prompts(1), "max_new_tokens": 4, "spec_method": "ngram"}
        with pytest.raises(SpecConfigError, match="stop_strings.*tokenizer"):
            model.generate(**call, stop_strings=["ab"])
        with pytest.raises(SpecConfigError, match="stop_strings.*tokenizer"):
            model.generate(**call, generation_config=GenerationConfig(stop_strings="ab"))
        # A tokenizer that nothing needs is no problem.
        assert model.generate(**call, tokenizer=tokenizer).shape[1] == PROMPT + 4


class StopAt(StoppingCriteria):
    """Ends rows by a rule that reads everything it may: the tokens so far, and the scores if there are any."""

    def __init__(self, per_row=True):
        self.calls = []
        self.scores = []
        self.per_row = per_row

    def __call__(self, input_ids, scores, **kwargs):
        self.calls.append(input_ids.tolist())
        self.scores.append(None if scores is None else [step.argmax(-1).tolist() for step in scores])
        done = (input_ids[:, -3:].sum(1) % 5 == 1) & (input_ids.shape[1] > PROMPT + 3)
        return done if self.per_row else done.any().expand(input_ids.shape[0])


class StopAfter(StoppingCriteria):
    """Ends row i after string i, which it looks for in the last tokens of rows that are not done yet."""

    def __init__(self, strings, tokenizer, per_row):
        self.strings, self.tokenizer, self.per_row = strings, tokenizer, per_row
        self.done = [False] * len(strings)
        self.num_calls = 0

    def __call__(self, input_ids, scores, **kwargs):
        self.num_calls += 1
        texts = self.tokenizer.batch_decode(input_ids[:, PROMPT:][:, -3:])
        for row, text in enumerate(texts):
            if not self.done[row]:
                self.done[row] = self.strings[row] in text
        return torch.tensor(self.done) if self.per_row else all(self.done)


class TestCustomCriteria:
    @every_pair(
        per_row={"rows": True, "all": False},
        eos={"no_eos": None, "eos_unseen": 63, "eos_seen": [6, 15]},
        tree=TREES,
        batch_size=BATCH_SIZES,
    )
    def test_same_calls_and_same_text(self, compare, batch_size, tree, eos, per_row):
        made = []

        def make():
            made.append(StopAt(per_row))
            return {"stopping_criteria": StoppingCriteriaList(made[-1:])}

        output = compare(batch_size, tree, make=make, eos_token_id=eos)
        assert output.shape[1] < PROMPT + 30
        plain, ours = made
        assert ours.calls == plain.calls

    @pytest.mark.parametrize("batch_size", BATCH_SIZES)
    def test_criterion_that_reads_scores(self, model, texts, batch_size):
        inputs, text = texts[batch_size]
        settings = {"max_new_tokens": 30, "do_sample": False, "return_dict_in_generate": True, "output_scores": True}
        plain, ours = StopAt(), StopAt()
        output = model.generate(**inputs, **settings, stopping_criteria=[plain])
        model.generate(**inputs, **settings, stopping_criteria=[ours], assistant=scripted_for(text, inputs))
        assert ours.calls == plain.calls
        assert ours.scores == plain.scores
        assert len(plain.scores[-1]) == output.sequences.shape[1] - PROMPT

    @pytest.mark.parametrize("eos", [None, 63])
    @pytest.mark.parametrize("kind", [StopAt, "one_answer", "max_time", "stop_strings"])
    def test_rows_do_not_wait_for_each_other(self, model, texts, tokenizer, eos, kind):
        """A criterion that ends nothing costs no cycles."""
        inputs, text = texts[3]
        criteria = {
            StopAt: {"stopping_criteria": [lambda input_ids, scores: torch.zeros(3, dtype=torch.bool)]},
            "one_answer": {"stopping_criteria": [lambda input_ids, scores: False]},
            "max_time": {"max_time": 600.0},
            "stop_strings": {"stop_strings": ["-_-_-"], "tokenizer": tokenizer},
        }[kind]

        def stats(**settings):
            speculator = scripted_for(text, inputs, k=6, accuracy=0.7)
            settings = {"max_new_tokens": 30, "do_sample": False, "eos_token_id": eos, **settings}
            return model.generate(**inputs, **settings, return_dict_in_generate=True, assistant=speculator).speculative

        ours, free = stats(**criteria), stats()
        assert ours.num_target_forwards == free.num_target_forwards
        assert ours.num_accepted_tokens == free.num_accepted_tokens
        assert ours.notes == []

    @pytest.mark.parametrize("tree", SHAPES)
    @pytest.mark.parametrize("eos", [None, 63, [6, 15]], ids=["no_eos", "eos_unseen", "eos_seen"])
    @pytest.mark.parametrize("answers", ["rows", "all"])
    def test_memory_of_its_own_for_every_row(self, compare, texts, tokenizer, tree, eos, answers):
        """A criterion like those of evaluation harnesses: it remembers by index which rows are done."""
        rows = zip(texts[3][1][:, PROMPT:], (7, 3, 12))
        strings = ["".join(LETTERS[token] for token in row[at : at + 2]) for row, at in rows]
        made = []

        def make():
            made.append(StopAfter(strings, tokenizer, answers == "rows"))
            return {"stopping_criteria": StoppingCriteriaList(made[-1:])}

        output = compare(3, tree, make=make, eos_token_id=eos)
        assert output.shape[1] == PROMPT + (14 if eos in (None, 63) else 11)
        plain, ours = made
        assert ours.done == plain.done
        assert ours.num_calls == plain.num_calls

    def test_rows_that_have_gone_ahead_are_cut_back(self, model, texts):
        inputs, text = texts[3]
        fast = text.clone()
        # The drafter knows nothing of two rows, and all of the one that ends first.
        fast[1:, PROMPT:] = 0
        settings = {"max_new_tokens": 30, "do_sample": False, "eos_token_id": 63, "return_dict_in_generate": True}
        settings["stopping_criteria"] = [lambda ids, scores: torch.tensor([ids.shape[1] >= PROMPT + 9, False, False])]
        plain = model.generate(**inputs, **settings)
        ours = model.generate(**inputs, **settings, assistant=scripted_for(fast, inputs, k=6, accuracy=1.0))
        assert torch.equal(ours.sequences, plain.sequences)
        assert "tokens after the ends of rows have been generated and cut off" in ours.speculative.notes[0]
        for mine, its in zip(ours[CACHE].layers, plain[CACHE].layers):
            assert mine.keys.shape == its.keys.shape
            # Its last token is left out, whether it has been read or not, and so is the padding after it.
            for rows, slots in ((slice(1), slice(2, PROMPT + 8)), (slice(1, None), slice(2, None))):
                kept, expected = mine.keys[rows, :, slots], its.keys[rows, :, slots]
                torch.testing.assert_close(kept, expected, atol=1e-4, rtol=1e-5)
            assert not mine.keys[0, :, PROMPT + 8 :].any()

    def test_time_ends_rows_where_the_criterion_has_seen_them(self, compare, texts):
        def make():
            seen = []
            times = MaxTimeCriteria(max_time=-1.0)
            return {"stopping_criteria": StoppingCriteriaList([times, lambda ids, _: seen.append(ids) or False])}

        assert compare(3, make=make, eos_token_id=63).shape[1] == PROMPT + 1

    def test_recurrent_states_are_not_cut_back(self):
        """A state cannot be taken back: where it is returned, the rows wait, and a note says so."""
        model = tiny_model("qwen3_next")
        inputs = prompts(3)
        settings = {"max_new_tokens": 24, "do_sample": False, "pad_token_id": 0}
        whole = model.generate(**inputs, **settings)
        stop = {"stopping_criteria": [lambda ids, scores: (ids[:, 9:] == whole[:, [14]]).any(1)]}
        output = model.generate(
            **inputs, **settings, **stop, return_dict_in_generate=True, assistant=scripted_for(whole, inputs)
        )
        cut = model.generate(**inputs, **settings, **stop)
        assert torch.equal(output.sequences, cut)
        assert cut.shape[1] < whole.shape[1]
        assert "The rows wait for the slowest one in every cycle: stopping criteria" in output.speculative.notes[0]
        # The cache is that of the text.
        rest = whole.shape[1] - cut.shape[1]
        mask = torch.nn.functional.pad(inputs["attention_mask"], (0, cut.shape[1] - PROMPT), value=1)
        settings |= {"max_new_tokens": rest, "attention_mask": mask}
        assert torch.equal(model.generate(cut, **settings, **{CACHE: output[CACHE]}), whole)

    def test_beside_a_processor_and_stop_strings(self, compare, texts, tokenizer):
        strings = [LETTERS[texts[3][1][0, PROMPT + 9]]]
        made = []

        def make():
            made.append(StopAt())
            return {"stopping_criteria": StoppingCriteriaList(made[-1:])}

        compare(3, make=make, stop_strings=strings, tokenizer=tokenizer, repetition_penalty=1.2, eos_token_id=63)
        assert made[0].calls == made[1].calls

    def test_criterion_objects_that_generate_knows(self, compare):
        compare(3, stopping_criteria=[EosTokenCriteria([6, 15])])
        compare(3, eos_token_id=20, stopping_criteria=[EosTokenCriteria([6, 15])])


class Recorder(BaseStreamer):
    def __init__(self):
        self.events = []

    def put(self, value):
        assert value.device.type == "cpu"
        self.events.append(value.tolist())

    def end(self):
        self.events.append("end")


class TestStreamers:
    @every_pair(
        settings={
            "length": {},
            "eos": {"eos_token_id": [6, 15]},
            "eos_first": {"eos_token_id": [55, 10, 20, 61]},
            "one_token": {"max_new_tokens": 1},
            "criterion": {"stopping_criteria": [StopAt()]},
            "processor": {"repetition_penalty": 1.3, "eos_token_id": 20},
        },
        tree=TREES,
        batch_size=BATCH_SIZES,
    )
    def test_same_events_as_plain(self, compare, batch_size, tree, settings):
        made = []

        def make():
            made.append(Recorder())
            return {"streamer": made[-1]}

        output = compare(batch_size, tree, make=make, **settings)
        plain, ours = made
        assert ours.events == plain.events
        assert ours.events[-1] == "end"
        assert len(ours.events) == output.shape[1] - PROMPT + 2

    def test_text_streamers(self, model, texts, tokenizer, capsys):
        inputs, text = texts[1]
        settings = {"max_new_tokens": 20, "do_sample": False, "assistant": scripted_for(text, inputs)}
        expected = tokenizer.decode(text[0, PROMPT : PROMPT + 20])
        model.generate(**inputs, **settings, streamer=TextStreamer(tokenizer, skip_prompt=True))
        assert capsys.readouterr().out.strip() == expected
        streamer = TextIteratorStreamer(tokenizer, skip_prompt=True)
        model.generate(**inputs, **settings, streamer=streamer)
        assert "".join(streamer) == expected

    def test_tokens_arrive_while_generation_runs(self, model, texts):
        inputs, text = texts[1]
        seen = []

        class Watcher(Recorder):
            def put(self, value):
                super().put(value)
                seen.append(len(forwards))

        forwards = []
        handle = model.register_forward_hook(lambda *args: forwards.append(1))
        try:
            speculator = scripted_for(text, inputs, k=3)
            model.generate(**inputs, max_new_tokens=20, do_sample=False, streamer=Watcher(), assistant=speculator)
        finally:
            handle.remove()
        assert seen == sorted(seen)
        # The prompt and the first token come after the prefill, then one block after every forward.
        assert set(seen) == set(range(1, len(forwards) + 1))

    def test_streamer_that_takes_one_row_raises_as_plain(self, model, texts, tokenizer):
        for speculative in ({}, {"spec_method": "ngram"}):
            with pytest.raises(ValueError, match="batch size 1"):
                model.generate(**texts[3][0], max_new_tokens=3, streamer=TextStreamer(tokenizer), **speculative)


def test_the_texts_that_stops_were_chosen_for(texts):
    rows = texts[3][1][:, PROMPT:].tolist()
    assert [row.index(15) if 15 in row else None for row in rows] == [4, 16, None]
    assert [row.index(6) if 6 in row else None for row in rows] == [None, 8, 10]
    assert all(63 not in row for row in rows)
    assert [row[0] for row in rows] == [55, 10, 20]
    assert len(LETTERS) == VOCAB_SIZE


def test_user_length_criterion_below_the_prompt(model):
    """Plain generation looks at the length after a token, so it writes one."""
    inputs = prompts(1)
    settings = {"do_sample": False, "max_new_tokens": 10, "stopping_criteria": [MaxLengthCriteria(3)]}
    plain = model.generate(**inputs, **settings)
    assert torch.equal(model.generate(**inputs, **settings, spec_method="ngram"), plain)
