"""Checks before times count on a device: kernels against references, and the text of every method.

Kernels and references are called through the same public functions, on the same tensors. Texts are those of the
embedded demo's target in float32 with its trained drafters, which accept and reject as they do in use: chains, trees
and batches, against plain `generate()`; once with the lean forward of small models, once with the model's own modules,
which large ones go through; on a GPU also without graphs.

Shapes: B rows, H query heads, K key/value heads, T nodes, N draft nodes, S slots, D head size, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import nullcontext
from dataclasses import dataclass
from functools import partial
from typing import Any
from unittest.mock import patch

import torch
import torch.nn.functional as F
from transformers import LlamaConfig, PreTrainedModel
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

from hf_specdec import SpecDecodingStats, demo, record
from hf_specdec.bench.prompts import Batch, make_batches
from hf_specdec.diagnosis import verify
from hf_specdec.drafts import DraftTree, TreeTopology
from hf_specdec.errors import MissingDependencyError
from hf_specdec.kernels import _triton
from hf_specdec.kernels.acceptance import follow, reject_chain, reject_tree
from hf_specdec.kernels.best import best_log_probs, best_tokens
from hf_specdec.kernels.cache import WritePlan, move_slots, write_slots
from hf_specdec.kernels.gates import SILU
from hf_specdec.kernels.matches import match_lengths
from hf_specdec.kernels.norms import Norm
from hf_specdec.kernels.projections import Unnormed, added_product, gated_product, products
from hf_specdec.kernels.sampling import propose_from_probs, sample_from_probs
from hf_specdec.kernels.tree_attention import SlotTree, pack_ancestors, tree_attention
from hf_specdec.kernels.warpers import Warping, warped
from hf_specdec.layers.llama import normed
from hf_specdec.layers.rope import RotaryAngles
from hf_specdec.method import built_in_methods
from hf_specdec.target import lean


@dataclass
class Check:
    """One thing that was looked at.

    Attributes:
        what (`str`): Name.
        is_right (`bool`, *optional*): `None`: it could not be looked at, and `detail` says why.
        detail (`str`): What was found.
    """

    what: str
    is_right: bool | None
    detail: str


# ------------------------------------------------------------------------------------------------------------- kernels


# Sums in another order; float16 and bfloat16 weights are rounded before they meet the values, and the interpreter cuts
# bfloat16 off where a GPU rounds.
_TOLERANCES = {torch.float32: 1e-5, torch.float16: 4e-3, torch.bfloat16: 3e-2}

# A random number right on the border of two ids may go to either, since kernels and references add in another order.
_MAX_SHARE_OF_BORDERS = 0.002


def check_kernels(device: torch.device) -> Iterator[Check]:
    """Every operation of `hf_specdec.kernels`, as kernel and as reference; for the interpreter on small tensors."""
    for checks in kernel_checks(device).values():
        yield from checks()


def kernel_checks(device: torch.device, is_quick: bool = False) -> dict[str, Callable[[], Iterator[Check]]]:
    """Checks by operation; `is_quick` leaves out what would be compiled for more shapes of float16 and float32."""
    if not _triton.HAS_TRITON or not (device.type == "cuda" or _triton.IS_INTERPRETED):
        why = "not run: no GPU" if _triton.HAS_TRITON else "not run: Triton is not installed"
        return {"kernels": lambda: iter([Check("kernels", None, why)])}
    is_small = device.type != "cuda"

    def prepared(check: Callable, *arguments) -> Callable[[], Iterator[Check]]:
        return lambda: check(torch.Generator(device).manual_seed(0), *arguments)

    attention = {
        f"tree_attention, {dtype_name(dtype)}": prepared(
            _check_attention, dtype, is_small, is_quick and dtype != torch.bfloat16
        )
        for dtype in _TOLERANCES
    }
    return {
        **attention,
        "slots": prepared(_check_slots, is_small),
        "acceptance": prepared(_check_acceptance, is_small),
        "matches": prepared(_check_matches, is_small),
        "best tokens": prepared(_check_best, is_small),
        "warpers": prepared(_check_warpers, is_small),
        "angles": prepared(_check_angles),
        "layers": prepared(_check_layers, is_small),
    }


def dtype_name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def _both(function: Callable, *arguments, **options) -> tuple[Any, Any]:
    """Results of the reference and of the kernel."""
    results = []
    for choice in ("torch", "triton"):
        with patch.object(_triton, "CHOICE", choice):
            results.append(function(*arguments, **options))
    return results[0], results[1]


def random_topology(rows: int, nodes: int, generator: torch.Generator) -> TreeTopology:
    """Trees of any shape, another one for every row."""
    places = torch.arange(nodes, device=generator.device)
    draws = torch.rand((rows, nodes), generator=generator, device=generator.device)
    return TreeTopology.from_parents((draws * (places + 1)).long() - 1)


def _check_attention(
    generator: torch.Generator, dtype: torch.dtype, is_small: bool, only_first: bool
) -> Iterator[Check]:
    # Rows, query heads, key/value heads, nodes, slots, head size, and further arguments.
    shapes = (
        [(1, 4, 2, 5, 70, 32, {}), (2, 4, 2, 9, 60, 16, {"window": 16})]
        if is_small
        else [
            (1, 32, 8, 16, 4096, 128, {}),
            (4, 32, 8, 61, 700, 128, {}),
            (16, 16, 8, 5, 333, 64, {"window": 100}),
            (3, 8, 8, 1, 1500, 256, {"softcap": 20.0}),
            (2, 64, 8, 33, 600, 64, {"chunk": 256}),
        ]
    )
    for rows, heads, kv_heads, nodes, slots, size, options in shapes[: 1 if only_first else None]:
        draw = {"generator": generator, "device": generator.device}
        query = torch.randn((rows, heads, nodes, size), **draw).to(dtype)
        key, value = (torch.randn((rows, kv_heads, slots, size), **draw).to(dtype) for _ in range(2))
        topology = random_topology(rows, nodes - 1, generator)
        # The longest row fills the slots.
        lengths = slots - nodes - torch.arange(rows, device=generator.device) * (slots // (2 * rows))
        starts = torch.arange(rows, device=generator.device)
        tree = SlotTree(lengths, starts, pack_ancestors(topology.ancestors), topology.depths)
        expected, found = _both(tree_attention, query, key, value, tree, **options)
        error = ((found - expected).abs() / (1 + expected.abs())).max().item()
        shape = f"{rows} x {heads}/{kv_heads} heads of {size}, {nodes} nodes, {slots} slots {options or ''}"
        name = f"tree_attention, {dtype_name(dtype)}"
        yield Check(name, error <= _TOLERANCES[dtype], f"{shape.strip()}: greatest error {error:.1e}")


def _check_slots(generator: torch.Generator, is_small: bool) -> Iterator[Check]:
    device = generator.device
    rows, heads, size, nodes = (2, 2, 16, 9) if is_small else (4, 8, 64, 33)
    for dtype in (torch.bfloat16, torch.float32):
        new = [torch.randn((rows, nodes, heads, size), generator=generator, device=device).to(dtype) for _ in range(2)]
        new = [states.transpose(1, 2) for states in new]
        starts = torch.arange(rows, device=device) * 5 + 3
        path = torch.rand((rows, nodes), generator=generator, device=device).argsort(1)[:, :7].sort(1).values
        path[:, 0] = 0

        def write_and_move(dtype=dtype, new=new, starts=starts, path=path):
            buffers = [torch.zeros((rows + 1, heads, 80, size), dtype=dtype, device=device) for _ in new]
            write_slots(buffers, new, WritePlan(60, None, starts.tolist(), nodes))
            move_slots(buffers, starts, path)
            return torch.stack(buffers)

        expected, found = _both(write_and_move)
        name = f"write_slots, move_slots, {dtype_name(dtype)}"
        yield Check(name, torch.equal(found, expected), f"{rows} rows, {nodes} nodes, paths of {path.shape[1]}")


def _check_matches(generator: torch.Generator, is_small: bool) -> Iterator[Check]:
    rows, size = (2, 300) if is_small else (8, 32768)
    device = generator.device
    texts = torch.randint(3, (rows, size), generator=generator, device=device)
    lengths = torch.arange(size - rows, size, device=device)
    expected, found = _both(match_lengths, texts, lengths, 64)
    yield Check("match_lengths", torch.equal(found, expected), f"{rows} texts of {size} tokens")


def _check_best(generator: torch.Generator, is_small: bool) -> Iterator[Check]:
    rows, vocab = (2, 5000) if is_small else (16, 151936)
    logits = torch.randn((rows, vocab), generator=generator, device=generator.device)
    for shape in ((rows, vocab), (1, rows, vocab)):
        expected, found = _both(best_tokens, logits.view(shape))
        yield Check("best_tokens", torch.equal(found, expected), f"{rows} rows of {vocab}")
    (expected, expected_tokens), (found, tokens) = _both(best_log_probs, logits, 10)
    error = (found - expected).abs().max().item()
    is_right = torch.equal(tokens, expected_tokens) and error <= _TOLERANCES[torch.float32]
    yield Check("best_log_probs", is_right, f"{rows} rows of {vocab}: greatest error {error:.1e}")


def _check_warpers(generator: torch.Generator, is_small: bool) -> Iterator[Check]:
    """Of logits of 16 bits, among which many are equal."""
    rows, vocab = (2, 700) if is_small else (16, 151936)
    logits = torch.randn((rows, vocab), generator=generator, device=generator.device).mul_(3).bfloat16()
    for warping in (Warping(0.7), Warping(0.7, min_p=0.03), Warping(0.7, 50, 0.9), Warping(1.3, None, 0.95, 0.01)):
        expected, found = _both(warped, logits, warping)
        different = int((expected.isfinite() != found.isfinite()).sum())
        detail = f"{rows} rows of {vocab}, {warping}: {different} tokens are kept by one of them alone"
        yield Check("warped", different <= rows * (warping.top_p is not None), detail)
    uniforms = torch.rand(rows, generator=generator, device=generator.device, dtype=torch.float64)
    probs = logits.float().softmax(-1)
    probs[-1] = 0.0
    yield _same_ids("propose_from_probs", *_both(lambda: propose_from_probs(probs.clone(), uniforms)))


@torch.no_grad()
def _check_angles(generator: torch.Generator) -> Iterator[Check]:
    """Up to the end of the longest texts, where cosines need all digits of a position."""
    positions = torch.randint(1 << 20, (3, 5), generator=generator, device=generator.device)
    embedding, like = LlamaRotaryEmbedding(LlamaConfig()).to(positions.device), positions.float()
    for is_interleaved in (False, True):
        found = _both(RotaryAngles(embedding, is_interleaved=is_interleaved), positions, like)
        error = max((one - other).abs().max().item() for one, other in zip(*found))
        yield Check("rotary_angles", error <= 1e-6, f"positions below {1 << 20}: greatest error {error:.1e}")


@torch.no_grad()
def _check_layers(generator: torch.Generator, is_small: bool) -> Iterator[Check]:
    """Products with the stream and the norm, against those of torch; sums of rounded numbers differ by their order."""
    device, size, inner = generator.device, 1024, 1024 if is_small else 3584
    draw = {"generator": generator, "device": device}
    for tokens, norm in ((5, Norm), (16, partial(Norm, offset=1.0, rounds_last=True)), (64, Norm)):

        def drawn(*shape, factor=1.0):
            return (torch.randn(shape, **draw) * factor).to(torch.bfloat16)

        read, stream, known = drawn(tokens, inner), drawn(tokens, size), norm(drawn(size), 1e-5)
        output, gate, up = (
            (drawn(*shape, factor=shape[1] ** -0.5), None) for shape in ((size, inner), (inner, size), (inner, size))
        )
        total, squares = added_product(read, output, stream)
        unnormed = Unnormed(total, squares, known)
        hidden = normed(total, known)
        found = {
            "added_product": (total, stream + F.linear(read, output[0])),
            "products": (products(unnormed, [gate])[0], F.linear(hidden, gate[0])),
            "gated_product": (
                gated_product(unnormed, gate, up, SILU),
                F.silu(F.linear(hidden, gate[0])) * F.linear(hidden, up[0]),
            ),
        }
        for name, (mine, others) in found.items():
            error = ((mine - others).float().abs() / (1 + others.float().abs())).max().item()
            # Two rounded numbers are multiplied in the last one.
            most = _TOLERANCES[torch.bfloat16] * (1 + (name == "gated_product"))
            yield Check(name, error <= most, f"{tokens} tokens: greatest error {error:.1e}")


def _check_acceptance(generator: torch.Generator, is_small: bool) -> Iterator[Check]:
    device = generator.device
    rows, nodes, vocab = (3, 4, 600) if is_small else (64, 15, 151936)

    def uniforms(*shape):
        return torch.rand(shape, generator=generator, device=device, dtype=torch.float64)

    def random_probs(*shape):
        return torch.randn(shape, generator=generator, device=device).mul_(4).softmax(-1)

    probs = random_probs(rows * (nodes + 1), vocab)
    yield _same_ids("sample_from_probs", *_both(sample_from_probs, probs, uniforms(len(probs))))
    few = {"generator": generator, "device": device}
    followed = 16 if is_small else 64
    for name, draft in (
        ("chain", DraftTree.chain(torch.randint(2, (followed, nodes), **few))),
        ("tree", _random_trees(followed, nodes, 2, generator)),
    ):
        choices = torch.randint(2, (followed, nodes + 1), **few)
        yield _same_acceptance(f"follow, {name}", *_both(follow, draft, choices))
    target = random_probs(rows, nodes + 1, vocab)
    # Near the target's distribution, so that some are accepted.
    drawn_from = (target[:, :-1].log() + 0.5 * torch.randn(target[:, :-1].shape, **few)).softmax(-1)
    tokens = sample_from_probs(drawn_from, uniforms(rows, nodes))
    chain = DraftTree.chain(tokens, probs=drawn_from)
    draws = uniforms(rows, nodes), uniforms(rows, nodes + 1)
    yield _same_acceptance("reject_chain", *_both(reject_chain, chain, target, *draws))
    # Siblings are drawn from one distribution.
    parents = torch.tensor([-1, -1, *range(nodes - 2)], device=device)
    probs_of_parents = drawn_from[:, parents + 1]
    tree = DraftTree(
        sample_from_probs(probs_of_parents, uniforms(rows, nodes)),
        parents,
        torch.full((rows,), nodes, device=device),
        probs_of_parents,
    )
    yield _same_acceptance("reject_tree", *_both(reject_tree, tree, target, *draws))


def _random_trees(rows: int, nodes: int, vocab: int, generator: torch.Generator) -> DraftTree:
    parents = random_topology(rows, nodes, generator).parents[:, 1:] - 1
    counts = torch.randint(nodes + 1, (rows,), generator=generator, device=generator.device)
    tokens = torch.randint(vocab, (rows, nodes), generator=generator, device=generator.device)
    return DraftTree(tokens, parents, counts)


def _same_ids(what: str, expected: torch.LongTensor, found: torch.LongTensor) -> Check:
    different, total = int((expected != found).sum()), expected.numel()
    return Check(what, different <= _MAX_SHARE_OF_BORDERS * total, f"{different} of {total} draws differ")


def _same_acceptance(what: str, expected, found) -> Check:
    names = ("num_accepted", "path", "tokens")
    pairs = [(getattr(expected, name), getattr(found, name)) for name in names]
    same = torch.stack([(one == other).view(len(one), -1).all(1) for one, other in pairs]).all(0)
    different, total = int((~same).sum()), len(same)
    # A row makes a draw or two.
    allowed = 0 if what.startswith("follow") else max(1, int(_MAX_SHARE_OF_BORDERS * total))
    least, most = expected.num_accepted.aminmax()
    detail = f"{different} of {total} rows differ; from {int(least)} to {int(most)} tokens accepted"
    return Check(what, different <= allowed, detail)


# --------------------------------------------------------------------------------------------------------------- texts


# Chain and tree of the methods that have both; the others draft as they do by default.
_STATIC_CHAIN = {"speculative_token_tree": "[(0,), (0, 0), (0, 0, 0)]"}
_GROWN = {"draft_tree_depth": 5, "draft_tree_top_k": 4, "num_draft_nodes": 15}
_SHAPES: dict[str, dict[str, dict[str, Any]]] = {
    "ngram": {"chain": {"prompt_lookup_num_matches": 1}, "tree": {}},
    "suffix": {"chain": {}, "tree": {"suffix_decoding_use_tree_spec": True}},
    "recycling": {"chain": _STATIC_CHAIN, "tree": {"num_draft_nodes": 31}},
    "medusa": {"chain": {"num_speculative_tokens": 3}, "tree": {"num_draft_nodes": 31}},
    "mlp_speculator": {"chain": {"num_speculative_tokens": 3}, "tree": {"num_draft_nodes": 16}},
    "eagle": {"chain": {"num_speculative_tokens": 4}, "tree": _GROWN},
    "eagle3": {"chain": {"num_speculative_tokens": 4}, "tree": _GROWN},
    "mtp": {"chain": {"num_speculative_tokens": 3}, "tree": _GROWN},
    "dflash": {"chain": {}, "tree": {"num_draft_nodes": 16}},
}


def drafts() -> dict[str, dict[str, Any]]:
    """Settings of every method that can draft for the demo's target, chains and trees."""
    named = {method.name: {"method": method.name} for method in built_in_methods() if method.only_if_named}
    return {
        f"{name}, {shape}": {**settings, **own}
        for name, settings in (demo.settings() | named).items()
        if name == settings["method"]
        for shape, own in _SHAPES.get(name, {"chain": {}}).items()
    }


def target_and_batches(
    device: torch.device, max_new_tokens: int, is_quick: bool = False
) -> tuple[PreTrainedModel, list[Batch]]:
    """The demo's target, and batches of prompts."""
    target = demo.load_target().to(device)
    tokenizer, prompts = demo.load_tokenizer(), demo.prompts()
    # One to edit, one to continue, and the last ones together, padded.
    singles = prompts[-1:] if is_quick else (prompts[0], prompts[-1])
    batches = make_batches(tokenizer, singles, 1, max_new_tokens, device)
    if not is_quick:
        batches += make_batches(tokenizer, prompts[-4:], 4, max_new_tokens, device)
    return target, batches


def check_texts(device: torch.device, max_new_tokens: int) -> Iterator[Check]:
    """Compares greedy texts of every method in float32 with those of plain `generate()`: single rows and a batch."""
    target, batches = target_and_batches(device, max_new_tokens)
    ways = {"lean forward": (nullcontext, {}), "modules": (_through_modules, {})}
    if device.type == "cuda":
        ways["modules, no graphs"] = (_through_modules, {"enforce_eager": True})
    for way, (context, further) in ways.items():
        for name, settings in drafts().items():
            with context():
                yield check_text(f"{name}, {way}", target, settings | further, batches)


def check_text(what: str, target: PreTrainedModel, settings: dict, batches: list[Batch]) -> Check:
    with record() as made:
        try:
            [found] = verify(target, {what: settings}, batches)
        except MissingDependencyError as error:
            return Check(what, None, f"not run: {error}")
    stats, last = SpecDecodingStats.total([call.stats for call in made.calls]), made.calls[-1].stats
    detail = f"{stats.mean_acceptance_length:.2f} tokens a cycle, attention: {last.attention}, graphs: {last.graphs}"
    places = "; ".join(f"{one.verdict} in {one.prompt} from token {one.index}" for one in found.differences)
    return Check(what, not found.bugs, f"{detail}; {places}" if places else detail)


def _through_modules():
    """Lets no model run through functions over its weights."""
    return patch.object(lean, "has_lean_forward", lambda model: False)
