"""The stage `promote`: the alias, the attempts, and champions that change meanwhile."""

import json
from types import SimpleNamespace

import pytest
from helpers.evaluations import build_evaluation

from rl_core.errors import ExportMismatch
from rl_core.storage.manifest import digest_folder
from tasks.config import build_settings
from tasks.config.settings import PromotionSettings
from tasks.pipeline.stage import StageContext
from tasks.pipeline.stage_result import StageResult
from tasks.stages import promote
from tasks.stages.export import verify_proof
from tasks.stages.promote import ChampionChanged, Opponent
from tasks.tracking import ModelVersion


class Registry:
    """Remembers what was done to which version."""

    def __init__(self, champion=None):
        self.done, self.champion, self.tags, self.shown = [], champion, {}, {}

    def find_champion(self, name):
        return self.champion

    def list_versions(self, name):
        return []

    def replace_champion(self, name, version, before):
        assert before == (self.champion and self.champion.version)
        self.done.append(("champion", name, version))
        return True

    def set_challenger(self, name, version):
        self.done.append(("challenger", name, version))

    def tag_version(self, name, version, tags):
        self.done.append((tags["gate.decision"], name, version))
        self.shown = tags

    def read_model_tags(self, name):
        return dict(self.tags)

    def tag_model(self, name, key, value):
        self.tags[key] = value


def store_evaluation(folder, **outcomes):
    """Store an evaluation of models with these outcomes and return its result."""
    folder.mkdir(exist_ok=True)
    rows = {name: result.to_json() for name, result in outcomes.items()}
    (folder / "evaluation.json").write_text(json.dumps(rows))
    (folder / "summary.json").write_text(json.dumps({"models": {}}))
    return StageResult("evaluate", str(folder), "d", "k", False, 1.0, "r", {})


def run_gate(folder, registry, settings, ours, opponent=None, logged=None):
    """Run the stage's body, with the challenger's outcomes `ours`."""
    pipeline_run = SimpleNamespace(
        registered_model="m",
        tracking=registry,
        parent="parent",
        models=SimpleNamespace(ensure_version=lambda challenger, tracker: 4),
    )
    tracker = SimpleNamespace(
        log_metrics=lambda metrics, step: (logged if logged is not None else {}).update(metrics),
        log_alias=lambda alias, model, tags: None,
        set_tag=lambda *a: None,
    )
    context = StageContext(
        name="promote",
        folder=folder,
        settings=settings,
        pipeline_run=pipeline_run,
        tracker=tracker,
        pipeline=build_settings(
            {"name": "t", "environment": {"name": "arithmetic"}, "stages": {"sft": {}}}
        ),
        inputs={"evaluation": store_evaluation(folder / "ours", policy=ours).path},
        seed=0,
        fingerprint={},
        stop=None,
    )
    return promote._run_gate(
        context, build_stage_result(folder), opponent, {"export.model_sha256": "d"}
    )


def build_proof(folder, model, **changed):
    """Build a result of the stage `export` for the model `policy` in this folder."""
    figures = {"max": 2e-6, "mean": 1e-7, "tokens": 5}
    facts = {
        "model_sha256": digest_folder(model),
        "trained": figures,
        "evaluated": figures,
        **changed,
    }
    folder.mkdir()
    (folder / "export.json").write_text(json.dumps({"models": {"policy": facts}}))
    return StageResult("export", str(folder), "d", "k", False, 1.0, "r", {})


def build_stage_result(folder):
    (folder / "model").mkdir(parents=True, exist_ok=True)
    return StageResult("policy", str(folder), "d", "k", False, 1.0, "r", {})


@pytest.mark.parametrize(
    ("wins", "approve", "decision", "alias"),
    [
        (8, "auto", "promoted", "champion"),
        (2, "auto", "rejected", "challenger"),
        (
            8,
            "manual",
            "awaiting approval",
            "challenger",
        ),  # it passed, and a person has the last word
        (2, "manual", "rejected", "challenger"),  # nobody is asked about what did not pass
    ],
)
def test_the_alias_goes_where_the_gate_says(tmp_path, monkeypatch, wins, approve, decision, alias):
    monkeypatch.setattr(
        promote, "_write_evidence", lambda *arguments, **options: None
    )  # what a reviewer reads
    registry = Registry()
    settings = PromotionSettings(min_success=0.5, approve=approve)
    summary = run_gate(
        tmp_path, registry, settings, build_evaluation(([1] * wins + [0] * (10 - wins)) * 5)
    )
    assert (summary["decision"], summary["model_version"], summary["champion_before"]) == (
        decision,
        4,
        None,
    )
    assert registry.done == [(decision, "m", 4), (alias, "m", 4)]
    assert ("approval_timeout_seconds" in summary) is (decision == "awaiting approval")
    assert json.loads((tmp_path / "decision.json").read_text())["metrics"] == {
        "promotion/success_rate": wins / 10
    }
    assert registry.tags == {}  # nothing was compared


def build_opponent(folder, outcomes, version=3, comparison="c"):
    champion = ModelVersion("m", version, "r", None)
    return Opponent(
        champion, store_evaluation(folder / f"theirs{version}", champion=outcomes), comparison, 0
    )


def test_the_same_comparison_is_one_attempt_and_other_ones_are_counted_on(tmp_path, monkeypatch):
    """15 better and 5 worse of 100: p = .0207, enough for the first attempt (.025), not for the second (.0083)."""
    monkeypatch.setattr(promote, "_write_evidence", lambda *arguments, **options: None)
    theirs = build_evaluation([0] * 15 + [1] * 85)
    ours = build_evaluation([1] * 15 + [0] * 5 + [1] * 80)
    other = build_evaluation([1] * 14 + [0] + [0] * 4 + [1] * 81)
    registry, settings, logged = Registry(), PromotionSettings(), {}
    registry.champion = ModelVersion("m", 3, "r", None)
    opponent = build_opponent(tmp_path, theirs)
    for _ in range(2):  # run again with --fresh, or resumed
        summary = run_gate(tmp_path, registry, settings, ours, opponent, logged)
        assert summary["decision"] == "promoted" and len(registry.tags) == 1
    assert (logged["promotion/attempt"], logged["promotion/alpha"]) == (1, 0.025)
    assert logged["promotion/p_value"] == pytest.approx(0.0207, abs=1e-4)
    assert (registry.shown["gate.attempt"], registry.shown["gate.alpha_left"]) == ("1", "0.025")

    registry.champion = ModelVersion(
        "m", 4, "r", None
    )  # another champion; the episodes are the same
    later = build_opponent(tmp_path, theirs, version=4, comparison="d")
    summary = run_gate(tmp_path, registry, settings, ours, later, logged)
    assert summary["decision"] == "rejected" and logged["promotion/attempt"] == 2
    assert "attempt 2 on these episodes, 0.017 of alpha 0.05 left" in summary["reason"]
    assert (
        json.loads((tmp_path / "decision.json").read_text())["metrics"]["promotion/alpha_left"]
        == 0.05 / 3
    )
    run_gate(
        tmp_path, registry, settings, other, later, logged
    )  # not the same outcomes: another look
    assert logged["promotion/attempt"] == 3
    stored = sorted(
        (json.loads(value)["number"], json.loads(value)["decision"])
        for value in registry.tags.values()
    )
    assert stored == [(1, "promoted"), (2, "rejected"), (3, "rejected")]


def test_too_few_episodes_decide_nothing_and_spend_nothing(tmp_path, monkeypatch):
    monkeypatch.setattr(promote, "_write_evidence", lambda *arguments, **options: None)
    registry = Registry(ModelVersion("m", 3, "r", None))
    opponent = build_opponent(tmp_path, build_evaluation([0] * 20))
    summary = run_gate(
        tmp_path, registry, PromotionSettings(), build_evaluation([1] * 20), opponent
    )
    assert (
        summary["decision"] == "rejected"
        and "20 held-out episodes are too few" in summary["reason"]
    )
    assert registry.tags == {}


def test_the_review_lists_the_attempts_before(tmp_path, monkeypatch):
    shown = []
    registry = Registry(ModelVersion("m", 3, "r", None))

    def explained(context, ours, theirs, start, verdict, attempt, *, report):
        shown.append(promote._list_shared_attempts(context, attempt))

    monkeypatch.setattr(promote, "_write_evidence", explained)
    for wins in (5, 6, 7):
        opponent = build_opponent(tmp_path, build_evaluation([0] * 60))
        run_gate(
            tmp_path,
            registry,
            PromotionSettings(),
            build_evaluation([1] * wins + [0] * (60 - wins)),
            opponent,
        )
    assert [[attempt.number for attempt in result] for result in shown] == [[1], [1, 2], [1, 2, 3]]
    assert shown[-1][-1].decision == "rejected" and shown[-1][0].p_value == pytest.approx(1 / 32)


def test_the_champion_itself_is_not_played_again(tmp_path):
    (tmp_path / "model").mkdir()
    (tmp_path / "model" / "weights").write_text("w")
    tags = {"model_sha256": digest_folder(tmp_path / "model")}
    registry = Registry(SimpleNamespace(name="m", version=3, tags=tags, run_id="r"))
    cached, tags = [], {}
    pipeline_run = SimpleNamespace(
        settings=SimpleNamespace(stages=SimpleNamespace(promote=None)),
        registered_model="m",
        tracking=registry,
        parent=SimpleNamespace(set_tag=tags.__setitem__),
        tracker=SimpleNamespace(
            record_cached_stage=lambda name, source: cached.append((name, source))
        ),
        resumed=False,
    )
    proof = build_proof(tmp_path / "proof", tmp_path / "model")
    result = promote.promote_challenger(
        pipeline_run, build_stage_result(tmp_path), build_stage_result(tmp_path), None, proof
    )
    assert result.summary["note"] == "version 3 of m is the champion already" and cached == [
        ("promote", "r")
    ]
    assert registry.done == [] and tags == {"gate.reason": result.summary["note"]}


def test_a_champion_that_came_meanwhile_is_compared_with_in_turn(monkeypatch):
    met = []

    def once(*arguments):
        met.append(arguments)
        if len(met) < 3:
            raise ChampionChanged("x has another champion than 1 since the comparison began")
        return "promoted"

    monkeypatch.setattr(promote, "_run_promotion", once)
    assert (
        promote.promote_challenger("session", "evaluation", "challenger", None, "proof")
        == "promoted"
    )
    assert met == [("session", "evaluation", "challenger", None, "proof", None)] * 3


def test_champions_that_change_for_ever_end_in_an_error(monkeypatch):
    met = []

    def never(*arguments):
        met.append(arguments)
        raise ChampionChanged("again")

    monkeypatch.setattr(promote, "_run_promotion", never)
    with pytest.raises(ChampionChanged):
        promote.promote_challenger("session", "evaluation", "challenger", None, "proof")
    assert len(met) == promote.MAX_COMPARISONS


def test_the_figures_of_the_proof_are_tags(tmp_path):
    build_stage_result(tmp_path)
    tags = verify_proof(
        build_proof(tmp_path / "proof", tmp_path / "model"), "policy", tmp_path / "model"
    )
    assert tags == {
        "export.model_sha256": digest_folder(tmp_path / "model"),
        "export.trained_difference_max": "2e-06",
        "export.trained_difference_mean": "1e-07",
        "export.evaluated_difference_max": "2e-06",
        "export.evaluated_difference_mean": "1e-07",
    }


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (
            lambda proof, model: (proof / "export.json").unlink(),
            r"is not a valid proof of export \(FileNotFoundError\)",
        ),
        (
            lambda proof, model: (proof / "export.json").write_text("[]"),
            r"is not a valid proof of export \(TypeError\)",
        ),
        (
            lambda proof, model: (proof / "export.json").write_text('{"models": {"sft": {}}}'),
            "does not cover this model",
        ),
        (
            lambda proof, model: (model / "weights").write_text("other"),
            "is of the folder [0-9a-f]{12}, and this one is",
        ),
    ],
)
def test_a_model_without_a_proof_of_exactly_its_folder_is_not_promoted(tmp_path, change, message):
    """The registry is not asked and no models are compared: the run ends with one line."""
    challenger = build_stage_result(tmp_path)
    proof = build_proof(tmp_path / "proof", tmp_path / "model")
    change(tmp_path / "proof", tmp_path / "model")
    pipeline_run = SimpleNamespace(
        settings=SimpleNamespace(stages=SimpleNamespace(promote=None)),
        registered_model="m",
        tracking=Registry(),
    )
    with pytest.raises(ExportMismatch, match=f"is not promoted: .*{message}") as refused:
        promote.promote_challenger(pipeline_run, challenger, challenger, None, proof)
    assert "\n" not in str(refused.value) and pipeline_run.tracking.done == []
