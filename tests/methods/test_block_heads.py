"""Block heads: the official numbers of LiLiCorr and XPress, their checkpoints, and a head that nobody knew before."""

import json
from dataclasses import replace

import pytest
import torch
from safetensors.torch import load_file

from hf_specdec import CheckpointFormatError, generate_many
from hf_specdec.candidate_generators.dflash import formats
from hf_specdec.candidate_generators.dflash.heads import Block
from hf_specdec.candidate_generators.dflash.heads.lilicorr import LiLiCorrConfig
from hf_specdec.candidate_generators.dflash.heads.xpress import XPressConfig
from hf_specdec.hub.detect import detect_checkpoint
from hf_specdec.target import graphs
from hf_specdec.training.reading import TargetReader
from tests.helpers import heads
from tests.helpers.arrivals import prompt, said_alone
from tests.helpers.block_networks import NETWORKS, draft, random_network
from tests.helpers.by_hand import speculator_for
from tests.helpers.draft_calls import run
from tests.helpers.heads import same_network, write
from tests.helpers.levels import full
from tests.helpers.models import VOCAB_SIZE, tiny_llama
from tests.helpers.pairs_head import PairsConfig, PairsRecipe
from tests.helpers.paths import FIXTURES
from tests.helpers.tape import spoil_inputs, tape_everything


PUBLISHED = FIXTURES / "block_heads"
TARGET = tiny_llama(vocab_size=40, num_hidden_layers=3)
CLOSE = {"atol": 2e-4, "rtol": 1e-4}


def head_of(name, make):
    """The network with the head of an official case, and what is expected of it."""
    network = make(json.loads((PUBLISHED / name / "head.json").read_text()))
    prefix = "lilicorr." if name == "lilicorr" else "xpress_head."
    tensors = load_file(PUBLISHED / name / "model.safetensors")
    network.block_head.load_state_dict({key.removeprefix(prefix): value for key, value in tensors.items()})
    return network.requires_grad_(False), load_file(PUBLISHED / name / "expected.safetensors")


def test_official_lattice():
    def make(settings):
        given = settings["dflash_config"]
        names = ("hidden_size", "candidate_topk", "num_layers", "num_heads", "factor_dim", "vector_eps", "logit_scale")
        sizes = {name: given[f"lilicorr_{name}"] for name in names}
        sizes["mlp_size"] = int(given["lilicorr_mlp_ratio"] * sizes["hidden_size"])
        head = LiLiCorrConfig(**sizes)
        return draft(settings["hidden_size"], settings["vocab_size"], block_size=given["block_size"], head=head)

    network, expected = head_of("lilicorr", make)
    asked = []

    def embed(tokens):
        asked.append(tokens)
        return expected["token_embeddings"].flatten(1, 2)

    network.embed = embed
    output, memory = expected["hidden"], {"context": expected["anchor_context"]}
    walk = network.block_head.begin(Block(network, None, output, expected["logits"], output, memory))
    assert torch.equal(asked[0], expected["candidate_ids"].flatten(1))
    assert torch.equal(walk.tokens, expected["candidate_ids"])
    torch.testing.assert_close(walk.scores, expected["scores"], **CLOSE)
    assert torch.equal(walk.best(), expected["greedy_tokens"])
    assert not torch.equal(expected["greedy_tokens"], walk.tokens[..., 0])


def test_official_refinement():
    def make(settings):
        sizes = [settings[f"xpress_{name}"] for name in ("rank", "mlp_hidden", "num_passes")]
        head, size = XPressConfig(*sizes), settings["xpress_block_size"]
        return draft(settings["hidden_size"], settings["vocab_size"], block_size=size, head=head)

    network, expected = head_of("xpress", make)
    head = network.block_head

    def drafted(num_passes, count=None):
        head.sizes = replace(head.sizes, num_passes=num_passes)
        logits = base[:, 1:][:, :count]
        block = Block(network, anchors, output[:, 1:], logits, output, {"tokens": torch.stack((before, anchors), 1)})
        return head.begin(block).best()

    base, output, anchors = expected["base_logits"], expected["hidden"], expected["anchor"][:, 0]
    for which, before in (("real", expected["before_anchor"][:, 0]), ("anchor_twice", anchors)):
        passes = expected[f"{which}.tokens_per_pass"]
        for count in range(passes.shape[1]):
            assert torch.equal(drafted(count), passes[:, count, 1:])
            # Fewer positions are the first ones.
            assert torch.equal(drafted(count, 2), passes[:, count, 1:3])
        previous = torch.cat((before[:, None], passes[:, -2, :-1]), dim=1)
        torch.testing.assert_close(base + head(output, previous), expected[f"{which}.logits_last_pass"], **CLOSE)
        converged = drafted(base.shape[1] - 1)
        assert torch.equal(converged, expected[f"{which}.sequential_tokens"][:, 1:])
        assert not torch.equal(converged, passes[:, 0, 1:])


SPECULATORS = {
    "w1.": "token_embed.",
    "w2.": "readout.",
    "mix.L": "mix_l",
    "mlp.gate_proj.": "mlp_gate.",
    "mlp.up_proj.": "mlp_up.",
    "mlp.down_proj.": "mlp_down.",
}


class TestFiles:
    """Saved networks, and what is made of changes to them."""

    def saved(self, name, folder):
        network = random_network(**NETWORKS[name]).attach(TARGET)
        network.save(folder)
        return network, json.loads((folder / "config.json").read_text()), load_file(folder / "model.safetensors")

    def load(self, folder, config, tensors):
        return heads.load("dflash", write(folder, tensors, config), TARGET)

    @full
    def test_refinement_of_speculators(self, tmp_path):
        network, config, tensors = self.saved("xpress", tmp_path / "saved")
        spelled = {}
        for name, tensor in tensors.items():
            own = name.removeprefix("xpress_head.")
            ours = next((part for part in SPECULATORS if own.startswith(part)), "")
            theirs = SPECULATORS.get(ours, "") + own.removeprefix(ours)
            spelled[f"refiner_head.{theirs}" if own != name else name] = tensor
        inner = config.pop("dflash_config")
        layers = {key: config[key] for key in config if key not in ("architectures", "block_size")}
        config = {
            "architectures": ["XPressDraftModel"],
            "speculators_model_type": "xpress",
            "block_size": 7,
            "mask_token_id": inner["mask_token_id"],
            "aux_hidden_state_layer_ids": [layer + 1 for layer in inner["target_layer_ids"]],
            "num_jacobi_passes": inner["xpress_num_passes"],
            "transformer_layer_config": layers,
        }
        same_network(self.load(tmp_path / "spelled", config, spelled), network)
        assert detect_checkpoint(str(tmp_path / "spelled")).problems == ()

    @full
    @pytest.mark.parametrize(
        ("name", "settings", "change", "match"),
        [
            ("lilicorr", {"logit_scale": None}, {}, "does not say `lilicorr_logit_scale`"),
            ("lilicorr", {"enabled": False}, {}, "tensors that no DFlash draft with this config has: lilicorr"),
            ("lilicorr", {}, {"d2t": torch.arange(9)}, "LiLiCorr draft with a vocabulary of its own"),
            ("lilicorr", {}, {"in_head.weight": None}, "lacks 1 tensors of .*lilicorr.in_head.weight"),
            ("xpress", {"rank": 5}, {}, "`xpress_rank`=5 .* its tensors have 6"),
            ("xpress", {}, {"mix.L": torch.ones(6, 5, 5)}, "`xpress_block_size`=7 .* its tensors have 5"),
        ],
    )
    def test_wrong_files(self, name, settings, change, match, tmp_path):
        _, config, tensors = self.saved(name, tmp_path / "saved")
        prefix = "lilicorr." if name == "lilicorr" else "xpress_head."
        for key, value in settings.items():
            config["dflash_config"][f"{name}_{key}"] = value
        tensors |= {key if key == "d2t" else prefix + key: value for key, value in change.items()}
        with pytest.raises(CheckpointFormatError, match=match):
            self.load(tmp_path / "wrong", config, {k: v for k, v in tensors.items() if v is not None})


class TestMadeUpHead:
    """A head comes in with one file, `tests/helpers/pairs_head.py`, and its place in the list of all."""

    @pytest.fixture(autouse=True)
    def known(self, monkeypatch):
        monkeypatch.setattr(formats, "HEADS", [*formats.HEADS, PairsConfig])
        monkeypatch.setitem(NETWORKS, "pairs", {"head": PairsConfig(4)})

    @pytest.mark.parametrize("shape", [{}, {"num_draft_nodes": 9}])
    def test_graphs_of_chains_and_trees(self, shape, monkeypatch):
        spoil_inputs(monkeypatch)
        tape_everything(monkeypatch)
        assert run("dflash/pairs", shape, 3, seed=1) > 0
        graphs.forget_graphs()

    @pytest.mark.parametrize("settings", [{}, {"num_draft_nodes": 6}, {"draft_sample_method": "probabilistic"}])
    def test_rows_that_join_one_after_the_other(self, settings):
        model, samples = tiny_llama(), "draft_sample_method" in settings
        sizes = {"mask_token_id": 3, "block_size": 4, "num_target_layers": 2, "head": PairsConfig(4)}
        torch.manual_seed(0)
        speculator = speculator_for(draft(32, VOCAB_SIZE, **sizes).requires_grad_(False).attach(model), **settings)
        given = [{"input_ids": prompt(index), "max_new_tokens": 3 + 2 * index, "seed": index} for index in range(5)]
        call = {"do_sample": samples, "eos_token_id": None, "assistant": speculator}
        together = list(generate_many(model, given, 2, in_order=True, **call))
        apart = [list(generate_many(model, [one], 1, **call))[0] for one in given]
        assert [result.tokens for result in together] == [result.tokens for result in apart]
        assert sum(result.stats.num_draft_tokens for result in together) > 0
        if not samples:
            plain = [said_alone(model, one["input_ids"], max_new_tokens=one["max_new_tokens"]) for one in given]
            assert [result.tokens for result in together] == plain

    def test_training_and_the_checkpoint(self, tmp_path):
        model = tiny_llama()
        recipe = PairsRecipe(block_size=4, num_layers=1, intermediate_size=24, mask_token_id=9, num_anchors=8)
        network = recipe.build(model)
        tokens = torch.randint(1, VOCAB_SIZE, (2, 20))
        reading = TargetReader(model, recipe.states_for(network)).read(tokens)
        recipe.loss(network, reading).backward()
        assert all(parameter.grad.abs().sum() > 0 for parameter in network.block_head.parameters())
        with torch.no_grad():
            assert recipe.drafts(network, reading, reading.cycle_anchors()).shape[:3] == (3, 1, 2)
        recipe.save(network, tmp_path, dtype=torch.float32)
        loaded = heads.load("dflash", tmp_path, model)
        assert loaded.config.head == PairsConfig(6)
        same_network(loaded, network)
        text = {"input_ids": torch.tensor([prompt(7)]), "do_sample": False, "max_new_tokens": 12}
        plain = model.generate(**text)
        assert torch.equal(model.generate(**text, spec_method="dflash", spec_model=str(tmp_path)), plain)
