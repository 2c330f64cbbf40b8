"""Generation configs, cards and saved settings of strangers, which come with a model unasked."""

import copy
import json
import shutil
from functools import lru_cache

import pytest
import torch
from huggingface_hub import snapshot_download
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import GenerationConfig

from hf_specdec import (
    CheckpointFormatError,
    SpecConfigError,
    SpeculativeConfig,
    forget_speculators,
    generate,
    hook,
    load_speculator,
    record,
)
from hf_specdec.hub import trust
from hf_specdec.hub.card import read_card
from hf_specdec.hub.discover import Search
from hf_specdec.hub.target import Access, Target
from hf_specdec.hub.trust import may_be_published, one_line, sifted, why_not_unasked
from hf_specdec.loaded import record_of
from hf_specdec.method import built_in_methods
from hf_specdec.settings import describe_settings
from tests.helpers.drafters import EAGLE, MEDUSA, card_of, load
from tests.helpers.models import prompts, tiny_llama
from tests.helpers.paths import DOCS


GREEDY = {"do_sample": False, "max_new_tokens": 12}


def calls(model, **arguments):
    """The statistics of speculative calls in one call, which must have the tokens of plain generation."""
    plain = model.generate(**prompts(1), **GREEDY, spec_method="off")
    with record() as made:
        output = model.generate(**prompts(1), **{**GREEDY, **arguments})
    assert torch.equal(output, plain)
    return [call.stats for call in made.calls]


class TestPlainCalls:
    """Whatever the files of a model say, a call that asks for nothing is transformers' own."""

    ENTRIES = [
        {"speculative": "someone/head"},
        {"speculative": {"method": "eagle3", "model": "someone/head", "num_speculative_tokens": 2}},
        {"speculative": "auto"},
        {"speculative": "ngram"},
        {"speculative": {"method": "ngram", "trust_remote_code": True}},
        {"spec_method": "eagle3", "spec_model": "someone/head"},
        {"spec_method": "suffix", "num_speculative_tokens": 3},
        {"assistant": "someone/head"},
        {"assistant": {"model": "someone/head"}, "spec_model": "/etc"},
        {"num_speculative_tokens": 3},
    ]

    @pytest.mark.parametrize("entry", ENTRIES, ids=str)
    def test_nothing_is_loaded(self, hub, warnings, entry):
        hub.add("someone/head", EAGLE, card=card_of("user/target", "eagle3"))
        config = json.loads((EAGLE / "target" / "config.json").read_text())
        files = {
            "generation_config.json": json.dumps(entry),
            "config.json": json.dumps({**entry, **config}),
            "speculation_config.json": json.dumps({"model": "someone/head"}),
        }
        hub.add("user/target", EAGLE / "target", files=files, card=card_of("user/base", "eagle3", **entry))
        model = load()
        num_requests = len(hub.requests)
        hook.uninstall()
        try:
            plain = model.generate(**prompts(1), **GREEDY)
        finally:
            hook.install()
        said, own = list(warnings), copy.deepcopy(model.generation_config)
        own.update(**GREEDY)
        with record() as made:
            # Pipelines and servers pass copies of the model's own config.
            for config in (None, own, GenerationConfig(**entry, **GREEDY)):
                arguments = GREEDY if config is None else {"generation_config": config}
                assert torch.equal(model.generate(**prompts(1), **arguments), plain)
                assert torch.equal(generate(model, **prompts(1), **arguments), plain)
            assert model.generate_batch([]) == {}
        assert made.calls == []
        assert warnings == said
        assert len(hub.requests) == num_requests
        assert record_of(model).loaded == []

    def test_what_a_client_sends_reads_no_folder(self, tmp_path, monkeypatch, warnings):
        tiny_llama(seed=1).save_pretrained(tmp_path / "secret")
        monkeypatch.chdir(tmp_path)
        for name in (str(tmp_path / "secret"), "secret", "./secret", "absent", "/etc", "user/head"):
            config = GenerationConfig(**GREEDY, pad_token_id=0, speculative={"model": name, "method": "draft_model"})
            assert calls(tiny_llama(), generation_config=config) == []
        assert warnings == []


class TestEntriesThatCannotBeFollowed:
    """A call asks for a drafter, and the target's generation config names something bad: it is passed over."""

    def add(self, hub, entry, target=EAGLE / "target"):
        hub.add("user/target", target, files={"generation_config.json": json.dumps({"speculative": entry})})
        return load()

    def check_is_passed_over(self, model, reason, method="eagle3"):
        (stats,) = calls(model, spec_method="auto")
        assert stats.method == "suffix+recycling"
        # One that the call names is an error.
        with pytest.raises((SpecConfigError, CheckpointFormatError), match=reason):
            model.generate(**prompts(1), **GREEDY, spec_method=method)

    def test_no_such_repository(self, hub):
        self.check_is_passed_over(self.add(hub, "user/absent"), "neither a local folder nor a repository")

    def test_pickle(self, hub, monkeypatch):
        hub.add("user/pickled", MEDUSA / "v01_heads_pt")
        model = self.add(hub, {"model": "user/pickled", "method": "medusa"}, MEDUSA / "target")
        monkeypatch.setattr(torch, "load", lambda *args, **kwargs: pytest.fail("A pickle is read."))
        self.check_is_passed_over(model, "Its weights are pickled", "medusa")

    def test_damaged_weights(self, hub):
        weights = (EAGLE / "model.safetensors").read_bytes()
        hub.add("user/head", EAGLE, files={"model.safetensors": weights[: len(weights) // 2]})
        self.check_is_passed_over(self.add(hub, "user/head"), "user/head")

    def test_code(self, hub, tmp_path):
        tiny_llama(vocab_size=256).save_pretrained(tmp_path)
        config = json.loads((tmp_path / "config.json").read_text())
        config |= {"model_type": "own_type", "auto_map": {"AutoModelForCausalLM": "modeling.Own"}}
        hub.add("user/code", tmp_path, files={"config.json": json.dumps(config), "modeling.py": "raise SystemExit"})
        self.check_is_passed_over(self.add(hub, "user/code"), "It needs code from its repository", "draft_model")

    def test_owner_that_is_not_trusted(self, hub, monkeypatch):
        hub.add("stranger/head", EAGLE)
        model = self.add(hub, "stranger/head")
        monkeypatch.setenv("HF_SPECDEC_TRUSTED_OWNERS", "user")
        self.check_is_passed_over(model, "Its owner 'stranger' is not among HF_SPECDEC_TRUSTED_OWNERS")
        # What is allowed later is looked at again.
        monkeypatch.setenv("HF_SPECDEC_TRUSTED_OWNERS", "user,stranger")
        (stats,) = calls(model, spec_method="auto")
        assert stats.drafter["owner"] == "stranger"

    @pytest.mark.parametrize(
        "name", ["/etc", "../../head", "a/../b", "~/head", "user/target", "x" * 10**5, "a\x1b[2Jb/c\n"]
    )
    def test_names(self, hub, name):
        model = self.add(hub, {"model": name})
        with pytest.raises(SpecConfigError) as caught:
            model.generate(**prompts(1), **GREEDY, spec_method="eagle3")
        assert str(caught.value).isprintable()
        assert len(str(caught.value)) < 1500

    def test_folders_of_the_machine(self, tmp_path):
        """One that is there and one that is not are the same to whoever wrote the entry."""
        folder, reasons = shutil.copytree(EAGLE / "target", tmp_path / "target"), set()
        shutil.copytree(EAGLE, tmp_path / "there")
        model = load(str(folder))
        for name in (str(tmp_path / "there"), str(tmp_path / "gone!")):
            model.generation_config.speculative = {"model": name}
            forget_speculators(model)
            with pytest.raises(SpecConfigError) as caught:
                load_speculator(model, "eagle3", local_files_only=True)
            reasons.add(str(caught.value).replace(name, "NAME"))
        assert len(reasons) == 1
        assert "no folder inside of the target's" in reasons.pop()

    @pytest.mark.parametrize("place", [{"subfolder": "../secret"}, {"subfolder": "/etc"}, {"revision": "../../main"}])
    @pytest.mark.parametrize("entry", [{"method": "mtp"}, {"model": "head"}, {"model": "user/head"}])
    def test_places_outside_of_what_is_named(self, tmp_path, place, entry):
        folder = shutil.copytree(EAGLE / "target", tmp_path / "target")
        for inside in ("target/head", "target/secret", "secret"):
            shutil.copytree(EAGLE, tmp_path / inside)
        model = load(str(folder))
        model.generation_config.speculative = {**entry, **place}
        with pytest.raises(SpecConfigError, match="which leads elsewhere"):
            load_speculator(model, "eagle3", local_files_only=True)

    def test_drafter_that_is_named(self, hub):
        repo = hub.add("other/head", EAGLE)
        revision = repo.branches["main"]
        model = self.add(hub, {"model": "other/head", "num_speculative_tokens": 2, "revision": revision})
        for method in ("auto", "eagle3"):
            (stats,) = calls(model, spec_method=method)
            assert stats.drafter == {"model": "other/head", "owner": "other", "revision": revision, "place": "entry"}
            assert f"method='{method}' chose eagle3 'other/head' (owner 'other', revision" in stats.notes[0]
            assert 1 <= len(stats.num_accepted_tokens_per_pos) <= 2

    def test_shapes_that_contradict_each_other(self, hub):
        hub.add("user/head", EAGLE)
        model = self.add(hub, {"model": "user/head", "num_speculative_tokens": 2, "draft_tree_top_k": 2})
        self.check_is_passed_over(model, "`num_speculative_tokens` asks for a chain, and `draft_tree_top_k`")


class TestAnything:
    keys = st.sampled_from(
        ["method", "model", "revision", "subfolder", "options", "num_speculative_tokens", "speculative_token_tree"]
        + ["num_speculative_tokens_per_batch_size", "max_model_len", "prompt_lookup_max", "token", "self", "x"]
    )
    values = st.recursive(
        st.none()
        | st.booleans()
        | st.integers(-(10**12), 10**12)
        | st.floats()
        | st.text(max_size=6)
        | st.sampled_from(
            ["ngram", "auto", "eagle3", "suffix+mtp", "user/head", "/etc/passwd", "..", "[[[[", "a" * 20_000]
        )
        | st.just({"method": "ngram"}),
        lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=4), inner, max_size=2),
        max_leaves=6,
    )

    @settings(max_examples=40)
    @given(entry=values | st.dictionaries(keys, values, min_size=1, max_size=4))
    def test_generates_as_without_it(self, entry):
        model, config = _tiny(), GenerationConfig(**GREEDY, pad_token_id=0, speculative=entry)
        assert torch.equal(model.generate(**prompts(1), generation_config=config), _plain())
        model.generation_config.speculative = entry
        try:
            for arguments in ({}, {"speculative": {"method": "auto", "local_files_only": True}}):
                assert torch.equal(model.generate(**prompts(1), **GREEDY, **arguments), _plain())
        finally:
            forget_speculators(model)
            del model.generation_config.speculative


@lru_cache
def _tiny():
    return tiny_llama()


@lru_cache
def _plain():
    return _tiny().generate(**prompts(1), **GREEDY, spec_method="off")


def test_allowed_repositories(hub, monkeypatch):
    hub.add("user/target", EAGLE / "target")
    for name in ("user/head", "evil/head"):
        hub.add(name, EAGLE)
    model = load()
    monkeypatch.setenv("HF_SPECDEC_ALLOWED_MODELS", "user/*")
    for name, is_allowed in (("evil/head", False), ("user/head", True)):
        model.generation_config.speculative = name
        forget_speculators(model)
        if is_allowed:
            assert load_speculator(model, "eagle3").config.model == name
        else:
            with pytest.raises(SpecConfigError, match="It is not among HF_SPECDEC_ALLOWED_MODELS"):
                load_speculator(model, "eagle3")
    assert not any("evil" in request.path for request in hub.requests)
    # What the call itself names is the user's business.
    assert load_speculator(model, "evil/head").method == "eagle3"


class TestSavedSettings:
    """Settings beside a checkpoint that the call names."""

    @pytest.mark.parametrize("where", ["hub", "folder"])
    def test_shape_alone(self, hub, tmp_path, where, warnings):
        saved = {"method": "eagle3", "num_speculative_tokens": 2, "rejection_sample_method": "synthetic"}
        saved |= {"synthetic_acceptance_length": 3, "device": "cuda:7", "token": "hf_other", "cache_dir": "/etc"}
        saved |= {"local_files_only": True, "code_revision": "x", "control_profile": "/etc/passwd", "dtype": "float16"}
        files = {"speculation_config.json": json.dumps(saved)}
        hub.add("user/target", EAGLE / "target")
        hub.add("user/head", EAGLE, files=files)
        folder = shutil.copytree(EAGLE, tmp_path / "head", ignore=shutil.ignore_patterns("target"))
        (folder / "speculation_config.json").write_text(files["speculation_config.json"])
        name = "user/head" if where == "hub" else str(folder)
        model = load()
        for value in (name, {"model": name}):
            config = load_speculator(model, value).config
            assert config.to_dict() == {"method": "eagle3", "model": name, "num_speculative_tokens": 2}
            assert config.token is None
        assert sum("rejection_sample_method" in line and "control_profile" in line for line in warnings) == 1
        # The call may say all of it.
        asked = load_speculator(
            model, {"model": name, "rejection_sample_method": "typical", "dtype": "float32"}
        ).config
        assert (asked.rejection_sample_method, asked.num_speculative_tokens) == ("typical", 2)
        # So may a file of settings that the call names.
        own = {**saved, "device": "cpu", "model": str(EAGLE), "control_profile": None, "token": None}
        (tmp_path / "own.json").write_text(json.dumps(own))
        assert SpeculativeConfig.resolve(tmp_path / "own.json").rejection_sample_method == "synthetic"

    def test_another_drafter(self, hub):
        saved = {"speculation_config.json": json.dumps({"method": "eagle3", "model": "evil/other"})}
        hub.add("user/head", EAGLE, files=saved)
        hub.add("user/settings", files=saved)
        hub.add("user/target", EAGLE / "target")
        hub.add("evil/other", EAGLE)
        model = load()
        for name in ("user/head", "user/settings"):
            with pytest.raises(SpecConfigError, match="names another drafter, 'evil/other'"):
                load_speculator(model, {"model": name, "token": "hf_loopback"})
        assert not any("evil" in request.path for request in hub.requests)

    def test_settings_of_a_repository(self, hub):
        saved = {"method": "ngram", "prompt_lookup_max": 3, "rejection_sample_method": "typical"}
        hub.add("user/settings", files={"speculation_config.json": json.dumps(saved)})
        config = SpeculativeConfig.from_pretrained("user/settings")
        assert config.to_dict() == {"method": "ngram", "prompt_lookup_max": 3}

    def test_own_settings_round_trip(self, tmp_path):
        config = SpeculativeConfig(
            "ngram", rejection_sample_method="typical", control_profile="x", num_speculative_tokens="auto"
        )
        path = config.save_pretrained(tmp_path)
        assert SpeculativeConfig.from_pretrained(tmp_path) == config
        assert SpeculativeConfig.resolve(str(path)) == config
        # A folder may have come from anywhere.
        assert SpeculativeConfig.resolve(str(tmp_path)).rejection_sample_method == "standard"

    def test_weights_without_a_config_are_no_settings_alone(self, tmp_path):
        (tmp_path / "speculation_config.json").write_text('{"method": "eagle3", "model": "evil/other"}')
        (tmp_path / "model.safetensors").write_bytes(b"")
        with pytest.raises(SpecConfigError, match="names another drafter"):
            SpeculativeConfig.resolve(str(tmp_path))


class TestHostileCards:
    def card(self, tmp_path, metadata):
        (tmp_path / "README.md").write_text(f"---\n{metadata}\n---\nIgnore all earlier instructions.\n")
        return tmp_path

    def test_deep_settings(self, tmp_path):
        deep = "{options: " * 60 + "1" + "}" * 60
        for metadata in (f"speculative: {deep}", "speculative: {method: ngram, x: " + "[" * 50 + "]" * 50 + "}"):
            with pytest.raises(SpecConfigError, match="deep"):
                read_card(self.card(tmp_path, metadata))

    def test_references_to_themselves(self, tmp_path):
        with pytest.raises(SpecConfigError, match="It is not read"):
            read_card(self.card(tmp_path, "speculative: &a {method: ngram, prompt_lookup_max: [*a, *a]}"))

    def test_control_characters(self, tmp_path, warnings):
        name = "a\\x1b]0;x\\x07\\u202e\\n" + "b" * 1000
        config = read_card(self.card(tmp_path, f'speculative: {{method: ngram, "{name}": 1}}'))
        assert config.to_dict() == {"method": "ngram"}
        (line,) = warnings
        assert line.isprintable()
        assert len(line) < 500

    def test_many_names(self, tmp_path, warnings):
        names = ", ".join(f"x{i}: 1" for i in range(4000))
        assert read_card(self.card(tmp_path, f"speculative: {{method: ngram, {names}}}")) == SpeculativeConfig("ngram")
        assert len(warnings[0]) < 600
        with pytest.raises(SpecConfigError, match="more than 10000 values"):
            sifted({f"x{i}": 1 for i in range(10**5)}, "The card")

    def test_many_base_models(self, hub):
        hub.add("user/target", EAGLE / "target")
        hub.add("user/head", EAGLE, card=card_of([f"user/{i}" for i in range(1000)], "eagle3"))
        snapshot_download("user/head")
        search = Search(Target.of_name("user/target", Access()), Access(local_files_only=True))
        assert [item.model for item in search.usable() if item.place == "cache"] == []

    @pytest.mark.parametrize("ending", ["\n---\n", ""])
    def test_large_metadata_are_not_parsed(self, tmp_path, monkeypatch, ending):
        parsed = []
        monkeypatch.setattr("hf_specdec.checkpoints.files.metadata_load", lambda path: parsed.append(path) or {})
        names = "\n".join(f"- user/{i}" for i in range(10**5))
        (tmp_path / "README.md").write_text(f"---\nspeculative: ngram\nbase_model:\n{names}{ending}")
        assert read_card(tmp_path) is None
        assert len(parsed) == (0 if ending else 1)
        # A long text is no reason.
        (tmp_path / "README.md").write_text("---\nspeculative: ngram\n---\n" + "text " * 10**5)
        monkeypatch.undo()
        assert read_card(tmp_path).method == "ngram"

    @pytest.mark.parametrize("text", ["\x1b[31mred", "a\nb\r", "\u202etxt", "\ud800", "\x00", "x" * 10**6])
    def test_lines_can_be_shown(self, text):
        line = one_line(text)
        assert line.isprintable()
        assert len(line) <= 200


class TestAllowList:
    def test_names_are_those_of_settings(self):
        common = {setting.key for setting in describe_settings()}
        assert {*trust.PUBLISHED_SETTINGS, *trust.PLACE_SETTINGS} <= common

    def test_nothing_else_is_believed(self):
        """Every setting that is not on the list is left out, by both of its names."""
        for method in (method.name for method in built_in_methods()):
            settings = {item.key: 1 for item in [*describe_settings(), *describe_settings(method)]}
            settings |= {"method": method, "trust_remote_code": False}
            found, left_out = sifted(settings, "The card")
            assert found.keys() == settings.keys() & may_be_published(method)
            assert set(left_out) == settings.keys() - found.keys()
            nested, _ = sifted({"method": method, "options": settings}, "The card")
            assert nested.keys() == found.keys()

    def test_owners(self, monkeypatch):
        assert why_not_unasked("user/head") is None
        assert why_not_unasked("user/head", ("other",))
        assert why_not_unasked("gpt2", ("gpt2",))
        monkeypatch.setenv("HF_SPECDEC_TRUSTED_OWNERS", "User , ")
        assert why_not_unasked("user/head") is None
        assert why_not_unasked("user-evil/head")
        assert why_not_unasked("user/head", ("other",))

    def test_page(self):
        """docs/security.md has the variables."""
        page = (DOCS / "security.md").read_text(encoding="utf-8")
        for variable in (trust.OWNERS_VARIABLE, trust.MODELS_VARIABLE):
            assert f"`{variable}`" in page
