"""The GPU benchmark: it runs as a whole on a CPU, its models write what they must, its figures are what they say."""

from __future__ import annotations

import json
import os
import subprocess
import sys

import gpu
import gpu_checks
import gpu_clocks
import gpu_first
import gpu_models
import pytest
import torch
from rich.console import Console

from hf_specdec import SpeculativeConfig, Speculator, demo, generate, record
from hf_specdec.bench.prompts import make_batches
from hf_specdec.decoding import functional
from hf_specdec.decoding.capture import CaptureBackend
from hf_specdec.decoding.graphs import forget_graphs
from hf_specdec.drafts import TokenTree
from hf_specdec.errors import MissingDependencyError
from hf_specdec.method import built_in_methods
from tests.helpers.paths import BENCHMARKS
from tests.helpers.tape import tape_everything


CPU = torch.device("cpu")


def run_program(*arguments, **environment) -> subprocess.CompletedProcess:
    command = [sys.executable, BENCHMARKS / "gpu.py", *map(str, arguments)]
    return subprocess.run(command, env=os.environ | environment, capture_output=True, text=True)


@pytest.fixture(scope="module")
def models() -> gpu_models.Models:
    return gpu_models.Models(gpu_models.SIZES["tiny"], torch.float32, CPU)


# The program


def test_the_program(tmp_path, monkeypatch):
    json_file, table_file = tmp_path / "out.json", tmp_path / "out.md"
    sides = ("transformers", "no drafts", "ngram", "eagle3, chain")
    settings = ("--batch-sizes", 1, "--nodes", 1, 8, "--rounds", 1, "--device", "cpu")
    files = ("--json", json_file, "--markdown", table_file)
    sections = ("--sections", "verification", "decoding")
    done = run_program("--sizes", "tiny", *sections, "--sides", *sides, *settings, *files)
    assert done.returncode == 0, done.stdout + done.stderr
    report = json.loads(json_file.read_text())
    assert not report["failures"]
    assert not report["not_run"]
    [verified], [decoded] = report["verification"], report["decoding"]
    assert [(row["shape"], row["nodes"]) for row in verified["rows"]] == [("none", 1), ("chain", 8), ("tree", 8)]
    rows = {row["side"]: row for row in decoded["rows"]}
    named = [f"ours: {name}" for name in ("no drafts", "ngram, transformers' rule", "ngram", "eagle3, chain of 3")]
    assert list(rows) == [gpu.PLAIN, gpu.LOOKUP, gpu.ASSISTED, *named, gpu.COMPILED]
    exact = {name for name, row in rows.items() if row["same_rows"] == 1}
    assert exact == set(rows) - {"ours: eagle3, chain of 3"}
    assert rows["ours: eagle3, chain of 3"]["tokens_per_cycle"] == pytest.approx(3.34, abs=0.6)
    assert rows["ours: ngram"]["tokens_per_cycle"] > 1.5
    assert rows[gpu.NO_DRAFTS]["tokens_per_cycle"] == 1
    for row in verified["rows"] + [row["parts"] for row in rows.values() if "parts" in row]:
        assert 0 < row["target"] < row["cycle"]
        assert row["to_limit"] == pytest.approx(row["target"] / row["limit"])
        assert row["weights"] < row["limit"]
    tables = table_file.read_text()
    assert all(f"| {name} |" in tables for name in rows)
    again = ["--read", json_file, "--markdown", tmp_path / "again.md", "--device", "cpu"]
    monkeypatch.setattr(sys, "argv", ["gpu.py", *map(str, again)])
    gpu.main()
    assert (tmp_path / "again.md").read_text() == tables


@pytest.mark.slow
def test_the_whole_program(tmp_path):
    json_file = tmp_path / "out.json"
    done = run_program("--sizes", "tiny", "--device", "cpu", "--json", json_file)
    assert done.returncode == 0, done.stdout + done.stderr
    report = json.loads(json_file.read_text())
    found = {check["what"]: check["is_right"] for check in report["checks"]}
    assert found.pop("kernels", None) is None
    assert len(found) == 2 * len(gpu_checks.drafts())
    assert all(found.values())
    for case in report["decoding"]:
        ours = {row["side"] for row in case["rows"] if row["side"].startswith("ours")}
        assert ours == {gpu.NO_DRAFTS, *(f"ours: {drafter.name}" for drafter in gpu_models.DRAFTERS)}


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_the_program_on_a_gpu(tmp_path):
    json_file = tmp_path / "out.json"
    sides = ("transformers", "no drafts", "ngram", "eagle3, tree")
    done = run_program("--sizes", "tiny", "--device", "cuda", "--sides", *sides, "--json", json_file)
    assert done.returncode == 0, done.stdout + done.stderr
    report = json.loads(json_file.read_text())
    assert all(check["is_right"] is not False for check in report["checks"])
    assert "tree_attention, bfloat16" in {check["what"] for check in report["checks"]}
    for case in report["verification"]:
        for row in case["rows"]:
            assert 0 < row["target_work"]
            assert row["gap"] >= 0


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--sides", "egale3"], "no side is called 'egale3...'; there are: plain;"),
        (["--sizes", "qwen3-8b", "--device", "cpu"], "there is --sizes tiny"),
        (["--nodes", "65"], "--nodes takes 1 to 64"),
        (["--new-tokens", "2"], "--new-tokens 16"),
        (["--read", "nowhere.json"], "there is no nowhere.json"),
    ],
)
def test_wrong_options(arguments, message, capsys):
    with pytest.raises(SystemExit):
        gpu.parse_options(["--device", "cpu", *arguments])
    assert message in capsys.readouterr().err


def bench_of(tmp_path, *arguments) -> gpu.Bench:
    options = gpu.parse_options(["--device", "cpu", "--json", str(tmp_path / "out.json"), *arguments])
    bench = gpu.Bench(options, Console(quiet=True))
    bench.report["bandwidth"], bench.watch = 1e9, gpu_clocks.Stopwatch(CPU)
    return bench


def test_files_of_one_machine_are_joined():
    def report(gpu_name, size):
        environment = {"gpu": gpu_name, "dtype": "bfloat16"}
        case = {"size": size, "context": 512, "batch_size": 1, "rows": []}
        kept = {"checks": [], "verification": [case], "decoding": [], "not_run": [], "failures": [size]}
        return {"environment": environment, "bandwidth": 1e12, "seconds": 60.0, "aims": [], **kept}

    joined = gpu.joined([report("one", "llama-1b"), report("one", "qwen3-8b")])
    assert [case["size"] for case in joined["verification"]] == joined["failures"] == ["llama-1b", "qwen3-8b"]
    assert joined["seconds"] == 120
    with pytest.raises(SystemExit, match="gpu: 'one' and 'another'"):
        gpu.joined([report("one", "llama-1b"), report("another", "qwen3-8b")])


def test_nothing_begins_when_the_time_is_up(tmp_path):
    bench = bench_of(tmp_path, "--max-minutes", "0")
    bench._measure_size("tiny")
    bench.save()
    assert json.loads((tmp_path / "out.json").read_text())["not_run"] == ["tiny"]


def test_a_side_that_fails_costs_no_other(tmp_path, models, monkeypatch):
    def fail():
        raise RuntimeError("out of luck")

    sides = [gpu.Side(gpu.PLAIN), gpu.Side("ours: broken", make=fail), gpu.Side(gpu.NO_DRAFTS, gpu_models.no_drafts)]
    monkeypatch.setattr(gpu, "make_sides", lambda *_: sides)
    bench = bench_of(tmp_path, "--rounds", "2")
    bench._decode("tiny", models, 64, 1)
    report = json.loads((tmp_path / "out.json").read_text())
    assert report["failures"] == ["decoding, tiny, context 64, batch 1, ours: broken: RuntimeError: out of luck"]
    assert [(row["side"], row["rounds"]) for row in report["decoding"][0]["rows"]] == [
        ("plain", 2),
        (gpu.NO_DRAFTS, 2),
    ]


def test_texts_that_differ_are_a_failure(tmp_path, models, monkeypatch):
    random = gpu_models.random_nodes(TokenTree.chain(4), 1024)
    config = SpeculativeConfig(method=random.config.method, **gpu_models.synthetic(3.0))
    nonsense = Speculator(config, gpu_models.RandomNodesCandidateGenerator, random.resources)
    sides = [gpu.Side(gpu.PLAIN), gpu.Side("ours: nonsense", make=lambda: nonsense)]
    monkeypatch.setattr(gpu, "make_sides", lambda *_: sides)
    bench = bench_of(tmp_path)
    bench._decode("tiny", models, 64, 1)
    assert bench.report["failures"] == ["decoding, tiny, context 64, batch 1, ours: nonsense: 1 of 1 texts differ"]


# Models and texts


@pytest.mark.parametrize("batch_size", [1, 3])
def test_targets_write_the_ring(models, batch_size):
    text = gpu_models.ring_text(models.ring, batch_size, 64, 40)
    ones = torch.ones_like(text.prompts)
    written = models.target.generate(text.prompts, attention_mask=ones, do_sample=False, max_new_tokens=40)
    assert torch.equal(written[:, 64:], text.expected)


def test_prompts_hold_the_text_to_come():
    text = gpu_models.ring_text(gpu_models.random_ring(1024), 2, 200, 60)
    same = text.prompts[:, :60] == text.expected
    assert same.float().mean().item() == pytest.approx(1 - 1 / gpu_models.CHANGED_TOKEN_OF, abs=0.02)
    assert same.any(1).all()


def test_draft_models_have_the_accuracy_asked_for(models):
    draft, every = models.network("draft_model"), torch.arange(1024)
    accuracy = gpu_models.accuracy_of_length(gpu_models.DRAFT_MODEL_LENGTH, gpu_models.DRAFT_LENGTH)
    with torch.no_grad():
        right, drafted = (model(every[:, None]).logits[:, 0].argmax(-1) for model in (models.target, draft))
    assert (right == drafted).float().mean().item() == pytest.approx(accuracy, abs=0.05)


@pytest.mark.parametrize("length", [1.5, 2.28, 5.0])
def test_accuracy_of_length(length):
    accuracy = gpu_models.accuracy_of_length(length, 5)
    assert sum(accuracy**depth for depth in range(6)) == pytest.approx(length)


def test_bytes_that_a_forward_reads(models):
    layer = 128 * (128 + 2 * 64) + 128 * 128 + 3 * 128 * 256 + 2 * 128
    assert gpu_models.bytes_of_weights(models.target) == 4 * (4 * layer + 128 + 1024 * 128)
    assert gpu_models.bytes_of_token(models.target) == 4 * (4 * 2 * 2 * 32)


# Times


class HeldWatch(gpu_clocks.Stopwatch):
    """A device that is held up by waiting."""

    def __init__(self):
        self.device, self.is_cuda, self.holds = CPU, True, []

    def mark(self) -> float:
        return gpu_clocks.perf_counter()

    def milliseconds(self, first, last) -> float:
        return 1000 * (last - first)

    def synchronize(self) -> None:
        pass

    def is_capturing(self) -> bool:
        return False

    def hold(self, milliseconds: float) -> None:
        self.holds.append(milliseconds)


def parts_of(models, watch, name):
    drafter = next(drafter for drafter in gpu_models.DRAFTERS if drafter.name == name)
    speculator = models.speculator(drafter)
    text = gpu_models.ring_text(models.ring, 1, 64, 16)
    call = gpu.call_of(models, speculator, text.prompts, 16)
    return gpu_clocks.measure_parts(call, speculator, models.target, watch, 12)


@pytest.mark.parametrize("name", ["draft_model, chain of 5", "medusa, tree of 63", "dflash, block of 16"])
def test_parts_of_a_cycle(models, name):
    watch = HeldWatch()
    parts = parts_of(models, watch, name)
    assert 0 < parts["network"] < parts["draft"]
    assert all(parts[part] > 0 for part in ("target", "accept", "commit", "wait"))
    assert parts["outside"] > parts["accept"]
    assert all(parts[f"{part}_work"] > 0 for part in gpu_clocks.WORK)
    assert parts["gap"] >= 0
    # Once for every part of every cycle, longer than the host took.
    assert watch.holds
    assert len(watch.holds) % len(gpu_clocks.WORK) == 0
    assert min(watch.holds) > 0.5


@pytest.mark.parametrize("name", ["eagle3, chain of 3", "medusa, tree of 63", "draft_model, chain of 5"])
def test_replayed_drafts_are_forwards_of_the_network(models, name, monkeypatch):
    """A graph calls none of the network's functions."""
    tape_everything(monkeypatch)
    try:
        with record() as made:
            parts = [parts_of(models, HeldWatch(), name) for _ in range(2)][-1]
    finally:
        forget_graphs()
    assert made.calls[-1].stats.num_draft_graph_replays > 0
    assert 0 < parts["network"] < parts["draft"]


def test_no_host_gap_without_a_gpu(models):
    parts = parts_of(models, gpu_clocks.Stopwatch(CPU), "medusa, tree of 63")
    assert parts["gap"] is parts["target_work"] is None
    assert parts["target"] > 0


def test_the_classes_are_left_as_they_were(models):
    watched = [(kind, name) for kind, names in gpu_clocks._NETWORK_FORWARDS for name in names]
    before = [vars(kind).get(name) for kind, name in watched]
    parts_of(models, HeldWatch(), "eagle3, chain of 3")
    assert [vars(kind).get(name) for kind, name in watched] == before


def test_decoding_begins_after_the_first_cycle():
    assert gpu_clocks.decoding_part([(1.0, 2), (1.5, 6), (2.0, 8), (4.0, 20)], 2) == (14, 2.5)
    with pytest.raises(RuntimeError, match="raise --new-tokens"):
        gpu_clocks.decoding_part([(1.0, 2), (1.5, 6)], 2)


def test_aims():
    def case(section, size, batch_size, row):
        return section, {"size": size, "context": 512, "batch_size": batch_size, "rows": [row]}

    report = {"environment": {"gpu": "some GPU"}, "verification": [], "decoding": []}
    for section, found in (
        case("verification", "qwen3-8b", 1, {"shape": "chain", "nodes": 16, "to_weights": 1.1}),
        case("verification", "llama-8b", 1, {"shape": "tree", "nodes": 16, "to_weights": 1.3}),
        case("verification", "llama-8b", 4, {"shape": "tree", "nodes": 16, "to_weights": 9.0}),
        case("verification", "llama-1b", 1, {"shape": "tree", "nodes": 16, "to_weights": 9.0}),
        case("decoding", "qwen3-8b", 1, {"side": gpu.NO_DRAFTS, "to_plain": [2.6, 2, 3], "parts": {"outside": 0.2}}),
        case("decoding", "llama-8b", 1, {"side": gpu.NO_DRAFTS, "to_plain": [2.4, 2, 3], "parts": {"outside": 0.4}}),
    ):
        report[section].append(found)
    weights, outside, speed = gpu.find_aims(report)
    assert [(figure, is_met) for _, figure, is_met in weights.found] == [("1.30 times", False), ("1.10 times", True)]
    assert [(figure, is_met) for _, figure, is_met in outside.found] == [("0.40 ms", False), ("0.20 ms", True)]
    assert [(figure, is_met) for _, figure, is_met in speed.found] == [("2.40 times", False), ("2.60 times", True)]
    report["environment"]["gpu"] = None
    assert not any(aim.found for aim in gpu.find_aims(report))


# Checks


def test_wrong_texts_are_seen():
    target = demo.load_target()
    batches = make_batches(demo.load_tokenizer(), demo.prompts()[-1:], 1, 8)
    settings = {"method": "medusa", "model": demo.drafter_path("medusa"), "num_speculative_tokens": 3}
    right = gpu_checks.check_text("right", target, settings, batches)
    wrong = gpu_checks.check_text("wrong", target, settings | gpu_models.synthetic(4.0), batches)
    assert right.is_right
    assert wrong.is_right is False
    assert "bug in " in wrong.detail


def test_a_small_model_also_runs_through_its_modules():
    target = demo.load_target()
    with gpu_checks._through_modules():
        assert not functional.has_lean_forward(target)
    assert functional.has_lean_forward(target)


def test_no_drafts_is_plain_decoding(models):
    text = gpu_models.ring_text(models.ring, 2, 64, 16)
    arguments = {"do_sample": False, "max_new_tokens": 16, "attention_mask": torch.ones_like(text.prompts)}
    written = generate(models.target, text.prompts, **arguments, assistant=gpu_models.no_drafts())
    assert torch.equal(written[:, 64:], text.expected)


# The first minutes on a GPU


@pytest.fixture
def taped(monkeypatch):
    tape_everything(monkeypatch)
    yield
    forget_graphs()


def first_run(tmp_path, kind="smoke", *arguments) -> gpu_first.FirstRun:
    options = gpu.parse_options([f"--{kind}", "--device", "cpu", "--json", str(tmp_path / "out.json"), *arguments])
    return gpu_first.FirstRun(kind, options, Console(quiet=True))


def written(tmp_path) -> dict:
    return json.loads((tmp_path / "out.json").read_text())


def statuses(report: dict) -> dict[str, str]:
    return {part["part"]: part["status"] for part in report["parts"]}


class TestFirstRun:
    def test_a_part_that_fails_costs_no_other(self, tmp_path):
        seen = []

        def fail():
            raise RuntimeError("out of luck")

        def look():
            # Written after every part.
            seen.append(statuses(written(tmp_path)))

        def cannot():
            raise gpu_first.SkippedError("not here")

        run = first_run(tmp_path)
        parts = [("good", lambda: {"figure": 1}), ("bad", fail), ("look", look), ("missing", cannot)]
        assert run.run(iter(parts)) == 1
        assert seen == [{"good": "passed", "bad": "failed"}]
        report = written(tmp_path)
        assert statuses(report) == {"good": "passed", "bad": "failed", "look": "passed", "missing": "skipped"}
        good, bad, _, missing = report["parts"]
        assert good["found"] == {"figure": 1}
        assert bad["error"] == "RuntimeError: out of luck"
        assert "in fail" in bad["traceback"]
        assert missing["detail"] == "not here"
        assert all(part["seconds"] >= 0 for part in report["parts"])
        assert report["exit_code"] == 1
        assert report["environment"]["torch"] == torch.__version__
        assert {"date", "gpu", "cpu", "transformers", "triton", "hf_specdec"} <= set(report["environment"])

    def test_nothing_begins_when_the_time_is_up(self, tmp_path):
        run = first_run(tmp_path, "smoke", "--max-minutes", "0")
        assert run.run(iter([("late", lambda: 1)])) == gpu_first.EXIT_INCOMPLETE
        assert written(tmp_path)["parts"][0]["detail"] == "the time was up"

    def test_what_is_skipped_for_other_reasons_is_complete(self, tmp_path):
        def cannot():
            raise MissingDependencyError("install it")

        assert first_run(tmp_path).run(iter([("good", lambda: 1), ("missing", cannot)])) == 0

    def test_another_process_goes_on_where_the_device_is_lost(self, tmp_path, monkeypatch):
        """An access to wrong memory spoils all that follows in the process."""
        begun = []

        class Replaced(Exception):
            pass

        def replaced(program, arguments):
            begun.append(arguments)
            raise Replaced

        def crash():
            raise RuntimeError("CUDA error: an illegal memory access was encountered")

        monkeypatch.setattr(os, "execv", replaced)
        parts = [(gpu_first.MODELS, lambda: 1), ("good", lambda: 2), ("bad", crash), ("last", lambda: 3)]
        run = first_run(tmp_path)
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(gpu_first, "is_unusable", lambda device: True)
            with pytest.raises(Replaced):
                run.run(iter(parts))
        assert begun == [[sys.executable, *sys.argv, "--resume"]]
        resumed = first_run(tmp_path, "smoke", "--resume")
        assert resumed.run(iter(parts)) == 1
        names = [part["part"] for part in written(tmp_path)["parts"]]
        assert names == [gpu_first.MODELS, "good", "bad", gpu_first.MODELS, "last"]
        # Each part is lost once at most.
        begun.clear()
        monkeypatch.setattr(gpu_first, "is_unusable", lambda device: True)
        assert first_run(tmp_path).run(iter([(gpu_first.MODELS, crash)])) == 1
        assert not begun

    def test_devices_that_work(self):
        assert not gpu_first.is_unusable(CPU)
        if not torch.cuda.is_available():
            assert gpu_first.is_unusable(torch.device("cuda"))


class TestSmoke:
    def test_parts(self):
        names = [name for name, _ in gpu_first.smoke_parts(None, CPU)]
        methods = {name.removeprefix("text: ") for name in names if name.startswith("text: ")}
        assert methods == {method.name for method in built_in_methods() if not method.needs_grammar}
        assert names[-1] == "captured cycle"

    def test_on_graphs(self, tmp_path, taped, monkeypatch):
        every = gpu_first.one_of_each_method()
        monkeypatch.setattr(gpu_first, "one_of_each_method", lambda: {name: every[name] for name in ("ngram", "mtp")})
        arguments = ["gpu.py", "--smoke", "--device", "cpu", "--json", str(tmp_path / "out.json")]
        monkeypatch.setattr(sys, "argv", arguments)
        with pytest.raises(SystemExit) as ended:
            gpu.main()
        assert ended.value.code == 0
        report = written(tmp_path)
        assert statuses(report) == {
            "kernel: kernels": "skipped",
            "text: ngram": "passed",
            "text: mtp": "passed",
            "captured cycle": "passed",
        }
        cycle = report["parts"][-1]["found"]
        assert cycle["graphs"] == cycle["draft_graphs"] == "on"
        assert cycle["replays"] > 0
        assert cycle["draft_replays"] > 0
        assert cycle["captures"][0] > 0

    def test_without_graphs_there_is_no_captured_cycle(self):
        with pytest.raises(gpu_first.SkippedError, match="no graphs on a cpu device"):
            gpu_first.captured_cycle(CPU)

    def test_graphs_that_do_not_run_are_seen(self, monkeypatch):
        monkeypatch.setattr(gpu_first.graphs, "capture_backend", lambda device: CaptureBackend())
        with pytest.raises(AssertionError, match="not all forwards ran as graphs.*off: capturing failed"):
            gpu_first.captured_cycle(CPU)

    def test_wrong_texts_are_seen(self, monkeypatch):
        check = gpu_checks.Check("a text", False, "other texts")
        with pytest.raises(AssertionError, match="a text: other texts"):
            gpu_first._right(check)


def test_the_first_figures(tmp_path, taped, monkeypatch):
    sides = (gpu.PLAIN, gpu.NO_DRAFTS, "ours: eagle3, chain")
    monkeypatch.setattr(gpu_first, "FIRST_SIDES", sides)
    monkeypatch.setattr(gpu_first, "LAST_SIDES", ())
    monkeypatch.setattr(gpu_first, "WAYS_NODES", (1, 16))
    drafts = ("ours: eagle3, chain", "ours: draft_model")
    monkeypatch.setattr(gpu_first, "PROFILED_DRAFTS", drafts)
    # There are no kernels that could.
    monkeypatch.setattr(gpu_first.early, "launches_early", lambda tensor: True)
    run = first_run(tmp_path, "first", "--new-tokens", "24")
    assert run.run(gpu_first.first_parts(run.options, CPU)) == 0
    report = written(tmp_path)
    found = {part["part"]: part["found"] for part in report["parts"]}
    assert list(found) == [
        "models",
        *(f"decoding: {side}" for side in sides),
        "kernels of a replay",
        "ways of a forward",
        *(f"kernels of a draft: {side}" for side in drafts),
        "attention",
        "products",
        "drawn tokens",
        "first calls and captures",
        "memory of graphs",
    ]
    assert found["decoding: plain"]["to_plain"] == 1
    for side in sides[1:]:
        assert found[f"decoding: {side}"]["to_plain"] > 0
    for side in (gpu.NO_DRAFTS, "ours: eagle3, chain"):
        figures = found[f"decoding: {side}"]
        assert figures["graphs"] == "on"
        assert figures["parts"]["cycle"] > figures["parts"]["target"] > 0
    assert found["decoding: ours: eagle3, chain"]["parts"]["network"] > 0
    assert found["kernels of a replay"]["nodes"] == 16
    ways = found["ways of a forward"]
    assert [(row["way"], row["nodes"]) for row in ways] == [
        (way, nodes) for way in gpu_first.WAYS for nodes in gpu_first.WAYS_NODES
    ]
    assert all(row["milliseconds"] >= row["least"] > 0 for row in ways)
    for part in ("kernels of a replay", *(f"kernels of a draft: {side}" for side in drafts)):
        kernels = found[part]
        assert kernels["num_kernels"] > 20
        times = [kernel["microseconds"] for kernel in kernels["top"]]
        assert times == sorted(times, reverse=True)
        assert len(times) <= 20
    assert [(row["context"], row["nodes"]) for row in found["attention"]] == [(64, 1), (64, 16), (64, 60)]
    assert all(row["tree_attention"]["gigabytes_per_second"] > 0 for row in found["attention"])
    assert [row["tokens"] for row in found["products"]] == [1, 1, 16, 16, 64, 64]
    assert all(time > 0 for row in found["products"] for time in row["microseconds"].values())
    assert [row["rows"] for row in found["drawn tokens"]] == [2, 2, 2, 2]
    assert all(time > 0 for row in found["drawn tokens"] for time in row["microseconds"].values())
    captures = found["first calls and captures"]
    assert len(captures["call_seconds"]) == len(captures["prefill_seconds"]) == 3
    assert captures["capture_seconds"]
    assert found["memory of graphs"]["num_graphs"] > 0
    assert found["memory of graphs"]["slot_bytes"] > 0


def test_without_models_there_are_no_figures(tmp_path, monkeypatch):
    def fail(*_):
        raise RuntimeError("no room")

    monkeypatch.setattr(gpu_first, "Models", fail)
    run = first_run(tmp_path, "first")
    assert run.run(gpu_first.first_parts(run.options, CPU)) == 1
    found = statuses(written(tmp_path))
    assert found.pop("models") == "failed"
    for part in ("attention", "products", "drawn tokens", "memory of graphs"):
        assert found.pop(part) == "passed"
    assert set(found.values()) == {"skipped"}
