"""One colour per model in the whole report: tables, episodes and figures."""

import re

from helpers.handmade_trajectories import generate_trajectories

from rl_core.analysis.canvas import select_model_color
from rl_core.analysis.runner import analyze
from rl_core.analysis.trajectories import write_trajectories
from rl_core.settings import AnalysisSettings


def test_a_model_has_its_dot_in_every_table(tmp_path):
    names = ["base", "sft", "policy"]
    for index, name in enumerate(names):
        path = tmp_path / f"{name}.jsonl"
        write_trajectories(path, generate_trajectories(40, 0.3 + 0.2 * index, seed=index))
    models = {name: tmp_path / f"{name}.jsonl" for name in names}
    settings = AnalysisSettings(bootstrap_samples=100, side_by_side=4)
    page = analyze(models, tmp_path / "out", settings).report.read_text()
    dots = re.findall(r"<span class='dot' style='background:(#\w+)'></span>(\w+)", page)
    assert {name: color for color, name in dots} == {
        name: select_model_color(index) for index, name in enumerate(names)
    }
    assert len(set(dots)) == 3  # no model has two colours
    for identity in ("overview", "comparison", "levels", "kinds", "tools", "strategies"):
        (section,) = re.findall(rf"<section id='{identity}'.*?</section>", page, re.S)
        assert all(f"</span>{name}" in section for name in names), identity
    # In dark mode the same filter turns dots and figures, so that their colours stay equal.
    assert "figure img,.dot{filter:invert(.9) hue-rotate(180deg) brightness(1.3)}" in page
