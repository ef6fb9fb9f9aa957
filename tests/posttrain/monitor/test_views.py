"""Content of the page, from handmade runs."""

import csv
import dataclasses
import io
import json
import os
import threading

import pytest
from helpers.adapters import fakes
from helpers.monitor_runs import EPISODES, START, make_run, write_lines

from posttrain.monitor import views
from posttrain.monitor.charts import DrawingOptions, PageSelection, build_move_marks, find_unit
from posttrain.monitor.episodes import (
    EpisodeImages,
    list_episode_files,
    read_episodes,
    summarize_reward_components,
    summarize_tool_calls,
)
from posttrain.monitor.export import (
    export_run,
    format_metrics_csv,
    format_run_json,
    format_stages_csv,
)
from posttrain.monitor.overview_views import compute_slope
from posttrain.monitor.page_responses import build_address, parse_selection
from posttrain.monitor.reader import RunReader
from posttrain.monitor.runs import RunView, StageView
from posttrain.monitor.series import MetricSeries
from posttrain.monitor.views import (
    TAB_BUILDERS,
    _has_variation,
    build_overview_tab,
    build_view,
    group_metrics_by_prefix,
)
from rl_core.environments import make_environment
from rl_core.environments.pixel_grid_questions import encode_png
from rl_core.errors import DataError


def build_blocks(output, tab, **choice):
    view = build_view(RunReader(output), PageSelection(**choice), tab)
    json.dumps(view, allow_nan=False)  # must be valid JSON for the browser
    return {block["id"]: block for block in view["blocks"]}


def index_charts(block):
    return {chart["title"]: chart for chart in block["charts"]}


def read_texts(block):
    return [
        [cell["t"] if isinstance(cell, dict) else cell for cell in row] for row in block["rows"]
    ]


@pytest.mark.parametrize("tab", TAB_BUILDERS)
def test_every_tab_can_be_drawn_for_every_kind_of_folder(tmp_path, tab):
    for name, prepare in (
        ("empty", lambda folder: folder.mkdir()),
        ("none", lambda folder: None),
        ("run", make_run),
        ("ended", lambda folder: make_run(folder, status="FAILED")),
    ):
        prepare(tmp_path / name)
        assert build_blocks(tmp_path / name, tab)
    parent = tmp_path / "begun/demo/runs/2027-01-15-08-00-00/.tracking"
    write_lines(
        parent / "events.jsonl", [{"op": "start", "time": START * 1000, "name": "demo · x"}]
    )
    assert build_blocks(tmp_path / "begun", tab)


def test_empty_folder_says_what_to_do(tmp_path):
    view = build_view(RunReader(tmp_path), PageSelection(), "overview")
    assert "$ posttrain run demo" in view["blocks"][0]["lines"]
    assert view["head"]["status"] == "no run"


def test_overview_lists_every_stage(tmp_path):
    make_run(tmp_path, status="KILLED")
    blocks = build_blocks(tmp_path, "overview", window=2)
    assert read_texts(blocks["stages"]) == [
        ["sft", "finished", "4 / 4", "9.0 s", "", "", "100", "4 steps"],
        ["policy", "stopped", "5 / 10", "1 min 29 s", "", "60.0%", "", ""],
        ["evaluate", "not run", "", "", "", "", "", ""],
    ]
    chart = index_charts(blocks["headlines"])["train/success_rate"]
    (line,) = chart["lines"]
    assert line["y"] == [0.2, 0.4, 0.6, 0.8, 1.0]
    assert line["avg"] == pytest.approx([0.2, 0.3, 0.5, 0.7, 0.9])
    assert (line["last"], chart["unit"], chart["x"], chart["range"]) == (
        pytest.approx(0.9),
        "",
        "iteration",
        [0, 1],
    )
    assert index_charts(blocks["load"])["CPU of the run"]["lines"][0]["x"] == pytest.approx(
        [0, 5 / 60, 10 / 60], abs=1e-6
    )


def test_header_of_a_running_run(tmp_path):
    make_run(tmp_path)
    head = build_view(RunReader(tmp_path), PageSelection(), "overview")["head"]
    assert head["status"] == "running" and head["live"] and head["fraction"] == 0.5
    assert head["now"] == "policy · 5 of 10 · reward/mean 0.5"
    assert head["left"] == pytest.approx(10.0)


def test_killed_run_has_a_warning_on_top(tmp_path):
    make_run(tmp_path, pid=2**30)
    view = build_view(RunReader(tmp_path), PageSelection(), "tools")
    assert view["head"]["status"] == "killed"
    assert view["blocks"][0]["lines"][0] == "This run was killed."
    assert "no longer exists" in view["blocks"][0]["lines"][1]
    os.utime(tmp_path / "demo/stages/policy/bbbb.tracking/metrics.jsonl", (START + 51, START + 51))
    os.utime(
        tmp_path / "demo/stages/policy/bbbb.tracking/.tracking/events.jsonl",
        (START + 11, START + 11),
    )
    rows = read_texts(build_blocks(tmp_path, "overview")["stages"])
    assert [row[3] for row in rows] == [
        "9.0 s",
        "40 s",
        "",
    ]  # the killed stage lasts up to its last record


def test_curves_are_grouped_and_searched_by_name_and_label(tmp_path):
    make_run(tmp_path)
    blocks = build_blocks(tmp_path, "curves")
    groups = [
        (block["title"], list(index_charts(block)))
        for block in blocks.values()
        if block["kind"] == "charts"
    ]
    assert groups == [("Training", ["train/success_rate"]), ("Reward", ["reward/mean"])]
    # The search overrides groups and single metrics; all words count, in the raw name or the label.
    for search, titles in (
        ("REW mean", ["reward/mean"]),
        ("success in", ["train/success_rate"]),
        ("curriculum/", ["curriculum/stage", "curriculum/watched"]),
    ):
        blocks = build_blocks(
            tmp_path, "curves", search=search, metrics=("reward/mean",), groups=("tool",)
        )
        charts = [block for block in blocks.values() if block["kind"] == "charts"]
        assert [title for block in charts for title in index_charts(block)] == titles
    blocks = build_blocks(tmp_path, "curves", search=" nothing <b> ")
    assert blocks["nothing"]["lines"] == ["No metric's name contains 'nothing <b>'."]


def test_the_search_is_part_of_the_address(tmp_path):
    make_run(tmp_path)
    choice = parse_selection(RunReader(tmp_path), {"search": "x" * 500})
    assert choice.search == "x" * 200 and build_address(choice)["search"] == "x" * 200


def test_curves_by_prefix_by_name_and_over_time(tmp_path):
    make_run(tmp_path)
    blocks = build_blocks(tmp_path, "curves", groups=("reward",))
    assert list(index_charts(blocks["curves reward"])) == ["reward/mean"]
    assert read_texts(blocks["single"]) == [["Alarm: reward hacking", "0.0000"]]  # it never changed
    blocks = build_blocks(
        tmp_path,
        "curves",
        groups=("reward",),
        metrics=("train/success_rate",),
        by_time=True,
        window=1,
    )
    chart = index_charts(blocks["curves train"])["train/success_rate"]
    assert chart["x"] == "minutes since the run began"
    assert chart["lines"][0]["x"] == pytest.approx(
        [(11 + 2 * i) / 60 for i in range(1, 6)], rel=1e-5
    )
    assert "avg" not in chart["lines"][0]
    assert list(index_charts(build_blocks(tmp_path, "curves", stage="sft")["curves train"])) == [
        "train/loss"
    ]
    reader = RunReader(tmp_path)
    known = group_metrics_by_prefix(reader.load_run(""), "policy")
    assert list(known) == ["curriculum", "reward", "tool", "train"]


def test_compared_runs_are_overlaid(tmp_path):
    make_run(tmp_path, status="FINISHED")
    make_run(tmp_path, name="other", status="FINISHED", begun=START + 5)
    blocks = build_blocks(
        tmp_path,
        "curves",
        run="other/2027-01-15-08-00-00",
        compare=("demo/2027-01-15-08-00-00", "missing"),
    )
    lines = index_charts(blocks["curves reward"])["reward/mean"]["lines"]
    assert [(line["name"], line["colour"]) for line in lines] == [
        ("01-15 08:00", 0),
        ("demo 01-15 08:00", 1),
    ]


def test_curriculum_with_moves_and_current_condition(tmp_path):
    make_run(tmp_path)
    blocks = build_blocks(tmp_path, "curriculum")
    chart = index_charts(blocks["curriculum"])["Stage of the curriculum"]
    assert chart["names"] == ["easy", "hard"]
    assert chart["lines"][0]["y"] == [0, 0, 1, 1, 0]
    assert chart["marks"] == [
        {"x": 2.0, "label": "hard", "kind": ""},
        {"x": 4.0, "label": "rollback to easy", "kind": "rollback"},
    ]
    assert read_texts(blocks["plan"])[0] == [
        "easy",
        "now",
        "easy 75%, hard 25%",
        "success_rate >= 0.75 over 2",
    ]
    assert read_texts(blocks["moves"])[0][:5] == ["4", "rollback", "hard", "easy", "0.1 below 0.6"]
    tiles = {item["label"]: item["value"] for item in blocks["where"]["items"]}
    assert (tiles["advances"], tiles["rollbacks"]) == ("1", "1")
    (watched,) = index_charts(blocks["curriculum"])["Decides: watched for a rollback"]["lines"]
    assert (watched["name"], watched["y"]) == (
        "watched for a rollback",
        [0.25, 0.5, 0.75, 1.0, 1.25],
    )
    run = RunReader(tmp_path).load_run("")
    assert [
        mark["x"]
        for mark in build_move_marks(run.find_stage("policy"), DrawingOptions(by_time=True), START)
    ] == pytest.approx([0.25, 19 / 60])


def test_trajectories_turn_by_turn(tmp_path):
    make_run(tmp_path)
    blocks = build_blocks(tmp_path, "trajectories")
    wrong, right = blocks["episodes"]["rows"]  # newest first
    assert (wrong["prompt"], wrong["success"], right["success"]) == (
        "<b>2nd</b></script>",
        False,
        True,
    )
    assert [turn["error"] for turn in wrong["turns"]] == [True, True, False]
    assert right["turns"][0]["call"] == "calls zoom(row=1, column=1)"
    assert right["sub"] == "after 4 iterations · easy · digit · 2 turns · reward 1.000"
    assert dict(map(tuple, wrong["facts"]))["its answer"] == "none"
    assert (
        dict(map(tuple, right["facts"]))["replay it"]
        == f"posttrain replay policy/4/easy/7/0 --output {tmp_path}"
    )
    assert "level=easy&seed=7" in right["image"]
    rows = build_blocks(tmp_path, "trajectories", outcome="right")["episodes"]["rows"]
    assert [row["success"] for row in rows] == [True]
    assert [
        row["success"]
        for row in build_blocks(tmp_path, "trajectories", outcome="with misuse")["episodes"]["rows"]
    ] == [0]


def test_trajectories_of_unknown_success(tmp_path):
    make_run(tmp_path)
    (path,) = list_episode_files(RunReader(tmp_path).load_run("")).values()
    rows = [row | {"success": None} for row in reversed(read_episodes(path))]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    shown = build_blocks(tmp_path, "trajectories")["episodes"]["rows"]
    assert [row["success"] for row in shown] == [None, None]
    assert {row["success_rate"] for row in summarize_tool_calls(read_episodes(path))} == {None}
    for outcome in ("right", "wrong"):
        block = build_blocks(tmp_path, "trajectories", outcome=outcome)["nothing"]
        assert f"is {outcome}: whether one is right is unknown" in block["lines"][0]


def test_tools_by_hand(tmp_path):
    make_run(tmp_path)
    (path,) = list_episode_files(RunReader(tmp_path).load_run("")).values()
    assert summarize_tool_calls(read_episodes(path)) == [
        {
            "tool": "zoom",
            "calls": 3,
            "per_episode": 1.5,
            "share_of_episodes": 1.0,
            "error_rate": pytest.approx(1 / 3),
            "success_rate": 0.5,
        },
        {
            "tool": "(no tool understood)",
            "calls": 1,
            "per_episode": 0.5,
            "share_of_episodes": 0.5,
            "error_rate": 1.0,
            "success_rate": 0.0,
        },
    ]


def test_reward_components_by_hand(tmp_path):
    def row(success, task, length, masked=False):
        return {
            "success": success,
            "reward": task + length,
            "masked": masked,
            "rewards": {
                "task": task,
                "weighted/task": task,
                "length": 10 * length,
                "weighted/length": length,
            },
        }

    path = tmp_path / "rewards.jsonl"
    write_lines(
        path,
        [
            row(True, 1.0, -0.2),
            row(False, 0.0, 0.0),
            row(True, 1.0, -0.2),
            row(False, 0.0, 0.0),
            row(True, 9.0, 9.0, masked=True),
        ],
        torn='{"success"',
    )
    count, table = summarize_reward_components(path)
    parts = {row.pop("part"): row for row in table}
    assert count == 4
    assert parts["total"]["weighted"] == pytest.approx(0.4) and parts["total"]["raw"] is None
    assert parts["length"] == {
        "raw": -1.0,
        "weighted": pytest.approx(-0.1),
        "on_success": pytest.approx(-0.2),
        "on_failure": 0.0,
        "correlation": pytest.approx(-1.0),
    }
    write_lines(tmp_path / "same.jsonl", [row(True, 1.0, 0.0)] * 3)
    assert (
        summarize_reward_components(tmp_path / "same.jsonl")[1][0]["correlation"] is None
    )  # success does not vary
    assert summarize_reward_components(tmp_path / "none") == (0, [])


def test_images_of_shipped_environments_only():
    images = EpisodeImages()
    expected = encode_png(make_environment("pixel_grid").episode(7, "easy").image())
    assert images.render_png({"name": "pixel_grid", "options": {}}, "easy", 7) == expected
    for environment, level in (
        ({"name": "arithmetic"}, "easy"),
        ({"name": "os:path"}, "x"),
        ({}, "x"),
        ({"name": "pixel_grid", "options": {"no": 1}}, "easy"),
        ({"name": "pixel_grid"}, "none"),
    ):
        assert images.render_png(environment, level, 7) is None


def test_viewing_a_run_executes_no_code_of_its_settings(tmp_path, monkeypatch):
    monkeypatch.syspath_prepend(str(tmp_path))
    (tmp_path / "looked_at.py").write_text(
        f"import pathlib\npathlib.Path({str(tmp_path / 'ran')!r}).touch()\n"
    )
    with fakes("gymnasium"):
        for environment in (
            {"name": "gymnasium", "options": {"id": "looked_at:Env"}},
            {"name": "looked_at:Env"},
        ):
            assert EpisodeImages().render_png(environment, "default", 1) is None
    assert not (tmp_path / "ran").exists()


def test_version_changes_only_with_the_content(tmp_path):
    make_run(tmp_path, status="FINISHED")
    reader = RunReader(tmp_path)
    first, second = (build_view(reader, PageSelection(), "curves")["version"] for _ in range(2))
    assert first == second
    assert build_view(reader, PageSelection(window=2), "curves")["version"] != first


def test_broken_tab_does_not_break_the_page(tmp_path, caplog):
    home = make_run(tmp_path)
    path = home / "stages/policy/bbbb.open/recent_rollouts.jsonl"
    write_lines(path, [], torn="\n")  # ends the torn line
    write_lines(path, [{"turns": ["not a turn"]}])
    assert "AttributeError" in build_blocks(tmp_path, "tools")["nothing"]["lines"][0]
    assert build_blocks(tmp_path, "overview")["stages"]["rows"]


def test_the_speed_of_an_ended_stage_is_the_mean_over_its_time():
    stage = StageView("policy", "finished")
    for step, (speed, seconds) in enumerate([(100.0, 3.0), (1000.0, 1.0)]):
        stage.table.add_row(
            {
                "step": step,
                "time": 0,
                "metrics": {"perf/tokens_per_second": speed, "perf/step_seconds": seconds},
            }
        )
    assert views._format_speed(stage) == "325"  # 1,300 tokens in 4 s, as in the terminal's table
    assert views._format_speed(dataclasses.replace(stage, status="running")) == "550"


def test_units():
    assert find_unit("train/learning_rate") == "" and find_unit("tool/misuse_rate") == "share"
    assert (
        find_unit("perf/tokens_per_second")
        == "tokens/s"
        == find_unit("perf/rollout_tokens_per_second")
    )
    assert find_unit("policy/kl_coef") == "" and find_unit("policy/update_kl") == "nats per token"


def test_export_contains_every_value(tmp_path):
    make_run(tmp_path / "out")
    run = RunReader(tmp_path / "out").load_run("")
    paths = export_run(run, tmp_path / "files")
    assert [path.name for path in paths] == ["metrics.csv", "stages.csv", "run.json"]
    rows = list(csv.DictReader(io.StringIO("".join(format_metrics_csv(run)))))
    rewards = [
        (int(r["step"]), float(r["time"]), float(r["value"]))
        for r in rows
        if r["metric"] == "reward/mean"
    ]
    assert rewards == [(i, START + 11 + 2.0 * i, 0.1 * i) for i in range(1, 6)]
    assert len(rows) == 4 * 2 + 5 * 6
    summary = json.loads(format_run_json(run))
    assert summary["stages"][1]["metrics"]["reward/mean"]["last"] == pytest.approx(0.5)
    assert summary["settings"]["environment"]["name"] == "pixel_grid"
    assert next(csv.DictReader(io.StringIO(format_stages_csv(run))))["result"] == "4 steps"
    assert next(csv.reader(io.StringIO(format_stages_csv(run)))) == [
        "run",
        "stage",
        "status",
        "started",
        "ended",
        "done",
        "total",
        "seconds_left",
        "result",
    ]
    (tmp_path / "file").write_text("")
    with pytest.raises(DataError, match="--export"):
        export_run(run, tmp_path / "file")
    assert len(EPISODES) == 2


def test_export_skips_unreadable_lines(tmp_path):
    home = make_run(tmp_path)
    path = home / "stages/sft/aaaa.tracking/metrics.jsonl"
    path.write_text("no json\n" * 300_000 + path.read_text())  # more than one read
    rows = list(
        csv.DictReader(io.StringIO("".join(format_metrics_csv(RunReader(tmp_path).load_run("")))))
    )
    assert [row["value"] for row in rows if row["metric"] == "train/loss"] == [
        "2.0",
        "1.0",
        str(2 / 3),
        "0.5",
    ]


def test_rounding_differences_get_no_chart():
    def build_series(*values):
        series = MetricSeries()
        for step, value in enumerate(values):
            series.add_observation(step, step, value)
        return series

    assert (
        not _has_variation(build_series(1.0, 1.0 - 1e-16, 1.0))
        and not _has_variation(build_series(-1e-17, 3e-17))
        and not _has_variation(build_series(2))
    )
    assert _has_variation(build_series(1e-5, 2e-5)) and _has_variation(build_series(1e6, 1e6 + 1))


def test_curves_of_another_scale_get_a_separate_chart(tmp_path):
    home = make_run(tmp_path, status="FINISHED")
    parts = {"reward/mean": 1.0, "reward/task": 0.9, "reward/format": 0.5, "reward/length": -64.0}
    rows = [{"step": step, "time": 1000 * step, "metrics": parts} for step in range(6, 9)]
    write_lines(home / "stages/policy/bbbb.tracking/metrics.jsonl", rows)
    raw_charts = [
        chart
        for title, chart in index_charts(build_blocks(tmp_path, "rewards")["rewards"]).items()
        if "Raw" in title
    ]
    assert [[line["name"] for line in chart["lines"]] for chart in raw_charts] == [
        ["format", "task"],
        ["length"],
    ]


def test_nothing_moves_when_a_run_is_compared(tmp_path):
    """The table of settings comes last, a legend stays one line, and markers do not move."""
    make_run(tmp_path, status="FINISHED")
    compared_chart = make_run(tmp_path, name="other", status="FINISHED")
    for path in compared_chart.glob("runs/*/.tracking/events.jsonl"):
        path.write_text(path.read_text().replace('\\"epochs\\": 1', '\\"epochs\\": 2'))
    single, compared = (
        build_view(
            RunReader(tmp_path),
            PageSelection(run="demo/2027-01-15-08-00-00", compare=compare),
            "overview",
        )["blocks"]
        for compare in ((), ("other/2027-01-15-08-00-00",))
    )
    assert [block["id"] for block in compared] == [*(block["id"] for block in single), "settings"]
    for chart, compared_chart in zip(
        *(index_charts(blocks[2]).values() for blocks in (single, compared)), strict=True
    ):
        assert chart["marks"] == compared_chart["marks"] and chart["id"] == compared_chart["id"]
        assert (
            compared_chart.get("compares")
            or any(line.get("quiet") for line in compared_chart["lines"])
            or len(compared_chart["lines"]) == 1
        )


def test_resumed_stage_counts_the_time_of_all_processes(tmp_path):
    home = make_run(tmp_path, status="FINISHED")
    progress = {"done": 5, "total": 10, "message": "", "time": START * 1000, "seconds": 30.0}
    for folder in (home / "stages/policy/bbbb.tracking", home / "runs/2027-01-15-08-00-00"):
        (folder / ".tracking/progress.json").write_text(json.dumps(progress))
    view = build_view(RunReader(tmp_path), PageSelection(), "overview")
    assert read_texts({block["id"]: block for block in view["blocks"]}["stages"])[1][3] == "30 s"
    assert view["head"]["elapsed"] == 30.0


def make_run_with_two_tools(output):
    """Make a run with two tools, one of them not called in every iteration, and three reward components."""
    home = make_run(output)
    rows = [
        {
            "step": step,
            "time": (START + 60 + step) * 1000,
            "metrics": {
                "tool/calls": 1.0,
                "tool/share/zoom": 1.0 if step % 2 else 0.5,
                "reward/weighted/task": 0.1 * step,
                "reward/weighted/tool_use": -0.2,
                "reward/weighted/my.module.brevity": 0.1,
                **({} if step % 2 else {"tool/share/scan": 0.5}),
            },
        }
        for step in range(6, 10)
    ]
    rows.append(
        {"step": 10, "time": (START + 70) * 1000, "metrics": {"tool/calls": 0.0}}
    )  # without shares
    path = home / "stages/policy/bbbb.tracking/metrics.jsonl"
    path.write_text(
        path.read_text().rpartition("\n")[0]
        + "\n"
        + "".join(json.dumps(row) + "\n" for row in rows)
    )
    return home


def test_metric_table(tmp_path):
    make_run(tmp_path)
    rows = {
        row[0]: row[1:] for row in read_texts(build_blocks(tmp_path, "curves", window=4)["present"])
    }
    # Success is 0.2 i in iterations 1 to 5: the newest 4 have mean 0.7 and rise by 0.2 per step.
    assert rows["Success in training"] == ["100.0%", "70.0%", "+20%", "5"]
    assert rows["Tool calls"] == ["1.0000", "1.0000", "+0", "5"] and len(rows) == 6
    assert not [name for name in rows if name.startswith("system/")]


@pytest.mark.parametrize(
    ("steps", "values", "window", "slope"),
    [
        ([1, 2, 3, 4], [5.0, 1.0, 2.0, 6.0], 3, 2.5),  # of 1, 2, 6: (-1 * -2 + 1 * 3) / 2
        ([0, 10, 20], [0.0, 1.0, 2.0], 10, 0.1),
        ([7], [1.0], 5, None),
        ([7, 7], [1.0, 3.0], 5, None),
        ([], [], 5, None),
    ],
)
def test_slopes_by_hand(steps, values, window, slope):
    series = MetricSeries()
    for step, value in zip(steps, values, strict=True):
        series.add_observation(step, 0.0, value)
    assert compute_slope(series, window) == (None if slope is None else pytest.approx(slope))


def test_bars_of_tools_and_reward_components(tmp_path):
    make_run_with_two_tools(tmp_path)
    tools = build_blocks(tmp_path, "tools", window=4)["tool shares"]
    # Over iterations 6 to 9: zoom 0.5, 1, 0.5, 1; scan 0.5, none, 0.5, none.
    assert [(item["label"], item["share"], item["text"]) for item in tools["items"]] == [
        ("zoom", pytest.approx(0.75), "75.0%"),
        ("scan", pytest.approx(0.25), "25.0%"),
    ]
    parts = build_blocks(tmp_path, "rewards", window=2)["reward shares"]
    # The newest two: task 0.85, tool_use -0.2, brevity 0.1; of 1.15.
    assert [(item["label"], item["text"]) for item in parts["items"]] == [
        ("task", "73.9% (0.850)"),
        ("tool_use", "17.4% (-0.200)"),
        ("my.module.brevity", "8.7% (0.100)"),
    ]
    assert len({item["colour"] for item in parts["items"]}) == 3


def test_tool_bars_from_recorded_episodes(tmp_path):
    make_run(tmp_path)
    blocks = build_blocks(tmp_path, "tools")
    assert [(item["label"], item["text"]) for item in blocks["tool shares"]["items"]] == [
        ("zoom", "75.0%"),
        ("(no tool understood)", "25.0%"),
    ]
    assert "reward shares" not in build_blocks(tmp_path, "rewards"), "one part has no shares"


def test_tables_do_not_change_while_a_view_reads_them(tmp_path, monkeypatch):
    make_run(tmp_path)
    reader, acquired = RunReader(tmp_path), []

    def try_lock(*_):
        other = threading.Thread(
            target=lambda: acquired.append(reader.lock.acquire(blocking=False))
        )
        other.start()
        other.join()
        return []

    monkeypatch.setitem(TAB_BUILDERS, "overview", try_lock)
    build_view(reader, PageSelection(), "overview")
    assert acquired == [False]


def test_stage_without_curves_has_no_charts():
    stages = [
        StageView("prepare_data", "running"),
        StageView("sft", "to come"),
        StageView("promote", "to come"),
    ]
    run = RunView("demo/x", "demo", "x", "running", stages=stages)
    assert run.find_stage("").label == "prepare_data"
    identities = [
        block["id"]
        for block in build_overview_tab(run, [(run, run.find_stage(""))], PageSelection())
    ]
    assert identities == ["stages"]
    for stage in stages:
        stage.status = "to come"
    assert run.find_stage("").label == "prepare_data"
