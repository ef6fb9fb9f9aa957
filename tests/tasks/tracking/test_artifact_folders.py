"""Files of uploads that were interrupted by a kill, in MLflow's folders on this machine."""

import errno
import os
import time
from pathlib import Path

import pytest
from mlflow.store.artifact import local_artifact_repo

from tasks.tracking import models as models_module
from tasks.tracking.models import UPLOAD_PREFIX, clear_broken_uploads, find_local_artifacts


def test_the_name_is_mlflow_s():
    assert UPLOAD_PREFIX == local_artifact_repo._TEMP_ARTIFACT_PREFIX


@pytest.mark.parametrize("how", ["text", "file"])
def test_a_resumed_run_removes_only_files_of_the_killed_process(tracking, tmp_path, how):
    first = tracking.start_run("r", tmp_path / "run")
    first.log_text("a", "notes/a.txt")
    first.close("KILLED")
    folder = find_local_artifacts(
        tracking.store.client.get_run(first.run_id).info.artifact_uri, first.run_id
    )
    broken, living = (
        folder / "artifacts" / "notes" / f"{UPLOAD_PREFIX}broken",
        folder / "artifacts" / f"{UPLOAD_PREFIX}living",
    )
    for path, age in ((broken, 60), (living, -60)):
        path.write_text("half")
        os.utime(path, (time.time() - age,) * 2)
    again = tracking.start_run("r", tmp_path / "run")
    if how == "text":
        again.log_text("b", "notes/b.txt")
    else:
        (tmp_path / "b.txt").write_text("b")
        again.log_artifact(tmp_path / "b.txt", "notes")
    assert again.close() and again.run_id == first.run_id
    assert not broken.exists() and living.exists()
    assert sorted(path.name for path in broken.parent.iterdir()) == ["a.txt", "b.txt"]


def test_only_files_that_bear_mlflow_s_mark_are_deleted(tmp_path):
    unmarked = [
        tmp_path / name for name in ("model.safetensors", "a.artifact.uploading.b", ".artifact")
    ]
    marked = tmp_path / "inner" / f"{UPLOAD_PREFIX}x"
    marked.parent.mkdir()
    outside = tmp_path.parent / f"{tmp_path.name}-outside"
    outside.write_text("")
    (tmp_path / f"{UPLOAD_PREFIX}link").symlink_to(outside)
    for path in (*unmarked, marked):
        path.write_text("")
    assert clear_broken_uploads(tmp_path, time.time() + 1) == 2
    assert all(path.exists() for path in (*unmarked, outside)) and not marked.exists()
    assert clear_broken_uploads(Path(tmp_path / "nowhere"), time.time()) == 0


def test_a_model_whose_upload_was_killed_has_only_its_files(
    tracking, models, tmp_path, monkeypatch
):
    planted = []

    def killed_in_upload(point):
        if point == "model.made" and not planted:
            result = tracking.store.client.search_logged_models(
                [tracking.experiment_id], "attributes.name = 'half'"
            )
            folder = Path(result[0].artifact_location.removeprefix("file://")) / "model"
            folder.mkdir(parents=True)
            planted.append(folder / f"{UPLOAD_PREFIX}x")
            planted[0].write_text("half")
            os.utime(planted[0], (1, 1))
            raise OSError(errno.EIO, "as if killed")

    monkeypatch.setattr(models_module, "inject_fault", killed_in_upload)
    with tracking.start_run("half", tmp_path / "run", interval_s=0.05) as run:
        assert run.log_model(models["policy"], "policy", "half") == 1
    assert planted and not planted[0].exists() and (planted[0].parent / "config.json").exists()
