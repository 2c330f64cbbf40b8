"""PARD-2: a draft model with masks that reads states of the target beside the tokens."""

from functools import cache

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

from hf_specdec import CheckpointFormatError, generate_many, load_speculator, record
from hf_specdec.candidate_generators.draft_model.target_states import TargetStates
from hf_specdec.decoding.states import captured_states
from hf_specdec.hub.detect import detect_checkpoint
from hf_specdec.protocol import Commit, DraftStep, Prompt, Session
from tests.helpers.by_hand import rows_of
from tests.helpers.distribution import P_VALUE, SETTINGS, exact_distribution, sampled_counts, small_model
from tests.helpers.heads import copy_of
from tests.helpers.statistics import chi_square_pvalue
from tests.methods.test_pard import FOLDER as PARD
from tests.methods.test_pard import small_drafter, target


FOLDER = PARD.parent / "pard2"
K = 5
KEYS = (2, 4, "last")
GREEDY = {"do_sample": False, "max_new_tokens": 40, "eos_token_id": None, "pad_token_id": 0}
CLOSE = {"atol": 2e-4, "rtol": 1e-4}


@cache
def expected():
    return load_file(FOLDER / "expected.safetensors")


def speculator(folder=FOLDER, **settings):
    return load_speculator(target(), method="draft_model", model=str(folder), same_tokenizer=True, **settings)


def test_detection():
    found = detect_checkpoint(FOLDER)
    assert (found.method, found.format, found.problems) == ("draft_model", "pard2", ())


@cache
def states_of_text():
    """States of the target after every token of the official run."""
    text = expected()["generate.output_ids"]
    with torch.no_grad(), captured_states(target(), KEYS) as states:
        target()(text)
    return dict(states)


def begun(num_speculative_tokens=K):
    """A generator that has read the prompt but its last token, which is the official run's first anchor."""
    generator = speculator(num_speculative_tokens=num_speculative_tokens).candidate_generator(
        Session(1, 200, torch.device("cpu"))
    )
    assert generator.target_hidden_states == KEYS
    length = expected()["input_ids"].shape[1]
    states = {key: value[:, : length - 1] for key, value in states_of_text().items()}
    generator.prefill(Prompt(expected()["input_ids"][:, :-1], [0], states))
    return generator, length


def committed(start, end, num_accepted):
    """Tokens `start` to `end` of the official text, with the states from which each was predicted."""
    tokens = expected()["generate.output_ids"][:, start:end]
    states = {key: value[:, start - 1 : end - 1] for key, value in states_of_text().items()}
    return Commit([0], tokens, tokens.tolist(), [num_accepted], states)


@torch.no_grad()
def test_official_run_cycle_by_cycle():
    text, (generator, length) = expected()["generate.output_ids"][0].tolist(), begun()
    generator.observe(committed(length - 1, length, 0))
    for cycle, accepted in enumerate(expected()["generate.accepted"].tolist()):
        draft = generator.propose(DraftStep([0], torch.tensor(text[length - 1 : length]), [length], [K]))
        draft = draft.token_lists()[0]
        if f"r{cycle}.draft_tokens" in expected():
            assert draft == expected()[f"r{cycle}.draft_tokens"][0].tolist()
        rest = text[length : length + K]
        assert next((i for i, (ours, right) in enumerate(zip(draft, rest)) if ours != right), len(rest)) == accepted
        length += accepted + 1
        if length >= len(text):
            break
        generator.observe(committed(length - accepted - 1, length, accepted))
    assert cycle > 20


@torch.no_grad()
def test_logits_of_rounds():
    generator, length = begun()
    generator.observe(committed(length - 1, length, 0))
    for cycle in range(4):
        logits = generator._feed_pending(K - 1)[0]
        torch.testing.assert_close(logits, expected()[f"r{cycle}.draft_logits"], **CLOSE)
        accepted = int(expected()[f"r{cycle}.accepted"])
        length += accepted + 1
        generator.observe(committed(length - accepted - 1, length, accepted))


def test_states_of_tokens():
    """Each token has those from which it was predicted, the first one none, and masks those of the anchor."""
    for cycle, states in ((0, expected()["r0.target_feat"]), (1, expected()["r1.target_feat"])):
        num_tokens = states.shape[1] - K + 1
        first = 0 if cycle == 0 else expected()["input_ids"].shape[1]
        ours = torch.cat([states_of_text()[key] for key in KEYS], dim=-1)
        ours = torch.nn.functional.pad(ours, (0, 0, 1, 0))[:, first : first + num_tokens]
        torch.testing.assert_close(ours, states[:, :num_tokens], **CLOSE)
        assert torch.equal(states[:, num_tokens:], states[:, num_tokens - 1 : num_tokens].expand(-1, K - 1, -1))


def accepted_of(drafter, **inputs):
    """Accepted tokens and cycles of a greedy call, whose text is plain generation's, and its trace."""
    plain = target().generate(**inputs, **GREEDY, spec_method="off")
    with record(trace=True) as made:
        assert torch.equal(target().generate(**inputs, **GREEDY, assistant=drafter), plain)
    return made.calls[0]


def test_whole_run_is_better_with_the_states_than_without(tmp_path, warnings):
    prompt = expected()["input_ids"]
    inputs = {"input_ids": prompt, "attention_mask": torch.ones_like(prompt)}
    with_states = accepted_of(speculator(num_speculative_tokens=K), **inputs).stats
    assert not [line for line in warnings if "PARD-2" in line]
    (folder := copy_of(FOLDER, tmp_path / "draft", {}) / "warp_model.bin").unlink()
    without = accepted_of(speculator(folder.parent, num_speculative_tokens=K), **inputs).stats
    assert any("no warp_model.bin" in line for line in warnings)
    assert any("tokens alone" in note for note in without.notes)
    assert with_states.num_accepted_tokens > 20
    assert with_states.num_drafts < without.num_drafts


@pytest.mark.parametrize("settings", [{}, {"num_speculative_tokens": 3}, {"draft_confidence_threshold": 0.4}])
def test_ragged_batches_have_the_drafts_of_single_rows(settings):
    prompt = expected()["input_ids"]
    rows = [prompt[0], prompt[0, 3:], prompt[0, 5:], prompt[0, -1:]]
    width = prompt.shape[1]
    padded = torch.stack([torch.nn.functional.pad(row, (width - len(row), 0)) for row in rows])
    mask = torch.stack([torch.arange(width) >= width - len(row) for row in rows]).long()
    together = accepted_of(speculator(**settings), input_ids=padded, attention_mask=mask)
    assert together.stats.num_accepted_tokens > together.stats.num_drafts / 2
    for row, tokens in enumerate(rows):
        alone = accepted_of(
            speculator(**settings), input_ids=tokens[None], attention_mask=torch.ones_like(tokens)[None]
        )
        assert [(trace.draft_tokens, trace.num_accepted) for trace in rows_of(together, row)] == [
            (trace.draft_tokens, trace.num_accepted) for trace in rows_of(alone)
        ]


@torch.no_grad()
def test_a_pause_changes_no_draft():
    """What was committed while nothing was drafted is read with its states, all at once."""
    text = expected()["generate.output_ids"][0].tolist()
    (steady, length), (paused, _) = begun(), begun()
    for generator, cuts in ((steady, (0, 1, 4, 9)), (paused, (0, 9))):
        for start, end in zip(cuts, cuts[1:]):
            generator.observe(committed(length - 1 + start, length - 1 + end, 0))
            if generator is steady:
                generator.propose(DraftStep([0], torch.tensor([text[length + end - 2]]), [length + end - 1], [K]))
    step = DraftStep([0], torch.tensor([text[length + 7]]), [length + 8], [K])
    for generator in (steady, paused):
        generator.observe(committed(length + 8, length + 9, 0))
    drafts = [generator.propose(step).token_lists() for generator in (steady, paused)]
    assert drafts[0] == drafts[1]


def test_models_with_another_forward_read_the_same():
    """The lean forward and a model's own."""
    lean, own = speculator(num_speculative_tokens=K), speculator(num_speculative_tokens=K)
    own.resources.model.set_attn_implementation("eager")
    prompt = expected()["input_ids"]
    drafts = []
    for drafter in (lean, own):
        call = accepted_of(drafter, input_ids=prompt, attention_mask=torch.ones_like(prompt))
        drafts.append([trace.draft_tokens for trace in rows_of(call)])
    assert drafts[0] == drafts[1]


def test_rows_join():
    prompt = expected()["input_ids"]
    lists = [prompt[0].tolist(), prompt[0, 4:].tolist(), prompt[0, 2:].tolist(), prompt[0, 6:].tolist()]
    plain = [
        target().generate(torch.tensor([row]), attention_mask=torch.ones(1, len(row)).long(), **GREEDY)[0, len(row) :]
        for row in lists
    ]
    drafter = speculator(num_speculative_tokens=3)
    texts = list(generate_many(target(), lists, batch_size=2, assistant=drafter, **GREEDY))
    assert [text.tokens for text in sorted(texts, key=lambda text: text.index)] == [row.tolist() for row in plain]
    assert sum(text.stats.num_accepted_tokens for text in texts) > 40


@pytest.mark.parametrize("name", ["temperature", "repetition_penalty"])
@pytest.mark.parametrize("method", ["probabilistic", "greedy"])
def test_samples_keep_the_distribution(name, method):
    model = small_model()
    drafter = small_drafter(model, method)
    torch.manual_seed(8)
    width = model.config.hidden_size
    weight, embedding = torch.randn(16, 2 * width) / 4, drafter.resources.model.get_input_embeddings()
    drafter.resources.states = TargetStates((0, "last"), weight, torch.randn(16), 0.5, embedding)
    counts, stats = sampled_counts(SETTINGS[name], drafter)
    assert chi_square_pvalue(counts, exact_distribution(SETTINGS[name])) > P_VALUE
    assert stats.num_accepted_tokens > 300


def projection(folder, **tensors):
    """Writes another `warp_model.bin`."""
    torch.save(tensors, folder / "warp_model.bin")


def test_a_bias_is_added_everywhere(tmp_path):
    """Also where a token has no states."""
    folder = copy_of(FOLDER, tmp_path / "draft", {"pard2_proj_bias": True})
    weight, bias = torch.randn(32, 96), torch.randn(32)
    projection(folder, **{"target_proj.weight": weight, "target_proj.bias": bias})
    found = speculator(folder).resources.states
    states = {key: torch.randn(1, 3, 32) for key in KEYS}
    tokens = torch.tensor([[5, 7, 2]])
    ours = found.embed_projected(tokens, found.of_prompt(states, [0], 3))
    feature = torch.nn.functional.pad(torch.cat([states[key] for key in KEYS], dim=-1)[:, :2], (0, 0, 1, 0))
    embeddings = speculator(folder).resources.model.get_input_embeddings()(tokens)
    torch.testing.assert_close(ours, embeddings + 0.5 * (feature @ weight.T + bias), **CLOSE)


def test_prompts_of_which_the_last_states_are_known():
    found, states = speculator().resources.states, {key: torch.randn(2, 3, 32) for key in KEYS}
    projected, ours = found.projected(states), found.of_prompt(states, [0, 3], 5)
    assert torch.equal(ours[0, 3:], projected[0, :2])
    assert torch.equal(ours[1, 4:], projected[1, 1:2])
    assert not ours[0, :3].any()
    assert not ours[1, :4].any()


@pytest.mark.parametrize(
    ("config", "words"),
    [
        ({"pard2_target_layers": None}, "does not say `pard2_target_layers`"),
        ({"pard2_target_layers": []}, "does not say `pard2_target_layers`"),
        ({"pard2_target_layers": [2, "4", -1]}, "`pard2_target_layers`=.*list of integers"),
        ({"pard2_scale": "0.5"}, "`pard2_scale`=.*a number"),
        ({"pard2_target_dim": 64}, r"target_proj.weight of the shape \[32, 96\].*\[32, 64\]"),
        ({"pard2_proj_bias": True}, "lacks 1 tensors of the projection: target_proj.bias"),
    ],
)
def test_configs_that_contradict_themselves(tmp_path, config, words):
    folder = copy_of(FOLDER, tmp_path / "draft", config)
    with pytest.raises(CheckpointFormatError, match=words):
        speculator(folder)
    if "pard2_target_layers" in config:
        assert detect_checkpoint(folder).problems


@pytest.mark.parametrize("content", [b"", b"not a pickle", None])
def test_damaged_projections(tmp_path, content):
    folder = copy_of(FOLDER, tmp_path / "draft", {})
    file = folder / "warp_model.bin"
    file.write_bytes(file.read_bytes()[:500] if content is None else content)
    with pytest.raises(CheckpointFormatError, match=r"warp_model\.bin"):
        speculator(folder)


@pytest.mark.parametrize("layers", [[2, 4, 7], [2, 4, -8], [2, 4, 4, -1]])
def test_states_that_the_target_does_not_have(tmp_path, warnings, layers):
    """A draft for another target drafts from the tokens alone, and says so."""
    folder = copy_of(FOLDER, tmp_path / "draft", {"pard2_target_layers": layers})
    drafter = speculator(folder)
    assert drafter.resources.states is None
    assert any("PARD-2" in line and "6 layers with 32" in line for line in warnings)


def test_boundaries_are_those_of_transformers(tmp_path):
    folder = copy_of(FOLDER, tmp_path / "draft", {"pard2_target_layers": [0, 6, -7]})
    assert speculator(folder).resources.states.keys == (0, "last", 0)
    folder = copy_of(FOLDER, tmp_path / "other", {"pard2_target_layers": [-2, 5, -1]})
    assert speculator(folder).resources.states.keys == (5, 5, "last")


def test_a_loaded_model_drafts_from_the_tokens(warnings):
    draft = AutoModelForCausalLM.from_pretrained(FOLDER)
    drafter = load_speculator(target(), "draft_model", draft_model=draft, same_tokenizer=True)
    assert drafter.resources.states is None
    assert any("passed by their name" in line for line in warnings)
