"""The loopback Hub for tests in this process: the constants that huggingface_hub read at its import lead there."""

import time
from types import SimpleNamespace

import huggingface_hub
import pytest
from huggingface_hub import constants, hf_api
from huggingface_hub.utils import _http
from transformers.utils import hub as transformers_hub

from hf_specdec.checkpoints.files import read_of_repositories
from tests.helpers.drafters import EAGLE
from tests.helpers.loopback_hub import LoopbackHub


@pytest.fixture
def hub(tmp_path_factory, monkeypatch):
    """An empty Hub that this process uses, with an empty cache and no token; `hub.environment()` is for others."""
    with LoopbackHub(tmp_path_factory.mktemp("hf_home")) as hub:
        for name, value in {
            "ENDPOINT": hub.url,
            "HUGGINGFACE_CO_URL_TEMPLATE": hub.url + "/{repo_id}/resolve/{revision}/{filename}",
            "HF_HUB_OFFLINE": False,
            "HF_HUB_DISABLE_XET": True,
            "HF_HUB_DISABLE_TELEMETRY": True,
            "HF_HUB_CACHE": str(hub.home / "hub"),
            "HUGGINGFACE_HUB_CACHE": str(hub.home / "hub"),
            "HF_TOKEN_PATH": str(hub.home / "token"),
            "AGENT_HARNESSES_PATH": str(hub.home / "agent_harnesses.json"),
        }.items():
            # Not every version has all of them.
            monkeypatch.setattr(constants, name, value, raising=False)
        monkeypatch.setattr(hf_api.api, "endpoint", hub.url)
        # transformers keeps a client of its own, made at its first use.
        monkeypatch.setattr(transformers_hub, "_hf_api", None, raising=False)
        monkeypatch.setenv("DISABLE_SAFETENSORS_CONVERSION", "1")
        for name in ("HF_TOKEN", "HUGGING_FACE_HUB_TOKEN"):
            monkeypatch.delenv(name, raising=False)
        # Ports are used again, and with them what is remembered by address.
        read_of_repositories.forget(lambda key: True)
        huggingface_hub.close_session()
        yield hub
        huggingface_hub.close_session()


@pytest.fixture
def target(hub):
    """The name of the EAGLE-3 fixture's target, which names no drafter and has no MTP layers."""
    hub.add("user/target", EAGLE / "target")
    return "user/target"


@pytest.fixture
def no_backoff(monkeypatch):
    """The client repeats failed requests at once."""
    clock = SimpleNamespace(**{**vars(time), "sleep": lambda seconds: None})
    monkeypatch.setattr(_http, "time", clock)
    monkeypatch.setattr(huggingface_hub.file_download, "time", clock)
