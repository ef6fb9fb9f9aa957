"""`posttrain check profile`: time split checked by hand, shortened settings, and the record."""

import json
from types import SimpleNamespace

import pytest

from posttrain.cli.check_profile import (
    _resolve_profiled_stage,
    build_profile_record,
    compute_phase_times,
    format_profile_table,
    profile_stage,
    shorten_stage,
)
from rl_core.errors import SettingsError
from tasks.config import dump_settings, load_settings

WARM_UP = {"perf/step_seconds": 100.0, "perf/rollout_seconds": 90.0}
POLICY = {
    "perf/step_seconds": 10.0,
    "perf/rollout_seconds": 4.0,
    "perf/environment_seconds": 1.0,
    "perf/reward_seconds": 2.0,
    "perf/update_seconds": 3.5,
    "perf/reference_seconds": 0.5,
    "perf/measure_seconds": 0.25,
    "perf/optimizer_seconds": 2.5,
    "perf/tracking_seconds": 0.5,
    "perf/checkpoint_seconds": 1.0,
    "perf/tokens_per_second": 1000.0,
}


def compute_seconds(records):
    return {part.label: part.seconds for part in compute_phase_times(records)}


def test_every_second_is_in_one_part():
    records = [(1, WARM_UP), (2, POLICY), (2, {"perf/eval_seconds": 3.0}), (3, POLICY)]
    parts = compute_seconds(records)
    assert parts == pytest.approx(
        {
            "rollouts: decoding": 3.0,
            "rollouts: environment and tools": 1.0,
            "rewards": 2.0,
            "update: optimizer steps": 2.5,
            "update: reference log-probs": 0.5,
            "update: old log-probs and values": 0.25,
            "update: the rest": 0.25,
            "checkpoints": 1.0,
            "metrics to journal and history": 0.5,
            "validation": 1.5,
            "the rest: batches, statistics": 0.5,
        }
    )
    assert sum(parts.values()) == pytest.approx(10 + 0.5 + 1.0 + 1.5)
    phases = compute_phase_times(records)
    assert [part.seconds for part in phases] == sorted(
        (part.seconds for part in phases), reverse=True
    )
    assert sum(part.share for part in phases) == pytest.approx(1)


def test_a_stage_that_only_updates():
    step = {"perf/step_seconds": 2.0, "perf/optimizer_seconds": 1.5}
    assert compute_seconds([(1, WARM_UP), (2, step)]) == pytest.approx(
        {"update: optimizer steps": 1.5, "the rest: batches, statistics": 0.5}
    )


def test_the_table():
    text = format_profile_table("policy", [(1, WARM_UP), (2, POLICY)])
    assert "policy: 1 iterations after the first" in text and "1,000 tokens/s (median)" in text
    assert "rollouts: decoding" in text and "3.0000" in text
    assert "nothing to compare" in format_profile_table("policy", [(1, WARM_UP)])


@pytest.mark.parametrize("cached", [False, True])
def test_the_model_of_a_profile_is_not_left_as_the_newest_of_its_stage(
    tmp_path, monkeypatch, cached
):
    """Remove it; otherwise `diff sft policy` would take it for the policy."""
    folder = tmp_path / "stages/policy/0123456789abcdef"
    folder.mkdir(parents=True)
    rows = [{"step": step, "time": step, "metrics": {"perf/step_seconds": 2.0}} for step in (1, 2)]
    (folder / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    result = SimpleNamespace(results={"policy": SimpleNamespace(folder=str(folder), cached=cached)})
    monkeypatch.setattr("flows.single_stage.run_stage", lambda settings, name, quiet: result)
    records = profile_stage(load_settings("configs/demo.yaml"), "policy", 2)
    assert [step for step, _ in records] == [1, 2] and folder.exists() == cached


def test_the_record_of_a_profile():
    record = build_profile_record(
        "policy", [(1, WARM_UP), (2, POLICY), (3, {**POLICY, "perf/tokens_per_second": 2000.0})]
    )
    assert (record["stage"], record["iterations"]) == ("policy", 2)
    assert record["parts"][0] == {
        "label": "rollouts: decoding",
        "seconds": 3.0,
        "share": pytest.approx(3.0 / 11.5),
    }
    assert record["medians"] == {"perf/tokens_per_second": 1500.0}
    assert build_profile_record("policy", [(1, WARM_UP)])["parts"] == []


def test_shortened_settings_are_valid_and_make_no_version_of_the_real_model():
    settings = load_settings("configs/demo.yaml")
    short = shorten_stage(settings, "policy", 5)
    assert short.stages.policy.iterations == 5 and len(short.stages.policy.curriculum) <= 1
    assert (
        short.stages.sft == settings.stages.sft
        and short.stages.reward_model == settings.stages.reward_model
    )
    assert short.tracking.registered_model == "demo-profile"
    from tasks.config import build_settings

    for name in ("policy", "sft", "reward_model"):
        changed = shorten_stage(settings, name, 5)
        assert (
            build_settings(dump_settings(changed)) == changed
        )  # passes every check of a configuration
    for config in ("maze", "thoughts", "dpo"):
        last = {"maze": "policy", "thoughts": "thoughts", "dpo": "preference"}[config]
        changed = shorten_stage(load_settings(f"configs/{config}.yaml"), last, 5)
        assert build_settings(dump_settings(changed)) == changed


def test_a_shortened_stage_never_stops_early():
    settings = load_settings("configs/thoughts.yaml")
    assert (
        settings.stages.thoughts.patience is not None and settings.stages.thoughts.require_genuine
    )
    short = shorten_stage(settings, "thoughts", 5).stages.thoughts
    assert short.patience is None and not short.require_genuine and short.iterations == 5
    assert shorten_stage(load_settings("configs/demo.yaml"), "sft", 7).stages.sft.max_steps == 7


def test_unknown_stages(tmp_path):
    settings = load_settings("configs/dpo.yaml")
    with pytest.raises(SettingsError, match="no stage 'policy' to profile, only sft, preference"):
        _resolve_profiled_stage("policy", settings)
    assert (
        _resolve_profiled_stage(None, settings) == "preference"
        and _resolve_profiled_stage("sft", settings) == "sft"
    )
