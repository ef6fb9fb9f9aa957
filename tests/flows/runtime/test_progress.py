"""Remaining time of a stage and of a run, and the lines and bars that show it."""

import io
import json
import logging
import os

import pytest
from rich.console import Console

from flows.runtime.progress import ProgressDisplay, RemainingTimeEstimator, read_earlier_seconds


class Clock:
    now = 0.0

    def __call__(self):
        return self.now


def test_remaining_time_uses_the_speed_since_the_stage_resumed():
    clock = Clock()
    estimator = RemainingTimeEstimator(["sft", "policy", "evaluate"], {"evaluate": 30.0}, clock)
    estimator.observe_progress("policy", 40, 100)  # resumed in the middle
    clock.now = 10.0
    assert estimator.estimate_stage_seconds("policy", 60, 100) == 20.0  # 20 in 10 s, 40 are left
    assert estimator.estimate_run_seconds("policy", 60, 100) == 50.0
    assert estimator.estimate_stage_seconds("policy", 100, 100) == 0.0
    assert (
        estimator.estimate_stage_seconds("policy", 41, 100) is None
    )  # one in a hundred is too few
    estimator.observe_progress("sft", 0, 100)
    clock.now = 20.0
    assert estimator.estimate_stage_seconds("sft", 50, 100) == 10.0
    assert (
        estimator.estimate_run_seconds("sft", 50, 100) is None
    )  # the duration of the policy stage is unknown
    assert (
        estimator.format_stage_position("policy"),
        estimator.format_stage_position("custom"),
        estimator.estimate_stage_seconds("custom", 1, 2),
    ) == ("2/3", "", None)


def test_a_stage_that_counts_something_else_has_a_new_speed():
    clock = Clock()
    estimator = RemainingTimeEstimator(["reward_model"], clock=clock)
    estimator.observe_progress("reward_model", 0, 6000)  # pairs
    clock.now = 100.0
    estimator.observe_progress("reward_model", 0, 300)  # steps
    clock.now = 110.0
    estimator.observe_progress("reward_model", 100, 300)
    assert estimator.estimate_stage_seconds("reward_model", 100, 300) == 20.0


def test_seconds_of_earlier_runs_are_those_of_the_newest_folder(tmp_path):
    for key, seconds, when in (("old", 5.0, 100), ("new", 7.0, 200)):
        folder = tmp_path / "sft" / key
        folder.mkdir(parents=True)
        (folder / "summary.json").write_text(json.dumps({"seconds": seconds}))
        os.utime(folder / "summary.json", (when, when))
    (tmp_path / "policy" / "x").mkdir(parents=True)
    (tmp_path / "policy" / "x" / "summary.json").write_text("{")
    assert read_earlier_seconds(tmp_path, ["sft", "policy", "promote"]) == {"sft": 7.0}


def print_progress(*, terminal: bool, width: int = 80) -> str:
    text, clock = io.StringIO(), Clock()
    estimator = RemainingTimeEstimator(["sft", "policy"], {"policy": 90.0}, clock)
    console = Console(file=text, force_terminal=terminal, width=width, no_color=True)
    with ProgressDisplay(console=console, time_left=estimator) as display:
        display("sft", 0, 100, "loss 2")
        clock.now = 20.0
        display._last_line_at.clear()
        display("sft", 50, 100, "loss 1")
        if terminal:
            display._progress.refresh()
    return text.getvalue()


def test_lines_without_a_terminal_name_place_progress_time_and_numbers():
    assert print_progress(terminal=False).splitlines() == [
        "stage 1/2 sft: 0/100 · loss 2",
        "stage 1/2 sft: 50/100 · 20 s left, run 2 min · loss 1",
    ]


@pytest.mark.parametrize("width", [60, 80, 200])
def test_a_bar_stays_on_one_line_of_the_terminal(width):
    lines = [
        line
        for line in print_progress(terminal=True, width=width).replace("\r", "\n").split("\n")
        if "stage 1/2" in line
    ]
    assert lines and all(len(line.partition("stage")[2]) <= width + 20 for line in lines)
    assert ("run 2 min" in lines[-1]) == (width > 60)


def test_the_important_numbers_are_shown_in_order():
    from rl_core.training.loop import format_headline

    metrics = {
        "train/loss": 0.5,
        "policy/update_kl": 0.01234,
        "reward/mean": 0.75,
        "train/success_rate": 0.915,
        "x": 1.0,
    }
    assert format_headline(metrics) == "success 92% · reward 0.75 · KL 0.0123"
    assert format_headline({**metrics, "policy/update_kl": 0.0, "policy/entropy": 0.176}).endswith(
        "0.75 · entropy 0.176"
    )
    assert format_headline({"train/loss": 0.5}) == "loss 0.5" and format_headline({}) == ""
    assert (
        format_headline({"reward/mean": -7.59e-19}) == "reward 0"
        and format_headline({"train/loss": 1e-6}) == "loss 1e-06"
    )


@pytest.mark.parametrize("quiet", [True, False])
def test_announcements_of_a_quiet_run_go_to_stderr(capsys, quiet):
    """Keep stdout for programs: `profile --json` once began with an announcement."""
    with ProgressDisplay(quiet=quiet) as display:
        logging.getLogger("tasks.x").info("policy runs again", extra={"for_people": True})
        logging.getLogger("rl_core.x").warning("slow")
        display.print_announcement("approve it")
    streams = capsys.readouterr()
    output, empty = (streams.err, streams.out) if quiet else (streams.out, streams.err)
    assert (
        output.splitlines() == ["policy runs again", "warning: slow", "approve it"] and empty == ""
    )


@pytest.mark.parametrize(("terminal", "lines"), [(False, 1), (True, 3)])
def test_a_warning_is_unwrapped_in_a_pipe_and_breaks_no_path_in_a_terminal(terminal, lines):
    out = io.StringIO()
    path = "/data/" + "long/" * 18 + "d977d5e8ca8fda5f.tracking"
    with ProgressDisplay(console=Console(file=out, width=80, force_terminal=terminal), quiet=True):
        logging.getLogger("tasks").warning(
            "the records of this stage wait in %s until the store answers", path
        )
    assert path in out.getvalue() and len(out.getvalue().splitlines()) == lines


def test_texts_of_environments_and_models_cannot_move_the_cursor():
    out = io.StringIO()
    with ProgressDisplay(console=Console(file=out, width=80)) as display:
        logging.getLogger("rl_core").warning("the environment said \x1b[2J")
        logging.getLogger("tasks").info("for people \x1b]0;x\x07", extra={"for_people": True})
        display.print_announcement("asked \x1b[1A")
    text = out.getvalue()
    assert "\x1b" not in text and "\x07" not in text
    assert all(
        part in text for part in ("said \\x1b[2J", "people \\x1b]0;x\\x07", "asked \\x1b[1A")
    )
