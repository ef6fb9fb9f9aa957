"""User-defined measures in the analysis."""

import json
import sys
import types

import pytest
from helpers.handmade_trajectories import generate_trajectories

from rl_core.analysis import analyze, write_trajectories
from rl_core.errors import DataError, SettingsError
from rl_core.settings import AnalysisSettings


def count_words_of_first(trajectory):
    """Words of the first action <b>

    More about it.
    """
    return len(trajectory.turns[0].action.split()) if trajectory.seed % 2 else None


@pytest.fixture(autouse=True)
def install_module(monkeypatch):
    module = types.ModuleType("measures_of_a_test")
    module.words_of_first = count_words_of_first
    module.reward_mean = count_words_of_first
    module.two = lambda trajectory, other: 1.0
    module.bad = lambda trajectory: float("nan")
    module.raises = lambda trajectory: trajectory.absent
    monkeypatch.setitem(sys.modules, module.__name__, module)


def build_settings(*names):
    paths = tuple(f"measures_of_a_test:{name}" for name in names)
    return AnalysisSettings(bootstrap_samples=200, side_by_side=0, measures=paths)


def test_the_mean_over_episodes_is_in_metrics_tables_and_report(tmp_path):
    trajectories = list(generate_trajectories(40, 0.5, seed=1))
    write_trajectories(tmp_path / "sft.jsonl", trajectories)
    result = analyze(
        {"sft": tmp_path / "sft.jsonl"}, tmp_path / "out", build_settings("words_of_first")
    )
    counts = [len(t.turns[0].action.split()) for t in trajectories if t.seed % 2]
    expected = pytest.approx(sum(counts) / len(counts))
    assert 0 < len(counts) < 40
    assert result.metrics["analysis/sft/words_of_first"] == expected
    assert result.summary[0]["words_of_first"] == expected
    rows = json.loads((tmp_path / "out" / "analysis.json").read_text())
    assert rows["models"][0]["metrics"]["words_of_first"] == expected
    assert "Words of the first action &lt;b&gt;" in result.report.read_text()


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("two", "is called with one trajectory"),
        ("reward_mean", "a measure named 'reward_mean' already"),
        ("absent", "measures.0: no function 'absent' there"),
    ],
)
def test_wrong_functions_are_refused_before_anything_is_read(tmp_path, name, message):
    with pytest.raises(SettingsError, match=message):
        analyze({"sft": tmp_path / "absent.jsonl"}, tmp_path / "out", build_settings(name))


@pytest.mark.parametrize(
    ("name", "message"), [("bad", "gave nan"), ("raises", "raised AttributeError")]
)
def test_what_fails_on_an_episode_names_both(tmp_path, name, message):
    write_trajectories(tmp_path / "sft.jsonl", generate_trajectories(3, 0.5, seed=1))
    with pytest.raises(DataError, match=rf"measure '{name}' on \w+/\d+ {message}"):
        analyze({"sft": tmp_path / "sft.jsonl"}, tmp_path / "out", build_settings(name))
