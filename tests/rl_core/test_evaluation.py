import json
import logging

import pytest
from helpers.evaluations import build_evaluation
from numpy.testing import assert_allclose

from rl_core.analysis.statistics import wilson_interval
from rl_core.environments.environment import Environment, Episode, Step
from rl_core.environments.step_pool import wait_for_observation
from rl_core.environments.tools import Toolset
from rl_core.errors import DataError, EnvironmentFault, SettingsError
from rl_core.evaluation import (
    Evaluation,
    compare,
    compute_paired_differences,
    evaluate,
    summarize_trajectories,
)
from rl_core.rollouts.episode_sequence import EpisodeRequest
from rl_core.rollouts.heldout_episodes import draw_heldout_requests, draw_validation_requests
from rl_core.settings import EvaluationSettings, SamplingSettings
from rl_core.types import StopReason, ToolCall, Trajectory, Turn

SAMPLING = SamplingSettings(max_completion_tokens=100, max_turns=4)


class SumEpisode(Episode):
    """Episode in which 'look' shows the number and 'answer N' ends it; even and odd seeds are different kinds."""

    def reset(self):
        self.kind = "odd" if self.seed % 2 else "even"
        self.prompt, self.target = f"{self.level} {self.seed}", str(self.seed)
        return [{"role": "user", "content": self.prompt}]

    def act(self, text):
        if text == "look":
            return Step([{"role": "tool", "content": self.target}], tool_call=ToolCall("look", {}))
        if text.startswith("answer "):
            answer = text.removeprefix("answer ")
            right = answer == self.target
            return Step(reward=float(right), terminated=True, success=right, answer=answer)
        return Step([{"role": "tool", "content": "error"}], is_error=True)


class SumEnvironment(Environment):
    name = "sums"
    levels = ("easy", "hard", "rare")

    @property
    def tools(self):
        return Toolset([])

    def episode(self, seed, level):
        self.check_level(level)
        return SumEpisode(seed, level)

    def seeds_of(self, split, level):
        return [5, 9, 13] if level == "rare" else super().seeds_of(split, level)


class Letters:
    """Renderer whose tokens are characters; 0 ends a turn."""

    def prompt_ids(self, messages):
        return [ord(c) for m in messages for c in m["content"]]

    observation_ids = prompt_ids

    def action_text(self, ids):
        return "".join(chr(i) for i in ids if i)


class Scripted:
    """Backend that plays what a function of (prompt, text seen so far, sample number) returns."""

    max_length = 200

    def __init__(self, policy):
        self.policy = policy

    def refresh(self):
        """Do nothing, as it has no weights."""

    def run_sequences(self, sequences, sampling):
        observed = {}
        for sequence in sequences:
            prompt = "".join(map(chr, sequence.prompt_ids))
            sample = observed[prompt] = observed.get(prompt, -1) + 1
            observation = ""
            while observation is not None:
                ids = [*map(ord, self.policy(prompt, observation, sample)), 0]
                after = wait_for_observation(sequence.take_action(ids, [-0.5] * len(ids), False))
                observation = None if after is None else "".join(map(chr, after))


def evaluate_policy(policy, requests, samples=1):
    return evaluate(
        SumEnvironment(),
        Scripted(policy),
        Letters(),
        requests,
        samples=samples,
        sampling=SAMPLING,
        seed=0,
    )


def test_failed_episodes_count_nowhere_but_by_themselves():
    class BreakingSum(SumEpisode):
        def act(self, text):
            if text == "answer 0" and self.seed == 3:
                raise TimeoutError("judge")
            return super().act(text)

    class Breaking(SumEnvironment):
        def episode(self, seed, level):
            return BreakingSum(seed, level)

    def zero_second(prompt, observation, sample):
        return (
            "answer 0"
            if sample or prompt.startswith("hard")
            else look_first(prompt, observation, sample)
        )

    result = evaluate(
        Breaking(), Scripted(zero_second), Letters(), REQUESTS, samples=2, sampling=SAMPLING, seed=0
    )
    assert result.failed_episodes == 3  # easy 3: the second sample; hard 3: both
    assert [(e.level, e.seed, e.samples, e.successes) for e in result.episodes if e.seed == 3] == [
        ("easy", 3, 1, 1)
    ]
    assert result.samples == 17 and result.metrics()["eval/failed_episodes"] == 3.0
    assert result.reward_mean == pytest.approx(5 / 17)
    assert Evaluation.from_json(json.loads(json.dumps(result.to_json()))).failed_episodes == 3
    strict = SamplingSettings(
        max_completion_tokens=100, max_turns=4, max_failed_share=0.05
    )  # of 50: two may fail
    with pytest.raises(
        EnvironmentFault, match=r"3 of the newest 20 episodes failed .*TimeoutError: judge"
    ):
        evaluate(
            Breaking(),
            Scripted(zero_second),
            Letters(),
            REQUESTS,
            samples=2,
            sampling=strict,
            seed=0,
        )


def look_first(prompt, observation, sample):
    return f"answer {observation}" if observation else "look"


def fail_on_hard(prompt, observation, sample):
    return "answer 0" if prompt.startswith("hard") else look_first(prompt, observation, sample)


REQUESTS = [EpisodeRequest(level, seed) for seed in range(1, 6) for level in ("easy", "hard")]


def test_requests_are_equal_shares_and_the_same_every_time():
    settings = EvaluationSettings(episodes=11, levels=("easy", "hard"))
    requests = draw_heldout_requests(SumEnvironment(), settings, seed=3)
    assert [request.level for request in requests] == ["easy", "hard"] * 5 + ["easy"]
    assert requests == draw_heldout_requests(SumEnvironment(), settings, seed=3)
    assert requests != draw_heldout_requests(SumEnvironment(), settings, seed=4)
    assert len(set(requests)) == 11
    assert all(request.seed in SumEnvironment().seeds("heldout") for request in requests)
    assert not any(request.seed in SumEnvironment().seeds("train") for request in requests)


def test_a_level_draws_the_same_seeds_whatever_the_other_levels():
    both = draw_heldout_requests(
        SumEnvironment(), EvaluationSettings(episodes=8, levels=("easy", "hard")), 0
    )
    alone = draw_heldout_requests(
        SumEnvironment(), EvaluationSettings(episodes=4, levels=("hard",)), 0
    )
    assert [r for r in both if r.level == "hard"] == alone


def test_a_scarce_level_gives_all_it_has(caplog):
    with caplog.at_level(logging.WARNING):
        requests = draw_heldout_requests(SumEnvironment(), EvaluationSettings(episodes=30), 0)
    assert sorted(r.seed for r in requests if r.level == "rare") == [5, 9, 13]
    assert len(requests) == 23 and "3 held-out episodes, fewer than 10" in caplog.text


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"levels": ("easi",)}, "did you mean 'easy'"),
        ({"levels": ("easy", "easy")}, "twice"),
        ({"episodes": 2}, "fewer than the 3 levels"),
    ],
)
def test_requests_refuse(settings, message):
    with pytest.raises(SettingsError, match=message):
        draw_heldout_requests(SumEnvironment(), EvaluationSettings(**settings), 0)


def test_requests_refuse_a_level_without_episodes():
    environment = SumEnvironment()
    environment.seeds_of = lambda split, level: []
    with pytest.raises(DataError, match="no held-out episodes of level 'easy'"):
        draw_heldout_requests(environment, EvaluationSettings(), 0)


def test_draws_share_no_episode_and_end_with_the_pool(caplog):
    environment = SumEnvironment()
    pool = range(2**30, 2**30 + 100)
    environment.seeds_of = lambda split, level: pool
    chosen = {"episodes": 20, "levels": ("easy",)}
    first = draw_heldout_requests(environment, EvaluationSettings(**chosen), 0)
    excluded = [
        EpisodeRequest("easy", seed) for seed in pool if EpisodeRequest("easy", seed) not in first
    ][:20]
    observed = {request.seed for request in first + excluded}
    for draw in (1, 2, 3):
        requests = draw_heldout_requests(
            environment, EvaluationSettings(**chosen, episodes_draw=draw), 0, excluded
        )
        assert len(requests) == 20 and not observed & {request.seed for request in requests}
        assert requests == draw_heldout_requests(
            environment, EvaluationSettings(**chosen, episodes_draw=draw), 0, excluded
        )
        observed |= {request.seed for request in requests}
    with pytest.raises(
        DataError,
        match=r"level 'easy' has 100 held-out episodes, too few for draw 4 of 20 .*: 0 whose question is new",
    ):
        draw_heldout_requests(
            environment, EvaluationSettings(**chosen, episodes_draw=4), 0, excluded
        )


def test_differences_are_those_of_the_common_episodes():
    ours, theirs = (
        build_evaluation([2, 1, 0, 2], samples=2),
        build_evaluation([1, 1, 2], samples=2, first=1),
    )
    assert compute_paired_differences(ours, theirs) == [0.0, -0.5, 0.0]
    assert compute_paired_differences(ours, theirs, "reward") == [0.0, -0.5, 0.0]
    with pytest.raises(DataError, match="no episode in common"):
        compute_paired_differences(ours, build_evaluation([1], first=9))


def test_validation_episodes_are_held_out_and_not_reported_on():
    environment, levels = SumEnvironment(), ("easy", "hard")
    reported = draw_heldout_requests(environment, EvaluationSettings(episodes=6), 3)
    actual = draw_validation_requests(environment, len(levels) * 2, levels, 3, reported)
    assert len(actual) == len(set(actual)) == len(levels) * 2 and not set(actual) & set(reported)
    assert all(request.seed in environment.seeds_of("heldout", request.level) for request in actual)
    assert actual == draw_validation_requests(environment, len(levels) * 2, levels, 3, reported)


def test_validation_needs_episodes_that_are_left():
    environment = SumEnvironment()
    scarce = min(environment.levels, key=lambda level: len(environment.seeds_of("heldout", level)))
    total = len(environment.seeds_of("heldout", scarce))
    reported = [
        EpisodeRequest(scarce, seed)
        for seed in environment.seeds_of("heldout", scarce)[: total - 1]
    ]
    with pytest.raises(
        SettingsError,
        match=f"eval_episodes: level '{scarce}' has {total} held-out episodes; .* 1 are",
    ):
        draw_validation_requests(environment, 2, [scarce], 0, reported)


def test_evaluate_by_hand():
    result = evaluate_policy(fail_on_hard, REQUESTS)
    assert result.success_rate == 0.5 and result.reward_mean == 0.5
    assert_allclose(result.interval, wilson_interval(5, 10))
    assert result.by_level["easy"].rate == 1.0 and result.by_level["hard"].rate == 0.0
    assert_allclose(result.by_level["hard"][1:3], wilson_interval(0, 5))
    assert result.by_kind["odd"] == (0.5, *wilson_interval(3, 6), 6)
    assert [episode.success for episode in result.episodes] == [1.0, 0.0] * 5
    assert [(e.level, e.seed) for e in result.episodes] == [(r.level, r.seed) for r in REQUESTS]
    assert result.turns_mean == 1.5 and result.tool_calls_mean == 0.5 and result.misuse_rate == 0.0
    # 'look' + end 5, 'answer N' + end 9; 'answer 0' + end 9
    assert result.action_tokens_mean == (14 + 9) / 2
    assert result.seconds > 0
    assert_allclose(result.tokens_per_second * result.seconds, 115)
    assert len(result.trajectories) == 10 and result.samples == 10
    assert result.pass_at_k == {1: 0.5}


def test_misuse_and_truncation_are_counted():
    result = evaluate_policy(lambda prompt, observation, sample: "stare", REQUESTS[:2])
    assert result.misuse_rate == 1.0 and result.truncated_rate == 1.0 and result.success_rate == 0.0


def test_several_samples_give_pass_at_k_and_a_wider_interval():
    def succeed_once(prompt, observation, sample):
        return look_first(prompt, observation, sample) if sample == 2 else "answer 0"

    result = evaluate_policy(succeed_once, REQUESTS, samples=4)
    assert result.success_rate == 0.25 and result.samples == 40 and len(result.episodes) == 10
    assert result.pass_at_k == {1: 0.25, 2: 0.5, 4: 1.0}
    # here whole episodes succeed or fail: 40 samples are worth 10 observations
    agreeing = evaluate_policy(fail_on_hard, REQUESTS, samples=4)
    assert_allclose(agreeing.interval, wilson_interval(5, 10))


def test_metrics_are_flat_and_named():
    metrics = evaluate_policy(fail_on_hard, REQUESTS).metrics()
    assert metrics["eval/success_rate"] == 0.5 and metrics["eval/success_rate_by_level/hard"] == 0.0
    assert metrics["eval/pass_at_1"] == 0.5 and metrics["eval/episodes"] == 10
    assert all(
        name.startswith("eval/") and isinstance(value, float) for name, value in metrics.items()
    )
    assert "greedy/success_rate" in evaluate_policy(fail_on_hard, REQUESTS).metrics("greedy")


def test_its_text_is_its_numbers_alone():
    text = repr(evaluate_policy(fail_on_hard, REQUESTS))
    assert "success_rate=0.5" in text and "EpisodeResult" not in text and "Trajectory" not in text


def test_json_round_trip():
    result = evaluate_policy(fail_on_hard, REQUESTS, samples=2)
    back = Evaluation.from_json(json.loads(json.dumps(result.to_json(), allow_nan=False)))
    timed = {"eval/seconds": 0.0, "eval/tokens_per_second": 0.0}  # times are not compared
    assert (
        result.seconds > 0
        and back.trajectories == []
        and back.metrics() == result.metrics() | timed
    )
    assert (
        back.episodes == result.episodes
        and back.by_level == result.by_level
        and back.interval == result.interval
    )
    assert compare(back, result).success.difference == 0.0


def test_played_again_its_json_is_the_same():
    first, repeated = (evaluate_policy(fail_on_hard, REQUESTS) for _ in range(2))
    repeated.seconds, repeated.tokens_per_second = (
        2 * first.seconds,
        first.tokens_per_second / 2,
    )  # on a busier machine
    assert first.to_json() == repeated.to_json()
    stored = first.to_json() | {
        "seconds": 3.0,
        "tokens_per_second": 7.0,
    }  # as written by earlier versions
    assert Evaluation.from_json(stored).seconds == 3.0


@pytest.mark.parametrize("row", [{}, {"interval": 3}, {"episodes": []}])
def test_from_json_refuses(row):
    with pytest.raises(DataError, match="not a stored evaluation"):
        Evaluation.from_json(row)


def test_compare_is_challenger_minus_champion():
    better, worse = evaluate_policy(look_first, REQUESTS), evaluate_policy(fail_on_hard, REQUESTS)
    gain = compare(better, worse, bootstrap_samples=500)
    assert gain.success.difference == 0.5 and gain.success.low > 0 and gain.reward.difference == 0.5
    assert (gain.wins, gain.losses, gain.episodes, gain.unpaired) == (5, 0, 10, 0)
    assert_allclose(gain.p_value, 2 / 32)
    loss = compare(worse, better, bootstrap_samples=500)
    assert loss.success.difference == -0.5 and loss.success.high < 0
    assert compare(better, worse, bootstrap_samples=500) == gain
    assert json.loads(json.dumps(gain.to_json()))["success"]["difference"] == 0.5


def test_compare_pairs_by_episode_not_by_position():
    first, second = (
        evaluate_policy(fail_on_hard, REQUESTS),
        evaluate_policy(fail_on_hard, REQUESTS[::-1]),
    )
    result = compare(first, second)
    assert result.success == (0.0, 0.0, 0.0) and result.wins == result.losses == 0


def test_compare_on_the_common_episodes():
    first, second = (
        evaluate_policy(fail_on_hard, REQUESTS[:6]),
        evaluate_policy(look_first, REQUESTS[4:]),
    )
    assert (compare(first, second).episodes, compare(first, second).unpaired) == (2, 8)
    with pytest.raises(DataError, match="no episode in common"):
        compare(
            evaluate_policy(fail_on_hard, REQUESTS[:2]), evaluate_policy(fail_on_hard, REQUESTS[2:])
        )


def test_summarize_needs_no_engine():
    rows = [
        Trajectory(
            "sums",
            "easy",
            "odd",
            seed,
            "q",
            "1",
            [Turn("x")],
            success=seed > 1,
            stop_reason=StopReason.MAX_TURNS,
        )
        for seed in range(4)
    ]
    result = summarize_trajectories(rows)
    assert (
        result.success_rate == 0.5
        and result.tokens_per_second == 0.0
        and result.truncated_rate == 1.0
    )


def test_nothing_to_play_is_refused():
    with pytest.raises(DataError):
        evaluate_policy(look_first, [])
    with pytest.raises(SettingsError):
        evaluate_policy(look_first, REQUESTS, samples=0)
    with pytest.raises(DataError):
        summarize_trajectories([])
