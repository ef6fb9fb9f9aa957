"""Removals of `posttrain store gc` with handmade folders and a real store: nothing reachable may be removed."""

import json
import os
import random
import shutil
from pathlib import Path

import pytest
from helpers.waiting import delivered_run_id
from mlflow import MlflowClient

from rl_core.errors import DataError
from rl_core.storage.folders import remove_folder, seal_folder
from rl_core.storage.locks import FolderLock
from rl_core.storage.manifest import digest_folder, read_manifest
from tasks.pipeline.stage_result import compute_content_digest
from tasks.retention import compute_model_digest, plan_retention
from tasks.tracking import Tracking, removal
from tasks.tracking.removal import list_stored_runs

SIZE = 1000  # bytes of every model file and checkpoint in these tests


@pytest.fixture(scope="module")
def stores(tmp_path_factory):
    """Create one database for all tests; each test uses a separate experiment and separate models."""
    return tmp_path_factory.mktemp("store")


class Pipeline:
    """Runs of a pipeline as the pipeline leaves them."""

    def __init__(self, stores, output, name):
        self.tracking = Tracking(f"sqlite:///{stores / 'mlflow.db'}", output, name)
        if self.tracking.store.client.get_experiment_by_name(name) is None:
            location = (stores / name).as_uri()
            self.tracking.store.client.create_experiment(name, artifact_location=location)
        self.home = output / name
        self.name = name
        self.number = 0

    def run(self, *stages, status="FINISHED", cached=()):
        """Record a run of stages (name, key, inputs); return its MLflow id."""
        self.number += 1
        started = f"2026-01-{self.number:02d} 10:00:00"
        folder = self.home / "runs" / started.replace(" ", "-").replace(":", "-")
        parent = self.tracking.start_run(
            f"{self.name} · {started}", folder, tags={"pipeline": self.name}
        )
        run_id = delivered_run_id(parent)
        for name, key, inputs in stages:
            self.stage(parent, name, key, inputs)
        for name, value in cached:
            parent.set_tag(f"cached.{name}", value)
        parent.close(status)
        return run_id

    def sweep(self, name, *trials):
        """Record a sweep whose trials have stages (name, key, inputs); return the MLflow ids of the trials."""
        self.number += 1
        started = f"2026-01-{self.number:02d} 10:00:00"
        home = self.home / "sweeps" / name
        tags = {"pipeline": self.name, "kind": "sweep"}
        parent = self.tracking.start_run(f"{self.name} · sweep {started}", home, tags=tags)
        run_ids = []
        for number, stages in enumerate(trials):
            run = self.tracking.start_run(
                f"trial {number}",
                home / "trials" / f"{number:04d}-s0" / "runs" / "x",
                tags={"pipeline": self.name},
                parent_run_id=delivered_run_id(parent),
                parent_folder=parent.folder,
            )
            run_ids.append(delivered_run_id(run))
            for stage in stages:
                self.stage(run, *stage)
            run.close("FINISHED")
        parent.close("FINISHED")
        return run_ids

    def stage(self, parent, name, key, inputs, finish=True):
        key = key * 16
        folder = self.home / "stages" / name / key
        run = self.tracking.start_run(
            name,
            folder.with_name(f"{key}.tracking"),
            parent_run_id=parent.run_id,
            parent_folder=parent.folder,
            tags={
                "pipeline": self.name,
                "stage": name,
                "stage_key": key,
                **{f"input.{n}": digest for n, digest in inputs.items()},
            },
        )
        work = folder.with_name(f"{key}.open")
        (work / "model").mkdir(parents=True, exist_ok=True)
        (work / "model" / "model.safetensors").write_bytes(
            key.encode() * (SIZE // 16) + b"x" * (SIZE % 16)
        )
        if finish:
            (work / "summary.json").write_text(json.dumps({"run_id": delivered_run_id(run)}))
            seal_folder(work, folder)
        run.close("FINISHED" if finish else "KILLED")
        return run.run_id

    def digest(self, name, key, model=False):
        manifest = read_manifest(self.home / "stages" / name / (key * 16))
        return (compute_model_digest(manifest) if model else compute_content_digest(manifest))[:16]

    def version(self, stage_run, tags=None, champion=False, name=None):
        """Register a version of a stage's run."""
        client, name = self.tracking.store.client, name or self.name
        if name not in self.tracking.registry.list_model_names():
            client.create_registered_model(name)
        created = client.create_model_version(
            name, "file:///nowhere", run_id=stage_run, tags={"pipeline": self.name, **(tags or {})}
        )
        if champion:
            self.tracking.set_champion(name, int(created.version))
        return int(created.version)

    def logged_model(self, run_id):
        """Log a model of a run; return the folder of its artifacts, with SIZE bytes in it."""
        from mlflow.utils.file_utils import local_file_uri_to_path

        client = self.tracking.store.client
        logged = client.create_logged_model(
            client.get_run(run_id).info.experiment_id, name="m", source_run_id=run_id
        )
        client.finalize_logged_model(logged.model_id, "READY")
        folder = Path(local_file_uri_to_path(logged.artifact_location))
        folder.mkdir(parents=True)
        (folder / "weights").write_bytes(b"x" * SIZE)
        return folder

    def children(self, run_id):
        rows = self.tracking.list_runs()
        return {row.name: row.run_id for row in rows if row.parent_run_id == run_id}

    def plan_removals(self, keep=1):
        """Plan removals; return the plan, stage folders, names of runs, versions."""
        plan = plan_retention(self.tracking, self.home, keep)
        paths = {str(path.relative_to(self.home)) for path in plan.paths}
        stages = {
            path.removeprefix("stages/")
            for path in paths
            if path.startswith("stages/") and "." not in path
        }
        return plan, stages, {run.name for run in plan.runs}, set(plan.versions)


@pytest.fixture
def pipeline(stores, tmp_path, request):
    return Pipeline(stores, tmp_path, request.node.name[5:50])


def build_stage_name(stage, letter):
    return f"{stage}/{letter * 16}"


def record_three_runs(pipeline):
    """Record data a -> sft b (evaluated: f) -> policy c, each in a separate run; then the policies d and e."""
    runs = [pipeline.run(("prepare_data", "a", {}))]
    data = pipeline.digest("prepare_data", "a")
    parent = pipeline.run(
        ("sft", "b", {"data": data}), ("evaluate", "f", {}), cached=[("prepare_data", "a" * 16)]
    )
    start = pipeline.digest("sft", "b", model=True)
    third = pipeline.run(
        ("policy", "c", {"model": start}), cached=[("sft", pipeline.children(parent)["sft"])]
    )
    runs += [parent, third]
    runs.append(pipeline.run(("policy", "d", {"model": "0" * 16})))
    runs.append(pipeline.run(("policy", "e", {"model": "0" * 16})))
    return runs


def test_the_champions_lineage_stays_by_digest_and_the_rest_is_removed(pipeline):
    runs = record_three_runs(pipeline)
    policy = pipeline.children(runs[2])["policy"]
    pipeline.version(policy, champion=True)
    plan, stages, names, versions = pipeline.plan_removals(keep=1)
    # e is in the newest run; a, b, c make the champion; f only looked at what it came from
    assert stages == {build_stage_name("policy", "d"), build_stage_name("evaluate", "f")}
    assert names == {f"{pipeline.name} · 2026-01-04 10:00:00", "policy"} and len(plan.runs) == 2
    assert versions == set()
    assert plan.retained_versions == [f"{pipeline.name}/1"]


def test_a_run_that_began_with_the_model_of_an_epoch_keeps_the_stage_that_has_it(pipeline):
    names = []
    for letter in "ab":
        work = pipeline.home / "stages" / "sft" / f"{letter * 16}.open" / "epochs" / "2"
        work.mkdir(parents=True)
        (work / "model.safetensors").write_text(letter)
        (work / "manifest.json").write_text("{}")
        pipeline.run(("sft", letter, {"data": "0" * 16}))
        names.append(
            digest_folder(pipeline.home / "stages" / "sft" / (letter * 16) / "epochs" / "2")[:16]
        )
    pipeline.run(("policy", "c", {"model": names[0]}))
    _, stages, _, _ = pipeline.plan_removals(keep=1)
    assert stages == {build_stage_name("sft", "b")}


def test_without_a_champion_only_the_newest_stay(pipeline):
    record_three_runs(pipeline)
    _, stages, _, _ = pipeline.plan_removals(keep=1)
    all_stages = {
        build_stage_name("prepare_data", "a"),
        build_stage_name("sft", "b"),
        build_stage_name("policy", "c"),
        build_stage_name("policy", "d"),
        build_stage_name("evaluate", "f"),
    }
    assert stages == all_stages
    # the third newest run used the SFT of the second, and that the data
    assert pipeline.plan_removals(keep=3)[1] == {build_stage_name("evaluate", "f")}
    assert pipeline.plan_removals(keep=99)[1] == set()


def test_every_alias_counts_and_the_champion_before(pipeline):
    run = pipeline.run(*[("policy", letter, {}) for letter in "a"])
    others = [pipeline.run(("policy", letter, {})) for letter in "bcdef"]
    first = pipeline.version(pipeline.children(run)["policy"])
    versions = [pipeline.version(pipeline.children(other)["policy"]) for other in others]
    registry = pipeline.tracking.registry
    registry.set_champion(pipeline.name, versions[1])
    registry.tag_version(pipeline.name, versions[1], {"gate.champion_before": first})
    registry.set_alias(pipeline.name, "demo", versions[2])
    registry.tag_version(pipeline.name, versions[3], {"approval.state": "waiting"})
    _, stages, _, removed = pipeline.plan_removals(keep=1)
    assert stages == {build_stage_name("policy", "b")} and removed == {(pipeline.name, versions[0])}


def test_lineage_over_versions_and_references(pipeline):
    old = pipeline.run(("sft", "a", {}))
    before = pipeline.version(pipeline.children(old)["sft"])
    middle = pipeline.run(("policy", "b", {}))
    pipeline.run(("policy", "c", {}))
    run_id = pipeline.children(middle)["policy"]
    reference = f"models:/{pipeline.name}/{before}"
    pipeline.tracking.store.client.set_tag(run_id, "parent_model_version", reference)
    pipeline.version(run_id, champion=True)
    assert pipeline.plan_removals(keep=1)[1] == set()


def test_models_that_were_only_evaluated_are_not_retained(pipeline):
    pipeline.run(("policy", "a", {}))
    former = pipeline.digest("policy", "a", model=True)
    run = pipeline.run(("policy", "b", {}), ("evaluate", "c", {"model.champion": former}))
    pipeline.version(pipeline.children(run)["policy"], champion=True)
    assert pipeline.plan_removals(keep=1)[1] == {build_stage_name("policy", "a")}


def test_unknown_inputs_keep_everything(pipeline):
    pipeline.run(("sft", "a", {}))
    run = pipeline.run(("policy", "b", {}))
    pipeline.run(("policy", "c", {}))
    run_id = pipeline.children(run)["policy"]
    pipeline.version(run_id, champion=True)
    shutil.rmtree(pipeline.home / "stages/policy" / ("b" * 16 + ".tracking"))
    # the store still knows what went into b
    assert pipeline.plan_removals(keep=1)[1] == {build_stage_name("sft", "a")}
    summary = pipeline.home / "stages/policy" / ("b" * 16) / "summary.json"
    summary.write_text("{}")  # now nobody does
    pipeline.tracking.store.client.delete_run(run_id)
    assert pipeline.plan_removals(keep=1)[1] == set()


def test_unfinished_stages_are_removed_with_their_run(pipeline):
    for letter, status in (("a", "KILLED"), ("b", "KILLED")):
        pipeline.number += 1
        started = f"2026-01-{pipeline.number:02d} 10:00:00"
        folder = pipeline.home / "runs" / started.replace(" ", "-").replace(":", "-")
        parent = pipeline.tracking.start_run(
            f"{pipeline.name} · {started}", folder, tags={"pipeline": pipeline.name}
        )
        delivered_run_id(parent)
        pipeline.stage(parent, "policy", letter, {}, finish=False)
        parent.close(status)
    plan, _, names, _ = pipeline.plan_removals(keep=1)
    removed = {path.name for path in plan.paths}
    assert removed == {"a" * 16 + ".open", "a" * 16 + ".tracking", "2026-01-01-10-00-00"}
    assert f"{pipeline.name} · 2026-01-01 10:00:00" in names


def test_the_newest_run_keeps_its_stages_though_the_store_has_lost_them(pipeline):
    pipeline.run(("sft", "a", {}))
    old = pipeline.children(pipeline.run(("sft", "c", {})))
    run = pipeline.run(("policy", "b", {}), cached=[("sft", "a" * 16)])
    for run_id in (*pipeline.children(run).values(), run, *old.values()):
        pipeline.tracking.store.client.delete_run(run_id)
    assert pipeline.plan_removals(keep=1)[1] == {build_stage_name("sft", "c")}


def test_the_bytes_are_those_that_come_free(pipeline, tmp_path):
    pipeline.run(("policy", "a", {}))
    pipeline.run(("policy", "b", {}))
    weights = pipeline.home / "stages/policy" / ("a" * 16) / "model" / "model.safetensors"
    plan = plan_retention(pipeline.tracking, pipeline.home, 1)
    (item,) = [item for item in plan.items if item.kind == "stage"]
    folder = weights.parent.parent
    journal = folder.with_name(f"{folder.name}.tracking")
    files = [path for place in (folder, journal) for path in place.rglob("*") if path.is_file()]
    assert item.bytes == sum(path.stat().st_size for path in files) > SIZE
    os.link(weights, tmp_path / "another")  # as a model version that stays would hold it
    (less,) = [
        item
        for item in plan_retention(pipeline.tracking, pipeline.home, 1).items
        if item.kind == "stage"
    ]
    assert less.bytes == item.bytes - SIZE


def test_a_dry_run_changes_nothing_and_yes_removes_what_was_listed(pipeline):
    from posttrain.cli.store_gc import collect_garbage

    runs = record_three_runs(pipeline)
    pipeline.version(pipeline.children(runs[2])["policy"], champion=True)
    pipeline.version(pipeline.children(runs[3])["policy"])
    retained, dropped = (
        pipeline.logged_model(pipeline.children(run)["policy"]) for run in runs[2:4]
    )
    uri, output = pipeline.tracking.store.uri, pipeline.home.parent
    before = sorted(path for path in output.rglob("*") if path.name != ".lock")
    text = collect_garbage(output, uri, num_kept_runs=1).format_text()
    assert (
        "would free" in text
        and "nothing was changed" in text
        and f"{pipeline.name} version 2" in text
    )
    assert (
        sorted(path for path in output.rglob("*") if path.name != ".lock") == before
        and dropped.is_dir()
    )
    assert f"  {SIZE} B  version  {pipeline.name} version 2" in text
    done = collect_garbage(output, uri, num_kept_runs=1, delete=True).format_text()
    assert done.splitlines()[:-1] == text.splitlines()[:-1] and done.splitlines()[-1].startswith(
        "freed"
    )
    left = {path.name for path in (pipeline.home / "stages").glob("*/*") if "." not in path.name}
    assert left == {letter * 16 for letter in "abce"} and "would free 0 B" not in text
    assert [version.version for version in pipeline.tracking.list_versions(pipeline.name)] == [1]
    assert pipeline.tracking.find_champion(pipeline.name).version == 1
    left = [
        row.name
        for row in pipeline.tracking.list_runs()
        if row.tags.get("pipeline") == pipeline.name
    ]
    assert (
        f"{pipeline.name} · 2026-01-04 10:00:00" not in left
        and f"{pipeline.name} · 2026-01-02 10:00:00" in left
    )
    assert (retained / "weights").is_file() and not dropped.exists()
    assert (
        collect_garbage(output, uri, num_kept_runs=1)
        .format_text()
        .splitlines()[-1]
        .startswith("would free 0 B")
    )


class Killed(BaseException):
    """Death of the process."""


@pytest.mark.slow
def test_killed_between_any_two_removals_the_next_one_leaves_nothing(pipeline, monkeypatch):
    from posttrain.cli import store_gc as gc_command

    runs = record_three_runs(pipeline)
    pipeline.version(pipeline.children(runs[2])["policy"], champion=True)
    pipeline.version(pipeline.children(runs[3])["policy"])
    model = pipeline.logged_model(pipeline.children(runs[3])["policy"])
    artifacts = {}
    for stored in list_stored_runs(pipeline.tracking.store, f"tags.pipeline = '{pipeline.name}'"):
        folder = Path(
            pipeline.tracking.store.client.get_run(stored.run_id).info.artifact_uri.removeprefix(
                "file://"
            )
        )
        folder.mkdir(parents=True)
        (folder / "summary.json").write_text("{}")
        artifacts[stored.run_id] = folder
    roots = (pipeline.home, folder.parents[1])  # the pipeline's folder, and the store's artifacts
    removed_runs = {runs[3], *pipeline.children(runs[3]).values()}
    num_removals_left = 0  # removals until the kill

    def count_down(call):
        def counted(*arguments, **options):
            nonlocal num_removals_left
            num_removals_left -= 1
            if num_removals_left < 0:
                raise Killed
            return call(*arguments, **options)

        return counted

    for name in ("delete_traces", "delete_model_version", "delete_logged_model", "delete_run"):
        monkeypatch.setattr(MlflowClient, name, count_down(getattr(MlflowClient, name)))
    for module in (removal, gc_command):
        monkeypatch.setattr(module, "remove_folder", count_down(remove_folder))
    # a folder that is renamed, and stays
    monkeypatch.setattr(shutil, "rmtree", count_down(shutil.rmtree))
    kills, interrupted, steps = 0, [], random.Random(0)
    while True:
        num_removals_left = steps.randint(1, 3)
        try:
            gc_command.collect_garbage(
                pipeline.home.parent, pipeline.tracking.store.uri, num_kept_runs=1, delete=True
            )
            break
        except Killed:
            kills += 1
            interrupted += [path for root in roots for path in root.rglob(".trash-*")]
    assert kills >= 5 and any(roots[1] in path.parents for path in interrupted)
    assert {
        run_id for run_id, folder in artifacts.items() if not folder.exists()
    } == removed_runs and not model.exists()
    assert not (pipeline.home / "stages" / build_stage_name("policy", "d")).exists()
    assert removed_runs.isdisjoint(row.run_id for row in pipeline.tracking.list_runs())
    assert not [path for root in roots for path in root.rglob(".trash-*")]


def test_a_pipeline_that_runs_is_left_alone(pipeline):
    from posttrain.cli.store_gc import collect_garbage

    pipeline.run(("policy", "a", {}))
    pipeline.run(("policy", "b", {}))
    with FolderLock(pipeline.home / ".lock"):
        text = collect_garbage(
            pipeline.home.parent, pipeline.tracking.store.uri, num_kept_runs=1, delete=True
        ).format_text()
    assert "skipped, a run is writing" in text
    assert (pipeline.home / "stages/policy" / ("a" * 16)).is_dir()


def test_wrong_locations_are_refused(pipeline, tmp_path):
    from posttrain.cli.store_gc import collect_garbage

    with pytest.raises(DataError, match="no runs in"):
        collect_garbage(tmp_path / "none", None, num_kept_runs=1)
    pipeline.run(("policy", "a", {}))
    with pytest.raises(DataError, match="no pipeline 'x' in"):
        collect_garbage(
            pipeline.home.parent, pipeline.tracking.store.uri, num_kept_runs=1, pipelines=["x"]
        )


def test_an_old_sweep_goes_with_its_trials(pipeline):
    trials = [[("policy", "a", {})], [("policy", "b", {})]]
    first, _ = pipeline.sweep("one", *trials)
    pipeline.run(("policy", "c", {}))
    plan, stages, names, _ = pipeline.plan_removals(keep=1)
    assert stages == {build_stage_name("policy", "a"), build_stage_name("policy", "b")}
    assert names == {f"{pipeline.name} · sweep 2026-01-01 10:00:00", "trial 0", "trial 1", "policy"}
    assert len(plan.runs) == 5 and pipeline.home / "sweeps/one" in plan.paths
    assert [item.label for item in plan.items if item.kind == "sweep"] == ["2026-01-01 10:00:00"]
    plan, stages, names, _ = pipeline.plan_removals(keep=2)  # it is the second newest run
    assert stages == names == set() and plan.paths == [] and plan.num_retained_runs == 2
    pipeline.version(pipeline.children(first)["policy"], champion=True)  # a trial's model
    plan, stages, names, _ = pipeline.plan_removals(keep=1)
    assert stages == names == set() and plan.paths == []


def test_a_sweeps_trial_that_prepared_data_is_followed(pipeline):
    """The champion was trained on data of a trial: the data stays, the trial's policy is removed."""
    pipeline.sweep("one", [("prepare_data", "a", {}), ("policy", "b", {"data": "0" * 16})])
    data = pipeline.digest("prepare_data", "a")
    run = pipeline.run(("policy", "c", {"data": data}))
    pipeline.version(pipeline.children(run)["policy"], champion=True)
    pipeline.run(("policy", "d", {}))
    plan, stages, names, _ = pipeline.plan_removals(keep=1)
    assert (
        stages == {build_stage_name("policy", "b")}
        and names == set()
        and pipeline.home / "sweeps/one" not in plan.paths
    )


def test_token_ids_are_removed_with_their_data(pipeline):
    def entry(name, **about):
        folder = pipeline.home / "stages/prepare_data/tokens.cache" / name
        folder.mkdir(parents=True)
        (folder / "tokens.arrow").write_bytes(b"x" * SIZE)
        if about:
            (folder / "manifest.json").unlink(missing_ok=True)
            target = folder.with_name(f"{name}.sealed")
            seal_folder(folder, target, about)
            target.rename(folder)

    pipeline.run(("prepare_data", "a", {}))
    pipeline.run(("prepare_data", "b", {}))
    files = {
        letter: read_manifest(pipeline.home / key_folder("prepare_data", letter))["files"]
        for letter in "ab"
    }
    sources = {
        letter: files_of["model/model.safetensors"]["sha256"] for letter, files_of in files.items()
    }
    entry("old", kind="part", source=sources["a"], table="oldtable")
    entry("oldtable", kind="tokens", source="1")
    entry("new", kind="part", source=sources["b"], table="newtable")
    entry("newtable", kind="tokens", source="2")
    entry("damaged")
    plan, stages, _, _ = pipeline.plan_removals(keep=1)
    assert stages == {build_stage_name("prepare_data", "a")}
    removed = {path.name: path for path in plan.paths if path.parent.name == "tokens.cache"}
    assert set(removed) == {"old", "oldtable", "damaged"}
    assert [item.label for item in plan.items if item.kind == "token ids"] == [
        "damaged",
        "old",
        "oldtable",
    ]
    retained, *_ = pipeline.plan_removals(keep=2)
    assert {path.name for path in retained.paths if path.parent.name == "tokens.cache"} == {
        "damaged"
    }


def key_folder(stage, letter):
    return f"stages/{build_stage_name(stage, letter)}"
