"""The pages of docs/: their examples run, their figures are those of the formulas, and the site is complete."""

import re
import warnings

import pytest
import torch
import yaml

import hf_specdec
from hf_specdec import demo
from hf_specdec.candidate_generators.dflash.config import DFlashConfig
from hf_specdec.candidate_generators.dflash.network import DFlashNetwork
from hf_specdec.candidate_generators.eagle.formats import EagleConfig
from hf_specdec.candidate_generators.eagle.network import Eagle1Network, Eagle3Network
from hf_specdec.candidate_generators.medusa.network import MedusaHeads
from hf_specdec.candidate_generators.mlp_speculator.network import MLPSpeculator, MLPSpeculatorConfig
from tests.helpers.paths import ROOT


DOCS = ROOT / "docs"
# Pages whose examples can be pasted, from the first to the last.
PASTED = ["get_started.md", "reproducibility.md", "troubleshooting.md"]
PASTED += [f"howto/{path.name}" for path in sorted((DOCS / "howto").glob("*.md"))]


# Extras whose packages a page needs.
NEEDED = {"howto/serving.md": "fastapi", "howto/reinforcement.md": "trl"}

# Pages whose readers have a model and its inputs already.
CONTINUED = ["index.md", "picture.md"]


def blocks(page):
    text = (DOCS / page).read_text(encoding="utf-8")
    return re.findall(r"^```python\n(.*?)^```", text, re.MULTILINE | re.DOTALL)


@pytest.fixture
def fresh_process(tmp_path, monkeypatch):
    """An empty folder, and settings as in a new process, both before an example and after it."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HF_SPECDEC_ADAPTIVE", "1")
    monkeypatch.setenv("CUBLAS_WORKSPACE_CONFIG", "")
    yield
    torch.use_deterministic_algorithms(False)


@pytest.mark.parametrize("page", PASTED + CONTINUED)
@pytest.mark.usefixtures("fresh_process")
def test_examples_run(page):
    """Each page on its own, in order, in one namespace."""
    if page in NEEDED:
        pytest.importorskip(NEEDED[page])
        # The package itself may use what transformers is about to drop.
        warnings.simplefilter("ignore", FutureWarning)
    found, namespace = blocks(page), {"__name__": "page"}
    if page in CONTINUED:
        namespace |= {"hf_specdec": hf_specdec, "model": demo.load_target(), "tokenizer": demo.load_tokenizer()}
        namespace["inputs"] = namespace["tokenizer"]("def read(path):", return_tensors="pt")
    assert found
    for number, block in enumerate(found):
        exec(compile(block, f"{page}, example {number + 1}", "exec"), namespace)


def table(page, heading):
    """Rows of the first table after a heading, as lists of cells, the head left out."""
    text = (DOCS / page).read_text(encoding="utf-8").split(f"\n## {heading}\n", 1)[1]
    lines = re.search(r"(?:^\|.*\n)+", text, re.MULTILINE)[0].splitlines()
    return [[cell.strip() for cell in line.strip("|").split("|")] for line in lines[2:]]


SIZES = {"1B": (2048, 8192, 512, 16), "8B": (4096, 14336, 1024, 32), "70B": (8192, 28672, 1024, 80)}
VOCABULARY = 128256


def gigabytes(drafter, hidden, inner, keys, layers):
    """Gigabytes of a drafter's weights with two bytes each, counted in its network."""
    layer = 2 * hidden * (hidden + keys) + 3 * hidden * inner
    decoder = {
        "hidden_size": hidden,
        "target_hidden_size": hidden,
        "vocab_size": VOCABULARY,
        "rope_parameters": {"rope_type": "default", "rope_theta": 500000.0},
        "intermediate_size": inner,
        "num_attention_heads": hidden // 128,
        "num_key_value_heads": keys // 128,
        "head_dim": 128,
    }
    if drafter.startswith("the target"):
        # The smallest one shares embedding and lm_head.
        return 2e-9 * (layers * layer + VOCABULARY * hidden * (1 if layers == 16 else 2))
    with torch.device("meta"):
        if drafter.startswith("`medusa`"):
            network = MedusaHeads(hidden, VOCABULARY, 5, own_lm_heads="original" in drafter)
        elif drafter.startswith("`mlp_speculator`"):
            network = MLPSpeculator(
                MLPSpeculatorConfig(
                    emb_dim=hidden, inner_dim=hidden, vocab_size=VOCABULARY, n_predict=4, tie_weights="tied" in drafter
                )
            )
        elif drafter.startswith("`eagle`"):
            network = Eagle1Network(
                EagleConfig(method="eagle", **decoder, num_hidden_layers=1, draft_vocab_size=VOCABULARY)
            )
        elif drafter.startswith("`eagle3`"):
            network = Eagle3Network(
                EagleConfig(
                    method="eagle3",
                    **decoder,
                    num_hidden_layers=1,
                    draft_vocab_size=32000,
                    aux_layer_ids=(2, layers // 2, layers - 3),
                    own_head=True,
                )
            )
        elif drafter.startswith("`dflash`"):
            network = DFlashNetwork(
                DFlashConfig(
                    **decoder,
                    num_hidden_layers=5,
                    num_target_layers=layers,
                    draft_vocab_size=VOCABULARY,
                    block_size=16,
                    mask_token_id=0,
                    target_layer_ids=(1, 4, 7, 10, 13),
                )
            )
        else:
            return None
    return 2e-9 * sum(parameter.numel() for parameter in network.parameters())


def test_memory_is_that_of_the_formats():
    rows = table("choose.md", "Memory")
    checked = 0
    for drafter, *shown in rows:
        for number, sizes in zip(shown, SIZES.values()):
            counted = gigabytes(drafter, *sizes)
            if counted is not None:
                assert float(number) == pytest.approx(counted, rel=0.01), drafter
                checked += 1
    assert checked >= 24


def best_length(rate, cost):
    def gain(length):
        return (1 - rate ** (length + 1)) / (1 - rate) / (1 + cost * length)

    best = max(range(1, 65), key=gain)
    return f"{best}: {gain(best):.1f}"


def test_lengths_are_those_of_the_equation():
    costs = (0.01, 0.02, 0.05, 0.1, 0.2, 0.4)
    for rate, *shown in table("choose.md", "How long a draft"):
        assert shown == [best_length(float(rate), cost) for cost in costs]


def test_figures_beside_the_wrong_formulas():
    text = (DOCS / "formulas.md").read_text(encoding="utf-8")
    tokens = (1 - 0.8**9) / 0.2
    assert "gives 7.4 instead of 4.3" in text
    assert f"{1 + 0.8 * 8:.1f} {tokens:.1f}" == "7.4 4.3"
    assert "less than half of the real latency" in text
    assert tokens / 9 < 0.5
    assert f"{(tokens - 1) / 8:.2f}" == "0.42"


def test_every_page_is_in_the_site():
    text = (ROOT / "mkdocs.yml").read_text(encoding="utf-8")
    listed = re.findall(r"([\w/]+\.md)$", yaml.safe_dump(yaml.safe_load(text)["nav"], width=1000), re.MULTILINE)
    assert len(set(listed)) == len(listed)
    assert set(listed) == {str(path.relative_to(DOCS)) for path in DOCS.rglob("*.md")} | {"changelog.md"}


def test_links_of_the_readme_lead_somewhere():
    text = (ROOT / "README.md").read_text(encoding="utf-8")
    for target in re.findall(r"\]\(([^)#]+)(?:#[^)]*)?\)", text):
        assert target.startswith("http") or (ROOT / target).exists(), target
