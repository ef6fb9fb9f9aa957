"""Rollouts that do not come from the trained distribution end the run, whatever the cause."""

import dataclasses

import pytest
from helpers import letters

from rl_core.data.tokenizer import train_tokenizer
from rl_core.errors import SamplerMismatch
from rl_core.settings import NumericsGateSettings
from rl_core.storage.checkpoint import CheckpointStore
from rl_core.trainers.policy_gradient import samples
from rl_core.training.loop import run_loop


@pytest.fixture(scope="module")
def tokenizer():
    return train_tokenizer(["abc xyz"], 300)


def make_trainer(tokenizer, **options):
    """Make a trainer without the comparison on fixed prompts, which would refuse first."""
    return letters.make_trainer(tokenizer, numerics=NumericsGateSettings(every=0), **options)


def disable_sync(trainer):
    """Disable the weight sync silently: the sampler keeps the initial weights."""
    start = letters.weights_of(trainer.policy)
    letters.sample_with(trainer, lambda policy: policy.load_state_dict(start))
    return trainer


def test_a_sync_that_does_nothing(tokenizer):
    trainer = disable_sync(make_trainer(tokenizer))
    trainer.step()  # with the initial weights in both
    with pytest.raises(
        SamplerMismatch,
        match=r"is 0\.\d+ nats per token on fresh rollouts.*sampler_kl_max is 0\.001",
    ):
        trainer.step()


def test_another_temperature(tokenizer, monkeypatch):
    row = samples.build_train_row
    monkeypatch.setattr(
        samples,
        "build_train_row",
        lambda rollout: dataclasses.replace(row(rollout), temperature=0.5),
    )
    with pytest.raises(SamplerMismatch):
        make_trainer(tokenizer).step()


def test_a_head_that_never_arrived(tokenizer):
    trainer = make_trainer(tokenizer)
    letters.sample_with(trainer, lambda policy: policy.get_output_embeddings().weight.zero_())
    with pytest.raises(SamplerMismatch):
        trainer.step()


def test_weights_merged_twice(tokenizer):
    trainer = make_trainer(tokenizer)
    start = letters.weights_of(trainer.policy)

    def merge_twice(policy):
        for name, value in policy.state_dict().items():
            value += value - start[name]

    letters.sample_with(trainer, merge_twice)
    trainer.step()  # nothing is learned yet, so the merge changes nothing
    with pytest.raises(SamplerMismatch):
        trainer.step()


@pytest.mark.parametrize("options", [{"importance": "token"}, {"sampler_kl_max": 1e6}])
def test_other_weights_on_purpose_are_allowed(tokenizer, options):
    trainer = disable_sync(make_trainer(tokenizer, **options))
    trainer.step()
    assert trainer.step()["policy/sampler_kl"] > 1e-3


def test_a_custom_limit_holds_with_importance_weights_too(tokenizer):
    trainer = disable_sync(make_trainer(tokenizer, importance="token", sampler_kl_max=1e-3))
    trainer.step()
    with pytest.raises(SamplerMismatch):
        trainer.step()


def test_the_iteration_is_not_saved(tokenizer, tmp_path):
    trainer = disable_sync(make_trainer(tokenizer, checkpoint_every=1))
    with CheckpointStore(tmp_path) as store:
        with pytest.raises(SamplerMismatch):
            run_loop(trainer, trainer.settings, iterations=3, checkpoints=store)
        saved = store.load_latest()
    assert saved is not None and saved["loop"]["iteration"] == 1
