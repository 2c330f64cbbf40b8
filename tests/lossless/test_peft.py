"""Adapters of PEFT: those that change weights, and those that put virtual tokens in front of the prompt."""

from __future__ import annotations

import copy
import inspect

import pytest
import torch
from packaging.version import Version
from transformers import LlamaForCausalLM
from transformers.integrations.peft import MIN_PEFT_VERSION

from hf_specdec import SpecConfigError, UnsupportedModelError, demo, generate_many, load_speculator
from hf_specdec.cli.target import Place
from hf_specdec.decoding import check
from hf_specdec.decoding.recurrent import mixers
from hf_specdec.diagnosis.checks import network_findings
from hf_specdec.many import engine
from tests.helpers.architectures import tiny_model
from tests.helpers.caches import CACHE
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

ADAPTERS = {
    "prompt tuning": lambda: peft.PromptTuningConfig(**TASK, num_virtual_tokens=5),
    "p-tuning": lambda: peft.PromptEncoderConfig(**TASK, num_virtual_tokens=5, encoder_hidden_size=16),
    "prefix tuning": lambda: peft.PrefixTuningConfig(**TASK, num_virtual_tokens=5),
    "lora": lambda: peft.LoraConfig(**TASK, r=4, init_lora_weights=False),
    "ia3": lambda: peft.IA3Config(**TASK, init_ia3_weights=False),
}
VIRTUAL = ["prompt tuning", "p-tuning", "prefix tuning"]

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
knows_cache = pytest.mark.skipif(not _KNOWS_CACHE, reason="plain generation with virtual tokens needs a newer PEFT")


@pytest.fixture
def unchecked(monkeypatch):
    monkeypatch.setattr(check, "_checked", {})


def adapted(base: str, adapter: str):
    torch.manual_seed(0)
    model = peft.get_peft_model(BASES[base](), ADAPTERS[adapter]()).eval()
    for part in getattr(model, "prompt_encoder", {}).values():
        for weight in part.parameters():
            weight.data.normal_(0, 2.0 if adapter == "prefix tuning" else 0.5)
    return model


def check_equals_plain(model, inputs, trees=(None, TREE)) -> torch.LongTensor:
    plain = model.generate(**inputs, **SETTINGS)
    for tree in trees:
        how = scripted_for(plain, inputs, accuracy=0.8, tree=tree)
        output = model.generate(**inputs, **SETTINGS, assistant=how, return_dict_in_generate=True)
        assert output.sequences.tolist() == plain.tolist(), tree
        assert output.speculative.num_accepted_tokens > 8 * len(plain)
        assert output.speculative.num_target_forwards < 14
    ngram = model.generate(**inputs, **SETTINGS, spec_method="ngram")
    assert ngram.tolist() == plain.tolist()
    return plain


@knows_cache
@pytest.mark.parametrize("adapter", VIRTUAL)
@pytest.mark.parametrize(("base", "batch_size"), [("llama", 1), *((base, 3) for base in BASES)])
def test_virtual_tokens(base, batch_size, adapter):
    model, inputs = adapted(base, adapter), prompts(batch_size, length=9)
    plain = check_equals_plain(model, inputs, trees=(None,) if base == "bloom" else (None, TREE))
    assert plain.tolist() != model.get_base_model().generate(**inputs, **SETTINGS).tolist()


@pytest.mark.skipif(_KNOWS_CACHE, reason="plain generation works")
@pytest.mark.parametrize("adapter", ["prompt tuning", "p-tuning"])
def test_virtual_tokens_that_plain_generation_repeats_are_refused(adapter):
    model = adapted("llama", adapter)
    with pytest.raises(UnsupportedModelError, match="prepares embeddings for the tokens after its prompts"):
        model.generate(**prompts(1, length=9), **SETTINGS, spec_method="ngram")


@pytest.mark.parametrize("adapter", ["lora", "ia3"])
def test_changed_weights(adapter):
    model, inputs = adapted("llama", adapter), prompts(3)
    plain = check_equals_plain(model, inputs)
    with model.disable_adapter():
        assert check_equals_plain(model, inputs).tolist() != plain.tolist()


def several_adapters():
    """A model with the adapters "one" and "two", of which "one" is active."""
    torch.manual_seed(0)
    model = peft.get_peft_model(tiny_llama(), ADAPTERS["lora"](), adapter_name="one")
    model.add_adapter("two", peft.LoraConfig(**TASK, r=8, init_lora_weights=False))
    return model.eval()


def test_set_adapter_between_calls():
    model, inputs, texts = several_adapters(), prompts(3), []
    for name in ("one", "two", "one"):
        model.set_adapter(name)
        texts.append(check_equals_plain(model, inputs).tolist())
    assert texts[0] == texts[2] != texts[1]
    model.base_model.set_adapter(["one", "two"])
    assert check_equals_plain(model, inputs).tolist() not in texts


@pytest.mark.parametrize("unload", [False, True])
def test_merged_adapters(unload):
    model, inputs = several_adapters(), prompts(3)
    before = model.generate(**inputs, **SETTINGS)
    if unload:
        model = model.merge_and_unload()
    else:
        model.merge_adapter()
    assert check_equals_plain(model, inputs).tolist() == before.tolist()
    if not unload:
        model.unmerge_adapter()
        assert check_equals_plain(model, inputs).tolist() == before.tolist()


MIXED = ["two", "__base__", "one", "two"]


@pytest.mark.parametrize("names", [MIXED, tuple(MIXED)], ids=["list", "tuple"])
def test_adapters_by_row(names):
    """Rows end one after the other, and each goes on with its own adapter."""
    model, inputs = several_adapters(), prompts(4)
    plain = model.generate(**inputs, **SETTINGS, adapter_names=names)
    # Every row ends at its own place.
    ends = {"eos_token_id": plain[:, -12].tolist() + plain[:2, -4].tolist(), "pad_token_id": 0}
    for settings in (SETTINGS, {**SETTINGS, **ends}):
        plain = model.generate(**inputs, **settings, adapter_names=names)
        for tree in (None, TREE):
            how = scripted_for(plain, inputs, accuracy=0.8, tree=tree)
            output = model.generate(
                **inputs, **settings, adapter_names=names, assistant=how, return_dict_in_generate=True
            )
            assert output.sequences.tolist() == plain.tolist()
            assert output.speculative.num_accepted_tokens > 8
    assert names in (MIXED, tuple(MIXED))
    for row, name in enumerate(names):
        alone = {key: values[row : row + 1] for key, values in inputs.items()}
        text = model.generate(**alone, **settings, adapter_names=[name], spec_method="ngram")
        assert text[0].tolist() == plain[row, : text.shape[1]].tolist()


@pytest.mark.parametrize("name", ["qwen3_next", "zaya"])
def test_adapters_by_row_in_recurrent_layers(name):
    """The nodes of a tree are read at once, or by calls whose batches are nodes of one depth."""
    base = tiny_model(name, vocab_size=64)
    linear = {
        path.split(".")[-1] for path, part in next(iter(mixers(base))).named_modules() if type(part) is torch.nn.Linear
    }
    torch.manual_seed(0)
    how = {**TASK, "r": 4, "init_lora_weights": False, "target_modules": sorted(linear)}
    model = peft.get_peft_model(base, peft.LoraConfig(**how), adapter_name="one")
    model.add_adapter("two", peft.LoraConfig(**how))
    model, inputs, names = model.eval(), prompts(3), MIXED[:3]
    plain = model.generate(**inputs, **SETTINGS, adapter_names=names)
    assert plain.tolist() != model.generate(**inputs, **SETTINGS, adapter_names=names[::-1]).tolist()
    for tree in (None, TREE):
        script = scripted_for(plain, inputs, accuracy=0.8, tree=tree)
        assert model.generate(**inputs, **SETTINGS, adapter_names=names, assistant=script).tolist() == plain.tolist()


@pytest.mark.parametrize("method", ["early_exit", "sparse_kv"])
def test_adapters_by_row_of_a_target_that_drafts_for_itself(method):
    model, inputs = several_adapters(), prompts(4)
    plain = model.generate(**inputs, **SETTINGS, adapter_names=MIXED)
    ends = {"eos_token_id": plain[:, -12].tolist() + plain[:2, -4].tolist(), "pad_token_id": 0}
    for settings in (SETTINGS, {**SETTINGS, **ends}):
        call = {**inputs, **settings, "adapter_names": MIXED}
        output = model.generate(**call, spec_method=method, return_dict_in_generate=True)
        assert output.sequences.tolist() == model.generate(**call).tolist()
        # It sees the whole text; only what comes after an end is not accepted.
        assert method == "early_exit" or output.speculative.acceptance_rate > 0.8


@pytest.mark.parametrize("layer", ["lm_head", "embed_tokens"])
@pytest.mark.parametrize("method", ["eagle3", "medusa", "dflash"])
def test_heads_that_share_adapted_layers_with_adapters_by_row(layer, method):
    target = copy.deepcopy(demo_target())
    for name in ("one", "two"):
        config = peft.LoraConfig(**{**TASK, "target_modules": ["q_proj", layer]}, init_lora_weights=False)
        if name == "one":
            model = peft.get_peft_model(target, config, adapter_name=name).eval()
        else:
            model.add_adapter(name, config)
    inputs = {"input_ids": torch.tensor([[5, 6, 7, 8]] * 4), "attention_mask": torch.ones(4, 4, dtype=torch.long)}
    call = {"max_new_tokens": 12, "do_sample": False, "adapter_names": MIXED, "pad_token_id": 0}
    call["eos_token_id"] = model.generate(**inputs, **call, eos_token_id=None)[0, 7].item()
    plain = model.generate(**inputs, **call)
    text = model.generate(**inputs, **call, spec_model=str(demo.drafter_path(method)), num_speculative_tokens=3)
    assert text.tolist() == plain.tolist()


def test_adapters_by_row_and_scores_of_all_steps():
    model, inputs = several_adapters(), prompts(3)
    call = {**inputs, **SETTINGS, "adapter_names": MIXED[:3], "return_dict_in_generate": True, "output_scores": True}
    plain = model.generate(**call)
    output = model.generate(**call, assistant=scripted_for(plain.sequences, inputs, tree=TREE))
    assert output.sequences.tolist() == plain.sequences.tolist()
    for ours, theirs in zip(output.scores, plain.scores, strict=True):
        torch.testing.assert_close(ours, theirs, atol=1e-4, rtol=1e-4)


def test_doctor_says_that_an_adapter_changes_what_heads_read():
    target = demo.load_target()
    head = load_speculator(target, "eagle3", model=demo.drafter_path("eagle3"))

    def found() -> list[str]:
        findings = [one for one in network_findings(head, target, None) if one.check == "adapters"]
        return [one.found for one in findings]

    assert found() == []
    model = peft.get_peft_model(target, peft.LoraConfig(**TASK, r=4, target_modules=["q_proj"]))
    assert "active adapters (default)" in found()[0]
    with model.disable_adapter():
        assert found() == []


@pytest.mark.skipif(
    Version(peft.__version__) < Version(MIN_PEFT_VERSION), reason="transformers itself needs a newer PEFT for it"
)
def test_add_adapter_of_transformers():
    model, inputs = tiny_llama(), prompts(3)
    before = model.generate(**inputs, **SETTINGS)
    model.add_adapter(peft.LoraConfig(r=4, init_lora_weights=False))
    assert check_equals_plain(model, inputs).tolist() != before.tolist()


def test_commands_load_a_folder_with_an_adapter(tmp_path):
    """Its base is named in the adapter's file, and the folder has no config."""
    base, folder = tiny_llama(), tmp_path / "adapter"
    base.save_pretrained(tmp_path / "base")
    base = LlamaForCausalLM.from_pretrained(tmp_path / "base")
    peft.get_peft_model(base, peft.LoraConfig(r=4, target_modules=["q_proj"])).save_pretrained(folder)
    demo.load_tokenizer().save_pretrained(folder)
    model, _ = Place(target=str(folder)).load()
    assert type(model) is LlamaForCausalLM
    assert list(model.peft_config) == ["default"]


@pytest.mark.parametrize("content", ["[]", "{}", '{"base_model_name_or_path": 3}', "[" * 100_000])
def test_an_adapter_that_names_no_base(tmp_path, content):
    (tmp_path / "adapter_config.json").write_text(content)
    with pytest.raises(SpecConfigError, match="adapter"):
        Place(target=str(tmp_path)).load()


@knows_cache
@pytest.mark.parametrize("adapter", VIRTUAL)
def test_masked_tokens_after_virtual_ones(adapter):
    model, inputs = adapted("llama", adapter), prompts(2, length=9)
    inputs["attention_mask"][0, 5:7] = 0
    plain = model.generate(**inputs, **SETTINGS)
    for method in ({"spec_method": "ngram"}, {"assistant": scripted_for(plain, inputs)}):
        assert model.generate(**inputs, **SETTINGS, **method).tolist() == plain.tolist()


@knows_cache
@pytest.mark.parametrize("adapter", VIRTUAL)
def test_a_draft_model_reads_the_tokens_alone(adapter):
    model, inputs = adapted("llama", adapter), prompts(3, length=9)
    plain = model.generate(**inputs, **SETTINGS)
    output = model.generate(**inputs, **SETTINGS, spec_model=tiny_llama(seed=1))
    assert output.tolist() == plain.tolist()


def test_what_cannot_be_counted_is_refused():
    config = peft.MultitaskPromptTuningConfig(**TASK, num_virtual_tokens=5, num_tasks=2)
    model, inputs = peft.get_peft_model(tiny_llama(), config).eval(), prompts(2)
    with pytest.raises(SpecConfigError, match="`task_ids`"):
        model.generate(**inputs, **SETTINGS, task_ids=torch.zeros(2, dtype=torch.long), spec_method="ngram")


@pytest.mark.parametrize("places", [1, 3])
def test_adapters_of_requests_that_join(places, monkeypatch):
    """Requests come and go, long prompts are read in chunks while others go on, and each has its own adapter."""
    monkeypatch.setattr(engine, "_CHUNK_SIZE", 4)
    model, names = several_adapters(), [*MIXED, "one", "two"]
    base = model.get_base_model()
    ids = [prompts(1, length=3 + 2 * number, seed=number)["input_ids"] for number in range(len(names))]
    settings = [{"max_new_tokens": 4 + 5 * (number % 3), "do_sample": False} for number in range(len(names))]
    plain = [model.generate(*call, adapter_names=[name], **own) for *call, name, own in zip(ids, names, settings)]
    expected = [text[0, one.shape[1] :].tolist() for text, one in zip(plain, ids)]
    assert expected[0] != model.generate(ids[0], adapter_names=["one"], **settings[0])[0, ids[0].shape[1] :].tolist()
    requests = [
        {"input_ids": one, **own} | ({} if name == "__base__" else {"adapter_names": [name]})
        for one, name, own in zip(ids, names, settings)
    ]
    drafts = {"spec_method": "early_exit"} if places > 1 else {"spec_method": "ngram"}
    results = generate_many(base, requests, places, in_order=True, adapter_names=["__base__"], **drafts)
    assert [(result.error, result.tokens) for result in results] == [(None, text) for text in expected]
    assert results.stats.num_draft_tokens > 0
    assert not any(module._forward_pre_hooks for module in model.modules())


def test_adapters_of_a_batch():
    model, inputs = several_adapters(), prompts(4, padding=False)
    plain = model.generate(**inputs, **SETTINGS, adapter_names=MIXED)[:, inputs["input_ids"].shape[1] :]
    call = {**SETTINGS, "spec_method": "ngram", "batch_size": 2}
    outputs = model.generate_batch(inputs["input_ids"].tolist(), adapter_names=MIXED, **call)
    assert [output.generated_tokens for output in outputs.values()] == plain.tolist()
    with pytest.raises(SpecConfigError, match="a name for each of the 4 prompts"):
        model.generate_batch(inputs["input_ids"].tolist(), adapter_names=MIXED[:2], **call)


@pytest.mark.parametrize(
    ("adapter", "settings", "message"),
    [
        ("lora", {"adapter_names": "default"}, "a list of one name, one of __base__, default"),
        ("lora", {"adapter_names": ["other"]}, "a list of one name, one of __base__, default"),
        ("ia3", {"adapter_names": ["default"]}, "layers of PEFT that cannot: Linear"),
    ],
)
def test_adapters_of_requests_that_cannot_be_honoured(adapter, settings, message):
    model = adapted("llama", adapter).get_base_model()
    with nothing_runs(model), pytest.raises(SpecConfigError, match=message):
        generate_many(model, [[1, 2]], **SETTINGS, **settings)


def test_requests_that_name_adapters_where_rows_cannot_have_any():
    model = several_adapters()
    base, one = model.get_base_model(), {"adapter_names": ["one"]}
    with nothing_runs(base):
        (result,) = generate_many(base, [{"input_ids": [1, 2], **one}], **SETTINGS)
        assert "needs one of the run" in str(result.error)
        model.merge_adapter()
        with pytest.raises(SpecConfigError, match="merged adapters"):
            generate_many(base, [[1, 2]], **SETTINGS, **one)
    with pytest.raises(SpecConfigError, match="has no adapters"):
        generate_many(tiny_llama(), [[1, 2]], **SETTINGS, **one)
