"""Fresh rollouts: on-policy, seeded, only of requests with a right answer, and learned from by a worker."""

import math
from collections import Counter
from types import SimpleNamespace

import pytest
import torch
from helpers.letters import Letters
from helpers.online import experience
from helpers.online_worker import (
    build_answered_request,
    collect_compared_state,
    make_worker,
    run_to_end,
    settings,
)
from helpers.tiny import PAD, nano

from rl_core.errors import SettingsError
from rl_core.inference.engine import create_rollout_backend
from rl_core.models.logprobs import completion_logprobs
from rl_core.models.lora import add_adapter
from rl_core.models.trainable_weights import collect_trainable_weights
from rl_core.online.experience_buffer import BufferedExperience
from rl_core.online.experience_log import ExperienceLog
from rl_core.online.fresh_rollouts import FreshRolloutSampler, has_right_answer
from rl_core.online.labels import Label, create_feedback_label
from rl_core.rollouts.batching import build_batches, build_train_row
from rl_core.settings import (
    LoraSettings,
    OnlineLabelSettings,
    OnlineRolloutSettings,
    SamplingSettings,
)

END = 2  # token that ends an answer
RIGHT = Label("answer", "feedback", text="a")


class Renderer:
    """A renderer of the tiny vocabulary: the answer is "a" if the first token is below 8."""

    def prompt_ids(self, messages):
        return [1, 3 + len(messages[0]["content"]) % 5]

    def action_text(self, ids):
        return "" if not ids else ("a" if ids[0] < 8 else "b") + "." * (len(ids) - 1)


def make_sampler(model, *, environment=None, seed=0, samples=4, **sampling):
    sampling = SamplingSettings(**{"max_completion_tokens": 3, **sampling})
    policy = SimpleNamespace(
        model=model,
        renderer=Renderer(),
        backend=lambda: create_rollout_backend(model, eos_ids=[END], pad_id=PAD, max_length=32),
    )
    return FreshRolloutSampler(
        policy, environment, OnlineRolloutSettings(samples=samples, sampling=sampling), seed=seed
    )


def build_buffered(number=1, label=RIGHT, **options):
    return BufferedExperience(number, experience(f"r{number}", **options), label=label)


def collect_tokens(experiences):
    return {
        number: [r.completion_ids for r in experience.rollouts]
        for number, experience in experiences.items()
    }


def test_only_requests_whose_right_answer_is_known_from_feedback_are_sampled():
    labels = [
        RIGHT,
        None,
        Label("answer", "consensus", text="a"),
        create_feedback_label("a", score=0.5),
        Label("played", "environment"),
    ]
    experiences = make_sampler(nano()).sample_rollouts(
        [build_buffered(number, label) for number, label in enumerate(labels)],
        1,
        live_version=7,
        longest_answer_tokens=16,
    )
    assert list(experiences) == [0] and [
        has_right_answer(build_buffered(0, label)) for label in labels
    ] == [True] + 4 * [False]
    (fresh,) = experiences.values()
    assert len(fresh.rollouts) == len(fresh.recorded) == 4 and set(fresh.recorded) == {None}
    assert fresh.request_id == "r0" and fresh.policy_version == 7
    assert (
        make_sampler(nano()).sample_rollouts(
            [build_buffered(1, None)], 1, live_version=0, longest_answer_tokens=16
        )
        == {}
    )


def test_samples_depend_only_on_seed_update_and_request():
    model, both = nano(), [build_buffered(1), build_buffered(2)]

    def sample(requests, update, *, live_version=0, seed=0):
        sampler = make_sampler(model, seed=seed)
        return collect_tokens(
            sampler.sample_rollouts(
                requests, update, live_version=live_version, longest_answer_tokens=16
            )
        )

    first = sample(both, 5)
    assert sample(both[::-1], 5, live_version=3) == first
    assert sample(both[1:], 5) == {2: first[2]}
    assert first[1] != first[2] and len({tuple(ids) for ids in first[1]}) > 1
    assert sample(both, 6) != first
    assert sample(both, 5, seed=1) != first


def compute_current_logprobs(model, rollouts):
    (batch,) = build_batches([build_train_row(rollout) for rollout in rollouts], 4096, PAD)
    order = sorted(range(len(rollouts)), key=lambda index: batch.rows[index])
    with torch.no_grad():
        logprobs_BS, _ = completion_logprobs(model, batch)
    return [logprobs_BS[index][batch.loss_mask_BS[index]].tolist() for index in order]


def collect_sampled_logprobs(rollout):
    return [
        x for x, counts in zip(rollout.sampler_logprobs, rollout.loss_mask, strict=True) if counts
    ]


@pytest.mark.parametrize("has_adapter", [False, True])
@pytest.mark.parametrize("environment", [None, Letters()], ids=["chat", "episodes"])
def test_samples_use_the_current_weights_and_the_recorded_temperatures(environment, has_adapter):
    model = (
        add_adapter(nano(), LoraSettings(rank=2, target_modules=("q_proj", "v_proj")))
        if has_adapter
        else nano()
    )
    sampler = make_sampler(model, environment=environment)
    requests = [
        build_buffered(1, temperature=0.7, level="low"),
        build_buffered(2, temperature=1.3, level="low"),
        build_buffered(3, level="low"),
    ]
    before = sampler.sample_rollouts(requests, 1, live_version=0, longest_answer_tokens=16)
    with torch.no_grad():
        for name, weight in model.named_parameters():
            if "lora_B" in name if has_adapter else "lm_head" in name:
                weight.add_(torch.randn(weight.shape, generator=torch.Generator().manual_seed(1)))
    after = sampler.sample_rollouts(requests, 1, live_version=0, longest_answer_tokens=16)
    for number, temperature in ((1, 0.7), (2, 1.3), (3, 1.0)):
        rollouts = after[number].rollouts
        for rollout, logprobs in zip(
            rollouts, compute_current_logprobs(model, rollouts), strict=True
        ):
            assert rollout.temperature == temperature
            assert logprobs == pytest.approx(collect_sampled_logprobs(rollout), abs=1e-5)
        assert [*map(collect_sampled_logprobs, rollouts)] != [
            *map(collect_sampled_logprobs, before[number].rollouts)
        ]
    assert sampler.collect_metrics() == {"online/fresh/rollouts": 24.0, "online/fresh/failed": 0.0}


def test_an_episode_that_cannot_be_played_affects_no_other(caplog):
    sampler = make_sampler(nano(), environment=Letters())
    experiences = sampler.sample_rollouts(
        [
            build_buffered(1, level="low"),
            build_buffered(2, level="nowhere"),
            build_buffered(3, level="high"),
        ],
        1,
        live_version=0,
        longest_answer_tokens=16,
    )
    assert sorted(experiences) == [1, 3] and sampler.counts == Counter(rollouts=8, failed=1)
    assert "request r2 is not sampled again" in caplog.text and "nowhere" in caplog.text


def test_a_conversation_without_space_is_not_sampled_again(caplog):
    long = build_buffered(1)
    for rollout in long.experience.rollouts:
        rollout.prompt_ids[:] = [3] * 40
    sampler = make_sampler(nano())
    experiences = sampler.sample_rollouts(
        [long, build_buffered(2)], 1, live_version=0, longest_answer_tokens=16
    )
    assert sorted(experiences) == [2] and sampler.counts["failed"] == 1
    assert "request r1 is not sampled again" in caplog.text


def test_answers_end_at_a_stop_text_which_is_not_part_of_them():
    fresh = make_sampler(nano(), samples=32, stop=(".",)).sample_rollouts(
        [build_buffered(1)], 1, live_version=0, longest_answer_tokens=16
    )[1]
    lengths = {len(rollout.completion_ids) for rollout in fresh.rollouts}
    answers = {rollout.trajectory.answer for rollout in fresh.rollouts}
    assert lengths == {1, 2} and answers == {"a", "b"}


@pytest.mark.parametrize("longest, expected", [(1, {1, 2}), (16, {1, 2, 3})])
def test_fresh_answers_take_at_most_twice_the_tokens_of_the_longest_recorded_one(longest, expected):
    fresh = make_sampler(nano(), samples=64).sample_rollouts([build_buffered(1)], 1, 0, longest)[1]
    assert {len(rollout.completion_ids) for rollout in fresh.rollouts} == expected
    assert all(
        rollout.is_truncated == (rollout.completion_ids[-1] != END) for rollout in fresh.rollouts
    )


def test_settings_that_cannot_be_learned_from_are_refused():
    for options, why in (
        ({"samples": 1}, "cannot be compared"),
        ({"samples": 4, "sampling": SamplingSettings(top_k=5)}, "top_k"),
    ):
        with pytest.raises(SettingsError, match=why):
            OnlineRolloutSettings(**options)


def write_wrong_answers(folder, count=24):
    """Write requests whose recorded answers are all "b", with feedback that "a" is right."""
    with ExperienceLog(folder) as log:
        for number in range(count):
            experience_ = build_answered_request(number)
            for rollout in experience_.rollouts:
                rollout.completion_ids[0], rollout.trajectory.answer = 9, "b"
            log.append_experience(experience_)
            log.append_label(f"r{number}", RIGHT)
    return folder


def build_settings(samples=8):
    return settings(
        {"kl_max": 50.0, "update_kl_target": 5.0, "snapshot_every": 100, "learning_rate": 3e-2},
        labels=OnlineLabelSettings(use_consensus=False),
        rewards={"task": 1.0},
        rollouts=OnlineRolloutSettings(
            samples=samples, sampling=SamplingSettings(max_completion_tokens=2)
        ),
    )


def make_rollout_worker(folder, log, samples):
    model = nano()
    sampler = make_sampler(model, samples=samples, max_completion_tokens=2) if samples else None
    return make_worker(folder, log, build_settings(samples), model=model, rollouts=sampler)


def measure_right_share(model):
    fresh = make_sampler(model, samples=200).sample_rollouts(
        [build_buffered(1)], 1, live_version=0, longest_answer_tokens=16
    )[1]
    return sum(r.trajectory.turns[0].action[0] == "a" for r in fresh.rollouts) / 200


def test_if_all_recorded_answers_are_wrong_only_fresh_ones_teach(tmp_path):
    log, shares = write_wrong_answers(tmp_path / "log"), {}
    for samples in (0, 8):
        with make_rollout_worker(tmp_path / f"{samples}", log, samples) as worker:
            before = measure_right_share(worker.learner.model)
            run_to_end(worker)
            shares[samples] = measure_right_share(worker.learner.model) - before
            assert worker.updates > 15
            # equal rewards of a request teach nothing, so no such update is taken
            assert (worker.learner.num_taken > 10) == (samples > 0)
            assert (worker.collect_metrics().get("online/fresh/rollouts", 0.0) > 0) == (samples > 0)
    assert abs(shares[0]) < 0.02 and shares[8] > 0.2


def test_a_resumed_worker_samples_and_computes_the_same(tmp_path, monkeypatch):
    torch.set_num_threads(1)
    log = write_wrong_answers(tmp_path / "log", 12)
    with make_rollout_worker(tmp_path / "whole", log, 4) as worker:
        run_to_end(worker)
        expected = collect_compared_state(worker)
    assert math.isfinite(expected[3]["online/mean_kl"]) and expected[3]["online/fresh/rollouts"] > 0

    class Killed(BaseException):
        pass

    with make_rollout_worker(tmp_path / "cut", log, 4) as worker:
        for _ in range(5):
            worker.step()  # saved at the third
        monkeypatch.setattr(
            worker.learner, "apply_update", lambda task: (_ for _ in ()).throw(Killed())
        )
        with pytest.raises(Killed):
            worker.step()
    with make_rollout_worker(tmp_path / "cut", log, 4) as worker:
        assert 0 < worker.updates < 5
        run_to_end(worker)
        assert collect_compared_state(worker) == expected


def test_the_kl_of_fresh_answers_is_against_the_live_snapshot(tmp_path):
    """Train weights that differ from the live snapshot: the KL before a step is the KL to that snapshot."""
    log = write_wrong_answers(tmp_path / "log", 6)
    with make_rollout_worker(tmp_path / "kl", log, 4) as worker:
        other = {
            name: tensor + 0.3 * torch.randn_like(tensor)
            for name, tensor in collect_trainable_weights(worker.learner.model).items()
        }
        worker.learner.snapshots.publish_snapshot(1, other, {"updates": 1})
        worker.updates, worker.live = 1, 1
        while worker.last_report is None or not worker.last_report.kl_control:
            worker.step()
        assert (
            worker.last_report.kl_control["before"] > 0.05 and not worker.last_report.is_lower_bound
        )
