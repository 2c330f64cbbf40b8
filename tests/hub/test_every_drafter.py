"""Every published form of a drafter among the fixtures is known to `inspect`, `discover` and `doctor`."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path

import pytest
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast
from typer.testing import CliRunner

from hf_specdec import cli
from hf_specdec.bench.prompts import Prompt
from hf_specdec.diagnosis import diagnose
from tests.helpers.drafters import FIXTURES, card_of, load


@dataclass(frozen=True)
class Published:
    """A drafter, its target and its method; where the layers are the target's own, the two are one folder."""

    drafter: Path
    target: Path
    method: str

    @property
    def is_own(self) -> bool:
        return self.drafter == self.target


def published() -> dict[str, Published]:
    """The drafters by name; of two whose target is missing (a whole model with heads inside) none is here."""
    found = {}
    for config in sorted(FIXTURES.glob("**/config.json")):
        folder = config.parent
        name = str(folder.relative_to(FIXTURES))
        kind = name.partition("/")[0]
        if kind == "mtp":
            found[name] = Published(folder, folder, "mtp")
            continue
        target = next((path / "target" for path in (folder, folder.parent) if (path / "target").is_dir()), None)
        if folder.name == "target" or target is None or kind == "recycling":
            continue
        if (folder.parent / "pard" / "target").is_dir():
            target = folder.parent / "pard" / "target"
        method = "eagle3" if "eagle3" in name else kind
        found[name] = Published(folder, target, method)
    return {name: one for name, one in found.items() if one.drafter.name != "merged_v1"}


DRAFTERS = published()
every_drafter = pytest.mark.parametrize("one", DRAFTERS.values(), ids=DRAFTERS)


def run(*arguments):
    return CliRunner().invoke(cli.app, [*map(str, arguments)], prog_name="hf-specdec")


def size_of_vocabulary(target: Path) -> int:
    config = json.loads((target / "config.json").read_text())
    return config.get("text_config", config)["vocab_size"]


def characters(size: int) -> PreTrainedTokenizerFast:
    """A tokenizer of this many tokens, one for each character of an English text."""
    words = ["<unk>", "</s>", *map(chr, range(32, 127))]
    words += [f"<{index}>" for index in range(len(words), size)]
    inner = Tokenizer(models.WordLevel({word: token for token, word in enumerate(words)}, "<unk>"))
    inner.pre_tokenizer, inner.decoder = pre_tokenizers.Split("", "isolated"), decoders.Fuse()
    return PreTrainedTokenizerFast(tokenizer_object=inner, eos_token="</s>", unk_token="<unk>")


@every_drafter
def test_inspect_names_method_and_target(one):
    result = run("inspect", one.drafter, "--target", one.target, "--json")
    assert result.exit_code == 0, result.output
    found = json.loads(result.stdout)
    assert (found["fits"], found["problems"]) == (True, [])
    assert found["method"] == ("draft_model" if one.is_own else one.method)
    assert (f"use spec_method='{one.method}'" in found.get("hint", "")) == one.is_own
    # A head that goes through the target's lm_head works with every vocabulary.
    if found["format"] != "medusa-v2":
        assert found["target"]["vocab_size"] == size_of_vocabulary(one.target)
    if one.method not in ("draft_model", "mtp"):
        config = json.loads((one.target / "config.json").read_text())
        assert found["target"]["hidden_size"] == config["hidden_size"]


@pytest.mark.thinned(3)
@every_drafter
def test_discover_lists_it_for_its_target(one, hub):
    hub.add("user/target", one.target)
    if not one.is_own:
        hub.add("user/drafter", one.drafter, card=card_of("user/target", "speculative-decoding"))
    result = run("discover", "user/target", "--json")
    assert result.exit_code == 0, result.output
    found = json.loads(result.stdout)["candidates"]
    first, *_ = [item for item in found if item["place"] != "none"]
    assert (first["method"], first["model"]) == (one.method, None if one.is_own else "user/drafter")
    is_pickled = bool(list(one.drafter.glob("*.pt")))
    # As large as its target: it loads, and is not chosen unasked.
    is_large = one.method == "draft_model"
    assert bool(first["problems"]) == (is_pickled or is_large), first["problems"]
    assert not is_pickled or "name it as `model` if you trust it" in first["problems"][0]


@pytest.mark.thinned(3)
@every_drafter
def test_doctor_finds_no_error(one):
    if one.drafter.parent.name == "mimo":
        pytest.skip("its target is code of its own repository")
    model = load(one.target)
    model.generation_config.pad_token_id = 0
    spec = {"method": "mtp"} if one.is_own else str(one.drafter)
    prompts = [Prompt("", text, "", 12) for text in ("the first line of a text", "another one: a b a b a b")]
    found = diagnose(model, spec, characters(size_of_vocabulary(one.target)), prompts=prompts, try_variants=False)
    assert found.status != "error", found.findings
    said = {finding.check: finding.found for finding in found.findings}
    assert said["loading"] == f"It loads as '{one.method}'."
    assert one.is_own or said["checkpoint"].startswith(f"{one.method} in the format")
    assert found.acceptance["raw"].num_drafts > 0


def test_doctor_refuses_a_tokenizer_of_another_model():
    one = DRAFTERS["eagle/eagle3_llama"]
    tokenizer, prompts = characters(300), [Prompt("", "a€", "", 8)]
    assert diagnose(load(one.target), str(one.drafter), tokenizer, prompts=prompts).acceptance
    tokenizer.add_tokens("€")
    found = diagnose(load(one.target), str(one.drafter), tokenizer, prompts=prompts)
    [finding] = [item for item in found.findings if item.check == "tokenizer"]
    assert finding.status == found.status == "error"
    assert "a prompt with the token 300, and the target knows the tokens 0 to 255" in finding.found
