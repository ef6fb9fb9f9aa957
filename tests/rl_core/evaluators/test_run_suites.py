"""Suites in child processes, with stand-ins for the evaluators: results, resuming, and how tasks fail."""

from __future__ import annotations

import contextlib
import json
import threading

import pytest
from helpers.adapters import fakes, hide_package
from helpers.serving import make_folder_of_model

from rl_core.errors import DataError, SettingsError, Stopped
from rl_core.evaluators import lm_eval_child
from rl_core.evaluators import run_suites as suites
from rl_core.evaluators.lm_eval_child import build_text_request
from rl_core.evaluators.results import read_sample_values
from rl_core.evaluators.run_suites import SuiteRun, convert_inspect_log, describe_evaluators
from rl_core.evaluators.text_scoring import TextRequest
from rl_core.settings import MetricCondition, ModelSettings, SuitesSettings
from rl_core.settings.suites import SuiteTask, parse_suite

ROWS = [
    {"context": "colour at row 2", "choices": [" red", " blue"], "gold": n % 2} for n in range(4)
]


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return make_folder_of_model(tmp_path_factory.mktemp("suites") / "model")


@pytest.fixture(autouse=True)
def _stand_ins():
    with fakes("lm_eval"):
        yield


def write_tasks(folder, **tasks):
    folder.mkdir(exist_ok=True)
    for name, task in tasks.items():
        row = {"rows": ROWS, "calls": str(folder.parent / "calls"), **task}
        (folder / f"{name}.json").write_text(json.dumps(row))
    return folder


def build_run(model, settings, stop=None):
    return SuiteRun(
        model=model,
        model_settings=ModelSettings(device="cpu"),
        settings=settings,
        seed=0,
        threads=1,
        stop=stop or threading.Event(),
        start_server=lambda: pytest.fail("no task asks a server"),
    )


def run_tasks(model, tmp_path, names, **settings):
    suite = SuitesSettings(
        tasks=(f"lm-eval:{names}",), include_path=str(tmp_path / "tasks"), **settings
    )
    return suites.run_suites(build_run(model, suite), tmp_path / "results")


def run_in_this_process(command, variables, log, stop):
    """Run the program of a child here, which takes seconds less."""
    return lm_eval_child.main(command[-1:])


def test_the_grammar():
    assert parse_suite("lm-eval:gsm8k, arc_easy") == [
        SuiteTask("lm_eval", "gsm8k"),
        SuiteTask("lm_eval", "arc_easy"),
    ]
    assert parse_suite("inspect:a/b@c.py@sums") == [SuiteTask("inspect", "sums", "a/b@c.py")]
    assert SuiteTask("inspect", "sums", "x.py").label == "inspect/sums"


@pytest.mark.parametrize(
    ("texts", "message"),
    [
        (("gsm8k",), "names no evaluator; write lm-eval:TASK,TASK or inspect:FILE.py@TASK"),
        (("lm_eval:gsm8k",), "did you mean 'lm-eval'"),
        (("lm-eval:",), "'' is no name of a task"),
        (("lm-eval:a,,b",), "'' is no name of a task"),
        (("lm-eval:../x",), "is no name of a task"),
        (("inspect:x.py",), "names no task of a file"),
        (("inspect:x.yaml@t",), "names no task of a file"),
        (("lm-eval:a,b", "lm-eval:a"), "a task a is named twice"),
        (("inspect:x.py@t", "inspect:y.py@t"), r"a task t \(of x.py and y.py\) is named twice"),
    ],
)
def test_what_is_no_suite_is_refused(texts, message):
    with pytest.raises(SettingsError, match=f"^tasks: .*{message}"):
        SuitesSettings(tasks=texts)


def test_tasks_of_two_evaluators_may_have_one_name():
    assert len(SuitesSettings(tasks=("lm-eval:t", "inspect:x.py@t")).list_tasks()) == 2


def test_a_condition_needs_content():
    with pytest.raises(SettingsError, match="min, max or max_loss"):
        MetricCondition()


def test_results_and_samples(model, tmp_path, monkeypatch):
    monkeypatch.setattr(suites, "_run_child", run_in_this_process)
    write_tasks(tmp_path / "tasks", first={}, second={"rows": ROWS[:2]})
    first, second = run_tasks(model, tmp_path, "first,second", limit=3)
    assert (first.task, first.evaluator, first.version) == (
        "lm_eval/first",
        "lm-eval 0.4-stand-in",
        "1.0",
    )
    assert (first.samples, second.samples) == (3, 2) and first.seconds > 0
    folder = tmp_path / "results" / "lm_eval-first"
    values = read_sample_values(folder, "acc")
    assert list(values) == ["0", "1", "2"]  # one answer to one question: right for every second row
    metric = first.metrics["acc"]
    assert metric.value == pytest.approx(sum(values.values()) / 3) and metric.stderr == 0.1
    assert metric.low is not None and metric.high - metric.low < 1
    assert json.loads((folder / "samples.jsonl").read_text().splitlines()[0])["sample"]["resps"]


@pytest.mark.slow
def test_finished_tasks_are_not_run_again(model, tmp_path):
    tasks = write_tasks(tmp_path / "tasks", first={}, second={"kill": True})
    with pytest.raises(DataError, match="killed by signal 9 before lm_eval/second had a result"):
        run_tasks(model, tmp_path, "first,second")
    write_tasks(tasks, second={})
    results = run_tasks(model, tmp_path, "first,second")
    assert [result.task for result in results] == ["lm_eval/first", "lm_eval/second"]
    assert (tmp_path / "calls").read_text().split() == ["first", "second", "second"]
    run_tasks(model, tmp_path, "first,second")
    assert len((tmp_path / "calls").read_text().split()) == 3


@pytest.mark.slow
def test_an_evaluator_that_is_killed_between_samples_and_result_runs_its_task_again(
    model, tmp_path, monkeypatch
):
    write_tasks(tmp_path / "tasks", first={}, second={})
    for point, task in (("suite.samples", "first"), ("suite.result", "second")):
        monkeypatch.setenv("POSTTRAIN_FAULT", f"{point}:1:kill")
        with pytest.raises(DataError, match=f"killed by signal 9 before lm_eval/{task} had"):
            run_tasks(model, tmp_path, "first,second")
    monkeypatch.delenv("POSTTRAIN_FAULT")
    results = run_tasks(model, tmp_path, "first,second")
    assert [result.samples for result in results] == [4, 4]
    assert (tmp_path / "calls").read_text().split() == ["first", "first", "second"]


@pytest.mark.parametrize(
    ("task", "environment", "message"),
    [
        ({"rows": []}, {}, "task odd evaluated no sample"),
        (
            {"raises": "ConnectionError"},
            {"HTTPS_PROXY": "http://proxy:1"},
            "odd reads its data from the hub, and the hub does not answer, through the proxy of HTTPS_PROXY: "
            ".*stages.suites.include_path",
        ),
        (
            {"raises": "OfflineModeIsEnabled"},
            {"HF_HUB_OFFLINE": "1"},
            "reads its data from the hub, and HF_HUB_OFFLINE is set: load it once",
        ),
        (
            {"rows": [{**ROWS[0], "choices": [""]}]},
            {},
            "task odd: request 0 has a continuation without tokens",
        ),
    ],
)
def test_a_task_that_fails_says_why(model, tmp_path, monkeypatch, task, environment, message):
    monkeypatch.setattr(suites, "_run_child", run_in_this_process)
    for name in ("HTTPS_PROXY", "https_proxy", "HTTP_PROXY", "http_proxy", "HF_HUB_OFFLINE"):
        monkeypatch.delenv(name, raising=False)
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    write_tasks(tmp_path / "tasks", odd=task)
    with pytest.raises(DataError, match=message):
        run_tasks(model, tmp_path, "odd")


@pytest.mark.parametrize("code", [0, 3])
def test_a_task_that_exits_is_not_taken_for_a_result(model, tmp_path, code):
    write_tasks(tmp_path / "tasks", odd={"exit": code})
    with pytest.raises(DataError, match=f"exit code {code} before lm_eval/odd had a result"):
        run_tasks(model, tmp_path, "odd")


def test_an_unknown_task_is_refused_before_the_model_is_loaded(tmp_path, monkeypatch):
    monkeypatch.setattr(suites, "_run_child", run_in_this_process)
    write_tasks(tmp_path / "tasks", known={})
    with pytest.raises(DataError, match=r"no task 'gsm9k' .*did you mean 'gsm8k'"):
        run_tasks(tmp_path / "no model", tmp_path, "known,gsm9k")


def test_a_metric_that_is_no_number_is_kept_without_a_value(model, tmp_path, monkeypatch):
    monkeypatch.setattr(suites, "_run_child", run_in_this_process)
    write_tasks(tmp_path / "tasks", odd={"value": "nan"})
    (result,) = run_tasks(model, tmp_path, "odd")
    assert result.metrics["acc"].value is None and result.samples == 4


def test_a_stop_ends_the_child(model, tmp_path):
    write_tasks(tmp_path / "tasks", first={})
    stop = threading.Event()
    stop.set()
    settings = SuitesSettings(tasks=("lm-eval:first",), include_path=str(tmp_path / "tasks"))
    with pytest.raises(Stopped, match="continues with the tasks that have no result"):
        suites.run_suites(build_run(model, settings, stop), tmp_path / "results")
    assert not (tmp_path / "calls").exists()


def test_missing_packages_say_what_to_install(monkeypatch, tmp_path):
    hide_package(monkeypatch, "lm_eval")
    hide_package(monkeypatch, "inspect_ai")
    with pytest.raises(
        SettingsError, match=r"lm-eval is not installed; python -m posttrain.install --extras"
    ):
        describe_evaluators(SuitesSettings(tasks=("lm-eval:t",)))
    inspect = ("inspect:x.py@t",)
    with pytest.raises(SettingsError, match="pip install inspect-ai openai, here or"):
        describe_evaluators(SuitesSettings(tasks=inspect))
    broken = tmp_path / "python"
    broken.write_text("#!/bin/sh\nexit 1\n")
    broken.chmod(0o755)
    with pytest.raises(SettingsError, match=r"inspect_python: .* lacks inspect-ai or openai"):
        describe_evaluators(SuitesSettings(tasks=inspect, inspect_python=str(broken)))
    with pytest.raises(SettingsError, match="does not run"):
        describe_evaluators(SuitesSettings(tasks=inspect, inspect_python=str(tmp_path / "none")))


# ------------------------------------------------------------------------------------------------------------ inspect


def build_log(**changes):
    samples = [
        {"id": n, "epoch": 1, "scores": {"match": {"value": grade}}}
        for n, grade in enumerate("CCIP")
    ]
    score = {
        "name": "match",
        "scorer": "match",
        "metrics": {"accuracy": {"value": 0.625}, "stderr": {"value": 0.2}},
    }
    return {
        "status": "success",
        "eval": {"task_version": 0, "packages": {"inspect_ai": "1"}},
        "results": {"scores": [score]},
        "samples": samples,
        **changes,
    }


TASK = SuiteTask("inspect", "sums", "x.py")


def test_logs_of_inspect():
    result = convert_inspect_log(TASK, build_log())
    metric = result.metrics["match.accuracy"]
    assert list(result.metrics) == ["match.accuracy"] and result.evaluator == "inspect-ai 1"
    # a partial grade is no share of right answers: the evaluator's standard error counts
    assert (metric.low, metric.high) == pytest.approx((0.625 - 0.392, 0.625 + 0.392), abs=1e-4)
    rows = list(suites.iter_inspect_samples(build_log()))
    assert [row["metrics"]["match.accuracy"] for row in rows] == [1.0, 1.0, 0.0, 0.5]
    assert rows[0]["id"] == "0:1" and "events" not in rows[0]["sample"]


def test_scores_of_several_parts():
    score = {"name": "form", "scorer": "judge", "metrics": {"mean": {"value": 0.5}}}
    samples = [
        {"id": n, "epoch": 1, "scores": {"judge": {"value": {"form": n, "tone": 9}}}}
        for n in range(2)
    ]
    log = build_log(results={"scores": [score]}, samples=samples)
    metric = convert_inspect_log(TASK, log).metrics["form.mean"]
    assert metric.samples == 2 and metric.low == pytest.approx(0.0945, abs=1e-4)  # Wilson, 1 of 2


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"status": "error", "error": {"message": "no\nserver"}}, r"failed \(error\): no server"),
        ({"samples": []}, "scored no sample"),
        ({"results": None}, "scored no sample"),
    ],
)
def test_failed_logs(changes, message):
    with pytest.raises(DataError, match=message):
        convert_inspect_log(TASK, build_log(**changes))


INSPECT_TASKS = """
def sums():
    return [("one and one?", "two"), ("two and two?", "four")]

def leaves():
    import sys
    sys.exit(0)
"""


def test_inspect_asks_the_server_although_a_proxy_is_set(tmp_path, monkeypatch):
    from helpers.serving import TOKEN, running_server

    monkeypatch.setenv("http_proxy", "http://127.0.0.1:9")
    monkeypatch.setenv("HTTP_PROXY", "http://127.0.0.1:9")
    monkeypatch.setenv("NO_PROXY", "somewhere")
    file = tmp_path / "tasks.py"
    file.write_text(INSPECT_TASKS)
    folder = make_folder_of_model(tmp_path / "model")
    with running_server(tmp_path, folder) as server, fakes("inspect_ai"):
        python_path = suites.build_child_import_path()
        monkeypatch.setenv("PYTHONPATH", python_path)
        address = suites.ServedAddress(f"{server.url}/v1", TOKEN)
        starts = []

        @contextlib.contextmanager
        def start():
            starts.append(1)
            yield address

        def run(*tasks):
            settings = SuitesSettings(tasks=tuple(f"inspect:{file}@{task}" for task in tasks))
            base = build_run(folder, settings)
            changed = SuiteRun(base.model, base.model_settings, settings, 0, 1, base.stop, start)
            return suites.run_suites(changed, tmp_path / "results")

        monkeypatch.setattr(suites, "SERVED_NAME", "small")
        with pytest.raises(DataError, match="exit code 0 before inspect/leaves had a result"):
            run("sums", "leaves")
        (result,) = run("sums")  # its result is there
        assert len(starts) == 1 and result.samples == 2
        assert result.metrics["exact.accuracy"].value == 0.0
        assert not (tmp_path / "results" / "inspect-sums" / "logs").exists()


# ------------------------------------------------------------------------------------------------- generation options


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        ({}, {"max_tokens": 9}),
        ({"until": "x", "max_gen_toks": 3}, {"stops": ("x",), "max_tokens": 3}),
        ({"until": ["x", "\n\n"], "max_tokens": 4}, {"stops": ("x", "\n\n"), "max_tokens": 4}),
        ({"max_gen_toks": 3, "max_tokens": 4}, {"max_tokens": 3}),
        ({"do_sample": False, "temperature": 0.7}, {"max_tokens": 9}),
        ({"do_sample": True}, {"max_tokens": 9, "temperature": 1.0}),
        (
            {"do_sample": True, "temperature": 0.5, "top_p": 0.9, "top_k": 3},
            {"max_tokens": 9, "temperature": 0.5, "top_p": 0.9, "top_k": 3},
        ),
    ],
)
def test_options_of_lm_eval(options, expected):
    request = build_text_request([5, 6], options, 9, TextRequest)
    assert request == TextRequest((5, 6), **expected)


@pytest.mark.parametrize("options", [{"num_beams": 4}, {"typical_p": 0.5}])
def test_options_that_would_be_ignored_are_refused(options):
    with pytest.raises(SettingsError, match="not supported"):
        build_text_request([5], options, 9, TextRequest)
