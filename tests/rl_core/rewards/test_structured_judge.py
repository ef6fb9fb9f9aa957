"""Judges whose reply is a JSON object of a fixed form: what is asked for, how it is read, a local model."""

import importlib.util
import json

import pytest
from helpers.fakes.judge_server import run_judge_server

import rl_core
from rl_core.errors import SettingsError
from rl_core.rewards.judges.judge_reward import JudgeReward
from rl_core.rewards.judges.questions import (
    JudgedSample,
    build_choice_question,
    build_ranking_question,
    build_rubric_question,
    build_score_question,
)
from rl_core.rewards.judges.replies import read_grades
from rl_core.settings import JudgeSettings

CRITERIA = ({"name": "correct", "weight": 3.0}, {"name": "short"})
SAMPLES = [JudgedSample("q", text) for text in ("a", "bb", "ccc")]
MODES = ["score", "rubric", "ranking", "pairwise"]


def build_settings(mode, **changed):
    criteria = CRITERIA if mode == "rubric" else ()
    defaults = {"url": "http://127.0.0.1:9", "model": "j", "mode": mode, "structured": True}
    return JudgeSettings(**{**defaults, "criteria": criteria, **changed})


def build_question(settings):
    match settings.mode:
        case "score":
            return build_score_question(SAMPLES[0], settings)
        case "rubric":
            return build_rubric_question(SAMPLES[0], settings, 0)
        case "ranking":
            return build_ranking_question(SAMPLES, settings, 0)[1]
    return build_choice_question(*SAMPLES[:2], settings)


REPLIES = {
    "score": ({"score": 7}, 0.7),
    "rubric": ({"correct": 10, "short": 5}, {"correct": 1.0, "short": 0.5}),
    "ranking": ({"1": 40, "2": 90, "3": 40}, [1, 0, 1]),
    "pairwise": ({"better": "tie"}, 0.5),
}


@pytest.mark.parametrize("mode", MODES)
def test_the_form_that_is_asked_for_is_read(mode):
    question = build_question(build_settings(mode))
    reply, verdict = REPLIES[mode]
    assert question.read(json.dumps(reply)) == verdict
    assert (
        sorted(question.schema["properties"])
        == sorted(reply)
        == sorted(question.schema["required"])
    )
    assert question.schema["additionalProperties"] is False
    assert "reasons" not in question.messages[-1]["content"]
    free = build_question(build_settings(mode, structured=False))
    assert free.schema is None
    if mode != "score":
        assert "Give brief reasons" in free.messages[-1]["content"]


@pytest.mark.parametrize(
    ("scale", "expected"),
    [
        ((0, 10), ("integer", 0, 10)),
        ((0, 1), ("number", 0, 1)),
        ((-0.5, 9.5), ("number", -0.5, 9.5)),
    ],
)
def test_scores_are_whole_numbers_only_of_a_wide_scale(scale, expected):
    settings = build_settings("score", lowest=scale[0], highest=scale[1])
    schema = build_question(settings).schema["properties"]["score"]
    assert (schema["type"], schema["minimum"], schema["maximum"]) == expected


def test_equal_grades_share_a_rank_and_each_answer_needs_one():
    assert read_grades('{"1": 3, "2": "9", "3": 3, "4": 0}', 4) == [1, 0, 1, 2]
    for reply in ('{"1": 3}', '{"1": 3, "2": null}', '{"1": 3, "2": true}', '{"1": 3, "2": NaN}'):
        with pytest.raises(ValueError):
            read_grades(reply, 2)


def test_a_server_gets_the_form_and_cached_free_replies_do_not_count(tmp_path):
    bodies = []
    with run_judge_server(lambda *texts: 1.0) as server:
        server.reply = lambda prompt: json.dumps({"better": "A"})
        server.watch = bodies.append
        options = {"url": server.url, "cache": str(tmp_path), "retries": 0}
        for structured in (False, True, True):
            settings = build_settings("pairwise", structured=structured, **options)
            JudgeReward(settings).judge_samples(SAMPLES[:2], [2])
    assert [("response_format" in body) for body in bodies] == [False, False, True, True]
    form = bodies[-1]["response_format"]["json_schema"]
    assert form["strict"] is True
    assert form["schema"]["properties"]["better"]["enum"] == ["A", "B", "tie"]


def test_a_pattern_is_refused():
    with pytest.raises(SettingsError, match="pattern: not used with structured"):
        build_settings("score", pattern="x(.)")


def test_the_missing_package_is_named(monkeypatch):
    find_spec = importlib.util.find_spec
    monkeypatch.setattr(
        importlib.util, "find_spec", lambda name: None if name == "llguidance" else find_spec(name)
    )
    with pytest.raises(SettingsError, match="--extras structured"):
        JudgeReward(build_settings("pairwise", url=None, model=None, path="a/folder"))


@pytest.fixture(scope="module")
def untrained(tmp_path_factory):
    """A random model, which by itself never gives a verdict."""
    model = {"preset": "nano", "vocab_size": 500, "context": 1024, "device": "cpu"}
    text = 'Give brief reasons better: A {"score": 7}'
    return rl_core.create_policy([text], model).save(tmp_path_factory.mktemp("judge") / "model")


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("temperature", [0.0, 1.5])
def test_a_model_in_this_process_always_gives_a_verdict(untrained, tmp_path, mode, temperature):
    pytest.importorskip("llguidance")

    def judge_samples(concurrency, structured=True):
        settings = build_settings(
            mode,
            url=None,
            model=None,
            path=str(untrained),
            structured=structured,
            temperature=temperature,
            concurrency=concurrency,
            max_tokens=200,  # white space of a random model included
            cache=str(tmp_path / f"{concurrency} {structured}"),
        )
        judge = JudgeReward(settings, lambda failed, judged: False)
        return judge.judge_samples(SAMPLES, [3]), judge.metrics["failed"]

    scores, failed = judge_samples(8)
    assert failed == 0 and all(0 <= score <= 1 for score in scores)
    assert judge_samples(2) == (scores, 0)  # whatever is decoded together
    assert judge_samples(8, structured=False) == ([None] * 3, 3)


def test_free_and_structured_replies_of_a_local_model_are_cached_apart(untrained, tmp_path):
    pytest.importorskip("llguidance")
    keys = set()
    for structured in (False, True):
        local = {"url": None, "model": None, "path": str(untrained), "cache": str(tmp_path)}
        settings = build_settings("score", structured=structured, **local)
        keys.add(JudgeReward(settings).client.compute_key(build_question(settings)))
    assert len(keys) == 2  # the texts of this mode are the same
