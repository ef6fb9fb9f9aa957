"""Records of a stage in the tracking store: artifacts and data sets, each once."""

import threading
from pathlib import Path

import pytest
from helpers.stage_doubles import PipelineRun

from rl_core.errors import BackendError
from rl_core.metric_history import MetricHistory
from rl_core.settings import SFTSettings
from rl_core.storage.append_log import AppendLog
from rl_core.storage.atomic_files import write_text_atomic
from rl_core.storage.manifest import digest_file
from tasks.pipeline import stage as stage_module
from tasks.pipeline.stage import run_stage
from tasks.tracking import Tracking, run_tracker


def write_records(folder, seconds=0.5):
    """Write the records of a stage."""
    (folder / "rewards.jsonl").unlink(missing_ok=True)
    AppendLog(folder / "rewards.jsonl").append_records(
        {"iteration": n, "reward": n / 2} for n in range(3)
    )
    write_text_atomic(folder / "pairs_train.jsonl", '{"prompt_text": "p"}\n' * 2)
    history = MetricHistory(10)
    for step in (1, 2, 3):
        history.record_values({"train/loss": 1 / step, "perf/step_seconds": seconds}, step)
    write_text_atomic(folder / "metrics_history.json", history.to_json())
    return {}


def run_sft(pipeline_run, body):
    return run_stage(
        pipeline_run, "sft", body, settings=SFTSettings(), inputs={"model": "org/name"}
    )


def test_every_record_becomes_an_artifact_and_a_data_set(tmp_path):
    run = PipelineRun(tmp_path / "one")
    done = run_sft(run, lambda context: write_records(context.folder))
    (tracker,) = run.trackers
    names = ["rewards.jsonl", "metrics_history.json", "pairs_train.jsonl"]
    assert tracker.artifacts == [("records", name) for name in names]
    datasets = {
        name: (path, digest, context, profile)
        for path, digest, name, context, profile in tracker.datasets
    }
    assert list(datasets) == ["sft rewards", "sft metrics_history", "sft pairs_train"]
    path, digest, context, profile = datasets["sft rewards"]
    assert (
        path == done.path / "rewards.jsonl" and digest == digest_file(path) and context == "rewards"
    )
    assert profile == {"bytes": path.stat().st_size, "num_rows": 3}
    assert datasets["sft pairs_train"][2:] == ("training", {"bytes": 42, "num_rows": 2})
    other = PipelineRun(tmp_path / "two")
    again = run_sft(other, lambda context: write_records(context.folder, seconds=0.7))
    assert other.trackers[0].datasets[1][1] == datasets["sft metrics_history"][1], (
        "timings are not part of the content"
    )
    assert again.digest == done.digest


@pytest.mark.parametrize(("limit", "copied"), [(0, 0), (1e-5, 0), (1e-4, 1), (1, 3)])
def test_a_large_file_is_not_copied(tmp_path, limit, copied):
    run = PipelineRun(tmp_path, tracking={"records_megabytes": limit})
    run_sft(run, lambda context: write_records(context.folder))
    assert len(run.trackers[0].artifacts) == copied and len(run.trackers[0].datasets) == 3


class StoredPipelineRun(PipelineRun):
    """A pipeline run whose stages have runs of a real store."""

    def __init__(self, folder, tracking):
        super().__init__(folder)
        self.tracking = tracking

    def open_stage(self, label, name, journal, settings, digests, key, tags):
        self.trackers.append(self.tracking.start_run(label, journal, tags=tags))
        return self.trackers[-1]


def test_records_reach_the_store_once_after_a_kill_and_an_outage(tmp_path, monkeypatch):
    output, is_down = tmp_path / "out", threading.Event()
    tracking = Tracking(f"sqlite:///{tmp_path / 'mlflow.db'}", output, "t")
    answers = type(tracking.store).translate_errors

    def refuses(store, doing):
        if is_down.is_set():
            raise BackendError("down")
        return answers(store, doing)

    monkeypatch.setattr(type(tracking.store), "translate_errors", refuses)
    monkeypatch.setattr(run_tracker, "UNREACHABLE_TIMEOUT_SECONDS", 0.1)
    is_down.set()

    def killed(stage):
        raise RuntimeError("killed")

    with monkeypatch.context() as patched:
        patched.setattr(stage_module, "seal_stage", killed)
        with pytest.raises(RuntimeError, match="killed"):
            run_sft(
                StoredPipelineRun(output / "t" / "stages", tracking),
                lambda context: write_records(context.folder),
            )
    done = run_sft(
        StoredPipelineRun(output / "t" / "stages", tracking),
        lambda context: write_records(context.folder, seconds=0.9),
    )
    is_down.clear()
    assert tracking.deliver_all_journals(output) == 0
    (run,) = tracking.list_runs()
    client = tracking.store.client
    inputs = client.get_run(run.run_id).inputs.dataset_inputs
    names = sorted(entry.dataset.name for entry in inputs)
    assert names == ["sft metrics_history", "sft pairs_train", "sft rewards"], "each once"
    assert {entry.tags[0].value for entry in inputs} == {"rewards", "metrics", "training"}
    paths = sorted(item.path for item in client.list_artifacts(run.run_id, "records"))
    assert paths == [
        "records/metrics_history.json",
        "records/pairs_train.jsonl",
        "records/rewards.jsonl",
    ]
    for path in paths:  # from the process that finished
        local = Path(client.download_artifacts(run.run_id, path, str(tmp_path)))
        assert local.read_bytes() == (done.path / local.name).read_bytes()
