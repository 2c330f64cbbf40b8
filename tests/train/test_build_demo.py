"""The scripts that build the embedded demo: every stage of a build of tiny models."""

from dataclasses import replace

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from hf_specdec.method import trainings
from tests.helpers.levels import full
from tools.build_demo import build
from tools.build_demo.data import Mixture, python_sources


SOURCE = '''
def total(prices, tax):
    """Return the sum of all prices and the tax on it, as it stands on the bill."""
    amount = 0
    # A bill has many prices.
    for price in prices:
        amount += price
    return amount * (1 + tax)
'''
SIZES = {"hidden_size": 16, "intermediate_size": 16, "num_attention_heads": 2, "num_key_value_heads": 1}
RECIPES = {
    "medusa": {"num_heads": 2},
    "mlp_speculator": {"n_predict": 2, "inner_dim": 8},
    "eagle": {"ttt_steps": 2, "intermediate_size": 8},
    "eagle3": {"ttt_steps": 2, "own_head": False, "aux_layer_ids": (1, 2)},
    "dflash": {"block_size": 4, "num_layers": 1, "target_layer_ids": (0,)},
    "mtp": {"ttt_steps": 2, "intermediate_size": 8},
}
SHORT = {"steps": 2, "copying_steps": 1, "batch_size": 4}


def shortened(name, stage):
    recipe = trainings()[name].recipe_class(**RECIPES[name]) if name in RECIPES else None
    return replace(stage, **SHORT, recipe=recipe, text_rows=3 if stage.text_rows else 0)


PLAN = build.Plan(
    vocab_size=400,
    target=SIZES | {"num_hidden_layers": 2},
    draft=SIZES | {"num_hidden_layers": 1},
    stages={name: shortened(name, stage) for name, stage in build.STAGES.items()},
    copying=Mixture({16: 1.0}, tokens_per_batch=32, repeat_share=1.0),
    code=Mixture({32: 1.0}, tokens_per_batch=64, edit_share=0.4),
    refining=Mixture({32: 1.0}, tokens_per_batch=64),
    num_prompts=8,
    row_length=120,
    new_tokens=24,
    continued_share=0.5,
)


@full
def test_a_build_gives_a_target_and_drafts_of_every_method(tmp_path):
    for name, price in (("a.py", "price"), ("b.py", "weight"), ("held.py", "cost")):
        (tmp_path / name).write_text(SOURCE.replace("price", price) * 8)
    made = build.Build(PLAN, tmp_path / "out", python_sources(tmp_path, frozenset({"held.py"})))
    for name in ("target", "refine", "draft", "continue", "distill", *build.HEADS):
        made.run(name)
    tokenizer = AutoTokenizer.from_pretrained(made.output / "target")
    target, draft = (AutoModelForCausalLM.from_pretrained(made.output / name) for name in ("target", "draft"))
    assert target.dtype == draft.dtype == torch.bfloat16
    assert target.config.vocab_size == draft.config.vocab_size == len(tokenizer)
    assert tokenizer.decode(tokenizer(SOURCE).input_ids) == SOURCE
    assert "blockwise" not in (made.output / "target" / "config.json").read_text()
    # Barely trained models are near the uniform distribution over 400 tokens: log(400) = 5.99.
    assert 4.5 < made.evaluate(prompts_per_kind=1)["target_loss"] < 6.5
    call = {"inputs": tokenizer("def total(", return_tensors="pt").input_ids, "do_sample": False, "max_new_tokens": 12}
    plain = target.generate(**call)
    for method in build.HEADS:
        drafted = target.generate(**call, spec_method=method, spec_model=str(made.output / method))
        assert torch.equal(drafted, plain), method
