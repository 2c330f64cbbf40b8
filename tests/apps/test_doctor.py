"""Healthy drafters are found healthy, and every defect that is planted is named with its remedy."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
import torch
from hypothesis import assume, given
from hypothesis import strategies as st
from typer.testing import CliRunner

from hf_specdec import cli, demo, forget_speculators
from hf_specdec.bench.prompts import Prompt
from hf_specdec.candidate_generators.eagle.generator import EagleCandidateGenerator
from hf_specdec.diagnosis import checks, diagnose
from hf_specdec.diagnosis.probe import Acceptance, _count, consistent_meaning
from hf_specdec.drafting.entries import DraftEntries
from tests.helpers.levels import full, in_full
from tests.helpers.methods import OTHER_CHECKPOINTS
from tests.helpers.models import letter_tokenizer, tiny_llama
from tests.helpers.planted import damaged, give_draft_vocabulary, shuffle_states


EAGLE, EAGLE3 = demo.drafter_path("eagle"), demo.drafter_path("eagle3")


@pytest.fixture(autouse=True)
def nothing_loaded(target):
    yield
    forget_speculators(target)


@pytest.fixture
def check(target, demo_tokenizer):
    """What is found of a drafter and the demo's target."""

    def checked(spec, tokens=24, target=target, tokenizer=demo_tokenizer, **options):
        few = [Prompt(prompt.name, prompt.text, prompt.kind, tokens) for prompt in demo.prompts()[1::2]]
        return diagnose(target, spec, tokenizer, prompts=few, **{"try_variants": False, **options})

    return checked


def statuses(found):
    return {finding.check: finding.status for finding in found.findings}


def cause(found):
    assert len(found.causes) == 1, found.findings
    return f"{found.causes[0].found} {found.causes[0].remedy}"


@pytest.mark.parametrize("name", ["ngram", *in_full("draft_model", "medusa", "mtp")])
def test_healthy_drafters(check, name):
    found = check(demo.settings()[name], tokens=20, try_variants=name == "mtp")
    assert (found.status, found.causes) == ("ok", []), found.findings
    acceptance = found.acceptance["raw"]
    assert acceptance.acceptance_length > 1.1
    assert all(0 < accepted <= reached for accepted, reached in zip(acceptance.accepted[:1], acceptance.reached))


# Defects of checkpoints: of which one, what changes in it, the check or the cause that names it, and with what words.


def keep_tokens(ids, shuffled=False):
    def change(config, tensors):
        give_draft_vocabulary(config, tensors, ids)
        if shuffled:
            order = torch.randperm(len(ids), generator=torch.Generator().manual_seed(0))
            tensors["lm_head.weight"] = tensors["lm_head.weight"][order]

    return change


def no_numbers(config, tensors):
    tensors["midlayer.mlp.up_proj.weight"][0, 0] = torch.nan
    tensors["midlayer.mlp.down_proj.weight"].zero_()


def two_layers_unstated(config, tensors):
    del config["aux_layer_ids"]
    tensors["fc.weight"] = tensors["fc.weight"][:, :512]


def other_scale(config, tensors):
    tensors["fc.weight"][:, 256:] /= 16  # the root of the hidden size


DEFECTS = {
    "shifted layers": (EAGLE3, lambda c, t: c.update(aux_layer_ids=[0, 2, 4]), True, "Pass aux_layer_ids=[1, 3, 5]"),
    "other scale": (EAGLE, other_scale, True, "The scale of the target's states is wrong"),
    "rotary embedding": (EAGLE, lambda c, t: c.update(rope_theta=50.0), True, "rope_theta=50"),
    "shuffled head": (EAGLE3, keep_tokens(torch.arange(4095), shuffled=True), False, "stand for other tokens"),
    "small vocabulary": (EAGLE3, keep_tokens(torch.arange(0, 4096, 2)), False, "not in the draft vocabulary (2048"),
}


@pytest.mark.parametrize("name", ["shuffled head", *in_full(*sorted(DEFECTS.keys() - {"shuffled head"}))])
def test_defects_that_the_drafts_show(check, tmp_path, name):
    source, change, try_variants, words = DEFECTS[name]
    found = check(damaged(source, tmp_path / "head", change), tokens=32, try_variants=try_variants)
    assert words in cause(found)
    assert name != "shuffled head" or found.acceptance["raw"].first_rate < 0.05


def test_defects_that_files_show(check, tmp_path):
    found = check({"method": "eagle", "model": EAGLE3})
    assert (statuses(found)["method"], statuses(found)["loading"], found.status) == ("error",) * 3
    found = check(EAGLE3, target=tiny_llama(), tokenizer=letter_tokenizer())
    assert "hidden size 256, and the target has 32" in str([f.found for f in found.findings if f.check == "sizes"])
    assert statuses(found)["loading"] == "error"
    for spec in ("ngrm", {"model": "no/such/folder"}):
        assert statuses(check(spec)) == {"settings": "error"}
    spec = damaged(EAGLE3, tmp_path / "missing", lambda c, t: t.pop("midlayer.mlp.up_proj.weight"))
    assert statuses(check({"method": "eagle3", "model": spec}))["loading"] == "error"
    found = check(damaged(EAGLE3, tmp_path / "numbers", no_numbers))
    (first, nan), (second, zero) = [(item.status, item.found) for item in found.findings if item.check == "weights"]
    assert (first, "up_proj" in nan, second, "down_proj" in zero) == ("error", True, "warning", True)


@full
def test_what_files_leave_open(check, tmp_path):
    spec = {"model": damaged(EAGLE3, tmp_path / "layers", two_layers_unstated), "aux_layer_ids": [1, 3]}
    assert statuses(check(spec))["layers"] == "warning"
    keep = torch.tensor([token for token in range(4096) if token % 512 != 511])
    found = check(damaged(EAGLE3, tmp_path / "healthy", keep_tokens(keep)))
    assert found.status == "ok", found.findings
    assert {"draft vocabulary", "vocabulary"} <= statuses(found).keys()


@full
def test_tokenizers_of_draft_models(check, tmp_path):
    folder = shutil.copytree(demo.drafter_path("draft_model"), tmp_path / "draft")
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(Path(demo.target_path(), name), folder)
    spec = {"method": "draft_model", "model": str(folder), "same_tokenizer": True}
    assert statuses(check(spec, tokens=8))["tokenizer"] == "ok"
    content = json.loads((folder / "tokenizer.json").read_text())
    words = list(content["model"]["vocab"])
    content["model"]["vocab"] = {word: (index * 7) % len(words) for index, word in enumerate(words)}
    (folder / "tokenizer.json").write_text(json.dumps(content))
    found = check(spec, tokens=8)
    assert statuses(found)["tokenizer"] == "error"
    assert "different tokenizers" in next(item.found for item in found.findings if item.check == "tokenizer")
    spec = {"method": "draft_model", "model": OTHER_CHECKPOINTS["draft_model re-encoded"][1]}
    (finding,) = (item for item in check(spec, tokens=8).findings if item.check == "tokenizer")
    assert finding.status == "ok"
    assert "drafts are re-encoded as text, 1406 tokens are in both" in finding.found
    assert statuses(check(spec | {"draft_tokenizer": "/nowhere"}, tokens=8))["tokenizer"] == "error"


@full
@pytest.mark.parametrize("named", [False, True])
def test_the_head_of_another_target(check, tmp_path, named):
    other = demo.load_target()
    shuffle_states(other)
    name = {"base_model_name_or_path": "someone/another-model"} if named else {}
    spec = damaged(EAGLE, tmp_path / "head", lambda c, t: c.update(name))
    found = check(spec, tokens=20, target=other, try_variants=not named)
    assert found.acceptance["raw"].first_rate < 0.05
    assert statuses(found).get("made for") == ("warning" if named else None)
    assert ("made for 'someone/another-model'" if named else "No other wiring helps") in cause(found)


@full
def test_a_drafter_that_does_not_go_on_from_itself(check, monkeypatch):
    read = DraftEntries.read_nodes
    monkeypatch.setattr(DraftEntries, "read_nodes", lambda self, t, hidden, p: read(self, t * 0, hidden * 0, p))
    found = check({"model": EAGLE, "num_speculative_tokens": 4})
    assert "falls at once" in next(item.found for item in found.findings if item.check == "acceptance")
    assert "trained for one step only" in cause(found)


@full
def test_sampling_at_a_high_temperature(check):
    target = demo.load_target()
    target.generation_config.update(do_sample=True, temperature=1.5)
    found = check(EAGLE, target=target)
    assert "temperature 1.5" in cause(found)
    assert found.acceptance["sampled"].first_rate < found.acceptance["raw"].first_rate


@full
@pytest.mark.parametrize(
    ("template", "loses_marked", "words"),
    [
        ("# @@@\n", True, "in the target's chat template are drafted for less well"),
        ("# @@@\n", False, "without the chat template are drafted for less well"),
        ("{% if enable_thinking is not defined %}# @@@\n{% endif %}", True, "Pass enable_thinking=False"),
    ],
    ids=["template", "no_template", "thinking"],
)
def test_prompts_that_training_had_not(check, monkeypatch, template, loses_marked, words):
    """A head that drafts nonsense after prompts that have a mark, or have none."""
    tokenizer = demo.load_tokenizer()
    tokenizer.chat_template = "{{ messages[0]['content'] }}\n" + template
    mark = tokenizer(" @@@")["input_ids"][-1]
    prefill, propose = EagleCandidateGenerator.prefill, EagleCandidateGenerator.propose

    def marked_prefill(self, prompt):
        self.is_lost = bool((prompt.input_ids == mark).any()) == loses_marked
        prefill(self, prompt)

    def marked_propose(self, step):
        draft = propose(self, step)
        if self.is_lost:
            draft.tokens.add_(1).remainder_(4096)
        return draft

    monkeypatch.setattr(EagleCandidateGenerator, "prefill", marked_prefill)
    monkeypatch.setattr(EagleCandidateGenerator, "propose", marked_propose)
    found = check(EAGLE, tokens=16, tokenizer=tokenizer)
    assert words in cause(found)
    assert {"raw", "chat"} <= set(found.acceptance)


@full
def test_targets_in_bfloat16_on_processors_without_it(monkeypatch):
    for dtype, multiplies, is_slow in (
        (torch.bfloat16, False, True),
        (torch.bfloat16, True, False),
        (torch.bfloat16, None, False),
        (torch.float32, False, False),
    ):
        monkeypatch.setattr(checks, "multiplies_bfloat16", lambda multiplies=multiplies: multiplies)
        found = [item for item in checks.product_findings(tiny_llama().to(dtype)) if item.status == "warning"]
        assert len(found) == is_slow
        assert not is_slow or "dtype=torch.float32" in found[0].remedy


# Figures


def test_acceptance_by_position():
    found, chain = Acceptance(), [-1, 0, 1]
    drafts = {
        2: ([1, 2, 9], chain),
        3: ([2, 3, 4], chain),
        4: ([], []),
        # A tree: 8 and 4 after the anchor, 5 after 4.
        5: ([8, 4, 5], [-1, -1, 1]),
        # The text ends within the draft, and before it.
        6: ([5, 6], [-1, 0]),
        7: ([1], [-1]),
    }
    _count(found, 0, [7, 8, 1, 2, 3, 4, 5], drafts)
    assert (found.reached, found.accepted) == ([4, 3, 2], [4, 3, 1])
    assert found.num_places == 5
    assert found.acceptance_length == pytest.approx(1 + 8 / 5)
    assert found.counts == {(0, 2): 2, (0, 3): 3, (0, 5): 2, (0, 6): 1}
    assert found.first_tokens == [(1, 1), (2, 2), (8, 4), (5, 5)]
    # What a text repeats is no evidence.
    found = Acceptance()
    _count(found, 0, [1, 2, 3] * 6, {length: ([9], [-1]) for length in range(6, 18)})
    assert found.num_places == 12
    assert len(found.counts) == len(found.first_tokens) == 3


@full
@given(st.data())
def test_as_much_is_accepted_as_the_tree_has_of_the_text(data):
    size = data.draw(st.integers(0, 6))
    parents = [data.draw(st.integers(-1, node - 1)) for node in range(size)]
    tokens = data.draw(st.lists(st.integers(0, 2), min_size=size, max_size=size))
    # Siblings differ, as the drafts of all methods do.
    assume(len({*zip(parents, tokens)}) == size)
    following = data.draw(st.lists(st.integers(0, 2), min_size=1, max_size=6))
    paths = [()]
    for token, parent in zip(tokens, parents):
        paths.append((*paths[parent + 1], token))
    longest = max(len(path) for path in paths if path == tuple(following[: len(path)]))
    found = Acceptance()
    _count(found, 0, [9, *following], {1: (tokens, parents)})
    assert sum(found.accepted) == longest
    assert found.acceptance_length == 1 + longest


@full
def test_evidence_of_better_drafts_and_of_shuffled_tokens():
    better, worse, equal = Acceptance(), Acceptance(), Acceptance()
    for place in range(40):
        worse.counts[0, place] = equal.counts[0, place] = place % 3
        better.counts[0, place] = place % 3 + (place % 4 == 0)
    assert better.is_better_than(worse)
    assert not worse.is_better_than(better)
    assert not equal.is_better_than(worse)
    pairs = [(token, token + 10) for token in range(5) for _ in range(4)]
    assert consistent_meaning(pairs) == (1.0, 0.2)
    assert consistent_meaning([(1, token) for token in range(9)]) == (0.0, 1 / 9)
    assert consistent_meaning([]) == (0.0, 0.0)


def test_command():
    def run(*arguments):
        return CliRunner().invoke(cli.app, ["doctor", *map(str, arguments)], prog_name="hf-specdec")

    result = run("--spec", "eagle3", "-n", 16, "--quick", "-p", demo.prompts()[0].text, "--json")
    assert result.exit_code == 0, result.stderr
    report = json.loads(result.stdout)
    assert {"checkpoint", "method", "loading", "layers", "weights"} <= {item["check"] for item in report["findings"]}
    result = run("--spec", json.dumps({"method": "eagle", "model": EAGLE3}))
    assert result.exit_code == 1
    assert "error" in result.stdout
    assert "Leave the method out" in result.stdout
