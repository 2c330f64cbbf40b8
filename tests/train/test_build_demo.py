"""The scripts that build the embedded demo: their text, and every stage of a build of tiny models."""

import ast
import itertools
from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import AutoModelForCausalLM, AutoTokenizer, LlamaConfig, LlamaForCausalLM

import hf_specdec  # noqa: F401 - teaches generate() the speculative arguments
from hf_specdec.candidate_generators.dflash.recipe import DFlashRecipe
from hf_specdec.candidate_generators.eagle.recipe import Eagle1Recipe, Eagle3Recipe
from hf_specdec.candidate_generators.medusa.recipe import MedusaRecipe
from hf_specdec.candidate_generators.mlp_speculator.recipe import MLPSpeculatorRecipe
from hf_specdec.candidate_generators.mtp.recipe import MtpRecipe
from hf_specdec.training.reading import Rows
from tools.build_demo import build
from tools.build_demo.attention import blockwise_causal
from tools.build_demo.data import (
    Corpus,
    EditDocuments,
    Mixture,
    TokenRows,
    collect_snippets,
    python_sources,
    remove_comments,
    rename,
)


SOURCE = '''
import os

class Greeter:
    """Say hello to everyone who comes, as loud as it was asked for."""

    def greet(self, name, loud=False):
        """Return a greeting.

        It is for `name`.
        """
        # A greeting is short.
        words = ["hello", name, os.linesep]
        message = " ".join(words)
        return message.upper() if loud else message


def total(prices, tax):
    """Return the sum of all prices and the tax on it, as it stands on the bill."""
    amount = 0
    for price in prices:
        amount += price
    return amount * (1 + tax)
'''
CORPUS = Corpus(train=(SOURCE * 4, SOURCE.replace("price", "weight")), validation=(SOURCE.replace("price", "cost"),))
SIZES = {"hidden_size": 16, "intermediate_size": 16, "num_attention_heads": 2, "num_key_value_heads": 1}
RECIPES = {
    "medusa": MedusaRecipe(num_heads=2),
    "mlp_speculator": MLPSpeculatorRecipe(n_predict=2, inner_dim=8),
    "eagle": Eagle1Recipe(ttt_steps=2, intermediate_size=8),
    "eagle3": Eagle3Recipe(ttt_steps=2, own_head=False, aux_layer_ids=(1, 2)),
    "dflash": DFlashRecipe(block_size=4, num_layers=1, target_layer_ids=(0,)),
    "mtp": MtpRecipe(ttt_steps=2, intermediate_size=8),
}
STAGES = {
    name: replace(
        stage,
        steps=3,
        copying_steps=2,
        recipe=RECIPES.get(name),
        batch_size=4,
        text_rows=3 if stage.text_rows else 0,
    )
    for name, stage in build.STAGES.items()
}
PLAN = build.Plan(
    vocab_size=400,
    target=SIZES | {"num_hidden_layers": 2},
    draft=SIZES | {"num_hidden_layers": 1},
    stages=STAGES,
    copying=Mixture({16: 1.0}, tokens_per_batch=32, repeat_share=1.0),
    code=Mixture({32: 1.0}, tokens_per_batch=64, edit_share=0.4),
    refining=Mixture({32: 1.0}, tokens_per_batch=64),
    num_prompts=8,
    row_length=120,
    new_tokens=24,
    continued_share=0.5,
)


def char_encode(text):
    return [1 + ord(character) % 255 for character in text]


@pytest.fixture
def snippets():
    return collect_snippets([SOURCE])


@pytest.fixture
def rows(snippets):
    return TokenRows([SOURCE] * 3, EditDocuments(snippets, 5), char_encode, 0)


def test_sources_are_sorted_and_split(tmp_path):
    for name in ("b.py", "a.py", "pkg/held.py", "test/c.py", "_sysconfigdata__linux.py", "pkg/site-packages/d.py"):
        path = tmp_path / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(f"# {name}\n")
    (tmp_path / "latin.py").write_bytes(b"# \xe9\n")
    (tmp_path / "empty.py").write_text("\n")
    assert python_sources(tmp_path, frozenset({"pkg/held.py"})) == Corpus(
        ("# a.py\n", "# b.py\n"), ("# pkg/held.py\n",)
    )


def test_snippets_are_dedented_definitions(snippets):
    texts = [snippet.text for snippet in snippets]
    assert [text.split("(")[0].split(":")[0] for text in texts] == ["def total", "def greet", "class Greeter"]
    assert "\n    words = " in snippets[1].text
    assert snippets[1].names == ("greet", "loud", "message", "name", "words")
    assert collect_snippets(["def broken(:\n" + "    pass\n" * 40]) == []


def split_document(document):
    """Parts of a document: alternating headings and codes."""
    parts, heading = [], None
    for line in document.splitlines(keepends=True):
        if line.startswith("# "):
            heading = line[2:].strip()
            parts.append([heading, ""])
        elif heading is not None:
            parts[-1][1] += line
    return [(heading, code.rstrip("\n") + "\n") for heading, code in parts]


def test_every_edit_does_what_its_heading_says(snippets):
    documents = EditDocuments(snippets, seed=3)
    seen = set()
    for _ in range(300):
        parts = split_document(documents.draw(3000))
        assert parts[0][0] == "original"
        for (_, before), (heading, after) in itertools.pairwise(parts):
            seen.add(heading.split()[0] + heading.split()[-1] * heading.startswith("remove"))
            ast.parse(after)
            if heading == "copy":
                assert after == before
            elif heading == "remove the comments":
                assert after == remove_comments(before)
            elif heading == "remove the docstring":
                assert ast.get_docstring(ast.parse(before).body[0])
                assert ast.get_docstring(ast.parse(after).body[0]) is None
            else:
                for step in heading.removeprefix("rename ").split(" and "):
                    old, new = (name.strip("`") for name in step.split(" to "))
                    before = rename(before, old, new)
                assert after == before
    assert seen == {"copy", "rename", "removecomments", "removedocstring"}


def test_rows_of_each_kind(rows):
    stream = rows.stream.tolist()
    row = rows.row(64, Mixture({64: 1.0})).tolist()
    assert any(stream[start : start + 64] == row for start in range(len(stream)))
    row = rows.row(4000, Mixture({64: 1.0}, edit_share=1.0)).tolist()
    heading = char_encode("# original\n")
    ends = [index for index, token in enumerate(row[: -len(heading)]) if token == 0]
    assert all(row[start : start + len(heading)] == heading for start in [0] + [end + 1 for end in ends])
    row = rows.row(96, Mixture({64: 1.0}, repeat_share=1.0)).tolist()
    assert any(row[period:] == row[:-period] for period in range(1, 49))


def test_the_tokenizer_gives_every_text_back():
    tokenizer = build.train_tokenizer(CORPUS.train, 400)
    encode = build.plain_encode(tokenizer)

    @given(st.text())
    @settings(max_examples=200)
    def check(text):
        assert tokenizer.decode(encode(text)) == text

    check()


def test_edit_prompts_end_at_the_last_heading():
    document = "# original\nx = 1\n\n# copy\nx = 1\n\n# rename `x` to `y`\ny = 1\n"
    assert build.edit_prompt(document) == "# original\nx = 1\n\n# copy\nx = 1\n\n# rename `x` to `y`\n"


@pytest.fixture(scope="module")
def built(tmp_path_factory):
    made = build.Build(PLAN, tmp_path_factory.mktemp("demo"), CORPUS)
    for name in ("target", "refine", "draft", "continue", "distill", *build.HEADS):
        made.run(name)
    return made


def test_the_folders_are_ordinary_checkpoints(built):
    tokenizer = AutoTokenizer.from_pretrained(built.output / "target")
    target = AutoModelForCausalLM.from_pretrained(built.output / "target")
    draft = AutoModelForCausalLM.from_pretrained(built.output / "draft")
    assert target.dtype == draft.dtype == torch.bfloat16
    assert target.config.vocab_size == draft.config.vocab_size == len(tokenizer)
    assert target.generation_config.eos_token_id == tokenizer.eos_token_id
    assert tokenizer.decode(tokenizer(SOURCE).input_ids) == SOURCE
    assert "blockwise" not in (built.output / "target" / "config.json").read_text()
    tokenizers = [(built.output / name / "tokenizer.json").read_text() for name in ("target", "draft")]
    assert tokenizers[0] == tokenizers[1]


def test_a_build_is_repeatable(built, tmp_path):
    again = build.Build(PLAN, tmp_path, CORPUS)
    again.run("target")
    before = again.load("target").state_dict()
    again.run("refine")
    after, first = again.load("target").state_dict(), built.load("target").state_dict()
    assert all(torch.equal(after[name], first[name]) for name in first)
    assert not torch.equal(after["lm_head.weight"], before["lm_head.weight"])


def test_the_target_continues_prompts_of_every_kind(built):
    prompts = built.prompts(40, 120)
    assert all(0 < len(prompt) <= 72 for prompt in prompts)
    texts = [built.tokenizer.decode(prompt) for prompt in prompts]
    assert 0 < sum(text.startswith("# original\n") for text in texts) < 40
    rows = Rows(*torch.load(built.output / build.CONTINUATIONS))
    assert rows.tokens.shape == (8, 120)
    for prompt, tokens, counted in zip(sorted(built.prompts(8, 120), key=len), rows.tokens, rows.counted):
        assert tokens[: len(prompt)].tolist() == prompt
        assert not counted[: len(prompt)].any()
        assert 0 < counted.sum() <= 24


def test_batches_of_the_stages(built):
    shapes = [tuple(batch.shape) for batch in itertools.islice(built.first_batches(STAGES["target"]), 4)]
    assert shapes == [(2, 16), (2, 16), (2, 32), (2, 32)]
    continued = Rows(torch.full((2, 32), 399), torch.ones(2, 32, dtype=torch.bool))
    batches = built.distillation_batches(built.rows(3), continued)
    tokens = [Rows.of(next(batches)).tokens for _ in range(40)]
    assert 8 < sum(bool((batch == 399).all()) for batch in tokens) < 32


@pytest.mark.parametrize("method", build.HEADS)
def test_the_heads_draft_for_the_target(built, method):
    target = AutoModelForCausalLM.from_pretrained(built.output / "target").eval()
    inputs = built.tokenizer("def total(", return_tensors="pt").input_ids
    greedy = {"do_sample": False, "max_new_tokens": 20}
    drafted = target.generate(inputs, **greedy, spec_method=method, spec_model=str(built.output / method))
    assert torch.equal(drafted, target.generate(inputs, **greedy))


def test_the_evaluation_covers_both_models(built):
    figures = built.evaluate(prompts_per_kind=1)
    assert 1 <= figures["edit_acceptance_length"] <= 5
    # Barely trained models are near the uniform distribution over 400 tokens: log(400) = 5.99.
    assert 4.5 < figures["target_loss"] < 6.5


def test_acceptance_length_of_extreme_drafts():
    torch.manual_seed(0)
    config = LlamaConfig(vocab_size=20, num_hidden_layers=1, initializer_range=0.5, eos_token_id=None, **SIZES)
    target = LlamaForCausalLM(config).eval()
    opposite = LlamaForCausalLM(config).eval()
    opposite.load_state_dict(target.state_dict())
    prompt = torch.tensor([[1, 2, 3]])
    assert build.acceptance_length(target, target, prompt, k=3, max_new_tokens=17) == 4.0
    opposite.lm_head.weight.data.neg_()  # drafts what the target finds least likely
    assert build.acceptance_length(target, opposite, prompt, k=3, max_new_tokens=17) == 1.0


def test_validation_loss_of_a_uniform_model():
    config = LlamaConfig(vocab_size=256, num_hidden_layers=1, **SIZES)
    model = LlamaForCausalLM(config).eval()
    model.lm_head.weight.data.zero_()
    loss, bits = build.validation_loss(model, lambda text: list(text.encode()), ["x" * 99], 0, length=50)
    assert loss == pytest.approx(8 * 0.693147, abs=1e-4)
    assert bits == pytest.approx(8 * 98 / 99, abs=1e-3)  # the first token of each of the two rows is given


def test_the_command_line_runs_single_stages(tmp_path):
    (tmp_path / "a.py").write_text(SOURCE * 60)
    arguments = ["--sources", tmp_path, "--output", tmp_path / "out", "--stages", "draft", "--draft-steps", 1]
    build.main(list(map(str, arguments)))
    assert (tmp_path / "out" / "draft" / "model.safetensors").is_file()
    assert not (tmp_path / "out" / "target").exists()


@pytest.mark.parametrize("length", [1, 7, 16, 33])
def test_blockwise_attention_equals_causal_attention(length):
    generator = torch.Generator().manual_seed(length)
    query = torch.randn(2, 6, length, 8, generator=generator, requires_grad=True)
    key = torch.randn(2, 3, length, 8, generator=generator, requires_grad=True)
    value = torch.randn(2, 3, length, 8, generator=generator, requires_grad=True)
    upstream = torch.randn(2, length, 6, 8, generator=generator)
    output, weights = blockwise_causal(None, query, key, value, None, block=16)
    expected = F.scaled_dot_product_attention(query, key, value, is_causal=True, enable_gqa=True).transpose(1, 2)
    assert weights is None
    torch.testing.assert_close(output, expected, atol=1e-5, rtol=1e-5)
    gradients = torch.autograd.grad(output, (query, key, value), upstream)
    expected_gradients = torch.autograd.grad(expected, (query, key, value), upstream)
    for gradient, expected_gradient in zip(gradients, expected_gradients):
        torch.testing.assert_close(gradient, expected_gradient, atol=1e-5, rtol=1e-4)


def test_blockwise_attention_refuses_masks():
    states = torch.zeros(1, 2, 4, 8)
    with pytest.raises(ValueError, match="no mask"):
        blockwise_causal(None, states, states, states, torch.zeros(1, 1, 4, 4))
