"""The doctor names every planted defect, `verify` tells bugs from ties, and `advise` recommends what was fastest."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM
from typer.testing import CliRunner

from hf_specdec import SpeculativeConfig, cli, demo, forget_speculators
from hf_specdec.bench.prompts import Batch, Prompt, make_batches
from hf_specdec.candidate_generators.eagle.generator import EagleCandidateGenerator
from hf_specdec.diagnosis import BUG, TIE, advice, advise, diagnose, verification, verify
from hf_specdec.diagnosis.probe import Acceptance
from hf_specdec.diagnosis.verification import _Judge
from hf_specdec.drafting.slots import DraftEntries
from hf_specdec.logits import rules
from hf_specdec.method import names_without_weights
from hf_specdec.target.cache import SlotCache
from tests.helpers.levels import full, in_full
from tests.helpers.models import letter_tokenizer, prompts, scripted_for, tiny_llama


EAGLE, EAGLE3 = demo.drafter_path("eagle"), demo.drafter_path("eagle3")


@pytest.fixture(autouse=True)
def nothing_loaded(target):
    yield
    forget_speculators(target)


def run(*arguments, code=0):
    result = CliRunner().invoke(cli.app, list(map(str, arguments)), prog_name="hf-specdec")
    assert result.exit_code == code, result.output
    return result


@pytest.fixture
def check(target, demo_tokenizer):
    def checked(spec, tokens=24, target=target, tokenizer=demo_tokenizer, **options):
        few = [Prompt(prompt.name, prompt.text, prompt.kind, tokens) for prompt in demo.prompts()[1::2]]
        return diagnose(target, spec, tokenizer, prompts=few, **options)

    return checked


def worst(found, check):
    """The worst finding of a check; `None` without one."""
    statuses = [finding.status for finding in found.findings if finding.check == check]
    return next((status for status in ("error", "warning", "ok") if status in statuses), None)


def said(found, check):
    return [finding.found for finding in found.findings if finding.check == check]


def cause(found):
    assert len(found.causes) == 1, found.findings
    return f"{found.causes[0].found} {found.causes[0].remedy}"


@pytest.mark.parametrize("name", ["ngram", *in_full("draft_model", "mtp")])
def test_healthy_drafters(check, name):
    found = check(demo.settings()[name], tokens=20)
    assert (found.status, found.causes) == ("ok", []), found.findings
    acceptance = found.acceptance["raw"]
    assert acceptance.acceptance_length > 1.1
    assert all(0 < accepted <= reached for accepted, reached in zip(acceptance.accepted[:1], acceptance.reached))


def damaged(source, folder, change) -> str:
    """A copy of a checkpoint after `change(config, tensors)`."""
    folder.mkdir()
    config = json.loads(Path(source, "config.json").read_text())
    tensors = load_file(Path(source, "model.safetensors"))
    change(config, tensors)
    (folder / "config.json").write_text(json.dumps(config))
    save_file({name: tensor.contiguous() for name, tensor in tensors.items()}, folder / "model.safetensors")
    return str(folder)


def keep_tokens(ids, shuffled=False):
    """The target's lm_head cut to these ids, as the head's own."""

    def change(config, tensors):
        embedding = load_file(Path(demo.target_path(), "model.safetensors"))["model.embed_tokens.weight"]
        tensors |= {"lm_head.weight": embedding[ids].clone(), "d2t": ids - torch.arange(len(ids))}
        config["draft_vocab_size"] = len(ids)
        if shuffled:
            order = torch.randperm(len(ids), generator=torch.Generator().manual_seed(0))
            tensors["lm_head.weight"] = tensors["lm_head.weight"][order]

    return change


# The checkpoint, what changes in it, the check that finds it, and what is said of it.
DEFECTS = {
    # By the root of the hidden size.
    "other scale": (EAGLE, lambda c, t: t["fc.weight"][:, 256:].div_(16), "acceptance", "have at least"),
    "shuffled head": (EAGLE3, keep_tokens(torch.arange(4095), shuffled=True), "acceptance", "better than guessing"),
    "small vocabulary": (EAGLE3, keep_tokens(torch.arange(0, 4096, 2)), "vocabulary", "draft vocabulary (2048"),
}


@pytest.mark.parametrize("name", ["shuffled head", *in_full(*sorted(DEFECTS.keys() - {"shuffled head"}))])
def test_defects_that_the_drafts_show(check, tmp_path, name):
    source, change, where, words = DEFECTS[name]
    found = check(damaged(source, tmp_path / "head", change), tokens=32)
    assert any(words in text for text in said(found, where))
    assert worst(found, where) == "warning"
    assert name != "shuffled head" or found.acceptance["raw"].first_rate < 0.05


def test_defects_that_files_show(check, tmp_path):
    def no_numbers(config, tensors):
        tensors["midlayer.mlp.up_proj.weight"][0, 0] = torch.nan
        tensors["midlayer.mlp.down_proj.weight"].zero_()

    found = check({"method": "eagle", "model": EAGLE3})
    assert (found.status, worst(found, "acceptance")) == ("error", None)
    assert any("is for 'eagle3', and the method 'eagle' was asked for" in text for text in said(found, "fit"))
    assert worst(found, "machine") == "ok"
    found = check(EAGLE3, target=tiny_llama(), tokenizer=letter_tokenizer())
    assert "hidden size 256, and the target has 32" in str(said(found, "fit"))
    assert worst(found, "fit") == "error"
    assert worst(check({"model": "no/such/folder"}), "fit") == "error"
    spec = damaged(EAGLE3, tmp_path / "missing", lambda c, t: t.pop("midlayer.mlp.up_proj.weight"))
    assert worst(check({"method": "eagle3", "model": spec}), "fit") == "error"
    found = check(damaged(EAGLE3, tmp_path / "numbers", no_numbers))
    texts = said(found, "fit")
    assert any("NaN" in text and "up_proj" in text for text in texts)
    assert any("Nothing but zeros" in text and "down_proj" in text for text in texts)


@full
def test_draft_models_with_other_tokenizers_and_partial_vocabularies(check, tmp_path):
    folder = shutil.copytree(demo.drafter_path("draft_model"), tmp_path / "draft")
    content = json.loads(Path(demo.target_path(), "tokenizer.json").read_text())
    spec = {"method": "draft_model", "model": str(folder), "draft_vocabulary": "same"}
    for step, status in ((1, "ok"), (7, "error")):
        words = list(content["model"]["vocab"])
        content["model"]["vocab"] = {word: (index * step) % len(words) for index, word in enumerate(words)}
        (folder / "tokenizer.json").write_text(json.dumps(content))
        shutil.copy(Path(demo.target_path(), "tokenizer_config.json"), folder)
        assert worst(check(spec, tokens=8), "vocabulary") == status
    keep = torch.tensor([token for token in range(4096) if token % 512 != 511])
    found = check(damaged(EAGLE3, tmp_path / "healthy", keep_tokens(keep)))
    assert found.status == "ok", found.findings
    assert len(said(found, "vocabulary")) == 2


@full
def test_the_head_of_another_target(check, tmp_path):
    """The same text from states whose elements are in another order."""
    other, order = demo.load_target(), torch.randperm(256, generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        for name, weight in other.named_parameters():
            first = name.endswith(("o_proj.weight", "down_proj.weight")) or weight.dim() == 1
            weight.copy_(weight[order] if first else weight[:, order])
    for named in (False, True):
        name = {"base_model_name_or_path": "someone/another-model"} if named else {}
        spec = damaged(EAGLE, tmp_path / str(named), lambda c, t, name=name: c.update(name))
        found = check(spec, tokens=20, target=other)
        assert found.acceptance["raw"].first_rate < 0.05
        assert any("made for 'someone/another-model', and the target" in text for text in said(found, "fit")) == named
        assert "better than guessing" in said(found, "acceptance")[0]


@full
def test_drafters_of_one_step_and_high_temperatures(check, monkeypatch):
    hot = demo.load_target()
    hot.generation_config.update(do_sample=True, temperature=1.5)
    found = check(EAGLE, target=hot)
    assert "temperature 1.5" in said(found, "acceptance")[1]
    assert found.acceptance["sampled"].first_rate < found.acceptance["raw"].first_rate
    step = DraftEntries.step
    monkeypatch.setattr(DraftEntries, "step", lambda self, t, hidden, p: step(self, t * 0, hidden * 0, p))
    found = check({"model": EAGLE, "num_speculative_tokens": 4})
    assert "falls at once" in said(found, "acceptance")[0]
    assert "trained for one step only" in cause(found)


def test_acceptance_by_position():
    found, chain = Acceptance(), [-1, 0, 1]
    # At 5 a tree: 8 and 4 after the anchor, 5 after 4. At 6 and 7 the text ends within the draft, and before it.
    drafts = {2: ([1, 2, 9], chain), 3: ([2, 3, 4], chain), 4: ([], []), 5: ([8, 4, 5], [-1, -1, 1])}
    drafts |= {6: ([5, 6], [-1, 0]), 7: ([1], [-1])}
    found.count([7, 8, 1, 2, 3, 4, 5], drafts)
    assert (found.reached, found.accepted, found.num_places) == ([4, 3, 2], [4, 3, 1], 5)
    assert found.acceptance_length == pytest.approx(1 + 8 / 5)


@full
def test_prompts_that_training_had_not(check, monkeypatch):
    """A head that drafts nonsense after prompts that have a mark, or have none."""
    tokenizer, propose, lost = demo.load_tokenizer(), EagleCandidateGenerator.propose, {}
    mark, prefill = tokenizer(" @@@")["input_ids"][-1], EagleCandidateGenerator.prefill

    def marked_prefill(self, prompt):
        self.is_lost = bool((prompt.input_ids == mark).any()) == lost["marked"]
        prefill(self, prompt)

    def marked_propose(self, step):
        draft = propose(self, step)
        draft.tokens.add_(int(self.is_lost)).remainder_(4096)
        return draft

    monkeypatch.setattr(EagleCandidateGenerator, "prefill", marked_prefill)
    monkeypatch.setattr(EagleCandidateGenerator, "propose", marked_propose)
    for template, lost["marked"], words in (
        ("# @@@\n", True, "in the target's chat template are drafted for less well"),
        ("# @@@\n", False, "without the chat template are drafted for less well"),
        ("{% if enable_thinking is not defined %}# @@@\n{% endif %}", True, "Pass enable_thinking=False"),
    ):
        tokenizer.chat_template = "{{ messages[0]['content'] }}\n" + template
        assert words in cause(check(EAGLE, tokens=16, tokenizer=tokenizer))


def second_best(scores):
    """Now and then."""
    best = scores.topk(2, dim=-1).indices
    return torch.where((best[..., 1] % 5) == 0, best[..., 1], best[..., 0])


def verified(model, inputs, text=None, **options):
    if text is None:
        text = model.generate(**inputs, max_new_tokens=48, do_sample=False)
    batch = Batch(tuple(map(str, range(len(text)))), "random", inputs, 48)
    (found,) = verify(model, {"scripted": scripted_for(text, inputs, **options)}, [batch])
    assert (found.num_texts, found.num_tokens) == (len(text), 48 * len(text))
    return found


@pytest.mark.parametrize(
    ("dtype", "damage"),
    [(torch.float32, "rule"), *in_full((torch.float32, "cache"), (torch.bfloat16, "cache"))],
)
def test_faults_are_bugs(monkeypatch, dtype, damage):
    model, commit = tiny_llama().to(dtype), SlotCache.commit
    text, options = model.generate(**prompts(3), max_new_tokens=48, do_sample=False), {}
    # Plain generation is plain, whatever the generation config says.
    model.generation_config.speculative = {"method": "ngram"}
    if damage == "rule":
        monkeypatch.setattr(rules, "best_tokens", second_best)
    else:
        # The accepted path of a tree is left where it was written.
        monkeypatch.setattr(SlotCache, "commit", lambda self, counts, path=None: commit(self, counts))
        options = {"tree": (-1, -1, 0, 0, 1, 2), "accuracy": 1.0}
    found = verified(model, prompts(3), text, **options)
    assert found.bugs
    for item in found.bugs:
        assert item.margin > item.tolerance > 0
        assert item.plain_logit > item.speculative_logit
    # Without room for a copy in float32 the model's own type judges.
    monkeypatch.setattr(verification, "free_bytes", lambda device: 0)
    assert verified(model, prompts(3), text, **options).bugs


def coarser_for_several_tokens(module, inputs, logits):
    """Leaves bfloat16 logits of several tokens at once 3 bits after the leading one; machines differ in theirs."""
    if logits.dtype != torch.bfloat16 or logits.shape[1] == 1:
        return logits
    mantissa, exponent = torch.frexp(logits.float())
    return torch.ldexp((mantissa * 16).round() / 16, exponent).to(logits.dtype)


def test_rounding_is_a_tie_and_equal_texts_are_equal(model):
    assert verified(model, prompts(3)).differences == []
    model = tiny_llama(initializer_range=0.02).to(torch.bfloat16)
    model.lm_head.register_forward_hook(coarser_for_several_tokens)
    found = verified(model, prompts(8, length=24, padding=False))
    assert {item.verdict for item in found.differences} == {TIE}
    assert all(item.margin <= item.tolerance < 1 for item in found.differences)


def test_logits_are_those_of_float32_after_the_processors(model):
    inputs = prompts(1, padding=False)
    for penalty in (1.0, 1.5):
        coarse = tiny_llama().to(torch.bfloat16)
        coarse.generation_config.repetition_penalty = penalty
        plain = coarse.generate(**inputs, max_new_tokens=8, do_sample=False)[0, 7:].tolist()
        text = torch.cat([inputs["input_ids"], torch.tensor([plain[:5]])], dim=1)
        other = next(token for token in text[0].tolist() if token != plain[5])
        judged = _Judge(coarse)("row", inputs["input_ids"], plain, [*plain[:5], other, *plain[6:]], 8)
        logits, seen = tiny_llama().to(torch.bfloat16).float()(text).logits[0, -1], torch.unique(text)
        logits[seen] = torch.where(logits[seen] > 0, logits[seen] / penalty, logits[seen] * penalty)
        assert (judged.index, judged.verdict) == (5, BUG)
        assert judged.plain_logit == pytest.approx(logits[plain[5]].item(), rel=1e-4)
        assert judged.speculative_logit == pytest.approx(logits[other].item(), rel=1e-4)
        assert judged.margin == pytest.approx((logits.max() - logits[[plain[5], other]].min()).item(), rel=1e-4)
    # A text that ends elsewhere is a bug.
    for plain, other in (([5, 6, 7], [5, 6]), ([5, 6], [5, 6, 7])):
        judged = _Judge(model)("row", inputs["input_ids"], plain, other, 8)
        assert (judged.index, judged.margin, judged.verdict) == (2, None, BUG)


@pytest.fixture
def ask(target, demo_tokenizer):
    """Advice for the demo's target, after two prompts."""
    chosen = [Prompt(one.name, one.text, one.kind, 12) for one in demo.prompts()[1:6:4]]
    batches = make_batches(demo_tokenizer, chosen)

    def asked(target=target, **options):
        return advise(target, batches, **{"rounds": 1, "local_files_only": True, **options})

    return asked


@full
def test_free_methods_and_named_drafters_are_measured(ask, tmp_path, monkeypatch):
    monkeypatch.setattr(advice.Option, "is_worthwhile", property(lambda option: option.name != "none"))
    (tmp_path / "config.json").write_text(json.dumps({"architectures": ["LlamaForCausalLM"], "model_type": "llama"}))
    found = ask(specs={"head": EAGLE, "broken": {"method": "eagle3", "model": str(tmp_path)}})
    missing = {item.name for item in found.rejected if "arctic" in item.reason}
    assert {option.name for option in found.options} | missing == {"none", "head", *names_without_weights()}
    assert [item.name for item in found.rejected if item.origin == "named by the user"] == ["broken"]
    speeds = [option.speedup for option in found.options]
    assert speeds == sorted(speeds, reverse=True)
    for option in found.options:
        assert option.mean_acceptance_length >= 1
        assert 0 <= (option.acceptance_rate or 0) <= 1
        assert option.has_drafts == (option.name != "none")
    assert "it is offline" in str(found.notes)
    # The fastest is recommended as it can be used.
    assert found.best is next(option for option in found.options if option.name != "none")
    settings = json.loads(found.snippets["json"])
    assert SpeculativeConfig.resolve(settings).method == found.best.settings["method"]
    python = found.snippets["python"].replace("model.generate", "dict").replace("**inputs, ", "")
    assert eval(python) == {"speculative": settings}


@full
def test_a_drafter_that_the_target_names_is_found(ask, tmp_path, monkeypatch):
    folder = shutil.copytree(demo.target_path(), tmp_path / "target")
    shutil.copytree(demo.drafter_path("mtp"), folder / "head")
    target = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    target.generation_config.speculative = {"model": "head"}
    (option,) = (option for option in ask(target).options if option.settings["method"] == "mtp")
    assert option.origin == "named by the target"
    # What does not fit into memory is not loaded.
    monkeypatch.setattr(advice, "free_bytes", lambda device: 1000)
    found = ask(target)
    assert any("do not fit" in item.reason for item in found.rejected)
    assert all(option.settings["method"] != "mtp" for option in found.options)


def option(method="x", **changes):
    figures = {"speedup": 1.5, "speedup_range": (1.4, 1.6), "over_none": 1.3, "over_none_range": (1.2, 1.4)}
    figures |= {"tokens_per_second": 100.0, "mean_acceptance_length": 3.0, "acceptance_rate": 0.8}
    figures |= {"draft_share": 0.25, "draft_bytes": 0}
    return advice.Option("x", {"method": method}, "", **{**figures, **changes})


def test_verdicts():
    none, slower = option("none", over_none=1.0), option(speedup=1.6, over_none=1.07, over_none_range=(0.99, 1.2))
    assert none.is_worthwhile
    assert not slower.is_worthwhile  # in one round
    assert not option(speedup=1.51, over_none=1.005, over_none_range=(1.0, 1.01)).is_worthwhile
    assert option(speedup=1.53, over_none=1.02, over_none_range=(1.01, 1.03)).is_worthwhile
    assert not option(speedup=0.9, speedup_range=(0.8, 0.95)).is_worthwhile
    best = option(speedup=3.0, speedup_range=(2.9, 3.1))
    for other, words in (
        (best, "The fastest: 3.00 tokens a cycle, 25 % drafting."),
        (none, "The loop without drafts: 1.50 times"),
        (option(speedup=0.9, speedup_range=(0.8, 1.0)), "Its drafts do not pay"),
        (slower, "Not surely faster: its drafts bring 0.99x in one round"),
        (option(speedup=2.8, speedup_range=(2.7, 2.95)), "As fast as the fastest"),
        (option(), "Slower than x"),
    ):
        assert advice._verdict(other, best).startswith(words)


def test_commands(tmp_path, monkeypatch):
    doctor = ("doctor", "demo", "-n", 16, "-p", demo.prompts()[0].text, "--set", "enforce_eager=true", "--json")
    found = json.loads(run(*doctor, "-d", "eagle3", "-k", 3).stdout)
    assert {"fit", "dtype", "acceptance", "machine"} <= {item["check"] for item in found["findings"]}
    assert len(found["acceptance"]["raw"]["rates"]) <= 3
    few = ("-p", "import os", "-n", 8, "--rounds", 1)
    report = json.loads(run("bench", "demo", "-d", "medusa", *few, "--recommend", "--offline", "--json").stdout)
    options = {option["name"]: option for option in report["recommendation"]["options"]}
    assert options["medusa"]["origin"] == "named by the user"
    assert names_without_weights()[-1] in options
    drafters = ("-d", "eagle3", "-d", "ngram")
    result = run("bench", "demo", "--check", *drafters, "-p", "def f(x):", "-n", 12, "--json")
    methods = json.loads(result.stdout)["methods"]
    rows = [(row["method"], row["num_equal"], row["num_texts"]) for row in methods]
    assert rows == [("eagle3", 1, 1), ("ngram", 1, 1)]
    file = tmp_path / "prompts.jsonl"
    file.write_text('{"prompt": "import os\\n"}\n{"turns": ["class A:\\n"]}\n')
    monkeypatch.setattr(rules, "best_tokens", second_best)
    check = ("bench", "demo", "--check", "-d", "draft_model", "--prompts", file, "-n", 24, "--batch-size", 2)
    (row,) = json.loads(run(*check, "--json", code=1).stdout)["methods"]
    assert (row["num_texts"], row["num_bugs"] >= 1) == (2, True)
    assert row["differences"][0]["plain_text"] != row["differences"][0]["speculative_text"]


@full
def test_tables_of_commands(monkeypatch):
    doctor = ("doctor", "demo", "-n", 16, "-p", demo.prompts()[0].text, "--set", "enforce_eager=true")
    assert "fit: " in run(*doctor, "-d", f"eagle:{EAGLE3}", code=1).stdout
    bench = ("bench", "demo", "-p", "import os", "-n", 24)
    assert "Use " in run(*bench, "-d", "medusa", "--rounds", 1, "--recommend", "--offline").stdout
    monkeypatch.setattr(rules, "best_tokens", second_best)
    assert "beyond the tolerance" in run(*bench, "--check", "-d", "draft_model", code=1).stdout
