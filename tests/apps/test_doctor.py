"""Healthy drafters are found healthy, and every defect that is planted is named."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
import torch
from hypothesis import assume, given
from hypothesis import strategies as st
from transformers import AutoTokenizer
from typer.testing import CliRunner

from hf_specdec import cli, demo, forget_speculators
from hf_specdec.bench.prompts import Prompt
from hf_specdec.candidate_generators.eagle.generator import EagleCandidateGenerator
from hf_specdec.diagnosis import checks, diagnose
from hf_specdec.diagnosis.probe import Acceptance, _count, consistent_meaning
from hf_specdec.drafting.entries import DraftEntries
from tests.helpers.methods import OTHER_CHECKPOINTS
from tests.helpers.models import letter_tokenizer, tiny_llama
from tests.helpers.planted import damaged, give_draft_vocabulary, shuffle_states


@pytest.fixture(scope="module")
def target():
    return demo.load_target()


@pytest.fixture(scope="module")
def tokenizer():
    return demo.load_tokenizer()


@pytest.fixture(autouse=True)
def nothing_loaded(target):
    yield
    forget_speculators(target)


def few_prompts(tokens):
    return [Prompt(prompt.name, prompt.text, prompt.kind, tokens) for prompt in demo.prompts()[1::2]]


def check(target, tokenizer, spec, tokens=24, **options):
    return diagnose(target, spec, tokenizer, prompts=few_prompts(tokens), **options)


def statuses(found):
    return {finding.check: finding.status for finding in found.findings}


def cause(found):
    assert len(found.causes) == 1, found.findings
    return f"{found.causes[0].found} {found.causes[0].remedy}"


# Healthy pairs


@pytest.mark.parametrize("name", ["draft_model", "medusa", "mtp", "ngram"])
def test_healthy_drafters(target, tokenizer, name):
    found = check(target, tokenizer, demo.settings()[name], tokens=20, try_variants=name == "mtp")
    assert found.status == "ok", found.findings
    assert found.causes == []
    acceptance = found.acceptance["raw"]
    assert acceptance.acceptance_length > 1.1
    assert all(0 < accepted <= reached for accepted, reached in zip(acceptance.accepted[:1], acceptance.reached))


@pytest.mark.parametrize(
    ("dtype", "multiplies", "is_slow"),
    [
        (torch.bfloat16, False, True),
        (torch.bfloat16, True, False),
        (torch.bfloat16, None, False),
        (torch.float32, False, False),
    ],
)
def test_targets_in_bfloat16_on_processors_without_it(dtype, multiplies, is_slow, monkeypatch):
    monkeypatch.setattr(checks, "multiplies_bfloat16", lambda: multiplies)
    found = [finding for finding in checks.product_findings(tiny_llama().to(dtype)) if finding.status == "warning"]
    assert len(found) == is_slow
    assert not is_slow or "dtype=torch.float32" in found[0].remedy


def test_a_healthy_draft_vocabulary(target, tokenizer, tmp_path):
    keep = torch.tensor([token for token in range(4096) if token % 512 != 511])
    spec = damaged(demo.drafter_path("eagle3"), tmp_path / "head", lambda c, t: give_draft_vocabulary(c, t, keep))
    found = check(target, tokenizer, spec, try_variants=False)
    assert found.status == "ok", found.findings
    assert {"draft vocabulary", "vocabulary"} <= statuses(found).keys()


# Defects that configs, tables and tensors show


def test_the_wrong_method(target, tokenizer):
    found = check(target, tokenizer, {"method": "eagle", "model": demo.drafter_path("eagle3")})
    assert statuses(found)["method"] == "error"
    assert statuses(found)["loading"] == "error"
    assert found.status == "error"


def test_another_size(tokenizer):
    found = check(tiny_llama(), letter_tokenizer(), demo.drafter_path("eagle3"))
    sizes = [finding.found for finding in found.findings if finding.check == "sizes"]
    assert any("hidden size 256, and the target has 32" in text for text in sizes)
    assert statuses(found)["loading"] == "error"


@pytest.mark.parametrize(("spec", "check_name"), [("ngrm", "settings"), ({"model": "no/such/folder"}, "settings")])
def test_what_does_not_exist(target, tokenizer, spec, check_name):
    found = check(target, tokenizer, spec)
    assert [(finding.check, finding.status) for finding in found.findings] == [(check_name, "error")]


def test_a_damaged_file(target, tokenizer, tmp_path):
    spec = damaged(demo.drafter_path("eagle3"), tmp_path / "head", lambda c, t: t.pop("midlayer.mlp.up_proj.weight"))
    found = check(target, tokenizer, {"method": "eagle3", "model": spec})
    assert statuses(found)["loading"] == "error"


def test_weights_that_are_no_numbers(target, tokenizer, tmp_path):
    def change(config, tensors):
        tensors["midlayer.mlp.up_proj.weight"][0, 0] = torch.nan
        tensors["midlayer.mlp.down_proj.weight"].zero_()

    found = check(
        target, tokenizer, damaged(demo.drafter_path("eagle3"), tmp_path / "head", change), try_variants=False
    )
    weights = [(item.status, item.found) for item in found.findings if item.check == "weights"]
    assert [status for status, _ in weights] == ["error", "warning"]
    assert "up_proj" in weights[0][1]
    assert "down_proj" in weights[1][1]


def test_layers_that_are_not_stated(target, tokenizer, tmp_path):
    def change(config, tensors):
        del config["aux_layer_ids"]
        tensors["fc.weight"] = tensors["fc.weight"][:, :512]

    spec = damaged(demo.drafter_path("eagle3"), tmp_path / "head", change)
    found = check(target, tokenizer, {"model": spec, "aux_layer_ids": [1, 3]}, try_variants=False)
    assert statuses(found)["layers"] == "warning"


def test_another_tokenizer(target, tokenizer, tmp_path):
    folder = tmp_path / "draft"
    shutil.copytree(demo.drafter_path("draft_model"), folder)
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(Path(demo.target_path(), name), folder)
    spec = {"method": "draft_model", "model": str(folder), "same_tokenizer": True}
    assert statuses(check(target, tokenizer, spec, tokens=8))["tokenizer"] == "ok"
    file = folder / "tokenizer.json"
    content = json.loads(file.read_text())
    words = list(content["model"]["vocab"])
    content["model"]["vocab"] = {word: (index * 7) % len(words) for index, word in enumerate(words)}
    file.write_text(json.dumps(content))
    assert AutoTokenizer.from_pretrained(folder).get_vocab() != tokenizer.get_vocab()
    found = check(target, tokenizer, spec, tokens=8)
    assert statuses(found)["tokenizer"] == "error"
    assert "different tokenizers" in next(f.found for f in found.findings if f.check == "tokenizer")


def test_a_draft_model_with_another_tokenizer(target, tokenizer):
    spec = {"method": "draft_model", "model": OTHER_CHECKPOINTS["draft_model re-encoded"][1]}
    found = check(target, tokenizer, spec, tokens=8)
    (finding,) = (finding for finding in found.findings if finding.check == "tokenizer")
    assert finding.status == "ok"
    assert "drafts are re-encoded as text, 1406 tokens are in both" in finding.found
    found = check(target, tokenizer, spec | {"draft_tokenizer": "/nowhere"})
    assert statuses(found)["tokenizer"] == "error"


# Defects that a probe shows


def test_shifted_layers(target, tokenizer, tmp_path):
    spec = damaged(demo.drafter_path("eagle3"), tmp_path / "head", lambda c, t: c.update(aux_layer_ids=[0, 2, 4]))
    found = check(target, tokenizer, spec, tokens=32)
    assert "was trained on 1, 3, 5" in cause(found)
    assert "Pass aux_layer_ids=[1, 3, 5]" in cause(found)


def test_shuffled_rows_of_the_head(target, tokenizer, tmp_path):
    def change(config, tensors):
        give_draft_vocabulary(config, tensors, torch.arange(4095))
        order = torch.randperm(4095, generator=torch.Generator().manual_seed(0))
        tensors["lm_head.weight"] = tensors["lm_head.weight"][order]

    found = check(
        target, tokenizer, damaged(demo.drafter_path("eagle3"), tmp_path / "head", change), try_variants=False
    )
    assert found.acceptance["raw"].first_rate < 0.05
    assert "stand for other tokens" in cause(found)


def test_a_draft_vocabulary_without_common_tokens(target, tokenizer, tmp_path):
    keep = torch.arange(0, 4096, 2)
    spec = damaged(demo.drafter_path("eagle3"), tmp_path / "head", lambda c, t: give_draft_vocabulary(c, t, keep))
    found = check(target, tokenizer, spec, try_variants=False)
    assert "not in the draft vocabulary (2048 tokens)" in cause(found)


def test_states_of_another_scale(target, tokenizer, tmp_path):
    def change(config, tensors):
        tensors["fc.weight"][:, 256:] /= 16  # the root of the hidden size

    found = check(target, tokenizer, damaged(demo.drafter_path("eagle"), tmp_path / "head", change), tokens=16)
    assert "The scale of the target's states is wrong" in cause(found)


def test_a_wrong_rotary_embedding(target, tokenizer, tmp_path):
    spec = damaged(demo.drafter_path("eagle"), tmp_path / "head", lambda c, t: c.update(rope_theta=50.0))
    assert "rope_theta=50" in cause(check(target, tokenizer, spec, tokens=20))


@pytest.mark.parametrize("named", [False, True])
def test_the_head_of_another_target(tokenizer, tmp_path, named):
    other = demo.load_target()
    shuffle_states(other)
    name = {"base_model_name_or_path": "someone/another-model"} if named else {}
    spec = damaged(demo.drafter_path("eagle"), tmp_path / "head", lambda c, t: c.update(name))
    found = check(other, tokenizer, spec, tokens=20, try_variants=not named)
    assert found.acceptance["raw"].first_rate < 0.05
    assert statuses(found).get("made for") == ("warning" if named else None)
    assert ("made for 'someone/another-model'" if named else "No other wiring helps") in cause(found)


def test_a_drafter_that_does_not_go_on_from_itself(target, tokenizer, monkeypatch):
    read = DraftEntries.read_nodes
    monkeypatch.setattr(DraftEntries, "read_nodes", lambda self, t, hidden, p: read(self, t * 0, hidden * 0, p))
    found = check(
        target, tokenizer, {"model": demo.drafter_path("eagle"), "num_speculative_tokens": 4}, try_variants=False
    )
    assert "falls at once" in next(item.found for item in found.findings if item.check == "acceptance")
    assert "trained for one step only" in cause(found)


def test_sampling_at_a_high_temperature(tokenizer):
    target = demo.load_target()
    target.generation_config.update(do_sample=True, temperature=1.5)
    found = check(target, tokenizer, demo.drafter_path("eagle"), try_variants=False)
    assert "temperature 1.5" in cause(found)
    assert found.acceptance["sampled"].first_rate < found.acceptance["raw"].first_rate


def draft_nonsense(monkeypatch, where, tokenizer):
    """Makes EAGLE heads draft nonsense after some prompts: those that have a mark, or have none."""
    mark = tokenizer(" @@@")["input_ids"][-1]
    prefill, propose = EagleCandidateGenerator.prefill, EagleCandidateGenerator.propose

    def marked_prefill(self, prompt):
        self.is_lost = where(bool((prompt.input_ids == mark).any()))
        prefill(self, prompt)

    def marked_propose(self, step):
        draft = propose(self, step)
        if self.is_lost:
            draft.tokens.add_(1).remainder_(4096)
        return draft

    monkeypatch.setattr(EagleCandidateGenerator, "prefill", marked_prefill)
    monkeypatch.setattr(EagleCandidateGenerator, "propose", marked_propose)


@pytest.mark.parametrize("knows_chats", [False, True])
def test_a_chat_template_that_training_had_not(target, monkeypatch, knows_chats):
    """A head that drafts nonsense after prompts with the template, or after those without it."""
    tokenizer = demo.load_tokenizer()
    tokenizer.chat_template = "{{ messages[0]['content'] }}\n# @@@\n"
    draft_nonsense(monkeypatch, lambda marked: marked != knows_chats, tokenizer)
    found = check(target, tokenizer, demo.drafter_path("eagle"), tokens=16, try_variants=False)
    expected = "without the chat template are" if knows_chats else "in the target's chat template are"
    assert f"Prompts {expected} drafted for less well" in cause(found)
    assert set(found.acceptance) == {"raw", "chat"}


def test_a_thinking_mode_that_training_had_not(target, monkeypatch):
    tokenizer = demo.load_tokenizer()
    tokenizer.chat_template = "{{ messages[0]['content'] }}\n{% if enable_thinking is not defined %}# @@@\n{% endif %}"
    draft_nonsense(monkeypatch, lambda marked: marked, tokenizer)
    found = check(target, tokenizer, demo.drafter_path("eagle"), tokens=16, try_variants=False)
    assert set(found.acceptance) == {"raw", "chat", "chat, no thinking"}
    assert "Answers with thinking are drafted for less well" in cause(found)
    assert "Pass enable_thinking=False" in cause(found)


# Figures


def test_acceptance_by_position():
    found = Acceptance()
    text = [7, 8, 1, 2, 3, 4, 5]
    chain = [-1, 0, 1]
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
    _count(found, 0, text, drafts)
    assert found.reached == [4, 3, 2]
    assert found.accepted == [4, 3, 1]
    assert found.num_places == 5
    assert found.acceptance_length == pytest.approx(1 + 8 / 5)
    assert found.counts == {(0, 2): 2, (0, 3): 3, (0, 5): 2, (0, 6): 1}
    assert found.first_tokens == [(1, 1), (2, 2), (8, 4), (5, 5)]


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
    assert all(accepted <= reached <= 1 for accepted, reached in zip(found.accepted, found.reached))


def test_what_a_text_repeats_is_no_evidence():
    found = Acceptance()
    text = [1, 2, 3] * 6
    _count(found, 0, text, {length: ([9], [-1]) for length in range(6, 18)})
    assert found.num_places == 12
    assert len(found.counts) == len(found.first_tokens) == 3


def test_comparing_drafts_at_the_same_places():
    better, worse, equal = Acceptance(), Acceptance(), Acceptance()
    for place in range(40):
        worse.counts[0, place] = equal.counts[0, place] = place % 3
        better.counts[0, place] = place % 3 + (place % 4 == 0)
    assert better.is_better_than(worse)
    assert not worse.is_better_than(better)
    assert not equal.is_better_than(worse)


def test_meaning_of_shuffled_tokens():
    pairs = [(token, token + 10) for token in range(5) for _ in range(4)]
    assert consistent_meaning(pairs) == (1.0, 0.2)
    assert consistent_meaning([(1, token) for token in range(9)]) == (0.0, 1 / 9)
    assert consistent_meaning([]) == (0.0, 0.0)


# The command


def run_command(*arguments):
    return CliRunner().invoke(cli.app, ["doctor", *map(str, arguments)], prog_name="hf-specdec")


def test_command():
    result = run_command("--spec", "eagle3", "-n", 16, "--quick", "-p", demo.prompts()[0].text, "--json")
    assert result.exit_code == 0, result.stderr
    report = json.loads(result.stdout)
    assert {"checkpoint", "method", "loading", "layers", "weights"} <= {item["check"] for item in report["findings"]}


def test_command_fails_where_the_pair_cannot_work():
    spec = json.dumps({"method": "eagle", "model": demo.drafter_path("eagle3")})
    result = run_command("--spec", spec)
    assert result.exit_code == 1
    assert "error" in result.stdout
    assert "Leave the method out" in result.stdout
