import subprocess
import sys
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import AutoModelForCausalLM, LlamaForCausalLM

from hf_specdec import demo, load_speculator
from hf_specdec.candidate_generators.draft_model import vocabularies
from hf_specdec.errors import CheckpointFormatError, SpecConfigError


# Python that is in nobody's standard library.
SNIPPET = '''
class Thermometer:
    """Measure the temperature of a room."""

    def __init__(self, name, sensor=None):
        self.name = name
        self.sensor = sensor
        self.values = []

    def read(self):
        """Return the current temperature."""
        if self.sensor is None:
            raise ValueError("no sensor")
        value = self.sensor.read()
        self.values.append(value)
        return value

    def average(self):
        """Return the mean of all values."""
        if not self.values:
            return None
        return sum(self.values) / len(self.values)

    def __repr__(self):
        return "<%s %s>" % (self.__class__.__name__, self.name)


def main():
    import sys
    thermometer = Thermometer(sys.argv[1])
    for i in range(10):
        print(thermometer.read())


if __name__ == "__main__":
    main()
'''


@pytest.fixture(scope="module")
def tokenizer():
    return demo.load_tokenizer()


@pytest.fixture(scope="module")
def target():
    return demo.load_target()


@pytest.fixture(scope="module")
def draft():
    return AutoModelForCausalLM.from_pretrained(demo.drafter_path("draft_model"), dtype=torch.float32).eval()


def test_importing_the_demo_loads_no_model_code():
    code = (
        "import sys, hf_specdec.demo as demo; before = 'transformers.models.llama.modeling_llama' in sys.modules; "
        "demo.prompts(); sys.exit(before)"
    )
    assert subprocess.run([sys.executable, "-c", code], cwd=Path(demo.__file__).parents[2]).returncode == 0


def test_the_checkpoints_are_small():
    folders = [Path(demo.target_path()), Path(demo.drafter_path("draft_model"))]
    sizes = {path: path.stat().st_size for folder in folders for path in folder.iterdir()}
    assert sum(sizes.values()) <= 10_000_000, sizes


def test_the_models_belong_together(target, draft, tokenizer):
    assert isinstance(target, LlamaForCausalLM)
    assert not target.training
    assert target.dtype == torch.float32
    assert target.config.vocab_size == draft.config.vocab_size == len(tokenizer)
    assert target.config.max_position_embeddings == draft.config.max_position_embeddings == 2048
    assert target.generation_config.eos_token_id == draft.generation_config.eos_token_id == tokenizer.eos_token_id
    assert 3e6 <= target.num_parameters() <= 5e6
    assert draft.num_parameters() < target.num_parameters() / 4


def test_the_weights_are_stored_in_bfloat16():
    for path in (demo.target_path(), demo.drafter_path("draft_model")):
        assert AutoModelForCausalLM.from_pretrained(path, dtype="auto").dtype == torch.bfloat16
    assert demo.load_target(torch.bfloat16).dtype == torch.bfloat16


def test_missing_weights_are_a_clear_error(tmp_path, monkeypatch):
    monkeypatch.setattr(demo, "_folder", lambda: tmp_path)
    with pytest.raises(CheckpointFormatError, match=r"target model is incomplete: config.json, model.safetensors"):
        demo.target_path()


def test_methods_without_a_drafter_are_an_error():
    with pytest.raises(SpecConfigError, match="no drafter for 'ngram'. It has one for: .*eagle3"):
        demo.drafter_path("ngram")


def test_the_tokenizer_gives_every_text_back(tokenizer):
    @given(st.one_of(st.text(), st.text(alphabet=" \n\tdefx_1.:(\"'=#")))
    @settings(max_examples=200)
    def check(text):
        if "<|endoftext|>" not in text:
            assert tokenizer.decode(tokenizer(text).input_ids) == text

    check()


def test_the_tokenizer_knows_python(tokenizer):
    ids = tokenizer(SNIPPET).input_ids
    assert len(SNIPPET) / len(ids) > 2.8
    assert tokenizer.decode(ids) == SNIPPET
    assert tokenizer.eos_token_id not in ids
    assert tokenizer("<|endoftext|>").input_ids == [tokenizer.eos_token_id]


def test_the_target_has_learned_python(target, tokenizer):
    ids = tokenizer(SNIPPET, return_tensors="pt").input_ids
    with torch.no_grad():
        logits = target(ids).logits[0, :-1]
    assert F.cross_entropy(logits, ids[0, 1:]) < 2.5


def test_the_target_copies_what_it_is_asked_to(target, tokenizer):
    prompt = next(prompt for prompt in demo.prompts() if prompt.name == "rename_argument")
    original = prompt.text.removeprefix("# original\n").split("\n# rename")[0]
    wanted = tokenizer(original.replace("window", "recent")).input_ids
    ids = torch.tensor([tokenizer(prompt.text).input_ids + wanted])
    with torch.no_grad():
        predicted = target(ids).logits[0, :-1].argmax(-1)
    matches = (predicted == ids[0, 1:])[-len(wanted) :].float().mean()
    assert matches > 0.8


def test_the_draft_agrees_with_the_target(target, draft, tokenizer):
    ids = tokenizer(SNIPPET, return_tensors="pt").input_ids
    with torch.no_grad():
        agreement = (target(ids).logits.argmax(-1) == draft(ids).logits.argmax(-1)).float().mean()
    assert agreement > 0.55


def test_prompts_are_of_both_kinds_and_fit_the_context(target, tokenizer):
    prompts = demo.prompts()
    assert len({prompt.name for prompt in prompts}) == len(prompts)
    assert [prompt.kind for prompt in prompts] == ["edit"] * 4 + ["complete"] * 4
    for prompt in prompts:
        length = len(tokenizer(prompt.text).input_ids)
        assert 40 <= length <= 600
        assert prompt.text.endswith("\n") == (prompt.kind == "edit")
        assert length + prompt.max_new_tokens <= target.config.max_position_embeddings


def test_edit_prompts_ask_for_an_edit():
    for prompt in demo.prompts():
        if prompt.kind == "edit":
            assert prompt.text.startswith("# original\n")
            heading = prompt.text.splitlines()[-1]
            assert heading.startswith(("# rename `", "# remove the "))
            assert prompt.text.endswith("\n")
            for old in (word for word in heading.split("`")[1::4]):
                assert old in prompt.text.split("\n# rename")[0]


def test_generated_text_is_python_in_form(target, tokenizer):
    prompt = next(prompt for prompt in demo.prompts() if prompt.name == "class")
    ids = tokenizer(prompt.text, return_tensors="pt")
    output = target.generate(**ids, max_new_tokens=96, do_sample=False)
    lines = tokenizer.decode(output[0, ids.input_ids.shape[1] :]).splitlines()
    lines = [line for line in lines if line.strip()]
    assert len(lines) > 3
    assert sum((len(line) - len(line.lstrip())) % 4 == 0 for line in lines) > 0.7 * len(lines)
    assert any(word in line for line in lines for word in ("self.", "return", "def ", "if "))


def test_the_draft_models_tokenizer_is_known_to_be_the_targets(monkeypatch):
    said = []
    monkeypatch.setattr(vocabularies.logger, "warning_once", said.append)
    load_speculator(demo.load_target(), "draft_model", model=demo.drafter_path("draft_model"))
    assert said == []
