"""The promotion gate: numbers worked by hand, both ways."""

import json
from types import SimpleNamespace

import pytest

from rl_core.evaluation import compare, summarize
from rl_core.storage.folders import digest_folder
from rl_core.types import Trajectory
from tasks.config import from_dict
from tasks.config.settings import PromotionSettings
from tasks.pipeline.stage import StageContext, StageResult
from tasks.stages import promote
from tasks.stages.promote import ChampionChanged, decide


def evaluation(successes):
    """An evaluation of episodes 0, 1, 2, ... with these outcomes."""
    return summarize(
        Trajectory(
            environment="e",
            level="l",
            kind="k",
            seed=seed,
            prompt="p",
            target="t",
            success=bool(won),
            reward=float(won),
        )
        for seed, won in enumerate(successes)
    )


@pytest.mark.parametrize(("wins", "promoted"), [(6, True), (5, True), (4, False)])
def test_without_a_champion_the_minimum_decides(wins, promoted):
    found, reason, numbers = decide(
        evaluation([1] * wins + [0] * (10 - wins)), None, PromotionSettings(min_success=0.5), None, seed=0
    )
    assert found is promoted
    assert numbers == {"success_rate": wins / 10}
    assert ("at least" in reason) is promoted


def test_a_clear_gain_is_promoted_and_a_clear_loss_is_not():
    weak, strong = evaluation([1, 0] * 50), evaluation([1, 1] * 40 + [1, 0] * 10)
    settings = PromotionSettings(min_gain=0.0)
    up, reason, numbers = decide(strong, weak, settings, 3, seed=0)
    assert up
    assert "version 3" in reason
    assert numbers["gain"] == pytest.approx(0.4)  # 90 of 100 against 50 of 100, on the same episodes
    # standard error sqrt(.4 * .6 / 100) = .049, so about .40 -+ .096
    assert 0.28 < numbers["gain_low"] < 0.33
    assert 0.47 < numbers["gain_high"] < 0.52
    down, _, numbers = decide(weak, strong, settings, 3, seed=0)
    assert not down
    assert numbers["gain"] == pytest.approx(-0.4)


def test_a_gain_within_the_noise_is_not_promoted():
    champion = evaluation([1, 0] * 20)
    challenger = evaluation([1, 0] * 18 + [0, 1, 1, 1])  # two episodes more, of 40
    promoted, reason, numbers = decide(challenger, champion, PromotionSettings(), 1, seed=0)
    assert not promoted
    assert numbers["gain"] > 0 >= numbers["gain_low"]
    assert "not above" in reason


def test_min_gain_raises_the_bar():
    weak, strong = evaluation([1, 0] * 50), evaluation([1, 1] * 40 + [1, 0] * 10)
    assert not decide(strong, weak, PromotionSettings(min_gain=0.39), 1, seed=0)[0]


def test_no_difference_at_all_is_not_above_zero():
    """Every resample of equal outcomes has the gain 0: the bound equals min_gain, which is not above it."""
    both = evaluation([1, 0] * 20)
    promoted, _, numbers = decide(both, both, PromotionSettings(min_gain=0.0), 1, seed=0)
    assert not promoted and (numbers["gain_low"], numbers["gain_high"]) == (0.0, 0.0)
    assert decide(both, both, PromotionSettings(min_gain=-0.01), 1, seed=0)[0]


def test_confidence_samples_and_seed_are_those_of_the_settings(monkeypatch):
    asked = []

    def noted(*models, **options):
        asked.append((models, options))
        return compare(*models, **options)

    monkeypatch.setattr(promote, "compare", noted)
    new, old = evaluation([1, 1, 0] * 20), evaluation([1, 0, 0] * 20)
    settings = PromotionSettings(confidence=0.6, bootstrap_samples=150)
    numbers = decide(new, old, settings, 1, seed=7)[2]
    assert asked == [((new, old), {"bootstrap_samples": 150, "seed": 7, "confidence": 0.6})]
    expected = compare(new, old, bootstrap_samples=150, seed=7, confidence=0.6).success
    assert (numbers["gain_low"], numbers["gain_high"]) == (expected.low, expected.high)


class Registry:
    """Remembers what was done to which version."""

    def __init__(self, champion=None):
        self.done, self.found = [], champion

    def champion(self, name):
        return self.found

    def versions(self, name):
        return []

    def replace_champion(self, name, version, before):
        assert before == (self.found and self.found.version)
        self.done.append(("champion", name, version))
        return True

    def set_challenger(self, name, version):
        self.done.append(("challenger", name, version))

    def tag_version(self, name, version, tags):
        self.done.append((tags["gate.decision"], name, version))


def stage_result(folder):
    return StageResult("policy", str(folder), "d", "k", False, 1.0, "r", {})


@pytest.mark.parametrize(
    ("wins", "approve", "decision", "alias"),
    [
        (8, "auto", "promoted", "champion"),
        (2, "auto", "rejected", "challenger"),
        (8, "manual", "awaiting approval", "challenger"),  # it passed, and a person has the last word
        (2, "manual", "rejected", "challenger"),  # nobody is asked about what did not pass
    ],
)
def test_the_alias_goes_where_the_gate_says(tmp_path, monkeypatch, wins, approve, decision, alias):
    monkeypatch.setattr(promote, "read_evaluation", lambda folder, name: evaluation([1] * wins + [0] * (10 - wins)))
    monkeypatch.setattr(promote, "_explain", lambda *arguments, **options: None)  # what a reviewer reads
    registry = Registry()
    pipeline_run = SimpleNamespace(
        registered_model="m",
        tracking=registry,
        parent="parent",
        models=SimpleNamespace(ensure_version=lambda challenger, tracker: 4),
    )
    tracker = SimpleNamespace(log_metrics=lambda *a: None, set_tag=lambda *a: None)
    context = StageContext(
        name="promote", folder=tmp_path, settings=PromotionSettings(min_success=0.5, approve=approve),
        pipeline_run=pipeline_run, tracker=tracker,
        pipeline=from_dict({"name": "t", "environment": {"name": "arithmetic"}, "stages": {"sft": {}}}),
        inputs={"evaluation": tmp_path}, seed=0, fingerprint={}, stop=None,
    )  # fmt: skip
    summary = promote._gate(context, "policy", stage_result(tmp_path), None, None)
    assert (summary["decision"], summary["model_version"], summary["champion_before"]) == (decision, 4, None)
    assert registry.done == [(decision, "m", 4), (alias, "m", 4)]
    assert ("approval_timeout_seconds" in summary) is (decision == "awaiting approval")
    assert json.loads((tmp_path / "decision.json").read_text())["metrics"] == {"promotion/success_rate": wins / 10}


def test_the_champion_itself_is_not_played_again(tmp_path):
    (tmp_path / "model").mkdir()
    (tmp_path / "model" / "weights").write_text("w")
    tags = {"model_sha256": digest_folder(tmp_path / "model")}
    registry = Registry(SimpleNamespace(name="m", version=3, tags=tags, run_id="r"))
    cached = []
    pipeline_run = SimpleNamespace(
        settings=SimpleNamespace(stages=SimpleNamespace(promote=None)), registered_model="m", tracking=registry,
        tracker=SimpleNamespace(note_cached=lambda name, source: cached.append((name, source))),
    )  # fmt: skip
    found = promote.promote(pipeline_run, stage_result(tmp_path), stage_result(tmp_path), None)
    assert found.summary["note"] == "version 3 of m is the champion already" and cached == [("promote", "r")]
    assert registry.done == []


def test_a_champion_that_came_meanwhile_is_compared_with_in_turn(monkeypatch):
    met = []

    def once(*arguments):
        met.append(arguments)
        if len(met) < 3:
            raise ChampionChanged("x has another champion than 1 since the comparison began")
        return "promoted"

    monkeypatch.setattr(promote, "_promote", once)
    assert promote.promote("session", "evaluation", "challenger", None) == "promoted"
    assert met == [("session", "evaluation", "challenger", None)] * 3


def test_champions_that_change_for_ever_end_in_an_error(monkeypatch):
    met = []

    def never(*arguments):
        met.append(arguments)
        raise ChampionChanged("again")

    monkeypatch.setattr(promote, "_promote", never)
    with pytest.raises(ChampionChanged):
        promote.promote("session", "evaluation", "challenger", None)
    assert len(met) == promote.CHAMPIONS_MET
