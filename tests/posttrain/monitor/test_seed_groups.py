"""Seeds of one configuration: which runs belong together, and the line with its band, worked by hand."""

import json

import numpy as np
import pytest
from helpers.monitor_runs import CONFIG, START, write_journal

from posttrain.monitor.charts import DrawingOptions, PageSelection, build_overlay_chart
from posttrain.monitor.page_responses import build_address, collect_list_entries, parse_selection
from posttrain.monitor.reader import RunReader
from posttrain.monitor.seed_groups import SEEDS, build_band_line, list_other_seeds
from posttrain.monitor.views import build_view


def make_trial(output, name, begun, rewards, *, home="", **config):
    """Write a run whose configuration has these further values; `home` of a trial within the pipeline's folder."""
    parent = output / name / home / "runs" / "2027-01-15-08-00-00"
    text = json.dumps({**CONFIG, "name": name, **config})
    write_journal(
        parent,
        f"{name} · 2027-01-15 08:00:00",
        started=START + begun,
        ended=START + begun + 100,
        events=[{"op": "text", "name": "config.json", "text": text}],
    )
    metrics = [(i + 1, 2.0 * i, {"reward/mean": value}) for i, value in enumerate(rewards)]
    write_journal(
        output / name / f"stages/policy/aaaa{begun}.tracking",
        "policy",
        started=START + begun + 1,
        ended=START + begun + 90,
        parent=parent,
        metrics=metrics,
    )


@pytest.fixture
def output(tmp_path):
    make_trial(tmp_path, "a", 0, [0.0, 1.0, 2.0], seed=0, rate=1)
    make_trial(tmp_path, "b", 1, [2.0, 3.0, 4.0], seed=1, rate=1)
    make_trial(tmp_path, "c", 2, [4.0, 8.0], seed=2, rate=1)
    make_trial(tmp_path, "d", 3, [9.0, 9.0, 9.5], seed=0, rate=2)
    return tmp_path


def get_id(name):
    return f"{name}/2027-01-15-08-00-00"


def test_other_seeds_have_all_settings_but_the_seed(output):
    reader = RunReader(output)
    runs = {run.group: run for run in reader.list_runs()}
    others = list_other_seeds(runs["a"], reader.list_runs())
    assert sorted(others) == [get_id("b"), get_id("c")]
    assert list_other_seeds(runs["d"], reader.list_runs()) == []


def test_seeds_are_one_line_with_a_band_and_another_configuration_is_another_line(output):
    reader = RunReader(output)
    choice = PageSelection(run=get_id("a"), compare=(SEEDS, get_id("d")), window=1)
    blocks = {block["id"]: block for block in build_view(reader, choice, "curves")["blocks"]}
    (chart,) = blocks["curves reward"]["charts"]
    band, line = chart["lines"]
    assert band["name"] == "3 seeds, 01-15 08:00"
    assert band["x"] == [1.0, 2.0]  # steps that all three have reached
    assert band["y"] == [2.0, 4.0]
    assert (band["low"], band["high"]) == ([0.0, 1.0], [4.0, 8.0])
    assert line["y"] == [9.0, 9.0, 9.5] and "low" not in line
    assert (band["colour"], line["colour"]) == (0, 1)


def test_a_run_compared_with_an_equal_seed_stays_a_line_by_itself(output):
    make_trial(output, "again", 4, [1.0, 1.5], seed=0, rate=1)
    reader = RunReader(output)
    pairs = [
        (run, run.find_stage("policy"))
        for run in map(reader.load_run, (get_id("a"), get_id("again")))
    ]
    chart = build_overlay_chart("reward/mean", pairs, DrawingOptions(1))
    assert ["low" in line for line in chart["lines"]] == [False, False]


def test_runs_of_unknown_configuration_are_never_joined(output):
    for name in ("x", "y"):
        make_trial(output, name, 5, [1.0, 2.0])
        journal = output / name / "runs/2027-01-15-08-00-00/.tracking/events.jsonl"
        lines = [row for row in journal.read_text().splitlines() if "config.json" not in row]
        journal.write_text("\n".join(lines) + "\n")
    reader = RunReader(output)
    assert list_other_seeds(reader.load_run(get_id("x")), reader.list_runs()) == []


def test_the_list_and_the_address_offer_all_other_seeds(output):
    reader = RunReader(output)
    choice = parse_selection(reader, {"run": "a", "compare": "seeds,d,nothing"})
    assert choice.compare == (SEEDS, get_id("d"))
    assert build_address(choice)["compare"] == f"seeds,{get_id('d')}"
    entries = collect_list_entries(reader, choice)
    assert entries.others[0] == ("all other seeds of this configuration (2)", SEEDS)
    assert SEEDS not in [
        value for _, value in collect_list_entries(reader, PageSelection(run=get_id("d"))).others
    ]


def test_more_seeds_than_a_page_has_colours_are_read_once(tmp_path, monkeypatch):
    monkeypatch.setattr("posttrain.monitor.reader.MIN_REFRESH_SECONDS", 0.0)
    for seed in range(12):
        make_trial(tmp_path, f"s{seed}", seed, [0.0, 1.0, 2.0], seed=seed)
    reader = RunReader(tmp_path)
    journals = []
    for _ in range(2):
        build_view(reader, PageSelection(compare=(SEEDS,)), "curves")
        journals.append([id(j) for j in reader._stages.values() if j.table.series])
    assert len(journals[0]) == 12 and journals[1] == journals[0]


def test_a_band_interpolates_between_steps_and_is_thinned():
    first = (np.array([0.0, 2.0, 4.0]), np.array([0.0, 2.0, 4.0]))
    second = (np.array([1.0, 3.0]), np.array([5.0, 7.0]))
    line = build_band_line([first, second], "2 seeds", 0, 1)
    assert line["x"] == [1.0, 2.0, 3.0]
    assert (line["low"], line["high"], line["y"]) == ([1, 2, 3], [5, 6, 7], [3, 4, 5])
    assert build_band_line([first, (np.array([9.0]), np.array([1.0]))], "none", 0, 1) is None
    steps = np.arange(5000.0)
    line = build_band_line([(steps, np.zeros(5000)), (steps, steps % 2)], "2 seeds", 0, 1)
    assert len(line["x"]) <= 400 and line["x"][-1] == 4999.0
    assert set(line["low"]) == {0.0} and set(line["high"]) == {1.0}  # no peak is lost


def test_trials_of_a_sweep_are_runs_with_the_stages_of_their_pipeline(tmp_path):
    """Check that two trials that started in the same second have their own curves, and are seeds of each other."""
    for seed, rewards in enumerate(([1.0, 2.0], [3.0, 6.0])):
        home = f"sweeps/rate-4f/trials/0000-s{seed}"
        make_trial(tmp_path, "demo", seed, rewards, home=home, seed=0, seeds={"policy": seed})
    reader = RunReader(tmp_path)
    ids = [f"demo/rate-4f/0000-s{seed}/2027-01-15-08-00-00" for seed in range(2)]
    assert sorted(run.id for run in reader.list_runs()) == ids
    run = reader.load_run(ids[1])
    assert run.group == "demo · rate-4f · 0000-s1"
    assert run.find_stage("policy").table.series["reward/mean"].last == 6.0
    choice = PageSelection(run=ids[0], compare=(SEEDS,), window=1)
    blocks = {block["id"]: block for block in build_view(reader, choice, "curves")["blocks"]}
    (line,) = blocks["curves reward"]["charts"][0]["lines"]
    assert (line["y"], line["low"], line["high"]) == ([2.0, 4.0], [1.0, 2.0], [3.0, 6.0])
