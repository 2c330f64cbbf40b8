"""What a checkpoint is: its method, its format and the target it was made for, without its weights.

Read are `config.json`, the list of files, the names and shapes of the tensors and the metadata of the card; what is
large stays where it is. Repository names are never looked at: they do not tell.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, field
from typing import TYPE_CHECKING, Any

from ..checkpoints.settings import COUNT
from ..errors import CheckpointAccessError, CheckpointFormatError
from .files import MEDUSA_FILES, MTP_FILES, WEIGHT_FILES, ReadOfRepositories, RepoFiles, is_pickled
from .formats import Format, TensorNames, format_of
from .headers import TensorTable


if TYPE_CHECKING:
    from ..candidate_generators.mlp_speculator.network import MLPSpeculatorConfig
    from ..settings import SpeculativeConfig


# All names that weights have in some format.
_ALL_WEIGHT_FILES = (*MEDUSA_FILES, MTP_FILES)

_methods_on_the_hub = ReadOfRepositories()

# Model types of transformers whose only keys and values are their target's.
_CACHE_READERS = ("gemma4_assistant", "gemma4_unified_assistant")


@dataclass(frozen=True)
class TargetNeeds:
    """What a checkpoint says of the target that it was made for; `None` where it says nothing.

    Args:
        name (`str`, *optional*): Repo id or folder, by the config or the card.
        hidden_size (`int`, *optional*): Of the states that the drafter reads.
        vocab_size (`int`, *optional*): Of its tokens; padding may differ.
        num_hidden_layers (`int`, *optional*): Decoder layers.
        min_hidden_layers (`int`, *optional*): Decoder layers that it must have for the states that are read.
        model_type (`str`, *optional*): Of a drafter that has the target's own layers.
    """

    name: str | None = None
    hidden_size: int | None = None
    vocab_size: int | None = None
    num_hidden_layers: int | None = None
    min_hidden_layers: int | None = None
    model_type: str | None = None


@dataclass(frozen=True)
class Detection:
    """What a checkpoint is.

    Args:
        method (`str`): What drafts with it.
        format (`str`): A row of [`~hub.formats.FORMATS`].
        producer (`str`): Who publishes or writes that format.
        target (`TargetNeeds`): The target it was made for.
        num_draft_tokens (`int`, *optional*): Tokens of a draft that it was made for; `None`: it does not say, or any.
        num_tensors (`int`, *optional*): In its weight files; `None` where only reading them whole would tell.
        num_bytes (`int`, *optional*): Of its weights.
        weight_file (`str`, *optional*): The file that the weights are read from, or its index.
        mtp_layers (`int`): Multi-token-prediction layers that lie beside the layers of a whole model.
        problems (`tuple[str, ...]`): Why it cannot be used with any target; empty where it can.
    """

    method: str
    format: str
    producer: str
    target: TargetNeeds = field(default_factory=TargetNeeds)
    num_draft_tokens: int | None = None
    num_tensors: int | None = None
    num_bytes: int | None = None
    weight_file: str | None = None
    mtp_layers: int = 0
    problems: tuple[str, ...] = ()

    @property
    def is_pickled(self) -> bool:
        """Whether the weights are in a file of `torch.save`."""
        return self.weight_file is not None and is_pickled(self.weight_file)

    def to_dict(self) -> dict[str, Any]:
        """As plain Python and JSON types."""
        return {**asdict(self), "problems": list(self.problems)}


def detect(files: RepoFiles) -> Detection:
    """What the checkpoint with these files is.

    Raises:
        CheckpointAccessError: It cannot be reached.
        CheckpointFormatError: There is no readable `config.json`, it has no known format, or is ambiguous.
    """
    from ..checkpoints.loading import checkpoint_errors

    with checkpoint_errors(files.name):
        return _detected(files)


def _detected(files: RepoFiles) -> Detection:
    config = files.config
    row, weight_file, tensors, problems = _read(files)
    problems += _own_problems(row, config, tensors)
    evidence = _Evidence(files, config, tensors, row)
    return Detection(
        row.method,
        row.name,
        row.producer,
        evidence.target_needs(row),
        evidence.num_draft_tokens(row),
        None if tensors is None else len(tensors),
        files.sizes.get(weight_file) if tensors is None else tensors.num_bytes,
        weight_file,
        evidence.num_mtp_layers() if row.method == "draft_model" else 0,
        tuple(problems),
    )


def detect_checkpoint(name: str | os.PathLike, **location) -> Detection:
    """The same of a folder or repository; `location` is what [`RepoFiles`] takes."""
    return detect(RepoFiles(name, **location))


def detect_method(config: SpeculativeConfig, target_config: Any = None) -> str:
    """The method of the checkpoint `config.model`.

    Raises:
        CheckpointAccessError: It cannot be reached.
        CheckpointFormatError: There is no readable `config.json`, or it has no known format, or one that no method
            of this package can use.
    """
    files = RepoFiles.of(config)
    known = None if files.folder is not None else _methods_on_the_hub.find(files)
    if known is not None:
        return known
    # What else is wrong with it is for its loader to say.
    from ..checkpoints.loading import checkpoint_errors

    with checkpoint_errors(files.name):
        row, *_ = _read(files)
    if row.unsupported:
        raise CheckpointFormatError(f"'{files.name}' {row.unsupported}")
    if files.folder is None:
        _methods_on_the_hub.keep(files, row.method)
    return row.method


def forget_method(name: str) -> None:
    """Forgets what has been read of a repository, which has changed."""
    _methods_on_the_hub.forget_name(name)


def read_config(config: SpeculativeConfig) -> dict:
    """`config.json` of `config.model` as a dict."""
    return RepoFiles.of(config).config


def reads_target_cache(draft_model: Any) -> bool:
    """Whether a draft model of transformers works on the keys and values of its target."""
    return getattr(getattr(draft_model, "config", None), "model_type", None) in _CACHE_READERS


def is_cache_reader(config: SpeculativeConfig) -> bool:
    """The same of the checkpoint `config.model`."""
    return read_config(config).get("model_type") in _CACHE_READERS


def _read(files: RepoFiles) -> tuple[Format, str | None, TensorTable | None, list[str]]:
    """The format, the weight file that its loader takes, the tensors in it, and what is wrong with the files.

    Where several files lie side by side, those that the loader does not look at are no evidence.
    """
    seen = files.first_of(_ALL_WEIGHT_FILES)
    tensors, problems = _tensors(files, seen)
    row = format_of(files.name, files.config, tensors)
    taken = files.first_of(row.files)
    if taken == seen:
        return row, seen, tensors, problems
    tensors, problems = _tensors(files, taken)
    own = format_of(files.name, files.config, tensors)
    if own.method != row.method:
        raise CheckpointFormatError(
            f"The method of '{files.name}' is ambiguous: {seen} is of the format {row.name} (method '{row.method}'), "
            f"and {taken} of {own.name} (method '{own.method}'). Name the method with `spec_method`."
        )
    return own, taken, tensors, problems


def _tensors(files: RepoFiles, weight_file: str | None) -> tuple[TensorTable | None, list[str]]:
    """Names and shapes of the tensors where they can be had, and what is wrong with the files."""
    if weight_file is None:
        return None, [f"'{files.name}' has no weights of a known name, such as {', '.join(WEIGHT_FILES[:2])}."]
    try:
        return files.tensors(weight_file), []
    except CheckpointAccessError:
        raise
    except CheckpointFormatError as error:
        return None, [str(error)]


def _own_problems(row: Format, config: Mapping[str, Any], tensors: Iterable[str] | None) -> list[str]:
    """What this package has no support for, whatever the target is, by what the method's loader says of it."""
    from ..candidate_generators.dflash import formats as dflash_formats
    from ..candidate_generators.eagle import formats as eagle_formats
    from ..candidate_generators.medusa import network as medusa
    from ..candidate_generators.mlp_speculator import network as mlp_speculator
    from ..candidate_generators.mtp import formats as mtp_formats

    refusals = {
        "eagle": eagle_formats.refusal,
        "eagle3": eagle_formats.refusal,
        "dflash": dflash_formats.refusal,
        "medusa": medusa.refusal,
        "mlp_speculator": mlp_speculator.refusal,
        "mtp": mtp_formats.refusal,
    }
    is_loaded_here = row.method in refusals and row.name != "gemma4-assistant"
    reason = row.unsupported or (refusals[row.method](tensors or (), config) if is_loaded_here else None)
    return [f"It {reason}"] if reason else []


class _Evidence:
    """Numbers in configs and shapes, looked up where the formats have them."""

    def __init__(self, files: RepoFiles, config: Mapping[str, Any], tensors: TensorTable | None, row: Format):
        from ..candidate_generators.dflash import formats as dflash_formats
        from ..candidate_generators.eagle import formats as eagle_formats

        self.files, self.config, self.tensors, self.method = files, config, tensors, row.method
        self.names = TensorNames(tensors or ())
        places = [config.get(key) for key in ("dflash_config", "eagle_config", "transformer_layer_config", "model")]
        places = [place for place in (*places[:2], config, *places[2:], config.get("text_config"))]
        # In the order of the method's own loader.
        own = {"eagle": eagle_formats.places_in, "eagle3": eagle_formats.places_in, "dflash": dflash_formats.places_in}
        places = own[row.method](config) if row.method in own else places
        self.places = [place for place in places if isinstance(place, Mapping)]

    def target_needs(self, row: Format) -> TargetNeeds:
        sizes = _SIZES.get(row.method, lambda evidence: {})(self)
        return TargetNeeds(name=self._target_name(row), **sizes)

    def _target_name(self, row: Format) -> str | None:
        """By the config, else by the card, where a drafter's base model mostly is its target."""
        verifier = self.config.get("speculators_config")
        verifier = verifier.get("verifier") if isinstance(verifier, Mapping) else None
        stated = [self.config.get("base_model_name_or_path")]
        stated += [verifier.get("name_or_path")] if isinstance(verifier, Mapping) else []
        card = self.files.card
        own = card.get("speculative")
        stated += [own.get("target")] if isinstance(own, Mapping) else []
        if row.method != "draft_model":
            base = card.get("base_model")
            stated += base if isinstance(base, list) else [base]
        return next((name for name in stated if isinstance(name, str) and name), None)

    def number(self, *keys: str) -> int | None:
        """The first positive integer that a config has for one of these keys."""
        values = (place.get(key) for key in keys for place in self.places)
        return next((value for value in values if COUNT.is_valid(value)), None)

    def size(self, dim: int, *names: str) -> int | None:
        """A dimension of the first tensor of these names that there is."""
        stored = next((self.names.stored[name] for name in names if name in self.names.stored), None)
        if stored is None:
            return None
        try:
            shape = self.tensors[stored]
        except CheckpointFormatError:
            # It is for loading to say what is wrong with a shard.
            return None
        return shape[dim] if -len(shape) <= dim < len(shape) else None

    @property
    def num_layers(self) -> int:
        """Layers by the names of the tensors."""
        return len({name.split(".")[1] for name in self.names.stored if name.startswith("layers.")})

    def layer_ids(self, *keys: str) -> list[int]:
        values = (place.get(key) for key in keys for place in self.places)
        ids = next((value for value in values if isinstance(value, list) and value), [])
        return ids if all(isinstance(index, int) for index in ids) else []

    def num_draft_tokens(self, row: Format) -> int | None:
        read = _LENGTHS[row.method](self) if row.method in _LENGTHS else None
        if read is not None:
            return read
        proposals = self.config.get("speculators_config")
        proposals = proposals.get("proposal_methods") if isinstance(proposals, Mapping) else None
        stated = proposals[0] if isinstance(proposals, list) and proposals else None
        stated = stated.get("speculative_tokens") if isinstance(stated, Mapping) else None
        return stated if COUNT.is_valid(stated) else None

    def num_mtp_layers(self) -> int:
        """MTP layers among the tensors of a whole model."""
        from ..candidate_generators.mtp.formats import count_layers

        layers = self.number("num_hidden_layers", "num_layers", "n_layer")
        extra = self.files.first_of([MTP_FILES])
        names = [*(self.tensors or ()), *(_tensors(self.files, extra)[0] or () if extra else ())]
        return count_layers(names, layers) if layers else 0


def _medusa_sizes(evidence: _Evidence) -> dict[str, int | None]:
    blocks = ("0.0.linear.weight", "medusa_head.0.0.linear.weight", "blocks.0.layers.0.weight")
    heads = [f"{prefix}0.{layer}.weight" for prefix in ("", "medusa_head.") for layer in range(1, 5)]
    whole, cut = evidence.number("vocab_size"), evidence.number("truncated_vocab_size")
    rows = evidence.size(0, *heads, "lm_heads.0.weight")
    return {
        "hidden_size": evidence.size(-1, *blocks) or evidence.number("hidden_size"),
        # Heads without an lm_head speak the target's tokens, and of a cut one the rows do not tell.
        "vocab_size": whole if whole and cut and cut < whole else rows if evidence.names.stored else whole,
    }


def _mlp_speculator_sizes(evidence: _Evidence) -> dict[str, int | None]:
    sizes = _stages(evidence)
    return {"hidden_size": sizes and sizes.emb_dim, "vocab_size": sizes and sizes.vocab_size}


_EAGLE_LAYERS = ("layers.0", "midlayer", "transformer")


def _eagle_sizes(evidence: _Evidence) -> dict[str, int | None]:
    ids = evidence.layer_ids("aux_layer_ids", "eagle_aux_hidden_state_layer_ids", "layer_ids")
    projections = (f"{layer}.self_attn.o_proj.weight" for layer in _EAGLE_LAYERS)
    inputs = evidence.size(1, "fc.weight") if evidence.method == "eagle3" else None
    # Without names of states there are three.
    width = _share(inputs, len(set(ids)) or 3) if inputs else evidence.size(0, *projections)
    return {
        "hidden_size": evidence.number("target_hidden_size") or width or evidence.number("hidden_size"),
        "vocab_size": evidence.size(0, "embed_tokens.weight", "t2d") or evidence.number("vocab_size"),
        # By the one notation these are numbers of layers, by the other one more.
        "min_hidden_layers": max(ids, default=None) if inputs else None,
    }


def _share(total: int, count: int) -> int | None:
    """One of `count` equal parts; `None` where there are no such."""
    return total // count if total % count == 0 else None


def _dflash_sizes(evidence: _Evidence) -> dict[str, int | None]:
    ids, inputs = evidence.layer_ids("target_layer_ids"), evidence.layer_ids("aux_hidden_state_layer_ids")
    # Where z-lab's files name none, there is one state for each layer of the draft.
    states = len(inputs) if "speculators_model_type" in evidence.config else len(ids) or evidence.num_layers
    columns = evidence.size(1, "fc.weight", "encoder.fc.weight")
    width = _share(columns, states) if columns and states else None
    return {
        "hidden_size": width or evidence.number("target_hidden_size", "hidden_size"),
        "vocab_size": evidence.size(0, "embed_tokens.weight", "t2d") or evidence.number("vocab_size"),
        "num_hidden_layers": evidence.number("num_target_layers"),
        "min_hidden_layers": max([*(index + 1 for index in ids), *inputs], default=None),
    }


def _mtp_sizes(evidence: _Evidence) -> dict[str, Any]:
    layer = evidence.config.get("transformer_layer_config")
    kind = layer.get("model_type") if isinstance(layer, Mapping) else evidence.config.get("target_model_type")
    return {
        "hidden_size": evidence.number("backbone_hidden_size", "hidden_size"),
        "vocab_size": evidence.number("vocab_size"),
        "model_type": kind if isinstance(kind, str) else None,
    }


# What the formats of a method say of the sizes of their target.
_SIZES = {
    "medusa": _medusa_sizes,
    "mlp_speculator": _mlp_speculator_sizes,
    "eagle": _eagle_sizes,
    "eagle3": _eagle_sizes,
    "dflash": _dflash_sizes,
    "mtp": _mtp_sizes,
    "draft_model": lambda evidence: {"vocab_size": evidence.number("vocab_size")},
}


def _medusa_length(evidence: _Evidence) -> int | None:
    from ..candidate_generators.medusa.network import count_heads

    # Configs are often wrong about it.
    return count_heads(evidence.names.stored) or evidence.number("medusa_num_heads", "num_heads")


def _mlp_speculator_length(evidence: _Evidence) -> int | None:
    sizes = _stages(evidence)
    return sizes and sizes.n_predict


def _stages(evidence: _Evidence) -> MLPSpeculatorConfig | None:
    """What the config of an MLP speculator says, by defaults where it says nothing; `None` where it is unusable."""
    from ..candidate_generators.mlp_speculator.network import MLPSpeculatorConfig

    try:
        return MLPSpeculatorConfig.from_dict(evidence.config)
    except CheckpointFormatError:
        return None


def _dflash_length(evidence: _Evidence) -> int | None:
    from ..candidate_generators.dflash.formats import num_drafts

    return num_drafts(evidence.config)


def _mtp_length(evidence: _Evidence) -> int | None:
    count = evidence.number("num_nextn_predict_layers", "mtp_num_hidden_layers", "num_mtp_layers")
    # One layer drafts any number of tokens.
    return count if count and count > 1 else None


_LENGTHS = {
    "medusa": _medusa_length,
    "mlp_speculator": _mlp_speculator_length,
    "dflash": _dflash_length,
    "mtp": _mtp_length,
}
