"""Short ids of runs: stable, unique in an output folder, found by people's ways of naming a run."""

import json

import pytest

from rl_core.errors import BackendError, DataError
from tasks.tracking import Tracking, find_run, list_run_records, list_runs
from tasks.tracking.run_ids import (
    AmbiguousRun,
    NamedRun,
    assign_short_ids,
    find_named_run,
    list_named_runs,
    refuse_sweep,
    resolve_run_name,
    shorten_run_name,
)
from tasks.tracking.run_reading import read_stored_runs


def start_run(output, pipeline, second, **tags):
    """Track a pipeline run; return its tracker, closed."""
    folder = output / pipeline / "runs" / f"2026-11-29-04-01-{second:02d}"
    run = Tracking(None, output, pipeline).start_run(
        f"{pipeline} · 2026-11-29 04:01:{second:02d}",
        folder,
        tags={"kind": "pipeline", "pipeline": pipeline, **tags},
        params={"seed": 3},
    )
    run.log_metrics({"train/loss": 0.5, "bad": float("nan")}, 1)
    run.close()
    return run


def name_runs(*rows):
    return assign_short_ids(
        [NamedRun("", pipeline, f"{pipeline} · {key}", key) for pipeline, key in rows]
    )


def test_a_later_run_never_changes_the_id_of_an_earlier_one():
    runs = name_runs(("demo", "7f3a1111"), ("demo", "7f3a2222"), ("other", "7f3a3333"))
    assert [run.short_id for run in runs] == ["demo-7f3a", "demo-7f3a2", "other-7f3a"]
    later = name_runs(("demo", "7f3a1111"), ("demo", "7f3a2222"), ("demo", "7f3a2244"))
    assert [run.short_id for run in later] == ["demo-7f3a", "demo-7f3a2", "demo-7f3a22"]
    same = name_runs(("demo", "aaaa"), ("demo", "aaaa"))
    assert [run.short_id for run in same] == ["demo-aaaa", "demo-aaaa"]  # ends


def test_a_run_is_found_by_id_name_digits_or_pipeline():
    runs = name_runs(("demo", "7f3a1111"), ("demo", "7f3a2222"), ("run-2024", "bbbb0000"))
    first, second, third = runs
    for text, run in (
        ("demo-7f3a", first),  # exactly, although it begins both keys
        ("demo-7f3a2", second),
        ("demo-7f3a2222", second),
        ("demo · 7f3a1111", first),
        ("7f3a11", first),
        ("demo", second),
        ("run-2024", third),  # a pipeline whose name looks like an id
    ):
        assert find_named_run(runs, text, "here") is run, text
    runs = name_runs(("demo", "7f3a1111"), ("demo", "7f3b2222"), ("demo", "7f3b2233"))
    with pytest.raises(
        AmbiguousRun, match=r"several runs in here: demo-7f3b, demo-7f3b2; name one"
    ):
        find_named_run(runs[1:], "7f3b22", "here")
    for text, message in (
        (
            "demo-9999",
            "no run 'demo-9999' in here; newest runs of demo: demo-7f3b2, demo-7f3b, demo-7f3a",
        ),
        ("dmeo", "did you mean 'demo'"),
        ("zzz", "the newest is demo-7f3b2"),
    ):
        with pytest.raises(DataError, match=message) as error:
            find_named_run(runs, text, "here")
        assert "\n" not in str(error.value)
    with pytest.raises(DataError, match="no runs in here; name the output folder with --output"):
        find_named_run([], "demo-7f3a", "here")


def test_the_id_is_in_the_journal_the_store_and_the_lists(tmp_path):
    runs = [start_run(tmp_path, "demo", 1), start_run(tmp_path, "demo", 2)]
    expected = [f"demo-{run.key[:4]}" for run in runs]
    assert len(runs[0].key) == 32
    assert [run.short_id for run in list_named_runs(tmp_path)] == expected
    assert [record["id"] for record in list_run_records(tmp_path)] == expected[::-1]
    assert [row["run"] for row in list_runs(tmp_path)] == expected[::-1]
    assert list_runs(tmp_path, where=[f"id={expected[0]}"])[0]["run"] == expected[0]
    assert shorten_run_name(tmp_path, runs[0].name) == expected[0]
    assert resolve_run_name(tmp_path, expected[0]) == runs[0].name
    assert resolve_run_name(tmp_path, "demo-0000zz") == "demo-0000zz"
    rows = Tracking(None, tmp_path).list_runs()
    assert find_run(rows, expected[0]).name == runs[0].name
    # Resumed, it is the same run. Without its files it has the same id, from the store.
    run = Tracking(None, tmp_path, "demo").start_run(runs[0].name, runs[0].folder)
    run.close()
    assert run.key == runs[0].key
    (tmp_path / "demo").rename(tmp_path.parent / "elsewhere")
    assert list_named_runs(tmp_path) == []
    assert [record["id"] for record in list_run_records(tmp_path)] == expected[::-1]


def test_runs_are_read_as_mlflow_reads_them(tmp_path):
    start_run(tmp_path, "demo", 1, note="a", empty="")
    start_run(tmp_path, "other", 2)
    tracking = Tracking(None, tmp_path)
    stored, searched = read_stored_runs(tracking.store.uri, 10), tracking._search_runs(10)
    assert stored is not None and [run.name[:5] for run in stored] == ["other", "demo "]
    for ours, theirs in zip(stored, searched, strict=True):
        assert str(ours) == str(theirs)  # nan is not equal to itself
    assert len(read_stored_runs(tracking.store.uri, 1)) == 1
    tracking.store.client.delete_run(stored[0].run_id)
    assert [run.run_id for run in read_stored_runs(tracking.store.uri, 10)] == [stored[1].run_id]
    tracking.store.client.delete_experiment(stored[1].experiment_id)
    assert read_stored_runs(tracking.store.uri, 10) == []


def test_other_stores_are_left_to_mlflow(tmp_path, monkeypatch):
    (tmp_path / "old.db").write_bytes(b"")
    assert read_stored_runs(f"sqlite:///{tmp_path / 'old.db'}", 5) is None  # without tables
    (tmp_path / "broken.db").write_bytes(b"no database" * 100)
    assert read_stored_runs(f"sqlite:///{tmp_path / 'broken.db'}", 5) is None
    for uri in (
        "postgresql://h/d",
        "https://h",
        "http://me:secret@h",
        f"sqlite:///{tmp_path}/none.db",
    ):
        assert read_stored_runs(uri, 5) is None
    with pytest.raises(
        BackendError, match=r"http://127.0.0.1:9 could not list runs: .*`posttrain status`"
    ):
        read_stored_runs("http://127.0.0.1:9", 5)
    monkeypatch.setenv("MLFLOW_TRACKING_TOKEN", "x")
    assert read_stored_runs("http://127.0.0.1:9", 5) is None


def test_a_server_is_read_page_by_page(monkeypatch):
    def build_run(number):
        data = {"metrics": [{"key": "m", "value": "NaN"}], "tags": [{"key": "t", "value": "v"}]}
        info = {"run_id": f"r{number}", "status": "RUNNING", "start_time": 5, "experiment_id": "1"}
        return {"info": info, "data": data}

    asked = []

    def fetch_json(url, body, timeout_s):
        asked.append(json.dumps([url, body]))
        if "experiments" in url:
            return {"experiments": [{"experiment_id": "1"}]}
        if not body.get("page_token"):
            return {"runs": [build_run(1)], "next_page_token": "next"}
        return {"runs": [build_run(2)]}

    monkeypatch.setattr("tasks.tracking.run_reading.fetch_json", fetch_json)
    runs = read_stored_runs("http://127.0.0.1:5000/", 10)
    assert [(run.run_id, run.end_ms, run.tags, run.params) for run in runs] == [
        ("r1", None, {"t": "v"}, {}),
        ("r2", None, {"t": "v"}, {}),
    ]
    assert str(runs[0].metrics) == "{'m': nan}" and len(asked) == 3
    assert '"page_token": "next"' in asked[-1] and "//api" not in asked[0]


def test_runs_imports_neither_mlflow_nor_prefect_nor_torch(tmp_path):
    import subprocess
    import sys

    start_run(tmp_path, "demo", 1)
    code = (
        "import sys; from posttrain.cli.main import main\n"
        f"code = main(['runs', '--output', {str(tmp_path)!r}])\n"
        "print([name for name in ('mlflow', 'prefect', 'torch', 'pandas') if name in sys.modules])\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    assert done.stdout.splitlines()[-1] == "[]" and "demo-" in done.stdout, done.stderr


def test_the_live_page_names_runs_by_their_ids(tmp_path):
    from posttrain.monitor.reader import RunReader

    run = start_run(tmp_path, "demo", 1)
    reader = RunReader(tmp_path)
    (view,) = reader.list_runs()
    assert view.short_id == f"demo-{run.key[:4]}" and view.title.startswith(view.short_id)
    assert reader.resolve_run_id(view.short_id) == view.id


def test_an_empty_name_is_refused_and_a_pipeline_of_sweeps_is_named_in_the_hint(tmp_path):
    runs = name_runs(("demo", "7f3a1111"))
    for text in ("", "  "):
        with pytest.raises(DataError, match="the name of the run is empty"):
            find_named_run(runs, text, "here")
    folder = tmp_path / "fromstart" / "sweeps" / "7a75cdb394"
    sweep = NamedRun("", "fromstart", "a sweep", "98a01111", folder=folder, is_pipeline=False)
    (named,) = assign_short_ids([sweep])
    with pytest.raises(DataError, match="newest runs of fromstart: fromstart-98a0 "):
        find_named_run([named], "fromstart", "here")
    assert named.is_sweep and not runs[0].is_sweep
    with pytest.raises(DataError, match=r"'fromstart-98a0' is a sweep, .* name one of its trials"):
        refuse_sweep(named)


@pytest.mark.parametrize(
    "response",
    [
        "<html>log in</html>",
        ["another", "service"],
        {"experiments": [{"name": "without an id"}]},
        {
            "experiments": [{"experiment_id": "1"}],
            "runs": [
                {
                    "info": {"run_id": "r", "status": "RUNNING", "experiment_id": "1"},
                    "data": {"metrics": [{"key": "m", "value": None}]},
                }
            ],
        },
    ],
    ids=["text", "list", "no id", "null metric"],
)
def test_a_response_that_is_not_that_of_mlflow_is_left_to_its_client(response, monkeypatch):
    monkeypatch.setattr(
        "tasks.tracking.run_reading.fetch_json", lambda url, body, timeout_s: response
    )
    assert read_stored_runs("http://127.0.0.1:5000", 10) is None
