"""The pages under Benchmarks, made from the figures in `benchmarks/results/`.

python -m tools.benchmark_pages           # writes docs/benchmarks/ anew
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tools.benchmark_tables import (
    Content,
    Row,
    Table,
    columns,
    compared,
    counted,
    few_rows,
    loops,
    markdown,
    never_slower,
    on_gpu,
)


ROOT = Path(__file__).parents[1]
RESULTS, PAGES = ROOT / "benchmarks" / "results", ROOT / "docs" / "benchmarks"

# ------------------------------------------------------------------------------------------------------------- studies


@dataclass(frozen=True)
class Study:
    """A page: one question, and the files that answer it.

    Attributes:
        name, title, question (`str`): Of the page.
        files (`str`): Regular expression of the files' stems.
        read (`Callable`): Reader of their shape.
        command (`str`): The program, unless a file names its own `command`. Of one that is gone from the repository
            this is its successor.
        heading (`str`): Of a file, filled in from its content and environment.
        notes (`str`): What one must know to read the tables.
        see (`tuple[str, ...]`): Pages that draw conclusions.
    """

    name: str
    title: str
    question: str
    files: str
    read: Callable[[Content], Iterator[Table]]
    command: str
    heading: str = "{machine}, {dtype}"
    notes: str = ""
    see: tuple[str, ...] = ()

    def sources(self) -> dict[str, Content]:
        """Contents of the files by their stems, sorted."""
        found = (path for path in sorted(RESULTS.glob("*.json")) if re.fullmatch(self.files, path.stem))
        return {path.stem: json.loads(path.read_text(encoding="utf-8")) for path in found}


_TREES = "Trees are named by levels, children of a node and nodes, the anchor included (the published code's counts)."

STUDIES = (
    Study(
        "demo_model",
        "Every method on the demo's model",
        "How fast is each method on the embedded model, beside plain `generate()`?",
        r"\w+-\w+-demo",
        compared,
        "hf-specdec demo --dtype {dtype} --json",
        notes="Greedy. The model has 3.9 million parameters and soon repeats itself, so its text is easy to draft. "
        "Identical output is checked in float32.",
        see=("demo",),
    ),
    Study(
        "smollm2",
        "A real model: SmolLM2-135M",
        "How fast are methods and heads on a real model, beside plain `generate()` and transformers' own prompt "
        "lookup?",
        r"\w+-\w+-smollm2-.+",
        compared,
        "hf-specdec demo --model smollm2 --dtype {dtype} --stock{heads_option}{sizes_option}{sample_option} "
        "--max-seconds 3600 --json",
        heading="{decoding}, {dtype}, at most {max_new_tokens} new tokens",
        notes="`none`, or `ngram` with no drafts for any batch, is the loop alone. Whether texts are those of plain "
        "generation is decided in float32.",
        see=("demo", "choose"),
    ),
    Study(
        "overhead",
        "Beside transformers' own assisted generation",
        "How fast is this package's loop, beside transformers' own with the same drafts and beside plain "
        "`generate()`?",
        r"\w+-\w+-overhead.*",
        loops,
        "python benchmarks/overhead.py --json overhead.json",
        heading="Targets {targets}; contexts {contexts}; batches {batch_sizes}",
        notes="Decoding alone, without the prefill; greedy; fixed lengths. `demo` is the embedded model, `random` one "
        'of 190 M random parameters with scripted drafts, four of five right. "Same rule" is transformers\' rule of '
        "prompt lookup, with as many drafts. Transformers' loop takes one row only.",
        see=("performance",),
    ),
    Study(
        "many",
        "Many requests",
        "What does it bring to keep a batch full, beside batches of fixed size?",
        r"\w+-\w+-many.*",
        columns(
            side="side",
            forwards="forwards of the target",
            ratio="speed relative to static plain",
            identical="same texts",
        ),
        "python benchmarks/many.py --requests {requests} --places {places} --stock",
        heading="{requests} requests in {places} places, {wanted_tokens} new tokens",
        notes='Process time. "Static" batches go in the given order; "refill" is `generate_many()`; "stock" is '
        "transformers' own continuous batching, whose forwards are not counted.",
        see=("many",),
    ),
    Study(
        "never_slower",
        "Adaptive length beside plain generation",
        'Is `num_speculative_tokens="auto"` ever slower than plain `generate()`, and how far is it from the best '
        "fixed length?",
        r"\w+-\w+-never-slower.*",
        never_slower,
        "python benchmarks/never_slower.py --target {target}{sample_option} --dtype {dtype}",
        heading="Target {target}, {decoding}, {dtype}",
        notes="Medians of the rounds' ratios, with their range. The sides take turns of some cycles each. The aims "
        "are 0.97 of plain generation in hostile cases and 0.95 of the best fixed length in friendly ones. The loop "
        "without drafts is faster than `generate()` on a small model, and would hide what drafts lose.",
        see=("control",),
    ),
    Study(
        "few_rows",
        "Matrix products of few rows on a CPU",
        "What does a product over few rows cost, beside torch's and the memory bandwidth?",
        r"\w+-\w+-few-rows",
        few_rows,
        "python benchmarks/few_rows.py --threads 1 2 --json few_rows.json",
        see=("kernels",),
    ),
    Study(
        "judging",
        "Judging sampled drafts",
        "What does it cost to judge a sampled draft, for all nodes at once or along the path alone?",
        r"\w+-\w+-judging",
        columns(
            draft="draft",
            warpers="warpers",
            milliseconds_with_transformers="transformers' warpers, ms",
            all_nodes="all nodes / that",
            path="the path / that",
            chosen="chosen",
        ),
        "python benchmarks/judging.py --json judging.json",
        heading="{machine}, {vocabulary} tokens in the vocabulary",
        see=("verification",),
    ),
    Study(
        "serving",
        "A server under load",
        "How much more does `hf-specdec serve` answer with drafts than without?",
        r"\w+-\w+-serving",
        columns(
            clients="clients",
            ratio="tokens a second relative to no drafts",
            identical="same texts",
        ),
        "python benchmarks/serving.py --json serving.json",
        heading="{requests} requests, {places} places, `{method}`",
        notes="The embedded model behind a real server on this machine; both sides answer the same requests in turn.",
        see=("howto/serving",),
    ),
    Study(
        "grammar",
        "Structured output",
        "How much faster is text under a grammar with drafts than without, and what do masks cost?",
        r"\w+-\w+-grammar.*",
        columns(
            side="side",
            schema="schema",
            tokens="tokens",
            forced="forced",
            bound="bound",
            tokens_per_cycle="tokens per cycle",
            ratio="speed relative to plain",
            least="least of a schema",
            masks="masks / forwards of the target",
            walk_ngram="walk `ngram`",
            ngram="`ngram`",
            grammar="`grammar`",
            **{"grammar+ngram": "`grammar+ngram`", "eagle3,_cut": "`eagle3`, cut", "eagle3": "`eagle3`"},
            **{"grammar+eagle3": "`grammar+eagle3`"},
        ),
        "python benchmarks/grammar.py --target {target} --backend {backend} --schemas {schemas} --rounds {rounds} "
        "--max-new-tokens {max_new_tokens} --json grammar.json",
        heading="Target {target}, {backend}, {dtype}",
        notes="Greedy, one row, one thread, process time, all sides in turn with equal texts; by schema tokens per "
        'cycle and speed-up. "Forced" is the share of the text\'s tokens that the grammar had foreseen, '
        '"bound" what drafts of these alone could reach, 1 / (1 - share). In "walk" the processor is hidden from this '
        'package. The drafts of "cut" grow without masks. The loop alone makes a part of every speed-up on models as '
        "small as these.",
        see=("grammar",),
    ),
    Study(
        "hybrid",
        "Targets with recurrent layers",
        "Do drafts pay on targets with recurrent layers, alone or beside attention?",
        r"\w+-\w+-hybrid",
        columns(
            model="layers of",
            batch_size="batch",
            draft="draft",
            tokens_per_cycle="tokens per cycle",
            ratio="speed relative to plain",
            ratio_range="range",
            cycle_to_token="a cycle / a plain token",
            identical="same texts",
        ),
        "python benchmarks/hybrid.py --json hybrid.json",
        notes="Random models of eight layers, hidden size 1,024; scripted chains of five tokens, each right in four "
        "of five places, alone or with second tokens at the first three depths, right at half of the places where "
        "the chain is wrong; process time of one thread, decoding alone.",
        see=("hybrid",),
    ),
    Study(
        "blocks",
        "Budgets of block drafts",
        "Chains or trees, and of how many nodes, with JetSpec, DFlash and DFlash 2?",
        r"\w+-\w+-blocks",
        columns(
            pair="drafts of the tests",
            shape="shape",
            tokens_per_cycle="tokens per cycle",
            speed="speed relative to plain",
        ),
        "python benchmarks/blocks.py --json blocks.json",
        notes="Greedy, one row, process time, the least of four rounds in turn. `w` is `draft_tree_top_k`: JetSpec's "
        "own trees; the others have the best prefixes.",
        see=("dflash",),
    ),
    Study(
        "trained_blocks",
        "Block drafts that were trained alike",
        "Of which block drafts are the most tokens accepted, trained on the same data for as many steps?",
        r"\w+-\w+-trained-blocks.*",
        columns(
            draft="draft",
            shape="shape",
            all="tokens per cycle, all",
            **{kind: kind for kind in ("complete", "edit", "quote", "code", "chat", "story", "structured")},
            identical="same texts",
        ),
        "python benchmarks/trained_blocks.py dflash=FOLDER causal=FOLDER dflash2=FOLDER --target {target} "
        "--max-new-tokens {max_new_tokens} --json trained_blocks.json",
        heading="Target {target}, {dtype}, at most {max_new_tokens} new tokens",
        notes="Greedy; the prompts of a kind are one batch. The weights are not published: the page of the method has "
        "the commands that make them.",
        see=("dflash",),
    ),
    Study(
        "vocabularies",
        "Draft models with another tokenizer",
        "How fast is a draft model with another tokenizer, beside transformers' universal assisted decoding?",
        r"\w+-\w+-vocabularies",
        columns(
            side="side",
            speed_up="speed relative to plain",
            tokens_per_forward="tokens per forward",
        ),
        "python benchmarks/vocabularies.py --json vocabularies.json",
        heading="{machine}, {dtype}",
        notes="The demo's target and the tests' draft model of 0.3 M parameters, whose tokenizer has 1,536 tokens, "
        "1,406 of them among the target's 4,096. Greedy, one row, 5 draft tokens, process time, all sides "
        "in turn with equal texts.",
        see=("draft_model",),
    ),
    Study(
        "launches",
        "Launches in a cycle on a GPU",
        "How many kernels, copies and waits does a cycle have?",
        r"\w+-launches",
        columns(
            model="model",
            method="method",
            batch="batch",
            sampled="sampled",
            per_layer="launches a layer",
            draft="in the draft's graphs",
            outside="outside of graphs",
            copies_to_host="copies to the host",
            waits="waits before the next draft",
            uploads="uploads",
            replays="graphs",
        ),
        "python benchmarks/launches.py --sampled --json launches.json",
        heading="a device that records, no GPU",
        notes="Counted, not timed: everything that is launched goes to a device that records and computes on the CPU. "
        "Aims: 14 launches a layer, 10 outside of graphs, one copy to the host, no wait before the next draft, where "
        "it does not come from the host. Medians of the cycles of a call. The drafts of all methods are those of the "
        "demo's target; with the other models only the layers differ. Sampled cycles have temperature, top-k and "
        "top-p, and drafts are drawn where a method can. Weights stand for those of 16 bits: over up to 64 tokens "
        "queries, keys and values are one launch, and so are the halves of a gated MLP; norms in front of products "
        "and sums after them are none.",
        see=("kernels",),
    ),
    Study(
        "gpu",
        "On a GPU",
        "How long does a cycle take on a GPU, beside the read time of the weights, and how fast is every method "
        "beside eager `generate()`?",
        r"gpu-\w+-(first|verification|smoke|smoke-early)",
        on_gpu,
        "python benchmarks/gpu.py --first",
        heading="{machine}: {run}",
        notes="A target of the size of Llama-3.1-8B with random weights, whose text is known beforehand. Draft "
        "networks are of public sizes and untrained: their drafts are accepted at published lengths, so these are "
        "times of cycles, and no claim that a drafter is as good. Eager `generate()` launches its kernels one by one "
        "and waits for the host; `ours: no drafts` is the fair baseline of what drafts gain.",
        see=("performance", "kernels"),
    ),
    Study(
        "offload",
        "Offloaded targets",
        "How much do drafts gain where every forward reads the weights from elsewhere?",
        r"\w+-\w+-offload",
        columns(
            place="weights",
            kind="prompts",
            method="method",
            tokens_per_forward="tokens per forward",
            speed_up="speed relative to plain there",
            to_plain_on_cpu="to plain with weights in place",
        ),
        "python benchmarks/offload.py --json offload.json",
        heading="{machine}, {dtype}",
        notes="SmolLM2-135M; `cpu_offload` and `disk_offload` of accelerate keep the weights in memory and in files, "
        "which the page cache holds here.",
        see=("quantised",),
    ),
    Study(
        "self_speculation",
        "Drafts of the target itself at long contexts",
        "What do early exit and sparse keys and values gain at 1k to 32k tokens?",
        r"\w+-\w+-self-speculation",
        columns(
            context="context",
            side="side",
            tokens_per_cycle="tokens per cycle",
            against_plain="speed relative to plain",
            against_loop="relative to the loop without drafts",
        ),
        "python benchmarks/self_speculation.py --json self_speculation.json",
        heading="{machine}, {dtype}",
        notes="A random Llama of 4 layers, 256 wide, whose second half of layers adds little; two of them draft, or "
        'all four with a window of 512; 4 draft tokens, one row, greedy. "at 90%" accepts each draft token with that '
        "probability: random weights look far back, so that few sparse drafts are accepted. "
        '"early_exit, again" verifies from the first layer on, without what the drafts have read. Plain '
        "`generate()` copies its cache for every token.",
        see=("self_speculation",),
    ),
    Study(
        "lookups",
        "Cost of prompt lookup",
        "What does a lookup cost in a long text, beside transformers' own?",
        r"\w+-\w+-lookups",
        columns(
            context="context",
            cycle="a cycle of one row, microseconds",
            transformers="transformers' lookup",
            ratio="transformers' / ours",
        ),
        "python benchmarks/lookups.py --json lookups.json",
        heading="{machine}",
        notes="On the host, beside the forwards of the target. The text is Python's standard library.",
        see=("ngram",),
    ),
)


# --------------------------------------------------------------------------------------------------------------- pages


def _facts(content: Content) -> dict[str, Any]:
    """Values for headings and commands, from all levels of a file."""
    environment = content.get("environment", {})
    settings = {**environment.get("options", {}), **content.get("settings", {})}
    sampled = content.get("sample") or settings.get("sampling", {}).get("do_sample")
    sizes = settings.get("batch_sizes", [1])
    rows = content["rows"] if "settings" in content else []
    has_heads = any("model" in row.get("settings", {}) for row in rows)
    found = {
        "target": "demo",
        "decoding": "sampled" if sampled else "greedy",
        "sample_option": " --sample" if sampled else "",
        "heads_option": " --heads heads/smollm2" if has_heads else "",
        "sizes_option": f" --batch-sizes {','.join(map(str, sizes))}" if sizes != [1] else "",
        "dtype": "float32",
        **settings,
        **environment,
        **{key: value for key, value in content.items() if isinstance(value, (str, int))},
        "machine": _machine(environment) or "Version 0.1.0",
    }
    return {key: ", ".join(map(str, value)) if isinstance(value, list) else value for key, value in found.items()}


def _machine(environment: Row) -> str:
    return environment.get("gpu") or environment.get("cpu") or ""


def _environment(content: Content) -> str:
    found = content.get("environment")
    if found is None:
        return "Measured with version 0.1.0; date, machine and versions were not written down."
    matmul = found.get("float32_matmul_precision", "highest")
    dtype = [found["dtype"] if matmul == "highest" else f'{found["dtype"]} ("{matmul}")'] if "dtype" in found else []
    names = {"hf_specdec": "hf_specdec", "torch": "torch", "transformers": "transformers", "python": "Python"}
    versions = ", ".join(f"{name} {found[key]}" for key, name in names.items())
    load = f"load average {found['load_average']}"
    place = f"{counted(found['threads'], 'thread')} of {counted(found['cores'], 'core')}"
    return f"{found['date'][:10]}; {'; '.join([_machine(found), place, *dtype])}; {versions}; {load}."


def _page(study: Study) -> str:
    parts = [f"# {study.title}", study.question, *([study.notes] if study.notes else [])]
    if study.see:
        links = " and ".join(f"[{name}](../{name}.md)" for name in study.see)
        parts.append(f"Conclusions: {links}.")
    for stem, content in study.sources().items():
        facts = {**_facts(content), "run": stem.split("-", 2)[-1]}
        heading = study.heading.format_map(facts)
        parts += [
            f"## {heading[0].upper()}{heading[1:]}",
            f"{_environment(content)} Figures: `benchmarks/results/{stem}.json`.",
        ]
        command = content.get("command") or study.command.format_map(facts)
        parts.append(f"```\n{command}\n```")
        parts += map(markdown, study.read(content))
    return "\n\n".join(parts) + "\n"


def _index() -> str:
    rows = []
    for study in STUDIES:
        environments = [content.get("environment", {}) for content in study.sources().values()]
        dates = sorted({found["date"][:10] for found in environments if found})
        machines = ", ".join(dict.fromkeys(filter(None, map(_machine, environments))))
        when = " to ".join(dict.fromkeys([dates[0], dates[-1]])) if dates else "version 0.1.0"
        rows.append({"question": f"[{study.title}]({study.name}.md)", "measured": when, "on": machines})
    text = (
        "Every page compares with a baseline that was measured in the same run, with the sides in turn, and says "
        "when, on which machine, with which versions and by which command. Compare ratios: milliseconds are those of "
        "one, often busy, machine. [Performance](../performance.md) sums up the results, and says what has not been "
        "measured."
    )
    return f"# Benchmarks\n\n{text}\n\n{markdown(Table('', rows))}\n"


def pages() -> dict[str, str]:
    """Texts of all pages by file name."""
    return {"index.md": _index(), **{f"{study.name}.md": _page(study) for study in STUDIES}}


def navigation() -> str:
    """Lines of the site's navigation."""
    return "\n".join(f"      - {json.dumps(study.title)}: benchmarks/{study.name}.md" for study in STUDIES)


def main() -> None:
    PAGES.mkdir(exist_ok=True)
    made = pages()
    for path in PAGES.glob("*.md"):
        if path.name not in made:
            path.unlink()
    for name, text in made.items():
        (PAGES / name).write_text(text, encoding="utf-8")


if __name__ == "__main__":
    main()
