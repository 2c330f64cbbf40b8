"""Drafters are loaded by name from the Hub, with no method named, and draft; what cannot be loaded leaves nothing."""

import json
import shutil

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM

from hf_specdec import CheckpointFormatError, SpeculativeConfig, forget_speculators, load_speculator
from hf_specdec.candidate_generators.mtp.network import new_mtp
from hf_specdec.errors import CheckpointAccessError
from hf_specdec.loaded import record_of
from tests.helpers.loopback_hub import STRANGERS_TOKEN, TOKEN
from tests.helpers.models import prompts, tiny_llama
from tests.helpers.paths import FIXTURES


GREEDY = {"do_sample": False, "max_new_tokens": 16, "return_dict_in_generate": True}

# A checkpoint of each format, its target, and the method that is read from it.
CHECKPOINTS = {
    "eagle/eagle1_llama": ("eagle/eagle1_llama/target", "eagle"),
    "eagle/eagle3_llama": ("eagle/eagle3_llama/target", "eagle3"),
    "eagle/eagle3_qwen3": ("eagle/eagle3_qwen3/target", "eagle3"),
    "eagle/eagle3_specforge": ("eagle/eagle3_specforge/target", "eagle3"),
    "eagle/eagle3_speculators": ("eagle/eagle3_speculators/target", "eagle3"),
    "dflash/qwen3_random_b8": ("dflash/qwen3_random_b8/target", "dflash"),
    "dflash/dspark_vanilla_b5": ("dflash/dspark_vanilla_b5/target", "dflash"),
    "medusa/v01_heads_pt": ("medusa/target", "medusa"),
    "medusa/v2_shared_lm_head_safetensors": ("medusa/target", "medusa"),
    "medusa/merged_v1": ("medusa/target", "medusa"),
    "medusa/vllm_converted": ("medusa/target", "medusa"),
    "mlp_speculator/tied_scaled": ("mlp_speculator/target", "mlp_speculator"),
    "medusa/target": ("medusa/target", "draft_model"),
}


def load_target(folder):
    target = AutoModelForCausalLM.from_pretrained(FIXTURES / folder, dtype=torch.float32).eval()
    target.generation_config.pad_token_id = 0
    target.generation_config.eos_token_id = None
    return target


@pytest.fixture
def target():
    """Made anew: nothing is loaded for it."""
    return load_target("medusa/target")


def head(hub, name="v2_shared_lm_head_safetensors", repo="user/head", **options):
    return hub.add(repo, FIXTURES / "medusa" / name, **options)


def is_remembered(target):
    return bool(record_of(target).loaded)


class TestByName:
    @pytest.mark.parametrize("checkpoint", CHECKPOINTS)
    def test_every_format_drafts(self, hub, checkpoint, tmp_path):
        folder, method = CHECKPOINTS[checkpoint]
        target, inputs = load_target(folder), prompts(1)
        hub.add("user/drafter", FIXTURES / checkpoint)
        plain = target.generate(**inputs, **GREEDY)
        ours = target.generate(**inputs, **GREEDY, spec_model="user/drafter")
        assert torch.equal(ours.sequences, plain.sequences)
        assert ours.speculative.method == method
        assert ours.speculative.num_draft_tokens > 0
        # What comes from a folder drafts the same; that of the target would not do for a draft model.
        copied = shutil.copytree(FIXTURES / checkpoint, tmp_path / "drafter")
        local = target.generate(**inputs, **GREEDY, spec_model=str(copied))
        assert local.speculative.num_accepted_tokens == ours.speculative.num_accepted_tokens
        hub.requests.clear()
        target.generate(**inputs, **GREEDY, spec_model="user/drafter")
        assert not hub.requests

    def test_mtp_layers_of_their_own(self, hub, tmp_path):
        target = tiny_llama()
        new_mtp(target).save(tmp_path)
        hub.add("user/mtp", tmp_path)
        inputs = prompts(1)
        ours = target.generate(**inputs, **GREEDY, spec_model="user/mtp")
        assert torch.equal(ours.sequences, target.generate(**inputs, **GREEDY).sequences)
        assert ours.speculative.method == "mtp"

    def test_mtp_layers_of_a_target_on_the_hub(self, hub):
        hub.add("user/target", FIXTURES / "mtp" / "glm4_moe" / "target")
        target = AutoModelForCausalLM.from_pretrained("user/target", dtype=torch.float32).eval()
        target.generation_config.pad_token_id = 0
        inputs = prompts(1)
        ours = target.generate(**inputs, **GREEDY, spec_method="mtp")
        assert torch.equal(ours.sequences, target.generate(**inputs, **GREEDY).sequences)
        assert ours.speculative.num_draft_tokens > 0


class TestSettings:
    """The settings of generate() say how a checkpoint is reached."""

    @pytest.mark.parametrize("checkpoint", ["v2_shared_lm_head_safetensors", "target"])
    def test_a_token(self, hub, target, checkpoint):
        head(hub, checkpoint, private=True)
        settings = {"model": "user/head", "token": TOKEN}
        for token in (None, False, STRANGERS_TOKEN):
            with pytest.raises(CheckpointAccessError, match="`token`"):
                target.generate(**prompts(1), **GREEDY, speculative={**settings, "token": token})
        ours = target.generate(**prompts(1), **GREEDY, speculative=settings)
        assert ours.speculative.num_draft_tokens > 0

    @pytest.mark.parametrize("checkpoint", ["v2_shared_lm_head_safetensors", "target"])
    def test_revision_subfolder_cache_and_offline(self, hub, target, checkpoint, tmp_path):
        folder = FIXTURES / "medusa" / checkpoint
        files = {f"inner/{path.name}": path.read_bytes() for path in folder.iterdir()}
        hub.add("user/head", files=files, revision="v2")
        settings = {"model": "user/head", "revision": "v2", "subfolder": "inner", "cache_dir": str(tmp_path / "own")}
        ours = target.generate(**prompts(1), **GREEDY, speculative=settings)
        assert (tmp_path / "own" / "models--user--head").is_dir()
        assert not (hub.home / "hub" / "models--user--head").exists()
        forget_speculators(target)
        hub.requests.clear()
        again = target.generate(**prompts(1), **GREEDY, speculative={**settings, "local_files_only": True})
        assert torch.equal(again.sequences, ours.sequences)
        assert not hub.requests
        forget_speculators(target)
        with pytest.raises(CheckpointAccessError, match="HF_HUB_OFFLINE"):
            load_speculator(target, {**settings, "cache_dir": str(tmp_path / "other"), "local_files_only": True})

    def test_dtype_and_device_are_the_targets(self, hub, target):
        target.to(torch.bfloat16)
        head(hub)
        hub.add("user/draft", FIXTURES / "medusa" / "target")
        for name in ("user/head", "user/draft"):
            resources = vars(load_speculator(target, name).resources).values()
            networks = [part for part in resources if isinstance(part, torch.nn.Module)]
            weights = [weight for part in networks for weight in part.parameters()]
            assert {(weight.dtype, weight.device) for weight in weights} == {(torch.bfloat16, target.device)}


class TestOnlyWhatIsNeeded:
    def fetched(self, hub):
        gets = [request for request in hub.requests if request.method == "GET" and "/resolve/" in request.path]
        return {request.path.rpartition("/")[2] for request in gets}

    def test_no_pickle_beside_a_safe_file(self, hub):
        target = load_target("mlp_speculator/target")
        hub.add("user/head", FIXTURES / "mlp_speculator" / "tied_scaled")
        load_speculator(target, "user/head")
        assert self.fetched(hub) == {"config.json", "model.safetensors"}

    def test_the_shards_with_heads_of_a_whole_model(self, hub, target, tmp_path):
        tensors = load_file(FIXTURES / "medusa" / "merged_v1" / "model.safetensors")
        parts = {"heads": {}, "model": {}}
        for name, tensor in tensors.items():
            parts["heads" if name.startswith("medusa_head.") else "model"][name] = tensor
        for part, content in parts.items():
            save_file(content, tmp_path / f"the-{part}.safetensors")
        weight_map = {name: f"the-{part}.safetensors" for part, content in parts.items() for name in content}
        (tmp_path / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))
        (tmp_path / "config.json").write_bytes((FIXTURES / "medusa" / "merged_v1" / "config.json").read_bytes())
        hub.add("user/merged", tmp_path)
        assert load_speculator(target, "user/merged").method == "medusa"
        assert "the-heads.safetensors" in self.fetched(hub)
        assert "the-model.safetensors" not in self.fetched(hub)

    def test_wrong_heads_are_refused_before_they_are_downloaded(self, hub, tmp_path):
        target = tiny_llama()
        width = 2000
        save_file({"0.0.linear.weight": torch.zeros(width, width)}, tmp_path / "medusa_lm_head.safetensors")
        (tmp_path / "config.json").write_text('{"medusa_num_heads": 1}')
        hub.add("user/head", tmp_path)
        with pytest.raises(CheckpointFormatError, match="hidden size 2000, and .* has 32"):
            load_speculator(target, "user/head")
        assert hub.sent() < 250_000


class TestWhatGoesWrong:
    """Errors say what to do, nothing is remembered, and the next attempt can succeed."""

    @pytest.mark.parametrize(
        "checkpoint", ["v2_shared_lm_head_safetensors", "v01_heads_pt", "vllm_converted", "target"]
    )
    @pytest.mark.parametrize(
        "fault",
        [
            {"status": 500},
            {"status": 403},
            {"status": 404},
            {"method": "GET", "replace": lambda body: bytes(reversed(body))},
            {"method": "GET", "break_at": 100},
        ],
        ids=["500", "403", "404", "wrong_content", "truncated"],
    )
    def test_faults_of_the_weights(self, hub, target, no_backoff, checkpoint, fault):
        head(hub, checkpoint)
        plain = target.generate(**prompts(1), **GREEDY)
        # The storage of large files and the pages that lead there.
        hub.fault("*.safetensors", **fault)
        hub.fault("*.pt", **fault)
        hub.fault("/storage/*", **fault)
        with pytest.raises(CheckpointFormatError) as error:
            target.generate(**prompts(1), **GREEDY, spec_model="user/head")
        assert "user/head" in str(error.value)
        assert not is_remembered(target)
        hub.clear_faults()
        ours = target.generate(**prompts(1), **GREEDY, spec_model="user/head")
        assert torch.equal(ours.sequences, plain.sequences)
        assert is_remembered(target)

    def test_a_damaged_file_in_the_cache_is_named(self, hub, target):
        head(hub)
        load_speculator(target, "user/head")
        forget_speculators(target)
        (path,) = (hub.home / "hub").rglob("medusa_lm_head.safetensors")
        blob = path.resolve()
        blob.write_bytes(blob.read_bytes()[:-8])
        with pytest.raises(CheckpointFormatError, match=f"Delete {blob}, so that it is downloaded again"):
            load_speculator(target, "user/head", method="medusa")
        assert not is_remembered(target)
        blob.unlink()
        assert load_speculator(target, "user/head", method="medusa").method == "medusa"

    def test_a_wrong_shape(self, hub, target, tmp_path):
        tensors = load_file(FIXTURES / "medusa/v2_shared_lm_head_safetensors/medusa_lm_head.safetensors")
        tensors["1.0.linear.weight"] = torch.zeros(64, 32)
        save_file(tensors, tmp_path / "medusa_lm_head.safetensors")
        (tmp_path / "config.json").write_text('{"medusa_num_heads": 3, "version": "2"}')
        hub.add("user/head", tmp_path)
        with pytest.raises(CheckpointFormatError, match=r"1\.0\.linear\.weight of the shape \[64, 32\]"):
            load_speculator(target, "user/head")
        assert not is_remembered(target)

    def test_a_draft_model_that_is_not_whole(self, hub, target, tmp_path):
        folder = FIXTURES / "medusa" / "target"
        tensors = load_file(folder / "model.safetensors")
        (tmp_path / "config.json").write_bytes((folder / "config.json").read_bytes())
        wrong = {**tensors, "model.norm.weight": torch.zeros(3)}
        short = {name: tensor for name, tensor in tensors.items() if name != "model.norm.weight"}
        for repo, content in {"user/wrong": wrong, "user/short": short}.items():
            save_file(content, tmp_path / "model.safetensors", metadata={"format": "pt"})
            hub.add(repo, tmp_path)
            with pytest.raises(CheckpointFormatError, match=f"'{repo}' (cannot be loaded|lacks)"):
                load_speculator(target, repo)
            assert not is_remembered(target)

    @pytest.mark.parametrize("checkpoint", ["v2_shared_lm_head_safetensors", "target"])
    def test_gated(self, hub, target, checkpoint):
        head(hub, checkpoint, gated=True)
        for method in (None, "medusa" if checkpoint != "target" else "draft_model"):
            with pytest.raises(CheckpointAccessError, match="is gated. Ask for access at"):
                load_speculator(target, model="user/head", method=method)
        assert load_speculator(target, model="user/head", token=TOKEN)

    def test_code_in_a_repository_does_not_run(self, hub, target, tmp_path):
        folder = FIXTURES / "medusa" / "target"
        config = json.loads((folder / "config.json").read_text())
        config |= {
            "model_type": "of_my_own",
            "auto_map": {"AutoConfig": "code.Config", "AutoModelForCausalLM": "code.M"},
        }
        files = {path.name: path.read_bytes() for path in folder.iterdir()}
        code = f"open({str(tmp_path / 'ran')!r}, 'w')\n"
        hub.add("user/code", files={**files, "config.json": json.dumps(config), "code.py": code})
        with pytest.raises(CheckpointFormatError, match="trust_remote_code"):
            load_speculator(target, "user/code")
        assert not (tmp_path / "ran").exists()

    def test_no_repository(self, hub, target):
        for config in (
            "user/none",
            SpeculativeConfig("eagle3", "user/none"),
            SpeculativeConfig("draft_model", "user/none"),
        ):
            with pytest.raises(CheckpointAccessError, match="neither a local folder nor a repository of this name"):
                load_speculator(target, config)
