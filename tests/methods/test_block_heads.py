"""LiLiCorr's lattice and XPress's refinement: the official numbers of both heads, and their checkpoints."""

import json

import pytest
import torch
from safetensors.torch import load_file

from hf_specdec import CheckpointFormatError
from hf_specdec.candidate_generators.dflash.config import LiLiCorrConfig, XPressConfig
from hf_specdec.candidate_generators.dflash.lilicorr import LiLiCorrHead
from hf_specdec.candidate_generators.dflash.xpress import XPressHead
from hf_specdec.hub.detect import detect_checkpoint
from hf_specdec.kernels.best import best_tokens
from tests.helpers import heads
from tests.helpers.block_networks import NETWORKS, draft, random_network
from tests.helpers.heads import same_network, write
from tests.helpers.levels import full
from tests.helpers.models import tiny_llama
from tests.helpers.paths import FIXTURES


PUBLISHED = FIXTURES / "block_heads"
TARGET = tiny_llama(vocab_size=40, num_hidden_layers=3)
CLOSE = {"atol": 2e-4, "rtol": 1e-4}


def head_of(name, make):
    """The head of an official case, its expected tensors."""
    settings = json.loads((PUBLISHED / name / "head.json").read_text())
    head = make(settings)
    prefix = "lilicorr." if name == "lilicorr" else "xpress_head."
    tensors = load_file(PUBLISHED / name / "model.safetensors")
    head.load_state_dict({key.removeprefix(prefix): value for key, value in tensors.items()})
    return head.requires_grad_(False), load_file(PUBLISHED / name / "expected.safetensors")


def test_official_lattice():
    def make(settings):
        given = settings["dflash_config"]
        names = ("hidden_size", "candidate_topk", "num_layers", "num_heads", "factor_dim", "vector_eps", "logit_scale")
        sizes = {name: given[f"lilicorr_{name}"] for name in names}
        sizes["mlp_size"] = int(given["lilicorr_mlp_ratio"] * sizes["hidden_size"])
        network = draft(settings["hidden_size"], settings["vocab_size"], block_size=given["block_size"])
        return LiLiCorrHead(network.config, LiLiCorrConfig(**sizes))

    head, expected = head_of("lilicorr", make)
    asked = []

    def embed(tokens):
        asked.append(tokens)
        return expected["token_embeddings"].flatten(1, 2)

    edges = head(expected["logits"], expected["hidden"], expected["anchor_context"], embed)
    assert torch.equal(asked[0], expected["candidate_ids"].flatten(1))
    assert torch.equal(edges.tokens, expected["candidate_ids"])
    torch.testing.assert_close(edges.scores, expected["scores"], **CLOSE)
    assert torch.equal(edges.tokens_at(edges.walk()), expected["greedy_tokens"])
    assert not torch.equal(expected["greedy_tokens"], edges.tokens[..., 0])


def test_official_refinement():
    def make(settings):
        sizes = [settings[f"xpress_{name}"] for name in ("rank", "mlp_hidden", "num_passes")]
        network = draft(settings["hidden_size"], settings["vocab_size"], block_size=settings["xpress_block_size"])
        return XPressHead(network.config, XPressConfig(*sizes))

    head, expected = head_of("xpress", make)
    base, output, anchors = expected["base_logits"], expected["hidden"], expected["anchor"][:, 0]
    for which, before in (("real", expected["before_anchor"][:, 0]), ("anchor_twice", anchors)):
        passes = expected[f"{which}.tokens_per_pass"]
        for count in range(passes.shape[1]):
            head.num_passes = count
            tokens = head.refine(base, output, anchors, before, best_tokens)
            assert torch.equal(tokens, passes[:, count, 1:])
        previous = torch.cat((before[:, None], passes[:, -2, :-1]), dim=1)
        torch.testing.assert_close(base + head(output, previous), expected[f"{which}.logits_last_pass"], **CLOSE)
        head.num_passes = base.shape[1] - 1
        converged = head.refine(base, output, anchors, before, best_tokens)
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
            ("xpress", {}, {"mix.L": torch.ones(6, 5, 5)}, "which does not fit blocks of 7 tokens"),
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
