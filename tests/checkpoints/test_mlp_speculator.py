"""The MLP speculator's network and its checkpoints: the published equations, layouts and what is wrong with others."""

import json
import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import LlamaForCausalLM

from hf_specdec import CheckpointFormatError, SpecConfigError, SpeculativeConfig, load_speculator
from hf_specdec.candidate_generators.mlp_speculator.network import (
    MLPSpeculator,
    MLPSpeculatorConfig,
    load_mlp_speculator,
)
from tests.models import TINY, VOCAB_SIZE, prompts, tiny_llama


FIXTURES = Path(__file__).parents[1] / "fixtures" / "mlp_speculator"
NAMES = ("untied_plain", "untied_scaled", "tied_plain", "tied_scaled")
TIED = ("tied_plain", "tied_scaled")

SIZES = {
    "emb_dim": TINY["hidden_size"],
    "inner_dim": 16,
    "vocab_size": VOCAB_SIZE,
    "n_predict": 3,
    "top_k_tokens_per_head": (3, 2, 2),
}


@pytest.fixture(scope="module")
def target():
    return LlamaForCausalLM.from_pretrained(FIXTURES / "target").eval()


def load(folder, target, **settings):
    return load_mlp_speculator(SpeculativeConfig("mlp_speculator", str(folder), **settings), target)


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


def change_config(folder, **changes):
    path = folder / "config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), **changes}))


def change_tensors(folder, change):
    tensors = load_file(folder / "model.safetensors")
    save_file(change(tensors), folder / "model.safetensors", metadata={"format": "pt"})


def logits_along(speculator, expected):
    """The logits of all stages along the drafted chain."""
    tokens = torch.cat([expected["ind"], expected["greedy_chain"][:, :-1]], dim=1)
    return speculator(expected["state"][:, 0], tokens)


class TestPublishedCheckpoints:
    @pytest.mark.parametrize("name", NAMES)
    def test_logits(self, target, name):
        expected = load_file(FIXTURES / name / "expected.safetensors")
        logits = logits_along(load(FIXTURES / name, target), expected)
        torch.testing.assert_close(logits, expected["chain_logits"], atol=1e-4, rtol=0)

    @pytest.mark.parametrize("name", NAMES)
    def test_constants(self, target, name):
        config = load(FIXTURES / name, target).config
        expected = load_file(FIXTURES / name / "expected.safetensors")["state_weight_emb_weight"]
        assert torch.tensor([config.state_weight, config.embedding_weight], dtype=torch.float64).equal(expected)

    @pytest.mark.parametrize("name", TIED)
    def test_pickled_file_with_all_names(self, target, name, tmp_path):
        for file in ("config.json", "pytorch_model.bin"):
            shutil.copy(FIXTURES / name / file, tmp_path)
        ours = load(tmp_path, target).state_dict()
        other = load(FIXTURES / name, target).state_dict()
        assert ours.keys() == other.keys()
        assert all(torch.equal(ours[key], other[key]) for key in ours)

    @pytest.mark.parametrize("name", NAMES)
    def test_save_gives_the_published_file(self, target, name, tmp_path):
        load(FIXTURES / name, target).save(tmp_path)
        ours, published = (load_file(folder / "model.safetensors") for folder in (tmp_path, FIXTURES / name))
        assert ours.keys() == published.keys()
        assert all(torch.equal(ours[key], published[key]) for key in ours)
        config = json.loads((FIXTURES / name / "config.json").read_text())
        config.pop("transformers_version")
        assert json.loads((tmp_path / "config.json").read_text()) == config

    def test_shards_and_names_without_prefix(self, model, tmp_path):
        speculator = saved(tmp_path)
        tensors = speculator.state_dict()
        names = sorted(tensors)
        (tmp_path / "model.safetensors").unlink()
        files = {"model-00001-of-00002.safetensors": names[:5], "model-00002-of-00002.safetensors": names[5:]}
        for file, part in files.items():
            save_file({name: tensors[name] for name in part}, tmp_path / file)
        index = {"weight_map": {name: file for file, part in files.items() for name in part}}
        (tmp_path / "model.safetensors.index.json").write_text(json.dumps(index))
        loaded = load(tmp_path, model).state_dict()
        assert all(torch.equal(loaded[name], tensors[name]) for name in names)


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


class TestPlacement:
    def test_takes_the_targets_dtype_unless_told(self, tmp_path):
        saved(tmp_path)
        target = tiny_llama().to(torch.bfloat16)
        assert {p.dtype for p in load(tmp_path, target).parameters()} == {torch.bfloat16}
        assert {p.dtype for p in load(tmp_path, target, dtype="auto").parameters()} == {torch.float32}
        assert {p.dtype for p in load(tmp_path, target, dtype="float16").parameters()} == {torch.float16}

    def test_loading_draws_no_random_numbers(self, model, tmp_path):
        saved(tmp_path)
        before = torch.get_rng_state()
        load(tmp_path, model)
        assert torch.equal(torch.get_rng_state(), before)

    def test_quantization(self, model, tmp_path):
        saved(tmp_path)
        with pytest.raises(SpecConfigError, match="quantization.*floating-point"):
            load(tmp_path, model, quantization="8bit")


class TestPaddedVocabularies:
    """The same tokenizer, another number of rows: the weights stay as they are, and drafts fit the target."""

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


class TestWrongCheckpoints:
    def expect(self, folder, target, match):
        with pytest.raises(CheckpointFormatError, match=match):
            load(folder, target)

    def test_other_hidden_size(self, model, tmp_path):
        saved(tmp_path, emb_dim=48)
        self.expect(tmp_path, model, "hidden size 48, and LlamaForCausalLM has 32")

    def test_other_vocabulary(self, model, tmp_path):
        saved(tmp_path, vocab_size=200)
        self.expect(tmp_path, model, "vocabulary of 200 tokens, and LlamaForCausalLM has 64")

    @pytest.mark.parametrize("name", ["head.1.weight", "ln.2.bias", "proj.0.weight"])
    def test_missing_tensors(self, model, tmp_path, name):
        saved(tmp_path)
        lacking = f"speculator.{name}"
        change_tensors(tmp_path, lambda tensors: {key: value for key, value in tensors.items() if key != lacking})
        self.expect(tmp_path, model, f"lacks 1 tensors of the MLP speculator: {name}")

    def test_no_tensors_of_it(self, model, tmp_path):
        saved(tmp_path)
        change_tensors(tmp_path, lambda tensors: {"something.else": tensors["speculator.head.0.weight"]})
        self.expect(tmp_path, model, "lacks 1 tensors of the MLP speculator: emb.0.weight")

    @pytest.mark.parametrize("dtype", [torch.int8, torch.bool, torch.complex64])
    def test_weights_that_are_no_real_numbers(self, model, tmp_path, dtype):
        saved(tmp_path)
        key = "speculator.proj.1.weight"
        change_tensors(tmp_path, lambda tensors: {**tensors, key: tensors[key].to(dtype)})
        self.expect(tmp_path, model, f"proj.1.weight is stored as {str(dtype)[6:]}")

    @pytest.mark.parametrize("name", ["emb.0.weight", "head.1.weight"])
    def test_scalars(self, model, tmp_path, name):
        saved(tmp_path)
        change_tensors(tmp_path, lambda tensors: {**tensors, f"speculator.{name}": torch.tensor(1.0)})
        self.expect(tmp_path, model, f"{name} .*shape")

    @pytest.mark.parametrize("inner_dim", [10**15, 10**19, 10**400])
    def test_widths_without_bounds(self, model, tmp_path, inner_dim):
        saved(tmp_path)
        change_config(tmp_path, inner_dim=inner_dim)
        self.expect(
            tmp_path,
            model,
            r"has `inner_dim`=(10+|<an integer of 1329 bits>) in its config.json.*at most 2147483647",
        )

    @pytest.mark.parametrize("inner_dim", [17, 2**31 - 1])
    def test_no_network_is_made_for_another_width(self, model, tmp_path, inner_dim):
        saved(tmp_path)
        change_config(tmp_path, inner_dim=inner_dim)
        self.expect(
            tmp_path,
            model,
            rf"emb.0.weight of the shape \[64, 16\], where its config.json asks for \[64, {inner_dim}\]",
        )

    def test_no_network_is_made_for_stages_that_are_not_there(self, model, tmp_path):
        saved(tmp_path)
        many = 1000
        change_config(tmp_path, n_predict=many, top_k_tokens_per_head=[1] * many)
        self.expect(tmp_path, model, f"has 3 stages.*n_predict={many}")
        # A far stage does not help.
        far = {f"speculator.{name}.{many - 1}.weight": torch.zeros(64, 16) for name in ("emb", "head")}
        change_tensors(tmp_path, lambda tensors: {**tensors, **far})
        self.expect(tmp_path, model, f"has 17 tensors in model.safetensors, and {many} stages need at least {many}")
        change_config(tmp_path, n_predict=3, top_k_tokens_per_head=[1] * 3)
        self.expect(tmp_path, model, f"has {many} stages.*n_predict=3")

    @pytest.mark.parametrize("stage", ["99999999999999999999", "\u00b2", "x"])
    def test_stages_that_are_no_numbers_are_others_tensors(self, model, tmp_path, stage):
        speculator = saved(tmp_path)
        change_tensors(tmp_path, lambda tensors: {**tensors, f"speculator.emb.{stage}.weight": torch.zeros(64, 16)})
        assert load(tmp_path, model).state_dict().keys() == speculator.state_dict().keys()

    @pytest.mark.parametrize("name", ["emb.0.weight", "proj.1.weight", "head.2.weight", "ln.0.bias"])
    def test_wrong_shapes(self, model, tmp_path, name):
        saved(tmp_path)

        def cut(tensors):
            key = f"speculator.{name}"
            return {**tensors, key: tensors[key][:-1].contiguous()}

        change_tensors(tmp_path, cut)
        self.expect(tmp_path, model, rf"{name} of the shape \[\d+.*its config.json asks for")

    @pytest.mark.parametrize("num_heads", [2, 4])
    def test_config_with_another_number_of_stages(self, model, tmp_path, num_heads):
        saved(tmp_path)
        change_config(tmp_path, n_predict=num_heads, top_k_tokens_per_head=[2] * num_heads)
        self.expect(tmp_path, model, f"has 3 stages in model.safetensors.*n_predict={num_heads}.*tie_weights=false")

    def test_tied_weights_and_a_config_that_denies_it(self, model, tmp_path):
        saved(tmp_path, tie_weights=True)
        change_config(tmp_path, tie_weights=False)
        self.expect(tmp_path, model, "has 1 stages in model.safetensors.*n_predict=3 with tie_weights=false")

    @pytest.mark.parametrize(
        ("change", "match"),
        [
            ({"top_k_tokens_per_head": [5, 4]}, r"=\[5, 4\] .*each of its n_predict=3 stages"),
            ({"top_k_tokens_per_head": [5, 4, 0]}, r"=\[5, 4, 0\] .*one positive integer for each"),
            ({"top_k_tokens_per_head": 5}, "one positive integer for each"),
            (
                {"top_k_tokens_per_head": None, "n_predict": 2},
                "has no `top_k_tokens_per_head`.* its n_predict=2 stages",
            ),
            ({"n_predict": 0}, "`n_predict`=0 .*a positive integer of at most 1024"),
            ({"n_predict": 1025}, "`n_predict`=1025 .*a positive integer of at most 1024"),
            ({"inner_dim": "16"}, "`inner_dim`='16' .*an integer"),
            ({"n_candidates": 1.5}, "`n_candidates`=1.5 .*integer"),
            ({"tie_weights": "yes"}, "`tie_weights`='yes' .*true or false"),
        ],
    )
    def test_unusable_config(self, model, tmp_path, change, match):
        saved(tmp_path)
        change_config(tmp_path, **change)
        self.expect(tmp_path, model, match)

    def test_another_name_of_the_width(self, model, tmp_path):
        saved(tmp_path)
        change_config(tmp_path, emb_dim=None, hidden_size=32)
        assert load(tmp_path, model).config.emb_dim == 32
        change_config(tmp_path, emb_dim=32, hidden_size=64)
        assert load(tmp_path, model).config.emb_dim == 32

    def test_no_weights(self, model, tmp_path):
        saved(tmp_path)
        (tmp_path / "model.safetensors").unlink()
        self.expect(tmp_path, model, "none of the weight files")

    def test_no_checkpoint_named(self, model):
        with pytest.raises(SpecConfigError, match="needs a speculator"):
            load_mlp_speculator(SpeculativeConfig("mlp_speculator"), model)
