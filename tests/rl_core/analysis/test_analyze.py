import csv
import html.parser
import json
import subprocess
import sys
import tracemalloc

import pytest
from helpers.handmade_trajectories import generate_trajectories, trajectory, zoom
from numpy.testing import assert_allclose

from rl_core.analysis import analyze, canvas, training_curves, write_trajectories
from rl_core.analysis.canvas import COLORS, build_shades
from rl_core.analysis.results import ModelProbeResult, ProbeResults, calibrate_reward_model
from rl_core.analysis.training_curves import MAX_POINTS, TrainingCurve, read_training_curves
from rl_core.errors import DataError
from rl_core.evaluation import summarize_trajectories
from rl_core.settings import AnalysisSettings
from rl_core.types import Turn
from tasks.tracking.values import build_metric_store_name

SETTINGS = AnalysisSettings(bootstrap_samples=200, side_by_side=3)
PNG = b"\x89PNG\r\n\x1a\n" + b"\0" * 30
EVIL = "</pre><script>alert(1)</script><img src=x onerror=alert(1)>\"'&\x00\ud800"


class Page(html.parser.HTMLParser):
    """Tags, attributes and text of a page; every opened tag has to be closed."""

    void = frozenset({"meta", "img", "input"})

    def __init__(self, text):
        super().__init__()
        self.tags, self.attributes, self.words, self.open = [], [], [], []
        self.feed(text)
        assert not self.open

    def handle_starttag(self, tag, attrs):
        self.tags.append(tag)
        self.attributes += [(tag, *pair) for pair in attrs]
        if tag not in self.void:
            self.open.append(tag)

    def handle_endtag(self, tag):
        assert self.open.pop() == tag

    def handle_data(self, data):
        self.words.append(data)


@pytest.fixture(scope="module")
def result(tmp_path_factory):
    folder = tmp_path_factory.mktemp("analysis")
    skills = {"sft": 0.5, "policy": 0.95}
    for name, skill in skills.items():
        write_trajectories(
            folder / f"{name}.jsonl", generate_trajectories(150, skill, seed=len(name))
        )
    rows = [
        {
            "step": i,
            "time": 0,
            "metrics": {"success_rate": i / 40, "reward/mean": i / 50, "curriculum/stage": i // 20},
        }
        for i in range(40)
    ]
    (folder / "metrics.jsonl").write_text("\n".join(map(json.dumps, rows)) + '\n{"step": 40, "met')
    analysis = analyze(
        {name: folder / f"{name}.jsonl" for name in skills},
        folder / "out",
        SETTINGS,
        training={"policy": folder / "metrics.jsonl"},
        image_of=lambda level, seed: PNG,
    )
    return analysis, folder


def test_every_file_is_there(result):
    analysis, _ = result
    assert analysis.report.name == "report.html"
    assert {path.name for path in analysis.files} == {
        "report.html",
        "analysis.json",
        "analysis.csv",
        "success_by_level.png",
        "success_by_kind.png",
        "differences.png",
        "distributions.png",
        "tools.png",
        "misuse.png",
        "rewards.png",
        "training_0.png",
    }
    for path in analysis.files:
        assert path.stat().st_size > 500
        assert path.suffix != ".png" or path.read_bytes().startswith(b"\x89PNG")


def test_metrics_agree_with_the_rows(result):
    analysis, _ = result
    for name, skill in (("sft", 0.5), ("policy", 0.95)):
        rows = list(generate_trajectories(150, skill, seed=len(name)))
        assert_allclose(
            analysis.metrics[f"analysis/{name}/success_rate"], sum(r.success for r in rows) / 150
        )
        assert_allclose(
            analysis.metrics[f"analysis/{name}/reward_mean"], sum(r.reward for r in rows) / 150
        )
        hard = [r.success for r in rows if r.level == "hard"]
        assert_allclose(
            analysis.metrics[f"analysis/{name}/success_rate_by_level/hard"], sum(hard) / len(hard)
        )
    difference = analysis.metrics["analysis/policy_minus_sft/success"]
    both = [analysis.metrics[f"analysis/{name}/success_rate"] for name in ("policy", "sft")]
    assert_allclose(difference, both[0] - both[1])
    assert 0 < analysis.metrics["analysis/policy_minus_sft/success_low"] < difference
    assert [row["model"] for row in analysis.summary] == ["sft", "policy"]
    [pair] = analysis.comparisons
    assert pair.total.wins - pair.total.losses == round(difference * 150) and pair.p_value < 1e-6
    rewards = [
        [r.reward for r in generate_trajectories(150, s, seed=n)] for s, n in ((0.5, 3), (0.95, 6))
    ]
    gaps = [b - a for a, b in zip(*rewards, strict=True)]
    mean = sum(gaps) / 150
    half = 1.959964 * (sum((g - mean) ** 2 for g in gaps) / 149 / 150) ** 0.5
    assert_allclose(pair.reward, (mean, mean - half, mean + half), rtol=1e-6)


def test_report_is_self_contained_and_marks_the_turning_point(result):
    analysis, _ = result
    text = analysis.report.read_text(encoding="utf-8")
    page = Page(text)
    assert "script" not in page.tags and "link" not in page.tags
    sources = [value for tag, name, value in page.attributes if name in ("src", "href")]
    assert sources and all(value.startswith(("data:image/png;base64,", "#")) for value in sources)
    assert "prefers-color-scheme:dark" in text
    words = " ".join(page.words)
    for expected in ("better than sft", "turning point", "What got worse", "Question ", "misuse"):
        assert expected in words
    assert text.count("class='image'") == 3


def test_json_and_csv(result):
    analysis, _ = result
    row = json.loads((analysis.files[1]).read_text(), parse_constant=lambda name: pytest.fail(name))
    assert [model["name"] for model in row["models"]] == ["sft", "policy"] and len(
        row["cases"]
    ) == 3
    assert_allclose(
        row["models"][1]["success"]["rate"], analysis.metrics["analysis/policy/success_rate"]
    )
    with analysis.files[2].open(newline="") as file:
        rows = list(csv.DictReader(file))
    [total] = [
        r
        for r in rows
        if (r["model"], r["group"], r["metric"]) == ("policy", "all", "success_rate")
    ]
    assert (
        float(total["value"]) == analysis.metrics["analysis/policy/success_rate"]
        and total["n"] == "150"
    )
    assert any(r["group"] == "minus sft" and r["name"] == "hard" for r in rows)
    assert any(
        r["group"] == "tool" and r["name"] == "hard: scan" and r["metric"] == "calls" for r in rows
    )


def test_same_input_gives_the_same_bytes(result, tmp_path):
    analysis, folder = result
    repeated = analyze(
        {name: folder / f"{name}.jsonl" for name in ("sft", "policy")},
        tmp_path / "again",
        SETTINGS,
        training={"policy": folder / "metrics.jsonl"},
        image_of=lambda level, seed: PNG,
    )
    assert repeated.metrics == analysis.metrics
    for file, repeated_file in zip(analysis.files, repeated.files, strict=True):
        assert file.read_bytes() == repeated_file.read_bytes(), file.name


def test_torn_training_rows_are_reported(result):
    analysis, _ = result
    assert analysis.notes == ["1 unreadable rows of the training metrics of 'policy' were skipped."]


def test_markup_in_every_text_is_escaped(tmp_path):
    turns = [zoom(1, 1, EVIL), Turn(EVIL, None, EVIL, True), Turn(EVIL)]
    row = trajectory(
        1,
        False,
        turns,
        level=EVIL,
        kind=EVIL,
        prompt=EVIL,
        target=EVIL,
        answer=EVIL,
        stop_reason=EVIL,
    )
    row.turns[0].tool_call.name = EVIL
    row.rewards = {"task": 0.0, EVIL: 1.0}
    other = trajectory(
        1, True, [Turn("answer red")], level=EVIL, kind=EVIL, prompt=EVIL, target=EVIL
    )
    write_trajectories(tmp_path / "a.jsonl", [row, trajectory(2, kind="$x_{")])
    write_trajectories(tmp_path / "b.jsonl", [other, trajectory(2, kind="$x_{")])
    models = {EVIL: tmp_path / "a.jsonl", "<b>": tmp_path / "b.jsonl"}
    analysis = analyze(models, tmp_path / "out", SETTINGS, title=EVIL)
    page = Page(analysis.report.read_text(encoding="utf-8"))
    assert "script" not in page.tags and "b" in page.tags
    assert not [attribute for attribute in page.attributes if attribute[1].startswith("on")]
    assert all(
        value.startswith("data:image/png;base64,")
        for _, name, value in page.attributes
        if name == "src"
    )
    assert any("<script>alert(1)</script>" in words for words in page.words)


def test_csv_cells_are_no_formulas(tmp_path):
    row = trajectory(1)
    row.turns[0].tool_call.name = "=cmd()"
    row.level = row.kind = "@SUM(1)"
    write_trajectories(tmp_path / "a.jsonl", [row])
    analysis = analyze({"-1+1": tmp_path / "a.jsonl"}, tmp_path / "out", SETTINGS)
    with analysis.files[2].open(newline="") as file:
        for line in list(csv.reader(file))[1:]:
            assert not any(cell.startswith(("=", "@", "-1")) for cell in line)


def test_one_model_alone_and_no_cases(tmp_path):
    write_trajectories(tmp_path / "a.jsonl", [trajectory(1, turns=[])])
    analysis = analyze(
        {"only": tmp_path / "a.jsonl"}, tmp_path / "out", AnalysisSettings(side_by_side=0)
    )
    assert analysis.comparisons == [] and analysis.notes == []
    assert "Episodes side by side" not in analysis.report.read_text()
    assert analysis.metrics["analysis/only/success_rate"] == 1.0


def test_probe_results_are_reported(tmp_path):
    for name in ("sft", "policy"):
        write_trajectories(
            tmp_path / f"{name}.jsonl", [trajectory(1, name == "policy"), trajectory(2)]
        )
    probes = ProbeResults(
        {
            "sft": ModelProbeResult(
                perplexity=2.0,
                demonstrations=3,
                entropy=0.5,
                kl_to_first=0.0,
                entropy_by_turn=[0.5],
            ),
            "policy": ModelProbeResult(
                entropy=0.25,
                kl_to_first=0.125,
                coherence=0.75,
                entropy_by_turn=[0.25],
                kl_by_turn=[0.125],
            ),
        },
        calibrate_reward_model([0.0, 1.0, 2.0, 2.0], [False, True, True, True], [1, 1, 2, 2]),
        ["'x' was left out."],
    )
    models = {name: tmp_path / f"{name}.jsonl" for name in ("sft", "policy")}
    analysis = analyze(models, tmp_path / "out", SETTINGS, probes=probes)
    metrics = analysis.metrics
    assert (
        metrics["analysis/policy/kl_to_first"] == 0.125
        and metrics["analysis/sft/perplexity"] == 2.0
    )
    assert (
        "analysis/policy/perplexity" not in metrics and metrics["analysis/policy/coherence"] == 0.75
    )
    assert (
        metrics["analysis/reward_model/accuracy"] == 1.0
        and metrics["analysis/reward_model/pairs"] == 1
    )
    assert {"entropy_and_kl.png", "reward_model.png"} <= {path.name for path in analysis.files}
    row = json.loads(analysis.files[1].read_text())
    assert row["models"][1]["probe"]["kl_by_turn"] == [0.125]
    assert (
        row["reward_model"]["pairs"] == 1 and row["reward_model"]["bins"][0]["right"]["rate"] == 1.0
    )
    with analysis.files[2].open(newline="") as file:
        cells = {(r["model"], r["metric"]): r["value"] for r in csv.DictReader(file)}
    assert cells["policy", "kl_to_first"] == "0.125" and cells["reward_model", "auc"] == "1.0"
    words = " ".join(Page(analysis.report.read_text(encoding="utf-8")).words)
    for expected in (
        "Reward model against true success",
        "KL from the first model",
        "Perplexity",
        "'x' was left out.",
    ):
        assert expected in words


def test_pass_at_k_is_reported(tmp_path):
    rows = [trajectory(1, sample < 1, sample=sample) for sample in range(4)]
    write_trajectories(tmp_path / "a.jsonl", rows)
    analysis = analyze({"m": tmp_path / "a.jsonl"}, tmp_path / "out", SETTINGS)
    assert [analysis.metrics[f"analysis/m/pass_at_{k}"] for k in (1, 2, 4)] == [0.25, 0.5, 1.0]
    assert "pass@4" in analysis.report.read_text()
    assert (tmp_path / "out" / "pass_at_k.png").is_file()


def test_different_episodes_are_compared_on_the_common_ones(tmp_path):
    write_trajectories(tmp_path / "a.jsonl", [trajectory(seed, False) for seed in range(10)])
    write_trajectories(tmp_path / "b.jsonl", [trajectory(seed, True) for seed in range(4, 11)])
    analysis = analyze(
        {"a": tmp_path / "a.jsonl", "b": tmp_path / "b.jsonl"}, tmp_path / "out", SETTINGS
    )
    assert analysis.metrics["analysis/b_minus_a/episodes"] == 6
    assert analysis.metrics["analysis/b_minus_a/success"] == 1.0
    [note] = analysis.notes
    assert "compared on the 6 common ones (4 only 'a', 1 only 'b')" in note
    assert note.replace("'", "&#x27;") in analysis.report.read_text()


def test_nothing_in_common_is_an_error_and_leaves_nothing(tmp_path):
    write_trajectories(tmp_path / "a.jsonl", [trajectory(1)])
    write_trajectories(tmp_path / "b.jsonl", [trajectory(1, level="hard")])
    with pytest.raises(DataError, match="'a' and 'b' have no episode in common"):
        analyze({"a": tmp_path / "a.jsonl", "b": tmp_path / "b.jsonl"}, tmp_path / "out", SETTINGS)
    assert not (tmp_path / "out").exists()


def test_bad_input_leaves_nothing(tmp_path):
    write_trajectories(tmp_path / "a.jsonl", [trajectory(1)])
    (tmp_path / "b.jsonl").write_text("{")
    cases = [
        ({}, None),
        ({"a": tmp_path / "b.jsonl"}, None),
        ({"a": tmp_path / "a.jsonl"}, {"a": tmp_path / "none"}),
    ]
    for models, training in cases:
        with pytest.raises(DataError):
            analyze(models, tmp_path / "out", SETTINGS, training=training)
    assert not (tmp_path / "out").exists()


def test_a_failing_image_costs_only_the_image(tmp_path):
    write_trajectories(tmp_path / "a.jsonl", [trajectory(1)])

    def fail_to_draw(level, seed):
        raise RuntimeError("no picture")

    analysis = analyze(
        {"a": tmp_path / "a.jsonl"}, tmp_path / "out", SETTINGS, image_of=fail_to_draw
    )
    assert "class='image'" not in analysis.report.read_text()


@pytest.mark.slow
def test_memory_does_not_grow_with_the_number_of_trajectories(tmp_path, monkeypatch):
    monkeypatch.setattr("rl_core.analysis.summary.RESERVOIR_SIZE", 200)
    monkeypatch.setattr("rl_core.analysis.summary.DIVERSITY_SAMPLE_SIZE", 100)
    from rl_core.analysis.episode_index import EpisodeIndex
    from rl_core.analysis.runner import _summarize_model

    def measure_peak(count):
        path = tmp_path / f"{count}.jsonl"
        base = json.dumps(trajectory(0).to_json())
        with path.open("w") as file:
            for seed in range(count):
                file.write(base.replace('"seed": 0', f'"seed": {seed}') + "\n")
        tracemalloc.start()
        with EpisodeIndex() as index:
            model = _summarize_model(index, 0, "m", path, None, 0)
            assert model.episodes == count
        top = tracemalloc.get_traced_memory()[1]
        tracemalloc.stop()
        return top

    small, large = (
        measure_peak(3000),
        measure_peak(9000),
    )  # more than the reservoirs and one index batch can hold
    assert large < 1.05 * small, (small, large)


def test_curve_is_thinned_by_averaging():
    curve = TrainingCurve()
    for step in range(5 * MAX_POINTS):
        curve.add_point(step, float(step % 2))
    curve.flush_pending_points()
    assert len(curve.values) <= MAX_POINTS and curve.steps == sorted(curve.steps)
    assert set(curve.values) == {0.5}


def test_training_rows_of_a_resumed_or_torn_run(tmp_path):
    path = tmp_path / "metrics.jsonl"
    lines = [
        {"step": 1, "metrics": {"success_rate": 0.1, "other": 1, "curriculum/stage": 0}},
        {"step": 2, "metrics": {"success_rate": 0.2, "curriculum/stage": 1}},
        {"step": 2, "metrics": {"success_rate": 0.9}},  # replayed after a kill
        {"step": 3, "metrics": {"success_rate": float("nan")}},
        {"step": "x", "metrics": {}},
        {"step": 4, "metrics": {"success_rate": 0.4}},
    ]
    path.write_text("\n".join(map(json.dumps, lines)) + "\n[1]\n{")
    run = read_training_curves(path, frozenset({"success_rate", "curriculum/stage"}))
    assert run.curves["success_rate"].steps == [1, 2, 4] and run.curves["success_rate"].values == [
        0.1,
        0.2,
        0.4,
    ]
    assert run.stages == [(1, 0), (2, 1)] and run.num_skipped == 3 and "other" not in run.curves
    with pytest.raises(DataError, match="cannot be read"):
        read_training_curves(tmp_path / "none", frozenset())


def test_rollbacks_of_the_curriculum_are_read_and_drawn(tmp_path):
    path = tmp_path / "metrics.jsonl"
    stages, rollbacks = [0, 1, 1, 0, 1, 1, 1], [0, 0, 0, 1, 1, 2, 2]
    lines = [
        {
            "step": i,
            "metrics": {
                "train/success_rate": 0.5,
                "curriculum/stage": s,
                "curriculum/rollbacks": r,
            },
        }
        for i, (s, r) in enumerate(zip(stages, rollbacks, strict=True), 1)
    ]
    path.write_text("\n".join(map(json.dumps, [*lines, lines[3]])))  # replayed after a kill
    run = read_training_curves(path, training_curves.DRAWN_METRICS)
    assert run.rollbacks == [4, 6] and run.stages == [(1, 0), (2, 1), (4, 0), (5, 1)]
    drawn = training_curves.draw_training_run(tmp_path / "with.png", run, "policy")
    run.rollbacks = []
    assert (
        drawn.read_bytes()
        != training_curves.draw_training_run(tmp_path / "without.png", run, "policy").read_bytes()
    )


def test_a_curve_of_one_point_or_of_zeros_is_no_picture(tmp_path):
    path = tmp_path / "metrics.jsonl"
    rows = [{"step": i, "metrics": {"policy/update_kl": 0.0}} for i in range(9)]
    rows += [{"step": 9, "metrics": {"eval/loss": 0.5}}]
    path.write_text("\n".join(map(json.dumps, rows)))
    assert (
        training_curves.draw_training_run(
            tmp_path / "x.png", read_training_curves(path, training_curves.DRAWN_METRICS), "sft"
        )
        is None
    )


def test_parts_of_the_reward_are_drawn_where_there_are_several(tmp_path):
    path = tmp_path / "metrics.jsonl"

    def draw_parts(*parts):
        metrics = {f"reward/weighted/{part}": 0.5 for part in parts}
        path.write_text("\n".join(json.dumps({"step": i, "metrics": metrics}) for i in range(9)))
        run = read_training_curves(
            path, training_curves.DRAWN_METRICS, training_curves.DRAWN_PREFIXES
        )
        assert sorted(run.curves) == sorted(metrics)
        return training_curves.draw_training_run(tmp_path / "x.png", run, "policy")

    assert draw_parts("task", "curiosity") is not None and draw_parts("task") is None


def test_shades_run_from_light_to_dark():
    def compute_brightness(color):
        return sum(int(color[start : start + 2], 16) for start in (1, 3, 5))

    for color in COLORS:
        values = [compute_brightness(shade) for shade in build_shades(color, 4)]
        assert values == sorted(values, reverse=True) and len(set(values)) == 4


def test_matplotlib_is_imported_only_to_draw():
    code = (
        "import sys, rl_core.analysis, rl_core.evaluation; "
        "print([m for m in ('matplotlib', 'pandas', 'prefect', 'mlflow', 'pydantic', 'yaml') if m in sys.modules])"
    )
    assert (
        subprocess.run(
            [sys.executable, "-c", code], capture_output=True, text=True, check=True
        ).stdout
        == "[]\n"
    )


def test_an_unknown_success_is_left_out_and_rewards_are_compared(tmp_path):
    models = {}
    for number, name in enumerate(("sft", "policy")):
        played = list(generate_trajectories(20, 0.5, seed=1))
        for index, each in enumerate(played):
            each.success, each.reward = None, number * (index % 4 - 0.5)
        models[name] = tmp_path / f"{name}.jsonl"
        write_trajectories(models[name], played)
    result = analyze(models, tmp_path / "out", SETTINGS)
    assert not [name for name in result.metrics if "success" in name or "pass_at" in name]
    assert result.metrics["analysis/policy_minus_sft/wins"] > 0
    assert result.metrics["analysis/policy_minus_sft/losses"] > 0
    assert [row["success_rate"] for row in result.summary] == [None, None]
    (pair,) = result.comparisons
    assert pair.total.success is None and pair.reward.difference > 0
    assert pair.regressions and {e.success for e in pair.regressions} == {(None, None)}
    text = result.report.read_text()
    assert "success is unknown" in text and "✗" not in text and "✓" not in text
    names = {path.name for path in result.files}
    assert not {"success_by_level.png", "differences.png", "pass_at_k.png"} & names
    stored = json.loads((tmp_path / "out/analysis.json").read_text())
    assert stored["models"][0]["success"] is None
    assert stored["comparisons"][0]["total"]["success"] is None
    assert "success" not in (tmp_path / "out/analysis.csv").read_text()


# Names that differ in characters which no metric name has, and letters that matplotlib's own font lacks.
LEVEL_NAMES = ("Algebra (hard)", "Algebra [hard]", "Algebra_hard", "数学", "物理", "a,b", "a/b")


def test_every_level_has_its_own_metric_and_is_legible(tmp_path, recwarn):
    played = [
        trajectory(seed, seed % 2 == 0, level=level, kind=level)
        for level in LEVEL_NAMES
        for seed in range(4)
    ]
    evaluation = summarize_trajectories(played)
    for group in ("level", "kind"):
        names = [n for n in evaluation.metrics() if f"success_rate_by_{group}/" in n]
        assert len({build_metric_store_name(name) for name in names}) == len(names) == 7
    models = {}
    for name in ("模型", "策略"):
        models[name] = tmp_path / f"{len(models)}.jsonl"
        write_trajectories(models[name], played)
    result = analyze(models, tmp_path / "out", SETTINGS)
    for group in ("level", "kind"):
        for name in models:
            prefix = f"analysis/{name}/success_rate_by_{group}/"
            names = [metric for metric in result.metrics if metric.startswith(prefix)]
            assert len(names) == 7 and f"{prefix}数学" in names and f"{prefix}物理" in names
            assert len({build_metric_store_name(metric) for metric in names}) == 7
    assert not [str(w.message) for w in recwarn if "Glyph" in str(w.message)]


def test_letters_without_a_font_are_written_out(monkeypatch):
    monkeypatch.setattr(canvas, "_collect_drawable_characters", lambda: frozenset(range(0x400)))
    assert canvas.shorten_text("数学 é") == "\\u6570\\u5b66 é"
    assert canvas.shorten_text("abc") == "abc"
    monkeypatch.undo()
    assert canvas.shorten_text("é…") == "é…"  # DejaVu Sans has them
