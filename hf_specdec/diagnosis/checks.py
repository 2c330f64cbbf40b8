"""Checks a pair without generating: does it fit, in which data types, with which vocabularies and templates."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Literal

import torch
from torch import nn
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from ..bench.report import described_machine
from ..candidate_generators.draft_model.network import checkpoint_location, draft_tokenizer
from ..candidate_generators.draft_model.vocabularies import Vocabulary, difference, relation
from ..checkpoints.files import RepoFiles
from ..errors import CheckpointFormatError, SpecConfigError, SpecDecError, shown
from ..hub.detect import Detection, detect
from ..hub.inspect import target_problems
from ..kernels.few_rows import has_kernel
from ..machine import describe_environment, free_bytes, multiplies
from ..method import drafting_method, is_language_model
from ..settings import SpeculativeConfig
from ..speculator import Speculator
from ..target_facts import active_adapters, quantisation, vocabulary_size
from ..training.options import RESULT_FILE


Status = Literal["ok", "warning", "error"]


@dataclass(frozen=True)
class Finding:
    """The result of one check."""

    check: str  # "fit", "dtype", "vocabulary", "chat template", "acceptance" or "machine"
    status: Status
    found: str  # in sentences
    remedy: str = ""  # what to do, if there is anything


# ---------------------------------------------------------------------------------------------- what the files say


def checkpoint_findings(
    files: RepoFiles, config: SpeculativeConfig, target_model: PreTrainedModel
) -> Iterator[Finding]:
    """Does the checkpoint of `config.model` fit: what it is, and whether configs and shapes are the target's."""
    try:
        found = detect(files)
    except CheckpointFormatError as error:
        yield Finding("fit", "error", str(error), "Pass a drafter of a known format.")
        return
    size = f", {found.num_bytes / 1e6:.1f} MB" if found.num_bytes else ""
    yield Finding("fit", "ok", f"{found.method} in the format {found.format} ({found.producer}){size}.")
    for problem in found.problems:
        yield Finding("fit", "error", problem, "Choose another: `hf-specdec inspect --target MODEL` lists some.")
    drafting = drafting_method(config.method)
    method = config.method if drafting is None else drafting.name
    in_target = drafting is not None and drafting.in_target_checkpoint
    if method != found.method and not (found.mtp_layers and in_target):
        yield Finding(
            "fit",
            "error",
            f"The checkpoint is for '{found.method}', and the method '{method}' was asked for.",
            "Leave the method out: it is read from the checkpoint.",
        )
    # Layers in the target's own checkpoint fit by being its own.
    is_own = in_target and is_language_model(found.method)
    for problem in [] if is_own else target_problems(found, target_model.config.to_dict()):
        yield Finding("fit", "error", problem, "Choose a drafter that was made for this target.")
    yield from _base_findings(found, target_model)
    most, k = found.num_draft_tokens, config.fixed_length
    if most and k and k > most:
        yield Finding(
            "fit",
            "warning",
            f"num_speculative_tokens={k}, and the checkpoint was made for {most}.",
            f"Use {most}, or leave it out.",
        )


def _base_findings(found: Detection, target_model: PreTrainedModel) -> Iterator[Finding]:
    made_for, name = found.target.name, str(getattr(target_model.config, "_name_or_path", "") or "")
    if made_for is None or is_language_model(found.method):
        return
    # By the ends of the names: folders have paths, snapshots of the cache the repo id as a part of it.
    end = made_for.rstrip("/").rpartition("/")[2].lower()
    if end in name.lower().replace("--", "/").split("/"):
        yield Finding("fit", "ok", f"It was made for '{made_for}'.")
        return
    yield Finding(
        "fit",
        "warning",
        f"It was made for '{made_for}', and the target is '{name or 'not loaded from a checkpoint'}'.",
        "Use it with that model, or with one that differs little from it, such as a light fine-tune.",
    )


def tokenizer_findings(config: SpeculativeConfig, tokenizer: PreTrainedTokenizerBase) -> Iterator[Finding]:
    """Findings about the vocabulary and the chat template beside the drafter, against the target's."""
    if config.model is None:
        return
    try:
        theirs = draft_tokenizer(config, config.model, checkpoint_location(config))
    except SpecConfigError as error:
        yield Finding("vocabulary", "error", str(error), "Correct `draft_tokenizer`.")
        return
    is_mapped = is_language_model(config.method) and config.options.draft_vocabulary != "same"
    if theirs is None:
        if is_mapped:
            yield Finding(
                "vocabulary",
                "warning",
                "The draft model has no tokenizer beside it, so that the tables cannot be compared.",
                "Name its tokenizer as `draft_tokenizer`, or say by draft_vocabulary='same' that it is the target's.",
            )
        return
    differs = difference(tokenizer.get_vocab(), theirs.get_vocab())
    if differs is None:
        yield Finding("vocabulary", "ok", f"Both tokenizers have the same {len(theirs.get_vocab())} tokens.")
    elif is_mapped:
        yield _mapping_finding(config, tokenizer, theirs)
    else:
        is_whole = is_language_model(config.method)
        yield Finding(
            "vocabulary",
            "error" if is_whole else "warning",
            f"Target and drafter have different tokenizers: {differs}.",
            "Use a drafter with the target's tokenizer" + (", or leave out `draft_vocabulary`." if is_whole else "."),
        )
    templates = getattr(theirs, "chat_template", None), tokenizer.chat_template
    if None not in templates and templates[0] != templates[1]:
        yield Finding(
            "chat template",
            "warning",
            "The chat template beside the drafter is not the target's: it was trained on text of another form.",
            "Use the template of the drafter's training, thinking mode included, or a drafter that knows this one.",
        )


def _mapping_finding(
    config: SpeculativeConfig, tokenizer: PreTrainedTokenizerBase, theirs: PreTrainedTokenizerBase
) -> Finding:
    """What a draft model with another tokenizer shares with the target."""
    target, draft = Vocabulary(tokenizer), Vocabulary(theirs)
    sizes = (max(target.texts) + 1, max(draft.texts) + 1, max(draft.texts) + 1)
    try:
        found = relation(target, draft, sizes, config.options.draft_vocabulary, ["target", config.model])
    except CheckpointFormatError as error:
        return Finding("vocabulary", "error", str(error), "Use a draft model with the target's tokenizer.")
    note = found.note or ""
    note = f"{note[:1].upper()}{note[1:]}."
    return Finding("vocabulary", "ok", note, "A draft model with the target's tokenizer has more drafts accepted.")


# ------------------------------------------------------------------------------------------------- what was loaded


def network_findings(
    speculator: Speculator, target_model: PreTrainedModel, files: RepoFiles | None
) -> Iterator[Finding]:
    """Findings about the loaded draft network: weights, data types, vocabulary."""
    network = speculator.generator_class.network(speculator.resources)
    if network is None:
        return
    matrices = {name: tensor for name, tensor in network.named_parameters() if tensor.is_floating_point()}
    broken = [name for name, tensor in matrices.items() if not bool(tensor.isfinite().all())]
    empty = [name for name, tensor in matrices.items() if tensor.dim() > 1 and not bool(tensor.any())]
    if broken:
        yield Finding("fit", "error", f"NaN or infinite values in {_few(broken)}.", "Pass an undamaged checkpoint.")
    if empty:
        yield Finding("fit", "warning", f"Nothing but zeros in {_few(empty)}.", "Is it trained to the end?")
    if not broken and not empty:
        count = sum(tensor.numel() for tensor in matrices.values())
        yield Finding("fit", "ok", f"{count / 1e6:.2f} M parameters, all finite.")
    yield from _dtype_findings(network, target_model, files)
    names = active_adapters(target_model)
    if names and getattr(network, "target_hidden_states", ()):
        yield Finding(
            "fit",
            "warning",
            f"The target has active adapters ({', '.join(names)}), and drafters read its states, which these change.",
            "Compare the acceptance with that of the target without them; train the drafter on the adapted target if "
            "it is much lower.",
        )
    ids = token_ids(network)
    if ids is not None:
        size = vocabulary_size(target_model)
        yield Finding("vocabulary", "ok", f"{len(ids)} of the target's {size} tokens can be drafted.")


def _dtype_findings(network: nn.Module, target_model: PreTrainedModel, files: RepoFiles | None) -> Iterator[Finding]:
    """Findings about data types and quantised weights: the target's, the drafter's, and those it was trained on."""
    own = next((tensor.dtype for tensor in network.parameters() if tensor.is_floating_point()), None)
    names = [str(dtype).removeprefix("torch.") for dtype in (own, target_model.dtype)]
    if own is torch.float16 and target_model.dtype is torch.bfloat16:
        yield Finding(
            "dtype",
            "warning",
            "The drafter computes in float16, and states of a bfloat16 target may overflow it.",
            "Leave `dtype` out, or set it to bfloat16.",
        )
    else:
        yield Finding("dtype", "ok", f"The drafter computes in {names[0]}, the target in {names[1]}.")
    theirs, own = quantisation(target_model), quantisation(network)
    if not getattr(network, "target_hidden_states", ()):
        if own != theirs:
            note = (
                f"The target's weights are {_kind(theirs)}, the drafter's {_kind(own)}: that costs acceptance at most."
            )
            yield Finding("dtype", "ok", note)
        return
    try:
        about = files.read_json(RESULT_FILE) if files is not None and RESULT_FILE in files else {}
    except (SpecDecError, OSError) as error:
        yield Finding("dtype", "warning", str(error))
        return
    trained_on = about.get("target_quantization")
    if not isinstance(trained_on, str):
        trained_on = None
    if trained_on != theirs:
        yield Finding(
            "dtype",
            "warning",
            f"The target's weights are {_kind(theirs)}, and the drafter was trained on the states of one whose "
            f"weights are {_kind(trained_on and shown(trained_on))}, as far as its files say.",
            "Compare the acceptance with that of such a target if it is low; `hf-specdec train` takes a quantised "
            "target, too.",
        )
    elif theirs is not None:
        yield Finding("dtype", "ok", f"It was trained on a target whose weights are {_kind(theirs)}, too.")


def _kind(quantised: str | None) -> str:
    return "not quantised" if quantised is None else f"quantised ({quantised})"


def token_ids(network: nn.Module) -> torch.LongTensor | None:
    """The target's ids of a network's own draft vocabulary; `None` where it has the target's."""
    ids = getattr(network, "token_ids", None)
    return getattr(network, "token_map", None) if ids is None else ids


def machine_findings(target_model: PreTrainedModel) -> Iterator[Finding]:
    """What the machine has: processor or GPU, memory, versions, kernels."""
    about = describe_environment(target_model.device, target_model.dtype)
    free = free_bytes(target_model.device) / 1e9
    yield Finding("machine", "ok", f"{described_machine(about)}; {free:.1f} GB free.")
    if target_model.device.type != "cpu":
        return
    if target_model.dtype is torch.bfloat16 and multiplies() is False:
        yield Finding(
            "machine",
            "warning",
            "This processor has no instructions for products in bfloat16: prompts and batches take several times as "
            "long as in float32.",
            "Load the target with `dtype=torch.float32`, which takes twice the memory.",
        )
    if not has_kernel():
        remedy = "`pip install numba` brings a kernel, which is faster over few rows."
        yield Finding("machine", "ok", "Products of few rows are torch's: numba cannot be imported.", remedy)


def _few(names: Sequence[str]) -> str:
    return ", ".join(names[:3]) + (f" and {len(names) - 3} more" if len(names) > 3 else "")
