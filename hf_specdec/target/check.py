"""A check that forwards over slots compute what plain generation computes, before anything is shown.

After the prompts plain generation's own forward is compared with one over slots, once for a model, and once more where
rows are padded. Forwards that are neither transformers' nor PEFT's may behave differently later: of them several run,
and are compared with one over all their tokens. None is counted in the statistics.

Shapes: B rows of the call, N tokens after the prompts, V vocabulary.
"""

from __future__ import annotations

from contextlib import suppress
from typing import Any
from weakref import WeakKeyDictionary, ref

import torch
from torch import nn
from transformers.cache_utils import DynamicCache

from ..drafts import chain_topology
from ..environment import is_switched_on
from ..errors import UnsupportedModelError
from ..target_facts import quantisation
from .forward import SlotForward
from .model import SlotModel
from .parts.rotary import ChangingRotary
from .prompts import Continuation, Request, following_inputs


# Largest difference of logits by rounding, as a part of their spread over the vocabulary.
_ROUNDING, _COARSE_ROUNDING = 0.005, 0.1

# Packages with whose forwards whole texts are compared in the tests. With those of others so many tokens are read.
_COMPARED = ("torch", "transformers", "peft", "accelerate", "hf_specdec")
_MOST_TOKENS = 32

# For how many tokens each model was found to go on as in plain generation, with and without padding, by the forwards
# of others that it had.
_checked: WeakKeyDictionary[nn.Module, dict[tuple[Any, ...], int]] = WeakKeyDictionary()


def check_continuation(
    request: Request, target: SlotModel, max_length: int, continuation: Continuation, tokens: torch.LongTensor
) -> None:
    """Refuses a target that goes on after the prompts, with tokens `(B,)`, in another way than it is driven.

    A row may hold `max_length` tokens, of which the last is never read.
    """
    model, most_tokens = target.model, min(max_length - request.input_ids.shape[1] - 1, _MOST_TOKENS)
    has_padding = min(continuation.text_lengths) < continuation.num_slots
    key = has_padding, _forwards_of_others(model)
    rotary = target.find(ChangingRotary)
    # Dropout makes every forward another one, and plain generation may read the whole text again.
    is_another = model.training or (rotary is not None and rotary.read_again_at is not None)
    is_checked = _checked.get(model, {}).get(key, 0) >= most_tokens
    # Other processes would wait for forwards that they do not make.
    if is_checked or is_another or request.synced_gpus or not is_switched_on("CHECK", default=True):
        return
    # With known code one token speaks for all.
    classes = {type(module) for module in model.modules() if module._modules}
    is_known = not key[1] and all(_is_compared(module_class.forward) for module_class in classes)
    count = 1 if is_known else most_tokens
    tokens, expected = _plainly_read(target, continuation, tokens, count)
    # As in a verification, of several nodes if there is room. None is committed, so no graph of them would run again.
    nodes = torch.cat([tokens, tokens], dim=1) if count == 1 < most_tokens else tokens
    graphs = target.graphs
    target.graphs = None
    try:
        # Of the target itself, which remembers whether its layers have looked at masks.
        logits = target.forward(nodes, chain_topology(nodes.shape[1] - 1, nodes.device)).logits[:, :count]
    finally:
        target.graphs = graphs
    differences = _differences(logits, expected.to(logits.device))
    device = model.device.type
    is_cast = torch.amp.is_autocast_available(device) and torch.is_autocast_enabled(device)
    # Layers may round what they read, too.
    is_wide = all(parameter.dtype in (torch.float32, torch.float64) for parameter in model.parameters())
    is_coarse = is_cast or torch.get_float32_matmul_precision() != "highest" or quantisation(model) is not None
    limit = _ROUNDING if is_wide and not is_coarse else _COARSE_ROUNDING
    if limit == _COARSE_ROUNDING and count > 1:
        # A single token may be near a tie of experts.
        differences = torch.minimum(differences[:, :-1], differences[:, 1:])
    difference = float(differences.max())
    if not difference <= limit:
        raise UnsupportedModelError(
            f"{type(model).__name__} goes on after the prompt in a way that speculation does not know: the logits of "
            f"a verification differ from those of plain generation by {difference:.1%} of their spread, and rounding "
            f"explains {limit:.1%}. The text would not be that of plain generation. Leave the speculative arguments "
            "out; HF_SPECDEC_CHECK=0 in the environment switches this check off."
        )
    _checked.setdefault(model, {})[key] = _MOST_TOKENS if is_known else most_tokens


def _plainly_read(
    target: SlotModel, continuation: Continuation, tokens: torch.LongTensor, count: int
) -> tuple[torch.LongTensor, torch.Tensor]:
    """Tokens `(B, N)` after the prompts, the best ones, and their logits, by forwards of plain generation."""
    model, profile, read, logits = target.model, target.profile, [], []
    like = DynamicCache(config=model.config.get_text_config(decoder=True))
    with target.cache.kept(like), target.reading(SlotForward(tokens[:, None])):
        for number in range(count):
            read.append(tokens[:, None])
            inputs = following_inputs(continuation.inputs, profile, read[-1], number)
            inputs |= {profile.cache_name: target.forward_cache, "return_dict": True}
            logits.append(model(**inputs).logits[:, -1])
            tokens = logits[-1].argmax(-1).to(tokens.device)
    return torch.cat(read, dim=1), torch.stack(logits, dim=1)


def _forwards_of_others(model: nn.Module) -> tuple[ref[Any], ...]:
    """The forwards of a model and the parts below it that no package has which is known here."""
    references = []
    for module in (model, *model.children()):
        # accelerate's hooks keep what they run.
        forward = vars(module).get("_old_forward") or module.forward
        function = getattr(forward, "__func__", forward)
        if not _is_compared(function):
            with suppress(TypeError):
                references.append(ref(function))
    return tuple(references)


def _is_compared(function: Any) -> bool:
    while function is not None:
        # A function around another one has taken its names over, as those of transformers' decorators do.
        name = getattr(function, "__globals__", {}).get("__name__") or type(function).__module__
        if name.partition(".")[0] not in _COMPARED:
            return False
        function = getattr(function, "__wrapped__", None)
    return True


def _differences(logits: torch.Tensor, expected: torch.Tensor) -> torch.Tensor:
    """Root mean squares of the differences over the standard deviations of what was expected, `(B, N)`."""
    logits, expected = logits.double(), expected.double()
    # Some models rule tokens out by the lowest number.
    is_usual = expected.abs() < torch.finfo(torch.bfloat16).max / 2**20
    count = is_usual.sum(-1).clamp(min=1)
    expected = expected.where(is_usual, 0)
    mean = expected.sum(-1, keepdim=True) / count[..., None]
    spread = (expected - mean).where(is_usual, 0).square().sum(-1)
    error = (logits - expected).where(is_usual, 0).square().sum(-1)
    return (error / spread.clamp(min=torch.finfo(torch.float32).tiny)).sqrt()
