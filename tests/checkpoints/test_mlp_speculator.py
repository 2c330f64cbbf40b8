"""The MLP speculator's network: the published equations and layout, and vocabularies of other padding."""

import json
import shutil

import pytest
import torch

from hf_specdec import SpecConfigError, load_speculator
from hf_specdec.candidate_generators.mlp_speculator.network import MLPSpeculator, MLPSpeculatorConfig
from tests.helpers import heads
from tests.helpers.heads import HEADS, expected_of, loaded_target, published, same_network, settings_of, tensors_of
from tests.helpers.models import TINY, VOCAB_SIZE, prompts, tiny_llama


NAMES = [name for name in HEADS if name.startswith("mlp_speculator/")]

SIZES = {
    "emb_dim": TINY["hidden_size"],
    "inner_dim": 16,
    "vocab_size": VOCAB_SIZE,
    "n_predict": 3,
    "top_k_tokens_per_head": (3, 2, 2),
}


def saved(folder, seed=0, **changes):
    """A speculator of random weights, and its folder."""
    torch.manual_seed(seed)
    speculator = MLPSpeculator(MLPSpeculatorConfig(**{**SIZES, **changes}))
    with torch.no_grad():
        for name, parameter in speculator.named_parameters():
            if name.startswith("ln."):
                parameter.add_(torch.randn(parameter.shape) * 0.3)
    speculator.save(folder)
    return speculator.requires_grad_(False)


def load(folder, target):
    return heads.load("mlp_speculator", folder, target)


def logits_along(speculator, expected):
    """The logits of all stages along the drafted chain."""
    tokens = torch.cat([expected["ind"], expected["greedy_chain"][:, :-1]], dim=1)
    return speculator(expected["state"][:, 0], tokens)


class TestPublishedCheckpoints:
    @pytest.mark.parametrize("name", NAMES)
    def test_logits_and_constants(self, name):
        network, expected = published(name), expected_of(name)
        torch.testing.assert_close(logits_along(network, expected), expected["chain_logits"], atol=1e-4, rtol=0)
        constants = [network.config.state_weight, network.config.embedding_weight]
        assert torch.tensor(constants, dtype=torch.float64).equal(expected["state_weight_emb_weight"])

    @pytest.mark.parametrize("name", [name for name in NAMES if "/tied" in name])
    def test_pickled_file_with_all_names(self, name, tmp_path):
        for file in ("config.json", "pytorch_model.bin"):
            shutil.copy(HEADS[name] / file, tmp_path)
        same_network(load(tmp_path, loaded_target(HEADS[name])), published(name))

    @pytest.mark.parametrize("name", NAMES)
    def test_save_gives_the_published_file(self, name, tmp_path):
        published(name).save(tmp_path)
        ours, theirs = tensors_of(tmp_path), tensors_of(HEADS[name])
        assert ours.keys() == theirs.keys()
        assert all(torch.equal(ours[key], theirs[key]) for key in ours)
        config = settings_of(name)
        config.pop("transformers_version")
        assert json.loads((tmp_path / "config.json").read_text()) == config


class TestNetwork:
    @pytest.mark.parametrize("tied", [False, True])
    @pytest.mark.parametrize("scaled", [False, True])
    def test_teacher_forcing_is_the_stages_one_by_one(self, tmp_path, tied, scaled):
        speculator = saved(tmp_path, tie_weights=tied, scale_input=scaled)
        hidden, tokens = torch.randn(2, 4, SIZES["emb_dim"]), torch.randint(VOCAB_SIZE, (2, 4, 3))
        logits = speculator(hidden, tokens)
        assert logits.shape == (3, 2, 4, VOCAB_SIZE)
        for place in ((0, 1), (1, 3)):
            state = speculator.start(hidden[place])
            for index in range(3):
                state, one = speculator.step(index, state, tokens[place][index])
                torch.testing.assert_close(one, logits[(index, *place)], atol=1e-5, rtol=1e-5)
        assert torch.equal(speculator(hidden, tokens[..., :2]), logits[:2])

    def test_tied_stages_are_one_set_of_weights(self, tmp_path):
        names = set(saved(tmp_path, tie_weights=True).state_dict())
        assert names == {
            "emb.0.weight", "proj.0.weight", "proj.1.weight", "head.0.weight", "ln.0.weight", "ln.0.bias",
        }  # fmt: skip

    def test_tied_equals_untied_with_equal_weights(self, tmp_path):
        tied = saved(tmp_path, tie_weights=True)
        untied = MLPSpeculator(MLPSpeculatorConfig(**SIZES))
        weights = tied.state_dict()

        def fallback(name):
            part, _, rest = name.split(".", 2)
            return weights[name] if name in weights else weights[f"{part}.{int(part == 'proj')}.{rest}"]

        untied.load_state_dict({name: fallback(name) for name in untied.state_dict()})
        hidden, tokens = torch.randn(5, SIZES["emb_dim"]), torch.randint(VOCAB_SIZE, (5, 3))
        assert torch.equal(tied(hidden, tokens), untied(hidden, tokens))

    def test_norm_is_taken_in_float32(self, tmp_path):
        """The squares of these states overflow in half precision."""
        speculator = saved(tmp_path, scale_input=True).half()
        hidden = torch.full((1, SIZES["emb_dim"]), 300.0).half()
        started = speculator.start(hidden)
        assert started.dtype == torch.float16
        torch.testing.assert_close(started.float(), torch.full_like(started, 0.5**0.5).float(), atol=1e-3, rtol=0)

    @pytest.mark.parametrize("tied", [False, True])
    def test_learns(self, tied):
        """A few steps on a fixed rule: the next token is the last one plus one."""
        torch.manual_seed(0)
        speculator = MLPSpeculator(MLPSpeculatorConfig(**{**SIZES, "tie_weights": tied}))
        optimizer = torch.optim.Adam(speculator.parameters(), lr=2e-2)
        losses = []
        for _ in range(60):
            tokens = (torch.randint(VOCAB_SIZE, (64, 1)) + torch.arange(4)) % VOCAB_SIZE
            logits = speculator(torch.randn(64, SIZES["emb_dim"]), tokens[:, :3])
            loss = torch.nn.functional.cross_entropy(logits.flatten(0, 1), tokens[:, 1:].T.flatten())
            optimizer.zero_grad()
            loss.backward()
            assert all(parameter.grad is not None for parameter in speculator.parameters())
            optimizer.step()
            losses.append(loss.item())
        assert losses[-1] < 0.3 * losses[0]


class TestPaddedVocabularies:
    """One tokenizer, another number of rows: the weights stay as they are, and drafts fit the target."""

    SHAPES = (
        {},
        {"num_draft_nodes": 6},
        {"top_k_tokens_per_head": [VOCAB_SIZE, 2, 2], "mlp_speculator_num_candidates": 3},
        {"speculative_token_tree": [(0,), (61,), (0, 1)]},
    )

    @pytest.mark.parametrize("vocab_size", [VOCAB_SIZE - 2, VOCAB_SIZE + 2])
    @pytest.mark.parametrize("shape", SHAPES, ids=["chain", "nodes", "candidates", "static"])
    def test_text(self, model, tmp_path, vocab_size, shape):
        saved(tmp_path, vocab_size=vocab_size)
        inputs = prompts(3)
        # Also the ids that a smaller speculator lacks are read.
        inputs["input_ids"][:, -1] = torch.tensor([VOCAB_SIZE - 1, VOCAB_SIZE - 2, 5])
        for arguments in ({"do_sample": False}, {"do_sample": False, "forced_eos_token_id": VOCAB_SIZE - 1}):
            plain = model.generate(**inputs, max_new_tokens=12, **arguments)
            ours = model.generate(
                **inputs, max_new_tokens=12, **arguments, speculative={"model": str(tmp_path), **shape}
            )
            assert torch.equal(ours, plain)

    def test_processors_that_choose_what_the_speculator_lacks(self, model, tmp_path):
        """Such a draft is read on like any other."""
        saved(tmp_path, vocab_size=VOCAB_SIZE - 2)
        output = model.generate(
            **prompts(3),
            max_new_tokens=9,
            do_sample=False,
            sequence_bias={(VOCAB_SIZE - 1,): float("inf")},
            speculative={"model": str(tmp_path)},
            return_dict_in_generate=True,
        )
        assert (output.sequences[:, -9:] == VOCAB_SIZE - 1).all()
        assert output.speculative.draft_acceptance_rate == 1

    @pytest.mark.parametrize("vocab_size", [VOCAB_SIZE - 2, VOCAB_SIZE + 2])
    def test_save_and_pass_on(self, model, tmp_path, vocab_size):
        original = saved(tmp_path, vocab_size=vocab_size)
        loaded = load_speculator(model, {"method": "mlp_speculator", "model": str(tmp_path)}).resources
        assert loaded.vocab_size == min(vocab_size, VOCAB_SIZE)
        loaded.speculator.save(tmp_path / "again")
        again = load(tmp_path / "again", model).state_dict()
        assert all(torch.equal(again[name], tensor) for name, tensor in original.state_dict().items())
        passed = load_speculator(model, "mlp_speculator", draft_model=loaded.speculator)
        assert passed.resources.speculator is loaded.speculator
        inputs = prompts(2)
        plain = model.generate(**inputs, max_new_tokens=8, do_sample=False)
        assert torch.equal(model.generate(**inputs, max_new_tokens=8, do_sample=False, assistant=passed), plain)

    def test_no_more_than_five_percent(self, model):
        with pytest.raises(SpecConfigError, match="vocabulary of 68 tokens, and LlamaForCausalLM has 64"):
            load_speculator(
                model,
                "mlp_speculator",
                draft_model=MLPSpeculator(MLPSpeculatorConfig(**{**SIZES, "vocab_size": 68})),
            )

    def test_candidates_beyond_the_common_vocabulary(self, tmp_path):
        """More than the target has tokens are not asked for, though the speculator has them."""
        saved(tmp_path)
        target = tiny_llama(vocab_size=62)
        target.model.register_forward_pre_hook(lambda *args: pytest.fail("the target has run"))
        options = {"model": str(tmp_path), "speculative_token_tree": [(0,), (62,)]}
        with pytest.raises(SpecConfigError, match="the rank 62, and speculator and target share .* of 62 tokens"):
            target.generate(torch.tensor([[3, 4, 5]]), max_new_tokens=5, speculative=options)

    def test_growth_within_the_common_vocabulary(self, tmp_path):
        saved(tmp_path)
        target, ids = tiny_llama(vocab_size=62), torch.tensor([[3, 4, 5]])
        options = {"model": str(tmp_path), "top_k_tokens_per_head": [64, 2, 2]}
        ours = target.generate(ids, max_new_tokens=8, do_sample=False, speculative=options)
        assert torch.equal(ours, target.generate(ids, max_new_tokens=8, do_sample=False))
