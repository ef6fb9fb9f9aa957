"""The page that a reviewer decides on: paired numbers worked by hand, the worst regressions, harmless cells."""

import json

from rl_core.analysis import write_trajectories
from rl_core.evaluation import summarize_trajectories
from rl_core.types import Trajectory, Turn
from tasks.config.settings import PromotionSettings
from tasks.lifecycle.promotion import GateAttempt
from tasks.pipeline.stage_result import StageResult
from tasks.stages.promotion_review import (
    ComparedModel,
    draw_sparkline,
    find_regressions,
    write_report,
    write_review,
)


def build_episode(seed, won, level="easy", reward=None, text="look"):
    return Trajectory(
        environment="e",
        level=level,
        kind="k",
        seed=seed,
        prompt="where | is it?",
        target="t",
        success=None if won is None else bool(won),
        reward=float(won) if reward is None else reward,
        turns=[
            Turn(action=text, observation="wall\n<b>", num_tokens=1),
            Turn(action=f"answer {won}", num_tokens=1),
        ],
    )


def side(folder, label, episodes):
    folder.mkdir()
    evaluation = summarize_trajectories(episodes)
    (folder / "evaluation.json").write_text(json.dumps({"m": evaluation.to_json()}))
    write_trajectories(folder / "trajectories_m.jsonl", episodes)
    return ComparedModel(label, folder, "m")


def trained(tmp_path):
    folder = tmp_path / "sft"
    folder.mkdir()
    lines = [{"step": n, "time": 0, "metrics": {"train/loss": 8.0 - n}} for n in range(8)]
    (folder / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    summary = {"seconds": 1800.0, "tokens_per_second": 12_345.0}
    return {"sft": StageResult("sft", str(folder), "d", "k", False, 1800.0, "", summary)}


def both(tmp_path):
    old = [
        build_episode(0, 1),
        build_episode(1, 1),
        build_episode(2, 0),
        build_episode(3, 1, "hard"),
        build_episode(4, 0, reward=0.5),
    ]
    new = [
        build_episode(0, 0, text="a`b|c"),
        build_episode(1, 1),
        build_episode(2, 1),
        build_episode(3, 1, "hard"),
        build_episode(4, 0, reward=0.25),
    ]
    return side(tmp_path / "new", "version 4", new), side(tmp_path / "old", "champion 3", old)


def test_regressions_come_worst_first(tmp_path):
    challenger, champion = both(tmp_path)
    # episode 0 lost a success; 4 fails in both and earns less; 2 got better
    assert find_regressions(challenger.evaluation, champion.evaluation) == [
        ("easy", 0),
        ("easy", 4),
    ]


def test_the_page_says_what_is_needed_to_decide(tmp_path):
    challenger, champion = both(tmp_path)
    text = write_review(
        tmp_path / "review.md",
        challenger,
        champion,
        trained(tmp_path),
        PromotionSettings(bootstrap_samples=100),
        title="demo",
        verdict="gain 0",
        seed=0,
    )
    assert (tmp_path / "review.md").read_text() == text
    rows = [[cell.strip() for cell in line.split(" | ")] for line in text.splitlines()]
    table = {row[0].removeprefix("| "): row for row in rows if len(row) == 7}
    # 3 of 5 each: one better, one worse; easy: 2 of 4 each; hard: 1 of 1 each
    assert table["**all**"][1:3] == ["60.0%", "60.0%"]
    assert table["**all**"][3].startswith("+0.0 points [-")
    assert table["**all**"][5:] == ["5", "1 / 1 |"]
    assert table["easy"][1:3] == ["50.0%", "50.0%"] and table["easy"][6] == "1 / 1 |"
    assert table["hard"][1:4] == ["100.0%", "100.0%", "+0.0 points [+0.0, +0.0]"]
    assert "Attempts on these episodes" not in text  # none was counted
    assert "2 of 2 episodes that got worse." in text
    assert "| turn | champion 3: right, reward 1 | version 4: wrong, reward 0 |" in text
    assert r"| 1 | look → wall ⏎ &lt;b&gt; | a\`b\|c → wall ⏎ &lt;b&gt; |" in text
    assert "| 2 | answer 1 | answer 0 |" in text
    assert "| sft | `train/loss` | █▇▆▅▄▃▂▁ | 8 → 1 | 8 |" in text
    assert "| sft | 1,800.0 | 12,345 |" in text and "0.50 hours" in text


def test_the_page_shows_the_attempts_on_these_episodes(tmp_path):
    challenger, champion = both(tmp_path)
    asked = [
        GateAttempt(
            id="a",
            comparison="c",
            draw=0,
            episodes=(),
            version=3,
            champion=2,
            number=1,
            level=0.025,
            p_value=0.4,
            decision="rejected",
        ),
        GateAttempt(
            id="b",
            comparison="d",
            draw=0,
            episodes=(),
            version=4,
            champion=3,
            number=2,
            level=0.0083333,
            p_value=0.0012345,
            decision="promoted",
        ),
    ]
    settings = PromotionSettings(bootstrap_samples=100)
    text = write_review(
        tmp_path / "r.md",
        challenger,
        champion,
        {},
        settings,
        title="t",
        verdict="v",
        seed=0,
        attempts=asked,
    )
    assert (
        "| 1 | 3 | 2 | 0.4 | 0.025 | rejected |\n| 2 | 4 | 3 | 0.0012 | 0.0083 | promoted |" in text
    )
    # .05 / (2 * 3) was for the second attempt; .05 / 3 is left
    assert "of alpha 0.05, 0.0083 was used for this attempt and 0.017 is left" in text


def test_without_a_champion_it_shows_what_failed(tmp_path):
    challenger, _ = both(tmp_path)
    text = write_review(
        tmp_path / "r.md", challenger, None, {}, PromotionSettings(), title="t", verdict="v", seed=0
    )
    assert "There is no champion yet" in text and "2 of 2 episodes that failed." in text
    assert "| turn | version 4: wrong, reward 0 |" in text


def test_where_success_is_unknown_rewards_are_shown(tmp_path):
    """Check the review of a first version, lowest rewards first, and of a pair, worst losses first."""

    def build_side(name, label, rewards):
        episodes = [
            build_episode(seed, None, reward=reward, text=f"look {reward}")
            for seed, reward in enumerate(rewards)
        ]
        return side(tmp_path / name, label, episodes)

    challenger = build_side("new", "version 4", [0.5, -1.0, 0.25])
    champion = build_side("old", "champion 3", [0.5, 0.0, 1.0])
    options = {"title": "t", "verdict": "v", "seed": 0}
    settings = PromotionSettings(metric="reward")
    text = write_review(tmp_path / "a.md", challenger, None, {}, settings, **options)
    assert "Success is unknown: the environment has no verifier. Mean reward: -0.08333." in text
    assert "### Lowest rewards" in text and "3 of 3 episodes, the lowest reward first." in text
    places = [text.index(f"version 4: reward {reward} ") for reward in ("-1", "0.25", "0.5")]
    assert places == sorted(places) and "failed" not in text
    text = write_review(tmp_path / "b.md", challenger, champion, {}, settings, **options)
    assert "| **all** |  |  | unknown | -0.583 [" in text
    assert "2 of 2 episodes that got worse." in text
    assert text.index("\\#1**") < text.index("\\#2**")
    assert "| turn | champion 3: reward 0 | version 4: reward -1 |" in text


def test_the_report_shows_both_side_by_side(tmp_path):
    from rl_core.settings import AnalysisSettings

    challenger, champion = both(tmp_path)
    settings = AnalysisSettings(bootstrap_samples=100, side_by_side=0)
    files = write_report(
        tmp_path / "out", challenger, champion, trained(tmp_path), settings, "title", seed=0
    )
    page = files[0].read_text()
    assert (
        files[0].name == "report.html"
        and "champion_3" in page
        and "version_4" in page
        and "answer 0" in page
    )


def test_spark():
    assert draw_sparkline([0, 7]) == "▁█"
    assert draw_sparkline([5, 5, 5]) == "▁▁▁"
    assert draw_sparkline([float("nan"), 1, float("inf"), 2]) == "▁█"
    assert draw_sparkline([]) == ""
    assert draw_sparkline([0, 2, 5, 9], points=2) == "▁█"  # means 1 and 7
    assert len(draw_sparkline(list(range(1000)))) == 24
