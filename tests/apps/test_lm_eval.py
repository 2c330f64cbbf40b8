"""lm-evaluation-harness: the same answers with drafts, and drafts accepted in batches, too."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from hf_specdec import SpecConfigError, demo


lm_eval = pytest.importorskip("lm_eval")

from hf_specdec.integrations.lm_eval import SpecHFLM  # noqa: E402
from tests.helpers.paths import ROOT  # noqa: E402


TASK = """
task: continue_code
dataset_path: json
dataset_kwargs: {{data_files: {{test: {data}}}}}
test_split: test
output_type: generate_until
doc_to_text: "{{{{question}}}}"
doc_to_target: "{{{{answer}}}}"
generation_kwargs: {{until: ["\\n\\n"], max_gen_toks: 40, do_sample: false}}
metric_list:
  - metric: exact_match
    aggregation: mean
    higher_is_better: true
"""
MODEL = {"pretrained": demo.target_path(), "dtype": "float32", "device": "cpu", "batch_size": 4}
DRAFTER = {"spec_method": "ngram", "num_speculative_tokens": 4}


@pytest.fixture(scope="module")
def tasks(tmp_path_factory) -> Path:
    """A folder with one task of eight texts to continue."""
    folder = tmp_path_factory.mktemp("tasks")
    data = folder / "data.jsonl"
    rows = [{"question": prompt.text[-80 - index :], "answer": "x"} for index, prompt in enumerate(demo.prompts()[:8])]
    data.write_text("\n".join(map(json.dumps, rows)))
    (folder / "task.yaml").write_text(TASK.format(data=data))
    return folder


def evaluate(tasks: Path, model) -> tuple[list[str], dict]:
    """Answers in the order of the questions, and what the results say of the model."""
    from lm_eval.tasks import TaskManager

    manager = TaskManager(include_path=str(tasks), include_defaults=False)
    results = lm_eval.simple_evaluate(model, tasks=["continue_code"], task_manager=manager, bootstrap_iters=0)
    samples = sorted(results["samples"]["continue_code"], key=lambda sample: sample["doc_id"])
    return [sample["resps"][0][0] for sample in samples], results["config"]


def test_answers_are_those_without_drafts(tasks):
    from lm_eval.models.huggingface import HFLM

    plain, _ = evaluate(tasks, HFLM(**MODEL))
    answers, config = evaluate(tasks, SpecHFLM(**MODEL, **DRAFTER))
    assert answers == plain
    assert len(set(plain)) > 4
    found = config["speculative"]
    assert found["method"] == "ngram"
    assert found["is_lossless"]
    # Rows do not wait for each other: as many tokens are accepted as one by one.
    one_by_one, single = evaluate(tasks, SpecHFLM(**{**MODEL, "batch_size": 1}, **DRAFTER))
    assert one_by_one == plain
    assert found["num_accepted_tokens"] == pytest.approx(single["speculative"]["num_accepted_tokens"], rel=0.1) != 0
    off, nothing = evaluate(tasks, SpecHFLM(**MODEL, spec_method="off"))
    assert off == plain
    assert nothing["speculative"]["num_draft_tokens"] == 0


def test_wrong_settings():
    with pytest.raises(SpecConfigError, match="nothing"):
        SpecHFLM(**MODEL, spec_method="nothing")


@pytest.mark.slow
def test_the_command(tasks, tmp_path):
    arguments = ",".join(f"{name}={value}" for name, value in {"dtype": "float32", **DRAFTER}.items())
    arguments += f",pretrained={demo.target_path()}"
    command = [sys.executable, "-m", "hf_specdec.integrations.lm_eval", "run", "--model", "hf-specdec"]
    command += ["--model_args", arguments, "--tasks", "continue_code", "--include_path", str(tasks)]
    command += ["--device", "cpu", "--batch_size", "4", "--output_path", str(tmp_path)]
    environment = {**os.environ, "PYTHONPATH": f"{ROOT}:{os.environ.get('PYTHONPATH', '')}"}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr[-4000:]
    (results,) = tmp_path.rglob("results*.json")
    assert json.loads(results.read_text())["config"]["speculative"]["num_accepted_tokens"] > 0
