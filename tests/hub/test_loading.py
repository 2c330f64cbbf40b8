"""Drafters are loaded by name from the Hub, with no method named, and draft; what cannot be loaded leaves nothing."""

import json
import shutil

import pytest
import torch
from safetensors.torch import save_file

from hf_specdec import CheckpointFormatError, forget_speculators, load_speculator
from hf_specdec.candidate_generators.mtp.network import new_mtp
from hf_specdec.errors import CheckpointAccessError
from hf_specdec.loaded import record_of
from tests.helpers.drafters import FIXTURES, load, speculated
from tests.helpers.heads import HEADS, method_of, target_of
from tests.helpers.levels import full, in_full
from tests.helpers.loopback_hub import STRANGERS_TOKEN, TOKEN
from tests.helpers.models import prompts, tiny_llama


MEDUSA, DRAFT = FIXTURES / "medusa" / "v2_shared_lm_head_safetensors", FIXTURES / "medusa" / "target"
PICKLED = FIXTURES / "medusa" / "v01_heads_pt"


def load_target(folder):
    target = load(folder)
    target.generation_config.pad_token_id = 0
    target.generation_config.eos_token_id = None
    return target


@pytest.fixture
def target():
    """Made anew: nothing is loaded for it."""
    return load_target(DRAFT)


def generate(target, **arguments):
    """The statistics of a call, which has drafted."""
    stats = speculated(target, prompts(1), **arguments)
    assert stats.num_draft_tokens > 0
    return stats


def fetched(hub):
    """Names of the files that were asked for."""
    return {request.path.rpartition("/")[2] for request in hub.requests if "/resolve/" in request.path}


FORMATS = ["eagle/eagle3_speculators", "dflash/qwen3_random_b8", "medusa/v01_heads_pt", "mlp_speculator/tied_scaled"]


@pytest.mark.parametrize("name", ["eagle/eagle3_llama", *in_full(*FORMATS)])
def test_what_comes_from_the_hub_drafts_as_from_a_folder(hub, name):
    target = load_target(target_of(HEADS[name]))
    hub.add("user/drafter", HEADS[name])
    stats = generate(target, spec_model="user/drafter")
    assert stats.method == method_of(name)
    assert generate(target, spec_model=str(HEADS[name])).num_accepted_tokens == stats.num_accepted_tokens
    hub.requests.clear()
    generate(target, spec_model="user/drafter")
    assert not hub.requests


def test_draft_models_and_mtp_layers(hub, target, tmp_path):
    hub.add("user/draft", DRAFT)
    # By the target's own name it would not do.
    for name in ("user/draft", str(shutil.copytree(DRAFT, tmp_path / "draft"))):
        stats = generate(target, spec_model=name)
        assert (stats.method, stats.draft_acceptance_rate) == ("draft_model", 1)
    # Networks have the data type and the device of the target.
    target.to(torch.bfloat16)
    forget_speculators(target)
    hub.add("user/head", MEDUSA)
    for name in ("user/head", "user/draft"):
        speculator = load_speculator(target, name)
        network = speculator.generator_class.network(speculator.resources)
        assert {(weight.dtype, weight.device) for weight in network.parameters()} == {(torch.bfloat16, target.device)}
    target = tiny_llama()
    new_mtp(target).save(tmp_path)
    hub.add("user/mtp", tmp_path)
    assert generate(target, spec_model="user/mtp").method == "mtp"
    hub.add("user/target", FIXTURES / "mtp" / "glm4_moe" / "target")
    assert generate(load_target("user/target"), spec_method="mtp").method == "mtp"


@pytest.mark.parametrize("folder", [MEDUSA, *in_full(DRAFT)], ids=lambda folder: folder.name)
def test_place_that_the_call_names(hub, target, folder, tmp_path):
    files = {f"inner/{path.name}": path.read_bytes() for path in folder.iterdir()}
    hub.add("user/head", files=files, revision="v2", private=True)
    settings = {"model": "user/head", "revision": "v2", "subfolder": "inner", "cache_dir": str(tmp_path / "own")}
    for token in (None, False, STRANGERS_TOKEN):
        with pytest.raises(CheckpointAccessError, match="`token`"):
            load_speculator(target, {**settings, "token": token})
    stats = generate(target, speculative={**settings, "token": TOKEN})
    assert (tmp_path / "own" / "models--user--head").is_dir()
    assert not (hub.home / "hub" / "models--user--head").exists()
    forget_speculators(target)
    hub.requests.clear()
    offline = generate(target, speculative={**settings, "local_files_only": True})
    assert offline.num_accepted_tokens == stats.num_accepted_tokens
    assert not hub.requests
    with pytest.raises(CheckpointAccessError, match="HF_HUB_OFFLINE"):
        load_speculator(target, {**settings, "cache_dir": str(tmp_path / "other"), "local_files_only": True})


@full
def test_only_what_is_needed_is_downloaded(hub, target, tmp_path):
    # No pickle beside a safe file.
    hub.add("user/head", FIXTURES / "mlp_speculator" / "tied_scaled")
    load_speculator(load_target(FIXTURES / "mlp_speculator" / "target"), "user/head")
    assert fetched(hub) == {"config.json", "model.safetensors"}
    # Of heads for another target the sizes.
    save_file({"0.0.linear.weight": torch.zeros(2000, 2000)}, tmp_path / "medusa_lm_head.safetensors")
    hub.add("user/wide", tmp_path, files={"config.json": '{"medusa_num_heads": 1}'})
    with pytest.raises(CheckpointFormatError, match="hidden size 2000, and .* has 64"):
        load_speculator(target, "user/wide")
    assert hub.sent("*user/wide*") < 250_000


@pytest.mark.parametrize(
    ("folder", "fault"),
    [
        (MEDUSA, {"method": "GET", "replace": lambda body: body[::-1]}),
        *in_full(
            (MEDUSA, {"status": 403}),
            (PICKLED, {"method": "GET", "break_at": 100}),
            (PICKLED, {"status": 500}),
            (DRAFT, {"method": "GET", "replace": lambda body: body[::-1]}),
            (DRAFT, {"method": "GET", "break_at": 100}),
            (DRAFT, {"status": 404}),
        ),
    ],
)
def test_faults_of_the_weights_leave_nothing(hub, target, no_backoff, folder, fault):
    hub.add("user/head", folder)
    # The storage of large files and the pages that lead there.
    for pattern in ("*.safetensors", "*.pt", "/storage/*"):
        hub.fault(pattern, **fault)
    with pytest.raises(CheckpointFormatError, match="user/head"):
        load_speculator(target, "user/head")
    assert not record_of(target).loaded
    hub.faults.clear()
    generate(target, spec_model="user/head")
    assert record_of(target).loaded


def test_damaged_file_in_the_cache_is_named(hub, target):
    hub.add("user/head", MEDUSA)
    load_speculator(target, "user/head")
    forget_speculators(target)
    (path,) = (hub.home / "hub").rglob("medusa_lm_head.safetensors")
    blob = path.resolve()
    blob.write_bytes(blob.read_bytes()[:-8])
    with pytest.raises(CheckpointFormatError, match=f"Delete {blob}, so that it is downloaded again"):
        load_speculator(target, "user/head", method="medusa")
    assert not record_of(target).loaded
    blob.unlink()
    assert load_speculator(target, "user/head", method="medusa").method == "medusa"


def test_code_in_a_repository_does_not_run(hub, target, tmp_path):
    config = json.loads((DRAFT / "config.json").read_text()) | {"model_type": "of_my_own"}
    config["auto_map"] = {"AutoConfig": "code.Config", "AutoModelForCausalLM": "code.M"}
    code = f"open({str(tmp_path / 'ran')!r}, 'w')\n"
    hub.add("user/code", DRAFT, files={"config.json": json.dumps(config), "code.py": code})
    with pytest.raises(CheckpointFormatError, match="trust_remote_code"):
        load_speculator(target, "user/code")
    assert not (tmp_path / "ran").exists()
