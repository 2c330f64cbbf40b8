"""The end of generation: every stop inside an accepted block cuts the text exactly where plain generation ends it."""

import copy

import pytest
import torch
from transformers import GenerationConfig, StoppingCriteria, StopStringCriteria
from transformers.generation.stopping_criteria import EosTokenCriteria, MaxLengthCriteria
from transformers.generation.streamers import BaseStreamer

from tests.helpers.architectures import tiny_model
from tests.helpers.caches import CACHE
from tests.helpers.levels import full
from tests.helpers.models import LETTERS, prompts, scripted_for, tiny_llama


PROMPT = 7
BATCH_SIZES = (1, 3)
CALL = {"max_new_tokens": 30, "do_sample": False}


@pytest.fixture(scope="module")
def texts(model):
    """Batch size -> prompts and 40 greedy tokens after them, without any stop."""
    texts = {}
    for size in BATCH_SIZES:
        inputs = prompts(size)
        texts[size] = inputs, model.generate(**inputs, max_new_tokens=40, do_sample=False)
    # The stops of the tests were chosen for these texts.
    rows = texts[3][1][:, PROMPT:].tolist()
    assert [row.index(15) if 15 in row else None for row in rows] == [4, 16, None]
    assert [row.index(6) if 6 in row else None for row in rows] == [None, 8, 10]
    assert [row[0] for row in rows if 63 not in row] == [55, 10, 20]
    return texts


@pytest.fixture
def compare(model, texts):
    """Generates without and with speculation; drafts know the text without stops, so blocks run past the ends."""

    def compare(batch_size, tree=None, k=6, accuracy=1.0, make=dict, target=model, **settings):
        inputs, text = texts[batch_size]
        settings = {**CALL, **settings}
        plain = target.generate(**inputs, **{**settings, **make()})
        speculator = scripted_for(text, inputs, k=k, accuracy=accuracy, tree=tree)
        ours = target.generate(**inputs, **{**settings, **make()}, assistant=speculator)
        assert torch.equal(ours, plain), (batch_size, tree, settings)
        return plain

    return compare


def both_shapes_and_sizes():
    return ((batch_size, tree) for batch_size in BATCH_SIZES for tree in (None, "random"))


def test_end_tokens(compare):
    # The last ones end rows with their first token.
    ends = [20, [6, 15, 3, 2], [63], [55, 10], [55, 10, 20]]
    for number, eos in enumerate(ends):
        for batch_size, tree in both_shapes_and_sizes():
            compare(batch_size, tree, accuracy=(0.8, 1.0)[number % 2], eos_token_id=eos)
    compare(3, eos_token_id=20, stopping_criteria=[EosTokenCriteria([6, 15])])


def test_rows_end_apart_and_are_padded(compare):
    output = compare(3, eos_token_id=[6, 15])[:, PROMPT:]
    assert output.shape[1] == 11
    ends = [next(i for i, token in enumerate(row) if token in (6, 15)) for row in output.tolist()]
    assert len(set(ends)) == 3
    for row, end in zip(output, ends):
        assert not row[end + 1 :].any()
    for eos, pad in (([6, 15], 5), ([6, 15], 62), (15, 15)):
        assert (compare(3, eos_token_id=eos, pad_token_id=pad)[:, -1] == pad).any()
    target = tiny_llama()
    target.generation_config.eos_token_id = [6, 15]
    assert torch.equal(compare(3, target=target)[:, PROMPT:], output)


@pytest.mark.filterwarnings("ignore:Using the model-agnostic default `max_length`")
def test_lengths_inside_a_block(compare, model, texts):
    for number, max_new_tokens in enumerate((1, 2, 3, 4, 5, 6, 7, 9, 14)):
        output = compare(BATCH_SIZES[number % 2], max_new_tokens=max_new_tokens)
        assert output.shape[1] == PROMPT + max_new_tokens
    assert compare(1, max_new_tokens=None).shape[1] == PROMPT + 20
    assert compare(3, stopping_criteria=[MaxLengthCriteria(17), MaxLengthCriteria(13)]).shape[1] == 13
    # Plain generation looks at the length and the time after a token, so it writes one.
    assert compare(1, stopping_criteria=[MaxLengthCriteria(3)]).shape[1] == PROMPT + 1
    assert compare(3, max_time=0.0).shape[1] == PROMPT + 1
    inputs, text = texts[1]
    settings = {"max_new_tokens": 9, "do_sample": False, "return_dict_in_generate": True}
    output = model.generate(**inputs, **settings, assistant=scripted_for(text, inputs, k=6, accuracy=1.0))
    # The prefill gives one token, and of the other eight the last one of each cycle needs no draft.
    assert output.speculative.num_draft_tokens <= 7
    assert output.speculative.num_committed_tokens == 9


def stop_strings(texts, batch_size, first=6, length=3):
    """A stop string for each row that begins at another place, inside a block."""
    rows = texts[batch_size][1][:, PROMPT:].tolist()
    return ["".join(LETTERS[t] for t in row[first + 2 * i :][:length]) for i, row in enumerate(rows)]


def test_stop_strings_end_inside_a_draft(compare, texts, tokenizer):
    for batch_size, tree in both_shapes_and_sizes():
        strings = stop_strings(texts, batch_size)
        for eos in ({}, {"eos_token_id": 63}):
            output = compare(batch_size, tree, stop_strings=strings, tokenizer=tokenizer, **eos)
            assert output.shape[1] == PROMPT + 9 + 2 * (batch_size - 1)
            # Without an end-of-sequence token plain generation goes on with rows that have stopped.
            assert bool((output[0, PROMPT + 9 :] == 0).all()) == bool(eos or batch_size == 1)
    row = texts[1][1][0].tolist()
    across_the_prompts_end = "".join(LETTERS[t] for t in row[PROMPT - 2 : PROMPT + 3])
    assert compare(1, stop_strings=[across_the_prompts_end], tokenizer=tokenizer).shape[1] == PROMPT + 3


@full
def test_stop_strings_of_configs_and_criteria(compare, texts, tokenizer):
    strings, call = stop_strings(texts, 3), {"tokenizer": tokenizer}

    def make():
        return {"generation_config": GenerationConfig(stop_strings=strings, **CALL, eos_token_id=63, pad_token_id=0)}

    assert compare(3, make=make, **call).shape[1] == PROMPT + 13
    target = tiny_llama()
    target.generation_config.stop_strings = strings
    before = copy.deepcopy(target.generation_config.to_dict())
    for given in ({}, {"generation_config": GenerationConfig(**CALL)}):
        assert compare(3, target=target, **given, **call).shape[1] == PROMPT + 13
    assert target.generation_config.to_dict() == before
    assert compare(3, target=target, stop_strings=None).shape[1] == PROMPT + 30
    # A criterion wins over the argument.
    early, late = stop_strings(texts, 1, first=4), stop_strings(texts, 1, first=9)
    output = compare(1, stop_strings=early, **call, stopping_criteria=[StopStringCriteria(tokenizer, late)])
    assert output.shape[1] == PROMPT + 12


class StopAt(StoppingCriteria):
    """Ends rows by the tokens so far, each for itself or all together, and remembers what it was shown."""

    def __init__(self, per_row=True):
        self.calls, self.per_row = [], per_row

    def __call__(self, input_ids, scores, **kwargs):
        self.calls.append(input_ids.tolist())
        done = (input_ids[:, -3:].sum(1) % 5 == 1) & (input_ids.shape[1] > PROMPT + 3)
        return done if self.per_row else done.any().expand(input_ids.shape[0])


def each(made: list, name: str, kind, *args):
    """What makes an object for each of two calls, and keeps it."""

    def make():
        made.append(kind(*args))
        return {name: made[-1] if name == "streamer" else made[-1:]}

    return make


def test_custom_criteria_see_the_same_calls(compare, texts, tokenizer):
    for batch_size, tree in both_shapes_and_sizes():
        for eos in (None, 63, [6, 15]):
            for per_row in (True, False):
                make = each(made := [], "stopping_criteria", StopAt, per_row)
                assert compare(batch_size, tree, make=make, eos_token_id=eos).shape[1] < PROMPT + 30
                assert made[0].calls == made[1].calls
    make = each(made := [], "stopping_criteria", StopAt)
    strings = {"stop_strings": [LETTERS[texts[3][1][0, PROMPT + 9]]], "tokenizer": tokenizer}
    compare(3, make=make, **strings, repetition_penalty=1.2, eos_token_id=63)
    assert made[0].calls == made[1].calls


@full
def test_rows_do_not_wait_for_each_other(model, texts, tokenizer):
    """A criterion that ends nothing costs no cycles."""
    inputs, text = texts[3]
    counts = []
    for given in (
        {},
        {"stopping_criteria": [lambda input_ids, scores: torch.zeros(3, dtype=torch.bool)]},
        {"max_time": 600.0},
        {"stop_strings": ["-_-_-"], "tokenizer": tokenizer},
    ):
        settings = {**CALL, **given, "return_dict_in_generate": True}
        settings["assistant"] = scripted_for(text, inputs, k=6, accuracy=0.7)
        counts.append(model.generate(**inputs, **settings).speculative.num_target_forwards)
    assert len(set(counts)) == 1


def test_rows_that_have_gone_ahead_are_cut_back(model, texts):
    inputs, text = texts[3]
    fast = text.clone()
    # The drafter knows nothing of two rows, and all of the one that ends first.
    fast[1:, PROMPT:] = 0
    settings = {**CALL, "eos_token_id": 63, "return_dict_in_generate": True}
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


def test_recurrent_states_are_not_cut_back():
    """A state cannot be taken back: where it is returned, the rows wait, and a note says so."""
    model = tiny_model("qwen3_next")
    inputs = prompts(3)
    settings = {"max_new_tokens": 24, "do_sample": False, "pad_token_id": 0}
    whole = model.generate(**inputs, **settings)
    stop = {**settings, "stopping_criteria": [lambda ids, scores: (ids[:, 9:] == whole[:, [14]]).any(1)]}
    output = model.generate(**inputs, **stop, return_dict_in_generate=True, assistant=scripted_for(whole, inputs))
    cut = model.generate(**inputs, **stop)
    assert torch.equal(output.sequences, cut)
    assert cut.shape[1] < whole.shape[1]
    assert "The rows wait for the slowest one in every cycle: stopping criteria" in output.speculative.notes[0]
    # The cache is that of the text.
    rest = whole.shape[1] - cut.shape[1]
    mask = torch.nn.functional.pad(inputs["attention_mask"], (0, cut.shape[1] - PROMPT), value=1)
    settings |= {"max_new_tokens": rest, "attention_mask": mask}
    assert torch.equal(model.generate(cut, **settings, **{CACHE: output[CACHE]}), whole)


class Recorder(BaseStreamer):
    def __init__(self):
        self.events = []

    def put(self, value):
        assert value.device.type == "cpu"
        self.events.append(value.tolist())

    def end(self):
        self.events.append("end")


def test_streamers_get_the_same_events(compare):
    for settings in (
        {},
        {"eos_token_id": [6, 15]},
        {"eos_token_id": [55, 10, 20, 61]},
        {"max_new_tokens": 1},
        {"stopping_criteria": [StopAt()]},
        {"repetition_penalty": 1.3, "eos_token_id": 20},
    ):
        for batch_size, tree in both_shapes_and_sizes():
            output = compare(batch_size, tree, make=each(made := [], "streamer", Recorder), **settings)
            plain, ours = made
            assert ours.events == plain.events
            assert ours.events[-1] == "end"
            assert len(ours.events) == output.shape[1] - PROMPT + 2
