"""Live display, curves and tables of a training in a notebook, and that a script stays as it was."""

import logging
import pickle
import re
import sys
import threading
import types
import xml.etree.ElementTree as ET

import pytest
from helpers.library import length, settings, small_policy

import rl_core
from rl_core.api.notebook import LiveDisplay, format_duration
from rl_core.api.result_tables import build_samples_frame
from rl_core.errors import DataError, SettingsError, Stopped
from rl_core.metric_history import MetricHistory
from rl_core.types import Trajectory, Turn


@pytest.fixture
def shown(monkeypatch):
    """Stand in for IPython in a kernel; collect what is displayed as (data, display id, is an update)."""
    outputs = []

    def display(data, *, raw, display_id, update):
        assert raw
        outputs.append((data, display_id, update))

    package = types.ModuleType("IPython")
    package.get_ipython = lambda: types.SimpleNamespace(kernel=object())
    package.display = types.ModuleType("IPython.display")
    package.display.display = display
    monkeypatch.setitem(sys.modules, "IPython", package)
    monkeypatch.setitem(sys.modules, "IPython.display", package.display)
    return outputs


def build_trainer(**options):
    options = {"settings": settings(iterations=4)} | options
    return rl_core.grpo(small_policy(), prompts=["say e", "say a"], reward=length, **options)


def read_texts(page):
    """Return the texts of a page, which is parsed as XML."""
    return [text.strip() for text in ET.fromstring(page).itertext() if text.strip()]


# ------------------------------------------------------------------------------------------------------ live display


def test_a_training_shows_progress_and_metrics_in_one_output(shown, capfd):
    outcome = build_trainer().train()
    assert outcome.iterations == 4
    assert capfd.readouterr() == ("", "")
    assert len({display_id for _, display_id, _ in shown}) == 1
    assert [update for _, _, update in shown] == [False] + [True] * (len(shown) - 1)
    first, last = shown[0][0], shown[-1][0]
    assert first["text/plain"].startswith("grpo: preparing")
    assert re.fullmatch(r"grpo 4/4 iterations, 0:0\d, finished", last["text/plain"])
    texts = read_texts(last["text/html"])
    assert {"reward/mean", "policy/entropy", "Reward", "Entropy", "Length"} <= set(texts)
    assert "width:100.0%" in last["text/html"]


def test_a_second_call_and_a_new_trainer_have_outputs_of_their_own(shown):
    trainer = build_trainer()
    event = threading.Event()
    event.set()
    with pytest.raises(Stopped):
        trainer.run(stop_event=event)
    assert shown[-1][0]["text/plain"] == "grpo: stopped, 0:00"
    trainer.run()
    build_trainer().run()
    assert len({display_id for _, display_id, _ in shown}) == 3


@pytest.mark.parametrize("tracker", ["none", "terminal", ["terminal"], ["none"]])
def test_trackers_that_print_or_none_turn_it_off(shown, tracker):
    build_trainer(tracker=tracker).run()
    assert shown == []


def test_other_trackers_do_not_turn_it_off(shown, tmp_path):
    build_trainer(tracker=f"csv:{tmp_path / 'metrics.csv'}").run()
    assert shown and (tmp_path / "metrics.csv").is_file()


def test_outside_a_kernel_nothing_is_shown(shown, capfd):
    sys.modules["IPython"].get_ipython = lambda: types.SimpleNamespace()  # IPython in a terminal
    build_trainer().run()
    sys.modules["IPython"].get_ipython = lambda: None  # imported by a script
    build_trainer().run()
    assert shown == [] and capfd.readouterr() == ("", "")


def test_a_failing_display_warns_once_and_training_continues(shown, monkeypatch, caplog):
    def fail(*arguments, **options):
        raise OSError("the connection is closed")

    monkeypatch.setattr(sys.modules["IPython.display"], "display", fail)
    with caplog.at_level(logging.WARNING, logger="rl_core.api.notebook"):
        assert build_trainer().run().iterations == 4
    assert [record.getMessage() for record in caplog.records] == [
        "the notebook shows no more progress (OSError: the connection is closed); training continues"
    ]


def test_a_failed_run_says_so(shown):
    def fail(trajectories):
        raise ValueError("<b>no</b>")

    with pytest.raises(rl_core.RewardError):
        rl_core.grpo(small_policy(), prompts=["a"], reward=fail, settings=settings()).run()
    assert shown[-1][0]["text/plain"] == "grpo: failed, 0:00"


class Clock:
    """Clock that a test sets."""

    seconds = 0.0

    def __call__(self):
        return self.seconds


def test_time_left_comes_from_the_newest_iterations():
    clock, pages = Clock(), []
    display = LiveDisplay(
        lambda: MetricHistory(), show=lambda page, text, *_: pages.append(text), clock=clock
    )
    display.begin("grpo", {})
    assert display.estimate_seconds_left() is None
    for done in range(
        41, 101
    ):  # a resumed run: 40 iterations are done; ten of 30 s, then fifty of 2 s
        clock.seconds += 30.0 if done <= 50 else 2.0
        display.progress(done, 200)
        if done == 41:
            assert display.estimate_seconds_left() == pytest.approx(30.0 * 159)
    assert display.estimate_seconds_left() == pytest.approx(2.0 * 100)
    assert pages[-1] == "grpo 100/200 iterations, 6:40, about 3:20 left"


def test_the_page_is_updated_once_a_second():
    clock, pages = Clock(), []
    display = LiveDisplay(
        lambda: MetricHistory(), show=lambda page, text, *_: pages.append(text), clock=clock
    )
    display.begin("grpo", {})
    for done in range(1, 101):
        clock.seconds += 0.1
        display.progress(done, 100)
    display.close("FINISHED")
    assert len(pages) in (11, 12)  # begin, ten seconds, close
    assert pages[-1] == "grpo 100/100 iterations, 0:10, finished"


def test_values_left_out_and_failed_episodes_are_alarms():
    history, pages = MetricHistory(), []
    history.record_values(
        {"train/nonfinite_metrics": 3, "reward/mean": 1, "train/skipped_steps": 0}, 1
    )
    display = LiveDisplay(lambda: history, show=lambda page, *_: pages.append(page))
    display.begin("<i>grpo</i>", {})
    texts = read_texts(pages[-1])
    assert "3 values were NaN or infinite and left out (train/nonfinite_metrics)" in texts
    assert not any("skipped" in text for text in texts)
    assert texts[0].startswith("<i>grpo</i>")  # escaped


def test_curves_are_beside_the_table_only_where_two_columns_of_panels_fit():
    """In a column of 460 px next to the table, five panels of that width would fill a screen and a half."""
    history = MetricHistory()
    for step in (1, 2, 3):
        history.record_values({"reward/mean": 0.1 * step, "train/loss": 1.0 / step}, step)
    display = LiveDisplay(lambda: history)
    page = display._draw_page()
    basis = int(re.search(r"flex:1 1 (\d+)px;min-width:0", page)[1])
    narrowest = int(re.search(r"minmax\(min\(100%,(\d+)px\)", page)[1])
    assert 2 * narrowest < basis < 2 * narrowest + 40


def test_durations():
    seconds = [0, 4.4, 750, 7500, 273_600]
    assert [format_duration(s) for s in seconds] == ["0:00", "0:04", "12:30", "2:05:00", "3 d 4 h"]


def test_a_stopped_run_is_one_line_in_ipython():
    assert Stopped("stopped after iteration 3", 2)._render_traceback_() == [
        "Stopped: stopped after iteration 3"
    ]


# ---------------------------------------------------------------------------------------------------- curves, metrics


def test_curves_and_metrics_survive_a_new_process(tmp_path):
    trainer = build_trainer(output=tmp_path / "out")
    assert "nothing was trained" in repr(trainer.plot())
    trainer.run()
    again = build_trainer(output=tmp_path / "out")
    assert again.plot()._repr_svg_() == trainer.plot()._repr_svg_()
    assert again.metrics()["reward/mean"].tolist() == trainer.metrics()["reward/mean"].tolist()
    assert again.samples()["completion"].tolist() == trainer.samples()["completion"].tolist()
    drawn = rl_core.plot_metrics(tmp_path / "out", names=["reward/mean"])
    assert drawn.panels[0].lines[""] == list(trainer.metrics()["reward/mean"].items())


def test_several_runs_in_one_figure(tmp_path):
    for name in ("a/out", "b/out"):
        (tmp_path / name).mkdir(parents=True)
        line = '{"step": 1, "time": 1, "metrics": {"reward/mean": 0.5}}\n'
        (tmp_path / name / "metrics.jsonl").write_text(line * 2)
    figure = rl_core.plot_metrics(tmp_path / "a/out", tmp_path / "b/out")
    assert figure.runs == ("a/out", "b/out")
    assert figure.panels[0].lines == {"a/out": [(1, 0.5)], "b/out": [(1, 0.5)]}
    with pytest.raises(DataError, match="name at least one run"):
        rl_core.plot_metrics()
    with pytest.raises(DataError, match="named twice"):
        rl_core.plot_metrics(tmp_path / "a/out", tmp_path / "a/out")


def test_constant_metrics_are_no_columns_but_can_be_looked_up():
    trainer = build_trainer()
    trainer.run()
    metrics = trainer.metrics()
    assert list(metrics)[:2] == ["reward/mean", "policy/entropy"]
    assert "tool/calls" not in metrics.columns
    assert metrics["tool/calls"].tolist() == [0.0] * 4
    assert metrics[["tool/calls", "reward/mean"]].shape == (4, 2)
    assert metrics.constants["tool/calls"] == 0.0
    assert (
        "Constant, not shown:" in repr(metrics) and "Constant, not shown:" in metrics._repr_html_()
    )
    complete = trainer.metrics(keep_constant=True)
    assert set(complete) == set(metrics) | set(metrics.constants)
    assert complete.constants == {} and "Constant" not in repr(complete)
    assert type(metrics.tail(2)).__name__ == "DataFrame"
    with pytest.raises(KeyError):
        metrics["no/metric"]


def test_a_constant_metric_can_be_replaced():
    trainer = build_trainer()
    trainer.run()
    metrics = trainer.metrics()
    metrics["tool/calls"] = [9.0, 8.0, 7.0, 6.0]
    assert metrics["tool/calls"].tolist() == [9.0, 8.0, 7.0, 6.0]
    other = next(name for name in metrics.constants if name != "tool/calls")
    both = metrics[[other, "tool/calls"]]
    assert both.iloc[0].tolist() == [metrics.constants[other], 9.0]
    assert "tool/calls" not in metrics.note and "Constant, not shown:" in metrics.note


def test_metrics_and_samples_survive_pickling():
    trainer = build_trainer()
    trainer.run()
    metrics, samples = trainer.metrics(), trainer.samples()
    again = pickle.loads(pickle.dumps(metrics))
    assert repr(again) == repr(metrics) and "Constant, not shown:" in repr(again)
    assert again["tool/calls"].tolist() == [0.0] * 4 and list(again) == list(metrics)
    assert repr(pickle.loads(pickle.dumps(samples))) == repr(samples)


def test_a_reward_that_never_changes_stays_a_column():
    trainer = rl_core.grpo(
        small_policy(),
        prompts=["a"],
        reward=lambda ts: [0.5 for _ in ts],
        settings=settings(iterations=2),
    )
    with pytest.raises(rl_core.NothingLearned):
        trainer.run()
    assert trainer.metrics()["reward/mean"].tolist() == [0.5, 0.5]
    assert "reward/mean" in list(trainer.metrics())


# ----------------------------------------------------------------------------------------------------------- samples


def build_trajectory(prompt, completion, reward):
    return Trajectory(
        "e", "l", "k", 0, prompt, "", turns=[Turn(completion)], reward=reward,
        rewards={"task": 1.0, "format": 0.5, "weighted/format": 0.25}, success=None, num_action_tokens=7,
    )  # fmt: skip


def test_samples_are_the_newest_texts_with_their_rewards():
    trainer = build_trainer()
    assert len(trainer.samples()) == 0
    trainer.run()
    samples = trainer.samples(None)
    assert list(samples)[:5] == [
        "iteration",
        "prompt",
        "completion",
        "reward",
        "reward/length_function",
    ]
    assert samples["iteration"].tolist() == sorted(samples["iteration"], reverse=True)
    assert samples["iteration"].max() == trainer.metrics().index[-1]  # both count from 1
    header = repr(samples).replace("\\", " ").split()
    assert all(name in header for name in samples)  # a script shows every column, too
    assert samples["reward"].tolist() == samples["reward/length_function"].tolist()
    assert len(trainer.samples(2)) == 2


def test_a_training_on_data_has_no_samples():
    rows = [{"prompt": "a", "completion": "b"}]
    trainer = rl_core.sft(
        small_policy(), rows, heldout=0.0, settings={"eval_every": 0, "patience": None}
    )
    with pytest.raises(
        SettingsError, match=r"sft trains on data and samples no episodes; use generate"
    ):
        trainer.samples()


def test_markup_long_and_right_to_left_texts_are_shown_safely():
    rows = [
        (1, build_trajectory("<b>q</b>", "<script>alert(1)</script> & 'x'", 1.0)),
        (1, build_trajectory("long", "x" * 10_000, 0.25)),
        (1, build_trajectory("שלום", "\u202eevil \x1b[31m \x00", 0.5)),
        (1, build_trajectory("bad \ud800", "y", float("nan"))),
    ]
    samples = build_samples_frame(rows, None)
    assert samples["completion"].tolist()[1] == "x" * 10_000  # complete in the DataFrame
    page = samples._repr_html_()
    page.encode()
    assert "<script" not in page and "&lt;script&gt;alert(1)&lt;/script&gt; &amp;" in page
    assert "x" * 400 in page and "x" * 401 not in page and "9,600 more characters" in page
    assert '<div dir="auto"' in page and "unicode-bidi:isolate" in page
    assert "\x1b" not in page and "\x00" not in page
    assert "\x1b" not in repr(samples) and "nan" not in page
    assert list(samples) == [
        "iteration", "prompt", "completion", "reward", "reward/format", "tokens", "stop_reason",
    ]  # fmt: skip


def test_every_selection_of_samples_is_printed_without_control_characters():
    samples = build_samples_frame([(1, build_trajectory("a\x1b[2J", "b\x1b[31m", 1.0))], None)
    by_prompt = samples.set_index(["prompt", "stop_reason"])
    for table in (
        samples, samples.T, samples["prompt"], samples.iloc[0], samples.set_index("prompt"), by_prompt,
        samples.set_index("prompt")["completion"],
    ):  # fmt: skip
        assert "\x1b" not in repr(table)
        assert "\u241b[2J" in repr(table) or table is samples
    assert len(repr(samples.T).splitlines()[0].split()) == 1  # one column, "0"
    assert samples["prompt"].tolist() == ["a\x1b[2J"]


def test_samples_spread_over_an_iteration_and_start_with_the_newest():
    rows = [(i, build_trajectory(f"p{n}", "c", float(n))) for i in (1, 2) for n in range(6)]
    assert build_samples_frame(rows, 3)["prompt"].tolist() == ["p0", "p2", "p4"]
    assert build_samples_frame(rows, 8)["iteration"].tolist() == [3] * 6 + [2] * 2
    assert len(build_samples_frame([], 3)) == 0 and build_samples_frame([], 3)._repr_html_()
