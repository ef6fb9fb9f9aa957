"""The thoughts trainer: rewards, advantages and loss by hand, the direction of the update, resume bit for bit."""

import copy
import dataclasses
import itertools

import pytest
import torch
from helpers.thinkers import make_trainer

from rl_core import timing
from rl_core.errors import DataError, SettingsError
from rl_core.inference.transformers_backend import TransformersBackend
from rl_core.losses.supervised import entropy_coef_at
from rl_core.models import causal_lm
from rl_core.rollouts.episode_sequence import EpisodeRequest
from rl_core.settings import ModelSettings, SamplingSettings, ThoughtsSettings
from rl_core.storage.checkpoint import CheckpointStore
from rl_core.thoughts.episodes import ThoughtEpisode, ThoughtStep, build_answer_rows
from rl_core.timing import collect_seconds
from rl_core.tracking import MemoryTracker
from rl_core.training.loop import run_loop


def copy_weights(trainer):
    return torch.cat([p.detach().flatten() for p in trainer.model.parameters()])


def select_comparable(metrics):
    return {
        name: float(value).hex() for name, value in metrics.items() if not name.startswith("perf/")
    }


def compute_logprob(model, ids, start, stop, temperature=1.0):
    """Compute the log-probability token by token, one full forward pass each."""
    total = 0.0
    for index in range(start, stop):
        logits = model(torch.tensor([ids[:index]])).logits[0, -1].detach().double() / temperature
        total += float(logits[ids[index]] - torch.logsumexp(logits, 0))
    return total


def play_episodes(trainer):
    requests = [EpisodeRequest("one", seed) for seed in range(8)]
    return trainer.play_heldout_episodes(requests)


@pytest.mark.parametrize("kind", ["logprob_gain", "correctness_gain"])
def test_rewards_by_hand(renderer, taught, kind):
    trainer = make_trainer(renderer, taught, reward=kind, gain_clip=2.0)
    episodes = play_episodes(trainer)
    assert any(s.num_thought_tokens for e in episodes for s in e.steps)
    episodes[0].steps[0] = dataclasses.replace(episodes[0].steps[0], answered=False)
    rewards, metrics = trainer._compute_rewards(episodes, build_answer_rows(episodes))
    flat = []
    for episode, actual in zip(episodes, rewards, strict=True):
        for step, reward in zip(episode.steps, actual, strict=True):
            expected = -2.0  # no answer
            if step.answered:
                scores = []
                for end in (step.end, step.start):
                    ids = episode.ids[:end] + step.target_ids
                    scores.append(
                        compute_logprob(trainer.model, ids, end + step.scored_from, len(ids))
                    )
                with_thought, without = torch.tensor(scores)
                gain = (
                    with_thought - without
                    if kind == "logprob_gain"
                    else with_thought.exp() - without.exp()
                )
                expected = min(2.0, max(-2.0, float(gain)))
            assert reward == pytest.approx(expected, abs=1e-4)
            flat.append(reward)
    assert metrics["reward/mean"] == pytest.approx(sum(flat) / len(flat))
    assert metrics["thoughts/unanswered_rate"] > 0


def test_advantages_run_over_the_questions_of_an_episode(renderer, taught):
    trainer = make_trainer(renderer, taught, gamma=0.5, gae_lambda=0.5, baseline_learning_rate=1e-9)
    trainer.baseline.head.linear.bias.data.fill_(1.0)  # V = 1 everywhere

    def episode(starts, truncated):
        steps = [ThoughtStep(s, s + 1, s + 2, [1], 0, True) for s in starts]
        return ThoughtEpisode(list(range(1, starts[-1] + 3)), steps, "one", truncated)

    episodes = [episode([2, 5, 8], False), episode([3], False), episode([2, 5], True)]
    actual, metrics = trainer._compute_advantages(episodes, [[1.0, 0.0, 2.0], [3.0], [0.0, 1.0]])
    # ended:     A_2 = 2 - 1 = 1; A_1 = 0 + .5 - 1 + .25 A_2 = -.25; A_0 = 1 + .5 - 1 + .25 A_1 = .4375
    # ended:     A_0 = 3 - 1 = 2
    # truncated: A_1 = 1 + .5 - 1 = .5, the rest is worth V; A_0 = 0 + .5 - 1 + .25 A_1 = -.375
    for row, expected in zip(actual, [[0.4375, -0.25, 1.0], [2.0], [-0.375, 0.5]], strict=True):
        assert row == pytest.approx(expected, abs=1e-5)
    # returns A + V: 1.4375 .75 2 3 .625 1.5; errors are the advantages: .5 mean of their squares
    squares = [0.4375**2, 0.0625, 1.0, 4.0, 0.375**2, 0.25]
    assert metrics["train/baseline_loss"] == pytest.approx(0.5 * sum(squares) / 6, abs=1e-5)


@pytest.mark.parametrize("temperature", [0.5, 1.0, 1.5])
def test_loss_by_hand(renderer, taught, temperature):
    """Check that thoughts and their entropy are of softmax(logits / T), which wrote them; right answers are at 1."""
    sampling = SamplingSettings(max_completion_tokens=40, temperature=temperature)
    trainer = make_trainer(
        renderer, taught, answer_coef=0.7, entropy_coef=0.2, entropy_floor=0.1, sampling=sampling
    )
    episodes = [
        episode
        for episode in play_episodes(trainer)
        if all(step.answered for step in episode.steps)
    ][:3]
    plan = build_answer_rows(episodes)
    advantages = [[1.5, -0.5], [0.25, 2.0], [-1.0, 0.5]]
    policy = entropy = nll = 0.0
    thought_tokens = answer_tokens = 0
    for episode, values in zip(episodes, advantages, strict=True):
        for step, advantage in zip(episode.steps, values, strict=True):
            for index in range(step.start, step.end + 1):
                policy -= advantage * compute_logprob(
                    trainer.model, episode.ids, index, index + 1, temperature
                )
                logits = (
                    trainer.model(torch.tensor([episode.ids[:index]])).logits[0, -1].detach()
                    / temperature
                )
                entropy += float(torch.distributions.Categorical(logits=logits).entropy())
                thought_tokens += 1
            for end in {step.end, step.start}:
                ids = episode.ids[:end] + step.target_ids
                nll -= compute_logprob(trainer.model, ids, end + step.scored_from, len(ids))
                answer_tokens += len(step.target_ids) - step.scored_from
    metrics = trainer._update_policy(episodes, plan, advantages)
    assert metrics["policy/loss"] == pytest.approx(policy / thought_tokens, abs=1e-5)
    assert metrics["policy/entropy"] == pytest.approx(entropy / thought_tokens, abs=1e-5)
    assert metrics["train/answer_nll"] == pytest.approx(nll / answer_tokens, abs=1e-5)
    expected = policy / thought_tokens - 0.2 * entropy / thought_tokens + 0.7 * nll / answer_tokens
    assert metrics["train/loss"] == pytest.approx(expected, abs=1e-5)


def test_micro_batches_change_nothing(renderer, taught):
    full, cut = (
        make_trainer(renderer, taught),
        make_trainer(renderer, taught, micro_batch_tokens=1),
    )
    full_metrics, cut_metrics = full.step(), cut.step()
    for name in (
        "train/loss",
        "train/grad_norm",
        "policy/entropy",
        "policy/loss",
        "train/answer_nll",
        "reward/mean",
    ):
        assert full_metrics[name] == pytest.approx(cut_metrics[name], rel=1e-4, abs=1e-6)


def test_the_update_raises_what_was_good_and_lowers_what_was_bad(renderer, taught):
    for sign in (1.0, -1.0):
        trainer = make_trainer(
            renderer, taught, answer_coef=0.0, entropy_coef=0.0, entropy_floor=0.0, warmup_steps=0
        )
        episode = next(
            e for e in play_episodes(trainer) if all(s.num_thought_tokens for s in e.steps)
        )
        plan = build_answer_rows([episode])

        def compute_thoughts(trainer=trainer, episode=episode):
            return [
                compute_logprob(trainer.model, episode.ids, s.start, s.end + 1)
                for s in episode.steps
            ]

        before = compute_thoughts()
        trainer._update_policy([episode], plan, [[sign, sign]])
        assert all(
            sign * (after - now) > 0.01
            for now, after in zip(before, compute_thoughts(), strict=True)
        )


def test_entropy_coefficient_follows_the_episodes_played(renderer, taught):
    trainer = make_trainer(renderer, taught, entropy_decay=0.9)
    actual = [trainer.step()["train/entropy_coef"] for _ in range(3)]
    assert actual == [entropy_coef_at(n, start=0.01, decay=0.9, floor=0.001) for n in (0, 12, 24)]
    assert actual == [0.01, pytest.approx(0.01 * 0.9**12), 0.001]


def test_resumes_bit_for_bit_through_the_loop(renderer, taught, tmp_path):
    """Check a stop after iteration 3 of 6, continued in a new trainer: same metrics, same weights, same baseline."""

    def run_trainer(folder, iterations, tracker):
        trainer = make_trainer(renderer, taught, eval_every=2, checkpoint_every=1)
        outcome = run_loop(
            trainer,
            trainer.settings,
            iterations=iterations,
            tracker=tracker,
            checkpoints=CheckpointStore(tmp_path / folder),
            best_metric="eval/thought_gain",
        )
        return trainer, outcome

    whole_rows, cut_rows = MemoryTracker(), MemoryTracker()
    uninterrupted, expected = run_trainer("whole", 6, whole_rows)
    run_trainer("cut", 3, MemoryTracker())
    second, outcome = run_trainer("cut", 6, cut_rows)
    assert outcome.resumed_iteration == 3 and outcome.iterations == 6
    assert (
        torch.equal(copy_weights(second), copy_weights(uninterrupted))
        and outcome.metrics == expected.metrics
    )
    assert second.rollouts_played == uninterrupted.rollouts_played == 72
    for name, tensor in uninterrupted.baseline.head.state_dict().items():
        assert torch.equal(tensor, second.baseline.head.state_dict()[name])
    assert uninterrupted.baseline.head.linear.weight.abs().sum() > 0


@pytest.mark.parametrize("part", ["iteration", "episodes_played", "baseline"])
def test_every_saved_item_matters(renderer, taught, part):
    uninterrupted, second = (make_trainer(renderer, taught, entropy_decay=0.95) for _ in range(2))
    for _ in range(2):
        uninterrupted.step()
    second.model.load_state_dict(uninterrupted.model.state_dict())
    second.optimizer_step.load_state_dict(copy.deepcopy(uninterrupted.optimizer_step.state_dict()))
    state = copy.deepcopy(uninterrupted.state_dict())
    state[part] = make_trainer(renderer, taught).state_dict()[part]
    second.load_state_dict(state)
    assert select_comparable(second.step()) != select_comparable(uninterrupted.step())


def test_the_baseline_is_no_part_of_the_policy(renderer, taught, tmp_path):
    trainer = make_trainer(renderer, taught)
    trainer.step()
    assert not any("baseline" in name for name in trainer.model.state_dict())
    causal_lm.save(trainer.model, renderer.tokenizer, tmp_path)
    loaded, _ = causal_lm.load_model(tmp_path, ModelSettings(device="cpu"))
    assert set(loaded.state_dict()) == set(taught.state_dict())
    assert set(trainer.state_dict()["baseline"]) == {"head", "optimizer"}


def test_metrics_and_validation(renderer, taught):
    trainer = make_trainer(renderer, taught)
    first = trainer.evaluate()
    assert first == trainer.evaluate() and set(first) == {
        "eval/success_rate",
        "eval/thought_gain",
        "eval/thought_rate",
    }
    metrics = trainer.step()
    for name in (
        "train/success_rate",
        "reward/mean",
        "reward/std",
        "thoughts/gain",
        "thoughts/rate",
        "thoughts/tokens",
        "thoughts/unanswered_rate",
        "train/baseline_loss",
        "train/explained_variance",
        "policy/entropy",
        "train/entropy_coef",
        "train/answer_nll",
        "train/learning_rate",
        "perf/tokens_per_second",
    ):
        assert name in metrics
    trainer.heldout = []
    assert trainer.evaluate() == {}


def test_the_time_of_an_iteration_is_shared_out(renderer, taught, monkeypatch):
    ticks = itertools.count()
    monkeypatch.setattr(
        timing.time, "perf_counter", lambda: float(next(ticks))
    )  # one second per reading of the clock
    trainer = make_trainer(renderer, taught)
    observed = {}
    for name in ("_play_groups", "_compute_rewards", "_compute_advantages", "_update_policy"):
        monkeypatch.setattr(
            trainer, name, count_clock_reads(getattr(trainer, name), ticks, name, observed)
        )
    with collect_seconds() as seconds:
        metrics = trainer.step()
    # the clock is read at both ends of a span, so a span lasts one second more than what it contains
    assert metrics["perf/rollout_seconds"] == observed["_play_groups"] + 1
    assert seconds["reward"] == observed["_compute_rewards"] + 1
    assert seconds["update"] == observed["_compute_advantages"] + observed["_update_policy"] + 1
    assert (
        seconds["measure"] == 1 and 0 < seconds["optimizer"] < observed["_update_policy"]
    )  # both are within the update


def count_clock_reads(function, ticks, name, reads):
    """Wrap `function` to record how often the clock was read in it."""

    def count_reads(*arguments, **options):
        before = next(ticks)
        value = function(*arguments, **options)
        reads[name] = next(ticks) - before + 1
        return value

    return count_reads


def test_settings_are_checked(renderer, taught):
    with pytest.raises(SettingsError, match=r"entropy_floor: 0\.02 is above entropy_coef 0\.01"):
        ThoughtsSettings(entropy_floor=0.02)
    with pytest.raises(SettingsError, match=r"^sampling\.temperature: 0 is greedy"):
        ThoughtsSettings(sampling=SamplingSettings(temperature=0))
    with pytest.raises(SettingsError, match="no level 'tow'; did you mean 'two'"):
        make_trainer(renderer, taught, levels=("tow",))


def test_a_renderer_without_padding_token_is_refused(renderer, taught):
    bare = copy.copy(renderer)
    bare.pad_id = None
    with pytest.raises(
        DataError, match=r"^pad_id: the renderer \(ChatRenderer\) has no padding token"
    ):
        make_trainer(bare, taught, backend=object())


def test_the_samplers_limit_ends_an_episode(renderer, taught):
    """Check a cut after the first of two questions: its advantage is the reward minus the value, without a rest."""
    trainer = make_trainer(
        renderer, taught, sampling=SamplingSettings(max_completion_tokens=40, max_turns=1)
    )
    with torch.no_grad():
        trainer.baseline.head.linear.bias.fill_(5.0)  # a bootstrap would add this
    episodes = play_episodes(trainer)
    assert [len(episode.steps) for episode in episodes] == [1] * 8
    rewards = [[float(index)] for index in range(8)]
    values = trainer.baseline.predict_values(
        torch.cat([states[:1] for states in trainer._compute_pooled_states(episodes)])
    ).tolist()
    advantages, _ = trainer._compute_advantages(episodes, rewards)
    assert [actual for (actual,) in advantages] == pytest.approx(
        [i - value for i, value in enumerate(values)], abs=1e-5
    )
    assert min(values) > 4


@pytest.mark.parametrize("backend_class", ["engine", "transformers"])
def test_thoughts_are_sampled_at_the_temperature_that_they_are_trained_at(
    renderer, taught, backend_class
):
    """Check that every token was drawn from the distribution whose gradient the loss takes, token by token by hand."""
    trainer = make_trainer(
        renderer,
        taught,
        sampling=SamplingSettings(max_completion_tokens=40, temperature=0.5),
        episodes_per_iteration=2,
    )
    if backend_class == "transformers":
        trainer.backend = TransformersBackend(
            trainer.model, eos_ids=renderer.eos_ids, pad_id=renderer.pad_id, max_length=64
        )
    before, selected = copy.deepcopy(trainer.model), []
    trainer.record = lambda iteration, rollouts: selected.extend(rollouts)
    trainer.step()
    assert {rollout.temperature for rollout in selected} == {0.5}
    differences = []
    for rollout in selected:
        ids, start = [*rollout.prompt_ids, *rollout.completion_ids], len(rollout.prompt_ids)
        for index, (is_sampled, actual) in enumerate(
            zip(rollout.loss_mask, rollout.sampler_logprobs, strict=True)
        ):
            if is_sampled:
                at = start + index
                assert actual == pytest.approx(
                    compute_logprob(before, ids, at, at + 1, temperature=0.5), abs=1e-4
                )
                differences.append(abs(actual - compute_logprob(before, ids, at, at + 1)))
    assert max(differences) > 0.1
