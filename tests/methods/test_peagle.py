"""P-EAGLE: the official drafts and run, ragged batches, samples, and what its checkpoints say."""

import pytest
import torch
from safetensors.torch import load_file

from hf_specdec import CheckpointFormatError, SpecConfigError, SpeculativeConfig, Speculator, load_speculator, record
from hf_specdec.candidate_generators.eagle.formats import EagleConfig
from hf_specdec.candidate_generators.eagle.generator import EagleCandidateGenerator
from hf_specdec.candidate_generators.eagle.network import Eagle3Network
from hf_specdec.hub.detect import detect_checkpoint
from hf_specdec.protocol import Commit, DraftStep, Prompt, Session
from tests.helpers.by_hand import drafts_of, feed, random_rows, rows_of
from tests.helpers.distribution import P_VALUE, SETTINGS, V, exact_distribution, sampled_counts, small_model
from tests.helpers.heads import HEADS, both, copy_of, loaded_target, put, renamed, same_network, without
from tests.helpers.paths import FIXTURES
from tests.helpers.statistics import chi_square_pvalue


FOLDER = FIXTURES / "eagle" / "eagle3_peagle"
EXPECTED = load_file(FOLDER / "expected.safetensors")
K = 5
GREEDY = {"do_sample": False, "max_new_tokens": 70, "eos_token_id": None, "pad_token_id": 0}
CLOSE = {"atol": 2e-4, "rtol": 1e-4}


def target():
    return loaded_target(FOLDER)


def test_official_run():
    prompt, text = EXPECTED["input_ids"], EXPECTED["generate.output_ids"]
    with record(trace=True) as made:
        output = target().generate(
            prompt,
            attention_mask=torch.ones_like(prompt),
            **GREEDY,
            speculative={"model": str(FOLDER), "num_speculative_tokens": K},
        )
    assert made.calls[0].stats.method == "eagle3"
    assert torch.equal(output[:, : text.shape[1]], text)
    accepted = EXPECTED["generate.accepted"].tolist()
    assert [trace.num_accepted for trace in rows_of(made.calls[0])][: len(accepted)] == accepted
    assert sum(accepted) > 20


@torch.no_grad()
def test_rounds_with_forced_acceptance():
    speculator = load_speculator(target(), model=str(FOLDER), num_speculative_tokens=K)
    network = speculator.resources
    generator = speculator.candidate_generator(Session(1, 200, torch.device("cpu")))
    prompt = EXPECTED["input_ids"]
    length = prompt.shape[1]
    for number in range(4):
        entered = f"r{number}."
        parts = EXPECTED[f"{entered}context_features"].split(network.config.target_hidden_size, dim=-1)
        states = dict(zip(network.target_hidden_states, parts))
        new = EXPECTED[f"{entered}input_ids"][:, : 1 - K]
        if number == 0:
            generator.prefill(Prompt(prompt, [0], states))
            states, new = {key: value[:, -1:] for key, value in states.items()}, new[:, -1:]
        generator.observe(Commit([0], new, new.tolist(), [new.shape[1] - 1], states))
        length += new.shape[1]
        step = DraftStep([0], new[:, -1], [length], [100])
        assert generator.propose(step).token_lists() == EXPECTED[f"{entered}draft_tokens"].tolist()
        torch.testing.assert_close(generator.logits, EXPECTED[f"{entered}draft_logits"][:1], **CLOSE)
    masks = generator.masked.read_masks(generator.entries, 1, K - 1)
    torch.testing.assert_close(masks[0], EXPECTED["r3.draft_logits"][1:], **CLOSE)


def test_ragged_batches_have_plain_text_and_the_drafts_of_single_rows():
    prompt = EXPECTED["input_ids"]
    rows = [prompt[0], prompt[0, 4:], prompt[0, 7:]]
    padded = torch.stack([torch.nn.functional.pad(row, (prompt.shape[1] - len(row), 0)) for row in rows])
    mask = torch.stack([torch.arange(prompt.shape[1]) >= prompt.shape[1] - len(row) for row in rows]).long()
    settings = {"model": str(FOLDER), "num_speculative_tokens": K}
    plain = target().generate(padded, attention_mask=mask, **GREEDY)
    with record(trace=True) as made:
        ours = target().generate(padded, attention_mask=mask, **GREEDY, speculative=settings)
    assert torch.equal(ours, plain)
    for row, tokens in enumerate(rows):
        with record(trace=True) as alone:
            target().generate(
                tokens[None], attention_mask=torch.ones_like(tokens)[None], **GREEDY, speculative=settings
            )
        found, single = rows_of(made.calls[0], row), rows_of(alone.calls[0])
        assert [(trace.draft_tokens, trace.num_accepted) for trace in found] == [
            (trace.draft_tokens, trace.num_accepted) for trace in single
        ]


def random_head(vocab_size=V, size=16, mask=3, **settings):
    """A head of random weights, of two layers, with distinct states of text and masks."""
    names = ["layers.0.input_layernorm", "layers.0.hidden_norm", "layers.1.input_layernorm", "norm"]
    norms = (*names, *(f"layers.{index}.post_attention_layernorm" for index in range(2)))
    config = EagleConfig(
        method="eagle3",
        hidden_size=size,
        target_hidden_size=size,
        vocab_size=vocab_size,
        draft_vocab_size=vocab_size,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=1,
        head_dim=8,
        intermediate_size=2 * size,
        rope_parameters={"rope_type": "default", "rope_theta": 10000.0},
        aux_layer_ids=(0, 1),
        norms=norms,
        own_embedding=True,
        own_head=True,
        mask_token_id=mask,
        num_parallel_tokens=4,
        **settings,
    )
    torch.manual_seed(1)
    network = Eagle3Network(config).eval()
    with torch.no_grad():
        for weight in network.parameters():
            weight.mul_(2.0) if weight.dim() == 2 else weight.add_(0.3 * torch.randn_like(weight))
    return network.requires_grad_(False)


def speculator_for(network, **settings):
    return Speculator(SpeculativeConfig("eagle3", "loaded", **settings), EagleCandidateGenerator, network)


def by_definition(network, text, states):
    """A row's logits at its last entry and at the masks: all entries as one causal sequence."""
    hidden = network.fuse({key: value[None] for key, value in states.items()})
    parts = network.mask_hidden.split(network.config.target_hidden_size)
    mask = network.fuse({key: part[None, None] for key, part in zip(network.target_hidden_states, parts)})
    count = network.config.num_parallel_tokens
    hidden = torch.cat([hidden, mask.expand(1, count - 1, -1)], dim=1)
    tokens = torch.cat([text[1:], torch.full((count - 1,), network.config.mask_token_id)])[None]
    _, output = network(tokens, hidden, torch.arange(tokens.shape[1])[None], None)
    return network.logits(output)[0, -count:]


@pytest.mark.parametrize("parts", [1, 2, 3])
@pytest.mark.parametrize("window", [None, 4])
@torch.no_grad()
def test_drafts_are_those_of_one_sequence(parts, window):
    """Rows of different lengths, whose new entries come at once or in parts."""
    network = random_head(vocab_size=40, size=32, mask=39)
    texts, states = random_rows(network, (9, 6, 12), seed=parts)
    drafter = speculator_for(network, num_speculative_tokens=4)
    generator = drafter.candidate_generator(Session(3, 100, torch.device("cpu")))
    feed(generator, texts, states, (5, 1, 4), parts)
    for limits in ([4, 4, 4], [1, 3, 0]):
        found = drafts_of(generator, texts, limits)
        for row, paths in enumerate(found):
            best = by_definition(network, texts[row], states[row]).argmax(-1).tolist()[: limits[row]]
            assert paths == [tuple(best[: count + 1]) for count in range(len(best))]


@pytest.mark.parametrize("name", ["temperature", "repetition_penalty"])
@pytest.mark.parametrize("method", ["probabilistic", "greedy"])
def test_samples_keep_the_distribution(name, method):
    model = small_model()
    network = random_head(size=model.config.hidden_size).attach(model)
    drafter = speculator_for(network, draft_sample_method=method)
    counts, stats = sampled_counts(SETTINGS[name], drafter)
    assert chi_square_pvalue(counts, exact_distribution(SETTINGS[name])) > P_VALUE
    assert stats.num_accepted_tokens > 300


def test_trees_become_chains_and_say_so():
    network = random_head(vocab_size=40, size=32)
    for settings in ({"num_draft_nodes": 9}, {"speculative_token_tree": "[(0,), (1,), (0, 0)]"}):
        session = Session(1, 100, torch.device("cpu"))
        assert speculator_for(network, **settings).candidate_generator(session).plan.is_chain
        assert session.notes == ["chains instead of trees: the head drafts all tokens at once"]


def test_improbable_drafts_end():
    network = random_head(vocab_size=40, size=32)
    texts, states = random_rows(network, (9, 6), seed=1)
    lengths = []
    for threshold in (0.0, 0.1, 0.9):
        drafter = speculator_for(network, num_speculative_tokens=4, draft_min_path_prob=threshold)
        generator = drafter.candidate_generator(Session(2, 100, torch.device("cpu")))
        feed(generator, texts, states, (4, 4))
        lengths.append(sum(map(len, drafts_of(generator, texts))))
    assert lengths[0] == 8 >= lengths[1] >= lengths[2] >= 2
    assert lengths[0] > lengths[2]


AWS = {
    "architectures": ["LlamaForCausalLMEagle3"],
    "speculators_model_type": None,
    "speculators_config": None,
    "mask_token_id": None,
    "ptd_token_id": 151,
}


@pytest.mark.parametrize(
    ("config", "change", "name", "length"),
    [
        ({}, None, "peagle-speculators", 5),
        (
            AWS,
            both(renamed(layers__0__="midlayer."), put("mask_hidden", lambda x: x.flatten())),
            "peagle",
            7,
        ),
        (
            {**AWS, "architectures": ["PeagleLlamaForCausalLM"]},
            put("mask_hidden", lambda x: x.view(1, -1)),
            "peagle",
            7,
        ),
        # A stranger's word about how long drafts are, and so about memory, has a limit.
        ({"speculators_config.proposal_methods": [{"speculative_tokens": 10**6}]}, None, "peagle-speculators", 7),
    ],
    ids=["speculators", "AWS", "vLLM", "far too many tokens"],
)
def test_spellings(tmp_path, config, change, name, length):
    folder = copy_of(FOLDER, tmp_path / "head", config, change)
    found = detect_checkpoint(folder)
    assert (found.method, found.format, found.num_draft_tokens, found.problems) == ("eagle3", name, length, ())
    network = load_speculator(target(), model=str(folder), aux_layer_ids=(1, 3, 5)).resources
    assert (network.config.mask_token_id, network.config.num_parallel_tokens) == (151, length)
    expected = load_speculator(target(), model=str(FOLDER)).resources
    assert torch.equal(network.mask_state(), expected.mask_state())


@pytest.mark.parametrize(
    ("config", "change", "message"),
    [
        ({}, without("mask_hidden"), "lacks 1 tensors of a P-EAGLE head: mask_hidden"),
        ({"mask_token_id": None}, None, "does not say which token its masks are"),
        ({"mask_token_id": "x"}, None, "`mask_token_id`='x'"),
        ({}, put("mask_hidden", torch.zeros(95)), r"mask_hidden of the shape \[95\]"),
        ({"mask_token_id": 160}, None, "mask token 160.* 160 tokens"),
    ],
)
def test_what_is_refused(tmp_path, config, change, message):
    folder = copy_of(FOLDER, tmp_path / "head", config, change)
    with pytest.raises(CheckpointFormatError, match=message):
        load_speculator(target(), method="eagle3", model=str(folder))


def test_saved_and_loaded(tmp_path):
    network = load_speculator(target(), model=str(FOLDER)).resources
    network.save(tmp_path)
    loaded = load_speculator(target(), model=str(tmp_path)).resources
    same_network(loaded, network)


def test_it_is_among_the_published_heads():
    assert "eagle/eagle3_peagle" in HEADS


def test_serving_engines_say_it_in_the_settings():
    settings = {"model": str(FOLDER), "parallel_drafting": True}
    assert load_speculator(target(), settings).resources.config.mask_token_id is not None
    with pytest.raises(SpecConfigError, match="`parallel_drafting`=False.*all tokens at once"):
        load_speculator(target(), {**settings, "parallel_drafting": False})
    folder = FOLDER.parent / "eagle3_llama"
    with pytest.raises(SpecConfigError, match="`parallel_drafting`=True.*one token after the other"):
        load_speculator(loaded_target(folder), {"model": str(folder), "parallel_drafting": True})
