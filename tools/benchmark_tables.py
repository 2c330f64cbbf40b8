"""Readers of the files in `benchmarks/results/`, one for each shape, and the tables that they make."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any, NamedTuple


Row = Mapping[str, Any]
Content = Mapping[str, Any]


class Table(NamedTuple):
    """Rows with the same columns, and a caption."""

    caption: str
    rows: list[Row]


# ------------------------------------------------------------------------------------------------------------- readers


def columns(**heads: str) -> Callable[[Content], Iterator[Table]]:
    """Reader of the common shape: rows of plain values, alone or in groups (a case with its sides).

    Args:
        heads: Heads by key, of the columns that are shown, in their order. A key with blanks is written with `_`.
    """

    def shown(row: Row) -> Row:
        row = {key.replace(" ", "_").replace("/", "_"): value for key, value in row.items()}
        return {head: _cell(key, row[key]) for key, head in heads.items() if key in row}

    def read(content: Content) -> Iterator[Table]:
        for groups in content.values():
            if not (isinstance(groups, list) and groups and isinstance(groups[0], dict)):
                continue
            nested = [(group, group.get("rows") or group.get("sides")) for group in groups]
            if nested[0][1] is None:
                nested = [({}, groups)]
            for group, rows in nested:
                if found := [cells for cells in map(shown, rows) if len(cells) > 1]:
                    yield Table(_caption(group), found)

    return read


def compared(content: Content) -> Iterator[Table]:
    """Reader of `hf-specdec bench` and `hf-specdec demo`: speed-ups over plain generation, by kind of prompt."""
    many = len({row.get("batch_size", 1) for row in content["rows"]}) > 1
    rows = []
    for row in content["rows"]:
        cells = {"method": _named(row), **({"batch": row["batch_size"]} if many else {})}
        cells["all"] = _gain(row)
        cells |= {kind: _gain(part) for kind, part in row.get("kinds", {}).items()}
        spread = row.get("speedup_range") or [row["spread"]["speedup"][side] for side in ("low", "high")]
        if "speedup_over_none" in row:
            cells["all, over `none`"] = f"{row['speedup_over_none']:.2f}"
        cells["range over rounds"] = _between(spread) if spread[0] < spread[1] else ""
        if row.get("num_texts"):
            cells["texts as plain"] = f"{row['same_texts']} of {row['num_texts']}"
        rows.append(cells)
    yield Table("Speed-up over plain `generate()`, tokens per cycle in brackets", rows)


def on_gpu(content: Content) -> Iterator[Table]:
    """Reader of `benchmarks/gpu.py`: the parts of `--smoke` and `--first`, and drafts of given shapes."""
    for case in content.get("verification", ()):
        names = ("target", "target_work", "cycle", "outside", "gap")
        heads = ("verification, ms", "its own work, ms", "cycle, ms", "outside of forwards, ms", "host gap, ms")
        rows = [
            {
                "draft": row["shape"],
                "verified nodes": row["nodes"],
                **{head: f"{row[name]:.2f}" for head, name in zip(heads, names)},
                "of the weights' read time": f"{row['to_weights']:.2f}",
            }
            for row in case["rows"]
        ]
        yield Table(f"{case['size']}, context {case['context']}, batch {case['batch_size']}", rows)
    parts = content.get("parts", [])
    if content.get("kind") == "smoke":
        details = ((part["part"], part["status"], part.get("detail", "").partition(",")[0]) for part in parts)
        yield Table("", [{"part": name, "result": status, "why": why} for name, status, why in details])
        return
    found = {part["part"]: part["found"] for part in parts if part.get("found")}
    if sides := [_side_of_gpu(each) for name, each in found.items() if name.startswith("decoding")]:
        yield Table(f"{found['models']['size']}, context {found['models']['context']}, batch 1", sides)
        kernels, weights = found["kernels of a replay"], found["models"]["weights_ms"]
        total = kernels["milliseconds"]
        caption = (
            f"The longest of {kernels['num_kernels']} kernels in a verification of {kernels['nodes']} nodes: "
            f"{total:.2f} ms, {total / weights:.2f} times the {weights:.2f} ms that reading the weights takes"
        )
        rows = [
            {
                "kernel": f"`{kernel['kernel'].removeprefix('void ').partition('<')[0]}`",
                "launches": kernel["count"],
                "ms": f"{kernel['microseconds'] / 1000:.2f}",
            }
            for kernel in kernels["top"][:10]
        ]
        yield Table(caption, rows)
        sides = {"tree_attention": "tree attention", "sdpa": "torch's, without a mask"}
        rows = [
            {key: row[key] for key in ("context", "nodes")}
            | {f"{head}, µs": f"{row[name]['microseconds']:.1f}" for name, head in sides.items()}
            for row in found["attention"]
        ]
        yield Table("Attention of a layer: 32 query heads, 8 of keys and values, of 128 numbers", rows)
    if "ways of a forward" in found:
        rows = [
            {"kernels": row["way"], "nodes": row["nodes"], "ms": f"{row['milliseconds']:.2f}"}
            | {"of the weights' read time": f"{row['to_weights']:.2f}"}
            for row in found["ways of a forward"]
        ]
        yield Table("A verification, with kernels in other ways", rows)
    if "products" in found:
        rows = [
            {key: row[key] for key in ("size", "tokens", "products")}
            | {f"{side}, µs": f"{time:.1f}" for side, time in row["microseconds"].items()}
            for row in found["products"]
        ]
        yield Table("Linear layers of a layer, as it computes them and by torch alone", rows)
    if "drawn tokens" in found:
        rows = [
            {key: row[key] for key in ("rows", "warpers")}
            | {f"{side}, µs": f"{time:.1f}" for side, time in row["microseconds"].items()}
            for row in found["drawn tokens"]
        ]
        yield Table("Tokens drawn from logits of a vocabulary of 128,256", rows)


def _side_of_gpu(found: Mapping[str, Any]) -> Row:
    parts = found.get("parts") or {}
    return {
        "side": found["side"],
        "tokens/s": f"{found['tokens_per_second']:.0f}",
        "to plain": f"{found['to_plain']:.2f}",
        "tokens a cycle": f"{found['tokens_per_cycle']:.2f}" if found["tokens_per_cycle"] else "",
        **{
            f"{head}, ms": f"{parts[name]:.2f}" if parts else ""
            for head, name in (("draft", "draft"), ("verification", "target"), ("outside of forwards", "outside"))
        },
    }


def few_rows(content: Content) -> Iterator[Table]:
    """Reader of `few_rows.py`: the least and the most over all matrices."""
    heads = {
        "to_single_row_of_torch": "time / torch's over one row",
        "to_torch": "time / torch's over as many",
        "to_bandwidth": "part of the memory bandwidth",
    }
    cases = sorted({(row["dtype"], row["threads"]) for row in content["rows"]}, reverse=True)
    for dtype, threads in cases:
        of_case = [row for row in content["rows"] if (row["dtype"], row["threads"]) == (dtype, threads)]
        rows = []
        for count in sorted({row["rows"] for row in of_case}):
            same = [row for row in of_case if row["rows"] == count]
            spans = {head: [limit(row[key] for row in same) for limit in (min, max)] for key, head in heads.items()}
            rows.append({"rows": count, **{head: _between(span) for head, span in spans.items()}})
        models = ", ".join(dict.fromkeys(row["model"] for row in of_case))
        yield Table(f"{dtype}, {counted(threads, 'thread')}: least and most over the matrices of {models}", rows)


def never_slower(content: Content) -> Iterator[Table]:
    """Reader of `never_slower.py`: hostile cases beside plain generation, friendly ones beside the best length."""
    hostile: dict[str, dict[str, Any]] = {}
    friendly = []
    for row in content["rows"]:
        ratio = f"{row['ratio']:.2f} ({_between(row['ratio_range'])})"
        if row["kind"] == "friendly":
            beside = {"best fixed length": row["beside"].removeprefix("k="), "speed relative to it": ratio}
            friendly.append({"friendly case": row["case"], **beside, "rounds": row["rounds"]})
        else:
            cells = hostile.setdefault(row["case"], {"hostile case": row["case"]})
            cells[f"speed relative to {row['beside']}"] = ratio
            # The last column.
            cells.pop("rounds", None)
            cells["rounds"] = row["rounds"]
    for rows in (list(hostile.values()), friendly):
        if rows:
            yield Table("", rows)


def loops(content: Content) -> Iterator[Table]:
    """Reader of `overhead.py`: our sides beside transformers' loop with the same drafts and plain generation."""
    results = content["results"]
    for target in dict.fromkeys(result["case"]["target"] for result in results):
        rows = []
        for case, side in ((result["case"], side) for result in results for side in result["sides"]):
            if case["target"] == target and side["side"].startswith("ours"):
                cells = {key: case[key] for key in ("precision", "context")} | {"batch": case["batch_size"]}
                cells["side"] = side["side"].removeprefix("ours: ")
                cells["speed relative to transformers"] = _cell("", side["ratio_to_rival"])
                cells["relative to plain"] = _cell("", side["ratio_to_plain"])
                cells |= {f"{part}, ms": _cell("", side[f"{part}_ms"]) for part in ("cycle", "outside")}
                rows.append(cells)
        yield Table(f"Target `{target}`", rows)


def _named(row: Row) -> str:
    settings = dict(row.get("settings") or {})
    name = settings.pop("method", row["method"])
    settings.pop("model", None)
    if name.startswith("stock_"):
        name = f"transformers' own {name.removeprefix('stock_').replace('_', ' ')}"
    return ", ".join([name, *(f"{key} = {value}" for key, value in settings.items())])


def _gain(row: Row) -> str:
    return f"{row['speedup']:.2f} ({row['mean_acceptance_length']:.2f})"


def _caption(group: Row) -> str:
    facts = {**group, **group.get("case", {})}
    plain = [(key, value) for key, value in facts.items() if isinstance(value, (str, int)) and key != "rounds"]
    texts = (value if isinstance(value, str) else f"{key.replace('_', ' ')} {value}" for key, value in plain)
    return ", ".join(texts)


# --------------------------------------------------------------------------------------------------------------- cells


def _cell(key: str, value: Any) -> str:
    if value is None:
        return ""
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, float):
        if key.endswith("share"):
            return f"{100 * value:.2f} %"
        return f"{value:.2f}" if abs(value) < 100 else f"{value:.0f}"
    if isinstance(value, list):
        if key.endswith("range"):
            return _between(value)
        if key.endswith("per_position"):
            return ", ".join(f"{100 * share:.0f}" for share in value)
        first, *rest = value
        # A median with its range, or two figures.
        return f"{_cell(key, first)} ({_between(rest) if len(rest) > 1 else _cell(key, rest[0])})"
    return str(value)


def _between(limits: list[float]) -> str:
    return f"{limits[0]:.2f} to {limits[1]:.2f}"


def counted(number: int, noun: str) -> str:
    return f"{number} {noun}" if number == 1 else f"{number} {noun}s"


def markdown(table: Table) -> str:
    # Columns of which no row has a value are left out.
    heads = [head for head in dict.fromkeys(head for row in table.rows for head in row)]
    heads = [head for head in heads if any(row.get(head, "") != "" for row in table.rows)]
    lines = [heads, ["---"] * len(heads), *([str(row.get(head, "")) for head in heads] for row in table.rows)]
    text = "\n".join("| " + " | ".join(cells) + " |" for cells in lines)
    return f"{table.caption}:\n\n{text}" if table.caption else text
