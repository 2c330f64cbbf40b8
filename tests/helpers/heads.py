"""The published checkpoints among the fixtures: their targets, copies with changes, and loading by their methods."""

import json
import shutil
from functools import cache
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM

from hf_specdec import SpeculativeConfig, demo
from hf_specdec.checkpoints.draft_reader import DraftConfig
from hf_specdec.method import resolve_candidate_generator
from tests.helpers.paths import FIXTURES


DEMO = Path(demo.target_path()).parent

HEADS = {
    f"{path.parent.parent.name}/{path.parent.name}": path.parent
    for path in sorted(FIXTURES.glob("*/*/config.json"))
    if path.parent.name != "target"
} | {"demo/mtp": DEMO / "mtp"}
# Checkpoints of whole targets with layers that draft.
WITH_LAYERS = {f"mtp/{path.parent.name}": path for path in sorted(FIXTURES.glob("mtp/*/target"))}


def method_of(name):
    family, _, variant = name.partition("/")
    if family == "eagle":
        return variant.partition("_")[0].replace("eagle1", "eagle")
    return "mtp" if family == "demo" else family


def folder_of(name):
    """The folder of a fixture; a folder is itself."""
    return name if isinstance(name, Path) else HEADS[name] if name in HEADS else WITH_LAYERS[name]


def target_of(folder):
    """Folder of the target of a fixture."""
    if folder.name == "target":
        return folder
    own = folder / "target"
    return own if own.is_dir() else folder.parent / "target"


@cache
def _loaded(path):
    return AutoModelForCausalLM.from_pretrained(path).eval()


def loaded_target(folder):
    return _loaded(target_of(folder))


def weights_of(folder):
    """The weight file of a fixture; a pickled one beside a safe one is another writing of it."""
    return min(
        path for path in folder.iterdir() if path.suffix in (".safetensors", ".pt") and "expect" not in path.name
    )


def tensors_of(folder):
    path = weights_of(folder)
    return load_file(path) if path.suffix == ".safetensors" else torch.load(path, weights_only=True)


def expected_of(name):
    return load_file(folder_of(name) / "expected.safetensors")


def settings_of(name):
    return json.loads((folder_of(name) / "config.json").read_text())


def changed(settings, changes):
    """Settings with other values: dots lead into them, `None` removes one."""
    for key, value in changes.items():
        *inside, last = key.split(".")
        place = settings
        for part in inside:
            place = place.setdefault(part, {})
        place.pop(last, None)
        if value is not None:
            place[last] = value
    return settings


def write(folder, tensors, settings, pickled=False):
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(settings))
    tensors = {name: tensor.contiguous() for name, tensor in tensors.items()}
    if pickled:
        torch.save(tensors, folder / "pytorch_model.bin")
    else:
        save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    return folder


def copy_of(name, folder, config=None, change=None):
    """A fixture with other settings, see `changed`, and with the tensors that `change` makes of all."""
    source = folder_of(name)
    folder.mkdir(parents=True, exist_ok=True)
    for path in source.iterdir():
        if path.is_file() and path.name not in ("README.md", "expected.safetensors"):
            shutil.copy(path, folder)
    (folder / "config.json").write_text(json.dumps(changed(settings_of(name), config or {})))
    if change:
        path = weights_of(folder)
        tensors = {key: tensor.contiguous() for key, tensor in change(tensors_of(folder)).items()}
        save_file(tensors, path, {"format": "pt"}) if path.suffix == ".safetensors" else torch.save(tensors, path)
    return folder


def load(method, folder, target, **settings):
    """The network that a method makes of a checkpoint for a target."""
    generator_class = resolve_candidate_generator(method)
    config = SpeculativeConfig(method, None if folder is None else str(folder), **settings)
    return generator_class.network(generator_class.load(config, target))


@cache
def published(name):
    """The network of a fixture, which nobody may change."""
    return load(method_of(name), folder_of(name), loaded_target(folder_of(name)))


def without(*parts):
    """A change that leaves out the tensors with one of these in their names."""
    return lambda tensors: {name: x for name, x in tensors.items() if not any(part in name for part in parts)}


def put(name, tensor):
    """A change that adds a tensor, or puts what a function makes of it in the place of one."""
    return lambda tensors: {**tensors, name: tensor(tensors[name]) if callable(tensor) else tensor}


def both(*changes):
    """One change after another."""

    def change(tensors):
        for one in changes:
            tensors = one(tensors)
        return tensors

    return change


def renamed(**prefixes):
    """A change of the beginnings of names, with two underscores for a dot; `None` removes the tensors."""

    def change(tensors):
        found = {}
        for name, tensor in tensors.items():
            old = next((old for old in prefixes if name.startswith(old.replace("__", "."))), None)
            if old is None:
                found[name] = tensor
            elif prefixes[old] is not None:
                found[prefixes[old] + name.removeprefix(old.replace("__", "."))] = tensor
        return found

    return change


def same_network(ours, theirs):
    """Checks that two networks have equal tensors and settings; norms and biases may be named in another order."""
    tensors, expected = ours.state_dict(), theirs.state_dict()
    assert tensors.keys() == expected.keys()
    for name, tensor in tensors.items():
        assert torch.equal(tensor, expected[name]), name
    if isinstance(getattr(ours, "config", None), DraftConfig):
        first, second = (
            {key: set(value) if key in ("norms", "biases") else value for key, value in vars(network.config).items()}
            for network in (ours, theirs)
        )
        assert first == second
