"""The real lm-eval: our model gives what lm-eval's own `hf` model gives on the same weights (`make test-extras`)."""

from __future__ import annotations

import json
import os
import random
import threading
from pathlib import Path

import pytest
from helpers.serving import make_folder_of_model

from rl_core.errors import DataError
from rl_core.evaluators.lm_eval_child import build_language_model, load_scorer
from rl_core.evaluators.run_suites import SuiteRun, run_suites
from rl_core.settings import ModelSettings, SuitesSettings

lm_eval = pytest.importorskip("lm_eval")
if not hasattr(lm_eval, "tasks") and "stand-in" in getattr(lm_eval, "__version__", ""):
    pytest.skip("a stand-in of another test", allow_module_level=True)

CONTEXT = 96
TASK = """
task: {name}
dataset_path: json
dataset_kwargs: {{data_files: {{test: {file}}}}}
test_split: test
doc_to_text: "{{{{question}}}} "
{rest}
"""
CHOICE = """
output_type: multiple_choice
doc_to_choice: "{{choices}}"
doc_to_target: gold
metric_list: [{metric: acc, aggregation: mean, higher_is_better: true}]
metadata: {version: 3.0}
"""
TEXT = """
output_type: generate_until
doc_to_target: "{{choices[gold]}}"
generation_kwargs: {until: ["ed", "\\n"], max_gen_toks: 16}
metric_list: [{metric: exact_match, aggregation: mean, higher_is_better: true}]
"""
# contexts and continuations at whose boundary tokens would merge, empty, longer than the model's context, not ASCII
PAIRS = [
    ("colour at row 2", " red"),
    ("colour at row 2 ", " blue"),
    ("row ", "2"),
    ("", "answer"),
    ("grüße 你好", " 😀 naïve"),
    ("answer re", "d 5"),
    ("x" * 200, " red 5"),
    ("a", "b" * 60),
    ("row 2\n\n", "answer red 5\n"),
]


@pytest.fixture(scope="module", autouse=True)
def _offline():
    with pytest.MonkeyPatch.context() as patch:
        for name in ("HF_HUB_OFFLINE", "HF_DATASETS_OFFLINE"):
            patch.setenv(name, "1")
        yield


def build_request(folder, **changes):
    request = {
        "model": str(folder),
        "model_settings": {"device": "cpu"},
        "chat_template": False,
        "pass_tokens": 512,
        "slots": 4,
        "seed": 0,
        "max_completion_tokens": 20,
    }
    return request | changes


@pytest.fixture(scope="module")
def models(tmp_path_factory):
    from lm_eval.models.huggingface import HFLM

    folder = make_folder_of_model(tmp_path_factory.mktemp("lm_eval") / "model", context=CONTEXT)
    request = build_request(folder)
    ours = build_language_model(load_scorer(request), request)
    return ours, HFLM(pretrained=str(folder), device="cpu", batch_size=3, dtype="float32"), folder


def ask(model, kind, arguments):
    from lm_eval.api.instance import Instance

    requests = [Instance(request_type=kind, doc={}, arguments=pair, idx=0) for pair in arguments]
    return getattr(model, kind)(requests, disable_tqdm=True)


def test_log_likelihoods_are_equal(models):
    ours, theirs, _ = models
    assert (ours.max_length, ours.prefix_token_id) == (theirs.max_length, theirs.prefix_token_id)
    for left, right, pair in zip(
        ask(ours, "loglikelihood", PAIRS), ask(theirs, "loglikelihood", PAIRS), PAIRS, strict=True
    ):
        assert left[0] == pytest.approx(right[0], rel=1e-6, abs=1e-5), pair
        assert left[1] is right[1], pair


def test_rolling_log_likelihoods_are_equal(models):
    texts = [("colour at row 2 column 3? " * n,) for n in (1, 9, 30)] + [("é 你",)]
    left, right = (ask(model, "loglikelihood_rolling", texts) for model in models[:2])
    assert left == pytest.approx(right, rel=1e-6)
    assert ask(models[0], "loglikelihood_rolling", [("",)]) == [0.0]


def test_greedy_texts_are_equal(models):
    options = [
        ("colour at row 2", {"until": ["3"], "max_gen_toks": 20}),
        ("answer", {"until": ["sw", " r"], "max_gen_toks": 20}),
        ("grüße 你", {"until": ["zoom 2 3"], "max_gen_toks": 30}),
        ("x" * 200, {"until": [], "max_gen_toks": 30}),
        ("answer red", {"max_gen_toks": 12}),
    ]
    left, right = (ask(model, "generate_until", options) for model in models[:2])
    assert left == right and len(set(left)) > 2


def write_tasks(folder, rows=240):
    draw = random.Random(0)
    words = ["red", "blue", "row 2", "grüße", "colour at", "5", "naïve"]
    lines = [
        {
            "question": " ".join(draw.choices(words, k=draw.randint(1, 12))),
            "choices": draw.sample(["red", "blue 5", "answer", "你好", "zoom 2 3"], 3),
            "gold": draw.randrange(3),
        }
        for _ in range(rows)
    ]
    file = folder / "rows.jsonl"
    file.write_text("\n".join(map(json.dumps, lines)))
    for name, rest in (("cells_choice", CHOICE), ("cells_text", TEXT)):
        (folder / f"{name}.yaml").write_text(TASK.format(name=name, file=file, rest=rest))
    return folder


def run_local(folder, tasks, tmp_path, **settings):
    run = SuiteRun(
        model=folder,
        model_settings=ModelSettings(device="cpu"),
        settings=SuitesSettings(tasks=(f"lm-eval:{tasks}",), **settings),
        seed=0,
        threads=1,
        stop=threading.Event(),
        start_server=lambda: pytest.fail("no server"),
    )
    return run_suites(run, tmp_path / "results")


@pytest.mark.timeout(600)
def test_local_tasks_have_the_same_accuracy_and_the_same_texts(models, tmp_path):
    from lm_eval.tasks import TaskManager

    _, theirs, folder = models
    tasks = write_tasks(tmp_path)
    choice, text = run_local(folder, "cells_choice,cells_text", tmp_path, include_path=str(tasks))
    expected = lm_eval.simple_evaluate(
        model=theirs,
        tasks=["cells_choice", "cells_text"],
        task_manager=TaskManager(include_path=str(tasks), include_defaults=False),
        bootstrap_iters=0,
    )
    row = expected["results"]["cells_choice"]
    acc = choice.metrics["acc"]
    assert (acc.value, choice.samples, choice.version) == (row["acc,none"], 240, "3.0")
    assert 0.2 < acc.value < 0.5 and acc.low < acc.value < acc.high
    assert choice.evaluator == f"lm-eval {lm_eval.__version__}"
    lines = (tmp_path / "results" / "lm_eval-cells_text" / "samples.jsonl").read_text()
    answers = [json.loads(line)["sample"]["resps"] for line in lines.splitlines()]
    assert answers == [sample["resps"] for sample in expected["samples"]["cells_text"]]
    assert (
        text.metrics["exact_match"].value == expected["results"]["cells_text"]["exact_match,none"]
    )


@pytest.mark.timeout(600)
def test_what_the_real_lm_eval_refuses(models, tmp_path):
    folder = models[2]
    with pytest.raises(DataError, match="no task 'gsm9k'"):
        run_local(folder, "gsm9k", tmp_path)
    with pytest.raises(DataError, match=r"gsm8k reads its data from the hub, and HF_\w+ is set"):
        run_local(folder, "gsm8k", tmp_path)
    tasks = write_tasks(tmp_path)
    (tasks / "rows.jsonl").write_text("")
    with pytest.raises(DataError, match="cells_choice"):
        run_local(folder, "cells_choice", tmp_path, include_path=str(tasks))


SMOLLM = Path(os.environ.get("POSTTRAIN_SMOLLM", "")) if "POSTTRAIN_SMOLLM" in os.environ else None


@pytest.mark.skipif(SMOLLM is None, reason="POSTTRAIN_SMOLLM names no folder of SmolLM2-135M")
@pytest.mark.timeout(600)
def test_a_pretrained_model_has_the_same_log_likelihoods():
    from lm_eval.models.huggingface import HFLM

    request = build_request(SMOLLM, pass_tokens=4096)
    ours = build_language_model(load_scorer(request), request)
    theirs = HFLM(pretrained=str(SMOLLM), device="cpu", batch_size=4, dtype="float32")
    pairs = [
        (f"Question: What is {n} plus {n + 1}?\nAnswer:", f" {answer}")
        for n in range(8)
        for answer in (2 * n + 1, 2 * n + 2, "a number")
    ]
    for left, right in zip(
        ask(ours, "loglikelihood", pairs), ask(theirs, "loglikelihood", pairs), strict=True
    ):
        assert left[0] == pytest.approx(right[0], rel=2e-5) and left[1] is right[1]
    texts = [(pair[0], {"until": ["\n"], "max_gen_toks": 16}) for pair in pairs[::3]]
    assert ask(ours, "generate_until", texts) == ask(theirs, "generate_until", texts)
