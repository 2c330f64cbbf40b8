import itertools
import json

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import AutoModelForCausalLM, AutoTokenizer, LlamaConfig, LlamaForCausalLM

import hf_specdec  # noqa: F401 - teaches generate() the speculative arguments
from hf_specdec.candidate_generators.dflash.recipe import DFlashRecipe
from hf_specdec.candidate_generators.eagle.recipe import Eagle1Recipe, Eagle3Recipe
from hf_specdec.candidate_generators.mtp.recipe import MtpRecipe
from hf_specdec.training import demo
from hf_specdec.training.data import Corpus, Mixture
from hf_specdec.training.heads import MedusaRecipe, MLPSpeculatorRecipe
from hf_specdec.training.recipe import Batch
from hf_specdec.training.text import Rows


SOURCE = '''
def total(prices, tax):
    """Return the sum of all prices and the tax on it, as it stands on the bill."""
    amount = 0
    for price in prices:
        # Every price counts.
        amount += price
    return amount * (1 + tax)


def largest(prices):
    best = None
    for price in prices:
        if best is None or price > best:
            best = price
    return best
'''
CORPUS = Corpus(train=(SOURCE * 4, SOURCE.replace("price", "weight")), validation=(SOURCE.replace("price", "cost"),))
SIZES = {"hidden_size": 16, "intermediate_size": 16, "num_attention_heads": 2, "num_key_value_heads": 1}


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    recipe = demo.DemoRecipe(
        vocab_size=400,
        target=SIZES | {"num_hidden_layers": 2},
        draft=SIZES | {"num_hidden_layers": 1},
        target_steps=4,
        refine_steps=2,
        draft_steps=3,
        distill_steps=3,
        medusa=MedusaRecipe(num_heads=2),
        mlp_speculator=MLPSpeculatorRecipe(n_predict=2, inner_dim=8),
        eagle=Eagle1Recipe(ttt_steps=2, intermediate_size=8),
        eagle3=Eagle3Recipe(ttt_steps=2, own_head=False, aux_layer_ids=(1, 2)),
        medusa_steps=2,
        mlp_speculator_steps=2,
        eagle_steps=2,
        eagle3_steps=2,
        dflash=DFlashRecipe(block_size=4, num_layers=1, target_layer_ids=(0,)),
        dflash_steps=2,
        mtp=MtpRecipe(ttt_steps=2, intermediate_size=8),
        mtp_steps=2,
        copying=Mixture({16: 1.0}, tokens_per_batch=32, repeat_share=1.0),
        code=Mixture({32: 1.0}, tokens_per_batch=64, edit_share=0.4),
        refining=Mixture({32: 1.0}, tokens_per_batch=64),
        target_copying_steps=2,
        draft_copying_steps=1,
        generated_rows=8,
        generated_length=120,
        generated_tokens=24,
        mlp_speculator_text_rows=3,
        generated_share=0.5,
        heads_rows=4,
        eagle_rows=4,
        checkpoint_every=2,
    )
    training = demo.DemoTraining(recipe, tmp_path_factory.mktemp("demo"), CORPUS)
    training.train_target()
    training.refine_target()
    training.train_draft()
    training.distill()
    training.train_medusa()
    training.train_mlp_speculator()
    training.train_eagle()
    training.train_eagle3()
    training.train_dflash()
    training.train_mtp()
    return training


def test_the_folders_are_ordinary_checkpoints(trained):
    tokenizer = AutoTokenizer.from_pretrained(trained.output / "target")
    target = AutoModelForCausalLM.from_pretrained(trained.output / "target")
    draft = AutoModelForCausalLM.from_pretrained(trained.output / "draft")
    assert target.dtype == draft.dtype == torch.bfloat16
    assert target.config.vocab_size == draft.config.vocab_size == len(tokenizer)
    assert target.generation_config.eos_token_id == tokenizer.eos_token_id
    assert tokenizer.decode(tokenizer(SOURCE).input_ids) == SOURCE
    assert "blockwise" not in (trained.output / "target" / "config.json").read_text()
    assert not (trained.output / "draft" / "tokenizer.json").exists()


def test_the_evaluation_covers_both_models(trained):
    prompts = trained.held_out_prompts(count=2, max_tokens=400)
    assert [len(found) for found in prompts.values()] == [2, 2]
    figures = trained.evaluate(prompts_per_kind=1)
    assert set(figures) == {
        "target_loss",
        "target_bits_per_byte",
        "draft_loss",
        "draft_bits_per_byte",
        "complete_acceptance_length",
        "edit_acceptance_length",
    }
    assert 1 <= figures["edit_acceptance_length"] <= 5
    # Barely trained models are near the uniform distribution over 400 tokens: log(400) = 5.99.
    assert 4.5 < figures["target_loss"] < 6.5


def test_training_starts_with_copying(trained):
    shapes = [tuple(batch.shape) for batch in itertools.islice(trained.batches(1, copying_steps=2), 4)]
    assert shapes == [(2, 16), (2, 16), (2, 32), (2, 32)]


def test_the_stages_change_the_checkpoints(trained, tmp_path):
    training = demo.DemoTraining(trained.recipe, tmp_path, CORPUS)
    target, draft = training.train_target(), training.train_draft()
    refined, distilled = (demo.load_checkpoint(trained.output / name) for name in ("target", "draft"))
    for before, after in ((target, refined), (draft, distilled)):
        assert not torch.equal(before.model.norm.weight, after.model.norm.weight)
        assert not torch.equal(before.lm_head.weight.bfloat16().float(), after.lm_head.weight)


def test_training_is_repeatable(trained, tmp_path):
    training = demo.DemoTraining(trained.recipe, tmp_path, CORPUS)
    training.train_target()
    training.refine_target()
    first, second = (demo.load_checkpoint(folder / "target") for folder in (trained.output, tmp_path))
    for parameter, other in zip(first.parameters(), second.parameters()):
        assert torch.equal(parameter, other)


def test_the_target_continues_prompts_of_every_kind(trained):
    prompts = trained.prompts(40, 120)
    assert all(0 < len(prompt) <= 72 for prompt in prompts)
    texts = [trained.tokenizer.decode(prompt) for prompt in prompts]
    assert 0 < sum(text.startswith("# original\n") for text in texts) < 40
    rows = Rows(*torch.load(trained.output / "continuations.pt"))
    assert rows.tokens.shape == (8, 120)
    for prompt, tokens, counted in zip(sorted(trained.prompts(8, 120), key=len), rows.tokens, rows.counted):
        assert tokens[: len(prompt)].tolist() == prompt
        assert not counted[: len(prompt)].any()
        assert counted[len(prompt)]
        assert counted.sum() <= 24


def test_batches_mix_sources_and_continuations(trained):
    generated = Rows(torch.full((2, 32), 399), torch.ones(2, 32, dtype=torch.bool))
    batches = demo.mixed_batches(trained.rows(3), generated, trained.recipe)
    tokens = [Batch.of(next(batches)).tokens for _ in range(40)]
    assert 8 < sum(bool((batch == 399).all()) for batch in tokens) < 32


@pytest.mark.parametrize("method", demo.HEADS)
def test_the_heads_draft_for_the_target(trained, method):
    target = AutoModelForCausalLM.from_pretrained(trained.output / "target").eval()
    inputs = trained.tokenizer("def total(", return_tensors="pt").input_ids
    plain = target.generate(inputs, do_sample=False, max_new_tokens=20)
    drafted = target.generate(
        inputs, do_sample=False, max_new_tokens=20, spec_method=method, spec_model=str(trained.output / method)
    )
    assert torch.equal(plain, drafted)


def test_acceptance_length_of_extreme_drafts():
    torch.manual_seed(0)
    config = LlamaConfig(vocab_size=20, num_hidden_layers=1, initializer_range=0.5, eos_token_id=None, **SIZES)
    target = LlamaForCausalLM(config).eval()
    constant = LlamaForCausalLM(config).eval()
    constant.load_state_dict(target.state_dict())
    prompt = torch.tensor([[1, 2, 3]])
    assert demo.acceptance_length(target, target, prompt, k=3, max_new_tokens=17) == 4.0
    constant.lm_head.weight.data.neg_()  # drafts what the target finds least likely
    assert demo.acceptance_length(target, constant, prompt, k=3, max_new_tokens=17) == 1.0


def test_validation_loss_of_a_uniform_model(trained):
    config = LlamaConfig(vocab_size=256, num_hidden_layers=1, **SIZES)
    model = LlamaForCausalLM(config).eval()
    model.lm_head.weight.data.zero_()
    loss, bits = demo.validation_loss(model, lambda text: list(text.encode()), ["x" * 99], 0, length=50)
    assert loss == pytest.approx(8 * 0.693147, abs=1e-4)
    assert bits == pytest.approx(8 * 98 / 99, abs=1e-3)  # the first token of each of the two rows is given


def test_edit_prompts_end_at_the_last_heading():
    document = "# original\nx = 1\n\n# copy\nx = 1\n\n# rename `x` to `y`\ny = 1\n"
    assert demo.edit_prompt(document) == "# original\nx = 1\n\n# copy\nx = 1\n\n# rename `x` to `y`\n"


def test_the_tokenizer_gives_every_text_back():
    tokenizer = demo.train_tokenizer(CORPUS.train, 400)
    encode = demo.plain_encode(tokenizer)

    @given(st.text())
    @settings(max_examples=200)
    def check(text):
        assert tokenizer.decode(encode(text)) == text

    check()


def test_the_vocabulary_must_hold_all_bytes():
    with pytest.raises(ValueError, match="at least 257"):
        demo.train_tokenizer(CORPUS.train, 200)


def test_the_command_line_runs_single_stages(tmp_path):
    sources = tmp_path / "sources"
    sources.mkdir()
    (sources / "a.py").write_text(SOURCE * 60)
    arguments = [
        "--output",
        str(tmp_path / "out"),
        "--sources",
        str(sources),
        "--stages",
        "draft",
        "--draft-steps",
        "1",
    ]
    assert demo.main(arguments) == {}
    config = json.loads((tmp_path / "out" / "draft" / "config.json").read_text())
    assert config["hidden_size"] == demo.DemoRecipe().draft["hidden_size"]
    assert not (tmp_path / "out" / "target").exists()
