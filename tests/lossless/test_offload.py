"""Targets whose weights are loaded for each forward, from memory or from a disk: every method writes plain's texts."""

from __future__ import annotations

import pytest
import torch

from hf_specdec import demo
from tests.helpers.methods import demo_inputs, plain_text, settings_of


accelerate = pytest.importorskip("accelerate")

NEW = 16
ROWS = [
    *("ngram", "recycling", "draft_model", "medusa static tree", "mlp_speculator"),
    *("eagle", "eagle3 tree", "dflash", "mtp"),
]
CPU = torch.device("cpu")


def _dispatched(target, folder):
    """Every second layer on the disk."""
    layers = {f"model.layers.{index}": ("cpu", "disk")[index % 2] for index in range(target.config.num_hidden_layers)}
    rest = dict.fromkeys(("model.embed_tokens", "model.norm", "model.rotary_emb", "lm_head"), "cpu")
    return accelerate.dispatch_model(target, rest | layers, main_device="cpu", offload_dir=folder, force_hooks=True)


OFFLOADED = {
    "cpu_offload": lambda target, folder: accelerate.cpu_offload(target, execution_device=CPU),
    "disk_offload": lambda target, folder: accelerate.disk_offload(target, folder, execution_device=CPU),
    "dispatch_model": _dispatched,
}


@pytest.fixture(scope="module", params=OFFLOADED)
def offloaded(request, tmp_path_factory):
    return OFFLOADED[request.param](demo.load_target(), str(tmp_path_factory.mktemp("weights")))


@pytest.mark.thinned(2)
@pytest.mark.parametrize("drafter", ROWS)
def test_text_is_that_of_plain_generation(offloaded, drafter):
    output = offloaded.generate(
        **demo_inputs(2),
        max_new_tokens=NEW,
        do_sample=False,
        speculative=settings_of(drafter),
        return_dict_in_generate=True,
    )
    assert torch.equal(output.sequences, plain_text(2, NEW))
    assert output.speculative.num_accepted_tokens > 4
    assert any(weight.is_meta for weight in offloaded.parameters())
