"""The loopback Hub behaves to huggingface_hub as the Hub does."""

import subprocess
import sys

import pytest
import torch
from huggingface_hub import CommitOperationDelete, HfApi, HfFileSystem, hf_hub_download, snapshot_download
from huggingface_hub.errors import (
    EntryNotFoundError,
    GatedRepoError,
    HfHubHTTPError,
    LocalEntryNotFoundError,
    RepositoryNotFoundError,
    RevisionNotFoundError,
)
from safetensors.torch import load_file, save_file

from tests.hub.server import STRANGERS_TOKEN, TOKEN


CARD = """---
base_model: user/target
tags: [eagle3, speculative-decoding]
library_name: hf_specdec
pipeline_tag: text-generation
---
# A head
"""


@pytest.fixture
def folder(tmp_path):
    folder = tmp_path / "head"
    (folder / "sub").mkdir(parents=True)
    (folder / "config.json").write_text('{"model_type": "llama", "architectures": ["LlamaForCausalLM"]}')
    (folder / "sub" / "notes.txt").write_text("notes")
    save_file({"fc.weight": torch.arange(60_000.0)}, folder / "model.safetensors")
    return folder


@pytest.fixture
def head(hub, folder):
    return hub.add("user/head", folder, card=CARD, downloads=7, tags=["extra"])


def test_downloads_have_the_content_and_go_through_the_storage(hub, head, folder):
    path = snapshot_download("user/head", token=TOKEN)
    for name in ("config.json", "sub/notes.txt", "model.safetensors"):
        assert (folder / name).read_bytes() == open(f"{path}/{name}", "rb").read()
    assert path.endswith(head.branches["main"])
    stored = [request for request in hub.requests if request.path.startswith("/storage/")]
    assert [request.num_bytes for request in stored] == [(folder / "model.safetensors").stat().st_size]
    assert "authorization" not in stored[0].headers
    before = len(hub.requests)
    assert hf_hub_download("user/head", "config.json", revision=head.branches["main"]) == f"{path}/config.json"
    assert len(hub.requests) == before


def test_info_lists_files_with_sizes(hub, head, folder):
    info = HfApi().model_info("user/head", files_metadata=True)
    assert info.sha == head.branches["main"]
    sizes = {sibling.rfilename: sibling.size for sibling in info.siblings}
    assert sizes["model.safetensors"] == (folder / "model.safetensors").stat().st_size
    assert next(s for s in info.siblings if s.rfilename == "model.safetensors").lfs.size == sizes["model.safetensors"]
    assert info.card_data.base_model == "user/target"
    assert info.config["architectures"] == ["LlamaForCausalLM"]
    assert {"eagle3", "extra", "base_model:user/target", "base_model:finetune:user/target"} <= set(info.tags)
    expanded = HfApi().model_info("user/head", expand=["downloads", "tags"])
    assert expanded.downloads == 7
    assert expanded.siblings is None


def test_trees(hub, head):
    api = HfApi()
    assert {entry.path for entry in api.list_repo_tree("user/head", recursive=True)} == {
        "README.md",
        "config.json",
        "model.safetensors",
        "sub",
        "sub/notes.txt",
    }
    assert {entry.path for entry in api.list_repo_tree("user/head")} == {
        "README.md",
        "config.json",
        "model.safetensors",
        "sub",
    }
    assert [entry.path for entry in api.list_repo_tree("user/head", "sub")] == ["sub/notes.txt"]
    assert [entry.size for entry in api.get_paths_info("user/head", ["sub/notes.txt", "none"])] == [5]
    assert HfFileSystem(endpoint=hub.url).read_text("user/head/sub/notes.txt") == "notes"


def test_a_header_is_read_by_ranges(hub, head, folder):
    metadata = HfApi().parse_safetensors_file_metadata("user/head", "model.safetensors")
    assert metadata.tensors["fc.weight"].shape == [60_000]
    ranges = {request.range for request in hub.requests if request.method == "GET"}
    assert ranges == {"bytes=0-100000"}
    assert hub.sent() < (folder / "model.safetensors").stat().st_size


def test_searches(hub, head):
    hub.add("other/head", files={"config.json": "{}"}, tags=["eagle3"], downloads=9)
    hub.add("other/hidden", files={"config.json": "{}"}, tags=["eagle3"], private=True)
    api = HfApi()

    def ids(**query):
        return [model.id for model in api.list_models(**query)]

    assert ids(filter="eagle3", sort="downloads") == ["other/head", "user/head"]
    assert ids(filter="eagle3", sort="downloads", limit=1) == ["other/head"]
    assert ids(filter=["eagle3", "base_model:user/target"]) == ["user/head"]
    assert ids(search="HEAD", author="other") == ["other/head"]
    assert ids(pipeline_tag="text-generation") == ["user/head"]
    assert ids(filter="no-such-tag") == []
    (model,) = api.list_models(filter="extra", cardData=True, full=True)
    assert model.card_data.library_name == "hf_specdec"
    assert "config.json" in {sibling.rfilename for sibling in model.siblings}


def test_branches(hub, head):
    hub.add("user/head", files={"config.json": '{"v": 2}'}, revision="v2")
    assert open(hf_hub_download("user/head", "config.json", revision="v2")).read() == '{"v": 2}'
    assert {branch.name for branch in HfApi().list_repo_refs("user/head").branches} == {"main", "v2"}


def test_what_is_not_there(hub, head):
    with pytest.raises(RepositoryNotFoundError):
        hf_hub_download("user/none", "config.json")
    with pytest.raises(RepositoryNotFoundError):
        HfApi(token=TOKEN).model_info("user/none")
    with pytest.raises(RevisionNotFoundError):
        hf_hub_download("user/head", "config.json", revision="v9")
    with pytest.raises(EntryNotFoundError):
        hf_hub_download("user/head", "none.json")


def test_gated_and_private_repositories(hub, folder):
    hub.add("other/gated", folder, gated=True)
    hub.add("other/private", folder, private=True)
    assert HfApi().model_info("other/gated").gated == "auto"
    with pytest.raises(GatedRepoError) as error:
        hf_hub_download("other/gated", "config.json")
    assert error.value.response.status_code == 401
    with pytest.raises(GatedRepoError) as error:
        hf_hub_download("other/gated", "config.json", token=STRANGERS_TOKEN)
    assert error.value.response.status_code == 403
    assert hf_hub_download("other/gated", "config.json", token=TOKEN)
    with pytest.raises(RepositoryNotFoundError):
        hf_hub_download("other/private", "config.json", token=STRANGERS_TOKEN)
    assert hf_hub_download("other/private", "config.json", token=TOKEN)
    with pytest.raises(HfHubHTTPError):
        hf_hub_download("other/gated", "sub/notes.txt", token="hf_wrong")


def test_a_failure_that_passes_is_repeated(hub, head, no_backoff):
    fault = hub.fault("*/config.json", status=503, times=2)
    assert hf_hub_download("user/head", "config.json")
    assert fault.hits == 2


def test_a_failure_that_stays(hub, head, no_backoff):
    hub.fault("*/config.json", status=500)
    with pytest.raises(LocalEntryNotFoundError):
        hf_hub_download("user/head", "config.json")
    hub.clear_faults()
    assert hf_hub_download("user/head", "config.json")


def test_a_broken_connection_is_resumed(hub, head, no_backoff, monkeypatch):
    monkeypatch.setattr("huggingface_hub.constants.DOWNLOAD_CHUNK_SIZE", 500)
    hub.fault("/storage/*", break_at=1000, times=1)
    path = hf_hub_download("user/head", "model.safetensors")
    assert load_file(path)["fc.weight"].equal(torch.arange(60_000.0))
    assert [request.range for request in hub.requests if request.path.startswith("/storage/")] == [None, "bytes=1000-"]


def test_a_connection_that_always_breaks(hub, head, no_backoff):
    hub.fault("/storage/*", break_at=1000)
    with pytest.raises(Exception, match="(?i)peer closed connection|incomplete"):
        hf_hub_download("user/head", "model.safetensors")


def test_a_short_answer_is_found_out(hub, head):
    hub.fault("/storage/*", replace=lambda data: data[:1000])
    with pytest.raises(OSError, match="Consistency check failed"):
        hf_hub_download("user/head", "model.safetensors")


def test_other_content_and_redirects(hub, head):
    hub.fault("*/config.json", method="GET", replace=lambda data: data.replace(b"llama", b"gemma"))
    assert "gemma" in open(hf_hub_download("user/head", "config.json")).read()
    hub.add("user/moved", files={"notes.txt": "moved"})
    hub.fault("/user/head/resolve/main/sub/notes.txt", redirect="/user/moved/resolve/main/notes.txt")
    assert open(hf_hub_download("user/head", "sub/notes.txt")).read() == "moved"


def test_a_slow_answer_runs_into_the_client_s_limit(hub, head, monkeypatch):
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_ETAG_TIMEOUT", 0.2)
    monkeypatch.setattr("huggingface_hub.file_download._ETAG_RETRY_TIMEOUT", 0.2, raising=False)
    fault = hub.fault("*/config.json", delay=3, times=1)
    assert hf_hub_download("user/head", "config.json")
    assert fault.hits == 1


def test_uploads(hub, folder):
    api = HfApi(token=TOKEN)
    assert api.whoami()["name"] == "user"
    api.create_repo("user/new", private=True)
    (folder / "README.md").write_text(CARD)
    first = api.upload_folder(repo_id="user/new", folder_path=folder, commit_message="Add a head")
    assert {"config.json", "model.safetensors", "sub/notes.txt"} < set(api.list_repo_files("user/new"))
    path = hf_hub_download("user/new", "model.safetensors", token=TOKEN)
    assert load_file(path)["fc.weight"].equal(torch.arange(60_000.0))
    assert path.split("snapshots/")[1].startswith(first.oid)
    again = api.upload_folder(repo_id="user/new", folder_path=folder, commit_message="Nothing new")
    assert again.oid == first.oid
    api.create_commit("user/new", [CommitOperationDelete("sub/", is_folder=True)], commit_message="Tidy")
    assert "sub/notes.txt" not in api.list_repo_files("user/new")
    with pytest.raises(RepositoryNotFoundError):
        HfApi().model_info("user/new")


def test_uploads_need_rights_and_readable_cards(hub, folder):
    with pytest.raises(HfHubHTTPError):
        HfApi().create_repo("user/new")
    with pytest.raises(HfHubHTTPError):
        HfApi(token=TOKEN).create_repo("other/new")
    api = HfApi(token=TOKEN)
    api.create_repo("user/new")
    api.create_repo("user/new", exist_ok=True)
    with pytest.raises(HfHubHTTPError):
        api.create_repo("user/new")
    with pytest.raises(ValueError, match="Invalid YAML|Invalid metadata"):
        api.upload_file(path_or_fileobj=b"---\na: [\n---\n", path_in_repo="README.md", repo_id="user/new")
    with pytest.raises(HfHubHTTPError):
        HfApi(token=STRANGERS_TOKEN).upload_file(path_or_fileobj=b"x", path_in_repo="x.txt", repo_id="user/new")


def test_a_fresh_process_uses_it_by_its_environment(hub, head):
    code = "import huggingface_hub as h; print(open(h.hf_hub_download('user/head', 'sub/notes.txt')).read())"
    done = subprocess.run([sys.executable, "-c", code], env=hub.environment(), capture_output=True, text=True)
    assert done.stdout.strip() == "notes", done.stderr
