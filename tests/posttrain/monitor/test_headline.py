"""Top of the live page: results, alarms, and settings that differ, checked by hand."""

from types import SimpleNamespace

from posttrain.monitor.charts import (
    MISSING_VALUE,
    PageSelection,
    build_hint,
    build_metric_cell,
    find_label,
    format_metric_value,
)
from posttrain.monitor.overview_views import (
    build_alarm_notes,
    build_environment_chart,
    build_environment_table,
    build_headline_tiles,
    build_settings_diff_table,
)
from posttrain.monitor.runs import RunView, StageView
from posttrain.monitor.series import MetricSeriesTable
from posttrain.monitor.views import build_stage_table


def build_stage(label, *, note="", **metrics):
    table = MetricSeriesTable()
    for name, values in metrics.items():
        for step, value in enumerate(values, 1):
            table.add_row(
                {"step": step, "time": step * 1000, "metrics": {name.replace("__", "/"): value}}
            )
    return StageView(label, "finished", result=note, table=table)


def build_run(*stages, status="finished", config=None):
    return RunView("demo/x", "demo", "x", status, stages=list(stages), config=config or {})


EVALUATED = build_stage(
    "evaluate", eval__sft__success_rate=[0.5], eval__policy__success_rate=[0.75]
)


def test_tiles_of_a_finished_run():
    tiles = build_headline_tiles(
        build_run(
            build_stage("sft"),
            build_stage("policy"),
            EVALUATED,
            build_stage("promote", note="version 2 promoted"),
        ),
        None,
    )
    items = [(item["label"], item["value"], item["sub"]) for item in tiles["items"]]
    assert items == [
        ("sft", "50.0%", "success, held out"),
        ("policy", "75.0%", "+25.0 points over sft"),
        ("champion", "promoted", "version 2 promoted"),
    ]
    note = "version 2 of demo promoted: no champion yet; success 75% is at least 50%"
    (decision,) = build_headline_tiles(
        build_run(build_stage("sft"), EVALUATED, build_stage("promote", note=note)), None
    )["items"][-1:]
    assert (decision["sub"], decision["title"]) == (
        "version 2 of demo promoted: no champion yet",
        note,
    )
    for note in ("version 2 of demo not promoted: worse", "version 2 of demo rejected: worse"):
        refused = build_headline_tiles(
            build_run(build_stage("sft"), EVALUATED, build_stage("promote", note=note)), None
        )
        assert refused["items"][-1]["value"] == "not promoted"
    awaiting = build_stage(
        "promote",
        note="version 2 of demo awaiting approval: no champion yet; success 75% is at least 50%",
    )
    waiting_tile = build_headline_tiles(
        build_run(build_stage("sft"), EVALUATED, awaiting, status="waiting"), None
    )["items"][-1]
    assert waiting_tile["value"] == "waits for approval"
    note = "version 2 of demo is the champion already (version 2 of demo promoted: approved by ada)"
    repeated = build_headline_tiles(
        build_run(build_stage("sft"), EVALUATED, build_stage("promote", note=note)), None
    )
    assert repeated["items"][-1]["value"] == "champion already"


def test_tiles_of_a_training_run():
    rates = [0.25] * 10 + [0.5] * 10
    policy = build_stage(
        "policy", train__success_rate=rates, reward__mean=[1.0] * 20, train__loss=[3.0] * 20
    )
    policy.seconds_left = 75.0
    tiles = build_headline_tiles(build_run(policy, status="running"), policy)
    items = [(item["label"], item["value"], item["sub"]) for item in tiles["items"]]
    assert items == [
        ("success", "50.0%", "+25.0 points since the start"),
        ("reward", "1.000", "+0 since the start"),
        ("left in this stage", "1 min 15 s", ""),
    ]
    assert build_headline_tiles(build_run(status="running"), None) is None


def test_entropy_replaces_a_kl_that_is_zero_by_definition():
    def list_tiles(**metrics):
        tiles = build_headline_tiles(
            build_run(build_stage("policy"), status="running"),
            build_stage("policy", reward__mean=[1.0], **metrics),
        )
        return [(item["label"], item["value"]) for item in tiles["items"][1:]]

    assert list_tiles(policy__update_kl=[0.0, 0.0], policy__entropy=[0.5, 0.5]) == [
        ("entropy", "0.500")
    ]
    assert list_tiles(policy__update_kl=[0.0, 0.5], policy__entropy=[0.5, 0.5]) == [("KL", "0.250")]
    assert list_tiles(policy__update_kl=[0.1], policy__ref_kl=[0.75], policy__entropy=[0.5]) == [
        ("KL", "0.750")
    ]


def test_reward_alarm_is_shown_while_active():
    (note,) = build_alarm_notes(build_run(build_stage("policy", reward__alarm=[0.0, 0.0, 1.0])))
    assert note["tone"] == "bad" and "Since step 3" in note["lines"][1]
    assert build_alarm_notes(build_run(build_stage("policy", reward__alarm=[0.0, 1.0, 0.0]))) == []
    (note,) = build_alarm_notes(
        build_run(build_stage("policy", reward__alarm=[1.0, 0.0, 1.0, 1.0]))
    )
    assert "Since step 3 " in note["lines"][1]


def test_alert_conditions_are_shown_while_true():
    conditions = {"policy/ref_kl": "> 0.5", "train/success_rate": "< 0.1", "policy/entropy": "> 9"}
    config = {"tracking": {"alerts": conditions}}
    kl = [0.1, 0.6, 0.75]
    notes = build_alarm_notes(
        build_run(
            build_stage("policy", policy__ref_kl=kl, train__success_rate=[0.0, 0.2]), config=config
        )
    )
    assert [(note["tone"], *note["lines"]) for note in notes] == [
        (
            "bad",
            "Stage policy: KL to the reference is 0.750.",
            "Since step 2 policy/ref_kl is > 0.5 (tracking.alerts).",
        )
    ]
    recovered = build_stage("policy", policy__ref_kl=[0.6, 0.2])
    assert (
        build_alarm_notes(build_run(recovered, config=config)) == []
        and build_alarm_notes(build_run(build_stage("policy", policy__ref_kl=kl))) == []
    )


def test_settings_of_compared_runs_that_differ():
    first = build_run(
        config={"seed": 0, "output": "a", "stages": {"policy": {"lr": 0.1}, "sft": None}}
    )
    second = build_run(config={"seed": 0, "output": "b", "stages": {"policy": {"lr": 0.2}}})
    pairs = [(first, SimpleNamespace()), (second, SimpleNamespace())]
    assert build_settings_diff_table(pairs)["rows"] == [
        ["stages.policy.lr", "0.1", "0.2"],
        ["stages.sft", "None", "-"],
    ]
    assert (
        build_settings_diff_table(pairs[:1]) is None
        and build_settings_diff_table([pairs[0], pairs[0]]) is None
    )


def test_metric_labels_and_hints():
    assert find_label("train/success_rate_by_level/very_hard") == "Success in training, very hard"
    assert (
        find_label("reward/learned") == "Reward, learned"
        and find_label("reward/learned/score") == "reward/learned/score"
    )
    assert (
        find_label("perf/reward_seconds") == "Time: reward"
        and find_label("perf/step_seconds") == "Iteration"
    )
    assert build_hint("train/success_rate").startswith(
        "train/success_rate: Rollouts that the environment counts as solved."
    )
    assert "\nWorry: Near 0: nothing to learn from." in build_hint("reward/std")
    assert build_hint("train/success_rate_by_level/easy").startswith(
        "train/success_rate_by_level/easy: Success of one"
    )
    assert (
        build_hint("reward/correlation/a") != build_hint("reward/a")
        and build_hint("mine/x") == "mine/x"
    )
    assert (
        build_metric_cell("mine/x") == "mine/x"
        and build_metric_cell("reward/std")["t"] == "Spread of rewards"
    )


def test_only_shares_are_percentages():
    shares = (
        "train/success_rate",
        "train/success_rate_by_level/easy",
        "eval/policy/success_rate_low",
        "tool/share/zoom",
    )
    assert [format_metric_value(name, 0.25) for name in shares] == ["25.0%"] * 4
    assert [
        format_metric_value(name, 0.25) for name in ("reward/mean", "policy/entropy", "mine/x")
    ] == ["0.250"] * 3


def test_the_start_model_has_a_tile_and_its_evaluation_a_success():
    """It is no stage of the run; its own evaluation is named after it."""
    start = build_stage("evaluate_base", eval__base__success_rate=[0.25])
    played = build_stage(
        "evaluate", eval__base__success_rate=[0.25], eval__policy__success_rate=[0.75]
    )
    run = build_run(build_stage("policy"), start, played)
    items = build_headline_tiles(run, None)["items"]
    assert [(item["label"], item["value"], item["sub"]) for item in items] == [
        ("base", "25.0%", "the start model, held out"),
        ("policy", "75.0%", "+50.0 points over base"),
    ]
    rows = build_stage_table(run)["rows"]
    assert [(row[0], row[5]) for row in rows] == [
        ("policy", "75.0%"),
        ("evaluate base", "25.0%"),
        ("evaluate", ""),
    ]


def test_a_mixture_has_a_table_and_curves_by_environment():
    policy = StageView("policy", "finished")
    for step, (share, sums, grid, reward) in enumerate(
        [(0.25, 0.5, 0.0, 1.0), (0.75, 0.7, 0.2, 3.0)], 1
    ):
        metrics = {
            "train/rollout_share_by_environment/sums": share,
            "train/rollout_share_by_environment/grid": 1 - share,
            "train/success_rate_by_environment/sums": sums,
            "train/success_rate_by_environment/grid": grid,
            "reward/mean_by_environment/sums": reward,
        }
        policy.table.add_row({"step": step, "time": step * 1000, "metrics": metrics})
    evaluation = StageView("evaluate", "finished")
    rates = {"sft": {"sums": 0.25}, "policy": {"sums": 0.5, "grid": 1.0}}
    evaluation.table.add_row(
        {
            "step": 0,
            "time": 1,
            "metrics": {
                f"eval/{model}/success_rate_by_environment/{label}": rate
                for model, values in rates.items()
                for label, rate in values.items()
            },
        }
    )
    run = build_run(build_stage("sft"), policy, evaluation)
    table = build_environment_table(run, [(run, policy)], PageSelection(window=10))
    heads = [column["t"] for column in table["columns"]]
    assert heads[4:] == ["sft, held out", "policy, held out"]
    # Means of both iterations: share 0.5, success 0.6 and 0.1, reward 2.
    assert table["rows"] == [
        ["grid", "50.0%", "10.0%", MISSING_VALUE, MISSING_VALUE, "100.0%"],
        ["sums", "50.0%", "60.0%", "2.000", "25.0%", "50.0%"],
    ]
    chart = build_environment_chart([(run, policy)], PageSelection(window=1))
    assert [line["name"] for line in chart["lines"]] == ["grid", "sums"]
    plain = build_run(build_stage("sft"), EVALUATED)
    assert build_environment_table(plain, [(plain, plain.stages[0])], PageSelection()) is None
    assert build_environment_chart([(plain, plain.stages[0])], PageSelection()) is None
