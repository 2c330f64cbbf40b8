"""Block drafts of kinds that the demo has none of: its own draft with another head of random weights."""

from __future__ import annotations

import atexit
import shutil
import tempfile
from dataclasses import replace
from functools import cache
from pathlib import Path

import torch

from hf_specdec import demo, load_speculator
from hf_specdec.candidate_generators.dflash.heads.domino import DominoConfig
from hf_specdec.candidate_generators.dflash.heads.lilicorr import LiLiCorrConfig
from hf_specdec.candidate_generators.dflash.heads.markov import MarkovConfig
from hf_specdec.candidate_generators.dflash.heads.xpress import XPressConfig
from hf_specdec.candidate_generators.dflash.network import DFlashNetwork


_LATTICE = LiLiCorrConfig(
    hidden_size=16, candidate_topk=3, num_layers=1, num_heads=2, mlp_size=16, factor_dim=8, logit_scale=4.0
)
HEADS = {
    "confident": ("a DSpark draft with a confidence head", MarkovConfig(8, "vanilla", True, True)),
    "domino": ("a Domino draft", DominoConfig(gru_hidden_dim=8, emb_dim=8)),
    "lilicorr": ("a LiLiCorr draft", _LATTICE),
    "xpress": ("an XPress draft", XPressConfig(rank=8, mlp_hidden=16, num_passes=3)),
}


@cache
def head_path(name: str) -> str:
    """Folder of a draft with one of the heads, of random weights: it goes with the process."""
    folder = tempfile.mkdtemp(prefix=f"hf_specdec_{name}_")
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    target = demo.load_target()
    plain = load_speculator(target, {"method": "dflash", "model": demo.drafter_path("dflash")}).resources
    with torch.random.fork_rng():
        torch.manual_seed(0)
        network = DFlashNetwork(replace(plain.config, head=HEADS[name][1]))
        network.load_state_dict(plain.state_dict(), strict=False)
        head = network.block_head
        if name == "confident":
            # Corrections that change a draft now and then, and a head that doubts some of them.
            torch.nn.init.normal_(head.markov_w1.weight, std=0.3)
            torch.nn.init.normal_(head.confidence_head["proj"].weight, std=0.02)
        if name == "xpress":
            # A new one changes nothing.
            for weight in (head.w2.weight, head.mix.L):
                torch.nn.init.normal_(weight, std=0.3)
        network.save(Path(folder))
    return folder
