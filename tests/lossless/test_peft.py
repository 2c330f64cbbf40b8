"""Adapters of PEFT: those that change weights, and those that put virtual tokens in front of the prompt."""

from __future__ import annotations

import copy
import inspect

import pytest
import torch
from packaging.version import Version
from transformers import LlamaForCausalLM
from transformers.integrations.peft import MIN_PEFT_VERSION

from hf_specdec import SpecConfigError, UnsupportedModelError, demo, generate_many
from hf_specdec.cli.target import Target
from hf_specdec.many import engine
from hf_specdec.target.parts.recurrent import mixers
from tests.helpers.architectures import tiny_model
from tests.helpers.caches import CACHE
from tests.helpers.families import assert_drafts_change_nothing
from tests.helpers.levels import full, in_full
from tests.helpers.methods import demo_target
from tests.helpers.models import nothing_runs, prompts, scripted_for, tiny_gpt2, tiny_llama, tiny_mistral


peft = pytest.importorskip("peft")

pytestmark = [
    # The library's own, about torch and about arguments that it drops.
    pytest.mark.filterwarnings("ignore:.*:FutureWarning"),
    pytest.mark.filterwarnings("ignore:Position ids are not supported"),
    pytest.mark.usefixtures("unchecked"),
]

SETTINGS = {"do_sample": False, "max_new_tokens": 20}
TREE = (-1, -1, 0, 0, 1, 2, 5)
TASK = {"task_type": "CAUSAL_LM"}
LORA = {**TASK, "r": 4, "init_lora_weights": False}

VIRTUAL = {
    "prompt tuning": lambda: peft.PromptTuningConfig(**TASK, num_virtual_tokens=5),
    "p-tuning": lambda: peft.PromptEncoderConfig(**TASK, num_virtual_tokens=5, encoder_hidden_size=16),
    "prefix tuning": lambda: peft.PrefixTuningConfig(**TASK, num_virtual_tokens=5),
}
CHANGED = {"lora": lambda: peft.LoraConfig(**LORA), "ia3": lambda: peft.IA3Config(**TASK, init_ia3_weights=False)}

# Learned positions, those that the model counts from its mask, a bias by distance, and windows.
BASES = {
    "llama": tiny_llama,
    "mistral": tiny_mistral,
    "gpt2": tiny_gpt2,
    "opt": lambda: tiny_model("opt", vocab_size=64),
    "bloom": lambda: tiny_model("bloom", vocab_size=64),
}

# PEFT 0.21 looks for the cache under the name that it had before transformers 5.24, and without it puts virtual tokens
# in front of every token.
_KNOWS_CACHE = f'"{CACHE}"' in inspect.getsource(peft.PeftModelForCausalLM.prepare_inputs_for_generation)


def adapted(base: str, adapter: str):
    torch.manual_seed(0)
    model = peft.get_peft_model(BASES[base](), {**VIRTUAL, **CHANGED}[adapter]()).eval()
    for part in getattr(model, "prompt_encoder", {}).values():
        for weight in part.parameters():
            weight.data.normal_(0, 2.0 if adapter == "prefix tuning" else 0.5)
    return model


def check_equals_plain(model, inputs, trees=(None, TREE)) -> list[list[int]]:
    return assert_drafts_change_nothing(model, inputs, trees, others=["ngram"], **SETTINGS).tolist()


# Virtual tokens


# Each base with one kind, and each kind with one base.
PAIRS = [(base, list(VIRTUAL)[number % 3]) for number, base in enumerate(BASES)]


@full
@pytest.mark.skipif(not _KNOWS_CACHE, reason="plain generation with virtual tokens needs a newer PEFT")
@pytest.mark.parametrize(("base", "adapter"), PAIRS)
def test_virtual_tokens(base, adapter):
    model = adapted(base, adapter)
    for batch_size in (1, 3):
        # In front of padding they would be hidden in the middle.
        inputs = prompts(batch_size, length=9, padding=False)
        plain = check_equals_plain(model, inputs, trees=(None,) if base == "bloom" else (None, TREE))
        assert plain != model.get_base_model().generate(**inputs, **SETTINGS).tolist()
    if base == "llama":
        # A draft model reads the tokens alone.
        output = model.generate(**inputs, **SETTINGS, spec_model=tiny_llama(seed=1))
        assert output.tolist() == plain


@full
@pytest.mark.skipif(_KNOWS_CACHE, reason="this PEFT knows the cache")
def test_virtual_tokens_that_plain_generation_repeats_are_refused():
    for adapter in ("prompt tuning", "p-tuning"):
        with pytest.raises(UnsupportedModelError, match="prepares embeddings for the tokens after its prompts"):
            adapted("llama", adapter).generate(**prompts(1, length=9), **SETTINGS, spec_method="ngram")


# Changed weights


@pytest.mark.parametrize("adapter", ["lora", *in_full("ia3")])
def test_changed_weights(adapter):
    model, inputs = adapted("llama", adapter), prompts(3)
    plain = check_equals_plain(model, inputs)
    with model.disable_adapter():
        assert check_equals_plain(model, inputs) != plain


def several_adapters():
    """A model with the adapters "one" and "two", of which "one" is active."""
    torch.manual_seed(0)
    model = peft.get_peft_model(tiny_llama(), peft.LoraConfig(**LORA), adapter_name="one")
    model.add_adapter("two", peft.LoraConfig(**{**LORA, "r": 8}))
    return model.eval()


@full
def test_adapters_that_are_set_merged_and_added_between_calls():
    model, inputs, texts = several_adapters(), prompts(3), []
    for name in ("one", "two", "one"):
        model.set_adapter(name)
        texts.append(check_equals_plain(model, inputs))
    assert texts[0] == texts[2] != texts[1]
    for change in (model.merge_adapter, model.unmerge_adapter):
        change()
        assert check_equals_plain(model, inputs) == texts[0]
    model.base_model.set_adapter(["one", "two"])
    assert check_equals_plain(model, inputs) not in texts
    if Version(peft.__version__) >= Version(MIN_PEFT_VERSION):
        model = tiny_llama()
        before = model.generate(**inputs, **SETTINGS)
        model.add_adapter(peft.LoraConfig(r=4, init_lora_weights=False))
        assert check_equals_plain(model, inputs) != before.tolist()


# An adapter for each row

MIXED = ["two", "__base__", "one", "two"]


def test_adapters_by_row():
    """Rows end one after the other, and each goes on with its own adapter."""
    model, inputs = several_adapters(), prompts(4)
    names = tuple(MIXED)
    plain = model.generate(**inputs, **SETTINGS, adapter_names=MIXED)
    # Every row ends at its own place.
    ends = {"eos_token_id": plain[:, -12].tolist() + plain[:2, -4].tolist(), "pad_token_id": 0}
    for settings in (SETTINGS, {**SETTINGS, **ends}):
        plain = model.generate(**inputs, **settings, adapter_names=names)
        assert torch.equal(
            assert_drafts_change_nothing(model, inputs, (None, TREE), **settings, adapter_names=MIXED), plain
        )
        for method in ("early_exit", "sparse_kv"):
            # A target that drafts for itself.
            call = {**inputs, **settings, "adapter_names": names, "return_dict_in_generate": True}
            output = model.generate(**call, spec_method=method)
            assert output.sequences.tolist() == plain.tolist()
            # It sees the whole text; only what comes after an end is not accepted.
            assert method == "early_exit" or output.speculative.acceptance_rate > 0.8
    assert names == tuple(MIXED)
    for row, name in enumerate(names):
        one = {key: values[row : row + 1] for key, values in inputs.items()}
        text = model.generate(**one, **settings, adapter_names=[name], spec_method="ngram")
        assert text[0].tolist() == plain[row, : text.shape[1]].tolist()
    call = {**inputs, **SETTINGS, "adapter_names": MIXED, "return_dict_in_generate": True, "output_scores": True}
    plain = model.generate(**call)
    output = model.generate(**call, assistant=scripted_for(plain.sequences, inputs, tree=TREE))
    for ours, theirs in zip(output.scores, plain.scores, strict=True):
        torch.testing.assert_close(ours, theirs, atol=1e-4, rtol=1e-4)


@full
@pytest.mark.parametrize("name", ["qwen3_next", "zaya"])
def test_adapters_by_row_in_recurrent_layers(name):
    """The nodes of a tree are read at once, or by calls whose batches are nodes of one depth."""
    base = tiny_model(name, vocab_size=64)
    parts = next(iter(mixers(base))).named_modules()
    linear = {path.split(".")[-1] for path, part in parts if type(part) is torch.nn.Linear}
    torch.manual_seed(0)
    how = {**LORA, "target_modules": sorted(linear)}
    model = peft.get_peft_model(base, peft.LoraConfig(**how), adapter_name="one")
    model.add_adapter("two", peft.LoraConfig(**how))
    model, inputs, names = model.eval(), prompts(3), MIXED[:3]
    plain = assert_drafts_change_nothing(model, inputs, (None, TREE), **SETTINGS, adapter_names=names)
    assert not torch.equal(plain, model.generate(**inputs, **SETTINGS, adapter_names=names[::-1]))


@pytest.mark.parametrize(
    ("method", "layer"), [("eagle3", "lm_head"), *in_full(("medusa", "lm_head"), ("dflash", "embed_tokens"))]
)
def test_heads_that_share_adapted_layers_with_adapters_by_row(method, layer):
    config = peft.LoraConfig(**LORA, target_modules=["q_proj", layer])
    model = peft.get_peft_model(copy.deepcopy(demo_target()), config, adapter_name="one").eval()
    model.add_adapter("two", config)
    inputs = {"input_ids": torch.tensor([[5, 6, 7, 8]] * 4), "attention_mask": torch.ones(4, 4, dtype=torch.long)}
    call = {"max_new_tokens": 12, "do_sample": False, "adapter_names": MIXED, "pad_token_id": 0}
    call["eos_token_id"] = model.generate(**inputs, **call, eos_token_id=None)[0, 7].item()
    plain = model.generate(**inputs, **call)
    text = model.generate(**inputs, **call, spec_model=str(demo.drafter_path(method)), num_speculative_tokens=3)
    assert text.tolist() == plain.tolist()


@pytest.mark.parametrize("places", [3, *in_full(1)])
def test_adapters_of_requests_that_join(places, monkeypatch):
    """Requests come and go, long prompts are read in chunks while others go on, and each has its own adapter."""
    monkeypatch.setattr(engine, "_CHUNK_SIZE", 4)
    model, names = several_adapters(), [*MIXED, "one", "two"]
    base = model.get_base_model()
    ids = [prompts(1, length=3 + 2 * number, seed=number)["input_ids"] for number in range(len(names))]
    settings = [{"max_new_tokens": 4 + 5 * (number % 3), "do_sample": False} for number in range(len(names))]
    plain = [model.generate(one, adapter_names=[name], **own) for one, name, own in zip(ids, names, settings)]
    expected = [text[0, one.shape[1] :].tolist() for text, one in zip(plain, ids)]
    assert expected[0] != model.generate(ids[0], adapter_names=["one"], **settings[0])[0, ids[0].shape[1] :].tolist()
    requests = [{"input_ids": one, **own} for one, own in zip(ids, settings)]
    for request, name in zip(requests, names):
        if name != "__base__":
            request["adapter_names"] = [name]
    drafts = {"spec_method": "early_exit" if places > 1 else "ngram", "adapter_names": ["__base__"]}
    results = generate_many(base, requests, places, in_order=True, **drafts)
    assert [(result.error, result.tokens) for result in results] == [(None, text) for text in expected]
    assert results.stats.num_draft_tokens > 0
    assert not any(module._forward_pre_hooks for module in model.modules())


@full
def test_adapters_of_a_batch_and_of_requests_that_cannot_be_honoured():
    model, inputs = several_adapters(), prompts(4, padding=False)
    plain = model.generate(**inputs, **SETTINGS, adapter_names=MIXED)[:, inputs["input_ids"].shape[1] :]
    call = {**SETTINGS, "spec_method": "ngram", "batch_size": 2}
    outputs = model.generate_batch(inputs["input_ids"].tolist(), adapter_names=MIXED, **call)
    assert [output.generated_tokens for output in outputs.values()] == plain.tolist()
    with pytest.raises(SpecConfigError, match="a name for each of the 4 prompts"):
        model.generate_batch(inputs["input_ids"].tolist(), adapter_names=MIXED[:2], **call)
    model.merge_adapter()
    for other, name, message in (
        (adapted("llama", "lora").get_base_model(), "other", "a list of one name, one of __base__, default"),
        (adapted("llama", "ia3").get_base_model(), "default", "layers of PEFT that cannot: Linear"),
        (model.get_base_model(), "one", "merged adapters"),
        (tiny_llama(), "one", "has no adapters"),
    ):
        with nothing_runs(other), pytest.raises(SpecConfigError, match=message):
            generate_many(other, [[1, 2]], **SETTINGS, adapter_names=[name])


@full
def test_commands_load_a_folder_with_an_adapter(tmp_path):
    """Its base is named in the adapter's file, and the folder has no config."""
    tiny_llama().save_pretrained(tmp_path / "base")
    base, folder = LlamaForCausalLM.from_pretrained(tmp_path / "base"), tmp_path / "adapter"
    peft.get_peft_model(base, peft.LoraConfig(r=4, target_modules=["q_proj"])).save_pretrained(folder)
    demo.load_tokenizer().save_pretrained(folder)
    model, _ = Target(str(folder)).load()
    assert type(model) is LlamaForCausalLM
    assert list(model.peft_config) == ["default"]
    for content in ("[]", "{}", '{"base_model_name_or_path": 3}', "[" * 100_000):
        (tmp_path / "adapter_config.json").write_text(content)
        with pytest.raises(SpecConfigError, match="adapter"):
            Target(str(tmp_path)).load()
