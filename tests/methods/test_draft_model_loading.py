"""Draft models that are loaded for a target: tokenizers, data types, quantization, settings of their own, errors."""

import logging
import re

import pytest
import torch
import transformers
from tokenizers import Tokenizer, models, pre_tokenizers, trainers
from transformers import (
    LlamaModel,
    OpenAIGPTConfig,
    OpenAIGPTLMHeadModel,
    PreTrainedTokenizerFast,
    T5Config,
    T5ForConditionalGeneration,
)

from hf_specdec import (
    CheckpointFormatError,
    MissingDependencyError,
    SpecConfigError,
    UnsupportedModelError,
    load_speculator,
)
from hf_specdec.checkpoints import quantised
from tests.helpers.models import VOCAB_SIZE, nothing_runs, prompts, tiny_llama
from tests.methods.test_draft_model import GREEDY, perturbed, plain_and_ours, tiny_gpt2


TEXTS = {
    "code": "def add(left, right): return left + right\nclass Node: def __init__(self, value): self.value = value\n",
    "prose": "the quick brown fox jumps over the lazy dog while seventeen wizards quietly boil jars of murky liquid ",
}


def trained_tokenizer(name: str, size: int = 60) -> PreTrainedTokenizerFast:
    tokenizer = Tokenizer(models.BPE(unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    trainer = trainers.BpeTrainer(vocab_size=size, special_tokens=["<unk>", "<s>", "</s>"])
    tokenizer.train_from_iterator([TEXTS[name]] * 5, trainer)
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, unk_token="<unk>", bos_token="<s>", eos_token="</s>")


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    """Checkpoints with and without tokenizers, by name."""
    root = tmp_path_factory.mktemp("checkpoints")
    made = {
        "target": (tiny_llama(), "code"),
        "same": (perturbed(tiny_llama()), "code"),
        "smaller": (tiny_llama(seed=1, vocab_size=60), "code"),
        "larger": (tiny_llama(seed=1, vocab_size=70), "code"),
        "other": (tiny_llama(seed=1), "prose"),
        "bare_target": (tiny_llama(), None),
        "bare": (perturbed(tiny_llama()), None),
        "bare_larger": (tiny_llama(seed=1, vocab_size=70), None),
        "bare_gpt2": (tiny_gpt2(), None),
        "gpt2_larger": (tiny_gpt2(vocab_size=70), None),
    }
    for name, (network, text) in made.items():
        network.save_pretrained(root / name)
        if text:
            trained_tokenizer(text).save_pretrained(root / name)
    return {name: str(root / name) for name in made}


@pytest.fixture
def load(folders):
    """A freshly loaded model by the name of its folder."""
    return lambda name: transformers.AutoModelForCausalLM.from_pretrained(folders[name])


def draft_from(folder, **settings):
    return {"speculative": {"method": "draft_model", "model": folder, **settings}}


class TestTokenizers:
    @pytest.mark.parametrize("draft", ["same", "smaller", "larger"])
    def test_same_tokenizer_of_any_width(self, folders, load, draft):
        target, inputs = load("target"), prompts(2)
        ours = target.generate(**inputs, **GREEDY, **draft_from(folders[draft]))
        assert torch.equal(ours, target.generate(**inputs, **GREEDY))
        # A model that was loaded before knows its tokenizer, too.
        assert torch.equal(target.generate(**inputs, **GREEDY, assistant=load(draft)), ours)

    def test_added_special_tokens_may_differ(self, folders, load, tmp_path):
        load("same").save_pretrained(tmp_path)
        tokenizer = trained_tokenizer("code")
        tokenizer.add_special_tokens({"additional_special_tokens": ["<|tool|>"]})
        tokenizer.save_pretrained(tmp_path)
        target = load("target")
        ours = target.generate(**prompts(1), **GREEDY, **draft_from(str(tmp_path)))
        assert torch.equal(ours, target.generate(**prompts(1), **GREEDY))

    def test_different_tokenizers_of_equal_size_are_noticed(self, folders, load):
        target = load("target")
        output = target.generate(**prompts(2), **GREEDY, **draft_from(folders["other"]), return_dict_in_generate=True)
        assert torch.equal(output.sequences, target.generate(**prompts(2), **GREEDY))
        names = [set(trained_tokenizer(name).get_vocab()) for name in ("code", "prose")]
        assert f"{len(names[0] & names[1])} tokens are in both" in output.speculative.notes[0]

    def test_disjoint_tokenizers(self, folders, load, tmp_path):
        load("same").save_pretrained(tmp_path)
        table = {token + "!": index for token, index in trained_tokenizer("code").get_vocab().items()}
        tokenizer = Tokenizer(models.WordLevel(table, unk_token="<unk>!"))
        PreTrainedTokenizerFast(tokenizer_object=tokenizer).save_pretrained(tmp_path)
        with pytest.raises(CheckpointFormatError, match="without a common token") as error:
            load("target").generate(**prompts(1), **GREEDY, **draft_from(str(tmp_path)))
        assert folders["target"] in str(error.value)
        assert str(tmp_path) in str(error.value)

    def test_the_user_knows_better(self, folders, load):
        target = load("target")
        ours = target.generate(**prompts(2), **GREEDY, **draft_from(folders["other"], same_tokenizer=True))
        assert torch.equal(ours, target.generate(**prompts(2), **GREEDY))

    @pytest.mark.parametrize("draft", ["bare_larger", "gpt2_larger"])
    def test_different_sizes_without_tokenizers_are_refused(self, folders, load, draft):
        """transformers makes up a tokenizer of special tokens for some bare models; that compares nothing."""
        target = load("bare_gpt2" if "gpt2" in draft else "bare_target")
        with pytest.raises(CheckpointFormatError, match=r"64 and 70 tokens.*same_tokenizer"):
            target.generate(**prompts(1), **GREEDY, **draft_from(folders[draft]))
        ours = target.generate(**prompts(1), **GREEDY, **draft_from(folders[draft], same_tokenizer=True))
        assert torch.equal(ours, target.generate(**prompts(1), **GREEDY))

    def test_equal_sizes_without_tokenizers_are_tried(self, folders, load):
        target = load("bare_target")
        ours = target.generate(**prompts(1), **GREEDY, **draft_from(folders["bare"]))
        assert torch.equal(ours, target.generate(**prompts(1), **GREEDY))

    def test_a_tokenizer_that_comes_later(self, folders, load, tmp_path):
        """Files found beside a checkpoint are not remembered."""
        load("larger").save_pretrained(tmp_path)
        target = load("target")
        with pytest.raises(CheckpointFormatError, match="no tokenizer was found"):
            target.generate(**prompts(1), **GREEDY, **draft_from(str(tmp_path)))
        trained_tokenizer("code").save_pretrained(tmp_path)
        ours = target.generate(**prompts(1), **GREEDY, **draft_from(str(tmp_path)))
        assert torch.equal(ours, target.generate(**prompts(1), **GREEDY))


class TestLoading:
    def test_loads_once(self, folders, load, monkeypatch):
        target, loaded = load("target"), []
        for owner in (transformers.AutoModelForCausalLM, transformers.AutoTokenizer, transformers.AutoConfig):
            run = owner.from_pretrained

            def counted(*args, run=run, **kwargs):
                loaded.append(args)
                return run(*args, **kwargs)

            monkeypatch.setattr(owner, "from_pretrained", counted)
        first = target.generate(**prompts(1), **GREEDY, **draft_from(folders["same"]))
        assert loaded
        loaded.clear()
        for _ in range(2):
            again = target.generate(**prompts(1), **GREEDY, spec_method="draft_model", spec_model=folders["same"])
            assert torch.equal(again, first)
        assert not loaded

    @pytest.mark.parametrize(
        ("target_dtype", "setting", "expected"),
        [
            (torch.bfloat16, None, torch.bfloat16),
            (torch.float32, "bfloat16", torch.bfloat16),
            (torch.bfloat16, torch.float32, torch.float32),
            (torch.bfloat16, "auto", torch.float32),
        ],
    )
    def test_dtype(self, folders, load, target_dtype, setting, expected):
        target = load("target").to(target_dtype)
        speculator = load_speculator(target, draft_from(folders["same"], dtype=setting)["speculative"])
        assert speculator.resources.model.dtype == expected
        assert not speculator.resources.model.training
        output = target.generate(**prompts(2), **GREEDY, assistant=speculator, return_dict_in_generate=True)
        assert output.speculative.num_accepted_tokens > 0
        if target_dtype == torch.float32:
            assert torch.equal(output.sequences, target.generate(**prompts(2), **GREEDY))

    def test_subfolder(self, load, tmp_path):
        """Model and tokenizer lie in it; those of the repository itself are others."""
        load("other").save_pretrained(tmp_path)
        trained_tokenizer("prose").save_pretrained(tmp_path)
        load("same").save_pretrained(tmp_path / "draft")
        trained_tokenizer("code").save_pretrained(tmp_path / "draft")
        target = load("target")
        settings = draft_from(str(tmp_path), subfolder="draft")
        output = target.generate(**prompts(2), **GREEDY, **settings, return_dict_in_generate=True)
        assert torch.equal(output.sequences, target.generate(**prompts(2), **GREEDY))
        assert output.speculative.acceptance_rate > 0.3

    def broken(self, load, tmp_path, kind):
        """A folder from which no draft model can be loaded, and what the error says about it."""
        load("same").save_pretrained(tmp_path)
        if kind == "nothing":
            return tmp_path / "missing", "missing"
        if kind == "no_weights":
            (tmp_path / "model.safetensors").unlink()
            return tmp_path, "model.safetensors"
        if kind == "truncated_weights":
            (tmp_path / "model.safetensors").write_bytes(b"no weights at all")
            return tmp_path, "header"
        if kind == "other_shapes":
            config = tmp_path / "config.json"
            config.write_text(config.read_text().replace('"intermediate_size": 64', '"intermediate_size": 48'))
            return tmp_path, "mismatched"
        if kind == "no_head":
            LlamaModel.from_pretrained(tmp_path).save_pretrained(tmp_path)
            return tmp_path, "lm_head.weight"
        T5ForConditionalGeneration(T5Config(vocab_size=64, d_model=16, d_ff=16, num_layers=1)).save_pretrained(
            tmp_path
        )
        return tmp_path, "encoder-decoder"

    @pytest.mark.parametrize(
        "kind", ["nothing", "no_weights", "truncated_weights", "other_shapes", "no_head", "encoder_decoder"]
    )
    def test_broken_checkpoints(self, load, tmp_path, kind):
        target = load("target")
        folder, reason = self.broken(load, tmp_path, kind)
        with nothing_runs(target), pytest.raises(CheckpointFormatError, match=f"draft model.*{reason}") as error:
            target.generate(**prompts(1), **GREEDY, **draft_from(str(folder)))
        assert str(folder) in str(error.value)
        assert len(str(error.value)) < 500

    def test_checkpoint_without_a_cache(self, load, tmp_path):
        config = OpenAIGPTConfig(vocab_size=VOCAB_SIZE, n_embd=16, n_layer=2, n_head=2)
        OpenAIGPTLMHeadModel(config).save_pretrained(tmp_path)
        with pytest.raises(UnsupportedModelError, match="OpenAIGPTLMHeadModel.*draft model"):
            load("target").generate(**prompts(1), **GREEDY, **draft_from(str(tmp_path)))

    @pytest.mark.parametrize("setting", [{"quantization": "4bit"}, {"dtype": "float32"}, {"model": "a/b"}])
    def test_a_loaded_model_is_taken_as_it_is(self, model, setting):
        with pytest.raises(SpecConfigError, match=f"loaded draft model.*{next(iter(setting))}"):
            load_speculator(model, {"method": "draft_model", **setting}, draft_model=model)


@pytest.mark.parametrize(
    ("own", "options", "named"),
    [
        ({}, {}, None),
        ({"num_assistant_tokens": 7}, {}, "num_assistant_tokens=7, which is not read: set num_speculative_tokens"),
        ({"num_assistant_tokens": 7}, {"num_speculative_tokens": 3}, None),
        ({"num_assistant_tokens": 7}, {"num_speculative_tokens": "auto"}, "num_assistant_tokens=7, which is not read"),
        ({"num_assistant_tokens_schedule": "heuristic"}, {}, None),
        ({"assistant_confidence_threshold": 0.4}, {}, "threshold=0.4, .*: set draft_confidence_threshold"),
        ({"assistant_confidence_threshold": 0.4}, {"draft_confidence_threshold": 0.1}, None),
    ],
)
def test_settings_of_the_drafts_generation_config_that_are_not_read(model, own, options, named):
    draft = tiny_llama(1)
    for name, value in own.items():
        setattr(draft.generation_config, name, value)
    plain, ours, call = plain_and_ours(model, draft, prompts(1), options)
    assert torch.equal(plain, ours)
    notes = [note for note in call.stats.notes if "generation config" in note]
    assert len(notes) == (0 if named is None else 1)
    assert not notes or re.search(named, notes[0])
    length = options.get("num_speculative_tokens", 5)
    assert call.stats.num_spec_tokens == (12 if length == "auto" else length)


def wide_model():
    return tiny_llama(hidden_size=64, initializer_range=0.3)


@pytest.fixture(scope="module")
def wide_folder(tmp_path_factory):
    """Four-bit layers on CPU come in blocks of 64 inputs."""
    path = tmp_path_factory.mktemp("wide")
    wide_model().save_pretrained(path)
    return str(path)


class TestQuantization:
    @pytest.fixture(autouse=True)
    def _library(self):
        pytest.importorskip("bitsandbytes")

    @pytest.mark.parametrize("name", ["bitsandbytes_4bit", "bitsandbytes_fp4", "bitsandbytes_8bit"])
    def test_greedy(self, wide_folder, name, caplog):
        target = wide_model()
        settings = draft_from(wide_folder, quantization=name)
        with caplog.at_level(logging.WARNING, logger="bitsandbytes"):
            output = target.generate(**prompts(3), **GREEDY, **settings, return_dict_in_generate=True)
        assert torch.equal(output.sequences, target.generate(**prompts(3), **GREEDY))
        assert output.speculative.acceptance_rate > 0.3
        draft = load_speculator(target, settings["speculative"]).resources.model
        assert draft.config.quantization_config is not None
        assert type(draft.model.layers[0].mlp.up_proj).__module__.startswith("bitsandbytes")
        assert not [record for record in caplog.records if "will be cast" in record.getMessage()]

    def test_loaded_by_the_user(self, wide_folder):
        config = transformers.BitsAndBytesConfig(load_in_4bit=True, bnb_4bit_quant_type="nf4")
        draft = transformers.AutoModelForCausalLM.from_pretrained(wide_folder, quantization_config=config)
        plain, ours, _ = plain_and_ours(wide_model(), draft, prompts(2))
        assert torch.equal(ours, plain)

    def test_too_narrow_for_four_bits(self, folders, load):
        layer = pytest.importorskip("bitsandbytes").nn.Linear4bit(64, 64)
        if not getattr(layer, "support_avx512bf16_for_cpu", False):
            pytest.skip("this processor takes layers of any size")
        settings = draft_from(folders["same"], quantization="4bit")
        with pytest.raises(SpecConfigError, match="four bits on a CPU.* has 32 inputs and .* multiple of 64"):
            load("target").generate(**prompts(1), **GREEDY, **settings)

    def test_compute_dtype(self, wide_folder):
        target = wide_model().to(torch.bfloat16)
        for dtype, expected in ((None, torch.bfloat16), ("auto", torch.bfloat16), ("float32", torch.float32)):
            settings = draft_from(wide_folder, quantization="4bit", dtype=dtype)["speculative"]
            draft = load_speculator(target, settings).resources.model
            assert draft.model.layers[0].mlp.up_proj.compute_dtype == expected


def test_quantization_without_bitsandbytes(folders, load, monkeypatch):
    monkeypatch.setattr(quantised, "is_bitsandbytes_available", lambda: False)
    with pytest.raises(MissingDependencyError, match="bitsandbytes_8bit.*pip install bitsandbytes"):
        load("target").generate(**prompts(1), **GREEDY, **draft_from(folders["same"], quantization="8bit"))
