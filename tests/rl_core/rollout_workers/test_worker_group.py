"""Synchronous rollout workers on a local cluster: the bits of the in-process run, whatever happens to workers."""

import dataclasses

import pytest
import torch
from helpers.letters import LOW, comparable, weights
from helpers.worker_cluster import LocalCluster, compiled_model, letters_trainer, with_team

from rl_core.data.tokenizer import train_tokenizer
from rl_core.environments import make_environment
from rl_core.errors import SamplerMismatch, WorkerFailed
from rl_core.models.lora import add_adapter
from rl_core.rollout_workers.worker import RolloutWorker
from rl_core.settings import CurriculumStage, ExitCondition, LoraSettings, SamplingSettings


@pytest.fixture(scope="module")
def tokenizer():
    return train_tokenizer(["abc xyz"], 300)


STAGES = (
    CurriculumStage(
        name="one",
        levels={"low": 1.0},
        exit_conditions=(
            ExitCondition(metric="reward/mean", comparison=">", threshold=-1.0, window=1),
        ),
    ),
    CurriculumStage(name="two", levels={"low": 1.0, "high": 2.0}, temperature=0.7),
)


def train_bits(trainer, iterations=3):
    """Return metrics that are independent of workers, rollouts, and weights after some iterations."""
    rows = []
    for _ in range(iterations):
        metrics = comparable(trainer.step())
        rollouts = [r for group in trainer.groups for r in group.rollouts]
        rows.append(
            (
                metrics,
                [(r.completion_ids, r.sampler_logprobs, r.trajectory.to_json()) for r in rollouts],
            )
        )
    return rows, weights(trainer).numpy().tobytes()


@pytest.mark.parametrize("count", [1, 2, 3])
@pytest.mark.parametrize(
    "options",
    [
        {},
        {
            "curriculum": STAGES,
            "sampling": SamplingSettings(max_completion_tokens=3, temperature=1.3),
        },
        {"algorithm": "dapo", "dynamic_sampling_tries": 2, "curriculum": LOW},
    ],
    ids=["plain", "curriculum and temperature", "refills"],
)
def test_any_number_of_workers_gives_the_bits_of_one_process(tokenizer, count, options):
    expected = train_bits(letters_trainer(tokenizer, **options))
    cluster = LocalCluster(seed=count)
    assert train_bits(with_team(letters_trainer(tokenizer, **options), cluster, count)) == expected
    assert len(cluster.workers) == count


@pytest.mark.slow
def test_tools_of_several_turns_and_prompts_of_different_length(tokenizer):
    """Observations are appended while other sequences decode; steps run on threads."""
    texts = [
        m["content"]
        for seed in range(50)
        for m in make_environment("arithmetic").demonstration(seed, "easy").messages
    ]
    words = train_tokenizer(texts, 300)

    def trainer():
        sampling = SamplingSettings(max_completion_tokens=60, max_turns=3, temperature=1.1)
        environment = make_environment("arithmetic")
        environment.blocking = True
        built = letters_trainer(
            words,
            environment,
            model=compiled_model(words, 200),
            sampling=sampling,
            curriculum=(),
            context=200,
        )
        built.backend.disable_cross_row_batching()
        return built

    expected = train_bits(trainer(), 2)
    assert any(len(json["turns"]) > 1 for _, rollouts in expected[0] for _, _, json in rollouts)
    assert train_bits(with_team(trainer(), LocalCluster(), 3), 2) == expected


def test_lost_workers_are_replaced_and_change_no_bit(tokenizer):
    expected = train_bits(letters_trainer(tokenizer))
    for lose in ({0}, {3}, {4, 5}, {6, 9, 14}):
        cluster, events = LocalCluster(lose=lose), []
        trainer = with_team(letters_trainer(tokenizer), cluster)
        trainer.worker_group.on_event = events.append
        assert train_bits(trainer) == expected
        assert trainer.worker_group.lost_workers == len(lose) == len(events) == cluster.stopped
        assert all("was lost (killed by the test)" in text for text in events)


def test_a_slot_that_loses_every_worker_ends_the_run_with_one_error(tokenizer):
    trainer = with_team(letters_trainer(tokenizer), LocalCluster(lose=range(1, 100)), count=1)
    with pytest.raises(
        WorkerFailed, match="rollout worker 0 was lost 4 times within one iteration"
    ) as caught:
        trainer.step()
    assert "\n" not in str(caught.value)


def test_a_hanging_worker_costs_its_share_and_rejoins_with_the_missed_weights(
    tokenizer,
):
    expected = train_bits(letters_trainer(tokenizer), 5)
    cluster = LocalCluster()
    trainer = with_team(letters_trainer(tokenizer), cluster)
    rows, late = [], []
    for iteration in range(5):
        if iteration == 1:
            cluster.hangs_at_play = cluster.workers[1]
        if iteration == 3:
            cluster.hung, cluster.hangs_at_play = [], None
        new_rows, last = train_bits(trainer, 1)
        rows += new_rows
        late.append(trainer.worker_group.collect_metrics()["perf/late_workers"])
    assert (rows, last) == expected
    assert late == [0, 1, 1, 0, 0] and trainer.worker_group.lost_workers == 0
    assert [slot.version for slot in trainer.worker_group._slots] == [4, 4]
    updates = [
        update.number
        for worker, name, (update, *_) in cluster.calls
        if name == "load" and worker is cluster.workers[1]
    ]
    assert updates == [0, 1, 3, 4], "nothing was sent to it while it was late"


@pytest.mark.parametrize("count", [1, 2])
def test_a_worker_without_a_heartbeat_is_replaced(tokenizer, count, monkeypatch):
    monkeypatch.setattr("rl_core.rollout_workers.cluster.HEARTBEAT_INTERVAL_S", 0.01)
    monkeypatch.setattr("rl_core.rollout_workers.cluster.HEARTBEAT_TIMEOUT_S", 0.05)
    expected = train_bits(letters_trainer(tokenizer), 4)
    cluster, events = LocalCluster(), []
    trainer = with_team(letters_trainer(tokenizer), cluster, count)
    trainer.worker_group.on_event = events.append
    first, _ = train_bits(trainer, 1)
    cluster.hung = [cluster.workers[0]]
    while not events:  # a second worker continues meanwhile
        new_rows, last = train_bits(trainer, 1)
        first += new_rows
    new_rows, last = train_bits(trainer, 4 - len(first)) if len(first) < 4 else ([], last)
    assert (
        first[:4] + new_rows == expected[0][: len(first[:4] + new_rows)]
        and trainer.worker_group.lost_workers == 1
    )
    assert "rollout worker 0 was lost (no heartbeat for" in events[0]


def test_only_changed_weights_are_sent(tokenizer):
    trainer = with_team(letters_trainer(tokenizer, learning_rate=1e-2), LocalCluster(), count=1)
    trainer.step()
    trainer.worker_group.send_weights(trainer.settings.sampling)
    with torch.no_grad():
        trainer.policy.model.norm.weight.mul_(1.5)
    trainer.worker_group.send_weights(trainer.settings.sampling)
    sent = [update for update, _ in trainer.worker_group.cluster.list_calls("load")]
    assert [len(update.changed) for update in sent[:2]] == [len(sent[0].changed)] * 2
    assert list(sent[2].changed) == ["model.norm.weight"] and sent[2].num_bytes == 4 * 64
    trainer.worker_group.send_weights(trainer.settings.sampling)  # nothing has changed
    assert len(trainer.worker_group.cluster.list_calls("load")) == 3


class DeafWorker(RolloutWorker):
    """A worker that reports new weights but keeps the first ones."""

    def load(self, update, probe):
        return super().load(
            update if self.version < 0 else dataclasses.replace(update, changed={}), probe
        )


class HotWorker(RolloutWorker):
    """A worker that samples at twice the temperature."""

    def load(self, update, probe):
        hot = dataclasses.replace(probe.sampling, temperature=2 * probe.sampling.temperature)
        return super().load(update, dataclasses.replace(probe, sampling=hot))


class HeadlessWorker(RolloutWorker):
    """A worker whose engine samples from other weights than its model received."""

    def load(self, update, probe):
        report = super().load(update, probe)
        with torch.no_grad():
            self.model.lm_head.weight.neg_()
        answers = super().load(dataclasses.replace(update, changed={}), probe).answers
        return dataclasses.replace(report, answers=answers)


@pytest.mark.parametrize(
    ("worker_class", "message"),
    [
        (
            DeafWorker,
            "after weight update 1 its weights have the digest .* the weight transfer failed",
        ),
        (HotWorker, r"its log-probs differ by up to \d[\d.e-]* nats from the trainer's sampler"),
        (HeadlessWorker, "does not sample from the weights that were sent"),
    ],
)
def test_a_wrong_transfer_is_refused(tokenizer, worker_class, message):
    trainer = with_team(
        letters_trainer(tokenizer), LocalCluster(worker_class=worker_class), count=1
    )
    with pytest.raises(SamplerMismatch, match=message):
        for _ in range(2):
            trainer.step()
    assert trainer.iteration < 2


def test_only_adapters_are_sent(tokenizer):
    def build_trainer():
        torch.manual_seed(3)
        return letters_trainer(
            tokenizer, model=add_adapter(compiled_model(tokenizer), LoraSettings(rank=2))
        )

    expected = train_bits(build_trainer())
    cluster = LocalCluster()
    assert train_bits(with_team(build_trainer(), cluster)) == expected
    sent = [update for update, _ in cluster.list_calls("load")]
    assert all("lora_" in name for update in sent for name in update.changed)


def test_a_closed_group_is_started_again(tokenizer):
    expected = train_bits(letters_trainer(tokenizer), 4)
    cluster = LocalCluster()
    trainer = with_team(letters_trainer(tokenizer), cluster)
    first, _ = train_bits(trainer, 2)
    trainer.worker_group.close()
    rest, last = train_bits(trainer, 2)
    assert (first + rest, last) == expected and cluster.closed == 1 and len(cluster.opened) == 2
