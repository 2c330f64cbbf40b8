"""Ray Data and lm-evaluation-harness: the same answers with drafts, also in real actors and by the command."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch

from hf_specdec import MissingDependencyError, SpecConfigError, demo, load_speculator
from hf_specdec.integrations.ray import HFSpecProcessorConfig, SpecGenerate, build_processor
from tests.helpers.levels import full, slow
from tests.helpers.methods import demo_target
from tests.helpers.paths import ROOT


LENGTH = 10
FLOAT32 = {"dtype": "float32"}
DRAFTING = {"method": "ngram", "num_speculative_tokens": 4}
PROMPTS = [prompt.text[-50:] for prompt in demo.prompts()[:6]]
ENVIRONMENT = {"PYTHONPATH": f"{ROOT}:{os.environ.get('PYTHONPATH', '')}", "OMP_NUM_THREADS": "1"}


def plain(prompt: str, length: int = LENGTH) -> list[int]:
    """What plain generation says."""
    ids = torch.tensor([demo.load_tokenizer()(prompt)["input_ids"]])
    return demo_target().generate(ids, do_sample=False, max_new_tokens=length)[0, ids.shape[1] :].tolist()


def generator(**settings) -> SpecGenerate:
    settings = {"speculative": DRAFTING, "max_new_tokens": LENGTH, "model_kwargs": FLOAT32, **settings}
    return SpecGenerate(demo.target_path(), **settings)


def test_columns_of_a_batch(demo_tokenizer):
    columns = generator(num_places=2, do_sample=False)({"prompt": np.array(PROMPTS), "id": np.arange(6)})
    assert columns["id"].tolist() == list(range(6))
    assert columns["generated_tokens"] == [plain(prompt) for prompt in PROMPTS]
    texts = demo_tokenizer.batch_decode(columns["generated_tokens"], skip_special_tokens=True)
    assert columns["generated_text"] == texts
    assert columns["num_prompt_tokens"] == [len(demo_tokenizer(prompt)["input_ids"]) for prompt in PROMPTS]
    assert columns["num_generated_tokens"] == list(map(len, columns["generated_tokens"]))
    assert columns["generation_error"] == [""] * 6
    assert sum(columns["num_accepted_tokens"]) > 0
    plainly = generator(speculative=None, do_sample=False)({"prompt": PROMPTS})
    assert plainly["generated_tokens"] == columns["generated_tokens"]
    assert plainly["num_draft_tokens"] == [0] * 6


@full
def test_settings_and_errors_of_rows(monkeypatch):
    # As they come from a table: all names in all rows, and arrays inside of arrays.
    own = [{"max_new_tokens": 3, "nonsense": None}, {"max_new_tokens": None, "nonsense": 1}, None]
    ids = np.array([np.array([5, 6]), np.array([7, 8, 9]), np.array([1 << 40])], dtype=object)
    columns = generator(do_sample=False)({"input_ids": ids, "sampling_params": np.array(own, dtype=object)})
    assert list(map(len, columns["generated_tokens"])) == [3, 0, 0]
    assert columns["finish_reason"] == ["length", "error", "error"]
    assert "nonsense" in columns["generation_error"][1]
    assert "all from 0 to" in columns["generation_error"][2]
    nothing = generator(do_sample=False)({"id": [1], "prompt": [None]})
    assert "needs one of" in nothing["generation_error"][0]
    assert generator()({"prompt": np.array([])})["generated_text"] == []
    # Sampled rows depend on their id alone; without a seed actors draw different texts, however a process begins.
    draw, drawn = generator(seed=3, id_column="id", do_sample=True), []
    whole = draw({"prompt": [PROMPTS[0]] * 3, "id": ["a", "b", "c"]})["generated_tokens"]
    assert draw({"prompt": [PROMPTS[0]] * 2, "id": ["c", "a"]})["generated_tokens"] == [whole[2], whole[0]]
    assert len(set(map(tuple, whole))) == 3
    for _ in range(2):
        torch.manual_seed(0)
        drawn.append(generator(do_sample=True)({"prompt": PROMPTS[:1]})["generated_tokens"])
    assert drawn[0] != drawn[1]
    with pytest.raises(SpecConfigError, match="needs `id_column`"):
        generator(seed=3)
    with pytest.raises(SpecConfigError, match="travel to the actors"):
        HFSpecProcessorConfig("demo", speculative=load_speculator(demo_target(), "ngram"))
    monkeypatch.setitem(sys.modules, "ray.data", None)
    with pytest.raises(MissingDependencyError, match="pip install .ray"):
        build_processor(HFSpecProcessorConfig("demo"))


class DyingGenerate(SpecGenerate):
    """Is killed in the middle of a batch, once of all its copies."""

    def __init__(self, *args, marker: str, **kwargs):
        super().__init__(*args, **kwargs)
        self._marker = Path(marker)

    def __call__(self, batch):
        result = super().__call__(batch)
        try:
            self._marker.touch(exist_ok=False)
        except FileExistsError:
            return result
        os.kill(os.getpid(), signal.SIGKILL)


@slow
def test_a_data_set_of_which_an_actor_is_killed(tmp_path, monkeypatch):
    ray = pytest.importorskip("ray")
    pytest.importorskip("ray.data")
    marker = tmp_path / "killed"
    monkeypatch.setattr("hf_specdec.integrations.ray.SpecGenerate", DyingGenerate)
    generate = {"do_sample": False, "marker": str(marker)}
    given = {"num_places": 4, "batch_size": 16, "concurrency": 2, "num_cpus": 1, "generate_arguments": generate}
    config = HFSpecProcessorConfig(demo.target_path(), speculative=DRAFTING, model_kwargs=FLOAT32, **given)
    process = build_processor(
        config,
        preprocess=lambda row: {"prompt": row["question"], "sampling_params": {"max_new_tokens": 3 + row["id"] % 5}},
        postprocess=lambda row: {name: row[name] for name in ("id", "generated_tokens", "generation_error")},
    )
    rows = [{"id": number, "question": PROMPTS[number % 6]} for number in range(96)]
    ray.init(num_cpus=2, include_dashboard=False, runtime_env={"env_vars": ENVIRONMENT}, log_to_driver=False)
    try:
        answers = process(ray.data.from_items(rows, override_num_blocks=6)).take_all()
    finally:
        ray.shutdown()
    assert marker.exists()
    assert sorted(answer["id"] for answer in answers) == list(range(96))
    for answer in answers:
        assert answer["generation_error"] == ""
        assert list(answer["generated_tokens"]) == plain(PROMPTS[answer["id"] % 6], 3 + answer["id"] % 5)


TASK = """
task: continue_code
dataset_path: json
dataset_kwargs: {{data_files: {{test: {data}}}}}
test_split: test
output_type: generate_until
doc_to_text: "{{{{question}}}}"
doc_to_target: "{{{{answer}}}}"
generation_kwargs: {{until: ["\\n\\n"], max_gen_toks: 40, do_sample: false}}
metric_list: [{{metric: exact_match, aggregation: mean, higher_is_better: true}}]
"""


@pytest.fixture
def tasks(tmp_path) -> Path:
    """A folder with one task of eight texts to continue."""
    pytest.importorskip("lm_eval")
    rows = [{"question": prompt.text[-80 - index :], "answer": "x"} for index, prompt in enumerate(demo.prompts()[:8])]
    (tmp_path / "data.jsonl").write_text("\n".join(map(json.dumps, rows)))
    (tmp_path / "task.yaml").write_text(TASK.format(data=tmp_path / "data.jsonl"))
    return tmp_path


@full
def test_lm_eval_answers_are_those_without_drafts(tasks):
    import lm_eval
    from lm_eval.models.huggingface import HFLM
    from lm_eval.tasks import TaskManager

    from hf_specdec.integrations.lm_eval import SpecHFLM

    def evaluate(kind, **settings):
        model = {"pretrained": demo.target_path(), "dtype": "float32", "device": "cpu", "batch_size": 4, **settings}
        manager = TaskManager(include_path=str(tasks), include_defaults=False)
        results = lm_eval.simple_evaluate(
            kind(**model), tasks=["continue_code"], task_manager=manager, bootstrap_iters=0
        )
        samples = sorted(results["samples"]["continue_code"], key=lambda sample: sample["doc_id"])
        return [sample["resps"][0][0] for sample in samples], results["config"].get("speculative")

    drafter = {"spec_method": "ngram", "num_speculative_tokens": 4}
    plain, _ = evaluate(HFLM)
    answers, found = evaluate(SpecHFLM, **drafter)
    assert answers == plain
    assert len(set(plain)) > 4
    assert (found["method"], found["is_lossless"]) == ("ngram", True)
    # Rows do not wait for each other: as many tokens are accepted as one by one.
    one_by_one, single = evaluate(SpecHFLM, **drafter, batch_size=1)
    assert one_by_one == plain
    assert found["num_accepted_tokens"] == pytest.approx(single["num_accepted_tokens"], rel=0.1) != 0
    off, nothing = evaluate(SpecHFLM, spec_method="off")
    assert (off, nothing["num_draft_tokens"]) == (plain, 0)
    with pytest.raises(SpecConfigError, match="nothing"):
        SpecHFLM(pretrained=demo.target_path(), device="cpu", spec_method="nothing")


@slow
def test_lm_eval_by_the_command(tasks):
    arguments = f"dtype=float32,spec_method=ngram,num_speculative_tokens=4,pretrained={demo.target_path()}"
    command = f"run --model hf-specdec --model_args {arguments} --tasks continue_code --include_path {tasks}"
    command = ["-m", "hf_specdec.integrations.lm_eval", *command.split(), "--device", "cpu", "--output_path", tasks]
    done = subprocess.run(
        [sys.executable, *command], env={**os.environ, **ENVIRONMENT}, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr[-4000:]
    (results,) = tasks.rglob("results*.json")
    assert json.loads(results.read_text())["config"]["speculative"]["num_accepted_tokens"] > 0
