"""Thoughts in rollouts: where they start and end, and the scores of right answers, checked by plain loops."""

import math

import pytest
import torch

from rl_core.data.chat import ChatRenderer
from rl_core.data.tokenizer import train_tokenizer
from rl_core.environments.reckoning import Reckoning
from rl_core.errors import DataError
from rl_core.models import causal_lm
from rl_core.settings import ModelSettings
from rl_core.thoughts.episodes import (
    ThoughtEpisode,
    ThoughtReader,
    TokenSpan,
    build_answer_rows,
    compute_span_logprobs,
    read_thought_episode,
)
from rl_core.thoughts.genuineness_check import (
    CONTROL_CONDITIONS,
    build_control_thoughts,
    choose_shuffle_partners,
    measure_gains,
)
from rl_core.types import Rollout, StopReason, Trajectory, Turn

ENVIRONMENT = Reckoning()


@pytest.fixture(scope="module")
def renderer():
    texts = [
        m["content"] for seed in range(50) for m in ENVIRONMENT.demonstration(seed, "easy").messages
    ]
    return ChatRenderer(train_tokenizer(texts, 300))


@pytest.fixture(scope="module")
def model(renderer):
    created = causal_lm.create_model(
        ModelSettings(preset="nano", context=128, device="cpu"), renderer.tokenizer, 0
    )
    with torch.no_grad():  # far from uniform, so that every condition scores differently
        for parameter in created.parameters():
            parameter.mul_(3 if parameter.ndim > 1 else 1)
    return created


def build_rollout(renderer, seed, level, actions, *, cut=False):
    """Build the rollout in which the policy wrote `actions`; `cut`: the last one has no end of turn."""
    episode = ENVIRONMENT.episode(seed, level)
    prompt_ids = renderer.prompt_ids(episode.reset())
    completion, mask, turns, step = [], [], [], None
    for action in actions:
        if step is not None:
            ids = renderer.observation_ids(step.messages)
            completion, mask = completion + ids, mask + [False] * len(ids)
        ids = renderer.action_ids(action)
        if cut and action is actions[-1]:
            ids = ids[:-1]
        completion, mask = completion + ids, mask + [True] * len(ids)
        turns.append(Turn(action=action, num_tokens=len(ids)))
        step = episode.step(action)
    trajectory = Trajectory("reckoning", level, "", seed, "", "", turns=turns)
    trajectory.stop_reason = StopReason.MAX_TOKENS if cut else StopReason.TERMINATED
    return Rollout(prompt_ids, completion, mask, [0.0] * len(mask), trajectory)


def list_right_answers(seed, level, turns):
    """List the right answers of the first turns."""
    episode = ENVIRONMENT.episode(seed, level)
    return [str(value) for value in episode.starts[1 : turns + 1]]


def build_episode(renderer, seed, level, actions, **options):
    return read_thought_episode(
        ENVIRONMENT,
        ThoughtReader(renderer),
        build_rollout(renderer, seed, level, actions, **options),
    )


def decode_text(renderer, ids):
    return renderer.tokenizer.decode(ids)


def test_turns_are_split_where_the_answer_begins(renderer):
    first, second, third = list_right_answers(4, "medium", 3)
    episode = build_episode(
        renderer, 4, "medium", [f"3 1 4\nanswer {first}", f"answer {second}", "5\nanswer 99"]
    )
    thoughts = [decode_text(renderer, episode.ids[s.start : s.end]) for s in episode.steps]
    assert thoughts == ["3 1 4\n", "", "5\n"]
    assert [decode_text(renderer, episode.ids[s.end : s.stop]) for s in episode.steps] == [
        f"answer {first}<|end|>",
        f"answer {second}<|end|>",
        "answer 99<|end|>",
    ]
    assert [
        decode_text(renderer, s.target_ids[s.scored_from :]).strip() for s in episode.steps
    ] == [
        f"{first}<|end|>",
        f"{second}<|end|>",
        f"{third}<|end|>",
    ]
    assert [s.num_thought_tokens for s in episode.steps] == [6, 0, 2]
    assert [len(s.thought_positions) for s in episode.steps] == [
        7,
        1,
        3,
    ]  # and the token that ends the thought
    assert not episode.is_truncated


@pytest.mark.parametrize("reason", StopReason)
def test_only_an_episode_that_its_environment_truncated_is_bootstrapped(renderer, reason):
    rollout = build_rollout(renderer, 4, "medium", ["answer 1"])
    rollout.trajectory.stop_reason = reason
    rollout.is_truncated = reason is not StopReason.TERMINATED
    episode = read_thought_episode(ENVIRONMENT, ThoughtReader(renderer), rollout)
    assert episode.is_truncated == (reason == "environment")


@pytest.mark.parametrize("action", ["3 1 4", "answer", "so the answer 5", "answer 5\nno", ""])
def test_a_turn_without_an_answer_has_none(renderer, action):
    (step,) = build_episode(renderer, 0, "easy", [action]).steps
    assert not step.answered and step.num_thought_tokens == 0
    assert list(step.thought_positions) == list(
        range(step.start, step.stop)
    )  # all of it was sampled


def test_a_cut_turn_or_too_long_a_thought_is_no_answer(renderer):
    (step,) = build_episode(renderer, 0, "easy", ["1 2\nanswer 5"], cut=True).steps
    assert not step.answered
    rollout = build_rollout(renderer, 0, "easy", ["1 2\nanswer 5"])
    for limit, answered in ((4, True), (3, False)):
        (step,) = read_thought_episode(
            ENVIRONMENT, ThoughtReader(renderer, max_thought_tokens=limit), rollout
        ).steps
        assert step.answered is answered


def compute_by_hand(model, ids, start, stop):
    """Compute log p of ids[start:stop], token by token, one full forward pass each."""
    total = 0.0
    for index in range(start, stop):
        logits = model(torch.tensor([ids[:index]])).logits[0, -1].detach().double()
        total += float(logits[ids[index]] - torch.logsumexp(logits, 0))
    return total


def test_span_logprobs_by_hand(model):
    rows = [[7, 9, 11, 30, 8], [50, 6, 260], [9, 9, 9, 9]]
    spans = [TokenSpan(0, 1, 3), TokenSpan(0, 3, 5), TokenSpan(1, 2, 3)]
    expected = [compute_by_hand(model, rows[s.row], s.start, s.stop) for s in spans]
    for max_tokens in (1, 10_000):
        actual = compute_span_logprobs(model, rows, spans, pad_id=0, max_tokens=max_tokens)
        torch.testing.assert_close(
            actual, torch.tensor(expected, dtype=torch.float64), atol=1e-4, rtol=1e-4
        )
    assert compute_span_logprobs(model, rows, [], pad_id=0).shape == (0,)


def test_answers_with_and_without_the_thought_by_hand(renderer, model):
    (answer,) = list_right_answers(4, "easy", 1)
    episodes = [
        build_episode(renderer, 4, "easy", [f"3 1 4\nanswer {answer}", "7\nanswer 99"]),
        build_episode(renderer, 5, "easy", ["answer 99"]),
        build_episode(renderer, 6, "easy", ["no answer at all"]),
    ]
    plan = build_answer_rows(episodes)
    assert plan.steps == [(0, 0), (0, 1), (1, 0)]
    assert (
        len(plan.rows) == 3 + 1 + 2 + 1
    )  # a right sampled answer needs none; an empty thought needs one in total
    actual = compute_span_logprobs(
        model, plan.rows, [*plan.with_thought, *plan.without], pad_id=0
    ).tolist()
    expected = []
    for thought in (True, False):
        for index, turn in plan.steps:
            episode, step = episodes[index], episodes[index].steps[turn]
            ids = episode.ids[: step.end if thought else step.start] + step.target_ids
            expected.append(
                compute_by_hand(
                    model, ids, len(ids) - len(step.target_ids) + step.scored_from, len(ids)
                )
            )
    assert actual == pytest.approx(expected, abs=1e-4)
    assert actual[2] == actual[5]  # the empty thought adds nothing, exactly
    assert abs(actual[0] - actual[3]) > 1e-3


def test_controls():
    assert build_control_thoughts([5, 1, 6, 1, 7, 2], [8, 2], 1, 99) == {
        "shuffled": [8, 2],
        "filler": [99, 99, 99, 99, 99, 2],
        "truncated": [5, 1, 2],
    }
    assert build_control_thoughts([], [8, 2], 0, 99) == {
        "shuffled": [8, 2],
        "filler": [],
        "truncated": [],
    }


def test_separator_is_what_is_blank_at_the_end(renderer):
    reader = ThoughtReader(renderer)
    for text, count in (("3 1\n", 1), ("3 1", 0), ("\n", 1), ("", 0)):
        assert reader.count_separator_tokens(renderer.action_ids(text)[:-1]) == count


def test_partners_are_others_of_the_same_level():
    step = build_step()
    episodes = [ThoughtEpisode([], [step], level, False) for level in "aabbbaab"]
    for seed in range(5):
        partners = choose_shuffle_partners(episodes, seed)
        assert sorted(partners) == list(range(8))
        for index, partner in enumerate(partners):
            assert partner != index and episodes[partner].level == episodes[index].level
    assert len({tuple(choose_shuffle_partners(episodes, seed)) for seed in range(5)}) > 1
    with pytest.raises(
        DataError, match=r"level 'c': .* only 1 has an answer, .* raise check_episodes"
    ):
        choose_shuffle_partners([*episodes, ThoughtEpisode([], [step], "c", False)], 0)


def build_step(answered=True):
    from rl_core.thoughts.episodes import ThoughtStep

    return ThoughtStep(1, 2, 3, [1], 0, answered)


def test_gains_in_every_condition_by_hand(renderer, model):
    reader = ThoughtReader(renderer)
    answers = {seed: list_right_answers(seed, "easy", 2) for seed in (11, 12)}
    episodes = [
        build_episode(
            renderer,
            seed,
            "easy",
            [f"{seed % 7} 2 4\nanswer {answers[seed][0]}", f"{thought}answer 99"],
        )
        for seed, thought in ((11, "1 5\n"), (12, ""))
    ]
    filler = renderer.action_ids(".")[0]
    options = dict(kind="logprob_gain", clip=100.0, filler_id=filler, pad_id=0, seed=0)
    gains = measure_gains(model, reader, episodes, **options)
    assert set(gains) == {"own", *CONTROL_CONDITIONS}
    for index, episode in enumerate(episodes):
        for turn, step in enumerate(episode.steps):
            other = episodes[1 - index].steps[
                turn
            ]  # with two episodes each gets the other's thoughts
            custom = episode.ids[step.start : step.end]
            thoughts = {
                "own": custom,
                "shuffled": episodes[1 - index].ids[other.start : other.end],
                "filler": [filler] * max(0, len(custom) - 1) + custom[-1:],
                "truncated": custom[: max(0, len(custom) - 1) // 2] + custom[-1:],
            }

            def score_thought(thought, step=step, episode=episode):
                ids = episode.ids[: step.start] + thought + step.target_ids
                return compute_by_hand(
                    model, ids, len(ids) - len(step.target_ids) + step.scored_from, len(ids)
                )

            for name, thought in thoughts.items():
                assert gains[name][index][turn] == pytest.approx(
                    score_thought(thought) - score_thought([]), abs=1e-3
                ), name
    clipped = measure_gains(model, reader, episodes, **{**options, "clip": 1e-3})
    assert all(abs(g) <= 1e-3 + 1e-9 for turns in clipped["own"] for g in turns)
    with pytest.raises(DataError, match="no turn"):
        measure_gains(model, reader, [build_episode(renderer, 1, "easy", ["nothing"])], **options)


def test_an_environment_without_right_answers_is_refused(renderer):
    with pytest.raises(DataError, match="without a correct answer"):
        ThoughtReader(renderer).encode_target(" ")
    assert math.isfinite(len(ThoughtReader(renderer).encode_target("7")[0]))
