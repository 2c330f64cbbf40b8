"""What a draft of an EAGLE head costs beside the target, and which drafts pay.

    python benchmarks/eagle.py                  # everything, about 30 minutes on one core
    python benchmarks/eagle.py --quick          # float32, EAGLE-3 and fewer sides, about 5 minutes
    python benchmarks/eagle.py --sections cycles --targets demo --json out.json

Cycles: drafting, the target's forward over anchor and draft, acceptance, commit, in our own code, part by part, beside
a forward of one token. Calls: whole `generate()` calls with chains and trees of several sizes, beside plain ones, and
with drafts that stop early beside those that do not. All sides take turns within each round, and ratios are taken
within a round. Times are of the process, on one thread, so that a busy machine changes them little.
"""

from __future__ import annotations

import argparse
import functools
import json
import statistics
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from time import perf_counter, process_time

import torch
from common import demo_prompts, random_prompts, without_end
from rich.console import Console
from rich.table import Table
from transformers import DynamicCache, LlamaConfig, LlamaForCausalLM, PreTrainedModel
from transformers.utils import logging
from trees import Clock, accepting_choices, spread

from hf_specdec import Speculator, benchmarking, demo
from hf_specdec.candidate_generators.base import Commit, DraftStep, Prompt, Session
from hf_specdec.candidate_generators.eagle.functional import FunctionalEagle
from hf_specdec.candidate_generators.eagle.network import Eagle3Network, EagleNetwork
from hf_specdec.candidate_generators.eagle.recipe import Eagle1Recipe, Eagle3Recipe
from hf_specdec.decoding.cache import SlotCache
from hf_specdec.decoding.functional import slot_model
from hf_specdec.decoding.target import captured_states
from hf_specdec.drafts import chain_topology
from hf_specdec.kernels.acceptance import follow
from hf_specdec.logits.acceptance import best_tokens
from hf_specdec.logits.verifier import take_nodes
from hf_specdec.speculator import load_speculator


DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}
TARGETS = ("demo", "random")
METHODS = ("eagle3", "eagle")

CONTEXT = 512
MAX_NODES = 64
NUM_PROMPTS = 8


def chain(length: int) -> dict:
    return {"num_speculative_tokens": length}


def tree(depth: int, top_k: int, total_tokens: int) -> dict:
    return {"depth": depth, "top_k": top_k, "total_tokens": total_tokens}


# Drafts of which a cycle is taken apart.
SHAPES = {
    "chain of 4": chain(4),
    "static tree eagle_1": {"speculative_token_tree": "eagle_1"},
    "tree 4/4/12": tree(4, 4, 12),
    "tree 5/8/32": tree(5, 8, 32),
    "tree 7/10/60": tree(7, 10, 60),
}

# Drafts of whole calls, and those of them that are also stopped early.
CALLS = {
    **{f"chain of {length}": chain(length) for length in (1, 2, 3, 4, 6)},
    **{
        f"tree {depth}/{top_k}/{total}": tree(depth, top_k, total)
        for depth, top_k, total in (
            (1, 2, 4),
            (2, 3, 6),
            (3, 3, 8),
            (4, 4, 8),
            (4, 4, 12),
            (7, 4, 8),
            (7, 10, 8),
            (7, 10, 12),
            (7, 10, 20),
            (5, 8, 32),
            (7, 10, 60),
        )
    },
}
STOPPED = {name: CALLS[name] for name in ("chain of 4", "chain of 6", "tree 4/4/12", "tree 7/10/60")}
THRESHOLDS = (0.0, 0.02, 0.05, 0.1, 0.2, 0.3, 0.5)


# --------------------------------------------------------------------------------------------------- targets and heads


def random_target(dtype: torch.dtype) -> LlamaForCausalLM:
    """A Llama of random weights whose layers and vocabulary are about as large beside each other as in 8B models.

    Its lm_head is as sure of the next token as that of a trained model, since the dynamic trees depend on it.
    """
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=16384,
        hidden_size=512,
        intermediate_size=1792,
        num_hidden_layers=16,
        num_attention_heads=8,
        num_key_value_heads=2,
        max_position_embeddings=2048,
        tie_word_embeddings=False,
    )
    model = LlamaForCausalLM(config).requires_grad_(False)
    model.get_output_embeddings().weight.mul_(10)
    return without_end(model.to(dtype).eval())


def load_target(name: str, dtype: torch.dtype) -> PreTrainedModel:
    return without_end(demo.load_target(dtype)) if name == "demo" else random_target(dtype)


def head_settings(method: str, target_name: str, target: PreTrainedModel) -> dict:
    """What loads the head: the embedded one, or one of random weights, for EAGLE-3 with a reduced vocabulary."""
    if target_name == "demo":
        return {"method": method, "model": demo.eagle3_path() if method == "eagle3" else demo.eagle_path()}
    recipe = Eagle3Recipe(draft_vocab_size=4096) if method == "eagle3" else Eagle1Recipe()
    torch.manual_seed(0)
    network = recipe.build(target).requires_grad_(False)
    if method == "eagle":
        # States that are fed back keep about their size.
        network.fc.weight.mul_(3)
    return {"method": method, "draft_model": network.to(target.dtype).eval().attach(target)}


# -------------------------------------------------------------------------------------------------------------- cycles


class HeadTimer:
    """Milliseconds inside of the head's forwards: its layers, its lm_head, and what fuses the target's states.

    Attributes:
        num_reads (`int`): Forwards of the layers.
    """

    def __init__(self):
        self.restart()
        self._is_inside = False

    def restart(self) -> None:
        self.milliseconds, self.num_reads = 0.0, 0

    @contextmanager
    def attached(self) -> Iterator[HeadTimer]:
        places = [
            (FunctionalEagle, "__call__"),
            (EagleNetwork, "forward"),
            (EagleNetwork, "logits"),
            (EagleNetwork, "fuse"),
            (Eagle3Network, "fuse"),
        ]
        originals = [getattr(kind, name) for kind, name in places]
        for (kind, name), original in zip(places, originals):
            setattr(kind, name, self._timed(original))
        try:
            yield self
        finally:
            for (kind, name), original in zip(places, originals):
                setattr(kind, name, original)

    def _timed(self, function: Callable) -> Callable:
        @functools.wraps(function)
        def timed(*args, **kwargs):
            if self._is_inside:
                return function(*args, **kwargs)
            self.num_reads += function.__name__ in ("__call__", "forward")
            self._is_inside, began = True, process_time()
            try:
                return function(*args, **kwargs)
            finally:
                self.milliseconds += 1000 * (process_time() - began)
                self._is_inside = False

        return timed


@dataclass
class Cost:
    """Milliseconds of one cycle.

    Attributes:
        draft (`float`): All of the draft, what was committed last being read first.
        head (`float`): Of it, inside of the head's forwards.
        topology (`float`): Depths and ancestors from the parents.
        target (`float`): The target's forward over anchor and draft.
        acceptance (`float`): Best token of each node, accepted path, transfer to the host.
        commit (`float`): Moving the path's keys and values into place, handing its states to the draft.
        nodes (`int`): Verified nodes, the anchor included.
        read (`int`): Nodes that the head has read.
        levels (`int`): How often it has read: the committed tokens, then some or all levels of the draft.
    """

    draft: float
    head: float
    topology: float
    target: float
    acceptance: float
    commit: float
    nodes: int
    read: int
    levels: int

    @property
    def cycle(self) -> float:
        return self.draft + self.topology + self.target + self.acceptance + self.commit

    @property
    def outside(self) -> float:
        """Outside of the forwards of head and target."""
        return self.cycle - self.head - self.target


class Cycles:
    """Cycles behind the same context, with drafts of one shape.

    Args:
        model (`PreTrainedModel`): The target.
        speculator (`Speculator`): Head and shape.
        prompt (`torch.LongTensor` of shape `(1, CONTEXT + 1)`): The text, and the first anchor.
        timer (`HeadTimer`): Attached.
    """

    def __init__(self, model: PreTrainedModel, speculator: Speculator, prompt: torch.LongTensor, timer: HeadTimer):
        self.vocab_size, self.timer = model.config.vocab_size, timer
        text, self.anchor = prompt[:, :-1], prompt[:, -1]
        session = Session(1, CONTEXT + MAX_NODES, model.device)
        self.generator = speculator.candidate_generator(session)
        cache, slots = DynamicCache(config=model.config), SlotCache(CONTEXT + 2 * MAX_NODES)
        with captured_states(model, self.generator.target_hidden_states) as states:
            model(text, past_key_values=cache, use_cache=True, logits_to_keep=1)
        slots.load(cache)
        self.slots = slot_model(model, slots, states=self.generator.target_hidden_states)
        self.slots.start_slots([0])
        self.generator.prefill(Prompt(text, [0], states))
        last = {key: value[:, -1:] for key, value in states.items()}
        self.generator.observe(Commit([0], prompt[:, -1:], prompt[:, -1:].tolist(), [0], last))
        self.num_entries = self.generator.entries.cache.lengths

    def run(self) -> Cost:
        """One cycle. The next one begins at the same length."""
        generator, cache = self.generator, self.slots.cache
        cache.lengths, generator.entries.cache.lengths = [CONTEXT], list(self.num_entries)
        step = DraftStep([0], self.anchor, [CONTEXT + 1], [generator.num_speculative_tokens])
        self.timer.restart()
        clock = Clock()
        draft = generator.propose(step)
        drafted = clock.lap()
        head, levels = self.timer.milliseconds, self.timer.num_reads
        topology = draft.topology
        described = clock.lap()
        output = self.slots.forward(torch.cat([self.anchor[:, None], draft.tokens], dim=1), topology)
        target = clock.lap()
        choices = accepting_choices(draft, self.vocab_size)
        clock.lap()
        best_tokens(output.logits)
        accepted = follow(draft, choices)
        count, *tokens = torch.cat([accepted.num_accepted[:, None], accepted.tokens], dim=1).tolist()[0]
        acceptance = clock.lap()
        tokens, path = tokens[: count + 1], accepted.path[:, : count + 1]
        cache.commit([count + 1], None if draft.is_chain else path)
        states = {key: take_nodes(value, path) for key, value in output.hidden_states.items()}
        generator.observe(Commit([0], accepted.tokens[:, : count + 1], [tokens], [count], states))
        commit = clock.lap()
        read = generator.entries.num_read
        return Cost(drafted, head, described, target, acceptance, commit, draft.size + 1, read, levels)

    def one_token(self) -> float:
        """Milliseconds of the target's forward of the anchor alone."""
        self.slots.cache.lengths = [CONTEXT]
        clock = Clock()
        self.slots.forward(self.anchor[:, None], chain_topology(0, self.anchor.device))
        return clock.lap()


@torch.inference_mode()
def measure_cycles(target_name: str, dtype: str, method: str, rounds: int) -> list[dict]:
    model = load_target(target_name, DTYPES[dtype])
    settings = head_settings(method, target_name, model)
    contexts = (
        demo_prompts(NUM_PROMPTS, CONTEXT + 1)
        if target_name == "demo"
        else random_prompts(1, CONTEXT + 1, model.config.vocab_size)
    )
    with HeadTimer().attached() as timer:
        sides = {
            name: [
                Cycles(model, load_speculator(model, **settings, **shape), prompt[None], timer) for prompt in contexts
            ]
            for name, shape in SHAPES.items()
        }
        for side in sides.values():
            for cycles in side:
                cycles.run()
        order, one_token = list(sides), []
        costs: dict[str, list[Cost]] = {name: [] for name in order}
        for number in range(rounds):
            turn, place = number % len(order), number % len(contexts)
            one_token.append(sides[order[0]][place].one_token())
            for name in order[turn:] + order[:turn]:
                costs[name].append(sides[name][place].run())
    return [_cycle_row(name, found, one_token) for name, found in costs.items()]


def _cycle_row(name: str, costs: list[Cost], one_token: list[float]) -> dict:
    parts = ("draft", "head", "topology", "target", "acceptance", "commit", "cycle", "outside")
    counts = ("nodes", "read", "levels")
    return {
        "shape": name,
        **{part: round(statistics.mean(getattr(cost, part) for cost in costs), 2) for part in counts},
        **{f"{part}_ms": spread([getattr(cost, part) for cost in costs]) for part in parts},
        "level_ms": spread([cost.draft / cost.levels for cost in costs]),
        "one_token_ms": spread(one_token),
        "level_to_one_token": spread([cost.draft / cost.levels / one for cost, one in zip(costs, one_token)]),
        "draft_to_target": spread([cost.draft / cost.target for cost in costs]),
        "outside_share": spread([cost.outside / cost.cycle for cost in costs]),
    }


# --------------------------------------------------------------------------------------------------------------- calls


@dataclass
class Call:
    """Calls of one side in one round: process time, and what the statistics say."""

    seconds: float = 0.0
    tokens: list[list[int]] = field(default_factory=list)
    committed: int = 0
    forwards: int = 0
    drafted: int = 0

    def add(self, sample: benchmarking.Sample, seconds: float) -> None:
        self.seconds += seconds
        self.tokens += sample.tokens
        if sample.stats is not None:
            # The first token comes from the prompt.
            self.committed += sample.stats.num_committed_tokens - 1
            self.forwards += sample.stats.num_drafts
            self.drafted += sample.stats.num_draft_tokens


def measure_calls(dtype: str, method: str, drafts: dict[str, dict], rounds: int, max_new_tokens: int) -> dict:
    """Rounds of all drafts and of plain generation on the demo's prompts: `{name: [Call, ...]}`."""
    target = demo.load_target(DTYPES[dtype])
    settings = head_settings(method, "demo", target)
    batches = benchmarking.make_batches(demo.load_tokenizer(), demo.prompts(), 1, max_new_tokens)
    sides: dict[str, Speculator | None] = {"plain": None}
    sides |= {name: load_speculator(target, **settings, **draft) for name, draft in drafts.items()}
    for speculator in sides.values():
        benchmarking.run(target, batches[0], speculator)
    order, calls = list(sides), {name: [] for name in sides}
    for number in range(rounds):
        found = {name: Call() for name in order}
        for index, batch in enumerate(batches):
            turn = (number + index) % len(order)
            for name in order[turn:] + order[:turn]:
                began = process_time()
                sample = benchmarking.run(target, batch, sides[name])
                found[name].add(sample, process_time() - began)
        for name, call in found.items():
            calls[name].append(call)
    different = [name for name in order if calls[name][-1].tokens != calls["plain"][-1].tokens]
    if different and dtype == "float32":
        raise SystemExit(f"{method}: texts differ from plain generation's: {', '.join(different)}.")
    return calls


def ratio(calls: list[Call], others: list[Call]) -> list[float]:
    """Process time of one side over that of another, within each round."""
    return spread([call.seconds / other.seconds for call, other in zip(calls, others)])


def _call_row(name: str, calls: list[Call]) -> dict:
    last = calls[-1]
    return {
        "draft": name,
        "tokens_per_cycle": round(last.committed / last.forwards, 4),
        "drafted_per_cycle": round(last.drafted / last.forwards, 4),
    }


def measure_drafts(dtype: str, method: str, rounds: int, max_new_tokens: int, quick: bool) -> list[dict]:
    """Speed of every draft, plain generation being 1."""
    drafts = {name: draft for name, draft in CALLS.items() if not quick or name in SHAPES}
    calls = measure_calls(dtype, method, drafts, rounds, max_new_tokens)
    return [{**_call_row(name, calls[name]), "speed": ratio(calls["plain"], calls[name])} for name in drafts]


def measure_stops(dtype: str, method: str, rounds: int, max_new_tokens: int, quick: bool) -> list[dict]:
    """Time of drafts that stop early, the same draft that does not being 1."""
    sides = {
        (name, threshold): {**draft, "adaptive_threshold": threshold}
        for name, draft in STOPPED.items()
        if not quick or name in SHAPES
        for threshold in THRESHOLDS
    }
    calls = measure_calls(dtype, method, sides, rounds, max_new_tokens)
    return [
        {
            **_call_row(name, calls[name, threshold]),
            "threshold": threshold,
            "time": ratio(calls[name, threshold], calls[name, 0.0]),
            "speed": ratio(calls["plain"], calls[name, threshold]),
        }
        for name, threshold in sides
    ]


# -------------------------------------------------------------------------------------------------------------- output


def show_cycles(console: Console, title: str, rows: list[dict]) -> None:
    table = Table(
        title=f"{title}, context {CONTEXT}; one token: {rows[0]['one_token_ms'][0]:.2f} ms", title_justify="left"
    )
    table.add_column("draft", no_wrap=True)
    texts = {
        "levels": "levels",
        "read": "nodes\nread",
        "nodes": "nodes\nverified",
        "cycle_ms": "cycle\nms",
        "draft_ms": "draft\nms",
        "level_ms": "a level\nms",
        "level_to_one_token": "a level /\none token",
        "target_ms": "target\nms",
        "draft_to_target": "draft /\ntarget",
        "acceptance_ms": "accept\nms",
        "commit_ms": "commit\nms",
        "outside_ms": "outside\nms",
        "outside_share": "outside /\ncycle",
    }
    _fill(table, texts, rows, "shape")
    console.print(table)


def show_calls(console: Console, title: str, rows: list[dict]) -> None:
    table = Table(title=title, title_justify="left")
    table.add_column("draft", no_wrap=True)
    texts = {
        "threshold": "threshold",
        "tokens_per_cycle": "tokens/\ncycle",
        "drafted_per_cycle": "drafted/\ncycle",
        "time": "time x\nwithout",
        "speed": "speed x\nplain",
    }
    _fill(table, {key: text for key, text in texts.items() if key in rows[0]}, rows, "draft")
    console.print(table)


def _fill(table: Table, texts: dict[str, str], rows: list[dict], name: str) -> None:
    for text in texts.values():
        table.add_column(text, justify="right", no_wrap=True)
    for row in rows:
        table.add_row(row[name], *(_text(row[key]) for key in texts))


def _text(value: float | list[float]) -> str:
    value = value[0] if isinstance(value, list) else value
    return f"{value:.2f}"


def parse_options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="float32, EAGLE-3, fewer sides and rounds")
    parser.add_argument("--sections", nargs="+", choices=("cycles", "drafts", "stops"))
    parser.add_argument("--targets", nargs="+", choices=TARGETS, default=list(TARGETS), help="of the cycles")
    parser.add_argument("--methods", nargs="+", choices=METHODS)
    parser.add_argument("--dtypes", nargs="+", choices=tuple(DTYPES))
    parser.add_argument("--cycle-rounds", type=int, help="turns of all shapes; 40, on the random target a fourth")
    parser.add_argument("--rounds", type=int, help="turns of all drafts on all prompts; 3")
    parser.add_argument("--max-new-tokens", type=int, default=96, help="of the calls")
    parser.add_argument("--json", type=Path, help="also write all figures to this file")
    options = parser.parse_args()
    quick = {"methods": ["eagle3"], "dtypes": ["float32"], "cycle_rounds": 20, "rounds": 1}
    full = {"methods": list(METHODS), "dtypes": list(DTYPES), "cycle_rounds": 40, "rounds": 3}
    for name, value in {"sections": ["cycles", "drafts", "stops"], **(quick if options.quick else full)}.items():
        if getattr(options, name) is None:
            setattr(options, name, value)
    if min(options.cycle_rounds, options.rounds) < 1:
        parser.error("at least one round")
    return options


def environment(options: argparse.Namespace) -> dict:
    found = benchmarking.describe_environment("cpu", torch.float32)
    # It differs from case to case.
    del found["dtype"]
    settings = {key: value for key, value in vars(options).items() if key != "json"}
    return {**found, "context": CONTEXT, "options": settings}


def main() -> None:
    options = parse_options()
    logging.disable_progress_bar()
    logging.set_verbosity_error()
    console, report, began = Console(width=150), [], perf_counter()
    sections = {"drafts": measure_drafts, "stops": measure_stops}
    with benchmarking.num_threads(1):
        described = environment(options)
        for dtype in options.dtypes:
            for method in options.methods:
                for target in options.targets if "cycles" in options.sections else ():
                    rounds = options.cycle_rounds if target == "demo" else max(options.cycle_rounds // 4, 1)
                    rows = measure_cycles(target, dtype, method, rounds)
                    show_cycles(console, f"{method}, {target}, {dtype}", rows)
                    case = {"section": "cycles", "target": target, "dtype": dtype, "method": method}
                    report.append({**case, "rounds": rounds, "rows": rows})
                for section in [name for name in sections if name in options.sections]:
                    limits = options.rounds, options.max_new_tokens, options.quick
                    rows = sections[section](dtype, method, *limits)
                    show_calls(console, f"{section}: {method}, demo, {dtype}", rows)
                    case = {"section": section, "target": "demo", "dtype": dtype, "method": method}
                    report.append({**case, "rounds": options.rounds, "rows": rows})
    seconds = perf_counter() - began
    console.print(f"{seconds:.0f} seconds in all.")
    if options.json:
        options.json.write_text(
            json.dumps({"environment": described, "results": report, "seconds": seconds}, indent=1)
        )


if __name__ == "__main__":
    main()
