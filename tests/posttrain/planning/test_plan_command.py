"""`posttrain check plan --simulate`: shares of GPUs, numbers of workers, rates from a file or from a finished stage."""

import json
import re
import shutil

import pytest

from flows.runtime import terminal
from posttrain.cli.main import main
from posttrain.planning.layout_comparison import (
    compare_gpu_shares,
    compare_worker_counts,
    split_gpus,
)
from posttrain.planning.simulation_inputs import ClusterLayout, estimate_cluster_rates
from rl_core.errors import DataError, SettingsError
from rl_core.settings.planning import ClusterRates, LogNormalSpread
from rl_core.storage.folders import seal_folder
from tasks.config import build_settings, dump_settings

RATES = "{step_seconds: 1, row_seconds: 0, load_seconds: 0, update_seconds: 4, token_seconds: 0, tokens: {mean: 10}}"
CONFIG = """
name: planned
stages:
  policy: {prompts_per_iteration: 4, group_size: 2}
"""


@pytest.fixture
def folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "mine.yaml").write_text(CONFIG)
    (tmp_path / "rates.yaml").write_text(RATES)
    return tmp_path


def run_plan(capsys, *arguments):
    assert main(["check", "plan", "mine.yaml", "--simulate", *arguments]) == 0
    return capsys.readouterr().out


def test_workers_of_a_file_of_rates(folder, capsys):
    """Play rollouts of 10 s (with two workers: two tasks in sequence) and updates of 4 s.

    At bound 1 two runs begin together.
    """
    document = json.loads(
        run_plan(
            capsys, "--rates", "rates.yaml", "--workers", "1,2", "--staleness", "0,1", "--json"
        )
    )
    rows = {(row["workers"], row["max_staleness"]): row for row in document["layouts"]}
    assert {key: row["iteration_seconds"] for key, row in rows.items()} == {
        (1, 0): 14,
        (1, 1): 7,
        (2, 0): 24,
        (2, 1): 7,
    }
    assert rows[1, 1]["speed_up"] == pytest.approx(2) and rows[2, 0]["speed_up"] == pytest.approx(
        14 / 24
    )
    text = run_plan(capsys, "--rates", "rates.yaml", "--workers", "1", "--staleness", "0,1")
    assert (
        "fastest: 1 worker, 1 trainer, max_staleness 1: 2.00 times" in text
        and "rates: rates.yaml" in text
    )


def test_shares_of_gpus(folder, capsys):
    text = run_plan(capsys, "--rates", "rates.yaml", "--gpus", "4", "--staleness", "1")
    assert "4 GPUs, 4 x 2 rollouts" in text and "the same" in text
    assert "fastest: 4 workers, which also train, synchronous: 1.00 times" in run_plan(
        capsys, "--rates", "rates.yaml", "--gpus", "4", "--staleness", "0"
    )


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--rates", "none.yaml"], "none.yaml"),
        (["--rates", "bad.yaml"], "bad.yaml:1: tokens.mean: "),
        (
            ["--rates", "tools.yaml"],
            "tools.yaml:1: tools: an episode of one action uses no tool; set turns",
        ),
        (
            ["--gpus", "1", "--rates", "rates.yaml"],
            "--gpus: 1: rollouts next to updates need at least 2",
        ),
        (
            ["--gpus", "10001", "--rates", "rates.yaml"],
            "--gpus: 10,001: at most 10,000 are simulated",
        ),
        (["--gpus", "4", "--workers", "2"], "--workers: --gpus compares shares of GPUs"),
        (["--gpus", "4", "--cores", "2"], "--cores: --gpus compares shares of GPUs"),
        (["--row-tokens", "9"], "--row-tokens: --simulate reads the lengths from --rates FILE"),
        (
            [],
            r"no finished policy stage of planned in .*outputs; run it once .* or name a file .* --rates",
        ),
    ],
)
def test_refusals_are_one_line(folder, capsys, arguments, message):
    (folder / "bad.yaml").write_text("{tokens: {mean: -3}}")
    (folder / "tools.yaml").write_text("{tools: {mean: 3}}")
    assert main(["check", "plan", "mine.yaml", "--simulate", *arguments]) == 2
    error = capsys.readouterr().err
    assert error.count("\n") == 1 and re.search(message, error), error


def test_options_of_the_simulation_alone_are_refused_without_it(folder, capsys):
    for option in ("--rates", "--workers", "--staleness", "--cores", "--iterations"):
        assert main(["check", "plan", "mine.yaml", option, "3"]) == 2
        assert f"{option}: needs --simulate" in capsys.readouterr().err


def test_less_staleness_is_named_if_it_is_nearly_as_fast(folder, capsys):
    """Hide rollouts of 10 s behind updates of 10 s: 20 s in turns, 10 s at any bound."""
    (folder / "rates.yaml").write_text(RATES.replace("update_seconds: 4", "update_seconds: 10"))
    text = run_plan(capsys, "--rates", "rates.yaml", "--workers", "1", "--staleness", "4,0,1")
    assert "fastest: 1 worker, 1 trainer, max_staleness 4: 2.00 times" in text
    assert (
        "nearly as fast with less staleness: 1 worker, 1 trainer, max_staleness 1: 2.00 times"
        in text
    )
    assert "1 worker, 4 x 2 rollouts" in text and "the others wait" not in text


def test_replayed_groups_are_reported(folder, capsys):
    """Take a bound of 1, updates of 1 s and rollouts of 1 to 1,000 s: the long ones are stale when they end."""
    rates = RATES.replace("update_seconds: 4", "update_seconds: 1").replace(
        "{mean: 10}", "{mean: 50, sigma: 2, most: 1000}"
    )
    (folder / "rates.yaml").write_text(rates)
    arguments = ["--rates", "rates.yaml", "--workers", "2", "--staleness"]
    text = " ".join(run_plan(capsys, *arguments, "1").split())
    (layout,) = json.loads(run_plan(capsys, *arguments, "1", "--json"))["layouts"]
    assert (
        f"of the fastest {layout['stale_groups']} groups became too old" in text
        and "besides 64 learned from" in text
    )
    assert "became too old" not in run_plan(capsys, *arguments, "0")


def test_idle_workers_are_reported(folder, capsys):
    text = run_plan(capsys, "--rates", "rates.yaml", "--workers", "5,8", "--staleness", "0,1")
    assert (
        "4 groups of rollouts in flight, at max_staleness 0, are all that 5 workers share" in text
    )
    one_prompt = ("--set", "stages.policy.prompts_per_iteration=1")
    text = run_plan(
        capsys, "--rates", "rates.yaml", "--workers", "5", "--staleness", "0", *one_prompt
    )
    assert "1 group of rollouts in flight, at max_staleness 0, is all that 5 workers share" in text


def test_a_plan_without_a_policy_or_a_kind_is_refused(folder, capsys):
    (folder / "mine.yaml").write_text("name: planned\nstages: {sft: {}}\n")
    assert (
        main(["check", "plan", "mine.yaml", "--simulate", "--set", "stages.prepare_data={}"]) == 2
    )
    assert "no policy stage" in capsys.readouterr().err
    assert main(["check", "plan", "mine.yaml", "--gpus", "4"]) == 2


def test_gpus_are_split_into_at_least_one_of_each():
    assert [split_gpus(8, share) for share in (0.01, 0.5, 0.75, 1.0)] == [
        (1, 7),
        (4, 4),
        (6, 2),
        (7, 1),
    ]
    with pytest.raises(SettingsError, match="at least 2"):
        split_gpus(1, 0.5)


def test_the_baseline_of_shares_uses_every_gpu_for_both():
    """Play 4 groups on 4 GPUs in 10 s, then train 80 tokens on 4 trainers in 20 s.

    On 2 + 2 GPUs: 10 + 40 s in turns, 40 s asynchronously.
    """
    rates = ClusterRates(
        step_seconds=1,
        row_seconds=0,
        update_seconds=0,
        token_seconds=1,
        load_seconds=0,
        tokens=LogNormalSpread(mean=10),
    )
    layout = ClusterLayout(prompts=4, group_size=2)
    comparisons = compare_gpu_shares(layout, rates, 4, staleness=(0, 1), shares=(0.5,))
    assert [comparison.run.iteration_s for comparison in comparisons] == [30, 50, 40]
    assert [comparison.speed_up for comparison in comparisons] == pytest.approx([1, 0.6, 0.75])
    (same,) = compare_worker_counts(layout, rates, (1,), staleness=(0,))
    assert same.speed_up == 1 and same.run is same.baseline


def finish_stage(folder, key, workers=1, **row):
    """Write a finished policy stage of four equal iterations of 4 x 2 rollouts."""
    open_folder = folder / "outputs" / "planned" / "stages" / "policy" / f"{key}.open"
    open_folder.mkdir(parents=True)
    lines = [json.dumps({"step": step, "time": 0, "metrics": row}) for step in range(4)]
    (open_folder / "metrics.jsonl").write_text("\n".join(lines) + "\n")
    policy = {"prompts_per_iteration": 4, "group_size": 2}
    settings = dump_settings(
        build_settings(
            {"name": "planned", "stages": {"policy": policy}}, check_files=False
        ).stages.policy
    )
    settings["rollouts"]["count"] = workers
    seal_folder(open_folder, open_folder.with_suffix(""), extra={"settings": settings})


def test_rates_are_those_of_the_measured_batch(folder, capsys):
    """Measure 8 rollouts of 50 tokens in 16 s: 8 s are 160 ms a step, and 8 s are 20 ms a row.

    The plan has 4 groups of 8.
    """
    row = {
        "perf/rollout_seconds": 16.0,
        "perf/update_seconds": 8.0,
        "train/action_tokens": 50.0,
        "train/action_tokens_p10": 50.0,
        "train/action_tokens_p90": 50.0,
    }
    finish_stage(folder, "a", **row)
    arguments = [
        "--workers",
        "1",
        "--staleness",
        "0",
        "--set",
        "stages.policy.group_size=8",
        "--json",
    ]
    (layout,) = json.loads(run_plan(capsys, *arguments))["layouts"]
    assert layout["iteration_seconds"] == pytest.approx(50 * (0.16 + 32 * 0.02) + 32 * 50 * 0.02)
    finish_stage(folder, "b", workers=2, **row)
    assert (
        "policy/a" in json.loads(run_plan(capsys, *arguments))["rates"]
    )  # the older stage, since it had one worker
    shutil.rmtree(folder / "outputs" / "planned" / "stages" / "policy" / "a")
    assert main(["check", "plan", "mine.yaml", "--simulate"]) == 2
    assert (
        "no finished policy stage of planned in outputs with one synchronous worker"
        in capsys.readouterr().err
    )


def test_rates_of_a_finished_stage_by_hand():
    """Measure 8 rollouts of 100 tokens each: 6 s of decoding and 1.6 s of update.

    Half of the decoding is by rows (800), half by steps (100).
    """
    row = {
        "perf/rollout_seconds": 9.0,
        "perf/environment_seconds": 2.0,
        "perf/weight_sync_seconds": 1.0,
        "perf/update_seconds": 1.5,
        "perf/reward_seconds": 0.1,
        "train/action_tokens": 100.0,
        "train/action_tokens_p10": 100.0,
        "train/action_tokens_p90": 100.0,
    }
    slow = {**row, "perf/rollout_seconds": 60.0}
    rates = estimate_cluster_rates([(0, slow), (1, row), (2, row), (3, row)], 8, 512)
    assert rates.step_seconds == pytest.approx(3 / 100) and rates.row_seconds == pytest.approx(
        3 / 800
    )
    assert rates.token_seconds == pytest.approx(1.6 / 800) and rates.load_seconds == 1.0
    assert rates.tokens == LogNormalSpread(mean=100, sigma=0, most=512)
    wide = {**row, "train/action_tokens_p10": 50.0, "train/action_tokens_p90": 200.0}
    assert estimate_cluster_rates(
        [(0, row), (1, wide), (2, wide)], 8, 512
    ).tokens.sigma == pytest.approx(0.541)
    with pytest.raises(DataError, match="fewer than three iterations"):
        estimate_cluster_rates([(0, row), (1, row)], 8, 512)


def test_a_large_bound_is_simulated_beyond_the_batches_that_begin_together(folder, capsys):
    """Begin 17 batches at 0 and end them at 10: if updates take no time, an iteration takes 10/17 s, not none."""
    rates = RATES.replace("update_seconds: 4", "update_seconds: 0")
    (folder / "rates.yaml").write_text(rates)
    arguments = [
        "--rates",
        "rates.yaml",
        "--workers",
        "1",
        "--staleness",
        "0,16",
        "--set",
        "stages.policy.sampling.slots=512",
    ]
    _, asynchronous = json.loads(run_plan(capsys, *arguments, "--json"))["layouts"]
    assert asynchronous["iteration_seconds"] == pytest.approx(10 / 17)
    assert main(["check", "plan", "mine.yaml", "--simulate", *arguments, "--iterations", "18"]) == 2
    assert (
        "17 batches begin together" in (error := capsys.readouterr().err)
        and "simulate at least 83" in error
    )


@pytest.mark.parametrize("options", [("--workers", "1,2"), ("--gpus", "4")])
def test_progress_is_printed_apart_from_the_json(folder, capsys, monkeypatch, options):
    monkeypatch.setattr(terminal, "_LINE_INTERVAL_SECONDS", -1.0)
    assert (
        main(
            [
                "check",
                "plan",
                "mine.yaml",
                "--simulate",
                "--rates",
                "rates.yaml",
                *options,
                "--staleness",
                "0,1",
                "--json",
            ]
        )
        == 0
    )
    out, err = capsys.readouterr()
    lines = err.splitlines()
    assert (
        json.loads(out)["layouts"]
        and lines[0].startswith("layout 1 of ")
        and "max_staleness" in lines[0]
    )
    assert [line.split(":")[0] for line in lines] == [
        f"layout {n + 1} of {len(lines)}" for n in range(len(lines))
    ]
