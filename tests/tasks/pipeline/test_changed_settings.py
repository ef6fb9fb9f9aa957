"""The column of the table of runs that lists what changed since the run before."""

import json

from tasks.pipeline.run_tracking import describe_changed_settings, describe_settings
from tasks.tracking.journal import LineLog, build_events_path


def write_run(runs, started, settings):
    folder = runs / started
    folder.mkdir(parents=True)
    log = LineLog(build_events_path(folder))
    log.append_record({"op": "start", "time": 0, "name": started})
    if settings is not None:
        log.append_record(
            {"op": "text", "time": 0, "name": "config.json", "text": json.dumps(settings)}
        )
    log.close()


OLD = {
    "seed": 0,
    "output": "a",
    "stages": {"policy": {"learning_rate": 0.001, "iterations": 10}, "sft": {"epochs": 1}},
}
NEW = {
    "seed": 1,
    "output": "b",
    "stages": {"policy": {"learning_rate": 0.0003, "iterations": 10}, "sft": None},
}


def test_differences_from_the_run_before_are_listed(tmp_path):
    write_run(tmp_path, "2026-01-01", {"seed": 7})
    write_run(tmp_path, "2026-01-02", OLD)
    text = describe_changed_settings(tmp_path, "2026-01-03", NEW)
    assert text == "seed 0 → 1; learning_rate 0.001 → 0.0003; sft - → null; epochs 1 → -"
    assert describe_changed_settings(
        tmp_path, "2026-01-03", {**OLD, "output": "elsewhere"}
    ).startswith("nothing: settings as")


def test_there_is_nothing_to_compare_with(tmp_path):
    assert describe_changed_settings(tmp_path, "2026-01-01", NEW) == ""
    write_run(tmp_path, "2026-01-01", None)  # it ended before its settings were recorded
    assert describe_changed_settings(tmp_path, "2026-01-02", NEW) == ""
    write_run(tmp_path, "2026-01-03", OLD)
    assert describe_changed_settings(tmp_path, "2026-01-02", NEW) == ""  # a later one is not before


def test_many_differences_are_counted(tmp_path):
    write_run(tmp_path, "2026-01-01", {"stages": {str(number): 0 for number in range(9)}})
    text = describe_changed_settings(
        tmp_path, "2026-01-02", {"stages": {str(number): "x" * 50 for number in range(9)}}
    )
    assert (
        text.startswith(f"0 0 → {'x' * 31}…; 1 0 → ")
        and text.endswith(" and 4 more")
        and len(text) < 300
    )


def test_changed_settings_are_listed_with_the_most_important_first():
    settings = {
        "name": "mine",
        "output": "x",
        "tracking": {"traces": 3},
        "environment": {"name": "maze"},
        "stages": {"prepare_data": {}, "policy": {"group_size": 4, "learning_rate": 0.001}},
    }
    assert (
        describe_settings(settings)
        == "policy.learning_rate=0.001, policy.group_size=4, environment.name=maze"
    )
    assert describe_settings({"name": "mine", "stages": {"sft": {}}}) == "defaults"
    many = {"stages": {"sft": {f"s{number}": number for number in range(20)}}}
    assert describe_settings(many).endswith("sft.s11=11 and 8 more")
