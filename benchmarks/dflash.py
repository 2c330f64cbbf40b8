"""What a block costs beside a chain, what of it is accepted, and which drafts of DFlash pay.

    python benchmarks/dflash.py                                     # everything, about 4 minutes on one core
    python benchmarks/dflash.py --quick                             # fewer sides and rounds, about 1 minute
    python benchmarks/dflash.py --json out.json --plot out.svg      # the figures as a file and as a picture
    python benchmarks/dflash.py --read out.json --plot out.svg      # the picture of an earlier run

Blocks: one draft of a network of random weights, beside a draft model of the same layers that drafts as many tokens
one after the other, and beside the target's forward over as many nodes. Drafts: whole `generate()` calls with trained
drafts as chains, with several denoising steps and as trees, beside plain ones. Cycles: where their time goes. All
sides take turns within each round, and ratios are taken within a round. Times are of the process, on one thread, so
that a busy machine changes them little. Run it from the repository's root: two of the drafts are those of the tests.
"""

from __future__ import annotations

import argparse
import functools
import json
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from time import perf_counter, process_time

import torch
from common import random_prompts, without_end
from eagle import Call, ratio
from rich.console import Console
from rich.table import Table
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, DynamicCache, PreTrainedModel, Qwen3Config, Qwen3ForCausalLM
from transformers.utils import logging
from trees import Clock, spread

from hf_specdec import Speculator, benchmarking, demo, record
from hf_specdec.candidate_generators.base import Commit, DraftStep, Prompt, Session
from hf_specdec.candidate_generators.dflash.generator import DFlashCandidateGenerator, DraftText
from hf_specdec.candidate_generators.dflash.network import DFlashNetwork
from hf_specdec.candidate_generators.dflash.recipe import DFlashRecipe
from hf_specdec.decoding.cache import SlotCache
from hf_specdec.decoding.functional import FunctionalSlotModel, slot_model
from hf_specdec.decoding.loop import DecodingLoop
from hf_specdec.decoding.target import SlotModel, captured_states
from hf_specdec.drafts import chain_topology
from hf_specdec.speculator import load_speculator


SECTIONS = ("blocks", "drafts", "cycles")
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}

# Blocks. Layers and lm_head of the target are about as large beside each other as in models of 8B.
SIZES = (4, 8, 16, 32, 64)
CONTEXT = 512
COMMITTED = 3
NUM_DRAFT_LAYERS = 3
TARGET = {
    "vocab_size": 32000,
    "hidden_size": 512,
    "intermediate_size": 1792,
    "num_hidden_layers": 16,
    "num_attention_heads": 8,
    "num_key_value_heads": 2,
    "head_dim": 64,
    "max_position_embeddings": 4096,
    "tie_word_embeddings": False,
}

# Trained drafts.
FIXTURES = Path("tests/fixtures/dflash")
LENGTHS = (1, 3, 5, 7, 11, 15, 31)
STEPS = (1, 2, 3, 4, 5)
BUDGETS = (4, 7, 12, 16, 24, 32, 64)


# -------------------------------------------------------------------------------------------------------------- blocks


class Drafting:
    """One drafter behind a text that grows by a few tokens every cycle.

    Args:
        speculator (`Speculator`): Draft and length.
        text (`torch.LongTensor` of shape `(1, CONTEXT)`): The text.
        states (`dict`): Of the target, for its tokens.
    """

    def __init__(self, speculator: Speculator, text: torch.LongTensor, states: dict):
        self.generator = speculator.candidate_generator(Session(1, 4 * CONTEXT, text.device))
        self.length = CONTEXT
        self.tokens = text[:, :COMMITTED]
        keys = self.generator.target_hidden_states
        self.states = {key: states[key][:, :COMMITTED] for key in keys}
        self.generator.prefill(Prompt(text, [0], {key: states[key] for key in keys}))

    def run(self) -> float:
        """Milliseconds to take in the committed tokens and to draft."""
        generator = self.generator
        self.length += COMMITTED
        commit = Commit([0], self.tokens, self.tokens.tolist(), [COMMITTED - 1], self.states)
        step = DraftStep([0], self.tokens[:, -1], [self.length], [generator.num_speculative_tokens])
        clock = Clock()
        generator.observe(commit)
        draft = generator.propose(step)
        milliseconds = clock.lap()
        if draft.size != generator.num_speculative_tokens:
            raise SystemExit(f"{draft.size} tokens were drafted in the place of {generator.num_speculative_tokens}.")
        return milliseconds


class Verifying:
    """The target's forward over chains behind the text."""

    def __init__(self, model: PreTrainedModel, cache: DynamicCache):
        slots = SlotCache(CONTEXT + max(SIZES))
        slots.load(cache)
        self.slots = slot_model(model, slots)
        self.slots.start_slots([0])

    def run(self, nodes: int) -> float:
        """Milliseconds of a forward; the next one begins at the same length."""
        tokens, topology = torch.zeros((1, nodes), dtype=torch.long), chain_topology(nodes - 1, torch.device("cpu"))
        clock = Clock()
        self.slots.forward(tokens, topology)
        return clock.lap()


@torch.inference_mode()
def measure_blocks(dtype: str, sizes: tuple[int, ...], rounds: int) -> list[dict]:
    torch.manual_seed(0)
    target = without_end(Qwen3ForCausalLM(Qwen3Config(**TARGET)).to(DTYPES[dtype]).eval())
    sequential = Qwen3ForCausalLM(Qwen3Config(**{**TARGET, "num_hidden_layers": NUM_DRAFT_LAYERS}))
    sequential = sequential.to(DTYPES[dtype]).eval()
    block = DFlashRecipe(block_size=max(sizes), num_layers=NUM_DRAFT_LAYERS, mask_token_id=0).build(target)
    block = block.to(DTYPES[dtype]).eval()

    text = random_prompts(1, CONTEXT, target.config.vocab_size)
    cache = DynamicCache(config=target.config)
    with captured_states(target, block.target_hidden_states) as states:
        target(text, past_key_values=cache, use_cache=True, logits_to_keep=1)
    verifying = Verifying(target, cache)

    def drafting(draft_model, method: str, size: int, **more) -> Callable[[], float]:
        settings = {"method": method, "num_speculative_tokens": size - 1, **more}
        return Drafting(load_speculator(target, draft_model=draft_model, **settings), text, states).run

    sides: dict[tuple[str, int], Callable[[], float]] = {}
    for size in sizes:
        sides["block", size] = drafting(block, "dflash", size)
        sides["chain", size] = drafting(sequential, "draft_model", size, same_tokenizer=True)
        sides["target", size] = functools.partial(verifying.run, size)
    times = _in_turns(sides, rounds)

    rows = []
    for size in sizes:
        block_ms, chain_ms, target_ms = (times[side, size] for side in ("block", "chain", "target"))
        rows.append(
            {
                "block": size,
                "block_ms": spread(block_ms),
                "chain_ms": spread(chain_ms),
                "target_ms": spread(target_ms),
                "block_growth": _ratios(block_ms, times["block", sizes[0]]),
                "chain_growth": _ratios(chain_ms, times["chain", sizes[0]]),
                "chain_to_block": _ratios(chain_ms, block_ms),
                "block_to_target": _ratios(block_ms, target_ms),
            }
        )
    return rows


def _in_turns(sides: dict, rounds: int) -> dict[tuple, list[float]]:
    """Milliseconds of every side in every round, each round beginning with another side."""
    for run in sides.values():
        run()
    order, times = list(sides), {name: [] for name in sides}
    for number in range(rounds):
        turn = number % len(order)
        for name in order[turn:] + order[:turn]:
            times[name].append(sides[name]())
    return times


def _ratios(times: list[float], others: list[float]) -> list[float]:
    return spread([time / other for time, other in zip(times, others)])


# -------------------------------------------------------------------------------------------------------------- drafts


@dataclass
class Drafter:
    """A trained draft.

    Args:
        target (`PreTrainedModel`): Its target.
        path (`str`): Its folder.
        batches (`list[benchmarking.Batch]`): What is generated with it.
    """

    target: PreTrainedModel
    path: str
    batches: list[benchmarking.Batch]

    @functools.cached_property
    def block_size(self) -> int:
        return self.speculator().resources.config.block_size

    def speculator(self, **draft) -> Speculator:
        """`draft`: how it drafts; one denoising step if that is left open."""
        if not draft.get("dflash_tree_budget"):
            draft.setdefault("dflash_num_denoising_steps", 1)
        return load_speculator(self.target, method="dflash", model=self.path, **draft)


def of_the_tests(name: str) -> Drafter:
    """A small draft, with the prompts of its fixture."""
    folder = FIXTURES / name
    if not folder.is_dir():
        raise SystemExit(f"{folder} is not here. Run the script from the repository's root.")
    target = AutoModelForCausalLM.from_pretrained(folder / "target", dtype=torch.float32).eval()
    expected = load_file(folder / "expected.safetensors")
    prompts = [expected[key] for key in sorted(expected) if key.startswith("prompt") and key.endswith(".input_ids")]
    inputs = [{"input_ids": prompt, "attention_mask": torch.ones_like(prompt)} for prompt in prompts]
    batches = [benchmarking.Batch((f"prompt {index}",), name, row, 64) for index, row in enumerate(inputs)]
    return Drafter(without_end(target), str(folder), batches)


def of_the_demo() -> Drafter:
    batches = benchmarking.make_batches(demo.load_tokenizer(), demo.prompts(), 1, 96)
    return Drafter(demo.load_target(torch.float32), demo.dflash_path(), batches)


DRAFTERS: dict[str, Callable[[], Drafter]] = {
    "masks alone": functools.partial(of_the_tests, "trained_b8"),
    "tokens revealed": functools.partial(of_the_tests, "trained_for_refinement_b8"),
    "demo": of_the_demo,
}


def kinds_of_drafts(block_size: int, quick: bool) -> dict[str, dict]:
    """Settings by name: chains of blocks of their size and of the trained size, steps, trees."""
    longest = block_size - 1
    lengths = [length for length in LENGTHS if length < longest]
    steps, budgets = STEPS[1:], BUDGETS
    if quick:
        lengths, steps, budgets = lengths[-1:], (3, 5), (7, 16, 64)
    return {
        **{f"chain of {length}": {"num_speculative_tokens": length} for length in (*lengths, longest)},
        **{
            f"{length} of a block": {"num_speculative_tokens": length, "dflash_block_size": block_size}
            for length in lengths
        },
        **{f"{count} steps": {"dflash_num_denoising_steps": count} for count in steps},
        **{f"tree of {budget}": {"dflash_tree_budget": budget} for budget in budgets},
    }


def measure_drafts(drafter: Drafter, rounds: int, quick: bool) -> list[dict]:
    """Tokens per cycle and speed of every draft, plain generation being 1."""
    drafts = kinds_of_drafts(drafter.block_size, quick)
    sides = {"plain": None, **{name: drafter.speculator(**draft) for name, draft in drafts.items()}}
    calls = _calls_in_turns(drafter, sides, rounds)
    full = f"chain of {drafter.block_size - 1}"
    rows = []
    for name, draft in drafts.items():
        last, is_tree = calls[name][-1], "dflash_tree_budget" in draft
        rows.append(
            {
                "draft": name,
                **draft,
                "drafted_per_cycle": round(last.drafted / last.forwards, 4),
                "tokens_per_cycle": round(last.committed / last.forwards, 4),
                "speed": ratio(calls["plain"], calls[name]),
                "time_to_chain": ratio(calls[name], calls[full]),
                "accepted_per_position": [] if is_tree else accepted_per_position(drafter, sides[name]),
            }
        )
    return rows


def _calls_in_turns(drafter: Drafter, sides: dict[str, Speculator | None], rounds: int) -> dict[str, list[Call]]:
    """The prompts, generated from by all sides in turn; all must write the same."""
    for speculator in sides.values():
        benchmarking.run(drafter.target, drafter.batches[0], speculator)
    order, calls = list(sides), {name: [] for name in sides}
    for number in range(rounds):
        found = {name: Call() for name in order}
        for index, batch in enumerate(drafter.batches):
            turn = (number + index) % len(order)
            for name in order[turn:] + order[:turn]:
                began = process_time()
                sample = benchmarking.run(drafter.target, batch, sides[name])
                found[name].add(sample, process_time() - began)
        for name, call in found.items():
            calls[name].append(call)
    different = [name for name in order if calls[name][-1].tokens != calls[order[0]][-1].tokens]
    if different:
        raise SystemExit(f"Texts differ from those of '{order[0]}': {', '.join(different)}.")
    return calls


def accepted_per_position(drafter: Drafter, speculator: Speculator) -> list[float]:
    """Share of the chains with a token at position 1, 2, ... in which it was accepted, with all before it."""
    drafted, accepted = Counter(), Counter()
    for batch in drafter.batches:
        with record(trace=True) as made:
            benchmarking.run(drafter.target, batch, speculator)
        for cycle in made.calls[0].cycles:
            for row in cycle.rows:
                drafted.update(range(len(row.draft_tokens)))
                accepted.update(range(row.num_accepted))
    return [round(accepted[position] / drafted[position], 4) for position in sorted(drafted)]


# -------------------------------------------------------------------------------------------------------------- cycles


class Stopwatch:
    """Milliseconds inside of the parts of cycles; those outside of cycles do not count.

    Attributes:
        milliseconds (`Counter`): By part; a part contains those that it calls.
        num_cycles (`int`): Cycles.
    """

    PARTS = (
        ("cycle", DecodingLoop, "_cycle"),
        ("draft", DFlashCandidateGenerator, "propose"),
        ("draft", DFlashCandidateGenerator, "observe"),
        ("text", DraftText, "extend"),
        ("block", DraftText, "read_block"),
        ("block", DFlashNetwork, "logits"),
        ("target", SlotModel, "forward"),
        ("target", FunctionalSlotModel, "forward"),
    )

    def __init__(self):
        self.milliseconds: Counter = Counter()
        self.num_cycles = 0
        self._is_inside = False

    @contextmanager
    def attached(self) -> Iterator[Stopwatch]:
        originals = [getattr(kind, name) for _, kind, name in self.PARTS]
        for (part, kind, name), original in zip(self.PARTS, originals):
            setattr(kind, name, self._cycle(original) if part == "cycle" else self._timed(part, original))
        try:
            yield self
        finally:
            for (_, kind, name), original in zip(self.PARTS, originals):
                setattr(kind, name, original)

    def _cycle(self, function: Callable) -> Callable:
        timed = self._timed("cycle", function)

        @functools.wraps(function)
        def cycle(*args, **kwargs):
            self._is_inside = True
            self.num_cycles += 1
            try:
                return timed(*args, **kwargs)
            finally:
                self._is_inside = False

        return cycle

    def _timed(self, part: str, function: Callable) -> Callable:
        @functools.wraps(function)
        def timed(*args, **kwargs):
            if not self._is_inside:
                return function(*args, **kwargs)
            began = process_time()
            try:
                return function(*args, **kwargs)
            finally:
                self.milliseconds[part] += 1000 * (process_time() - began)

        return timed


def measure_cycles(drafter: Drafter, rounds: int) -> list[dict]:
    """Milliseconds of a cycle's parts."""
    drafts = {
        f"chain of {drafter.block_size - 1}": {},
        "3 steps": {"dflash_num_denoising_steps": 3},
        "tree of 16": {"dflash_tree_budget": 16},
    }
    speculators = {name: drafter.speculator(**draft) for name, draft in drafts.items()}
    sides = {name: functools.partial(_parts, drafter, speculator) for name, speculator in speculators.items()}
    parts = _in_turns(sides, rounds)
    return [
        {"draft": name, **{part: spread([found[part] for found in rounds]) for part in rounds[0]}}
        for name, rounds in parts.items()
    ]


def _parts(drafter: Drafter, speculator: Speculator) -> dict[str, float]:
    """Of the average cycle of all prompts."""
    with Stopwatch().attached() as watch:
        for batch in drafter.batches:
            benchmarking.run(drafter.target, batch, speculator)
    cycle, draft, text, block, target = (
        watch.milliseconds[part] / watch.num_cycles for part in ("cycle", "draft", "text", "block", "target")
    )
    return {
        "cycle_ms": cycle,
        "target_ms": target,
        "text_ms": text,
        "block_ms": block,
        "choice_ms": draft - text - block,
        "rest_ms": cycle - draft - target,
        "draft_to_target": draft / target,
        "rest_share": (cycle - draft - target) / cycle,
    }


# -------------------------------------------------------------------------------------------------------------- output


COLUMNS = {
    "blocks": {
        "block": "block",
        "block_ms": "block\nms",
        "chain_ms": "chain of as\nmany, ms",
        "target_ms": "target's\nforward, ms",
        "block_growth": "block x\nsmallest",
        "chain_growth": "chain x\nsmallest",
        "chain_to_block": "chain /\nblock",
        "block_to_target": "block /\ntarget",
    },
    "drafts": {
        "draft": "draft",
        "drafted_per_cycle": "drafted/\ncycle",
        "tokens_per_cycle": "tokens/\ncycle",
        "speed": "speed x\nplain",
        "time_to_chain": "time x\nfull chain",
        "accepted_per_position": "accepted at\nposition 1, 2, ...",
    },
    "cycles": {
        "draft": "draft",
        "cycle_ms": "cycle\nms",
        "target_ms": "target\nms",
        "text_ms": "text\nms",
        "block_ms": "block\nms",
        "choice_ms": "choice\nms",
        "rest_ms": "rest\nms",
        "draft_to_target": "draft /\ntarget",
        "rest_share": "rest /\ncycle",
    },
}


def show(console: Console, case: dict) -> None:
    columns = COLUMNS[case["section"]]
    table = Table(title=f"{case['section']}: {case['name']}", title_justify="left")
    for text in columns.values():
        table.add_column(text, justify="right", no_wrap=True)
    for row in case["rows"]:
        table.add_row(*(_text(key, row[key]) for key in columns))
    console.print(table)


def _text(key: str, value) -> str:
    if key == "accepted_per_position":
        return " ".join(f"{share:.2f}" for share in value[:8])
    value = value[0] if isinstance(value, list) else value
    return f"{value:.2f}" if isinstance(value, float) else str(value)


def plot(results: list[dict], file: Path) -> None:
    """Draws what sections there are, one panel each for time, acceptance, steps and trees."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    # Text stays text, and equal figures give equal files.
    svg = {"svg.fonttype": "none", "svg.hashsalt": "dflash", "font.sans-serif": ["DejaVu Sans"]}
    pyplot.rcParams.update({"font.size": 8, "axes.grid": True, "axes.grid.axis": "y", **svg})
    figure, ((times, acceptance), (steps, trees)) = pyplot.subplots(2, 2, figsize=(8, 6), layout="constrained")
    for case in results:
        if case["section"] == "blocks" and case["name"] == "float32":
            _plot_times(times, case["rows"])
        elif case["section"] == "drafts":
            _plot_drafts(acceptance, steps, trees, case["name"], case["rows"])
    for axes in (times, acceptance, steps, trees):
        if axes.has_data():
            axes.legend(loc="upper left" if axes is trees else "best")
    figure.savefig(file, dpi=120, metadata={"Date": None} if file.suffix == ".svg" else None)
    pyplot.close(figure)


def _plot_times(axes, rows: list[dict]) -> None:
    sizes = [row["block"] for row in rows]
    labels = {"chain_ms": "chain of as many tokens", "target_ms": "target's forward", "block_ms": "block"}
    for key, label in labels.items():
        axes.plot(sizes, [row[key][0] for row in rows], marker="o", label=label)
    axes.set(xscale="log", yscale="log", xlabel="tokens of a block", ylabel="ms", title="Time of a draft, float32")
    _label(axes.xaxis, sizes)
    _label(axes.yaxis, (20, 50, 100, 200, 500))


def _plot_drafts(acceptance, steps, trees, name: str, rows: list[dict]) -> None:
    chains = [row for row in rows if row["draft"].startswith("chain")]
    full = chains[-1]
    shares = full["accepted_per_position"]
    acceptance.plot(range(1, len(shares) + 1), shares, marker="o", label=name)
    acceptance.set(xlabel="position", ylabel="share of drafts", title="Accepted, with all before it", ylim=(0, 1.02))

    iterated = [row for row in rows if row.get("dflash_num_denoising_steps")]
    counts = [1, *(row["dflash_num_denoising_steps"] for row in iterated)]
    steps.plot(counts, [row["tokens_per_cycle"] for row in (full, *iterated)], marker="o", label=name)
    steps.set(xlabel="denoising steps", ylabel="tokens per cycle", title="Several steps", xticks=counts)

    # The same colour for both shapes of a draft.
    nodes = [row["num_speculative_tokens"] for row in chains]
    (line,) = trees.plot(nodes, [row["speed"][0] for row in chains], marker="o", label=name)
    drawn = [row for row in rows if row.get("dflash_tree_budget")]
    budgets, speeds = [row["dflash_tree_budget"] for row in drawn], [row["speed"][0] for row in drawn]
    trees.plot(budgets, speeds, marker="^", linestyle="--", color=line.get_color())
    title = "Chains (solid) and trees (dashed)"
    trees.set(xlabel="drafted tokens", ylabel="speed, plain = 1", title=title, xscale="log")
    _label(trees.xaxis, (1, 3, 7, 16, 32, 64))


def _label(axis, ticks) -> None:
    """Plain numbers on a logarithmic axis."""
    axis.set_ticks(ticks, [str(tick) for tick in ticks])
    axis.set_ticks([], minor=True)


def parse_options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="float32, fewer sides and rounds")
    parser.add_argument("--sections", nargs="+", choices=SECTIONS, default=list(SECTIONS))
    parser.add_argument("--dtypes", nargs="+", choices=tuple(DTYPES), help="of the blocks")
    parser.add_argument("--drafters", nargs="+", choices=tuple(DRAFTERS), default=list(DRAFTERS))
    parser.add_argument("--block-rounds", type=int, help="turns of all sides of the blocks; 7")
    parser.add_argument("--rounds", type=int, help="turns of all sides on all prompts; 4")
    parser.add_argument("--json", type=Path, help="also write all figures to this file")
    parser.add_argument("--plot", type=Path, help="also draw them, as a file that matplotlib can write")
    parser.add_argument("--read", type=Path, help="measure nothing, show what --json has written here")
    options = parser.parse_args()
    quick = {"dtypes": ["float32"], "block_rounds": 3, "rounds": 1}
    full = {"dtypes": list(DTYPES), "block_rounds": 7, "rounds": 4}
    for name, value in (quick if options.quick else full).items():
        if getattr(options, name) is None:
            setattr(options, name, value)
    if min(options.block_rounds, options.rounds) < 1:
        parser.error("at least one round")
    return options


def measure(options: argparse.Namespace) -> Iterator[dict]:
    """The cases, one after the other."""
    if "blocks" in options.sections:
        sizes = SIZES[::2] if options.quick else SIZES
        for dtype in options.dtypes:
            rows = measure_blocks(dtype, sizes, options.block_rounds)
            yield {"section": "blocks", "name": dtype, "rounds": options.block_rounds, "rows": rows}
    for name in options.drafters if {"drafts", "cycles"} & set(options.sections) else ():
        drafter = DRAFTERS[name]()
        case = {"name": name, "block_size": drafter.block_size, "rounds": options.rounds}
        if "drafts" in options.sections:
            yield {"section": "drafts", **case, "rows": measure_drafts(drafter, options.rounds, options.quick)}
        if "cycles" in options.sections:
            yield {"section": "cycles", **case, "rows": measure_cycles(drafter, options.rounds)}


def environment(options: argparse.Namespace) -> dict:
    found = benchmarking.describe_environment("cpu", torch.float32)
    # It differs from case to case.
    del found["dtype"]
    settings = {key: value for key, value in vars(options).items() if key not in ("json", "plot", "read")}
    blocks = {"target": TARGET, "draft_layers": NUM_DRAFT_LAYERS, "context": CONTEXT, "committed": COMMITTED}
    return {**found, "blocks": blocks, "options": settings}


def main() -> None:
    options = parse_options()
    logging.disable_progress_bar()
    logging.set_verbosity_error()
    # More steps than a draft was trained for are measured on purpose.
    logging.get_logger("hf_specdec").setLevel(logging.ERROR)
    console, began, spent = Console(width=150), perf_counter(), process_time()
    if options.read:
        report = json.loads(options.read.read_text())
        for case in report["results"]:
            show(console, case)
    else:
        report = {"results": []}
        with benchmarking.num_threads(1):
            report["environment"] = environment(options)
            for case in measure(options):
                show(console, case)
                report["results"].append(case)
        report["seconds"], report["process_seconds"] = perf_counter() - began, process_time() - spent
        console.print(f"{report['seconds']:.0f} seconds in all, {report['process_seconds']:.0f} of them on the CPU.")
    if options.json:
        options.json.write_text(json.dumps(report, indent=1))
    if options.plot:
        plot(report["results"], options.plot)


if __name__ == "__main__":
    main()
