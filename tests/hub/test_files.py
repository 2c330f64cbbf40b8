"""The files of a checkpoint are the same in a folder, on the Hub and in the cache, and none leads out of it."""

import json
import os
import shutil
import struct

import pytest
import torch
from huggingface_hub import constants, try_to_load_from_cache
from safetensors.torch import save_file

from hf_specdec import CheckpointFormatError
from hf_specdec.checkpoints.files import RepoFiles
from hf_specdec.errors import CheckpointAccessError
from tests.helpers.loopback_hub import STRANGERS_TOKEN, TOKEN


TENSORS = {
    "a.weight": torch.randn(300, 400),
    "b.weight": torch.randn(5).half(),
    "c": torch.ones(2, 3, dtype=torch.bfloat16),
    "ids": torch.arange(6),
    "mask": torch.ones(3, dtype=torch.bool),
}
SHAPES = {name: tuple(tensor.shape) for name, tensor in TENSORS.items()}
NUM_BYTES = sum(tensor.nbytes for tensor in TENSORS.values())


@pytest.fixture
def folder(tmp_path):
    folder = tmp_path / "head"
    folder.mkdir()
    (folder / "config.json").write_text('{"model_type": "llama"}')
    (folder / "README.md").write_text("---\nbase_model: user/target\n---\n# A head\n")
    save_file(TENSORS, folder / "model.safetensors")
    return folder


@pytest.fixture
def sharded(folder):
    (folder / "model.safetensors").unlink()
    for name in TENSORS:
        save_file({name: TENSORS[name]}, folder / f"model-{name}.safetensors")
    write_index(folder, {name: f"model-{name}.safetensors" for name in TENSORS})
    return folder


def write_index(folder, weight_map):
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))


def downloads(hub, pattern=""):
    """Names of the files whose content was sent."""
    gets = (request for request in hub.requests if request.method == "GET" and request.num_bytes)
    return [request.path.rpartition("/")[2] for request in gets if "/api/" not in request.path]


class TestBothPlaces:
    """All questions have equal answers."""

    @pytest.fixture(params=["folder", "hub", "cache"])
    def files(self, request, folder, hub, monkeypatch):
        if request.param == "folder":
            return RepoFiles(folder)
        hub.add("user/head", folder)
        if request.param == "cache":
            online = RepoFiles("user/head")
            for name in online.sizes:
                online.path(name)
            return RepoFiles("user/head", local_files_only=True)
        return RepoFiles("user/head")

    def test_sizes(self, files, folder):
        assert files.sizes == {path.name: path.stat().st_size for path in folder.iterdir()}
        assert "config.json" in files
        assert "other.json" not in files

    def test_the_first_of_some_names(self, files):
        assert files.first_of(["none", "model.safetensors", "config.json"]) == "model.safetensors"
        assert files.first_of(["*.safetensors"]) == "model.safetensors"
        assert files.first_of(["none"]) is None

    def test_contents(self, files, folder):
        assert files.config == {"model_type": "llama"}
        assert files.path("model.safetensors").read_bytes() == (folder / "model.safetensors").read_bytes()
        assert files.card["base_model"] == "user/target"

    def test_headers(self, files):
        header = files.header("model.safetensors")
        assert {name: tensor.shape for name, tensor in header.items()} == SHAPES
        assert {name: tensor.num_bytes for name, tensor in header.items()} == {n: t.nbytes for n, t in TENSORS.items()}
        assert [header[name].dtype for name in TENSORS] == ["F32", "F16", "BF16", "I64", "BOOL"]
        table = files.tensors("model.safetensors")
        assert table == SHAPES
        assert table.num_bytes == NUM_BYTES

    def test_a_file_that_is_not_there(self, files):
        with pytest.raises(CheckpointAccessError, match=r"none\.json"):
            files.path("none.json")
        with pytest.raises(CheckpointAccessError):
            files.header("none.safetensors")


@pytest.mark.parametrize("subfolder", ["none", "config.json"])
def test_a_subfolder_that_is_not_there(hub, folder, subfolder):
    hub.add("user/head", folder)
    for name in (folder, "user/head"):
        files = RepoFiles(name, subfolder=subfolder)
        assert files.sizes == {}
        with pytest.raises(CheckpointAccessError, match=r"no readable config\.json"):
            files.config  # noqa: B018


class TestHub:
    def test_only_the_beginning_of_a_weight_file_is_sent_for_its_header(self, hub, folder):
        hub.add("user/head", folder)
        assert RepoFiles("user/head").tensors("model.safetensors") == SHAPES
        assert hub.sent() < (folder / "model.safetensors").stat().st_size / 3

    def test_a_long_header_is_read_whole(self, hub, tmp_path):
        tensors = {f"{i:04}{'x' * 200}": torch.zeros(1) for i in range(1000)}
        save_file(tensors, tmp_path / "model.safetensors")
        hub.add("user/head", tmp_path)
        assert len(RepoFiles("user/head").header("model.safetensors")) == 1000

    @pytest.mark.parametrize("name", ["pytorch_model.bin", "medusa_lm_head.pt"])
    def test_so_are_only_the_names_of_a_pickled_file(self, hub, tmp_path, name):
        large = {
            "a.weight": torch.zeros(2_000_000),
            "b": torch.zeros(3, 4).half(),
            "p": torch.nn.Parameter(torch.ones(2)),
        }
        torch.save(large, tmp_path / name)
        hub.add("user/head", tmp_path)
        header = RepoFiles("user/head").header(name)
        assert {key: (tensor.shape, tensor.num_bytes) for key, tensor in header.items()} == {
            "a.weight": ((2_000_000,), 8_000_000),
            "b": ((3, 4), 24),
            "p": ((2,), 8),
        }
        assert hub.sent() < 1_000_000
        assert RepoFiles("user/head").tensors(name) == {"a.weight": (2_000_000,), "b": (3, 4), "p": (2,)}

    def test_old_pickled_files_would_have_to_be_read_whole(self, hub, tmp_path):
        torch.save(TENSORS, tmp_path / "pytorch_model.bin", _use_new_zipfile_serialization=False)
        hub.add("user/head", tmp_path)
        assert RepoFiles("user/head").tensors("pytorch_model.bin") is None
        assert RepoFiles(tmp_path).tensors("pytorch_model.bin") is None
        assert hub.sent() < 100_000

    def test_a_pickle_with_code_has_no_names(self, hub, tmp_path, monkeypatch):
        monkeypatch.chdir(tmp_path)

        class Code:
            def __reduce__(self):
                return (open, ("should_not_exist", "w"))

        torch.save({"a": Code()}, tmp_path / "pytorch_model.bin")
        hub.add("user/head", tmp_path)
        assert RepoFiles("user/head").header("pytorch_model.bin") is None
        assert RepoFiles(tmp_path).header("pytorch_model.bin") is None
        assert not (tmp_path / "should_not_exist").exists()

    def test_headers_of_shards_are_read_when_they_are_asked_for(self, hub, sharded):
        hub.add("user/head", sharded)
        files = RepoFiles("user/head")
        table = files.tensors("model.safetensors.index.json")
        assert set(table) == set(TENSORS)
        assert downloads(hub) == ["model.safetensors.index.json"]
        assert table["b.weight"] == (5,)
        assert downloads(hub) == ["model.safetensors.index.json", "model-b.weight.safetensors"]
        assert table == SHAPES

    def test_revisions_and_subfolders(self, hub, folder):
        hub.add("user/head", files={"config.json": '{"v": 1}'})
        hub.add("user/head", files={"config.json": '{"v": 2}', "sub/config.json": '{"v": 3}'}, revision="v2")
        assert RepoFiles("user/head").config == {"v": 1}
        assert RepoFiles("user/head", revision="v2").config == {"v": 2}
        inner = RepoFiles("user/head", revision="v2", subfolder="sub")
        assert inner.config == {"v": 3}
        assert inner.sizes == {"config.json": 8}
        assert RepoFiles("user/head", revision="v2", subfolder="sub", local_files_only=True).sizes == inner.sizes
        with pytest.raises(CheckpointAccessError, match="has no revision 'v9'. Name a branch, tag or commit"):
            RepoFiles("user/head", revision="v9").path("config.json")

    def test_all_files_are_of_one_commit(self, hub, folder):
        hub.add("user/head", folder)
        files = RepoFiles("user/head")
        assert files.config == {"model_type": "llama"}
        hub.add("user/head", files={"config.json": "{}", "README.md": "# New"})
        assert files.path("model.safetensors").read_bytes() == (folder / "model.safetensors").read_bytes()
        assert "# A head" in files.path("README.md").read_text()
        assert RepoFiles("user/head").config == {}

    def test_an_older_commit_in_the_cache_is_not_taken_for_the_branch(self, hub, folder):
        hub.add("user/head", folder)
        RepoFiles("user/head").path("model.safetensors")
        save_file({"new": torch.zeros(2)}, folder / "model.safetensors")
        hub.add("user/head", folder)
        assert RepoFiles("user/head").tensors("model.safetensors") == {"new": (2,)}

    def test_a_cache_of_its_own(self, hub, folder, tmp_path):
        hub.add("user/head", folder)
        path = RepoFiles("user/head", cache_dir=str(tmp_path / "cache")).path("config.json")
        assert path.is_relative_to(tmp_path / "cache")
        assert RepoFiles("user/head", cache_dir=str(tmp_path / "cache"), local_files_only=True).config
        with pytest.raises(CheckpointAccessError, match="not in the cache"):
            RepoFiles("user/head", local_files_only=True).path("config.json")

    def test_what_is_in_the_cache_needs_no_request(self, hub, folder):
        hub.add("user/head", folder)
        path = RepoFiles("user/head").path("model.safetensors")
        hub.requests.clear()
        assert RepoFiles("user/head", local_files_only=True).path("model.safetensors") == path
        assert not hub.requests


class TestAccess:
    """Errors say why something cannot be had, and what to do."""

    @pytest.mark.parametrize("token", [None, STRANGERS_TOKEN])
    def test_gated(self, hub, folder, token):
        hub.add("other/gated", folder, gated=True)
        with pytest.raises(
            CheckpointAccessError, match="is gated. Ask for access at http.*other/gated.*hf auth login"
        ):
            RepoFiles("other/gated", token=token).path("config.json")
        assert RepoFiles("other/gated", token=TOKEN).config
        assert RepoFiles("other/gated", token=TOKEN).header("model.safetensors")

    def test_a_pickled_file_of_a_gated_repository(self, hub, tmp_path):
        torch.save(TENSORS, tmp_path / "pytorch_model.bin")
        hub.add("other/gated", tmp_path, gated=True)
        assert RepoFiles("other/gated", token=TOKEN).tensors("pytorch_model.bin") == SHAPES
        with pytest.raises(CheckpointAccessError, match="gated"):
            RepoFiles("other/gated").tensors("pytorch_model.bin")

    @pytest.mark.parametrize("ask", [lambda files: files.sizes, lambda files: files.path("config.json")])
    @pytest.mark.parametrize("private", [True, False])
    def test_no_such_repository(self, hub, folder, private, ask):
        if private:
            hub.add("other/private", folder, private=True)
        with pytest.raises(CheckpointAccessError, match="neither a local folder nor a repository.*`token`"):
            ask(RepoFiles("other/private"))
        with pytest.raises(CheckpointAccessError):
            ask(RepoFiles("other/private", token="hf_invalid"))
        if private:
            ask(RepoFiles("other/private", token=TOKEN))

    @pytest.mark.parametrize("name", ["./no/such/folder", "/no/such/folder", "a/b/c", "user/*"])
    def test_no_repo_id(self, hub, name):
        for files in (RepoFiles(name), RepoFiles(name, local_files_only=True)):
            with pytest.raises(CheckpointAccessError, match="neither a local folder|no local folder"):
                files.sizes  # noqa: B018
            with pytest.raises(CheckpointAccessError, match="neither a local folder|not in the cache"):
                files.path("config.json")

    def test_offline(self, hub, folder, monkeypatch):
        hub.add("user/head", folder)
        monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
        with pytest.raises(CheckpointAccessError, match="HF_HUB_OFFLINE.*Download it once while online"):
            RepoFiles("user/head").path("config.json")
        with pytest.raises(CheckpointAccessError, match="not in the cache at revision 'v2'.*HF_HUB_OFFLINE"):
            RepoFiles("user/head", revision="v2").sizes  # noqa: B018
        assert not hub.requests

    def test_a_file_that_the_cache_lacks(self, hub, folder):
        hub.add("user/head", folder)
        RepoFiles("user/head").path("config.json")
        files = RepoFiles("user/head", local_files_only=True)
        assert list(files.sizes) == ["config.json"]
        with pytest.raises(CheckpointAccessError, match="it is not in the cache, and nothing may be downloaded"):
            files.header("model.safetensors")

    def test_errors_of_the_server_are_repeated_and_then_said(self, hub, folder, no_backoff):
        hub.add("user/head", folder)
        hub.fault("/user/head/*config.json", status=503, times=1)
        assert RepoFiles("user/head").config
        hub.fault("/api/models/*", status=500)
        files = RepoFiles("user/other")
        with pytest.raises(CheckpointAccessError, match="answers with the status 500. Try again later"):
            files.sizes  # noqa: B018
        hub.fault("/user/head/*model.safetensors", status=500)
        with pytest.raises(CheckpointAccessError, match=r"model.safetensors cannot be had: .*status 500. Try again"):
            RepoFiles("user/head").header("model.safetensors")

    def test_an_outage_leaves_what_is_in_the_cache(self, hub, folder, no_backoff):
        hub.add("user/head", folder)
        files = RepoFiles("user/head")
        for name in files.sizes:
            files.path(name)
        hub.fault("*", status=500)
        again = RepoFiles("user/head")
        assert again.sizes == files.sizes
        assert again.is_offline
        assert again.tensors("model.safetensors") == SHAPES

    def test_an_answer_that_does_not_come(self, hub, folder, no_backoff, monkeypatch):
        hub.add("user/head", folder)
        monkeypatch.setattr(constants, "HF_HUB_DOWNLOAD_TIMEOUT", 0.2)
        hub.fault("/api/models/*", delay=5)
        with pytest.raises(CheckpointAccessError, match="cannot be reached.*Try again later"):
            RepoFiles("user/head").sizes  # noqa: B018

    def test_a_redirect_to_nowhere(self, hub, folder, no_backoff):
        hub.add("user/head", folder)
        hub.fault("/user/head/resolve/*model.safetensors", redirect=f"{hub.url}/nowhere")
        with pytest.raises(CheckpointAccessError, match="model.safetensors cannot be had"):
            RepoFiles("user/head").header("model.safetensors")

    def test_a_token_is_sent_and_never_shown(self, hub, folder):
        hub.add("user/head", folder, private=True)
        files = RepoFiles("user/head", token=TOKEN)
        assert files.config
        assert TOKEN not in repr(files)
        with pytest.raises(CheckpointAccessError) as error:
            RepoFiles("user/none", token=TOKEN).path("config.json")
        assert TOKEN not in str(error.value)


class TestDamage:
    def test_a_body_that_breaks_off_is_fetched_again(self, hub, folder, no_backoff):
        hub.add("user/head", folder)
        hub.fault("*model.safetensors", method="GET", break_at=1000, times=2)
        path = RepoFiles("user/head").path("model.safetensors")
        assert path.read_bytes() == (folder / "model.safetensors").read_bytes()

    def test_a_wrong_checksum_is_fetched_again(self, hub, folder):
        hub.add("user/head", folder)
        flip = {"replace": lambda body: bytes(reversed(body)), "method": "GET"}
        fault = hub.fault("/storage/*", times=1, **flip)
        path = RepoFiles("user/head").path("model.safetensors")
        assert fault.hits == 1
        assert path.read_bytes() == (folder / "model.safetensors").read_bytes()

    @pytest.mark.parametrize("name", ["model.safetensors", "config.json"])
    def test_a_wrong_checksum_twice_leaves_nothing(self, hub, folder, name):
        hub.add("user/head", folder)
        hub.fault(f"*{name}", method="GET", replace=lambda body: bytes(reversed(body)))
        with pytest.raises(CheckpointFormatError, match=f"{name} has not the checksum.*removed from the cache. Try"):
            RepoFiles("user/head").path(name)
        assert try_to_load_from_cache("user/head", name) is None
        hub.clear_faults()
        assert RepoFiles("user/head").path(name).read_bytes() == (folder / name).read_bytes()

    def test_a_damaged_file_in_the_cache(self, hub, folder):
        hub.add("user/head", folder)
        path = RepoFiles("user/head").path("model.safetensors")
        blob = path.resolve()
        blob.write_bytes(blob.read_bytes()[:-100])
        with pytest.raises(
            CheckpointFormatError, match=f"is damaged: .*Delete {blob}, so that it is downloaded again"
        ):
            RepoFiles("user/head", local_files_only=True).header("model.safetensors")

    @pytest.mark.parametrize("size", [0, 4, 100, -100])
    def test_a_truncated_file_in_a_folder(self, folder, size):
        content = (folder / "model.safetensors").read_bytes()
        (folder / "model.safetensors").write_bytes(content[:size])
        with pytest.raises(CheckpointFormatError, match="model.safetensors is damaged.*Pass an intact checkpoint"):
            RepoFiles(folder).header("model.safetensors")

    @pytest.mark.parametrize("place", ["folder", "hub"])
    def test_a_header_that_claims_too_much(self, hub, folder, place):
        for claim in (10**9, 2**63 - 1):
            (folder / "model.safetensors").write_bytes(struct.pack("<Q", claim) + b"{}" * 100)
            hub.add("user/head", folder)
            with pytest.raises(CheckpointFormatError, match="model.safetensors is damaged"):
                RepoFiles(folder if place == "folder" else "user/head").header("model.safetensors")

    def test_tensors_that_lie_past_the_end_on_the_hub(self, hub, folder):
        header = json.dumps({"a": {"dtype": "F32", "shape": [10**6], "data_offsets": [0, 4 * 10**6]}}).encode()
        (folder / "model.safetensors").write_bytes(struct.pack("<Q", len(header)) + header)
        hub.add("user/head", folder)
        with pytest.raises(CheckpointFormatError, match="its tensors need more"):
            RepoFiles("user/head").header("model.safetensors")

    @pytest.mark.parametrize("content", ["{", "[1]", "\xff", "[" * 100_000])
    def test_json(self, hub, folder, content):
        (folder / "config.json").write_bytes(content.encode("latin-1"))
        hub.add("user/head", folder)
        for files in (RepoFiles(folder), RepoFiles("user/head")):
            with pytest.raises(CheckpointFormatError, match="no readable config.json: config.json (is no|must hold)"):
                files.config  # noqa: B018

    def test_large_json_is_not_read_or_downloaded(self, hub, folder):
        (folder / "config.json").write_text(json.dumps({"x": "y" * 5_000_000}))
        hub.add("user/head", folder)
        for files in (RepoFiles(folder), RepoFiles("user/head")):
            with pytest.raises(CheckpointFormatError, match="has 5000009 bytes, and such files have at most"):
                files.config  # noqa: B018
        assert hub.sent() < 100_000


class TestPaths:
    """Paths that a repository names never lead out of it."""

    OUTSIDE = ["../secret.safetensors", "/secret.safetensors", "a/../../secret.safetensors", "", ".", "..", "a//b"]
    OUTSIDE += ["a\\..\\secret.safetensors", "C:secret.safetensors", "./../x.safetensors", "x\0.safetensors"]

    @pytest.mark.parametrize("name", OUTSIDE)
    def test_names(self, folder, name):
        save_file(TENSORS, folder.parent / "secret.safetensors")
        files = RepoFiles(folder)
        for read in (files.path, files.header):
            with pytest.raises(CheckpointFormatError, match="no plain name inside of it"):
                read(name)

    @pytest.mark.parametrize("name", [name for name in OUTSIDE if name.endswith(".safetensors")])
    @pytest.mark.parametrize("place", ["folder", "hub"])
    def test_an_index(self, hub, folder, name, place):
        save_file(TENSORS, folder.parent / "secret.safetensors")
        write_index(folder, {"a": name})
        hub.add("user/head", folder)
        files = RepoFiles(folder if place == "folder" else "user/head")
        with pytest.raises(CheckpointFormatError, match="no plain name inside of it.*a checkpoint that you trust"):
            files.tensors("model.safetensors.index.json")

    def test_an_index_names_weight_files(self, folder):
        for name in ("config.json", "pytorch_model.bin", 3, None, ["x"]):
            write_index(folder, {"a": name})
            with pytest.raises(CheckpointFormatError, match="damaged index: model.safetensors.index.json needs"):
                RepoFiles(folder).tensors("model.safetensors.index.json")

    def test_an_index_and_its_files_disagree(self, sharded):
        write_index(sharded, {"other": "model-ids.safetensors"})
        table = RepoFiles(sharded).tensors("model.safetensors.index.json")
        with pytest.raises(
            CheckpointFormatError, match="model-ids.safetensors has no tensor other, which .*index.json"
        ):
            table["other"]

    @pytest.mark.parametrize("place", ["folder", "hub"])
    def test_a_missing_shard(self, hub, sharded, place):
        (sharded / "model-ids.safetensors").unlink()
        hub.add("user/head", sharded)
        with pytest.raises(CheckpointFormatError, match="lacks model-ids.safetensors, which model.safetensors.index"):
            RepoFiles(sharded if place == "folder" else "user/head").tensors("model.safetensors.index.json")

    def test_a_cache_needs_to_have_only_the_shards_that_are_read(self, hub, sharded):
        hub.add("user/head", sharded)
        online = RepoFiles("user/head")
        for name in ("config.json", "model.safetensors.index.json", "model-ids.safetensors"):
            online.path(name)
        table = RepoFiles("user/head", local_files_only=True).tensors("model.safetensors.index.json")
        assert table["ids"] == (6,)
        with pytest.raises(CheckpointAccessError, match="not in the cache"):
            table["b.weight"]

    def test_links(self, folder):
        outside = folder.parent / "secret.safetensors"
        shutil.move(folder / "model.safetensors", outside)
        os.symlink(outside, folder / "model.safetensors")
        with pytest.raises(CheckpointFormatError, match="is a link that leads out of the folder, to .*secret"):
            RepoFiles(folder).header("model.safetensors")
        (folder / "inner").mkdir()
        shutil.move(outside, folder / "inner" / "weights")
        (folder / "model.safetensors").unlink()
        os.symlink(folder / "inner" / "weights", folder / "model.safetensors")
        assert RepoFiles(folder).tensors("model.safetensors") == SHAPES

    def test_a_folder_may_be_a_link_itself(self, folder):
        os.symlink(folder, folder.parent / "link")
        assert RepoFiles(folder.parent / "link").tensors("model.safetensors") == SHAPES

    def test_the_links_of_a_snapshot_in_the_cache(self, hub, folder):
        hub.add("user/head", folder)
        path = RepoFiles("user/head").path("model.safetensors")
        assert path.is_symlink()
        assert RepoFiles(path.parent).tensors("model.safetensors") == SHAPES
        outside = folder.parent / "secret.safetensors"
        save_file(TENSORS, outside)
        path.unlink()
        os.symlink(outside, path)
        with pytest.raises(CheckpointFormatError, match="leads out of the folder"):
            RepoFiles(path.parent).header("model.safetensors")

    @pytest.mark.parametrize(
        "card", ["---\n[\n---\n", "---\n- 1\n---\n", "# No metadata", "---\n!!python/name:os.system\n---\n"]
    )
    def test_a_card_is_only_data(self, folder, card):
        (folder / "README.md").write_text(card)
        assert RepoFiles(folder).card == {}
