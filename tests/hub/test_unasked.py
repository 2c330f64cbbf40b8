"""Generation configs, cards and saved settings of strangers, which come with a model unasked."""

import json
import shutil
import time
from contextlib import suppress
from functools import lru_cache
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from huggingface_hub import snapshot_download
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import GenerationConfig

from hf_specdec import SpecConfigError, SpecDecError, SpeculativeConfig, UnsupportedModelError, load_speculator, record
from hf_specdec.hub import trust
from hf_specdec.hub.card import read_card
from hf_specdec.hub.discover import Search
from hf_specdec.hub.target import Access, Target
from hf_specdec.hub.trust import may_be_published, one_line, sifted, why_not_unasked
from hf_specdec.method import built_in_methods
from hf_specdec.settings import describe_settings
from tests.architectures import tiny_model
from tests.hub.drafters import EAGLE, MEDUSA, card_of, load
from tests.models import prompts, tiny_llama


GREEDY = {"do_sample": False, "max_new_tokens": 12}


def calls(model, **arguments):
    """The statistics of speculative calls in one call, which must have the tokens of plain generation."""
    plain = model.generate(**prompts(1), **GREEDY, spec_method="off")
    with record() as made:
        output = model.generate(**prompts(1), **{**GREEDY, **arguments})
    assert torch.equal(output, plain)
    return [call.stats for call in made.calls]


class TestEntriesThatCannotBeFollowed:
    """A downloaded target whose generation config names something bad generates plainly, and says so once."""

    def add(self, hub, entry, target=EAGLE / "target"):
        hub.add("user/target", target, files={"generation_config.json": json.dumps({"speculative": entry})})
        return load()

    def check_is_plain(self, model, warnings, reason):
        before = torch.get_rng_state()
        assert [calls(model) for _ in range(3)] == [[], [], []]
        assert torch.equal(torch.get_rng_state(), before)
        lines = [line for line in warnings if "generates without speculation" in line]
        assert len(lines) == 1
        assert reason in lines[0]
        # Asked for, it is an error.
        with pytest.raises(SpecConfigError, match=reason):
            model.generate(**prompts(1), **GREEDY, num_speculative_tokens=2)

    def test_no_such_repository(self, hub, warnings):
        model = self.add(hub, "user/absent")
        self.check_is_plain(model, warnings, "neither a local folder nor a repository")
        num_requests = len(hub.requests)
        calls(model)
        assert len(hub.requests) == num_requests

    def test_pickle(self, hub, warnings, monkeypatch):
        hub.add("user/pickled", MEDUSA / "v01_heads_pt")
        model = self.add(hub, {"model": "user/pickled", "method": "medusa"}, MEDUSA / "target")
        monkeypatch.setattr(torch, "load", lambda *args, **kwargs: pytest.fail("A pickle is read."))
        self.check_is_plain(model, warnings, "Its weights are pickled")

    def test_damaged_weights(self, hub, warnings):
        weights = (EAGLE / "model.safetensors").read_bytes()
        hub.add("user/head", EAGLE, files={"model.safetensors": weights[: len(weights) // 2]})
        self.check_is_plain(self.add(hub, "user/head"), warnings, "user/head")

    def test_code(self, hub, warnings, tmp_path):
        tiny_llama(vocab_size=256).save_pretrained(tmp_path)
        config = json.loads((tmp_path / "config.json").read_text())
        config |= {"model_type": "own_type", "auto_map": {"AutoModelForCausalLM": "modeling.Own"}}
        hub.add("user/code", tmp_path, files={"config.json": json.dumps(config), "modeling.py": "raise SystemExit"})
        self.check_is_plain(self.add(hub, "user/code"), warnings, "It needs code from its repository")

    def test_owner_that_is_not_trusted(self, hub, warnings, monkeypatch):
        hub.add("stranger/head", EAGLE)
        model = self.add(hub, "stranger/head")
        monkeypatch.setenv("HF_SPECDEC_TRUSTED_OWNERS", "user")
        self.check_is_plain(model, warnings, "Its owner 'stranger' is not among HF_SPECDEC_TRUSTED_OWNERS")
        # What is allowed later is looked at again.
        monkeypatch.setenv("HF_SPECDEC_TRUSTED_OWNERS", "user,stranger")
        (stats,) = calls(model)
        assert stats.drafter["owner"] == "stranger"

    @pytest.mark.parametrize(
        "name", ["/etc", "../../head", "a/../b", "~/head", "user/target", "x" * 10**5, "a\x1b[2Jb/c\n"]
    )
    def test_names(self, hub, warnings, name):
        model = self.add(hub, {"model": name})
        assert calls(model) == []
        (line,) = (line for line in warnings if "generates without speculation" in line)
        assert line.isprintable()
        assert len(line) < 1500

    @pytest.mark.parametrize("place", [{"subfolder": "../secret"}, {"subfolder": "/etc"}, {"revision": "../../main"}])
    @pytest.mark.parametrize("entry", [{"method": "mtp"}, {"model": "head"}, {"model": "user/head"}])
    def test_places_outside_of_what_is_named(self, tmp_path, warnings, place, entry):
        folder = shutil.copytree(EAGLE / "target", tmp_path / "target")
        for inside in ("target/head", "target/secret", "secret"):
            shutil.copytree(EAGLE, tmp_path / inside)
        model = load(str(folder))
        model.generation_config.speculative = {**entry, **place}
        assert calls(model) == []
        assert "which leads elsewhere" in warnings[0]

    def test_nothing_to_be_found(self, hub, warnings):
        self.check_is_plain(self.add(hub, "dflash"), warnings, "none was found for 'user/target'")

    def test_drafter_of_a_method_that_is_found(self, hub):
        hub.add("user/head", EAGLE, card=card_of("user/target", "eagle3"))
        (stats,) = calls(self.add(hub, "eagle3"))
        assert (stats.method, stats.drafter["place"]) == ("eagle3", "hub")

    def test_drafter_that_is_named(self, hub):
        repo = hub.add("other/head", EAGLE)
        revision = repo.branches["main"]
        model = self.add(hub, {"model": "other/head", "num_speculative_tokens": 2, "revision": revision})
        (stats,) = calls(model)
        assert stats.drafter == {"model": "other/head", "owner": "other", "revision": revision, "place": "entry"}
        assert "in the generation config chose eagle3 'other/head' (owner 'other', revision" in stats.notes[0]
        assert 1 <= len(stats.num_accepted_tokens_per_pos) <= 2

    def test_shapes_that_contradict_each_other(self, hub, warnings):
        hub.add("user/head", EAGLE)
        model = self.add(hub, {"model": "user/head", "num_speculative_tokens": 2, "draft_tree_top_k": 2})
        self.check_is_plain(model, warnings, "`num_speculative_tokens` asks for a chain, and `draft_tree_top_k`")

    def test_target_that_cannot_be_driven(self, monkeypatch, warnings):
        """Limits that only the loop knows."""

        def refuse(*args):
            raise UnsupportedModelError("It has no slots.")

        monkeypatch.setattr("hf_specdec.integration.DecodingLoop", refuse)
        model = tiny_llama()
        model.generation_config.speculative = "ngram"
        streamed = []
        assert calls(model, streamer=SimpleNamespace(put=streamed.append, end=lambda: None)) == []
        assert len(streamed) == 1 + GREEDY["max_new_tokens"]
        assert calls(model) == []
        assert sum("It has no slots" in line for line in warnings) == 1
        with pytest.raises(UnsupportedModelError):
            model.generate(**prompts(1), **GREEDY, spec_method="ngram")

    def test_what_is_found_out_while_the_prompt_is_read(self, warnings):
        """Embeddings whose text would be read again where its rotary embeddings change."""
        factors = {"short_factor": [1.0] * 8, "long_factor": [2.0] * 8, "original_max_position_embeddings": 12}
        rope = {"rope_type": "longrope", "rope_theta": 10000.0, "partial_rotary_factor": 1.0, **factors}
        changes = {"max_position_embeddings": 48, "original_max_position_embeddings": 12, "rope_parameters": rope}
        model = tiny_model("phi3", **changes)
        model.generation_config.speculative = "ngram"
        embeddings = model.get_input_embeddings()(prompts(1)["input_ids"])
        plain = model.generate(inputs_embeds=embeddings, **GREEDY, spec_method="off")
        with record() as made:
            assert torch.equal(model.generate(inputs_embeds=embeddings, **GREEDY), plain)
        (call,) = made.calls
        assert (call.stats.num_drafts, call.stats.num_committed_tokens) == (0, 0)
        assert any("generates without speculation" in line for line in warnings)
        with pytest.raises(UnsupportedModelError):
            model.generate(inputs_embeds=embeddings, **GREEDY, spec_method="ngram")

    def test_an_outage_is_not_for_ever(self, hub, monkeypatch):
        hub.add("user/target", EAGLE / "target")
        model = load()
        model.generation_config.speculative = "user/head"
        assert calls(model) == []
        hub.add("user/head", EAGLE)
        assert calls(model) == []
        monkeypatch.setattr("hf_specdec.loader.monotonic", lambda: time.monotonic() + 301)
        (stats,) = calls(model)
        assert stats.method == "eagle3"


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
        plain = _plain()
        with suppress(SpecDecError):
            assert torch.equal(model.generate(**prompts(1), generation_config=config), plain)
        model.generation_config.speculative = entry
        try:
            assert torch.equal(model.generate(**prompts(1), **GREEDY), plain)
        finally:
            del model.generation_config.speculative

    @pytest.mark.parametrize(
        "names",
        [
            {"speculative": '{"method": "ngram"}', "spec_method": "ngram"},
            {"speculative": ["ngram"], "num_speculative_tokens": 3},
            {"spec_method": "eagle3", "spec_model": "/etc"},
            {"assistant": "user/head"},
            {"num_speculative_tokens": 10**9},
        ],
    )
    def test_other_names(self, names, warnings):
        model = tiny_llama()
        for name, value in names.items():
            setattr(model.generation_config, name, value)
        assert calls(model) == []
        assert len([line for line in warnings if "generates without speculation" in line]) == 1
        with pytest.raises(SpecConfigError):
            model.generate(**prompts(1), **GREEDY, num_speculative_tokens=2)


@lru_cache
def _tiny():
    return tiny_llama()


@lru_cache
def _plain():
    return _tiny().generate(**prompts(1), **GREEDY, spec_method="off")


class TestServers:
    """Clients may send a generation config: it is a stranger's, and the operator says what it may name."""

    def test_a_folder_of_the_machine(self, tmp_path, monkeypatch):
        monkeypatch.setenv("HF_SPECDEC_ALLOWED_MODELS", "")
        model = tiny_llama()
        tiny_llama(seed=1).save_pretrained(tmp_path / "secret")
        monkeypatch.chdir(tmp_path)
        for name in (str(tmp_path / "secret"), "secret", "./secret", "absent", str(tmp_path / "absent")):
            config = GenerationConfig(**GREEDY, pad_token_id=0, speculative={"model": name, "method": "draft_model"})
            # The answer does not tell what is there.
            with pytest.raises(SpecConfigError, match="names a drafter that cannot be taken"):
                model.generate(**prompts(1), generation_config=config)

    def test_allowed_folders(self, tmp_path, monkeypatch):
        model = tiny_llama()
        tiny_llama(seed=1).save_pretrained(tmp_path / "models" / "draft")
        shutil.copytree(tmp_path / "models" / "draft", tmp_path / "secret")
        (tmp_path / "models" / "link").symlink_to(tmp_path / "secret")
        monkeypatch.setenv("HF_SPECDEC_ALLOWED_MODELS", f"{tmp_path}/models/*")

        def named(name):
            return GenerationConfig(**GREEDY, pad_token_id=0, speculative={"model": str(tmp_path / name)})

        (stats,) = calls(model, generation_config=named("models/draft"))
        assert stats.drafter["model"] == str(tmp_path / "models" / "draft")
        for name in ("models/link", "models/../secret", "secret"):
            with pytest.raises(SpecConfigError, match="is no id of a repository"):
                model.generate(**prompts(1), generation_config=named(name))

    def test_allowed_repositories(self, hub, monkeypatch):
        hub.add("user/target", EAGLE / "target")
        for name in ("user/head", "evil/head"):
            hub.add(name, EAGLE)
        model = load()
        monkeypatch.setenv("HF_SPECDEC_ALLOWED_MODELS", "user/*")
        for name, is_allowed in (("user/head", True), ("evil/head", False)):
            config = GenerationConfig(**GREEDY, speculative=name)
            if is_allowed:
                assert len(calls(model, generation_config=config)) == 1
            else:
                with pytest.raises(SpecConfigError, match="It is not among HF_SPECDEC_ALLOWED_MODELS"):
                    model.generate(**prompts(1), generation_config=config)
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
        page = (Path(__file__).parents[2] / "docs" / "security.md").read_text(encoding="utf-8")
        for variable in (trust.OWNERS_VARIABLE, trust.MODELS_VARIABLE):
            assert f"`{variable}`" in page
