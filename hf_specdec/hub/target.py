"""A target as discovery sees it: its name, config, size, and how its files are reached."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace
from typing import Any

from huggingface_hub import is_offline_mode

from ..checkpoints.files import RepoFiles
from ..settings import SpeculativeConfig
from .inspect import repo_id_of, sizes_in


WEIGHTS = (".safetensors", ".bin", ".pt", ".pth")

# A drafter that nobody has named has at most this share of the target's bytes, or so many.
_MOST_SHARE = 1 / 4
_LEAST_BOUND = 2**20


@dataclass(frozen=True)
class Access:
    """Access to files: token, cache and network, as in [`SpeculativeConfig`]."""

    token: str | bool | None = None
    cache_dir: str | None = None
    local_files_only: bool = False

    @classmethod
    def of(cls, config: SpeculativeConfig) -> Access:
        """Access that a configuration gives."""
        return cls(config.token, config.cache_dir, config.local_files_only)

    @property
    def is_offline(self) -> bool:
        return self.local_files_only or is_offline_mode()

    @property
    def offline(self) -> Access:
        """The target, with local files only."""
        return replace(self, local_files_only=True)

    def files(self, name: str, **location: Any) -> RepoFiles:
        """Files of a checkpoint; `location` is `revision` and `subfolder`."""
        return RepoFiles(name, **asdict(self), **location)


@dataclass(frozen=True)
class Target:
    """A target's name, config, published entry and size."""

    name: str  # repo id or folder; empty if it was not loaded from one
    config: Mapping[str, Any]  # its `config.json`
    revision: str | None = None  # branch, tag or commit of its repository
    entry: Any = None  # `speculative` of its generation config
    num_bytes: int | None = None  # of its weights

    @classmethod
    def of_model(cls, model: Any) -> Target:
        """A loaded model."""
        source = model.config
        return cls(
            str(getattr(source, "_name_or_path", None) or ""),
            source.to_dict(),
            getattr(source, "_commit_hash", None),
            getattr(getattr(model, "generation_config", None), "speculative", None),
            sum(weight.numel() * weight.element_size() for weight in model.parameters()),
        )

    @classmethod
    def of_name(cls, name: str, access: Access, revision: str | None = None) -> Target:
        """A repository or folder."""
        files = access.files(name, revision=revision)
        settings = files.read_json("generation_config.json") if "generation_config.json" in files else {}
        sizes = [size for file, size in files.sizes.items() if file.endswith(WEIGHTS) and size]
        return cls(name, files.config, revision, settings.get("speculative"), sum(sizes) or None)

    @property
    def repo_id(self) -> str | None:
        """The target's id on the Hub, as far as its name tells."""
        return repo_id_of(self.name)

    @property
    def most_draft_bytes(self) -> int | None:
        """The most that the weights of a drafter which nobody has named may have; `None`: nothing tells."""
        if self.num_bytes is None:
            return None
        # Of a target that is spread over processes each knows its own part; its config knows the whole.
        sizes = sizes_in(self.config)
        by_config = 2 * (12 * work(self.config) + 2 * (sizes.vocab_size or 0) * (sizes.hidden_size or 0))
        return max(int(max(self.num_bytes, by_config) * _MOST_SHARE), _LEAST_BOUND)


def work(config: Mapping[str, Any]) -> int:
    """Work of a model per token, up to factors that most models have in common."""
    sizes = sizes_in(config)
    return (sizes.num_hidden_layers or 0) * (sizes.hidden_size or 0) ** 2
