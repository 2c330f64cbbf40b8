"""Ray Data, lm-evaluation-harness, TRL and ranks of torchrun give the same answers with drafts."""

from __future__ import annotations

import json
import os
import subprocess
import sys

import numpy as np
import pytest
import torch
from typer.testing import CliRunner

from hf_specdec import SpecConfigError, cli, demo
from hf_specdec.integrations.ray import HFSpecProcessorConfig, SpecGenerate, build_processor
from hf_specdec.loaded import record_of
from hf_specdec.many.generate import generate_batch
from tests.helpers.levels import full, slow
from tests.helpers.methods import CHECKPOINTS, demo_target
from tests.helpers.models import prompts, tiny_llama
from tests.helpers.paths import ROOT


LENGTH = 10
FLOAT32 = {"dtype": "float32"}
DRAFTING = {"method": "ngram", "num_speculative_tokens": 4}
NGRAM = {"spec_method": "ngram", "num_speculative_tokens": 4}
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
    assert (columns["generated_text"], columns["generation_error"]) == (texts, [""] * 6)
    assert columns["num_prompt_tokens"] == [len(demo_tokenizer(prompt)["input_ids"]) for prompt in PROMPTS]
    assert sum(columns["num_accepted_tokens"]) > 0


@full
def test_settings_and_errors_of_rows():
    # As they come from a table: all names in all rows, and arrays inside of arrays.
    own = [{"max_new_tokens": 3, "nonsense": None}, {"max_new_tokens": None, "nonsense": 1}, None]
    ids = np.array([np.array([5, 6]), np.array([7, 8, 9]), np.array([1 << 40])], dtype=object)
    columns = generator(do_sample=False)({"input_ids": ids, "sampling_params": np.array(own, dtype=object)})
    assert list(map(len, columns["generated_tokens"])) == [3, 0, 0]
    assert columns["finish_reason"] == ["length", "error", "error"]
    assert "nonsense" in columns["generation_error"][1]
    assert "all from 0 to" in columns["generation_error"][2]
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


@slow
def test_a_data_set_of_ray(tmp_path):
    ray = pytest.importorskip("ray")
    pytest.importorskip("ray.data")
    given = {"num_places": 4, "batch_size": 16, "concurrency": 2, "num_cpus": 1, "speculative": DRAFTING}
    given |= {"model_kwargs": FLOAT32, "generate_arguments": {"do_sample": False}}
    process = build_processor(
        HFSpecProcessorConfig(demo.target_path(), **given),
        preprocess=lambda row: {"prompt": row["question"], "sampling_params": {"max_new_tokens": 3 + row["id"] % 5}},
        postprocess=lambda row: {name: row[name] for name in ("id", "generated_tokens", "generation_error")},
    )
    rows = [{"id": number, "question": PROMPTS[number % 6]} for number in range(96)]
    ray.init(num_cpus=2, include_dashboard=False, runtime_env={"env_vars": ENVIRONMENT}, log_to_driver=False)
    try:
        answers = process(ray.data.from_items(rows, override_num_blocks=6)).take_all()
    finally:
        ray.shutdown()
    assert sorted(answer["id"] for answer in answers) == list(range(96))
    for answer in answers:
        expected = plain(PROMPTS[answer["id"] % 6], 3 + answer["id"] % 5)
        assert (answer["generation_error"], list(answer["generated_tokens"])) == ("", expected)


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


@full
def test_lm_eval_answers_are_those_without_drafts(tmp_path):
    lm_eval = pytest.importorskip("lm_eval")
    from lm_eval.models.huggingface import HFLM
    from lm_eval.tasks import TaskManager

    from hf_specdec.integrations.lm_eval import SpecHFLM

    rows = [{"question": prompt.text[-80 - index :], "answer": "x"} for index, prompt in enumerate(demo.prompts()[:8])]
    (tmp_path / "data.jsonl").write_text("\n".join(map(json.dumps, rows)))
    (tmp_path / "task.yaml").write_text(TASK.format(data=tmp_path / "data.jsonl"))

    def evaluate(kind, **settings):
        model = {"pretrained": demo.target_path(), "dtype": "float32", "device": "cpu", "batch_size": 4, **settings}
        manager = TaskManager(include_path=str(tmp_path), include_defaults=False)
        results = lm_eval.simple_evaluate(
            kind(**model), tasks=["continue_code"], task_manager=manager, bootstrap_iters=0
        )
        samples = sorted(results["samples"]["continue_code"], key=lambda sample: sample["doc_id"])
        return [sample["resps"][0][0] for sample in samples], results["config"].get("speculative")

    plain, _ = evaluate(HFLM)
    answers, found = evaluate(SpecHFLM, **NGRAM)
    assert answers == plain
    assert len(set(plain)) > 4
    assert (found["method"], found["is_lossless"]) == ("ngram", True)
    # Rows do not wait for each other: as many tokens are accepted as one by one.
    one_by_one, single = evaluate(SpecHFLM, **NGRAM, batch_size=1)
    assert one_by_one == plain
    assert found["num_accepted_tokens"] == pytest.approx(single["num_accepted_tokens"], rel=0.1) != 0
    off, nothing = evaluate(SpecHFLM, spec_method="off")
    assert (off, nothing["num_draft_tokens"]) == (plain, 0)


STEPS = 3
# TRL and transformers' own trainer.
quiet = pytest.mark.filterwarnings("ignore::FutureWarning", "ignore::DeprecationWarning")


def reward(completions: list[str], **columns) -> list[float]:
    return [float(len(set(text))) for text in completions]


@pytest.fixture
def trainer(tmp_path):
    """GRPO of the demo's target, with these settings of generation and of the callback; trained, where asked."""
    trl = pytest.importorskip("trl")
    from datasets import Dataset

    from hf_specdec.integrations.trl import SpeculationCallback

    file = tmp_path / "prompts.jsonl"
    file.write_text("\n".join(json.dumps({"prompt": prompt.text[-60:]}) for prompt in demo.prompts()[:4]))
    data = Dataset.from_json(str(file), cache_dir=str(tmp_path))
    common = {"per_device_train_batch_size": 4, "num_generations": 4, "max_completion_length": 16, "beta": 0.0}
    common |= {"max_steps": STEPS, "learning_rate": 1e-5, "temperature": 0.7, "logging_steps": 1, "report_to": []}
    common |= {"save_strategy": "no", "use_cpu": True, "bf16": False, "seed": 3, "output_dir": str(tmp_path)}

    def trained(generation, callback=None, rewards=reward, **settings):
        config = trl.GRPOConfig(generation_kwargs=generation, **common, **settings)
        model, tokenizer = demo.load_target(torch.float32), demo.load_tokenizer()
        made = trl.GRPOTrainer(model, rewards, config, data, processing_class=tokenizer)
        SpeculationCallback(**(callback or {})).add_to(made)
        made.train()
        return made

    return trained


def logged(trained, name: str) -> list[float]:
    return [entry[name] for entry in trained.state.log_history if name in entry]


@full
@quiet
def test_drafters_change_no_text_of_grpo(trainer, monkeypatch):
    rewards, batches = [], []

    def counting(*args, **kwargs):
        batches.append(generate_batch(*args, **kwargs))
        return batches[-1]

    monkeypatch.setattr("hf_specdec.many.generate.generate_batch", counting)
    eagle3 = {"method": "eagle3", "model": demo.drafter_path("eagle3"), "num_speculative_tokens": 4}
    batching = {"use_transformers_continuous_batching": True}
    for generation, settings in (({"speculative": eagle3}, {}), (NGRAM, {}), (NGRAM, batching)):
        trained = trainer(generation, **settings)
        rewards.append(logged(trained, "reward"))
        assert len(logged(trained, "speculation/acceptance_length")) == STEPS
        assert min(logged(trained, "speculation/acceptance_length")) > 1
        assert min(logged(trained, "speculation/draft_tokens")) > 0
        assert trained.model.training
    assert rewards[0] == rewards[1] == rewards[2]
    assert len(rewards[0]) == len(batches) == STEPS


@full
@quiet
def test_stale_drafters_and_texts_of_grpo(trainer):
    judge, kept, counts, refreshed = tiny_llama(), [], [], []

    def judged(completions: list[str], **columns) -> list[float]:
        judge.generate(torch.tensor([[1, 2, 1, 2]]), max_new_tokens=8, **NGRAM)
        return reward(completions)

    # Texts of older policies are forgotten, and calls of other models are not counted.
    suffix = {"spec_method": "suffix", "num_speculative_tokens": 4}
    for most_age, rewards in ((None, reward), (1, reward), (None, judged)):
        trained = trainer(suffix, {"most_text_age": most_age}, rewards)
        (entry,) = record_of(trained.model).loaded
        kept.append(len(entry.resources.cached_requests))
        counts.append(logged(trained, "speculation/draft_tokens"))
    assert kept == [4 * STEPS, 4, 4 * STEPS]
    assert counts[0] == counts[2]
    trained = trainer(dict(NGRAM), {"least_acceptance_length": 50, "window": 2})
    assert len(logged(trained, "speculation/acceptance_length")) == 2
    assert not hasattr(trained.generation_config, "speculative")
    trained = trainer(dict(NGRAM), {"least_acceptance_length": 50, "window": 1, "refresh": refreshed.append})
    assert refreshed == [trained.model] * STEPS
    assert len(logged(trained, "speculation/acceptance_length")) == STEPS
    assert record_of(trained.model).loaded == []

    off_policy = {"speculative": {"method": "ngram", "rejection_sample_method": "typical"}}
    for generation, message in (({"spec_method": "off"}, "without speculation"), (off_policy, "off policy")):
        with pytest.raises(SpecConfigError, match=message):
            trainer(generation)


# Ranks, as torchrun starts them


def speculation(method, **settings):
    place = {} if method in ("ngram", "suffix") else {"model": CHECKPOINTS[method.rpartition("+")[2]]}
    return {"speculative": {"method": method, **place, **settings}}


TREE = {"draft_tree_top_k": 4, "num_draft_nodes": 15, "draft_tree_depth": 4}
GREEDY = {method: speculation(method) for method in ("draft_model", "eagle3", "medusa", "mtp", "ngram")}
# Decided by the clock: how long drafts are, how large their trees, and who drafts.
BY_THE_CLOCK = {
    "suffix+eagle3": speculation("suffix+eagle3"),
    "eagle3, auto": speculation("eagle3", num_speculative_tokens="auto", **TREE),
    "draft_model, auto": speculation("draft_model", num_speculative_tokens="auto"),
}
SAMPLED_CALLS = {
    "eagle3, sampled": {**speculation("eagle3", draft_sample_method="probabilistic"), "do_sample": True},
    "draft_model, sampled": {**speculation("draft_model"), "do_sample": True},
}


REQUESTS = [
    "def read(path):",
    {"prompt": "import os\nimport ", "max_new_tokens": 5, "id": "second"},
    {"text": "class Reader:\n", "do_sample": True, "id": 4},
    "for line in file:\n    for line in ",
]


@full
def test_ranks_write_the_text_of_one_process(tmp_path):
    inputs = prompts(2, length=20, padding=False)
    arguments = {"prompts": inputs["input_ids"].tolist(), "calls": {**GREEDY, **BY_THE_CLOCK, **SAMPLED_CALLS}}
    lengths = (4, 12)
    (tmp_path / "in.jsonl").write_text("\n".join(map(json.dumps, REQUESTS)))
    batch = ["batch", "demo", str(tmp_path / "in.jsonl"), "-n", "10", "-d", "ngram", "--json", "-o"]
    arguments |= {"max_new_tokens": 14, "synced_lengths": lengths, "command": [*batch, str(tmp_path / "ranks.jsonl")]}
    paths = [demo.target_path(), demo.drafter_path("draft_model")]
    # As a module: the folder of a script is searched for modules, and it has names of Python's own.
    command = ["-m", "tests.helpers.two_ranks", *paths, json.dumps(arguments)]
    environment = {**os.environ, **ENVIRONMENT}
    done = subprocess.run([sys.executable, *command], env=environment, capture_output=True, text=True, timeout=600)
    assert done.returncode == 0, done.stderr[-4000:]
    line = next(line for line in done.stdout.splitlines() if line.startswith("RESULT "))
    results = json.loads(line.removeprefix("RESULT "))

    # Each has answered its share of a file of requests, also sampled ones: random numbers are named after the request.
    report = results.pop("command")
    assert (report["num_processes"], report["num_accepted_tokens"] > 0) == (2, True)
    assert CliRunner().invoke(cli.app, [*batch, str(tmp_path / "alone.jsonl")]).exit_code == 0
    files = [(tmp_path / f"{name}.jsonl").read_text().splitlines() for name in ("ranks", "alone")]
    together, alone = ([(entry.get("id"), entry["tokens"]) for entry in map(json.loads, lines)] for lines in files)
    assert together == alone
    assert len(alone) == len(REQUESTS)

    # Ranks that wait for each other do the same number of forwards, for texts of different lengths.
    (forwards, first), (others, second) = results.pop("synced")
    call = {"do_sample": False, "eos_token_id": None}
    for rank, (count, text) in enumerate(zip(lengths, (first, second))):
        assert demo_target().generate(inputs["input_ids"][[rank]], **call, max_new_tokens=count).tolist() == text
    assert forwards == others

    assert [name for name, result in results.items() if not result["ranks_agree"]] == []
    call |= {**inputs, "max_new_tokens": 14}
    plain = demo_target().generate(**call).tolist()
    for name, result in results.items():
        assert name in SAMPLED_CALLS or result["text"] == plain, name
        assert [len(row) for row in result["text"]] == [20 + 14] * 2
    for method, settings in GREEDY.items():
        alone = demo_target().generate(**call, **settings, return_dict_in_generate=True)
        assert results[method]["accepted"] == alone.speculative.num_accepted_tokens, method
    assert results["assistant"]["accepted"] == results["parallel_assistant"]["accepted"] > 0
    assert max(results[name]["drafted"] for name in BY_THE_CLOCK) > 0
