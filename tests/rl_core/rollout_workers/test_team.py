"""Synchronous rollout workers on a stand-in cluster: the bits of the in-process run, whatever happens to workers."""

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


def bits(trainer, iterations=3):
    """Metrics that workers do not add, rollouts and weights after some iterations."""
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
    alone = bits(letters_trainer(tokenizer, **options))
    cluster = LocalCluster(seed=count)
    assert bits(with_team(letters_trainer(tokenizer, **options), cluster, count)) == alone
    assert len(cluster.workers) == count


def test_tools_of_several_turns_and_prompts_of_different_length(tokenizer):
    """Observations are appended while others decode; steps run on threads."""
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
        made = letters_trainer(
            words,
            environment,
            model=compiled_model(words, 200),
            sampling=sampling,
            curriculum=(),
            context=200,
        )
        made.backend.disable_cross_row_batching()
        return made

    alone = bits(trainer(), 2)
    assert any(len(json["turns"]) > 1 for _, rollouts in alone[0] for _, _, json in rollouts)
    assert bits(with_team(trainer(), LocalCluster(), 3), 2) == alone


def test_lost_workers_are_replaced_and_change_no_bit(tokenizer):
    alone = bits(letters_trainer(tokenizer))
    for lose in ({0}, {3}, {4, 5}, {6, 9, 14}):
        cluster, told = LocalCluster(lose=lose), []
        trainer = with_team(letters_trainer(tokenizer), cluster)
        trainer.worker_group.on_event = told.append
        assert bits(trainer) == alone
        assert trainer.worker_group.lost_workers == len(lose) == len(told) == cluster.stopped
        assert all("was lost (killed by the test)" in text for text in told)


def test_a_place_that_loses_every_worker_ends_the_run_with_one_error(tokenizer):
    trainer = with_team(letters_trainer(tokenizer), LocalCluster(lose=range(1, 100)), count=1)
    with pytest.raises(
        WorkerFailed, match="rollout worker 0 was lost 4 times within one iteration"
    ) as caught:
        trainer.step()
    assert "\n" not in str(caught.value)


def test_a_worker_that_hangs_costs_its_share_and_comes_back_with_the_weights_that_it_missed(
    tokenizer,
):
    alone = bits(letters_trainer(tokenizer), 5)
    cluster = LocalCluster()
    trainer = with_team(letters_trainer(tokenizer), cluster)
    rows, late = [], []
    for iteration in range(5):
        if iteration == 1:
            cluster.hangs_at_play = cluster.workers[1]
        if iteration == 3:
            cluster.hung, cluster.hangs_at_play = [], None
        found, last = bits(trainer, 1)
        rows += found
        late.append(trainer.worker_group.collect_metrics()["perf/late_workers"])
    assert (rows, last) == alone
    assert late == [0, 1, 1, 0, 0] and trainer.worker_group.lost_workers == 0
    assert [seat.version for seat in trainer.worker_group._slots] == [4, 4]
    updates = [
        update.number
        for worker, name, (update, *_) in cluster.calls
        if name == "load" and worker is cluster.workers[1]
    ]
    assert updates == [0, 1, 3, 4], "nothing was sent to it while it was late"


@pytest.mark.parametrize("count", [1, 2])
def test_a_worker_without_a_sign_of_life_is_replaced(tokenizer, count, monkeypatch):
    monkeypatch.setattr("rl_core.rollout_workers.cluster.HEARTBEAT_INTERVAL_S", 0.01)
    monkeypatch.setattr("rl_core.rollout_workers.cluster.HEARTBEAT_TIMEOUT_S", 0.05)
    alone = bits(letters_trainer(tokenizer), 4)
    cluster, told = LocalCluster(), []
    trainer = with_team(letters_trainer(tokenizer), cluster, count)
    trainer.worker_group.on_event = told.append
    first, _ = bits(trainer, 1)
    cluster.hung = [cluster.workers[0]]
    while not told:  # of two workers the other one goes on meanwhile
        found, last = bits(trainer, 1)
        first += found
    found, last = bits(trainer, 4 - len(first)) if len(first) < 4 else ([], last)
    assert (
        first[:4] + found == alone[0][: len(first[:4] + found)]
        and trainer.worker_group.lost_workers == 1
    )
    assert "rollout worker 0 was lost (no heartbeat for" in told[0]


def test_only_changed_weights_travel(tokenizer):
    trainer = with_team(letters_trainer(tokenizer, learning_rate=1e-2), LocalCluster(), count=1)
    trainer.step()
    trainer.worker_group.send_weights(trainer.settings.sampling)
    with torch.no_grad():
        trainer.policy.model.norm.weight.mul_(1.5)
    trainer.worker_group.send_weights(trainer.settings.sampling)
    sent = [update for update, _ in trainer.worker_group.cluster.add_new_run("load")]
    assert [len(update.changed) for update in sent[:2]] == [len(sent[0].changed)] * 2
    assert list(sent[2].changed) == ["model.norm.weight"] and sent[2].num_bytes == 4 * 64
    trainer.worker_group.send_weights(trainer.settings.sampling)  # nothing changed since
    assert len(trainer.worker_group.cluster.made("load")) == 3


class DeafWorker(RolloutWorker):
    """Says that it took new weights, and keeps the first ones."""

    def load(self, update, probe):
        return super().load(
            update if self.version < 0 else dataclasses.replace(update, changed={}), probe
        )


class HotWorker(RolloutWorker):
    """Samples at twice the temperature."""

    def load(self, update, probe):
        hot = dataclasses.replace(probe.sampling, temperature=2 * probe.sampling.temperature)
        return super().load(update, dataclasses.replace(probe, sampling=hot))


class HeadlessWorker(RolloutWorker):
    """Its engine samples from other weights than its model was given."""

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
def test_a_transfer_that_did_nothing_or_something_else_is_refused(tokenizer, worker_class, message):
    trainer = with_team(
        letters_trainer(tokenizer), LocalCluster(worker_class=worker_class), count=1
    )
    with pytest.raises(SamplerMismatch, match=message):
        for _ in range(2):
            trainer.step()
    assert trainer.iteration < 2


def test_adapters_travel_alone(tokenizer):
    def adapted():
        torch.manual_seed(3)
        return letters_trainer(
            tokenizer, model=add_adapter(compiled_model(tokenizer), LoraSettings(rank=2))
        )

    alone = bits(adapted())
    cluster = LocalCluster()
    assert bits(with_team(adapted(), cluster)) == alone
    sent = [update for update, _ in cluster.add_new_run("load")]
    assert all("lora_" in name for update in sent for name in update.changed)


def test_the_newest_version_is_closed_and_started_again(tokenizer):
    alone = bits(letters_trainer(tokenizer), 4)
    cluster = LocalCluster()
    trainer = with_team(letters_trainer(tokenizer), cluster)
    first, _ = bits(trainer, 2)
    trainer.worker_group.close()
    rest, last = bits(trainer, 2)
    assert (first + rest, last) == alone and cluster.closed == 1 and len(cluster.opened) == 2
