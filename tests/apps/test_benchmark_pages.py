"""The pages under Benchmarks are those of `tools/benchmark_pages.py`; every file of figures is on one of them."""

import json
import re

import pytest

from tools import benchmark_pages, benchmark_tables


def test_pages_are_up_to_date():
    """Run `python -m tools.benchmark_pages` otherwise."""
    written = {path.name: path.read_text(encoding="utf-8") for path in benchmark_pages.PAGES.glob("*.md")}
    assert written == benchmark_pages.pages()


def test_every_file_of_figures_is_on_one_page():
    shown = [stem for study in benchmark_pages.STUDIES for stem in study.sources()]
    assert sorted(shown) == sorted(path.stem for path in benchmark_pages.RESULTS.glob("*.json"))


@pytest.mark.parametrize("study", benchmark_pages.STUDIES, ids=lambda study: study.name)
def test_every_file_has_tables(study):
    sources = study.sources()
    assert sources
    for content in sources.values():
        tables = list(study.read(content))
        assert tables
        assert all(len(table.rows) > 1 for table in tables)


@pytest.mark.parametrize("study", benchmark_pages.STUDIES, ids=lambda study: study.name)
def test_programs_exist(study):
    programs = re.findall(r"benchmarks/\w+\.py", study.command)
    assert all((benchmark_pages.ROOT / program).is_file() for program in programs)
    assert programs or study.command.startswith("hf-specdec ")


def test_ratios_are_those_of_the_file():
    (content,) = (study.sources()["cpu-epyc-demo"] for study in benchmark_pages.STUDIES if study.name == "demo_model")
    (table,) = benchmark_tables.compared(content)
    best = max(content["rows"], key=lambda row: row["speedup"])
    (shown,) = (row for row in table.rows if row["method"] == best["method"])
    assert float(shown["all"].split()[0]) == pytest.approx(best["speedup"], abs=0.005)


def test_several_files_of_never_slower(tmp_path, monkeypatch):
    """One file for each target and way of decoding, each with its heading and its command."""
    row = {"case": "chat", "ratio": 1.5, "kind": "hostile", "beside": "plain", "ratio_range": [1.25, 2.0], "rounds": 3}
    for target, sample in (("demo", False), ("smollm2", True)):
        environment = {"date": "2026-11-24", "dtype": "float32", "cpu": "CPU", "threads": 1, "cores": 2}
        environment |= {"hf_specdec": "1", "torch": "2", "transformers": "5", "python": "3", "load_average": 0.5}
        content = {"environment": environment, "target": target, "sample": sample, "rows": [row]}
        name = f"cpu-epyc-never-slower-{target}{'-sample' if sample else ''}.json"
        (tmp_path / name).write_text(json.dumps(content), encoding="utf-8")
    monkeypatch.setattr(benchmark_pages, "RESULTS", tmp_path)
    page = benchmark_pages.pages()["never_slower.md"]
    assert "## Target demo, greedy, float32" in page
    assert "## Target smollm2, sampled, float32" in page
    assert "never_slower.py --target smollm2 --sample --dtype float32" in page
    assert page.count("| chat | 1.50 (1.25 to 2.00) | 3 |") == 2


def test_a_sampled_run_with_batches_and_heads(tmp_path, monkeypatch):
    content = json.loads((benchmark_pages.RESULTS / "cpu-epyc-smollm2-heads.json").read_text(encoding="utf-8"))
    del content["command"]
    content["settings"] |= {"batch_sizes": [1, 4], "decoding": "sampled", "sampling": {"do_sample": True}}
    for number, row in enumerate(content["rows"]):
        row["batch_size"] = 1 if number % 2 else 4
        del row["same_texts"], row["num_texts"]
    (tmp_path / "cpu-epyc-smollm2-sampled.json").write_text(json.dumps(content), encoding="utf-8")
    monkeypatch.setattr(benchmark_pages, "RESULTS", tmp_path)
    page = benchmark_pages.pages()["smollm2.md"]
    assert "## Sampled, float32" in page
    assert "--stock --heads heads/smollm2 --batch-sizes 1,4 --sample --max-seconds 3600 --json" in page
    assert "| method | batch | all |" in page
    assert "texts as plain" not in page
