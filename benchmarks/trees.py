"""What it costs to verify a draft: chains and trees of 1 to 64 nodes beside decoding one token.

    python benchmarks/trees.py                 # everything, about 10 minutes on one core
    python benchmarks/trees.py --quick         # a small part of it, about a minute
    python benchmarks/trees.py --targets demo --dtypes float32 --batch-sizes 1 --json out.json

A cycle is the forward over anchor and draft nodes, the acceptance and the commit of a path of three draft tokens, in
our own loop's code; drafting is left out. It is compared with the same cycle without drafts and with the model's own
forward of one token over a `DynamicCache`. All sides take turns within each round, and ratios are taken within a
round. Times are of the process, on one thread, so that a busy machine changes them little.
"""

from __future__ import annotations

import argparse
import json
import random
import statistics
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from time import perf_counter, process_time

import torch
from common import prefilled_cache, random_prompts, random_target, without_end
from rich.console import Console
from rich.table import Table
from transformers import DynamicCache, PreTrainedModel
from transformers.utils import logging

from hf_specdec import DraftTree, demo
from hf_specdec.benchmarking import describe_environment
from hf_specdec.decoding.cache import SlotCache
from hf_specdec.decoding.functional import slot_model
from hf_specdec.decoding.masks import node_masks, node_positions
from hf_specdec.kernels.acceptance import follow
from hf_specdec.logits.acceptance import best_tokens
from hf_specdec.token_trees import TokenTree


# Verified nodes: the anchor and one less drafted.
SIZES = (1, 8, 16, 32, 64)

CONTEXT = 512
ACCEPTED = 3
TREE_DEPTH = 8

# 17 layers of 15.7 M parameters and a head of 32.8 M: 300 M are read for a token.
NUM_LAYERS = 17

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}

PARTS = ("topology", "forward", "acceptance", "commit")


@dataclass(frozen=True)
class Case:
    target: str
    dtype: str
    batch_size: int

    def __str__(self) -> str:
        return f"{self.target}, {self.dtype}, batch {self.batch_size}, context {CONTEXT}"


@dataclass
class Cost:
    """Milliseconds of one cycle, part by part; `masks` (and positions) are a part of the forward, timed again.

    Attributes:
        topology (`float`): Depths and ancestors from the parents; static trees and chains have them ready.
        forward (`float`): Of the target over all nodes, masks and positions included.
        acceptance (`float`): Best token of each node, accepted path, transfer to the host.
        commit (`float`): Moving the path's keys and values into place.
        masks (`float`): Masks and positions alone.
    """

    topology: float = 0.0
    forward: float = 0.0
    acceptance: float = 0.0
    commit: float = 0.0
    masks: float = 0.0

    @property
    def cycle(self) -> float:
        return sum(getattr(self, part) for part in PARTS)


class Clock:
    """Milliseconds of process time since the last question."""

    def __init__(self):
        self.last = process_time()

    def lap(self) -> float:
        before, self.last = self.last, process_time()
        return 1000 * (self.last - before)


# -------------------------------------------------------------------------------------------------------------- drafts


def chain(size: int, rows: int, draws: random.Random, vocab_size: int) -> DraftTree:
    return DraftTree.from_lists([_tokens(size, draws, vocab_size) for _ in range(rows)])


def static_tree(size: int, rows: int, draws: random.Random, vocab_size: int) -> DraftTree:
    tree = TokenTree.of_size(size, TREE_DEPTH)
    return tree.draft(torch.tensor([_tokens(size, draws, vocab_size) for _ in range(rows)]))


def dynamic_tree(size: int, rows: int, draws: random.Random, vocab_size: int) -> DraftTree:
    """Another tree for every row and every cycle, about as wide and deep as the static one."""
    parents = [_random_parents(size, draws) for _ in range(rows)]
    return DraftTree.from_lists([_tokens(size, draws, vocab_size) for _ in range(rows)], parents=parents)


SHAPES: dict[str, Callable[..., DraftTree]] = {
    "chain": chain,
    "static tree": static_tree,
    "dynamic tree": dynamic_tree,
}


def _tokens(size: int, draws: random.Random, vocab_size: int) -> list[int]:
    # Different ones, and never the last id: see `accepting_choices`.
    return draws.sample(range(vocab_size - 1), size)


def _random_parents(size: int, draws: random.Random) -> list[int]:
    """The first nodes form the path that will be accepted, the others hang anywhere that is not too deep."""
    parents, depths = [], []
    for node in range(size):
        shallow = [other for other, depth in enumerate(depths) if depth < TREE_DEPTH]
        parent = node - 1 if node < ACCEPTED else draws.choice([-1, *shallow])
        parents.append(parent)
        depths.append(1 if parent < 0 else depths[parent] + 1)
    return parents


def accepting_choices(draft: DraftTree, vocab_size: int) -> torch.LongTensor:
    """Choices of a target `(B, T)` that lead along first children, `ACCEPTED` nodes deep, and out of the draft."""
    rows = []
    for tokens, parents in zip(draft.token_lists(), draft.parent_lists()):
        choices, node = [vocab_size - 1] * (len(tokens) + 1), -1
        for _ in range(min(ACCEPTED, len(tokens))):
            child = parents.index(node) if node in parents else None
            if child is None:
                break
            choices[node + 1], node = tokens[child], child
        rows.append(choices)
    return torch.tensor(rows)


# --------------------------------------------------------------------------------------------------------------- sides


class OurTarget:
    """The target over slots, rows of different lengths as they are after some cycles.

    Args:
        model (`PreTrainedModel`): The target.
        cache (`DynamicCache`): Keys and values of all prompts but their last tokens.
        batch_size (`int`): B.
        draws (`random.Random`): Of drafts; no dynamic tree may come twice, since what follows from it would be kept.
    """

    def __init__(self, model: PreTrainedModel, cache: DynamicCache, batch_size: int, draws: random.Random):
        self.model, self.batch_size, self.draws = model, batch_size, draws
        self.vocab_size = model.config.vocab_size
        slots = SlotCache(CONTEXT + 2 * max(SIZES))
        slots.load(cache)
        self.slots = slot_model(model, slots)
        self.slots.start_slots([0] * batch_size)
        self.lengths = [length - 3 * row for row, length in enumerate(slots.lengths)]

    def cycle(self, shape: str, nodes: int) -> Cost:
        """The cost of one cycle over `nodes` verified nodes."""
        draft = SHAPES[shape](nodes - 1, self.batch_size, self.draws, self.vocab_size)
        anchors = torch.zeros((self.batch_size, 1), dtype=torch.long)
        choices, cost, cache = accepting_choices(draft, self.vocab_size), Cost(), self.slots.cache
        cache.lengths = list(self.lengths)
        clock = Clock()
        topology = draft.topology
        cost.topology = clock.lap()
        output = self.slots.forward(torch.cat([anchors, draft.tokens], dim=1), topology)
        cost.forward = clock.lap()
        best_tokens(output.logits)
        accepted = follow(draft, choices)
        counts = torch.cat([accepted.num_accepted[:, None], accepted.tokens], dim=1).tolist()
        cost.acceptance = clock.lap()
        counts = [row[0] + 1 for row in counts]
        path = accepted.path[:, : max(counts)]
        clock.lap()
        cache.commit(counts, None if draft.is_chain else path)
        cost.commit = clock.lap()
        cost.masks = self.masks(topology)
        return cost

    def masks(self, topology) -> float:
        """Milliseconds of masks and positions alone; what is kept of a tree from cycle to cycle is there by now."""
        slots, config = self.slots, self.model.config
        groups = config.num_attention_heads // config.num_key_value_heads
        slots.cache.lengths = list(self.lengths)
        clock = Clock()
        node_masks(topology, slots.rows, slots.cache.plan.columns, slots.profile.spans, self.model.dtype, groups)
        node_positions(topology, slots.rows)
        return clock.lap()


class PlainTarget:
    """The model's own forward of one token, as plain `generate()` runs it."""

    def __init__(self, model: PreTrainedModel, cache: DynamicCache, batch_size: int):
        self.model, self.cache = model, cache
        self.tokens = torch.zeros((batch_size, 1), dtype=torch.long)

    def cycle(self) -> float:
        """Milliseconds of one forward."""
        clock = Clock()
        self.model(self.tokens, past_key_values=self.cache, use_cache=True)
        milliseconds = clock.lap()
        self.cache.crop(-1)
        return milliseconds


# ----------------------------------------------------------------------------------------------------------- measuring


def load_target(name: str, dtype: torch.dtype) -> PreTrainedModel:
    return without_end(demo.load_target(dtype)) if name == "demo" else random_target(dtype, NUM_LAYERS)


@torch.inference_mode()
def measure(
    model: PreTrainedModel, cache: DynamicCache, batch_size: int, sizes: list[int], rounds: int, draws: random.Random
) -> list[dict]:
    """Rows of figures, one for each shape and size."""
    ours = OurTarget(model, _rows_of(cache, batch_size), batch_size, draws)
    plain = PlainTarget(model, _rows_of(cache, batch_size), batch_size)
    sides = [("chain", 1), *((shape, nodes) for nodes in sizes if nodes > 1 for shape in SHAPES)]
    for shape, nodes in sides:
        ours.cycle(shape, nodes)
    plain.cycle()
    costs: dict[tuple[str, int], list[Cost]] = {side: [] for side in sides}
    plain_ms: list[float] = []
    for number in range(rounds):
        turn = number % len(sides)
        plain_ms.append(plain.cycle())
        for side in sides[turn:] + sides[:turn]:
            costs[side].append(ours.cycle(*side))
    one = costs[sides[0]]
    rows = [_row(shape, nodes, found, one, plain_ms) for (shape, nodes), found in costs.items()]
    return [{"shape": "plain forward", "nodes": 1, "cycle_ms": spread(plain_ms)}, *rows]


def _row(shape: str, nodes: int, costs: list[Cost], one: list[Cost], plain_ms: list[float]) -> dict:
    parts = {f"{part}_ms": spread([getattr(cost, part) for cost in costs]) for part in (*PARTS, "masks")}
    return {
        "shape": shape if nodes > 1 else "no draft",
        "nodes": nodes,
        **parts,
        "cycle_ms": spread([cost.cycle for cost in costs]),
        "forward_ratio": spread([cost.forward / base.forward for cost, base in zip(costs, one)]),
        "cycle_ratio": spread([cost.cycle / base.cycle for cost, base in zip(costs, one)]),
        "ratio_to_plain": spread([cost.cycle / base for cost, base in zip(costs, plain_ms)]),
    }


def spread(values: list[float]) -> list[float]:
    """Median, least and greatest."""
    return [round(value, 4) for value in (statistics.median(values), min(values), max(values))]


def _rows_of(cache: DynamicCache, batch_size: int) -> DynamicCache:
    """The same keys and values for every row of a batch."""
    copies = DynamicCache()
    for index, layer in enumerate(cache.layers):
        copies.update(layer.keys.repeat(batch_size, 1, 1, 1), layer.values.repeat(batch_size, 1, 1, 1), index)
    return copies


# -------------------------------------------------------------------------------------------------------------- output


def case_table(case: Case, rows: list[dict]) -> Table:
    table = Table(title=str(case), title_justify="left")
    table.add_column("draft", no_wrap=True)
    counts = ("verified\nnodes", "cycle\nms")
    parts = ("forward\nms", "of it\nmasks", "topology\nms", "acceptance\nms", "commit\nms")
    for column in (*counts, *parts, "x forward\n(range)", "x cycle\n(range)", "x plain\n(range)"):
        table.add_column(column, justify="right", no_wrap=True)
    for row in rows:
        keys = ("cycle_ms", "forward_ms", "masks_ms", "topology_ms", "acceptance_ms", "commit_ms")
        ratios = ("forward_ratio", "cycle_ratio", "ratio_to_plain")
        table.add_row(
            row["shape"],
            str(row["nodes"]),
            *(f"{row[key][0]:.2f}" if key in row else "" for key in keys),
            *(_ratio_text(row[key]) if key in row else "" for key in ratios),
        )
    return table


def _ratio_text(ratio: list[float]) -> str:
    return f"{ratio[0]:.2f} ({ratio[1]:.2f}-{ratio[2]:.2f})"


def _list_of(kind: type, choices: tuple | None = None) -> Callable[[str], list]:
    def parse(text: str) -> list:
        parts = text.split(",")
        if not all(part in choices if choices else part.isdecimal() and int(part) for part in parts):
            wanted = f"one or more of {', '.join(choices)}" if choices else "positive integers"
            raise argparse.ArgumentTypeError(f"wanted {wanted}, separated by commas, got '{text}'")
        return [kind(part) for part in parts]

    return parse


def parse_options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="float32, batch 1, 1, 16 and 64 nodes, few rounds")
    parser.add_argument("--targets", type=_list_of(str, ("demo", "random")), default=["demo", "random"])
    parser.add_argument("--dtypes", type=_list_of(str, tuple(DTYPES)), help="float32,bfloat16")
    parser.add_argument("--batch-sizes", type=_list_of(int), help="1,4")
    parser.add_argument("--sizes", type=_list_of(int), help=f"verified nodes; {','.join(map(str, SIZES))}")
    parser.add_argument("--demo-rounds", type=int, help="turns of all sides on the demo target; 60")
    parser.add_argument("--random-rounds", type=int, help="turns of all sides on the random target; 7")
    parser.add_argument("--json", type=Path, help="also write all figures to this file")
    options = parser.parse_args()
    quick = {"dtypes": ["float32"], "batch_sizes": [1], "sizes": [1, 16, 64], "demo_rounds": 20, "random_rounds": 3}
    full = {"dtypes": list(DTYPES), "batch_sizes": [1, 4], "sizes": list(SIZES), "demo_rounds": 60, "random_rounds": 7}
    for name, value in (quick if options.quick else full).items():
        if getattr(options, name) is None:
            setattr(options, name, value)
    if min(options.demo_rounds, options.random_rounds) < 1 or max(options.sizes) > max(SIZES):
        parser.error(f"at least one round and at most {max(SIZES)} nodes")
    return options


def environment(options: argparse.Namespace) -> dict:
    found = describe_environment("cpu", torch.float32)
    # It differs from case to case.
    del found["dtype"]
    settings = {key: value for key, value in vars(options).items() if key != "json"}
    return {**found, "context": CONTEXT, "accepted": ACCEPTED, "tree_depth": TREE_DEPTH, "options": settings}


def main() -> None:
    options = parse_options()
    logging.disable_progress_bar()
    logging.set_verbosity_error()
    torch.set_num_threads(1)
    console, began = Console(width=150), perf_counter()
    described = environment(options)
    versions = ", ".join(f"{name} {described[name]}" for name in ("torch", "transformers", "hf_specdec"))
    console.print(
        f"{described['cpu']}, 1 of {described['cores']} cores, load {described['load_average']}; {versions}. Process "
        f"time; medians. Each cycle accepts {ACCEPTED} draft tokens where it has them."
    )
    results, draws = [], random.Random(0)
    for target in options.targets:
        for dtype in options.dtypes:
            model = load_target(target, DTYPES[dtype])
            prompt = random_prompts(1, CONTEXT, model.config.vocab_size)
            cache = prefilled_cache(model, prompt)
            rounds = options.demo_rounds if target == "demo" else options.random_rounds
            for batch_size in options.batch_sizes:
                case = Case(target, dtype, batch_size)
                rows = measure(model, cache, batch_size, options.sizes, rounds, draws)
                results.append({"case": asdict(case), "rows": rows})
                console.print(case_table(case, rows))
            del model, cache
    console.print(f"{perf_counter() - began:.0f} seconds in all.")
    if options.json:
        options.json.write_text(json.dumps({"environment": described, "results": results}, indent=2))


if __name__ == "__main__":
    main()
