"""The files of a checkpoint read alike in a folder, on the Hub and in the cache; errors say what is wrong."""

import json
import shutil
import struct

import pytest
import torch
from huggingface_hub import constants
from safetensors.torch import save_file

from hf_specdec import CheckpointFormatError
from hf_specdec.checkpoints import weights
from hf_specdec.checkpoints.files import RepoFiles
from hf_specdec.checkpoints.weights import TensorTable
from hf_specdec.errors import CheckpointAccessError
from tests.helpers.levels import full
from tests.helpers.loopback_hub import TOKEN


TENSORS = {
    "a.weight": torch.randn(300, 400),
    "b.weight": torch.randn(5).half(),
    "c": torch.ones(2, 3, dtype=torch.bfloat16),
    "ids": torch.arange(6),
    "mask": torch.ones(3, dtype=torch.bool),
}
SHAPES = {name: tuple(tensor.shape) for name, tensor in TENSORS.items()}
INDEX = "model.safetensors.index.json"


@pytest.fixture
def folder(tmp_path):
    folder = tmp_path / "head"
    folder.mkdir()
    (folder / "config.json").write_text('{"model_type": "llama"}')
    (folder / "README.md").write_text("---\nbase_model: user/target\n---\n# A head\n")
    save_file(TENSORS, folder / "model.safetensors")
    return folder


@pytest.fixture
def head(hub, folder):
    """The name of a repository with these files."""
    hub.add("user/head", folder)
    return "user/head"


def download(*names, **location):
    files = RepoFiles("user/head", **location)
    return [files.path(name) for name in names or files.sizes][-1]


@pytest.mark.parametrize("place", ["folder", "hub", "cache"])
def test_places_read_alike(place, folder, head, hub):
    if place == "cache":
        download()
    files = RepoFiles(folder if place == "folder" else head, local_files_only=place == "cache")
    assert files.sizes == {path.name: path.stat().st_size for path in folder.iterdir()}
    assert ("config.json" in files, "other.json" in files) == (True, False)
    assert files.first_of(["none", "model.safetensors", "config.json"]) == "model.safetensors"
    assert (files.first_of(["*.safetensors"]), files.first_of(["none"])) == ("model.safetensors", None)
    assert (files.config, files.card["base_model"]) == ({"model_type": "llama"}, "user/target")
    table = TensorTable(files, "model.safetensors")
    assert (table, table.num_bytes) == (SHAPES, (folder / "model.safetensors").stat().st_size)
    # Of weights only the header is sent.
    assert place == "cache" or hub.sent() < (folder / "model.safetensors").stat().st_size / 2
    assert files.path("model.safetensors").read_bytes() == (folder / "model.safetensors").read_bytes()
    with pytest.raises(CheckpointAccessError, match=r"none\.json"):
        files.path("none.json")
    with pytest.raises(CheckpointAccessError):
        TensorTable(files, "none.safetensors")


def test_a_pickle_is_downloaded_to_see_its_tensors(hub, tmp_path, monkeypatch, warnings):
    torch.save(TENSORS, tmp_path / "medusa_lm_head.pt")
    torch.save(TENSORS, tmp_path / "old.bin", _use_new_zipfile_serialization=False)
    hub.add("user/head", tmp_path, gated=True)
    for name in ("medusa_lm_head.pt", "old.bin"):
        table = TensorTable(RepoFiles("user/head", token=TOKEN), name)
        assert (dict(table), table.num_bytes) == (SHAPES, (tmp_path / name).stat().st_size)
        assert f"{name} is pickled, so all of it" in warnings[-1]
    with pytest.raises(CheckpointAccessError, match="gated"):
        TensorTable(RepoFiles("user/head", cache_dir=tmp_path), "medusa_lm_head.pt")
    before = hub.sent()
    monkeypatch.setattr(weights, "MAX_PICKLE_BYTES", 100)
    with pytest.raises(CheckpointFormatError, match="medusa_lm_head.pt is pickled.*at most 100 are downloaded"):
        TensorTable(RepoFiles("user/head", token=TOKEN, cache_dir=tmp_path / "cache"), "medusa_lm_head.pt")
    assert hub.sent() - before < 100_000


def test_shards_are_read_when_they_are_asked_for(hub, folder):
    (folder / "model.safetensors").unlink()
    for name, tensor in TENSORS.items():
        save_file({name: tensor}, folder / f"model-{name}.safetensors")
    (folder / INDEX).write_text(json.dumps({"weight_map": {name: f"model-{name}.safetensors" for name in TENSORS}}))
    hub.add("user/head", folder)
    table = TensorTable(RepoFiles("user/head"), INDEX)
    assert set(table) == set(TENSORS)
    assert hub.sent("*.safetensors") == 0
    assert table["b.weight"] == (5,)
    assert 0 < hub.sent("*.safetensors") == hub.sent("*model-b.weight.safetensors")
    assert table == SHAPES
    # The cache needs no others.
    download("config.json", INDEX, "model-ids.safetensors")
    table = TensorTable(RepoFiles("user/head", local_files_only=True), INDEX)
    assert table["ids"] == (6,)
    with pytest.raises(CheckpointAccessError, match="not in the cache"):
        table["b.weight"]
    (folder / INDEX).write_text(json.dumps({"weight_map": {"other": "model-ids.safetensors"}}))
    with pytest.raises(CheckpointFormatError, match="model-ids.safetensors has no tensor other, which .*index"):
        TensorTable(RepoFiles(folder), INDEX)["other"]


def test_revisions_and_subfolders(hub):
    hub.add("user/head", files={"config.json": '{"v": 1}'})
    hub.add("user/head", files={"config.json": '{"v": 2}', "sub/config.json": '{"v": 3}'}, revision="v2")
    assert RepoFiles("user/head").config == {"v": 1}
    assert RepoFiles("user/head", revision="v2").config == {"v": 2}
    for is_offline in (False, True):
        inner = RepoFiles("user/head", revision="v2", subfolder="sub", local_files_only=is_offline)
        assert (inner.config, inner.sizes) == ({"v": 3}, {"config.json": 8})
    with pytest.raises(CheckpointAccessError, match="has no revision 'v9'. Name a branch, tag or commit"):
        RepoFiles("user/head", revision="v9").path("config.json")


def test_files_of_one_commit_whatever_is_pushed_meanwhile(hub, head, folder):
    files = RepoFiles(head)
    assert files.config == {"model_type": "llama"}
    weights = files.path("model.safetensors")
    save_file({"new": torch.zeros(2)}, folder / "model.safetensors")
    hub.add(head, files={"config.json": "{}", "README.md": "# New", "model.safetensors": b""})
    assert files.path("model.safetensors") == weights
    assert "# A head" in files.path("README.md").read_text()
    assert RepoFiles(head).config == {}
    # An older commit in the cache is not taken for the branch.
    hub.add(head, folder)
    assert TensorTable(RepoFiles(head), "model.safetensors") == {"new": (2,)}


@full
def test_what_cannot_be_had_says_why(hub, folder):
    for name in ("./no/such/folder", "/no/such/folder", "a/b/c", "user/*"):
        for files in (RepoFiles(name), RepoFiles(name, local_files_only=True)):
            with pytest.raises(CheckpointAccessError, match="neither a local folder|no local folder"):
                files.sizes  # noqa: B018
    hub.add("user/head", folder, private=True)
    files = RepoFiles("user/head", token=TOKEN)
    assert files.config
    assert TOKEN not in repr(files)
    with pytest.raises(CheckpointAccessError) as error:
        RepoFiles("user/none", token=TOKEN).path("config.json")
    assert TOKEN not in str(error.value)


@full
def test_offline(hub, head, monkeypatch):
    download("config.json")
    files = RepoFiles(head, local_files_only=True)
    assert list(files.sizes) == ["config.json"]
    with pytest.raises(CheckpointAccessError, match="it is not in the cache, and nothing may be downloaded"):
        TensorTable(files, "model.safetensors")
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    hub.requests.clear()
    with pytest.raises(CheckpointAccessError, match="HF_HUB_OFFLINE.*Download it once while online"):
        RepoFiles("user/other").path("config.json")
    assert not hub.requests


@full
def test_errors_of_the_server(hub, head, folder, no_backoff):
    """What fails is tried again, then said; an outage leaves what is in the cache."""
    for fault in ({"break_at": 1000, "times": 2}, {"replace": lambda body: body[::-1], "times": 1}):
        fault = hub.fault("/storage/*", method="GET", **fault)
        assert download("model.safetensors").read_bytes() == (folder / "model.safetensors").read_bytes()
        assert fault.hits == fault.times
        shutil.rmtree(hub.home / "hub")
    hub.fault("/user/head/*config.json", status=503, times=1)
    assert RepoFiles(head).config
    download()
    sizes = RepoFiles(head).sizes
    hub.fault("*", status=500)
    files = RepoFiles(head)
    assert (files.sizes, files.is_offline) == (sizes, True)
    assert TensorTable(files, "model.safetensors") == SHAPES
    with pytest.raises(CheckpointAccessError, match="answers with the status 500. Try again later"):
        RepoFiles("user/other").sizes  # noqa: B018


def test_header_that_claims_too_much(hub, folder):
    past = json.dumps({"a": {"dtype": "F32", "shape": [10**6], "data_offsets": [0, 4 * 10**6]}}).encode()
    for claim, content in ((10**9, b"{}" * 99), (2**63 - 1, b"{}" * 99), (len(past), past)):
        (folder / "model.safetensors").write_bytes(struct.pack("<Q", claim) + content)
        hub.add("user/head", folder)
        for name in (folder, "user/head"):
            with pytest.raises(CheckpointFormatError, match="model.safetensors is damaged|its tensors need more"):
                TensorTable(RepoFiles(name), "model.safetensors")


@full
def test_config_that_is_no_object_or_large(hub, folder):
    large = json.dumps({"x": "y" * 5_000_000}).encode()
    for content in (b"{", b"[1]", b"\xff", b"[" * 100_000, large):
        (folder / "config.json").write_bytes(content)
        hub.add("user/head", folder)
        reason = "bytes, and such files have at most" if content is large else "no readable config.json: config.json"
        for files in (RepoFiles(folder), RepoFiles("user/head")):
            with pytest.raises(CheckpointFormatError, match=reason):
                files.config  # noqa: B018
