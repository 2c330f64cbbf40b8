"""PARD and PARD-2, draft models that draft all tokens of a cycle from one forward with masks; calls of P-EAGLE."""

from functools import cache

import pytest
import torch
from transformers import AutoModelForCausalLM

from hf_specdec import CheckpointFormatError, SpecConfigError, generate_many, load_speculator, record
from hf_specdec.hub.detect import detect_checkpoint
from hf_specdec.protocol import Commit, DraftStep, Prompt, Session
from hf_specdec.target.states import captured_states
from tests.helpers.architectures import tiny_model
from tests.helpers.by_hand import CPU, ragged, rows_of
from tests.helpers.distribution import no_drafts, small_model
from tests.helpers.heads import copy_of
from tests.helpers.levels import full, in_full
from tests.helpers.models import prompts, tiny_llama
from tests.helpers.paths import FIXTURES
from tests.helpers.published import published


NAMES = {"pard": "draft_model/published/pard", "pard2": "draft_model/published/pard2", "peagle": "eagle/eagle3_peagle"}
PARD, PARD2, _ = (FIXTURES / name for name in NAMES.values())
# Drafted tokens of the recorded runs, and the states of the target that a draft reads.
LENGTHS = {"pard": 6, "pard2": 5}
KEYS = {"pard": (), "pard2": (2, 4, "last")}
GREEDY = {"do_sample": False, "max_new_tokens": 40, "eos_token_id": None, "pad_token_id": 0}
CLOSE = {"atol": 2e-4, "rtol": 1e-4}


def target():
    return published(NAMES["pard"]).target


def load(folder=PARD, **settings):
    return load_speculator(target(), method="draft_model", model=str(folder), draft_vocabulary="same", **settings)


def of(name, **settings):
    """The target and the drafter of a recorded case."""
    if name != "peagle":
        return target(), load(published(NAMES[name]).folder, **settings)
    model, folder, _ = published(NAMES[name])
    return model, load_speculator(model, model=folder, **settings)


@cache
def states_of(name):
    """States of the target after every token of the recorded run."""
    with torch.no_grad(), captured_states(target(), KEYS[name]) as states:
        target()(published(NAMES[name]).expected["generate.output_ids"])
    return dict(states)


def begun(name):
    """A generator that has read the prompt but its last token, which is the first anchor of the official code."""
    drafter = of(name, num_speculative_tokens=LENGTHS[name])[1]
    generator, prompt = drafter.candidate_generator(Session(1, 200, CPU)), published(NAMES[name]).expected["input_ids"]
    assert generator.target_hidden_states == KEYS[name]
    states = {key: value[:, : prompt.shape[1] - 1] for key, value in states_of(name).items()}
    generator.prefill(Prompt(prompt[:, :-1], [0], states))
    return generator, prompt.shape[1]


def committed(name, start, end, num_accepted):
    """Tokens `start` to `end` of the recorded text, with the states from which each was predicted."""
    tokens = published(NAMES[name]).expected["generate.output_ids"][:, start:end]
    states = {key: value[:, start - 1 : end - 1] for key, value in states_of(name).items()}
    return Commit([0], tokens, tokens.tolist(), [num_accepted], states)


class TestRecordedRuns:
    @pytest.mark.parametrize("name", LENGTHS)
    @torch.no_grad()
    def test_every_cycle(self, name):
        expected, (generator, length), count = published(NAMES[name]).expected, begun(name), LENGTHS[name]
        text = expected["generate.output_ids"][0].tolist()
        generator.observe(committed(name, length - 1, length, 0))
        for cycle, accepted in enumerate(expected["generate.accepted"].tolist()):
            step = DraftStep([0], torch.tensor(text[length - 1 : length]), [length], [count])
            (draft,) = generator.propose(step).token_lists()
            if f"r{cycle}.draft_tokens" in expected:
                assert draft == expected[f"r{cycle}.draft_tokens"][0].tolist()
            rest = text[length : length + count]
            wrong = (index for index, (ours, right) in enumerate(zip(draft, rest)) if ours != right)
            assert next(wrong, len(rest)) == accepted
            length += accepted + 1
            if length >= len(text):
                break
            generator.observe(committed(name, length - accepted - 1, length, accepted))
        assert cycle > 8


def drafts_of_rows(model, drafter, rows):
    """Every row's drafts and acceptances in a greedy call, whose text is plain generation's; its statistics."""
    inputs = ragged(*rows)
    plain = model.generate(**inputs, **GREEDY, spec_method="off")
    with record(trace=True) as made:
        assert torch.equal(model.generate(**inputs, **GREEDY, assistant=drafter), plain)
    (call,) = made.calls
    rows = [[(trace.draft_tokens, trace.num_accepted) for trace in rows_of(call, row)] for row in range(len(rows))]
    return rows, call.stats


class TestCalls:
    """The table of methods has no rows for them."""

    @pytest.mark.parametrize(
        ("name", "settings"),
        [
            ("pard2", {"draft_confidence_threshold": 0.4}),
            ("peagle", {"num_speculative_tokens": 5}),
            *in_full(
                *((name, {}) for name in LENGTHS),
                ("pard", {"draft_confidence_threshold": 0.6}),
            ),
        ],
    )
    def test_ragged_rows_draft_what_they_draft_alone(self, name, settings):
        model, drafter = of(name, **settings)
        prompt = published(NAMES[name]).expected["input_ids"][0]
        rows = [prompt, prompt[3:], prompt[5:], *([prompt[-1:]] if name == "pard2" else [])]
        together, stats = drafts_of_rows(model, drafter, rows)
        assert stats.num_accepted_tokens > stats.num_drafts / 2
        assert together == [drafts_of_rows(model, of(name, **settings)[1], [row])[0][0] for row in rows]

    @pytest.mark.parametrize("name", ["pard2", *in_full("pard", "peagle")])
    def test_rows_join_and_sampled_text_follows_from_the_seed(self, name):
        model, drafter = of(name, num_speculative_tokens=3)
        prompt = published(NAMES[name]).expected["input_ids"][0]
        rows = [prompt, prompt[4:], prompt[2:], prompt[6:]]
        plain = [model.generate(**ragged(row), **GREEDY)[0, len(row) :].tolist() for row in rows]
        requests = [row.tolist() for row in rows]
        texts = list(generate_many(model, requests, batch_size=2, in_order=True, assistant=drafter, **GREEDY))
        assert [text.tokens for text in texts] == plain
        assert sum(text.stats.num_accepted_tokens for text in texts) > 40
        drafter, texts = of(name, draft_sample_method="greedy")[1], []
        for assistant in (drafter, no_drafts()):
            torch.manual_seed(0)
            settings = {**GREEDY, "do_sample": True, "temperature": 0.5, "assistant": assistant}
            texts.append(model.generate(**ragged(prompt, prompt[3:]), **settings))
        assert torch.equal(*texts)

    def test_a_recurrent_draft_forgets_the_masks(self):
        """It drafts what it would if its whole text were read anew."""
        draft = tiny_model("falcon_h1")
        draft.config.pard_token = 3
        model, inputs = tiny_llama(vocab_size=draft.config.vocab_size), prompts(2)
        settings = {"draft_model": draft, "num_speculative_tokens": 4, "draft_vocabulary": "same"}
        drafter, greedy = load_speculator(model, "draft_model", **settings), {**GREEDY, "max_new_tokens": 16}
        plain = model.generate(**inputs, **greedy)
        with record(trace=True) as made:
            assert torch.equal(model.generate(**inputs, **greedy, assistant=drafter), plain)
        start, length = int((inputs["attention_mask"][0] == 0).sum()), inputs["input_ids"].shape[1] + 1
        for trace in rows_of(made.calls[0])[:6]:
            text = torch.cat([plain[0, start:length], torch.full((3,), 3)])
            with torch.no_grad():
                best = draft(text[None]).logits[0, -4:].argmax(-1).tolist()
            assert trace.draft_tokens == best[: len(trace.draft_tokens)]
            length += trace.num_accepted + 1


@full
def test_mask_token_of_the_config(tmp_path):
    for number, (token, mask) in enumerate(((0, 0), (-1, None), (None, None))):
        assert load(copy_of(PARD, tmp_path / f"{number}", {"pard_token": token})).resources.mask_token == mask
    for number, token in enumerate((160, -2, "158", 2.5)):
        folder = copy_of(PARD, tmp_path / f"wrong{number}", {"pard_token": token})
        assert "`pard_token`=" in detect_checkpoint(folder).problems[0]
        with pytest.raises(CheckpointFormatError, match="`pard_token`=.*token by token"):
            load(folder)
    # Serving engines say it in the settings.
    drafters = {wanted: load(parallel_drafting=wanted, num_speculative_tokens=12) for wanted in (True, False)}
    assert (drafters[True].resources.mask_token, drafters[False].resources.mask_token) == (158, None)
    with pytest.raises(SpecConfigError, match="`parallel_drafting`=True.*no `pard_token`"):
        load_speculator(small_model(), "draft_model", draft_model=small_model(), parallel_drafting=True)


class TestTargetStates:
    """PARD-2 reads states of the target beside the tokens."""

    @torch.no_grad()
    def test_a_pause_changes_no_draft(self):
        """What was committed while nothing was drafted is read with its states, all at once."""
        text, drafts = published(NAMES["pard2"]).expected["generate.output_ids"], []
        for cuts in ((0, 1, 4, 9, 10), (0, 9, 10)):
            generator, length = begun("pard2")
            for start, end in zip(cuts, cuts[1:]):
                generator.observe(committed("pard2", length - 1 + start, length - 1 + end, 0))
                anchor = length - 2 + end
                if len(cuts) == 5 or end == 10:
                    draft = generator.propose(DraftStep([0], text[0, anchor : anchor + 1], [anchor + 1], [5]))
            drafts.append(draft.token_lists())
        assert drafts[0] == drafts[1]

    def test_a_bias_is_added_everywhere(self, tmp_path):
        """Also where a token has no states."""
        folder = copy_of(PARD2, tmp_path / "draft", {"pard2_proj_bias": True})
        weight, bias = torch.randn(32, 96), torch.randn(32)
        torch.save({"target_proj.weight": weight, "target_proj.bias": bias}, folder / "warp_model.bin")
        resources = load(folder).resources
        states = {key: torch.randn(1, 3, 32) for key in KEYS["pard2"]}
        tokens = torch.tensor([[5, 7, 2]])
        ours = resources.states.embed(tokens, states, [0])
        feature = torch.nn.functional.pad(torch.cat(list(states.values()), dim=-1)[:, :2], (0, 0, 1, 0))
        embeddings = resources.model.get_input_embeddings()(tokens)
        torch.testing.assert_close(ours, embeddings + 0.5 * (feature @ weight.T + bias), **CLOSE)

    @full
    @pytest.mark.parametrize(
        ("config", "words"),
        [
            ({"pard2_target_layers": None}, "does not say `pard2_target_layers`"),
            ({"pard2_target_layers": [2, "4", -1]}, "`pard2_target_layers`=.*list of integers"),
            ({"pard2_proj_bias": True}, "lacks 1 tensors of the projection: target_proj.bias"),
        ],
    )
    def test_configs_that_contradict_themselves(self, tmp_path, config, words):
        folder = copy_of(PARD2, tmp_path / "draft", config)
        with pytest.raises(CheckpointFormatError, match=words):
            load(folder)
        assert detect_checkpoint(folder).problems or "pard2_target_layers" not in config

    def test_damaged_projections(self, tmp_path):
        file = copy_of(PARD2, tmp_path / "draft") / "warp_model.bin"
        for content in (file.read_bytes()[:500], b"not a pickle"):
            file.write_bytes(content)
            with pytest.raises(CheckpointFormatError, match=r"warp_model\.bin"):
                load(file.parent)

    @full
    def test_layers_are_counted_as_in_transformers(self, tmp_path, warnings):
        for number, (layers, keys) in enumerate((([0, 6, -7], (0, "last", 0)), ([-2, 5, -1], (5, 5, "last")))):
            folder = copy_of(PARD2, tmp_path / str(number), {"pard2_target_layers": layers})
            assert load(folder).resources.states.keys == keys
        # A draft for another target drafts from the tokens alone, as does one that is no checkpoint.
        for number, layers in enumerate(([2, 4, 7], [2, 4, -8], [2, 4, 4, -1])):
            folder = copy_of(PARD2, tmp_path / f"other{number}", {"pard2_target_layers": layers})
            assert load(folder).resources.states is None
            assert "PARD-2" in warnings[-1]
        folder = copy_of(PARD2, tmp_path / "alone")
        (folder / "warp_model.bin").unlink()
        assert load(folder).resources.states is None
        assert "no warp_model.bin" in warnings[-1]
        draft = AutoModelForCausalLM.from_pretrained(PARD2)
        drafter = load_speculator(target(), "draft_model", draft_model=draft, draft_vocabulary="same")
        assert drafter.resources.states is None
        assert any("passed by their name" in line for line in warnings)
