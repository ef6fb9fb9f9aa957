"""The main pipeline, end to end, on configs/test.yaml: results, cache, registry, a store that is away."""

import json
import math
from pathlib import Path

import pytest
import torch
from helpers.pipeline_runs import (
    CONFIG,
    disable_stages,
    find_newest_run,
    read_metric_rows,
    read_run_tags,
    run_test_pipeline,
)
from transformers import AutoModelForCausalLM

from rl_core.storage.manifest import digest_file, digest_folder, verify_folder

STAGES = [
    "prepare_data",
    "sft",
    "reward_model",
    "policy",
    "evaluate",
    "analyze",
    "export",
    "promote",
]


@pytest.fixture(scope="module")
def first(prefect_api, tmp_path_factory):
    output = tmp_path_factory.mktemp("outputs")
    return output, run_test_pipeline(output)


def test_every_stage_leaves_a_verified_folder_and_a_row_in_the_table(first):
    _, result = first
    assert list(result.results) == STAGES
    assert not any(stage.cached for stage in result.results.values())
    table = result.format_table(width=120)
    for name, stage in result.results.items():
        manifest = verify_folder(stage.path)
        assert {"summary.json", "metrics.jsonl"} <= set(manifest["files"])
        assert name.replace("_", " ") in table
    for name in ("sft", "policy"):
        row = next(row for row in result.rows if row["stage"] == name)
        assert 0 <= row["low"] <= row["success"] <= row["high"] <= 1
        assert row["low"] < row["high"]
    assert (result.results["analyze"].path / "report.html").stat().st_size > 10_000
    # nobody serves it
    assert result.run_url == "" and "http://" not in table and "posttrain ui --output" in table


def test_the_policy_uses_the_reward_model_and_the_result_shows_its_contribution(first):
    from tasks.tracking import Tracking

    output, result = first
    summary = result.results["policy"].summary
    rows = [
        json.loads(line)
        for line in (result.results["policy"].path / "rewards.jsonl").read_text().splitlines()
    ]
    assert len({row["rewards"]["weighted/learned"] for row in rows}) > 1
    assert summary["rewards"].startswith("reward differences within a prompt: task ")
    assert f"; {summary['rewards']}" in next(
        line for line in result.format_table().splitlines() if line.startswith("policy: ")
    )
    tracking = Tracking(None, output, "test")
    parent = next(row for row in tracking.list_runs() if row.parent_run_id is None)
    description = tracking.store.client.get_run(parent.run_id).data.tags["mlflow.note.content"]
    assert summary["rewards"] in description
    assert (
        dict(read_last_metrics(result, "policy"))["reward/learned/alone"]
        == summary["metrics"]["reward/learned/alone"]
    )


def read_last_metrics(result, stage):
    return read_metric_rows(result.results[stage].folder)[-1][1]


def test_the_graph_of_prefect_has_an_arrow_from_each_direct_predecessor(first):
    """Check only direct arrows: Prefect draws arrows through names, so those of all inputs would hide them."""
    from prefect.client.orchestration import get_client
    from prefect.client.schemas.filters import FlowRunFilter, FlowRunFilterId

    from tasks.tracking import Tracking

    output, _ = first
    parent = next(
        row for row in Tracking(None, output, "test").list_runs() if row.parent_run_id is None
    )
    run = FlowRunFilter(id=FlowRunFilterId(any_=[parent.tags["prefect.flow_run_id"]]))
    with get_client(sync_client=True) as client:
        tasks = client.read_task_runs(flow_run_filter=run)
    names = {task.id: task.name for task in tasks}
    arrows = {
        (names[predecessor.id], task.name)
        for task in tasks
        for inputs in task.task_inputs.values()
        for predecessor in inputs
    }
    assert sorted(names.values()) == sorted(name.replace("_", " ") for name in STAGES)
    assert arrows == {
        ("prepare data", "sft"),
        ("sft", "reward model"),
        ("reward model", "policy"),
        ("policy", "evaluate"),
        ("evaluate", "analyze"),
        ("evaluate", "export"),
        ("export", "promote"),
    }


def test_the_analysis_measures_the_models_and_the_reward_model(first):
    _, result = first
    metrics = result.results["analyze"].summary["metrics"]
    for name in ("sft", "policy"):
        assert (
            metrics[f"analysis/{name}/perplexity"] > 1 and metrics[f"analysis/{name}/entropy"] > 0
        )
        assert metrics[f"analysis/{name}/coherence"] <= 1
    assert metrics["analysis/sft/kl_to_first"] == 0 < metrics["analysis/policy/kl_to_first"]
    assert metrics["analysis/reward_model/trajectories"] == 24  # 12 episodes of two models
    logged = dict(read_metric_rows(result.results["analyze"].path)[0][1])
    assert logged["analysis/policy/kl_to_first"] == metrics["analysis/policy/kl_to_first"]


def test_exported_models_are_verified_and_the_champion_has_the_differences(first):
    from tasks.tracking import Tracking

    output, result = first
    proofs = result.results["export"].summary["models"]
    for name in ("sft", "policy"):
        assert proofs[name]["model_sha256"] == digest_folder(result.results[name].model)
        assert proofs[name]["trained"]["max"] < 1e-4 and proofs[name]["evaluated"]["max"] < 1e-4
    tags = Tracking(None, output, "test").find_champion("test").tags
    assert tags["export.model_sha256"] == tags["model_sha256"]
    assert float(tags["export.evaluated_difference_max"]) == pytest.approx(
        proofs["policy"]["evaluated"]["max"], 1e-4
    )


def test_nothing_is_left_open_and_no_pickle_is_written(first):
    output, _ = first
    stages = output / "test" / "stages"
    assert list(stages.rglob("*.open")) == []
    assert [
        p for p in stages.rglob("*") if p.suffix in {".bin", ".pkl", ".pickle", ".pt", ".pth"}
    ] == []


def test_the_policy_moved_away_from_sft_and_both_load_in_transformers(first):
    _, result = first
    sft = AutoModelForCausalLM.from_pretrained(result.results["sft"].model)
    policy = AutoModelForCausalLM.from_pretrained(result.results["policy"].model)
    pairs = zip(sft.parameters(), policy.parameters(), strict=True)
    assert max(float((a - b).detach().abs().max()) for a, b in pairs) > 0


def test_registered_versions_hold_the_stages_weights_and_the_champion_is_the_policy(
    first, tmp_path
):
    from tasks.tracking import Tracking

    output, result = first
    tracking = Tracking(None, output, "test")
    versions = tracking.list_versions("test")
    assert [version.tags["stage"] for version in versions] == ["sft", "policy"]
    assert [version.tags["stage"] for version in tracking.list_versions("test-reward-model")] == [
        "reward_model"
    ]
    champion = tracking.find_champion("test")
    assert champion.version == result.results["policy"].summary["model_version"]
    assert champion.tags["parent_version"] == str(result.results["sft"].summary["model_version"])
    description = tracking.store.client.get_model_version("test", str(champion.version)).description
    story, _, gate = description.partition("\n\n")
    assert story == f"policy from version 1: {result.results['policy'].summary['note']}"
    assert gate.startswith("Gate: promoted: no champion yet; ") and "held-out attempts" in gate
    folder = tracking.download_version("test", champion.version, tmp_path)
    loaded = AutoModelForCausalLM.from_pretrained(folder).state_dict()
    expected = AutoModelForCausalLM.from_pretrained(result.results["policy"].model).state_dict()
    assert all(torch.equal(loaded[name], expected[name]) for name in expected)


def test_mlflow_has_one_parent_and_a_nested_run_for_each_stage_with_every_metric(first):
    from tasks.tracking import Tracking

    output, result = first
    rows = {row.name: row for row in Tracking(None, output, "test").list_runs()}
    parents = [row for row in rows.values() if row.parent_run_id is None]
    assert len(parents) == 1
    assert parents[0].status == "FINISHED"
    children = {
        row.tags["stage"]: row for row in rows.values() if row.parent_run_id == parents[0].run_id
    }
    assert set(children) == set(STAGES)
    assert {row.status for row in children.values()} == {"FINISHED"}
    assert children["policy"].metrics["train/success_rate"] == read_newest_metric(
        result, "policy", "train/success_rate"
    )
    assert {"pipeline", "config_digest", "code_version", "prefect.flow_run_id"} <= set(
        parents[0].tags
    )
    assert parents[0].tags["input.data"] == result.results["prepare_data"].digest[:16]
    starts = {stage: row.tags.get("parent_model_version") for stage, row in children.items()}
    sft = f"models:/test/{result.results['sft'].summary['model_version']}"
    expected = {"sft": "preset nano", "reward_model": sft, "policy": sft}
    assert starts == {stage: expected.get(stage) for stage in STAGES}


def read_newest_metric(result, stage, name):
    rows = [dict(values) for _, values in read_metric_rows(result.results[stage].folder)]
    return [row[name] for row in rows if name in row][-1]


def test_every_second_of_an_iteration_is_accounted_for(first):
    from posttrain.cli.check_profile import compute_phase_times
    from tasks.tracking.journal import read_metrics

    records = read_metrics(Path(first[1].results["policy"].folder))
    steps = [metrics for _, metrics in records if "perf/step_seconds" in metrics][1:]
    parts = {part.label: part.seconds * len(steps) for part in compute_phase_times(records)}
    spent = sum(
        sum(row.get(f"perf/{name}_seconds", 0) for name in ("tracking", "checkpoint", "step"))
        for row in steps
    )
    assert len(steps) == 5
    assert math.isclose(sum(parts.values()), spent, rel_tol=0.01)  # parts below 0.05% are omitted
    labels = {
        "rollouts: decoding",
        "rollouts: environment and tools",
        "rewards",
        "checkpoints",
    }
    assert labels <= set(parts)
    assert all(seconds > 0 for seconds in parts.values())
    assert all(row["perf/update_tflops"] > 0 for row in steps if "perf/optimizer_seconds" in row)
    sft = read_metrics(Path(first[1].results["sft"].folder))
    assert "update: optimizer steps" in {part.label for part in compute_phase_times(sft)}


def test_the_same_config_again_runs_nothing_and_changes_nothing(first):
    output, result = first
    repeated = run_test_pipeline(output)
    assert all(stage.cached for stage in repeated.results.values())
    assert {n: s.digest for n, s in repeated.results.items() if n != "promote"} == {
        n: s.digest for n, s in result.results.items() if n != "promote"
    }
    assert "cached" in repeated.format_table(width=120)
    tags = read_run_tags(output, find_newest_run(output))
    assert tags["input.data"] == result.results["prepare_data"].digest[:16]
    assert tags["cached.policy"] == result.results["policy"].run_id


@pytest.mark.slow
def test_a_changed_policy_setting_runs_the_policy_and_later_stages(first):
    output, _ = first
    changed = run_test_pipeline(output, "stages.policy.learning_rate=2e-4")
    ran = [name for name, stage in changed.results.items() if not stage.cached]
    assert ran == ["policy", "evaluate", "analyze", "export", "promote"]


def test_a_damaged_finished_stage_is_set_aside_and_run_again(first):
    output, result = first
    folder = result.results["sft"].path
    weights = folder / "model" / "model.safetensors"
    original = weights.read_bytes()
    weights.write_bytes(original[:-1] + bytes([original[-1] ^ 1]))
    (result.results["evaluate"].path / "evaluation.json").write_text("{}")
    repeated = run_test_pipeline(output)
    ran = [name for name, stage in repeated.results.items() if not stage.cached]
    # Both produced the same bits, so nothing after them ran again.
    assert ran == ["sft", "evaluate"]
    assert repeated.results["sft"].digest == result.results["sft"].digest
    assert len(list(folder.parent.glob("*.corrupt-*"))) == 1
    assert digest_folder(folder / "model") == digest_folder(repeated.results["sft"].model)


def test_a_changed_data_file_runs_everything_that_read_it(prefect_api, tmp_path):
    rows = [{"prompt": f"{n} plus 1 ?", "completion": f"answer {n + 1}"} for n in range(40)]
    data = tmp_path / "mine.jsonl"

    def write_rows():
        data.write_text("".join(json.dumps(row) + "\n" for row in rows))

    def list_cached(**options):
        overrides = disable_stages("reward_model", "policy", "evaluate", "analyze", "promote")
        overrides += [f"stages.prepare_data={{demonstrations: {data}}}", "stages.sft.max_steps=2"]
        result = run_test_pipeline(tmp_path / "out", *overrides, **options)
        assert (
            read_run_tags(tmp_path / "out", find_newest_run(tmp_path / "out"))[
                "input.demonstrations"
            ]
            == digest_file(data)[:16]
        )
        return {name: stage.cached for name, stage in result.results.items()}

    write_rows()
    assert list_cached() == {"prepare_data": False, "sft": False}
    assert list_cached() == {"prepare_data": True, "sft": True}
    rows[0]["completion"] = "answer one"
    write_rows()
    assert list_cached() == {"prepare_data": False, "sft": False}
    assert list_cached(fresh=True) == {"prepare_data": False, "sft": False}
    assert list_cached() == {"prepare_data": True, "sft": True}


@pytest.mark.slow
def test_a_pipeline_starts_from_the_registered_champion(first):
    output, result = first
    continued = run_test_pipeline(
        output,
        "model.path=models:/test@champion",
        "stages.policy.iterations=1",
        "stages.policy.curriculum=[]",
        "stages.policy.rewards.learned=0",
        "stages.policy.rewards.length=1.0",  # no episode succeeds, but lengths differ
        "stages.policy.reward_options.length={free: 0, limit: 72}",
        *disable_stages("prepare_data", "sft", "reward_model", "analyze", "promote"),
    )
    assert list(continued.results) == ["policy", "evaluate"]
    version = result.results["policy"].summary["model_version"]  # what the alias meant
    assert (
        read_run_tags(output, continued.results["policy"].run_id)["parent_model_version"]
        == f"models:/test/{version}"
    )
    before = AutoModelForCausalLM.from_pretrained(result.results["policy"].model)
    after = AutoModelForCausalLM.from_pretrained(continued.results["policy"].model)
    moved = max(
        float((a - b).detach().abs().max())
        for a, b in zip(before.parameters(), after.parameters(), strict=True)
    )
    # One small step from the champion's weights; those of a new model would be far away.
    assert moved < 0.01


def test_a_wrong_setting_leaves_no_folder_and_no_traceback(tmp_path, capsys):
    from posttrain.cli.main import main

    overrides = ("--set", f"output={tmp_path / 'o'}", "--set", "stages.policy.learning_rte=1e-3")
    assert main(["run", str(CONFIG), *overrides]) == 2
    error = capsys.readouterr().err
    assert "learning_rate" in error
    assert "Traceback" not in error
    assert not (tmp_path / "o").exists()


def test_an_unreachable_store_ends_no_run_and_receives_everything_later(
    prefect_api, tmp_path, monkeypatch, capsys
):
    from posttrain.cli.main import main
    from posttrain.monitor.reader import RunReader
    from tasks.lifecycle.crashed_runs import list_recorded_runs
    from tasks.tracking import Tracking, run_tracker

    monkeypatch.setattr(run_tracker, "UNREACHABLE_TIMEOUT_SECONDS", 0.5)
    settings = [
        *disable_stages("reward_model", "policy", "analyze"),
        "stages.sft.max_steps=2",
        "stages.evaluate.episodes=4",
        "stages.promote={min_success: 0.0, min_episodes: 4}",
        "run.retries=0",
    ]
    monkeypatch.setenv("MLFLOW_TRACKING_URI", "http://127.0.0.1:9")
    unreachable = run_test_pipeline(tmp_path, *settings)
    assert list(unreachable.results) == ["prepare_data", "sft", "evaluate", "export"]
    assert not unreachable.ok
    assert "model_version" not in unreachable.results["sft"].summary
    table = unreachable.format_table(width=200)
    assert "promote: not decided: only the tracking store knows the champion" in table
    sync = f"`posttrain store sync --output {tmp_path}` or the next run delivers them"
    assert "1 model version and" in table and sync in table
    assert [record.status for record in list_recorded_runs(tmp_path)] == ["postponed"]
    assert RunReader(tmp_path).load_run("").status == "postponed"
    assert main(["store", "sync", "--output", str(tmp_path)]) == 1
    assert "1 model version and" in capsys.readouterr().out

    monkeypatch.delenv("MLFLOW_TRACKING_URI")
    repeated = run_test_pipeline(tmp_path, *settings)
    assert repeated.ok and repeated.results["promote"].summary["model_version"] == 1
    assert all(repeated.results[stage].cached for stage in unreachable.results)
    tracking = Tracking(None, tmp_path, "test")
    assert tracking.find_champion("test").version == 1 and len(tracking.list_versions("test")) == 1
    parents = [row for row in tracking.list_runs() if row.parent_run_id is None]
    assert [row.status for row in parents] == ["FINISHED"] and len(tracking.list_runs()) == 6
    assert [record.status for record in list_recorded_runs(tmp_path)] == ["finished"]
    assert (
        "postponed" not in parents[0].tags and RunReader(tmp_path).load_run("").status == "finished"
    )
    assert main(["store", "sync", "--output", str(tmp_path)]) == 0
    assert "has everything" in capsys.readouterr().out
