"""Trainer and sampler on fixed prompts after weight updates: a sampler with other weights is rejected."""

import copy

import pytest
import torch
from helpers.letters import (
    Letters,
    comparable,
    make_trainer,
    sample_with,
    weights,
    weights_of,
)
from helpers.worker_cluster import compiled_model

from rl_core.api.policy import Policy
from rl_core.api.recipes.policy_gradient import build_policy_gradient_recipe
from rl_core.capabilities import decoding
from rl_core.cpu import gemm, packed_gemm
from rl_core.data.chat import ChatRenderer
from rl_core.data.tokenizer import train_tokenizer
from rl_core.errors import SamplerMismatch
from rl_core.models import causal_lm
from rl_core.settings import (
    LoraSettings,
    ModelSettings,
    NumericsGateSettings,
    PolicySettings,
    SamplingSettings,
)
from rl_core.storage.checkpoint import CheckpointStore
from rl_core.training.loop import run_loop

AT_07 = SamplingSettings(max_completion_tokens=3, temperature=0.7)
REFUSED = r"differ by up to (\S+) nats on a token of 8 fixed prompts \(numerics.bound 0.001\)"


@pytest.fixture(scope="module")
def tokenizer():
    return train_tokenizer(["abc xyz"], 300)


def build_trainer(tokenizer, *, lora=False, every=1, action="refuse", **options):
    """Build a trainer at temperature 0.7 whose gate, and no other check, looks after every update."""
    model = None
    if lora:
        settings = ModelSettings(preset="nano", context=32, device="cpu", lora=LoraSettings(rank=4))
        model = causal_lm.create_model(settings, tokenizer, 0)
    numerics = NumericsGateSettings(every=every, action=action, bound=1e-3)
    return make_trainer(
        tokenizer,
        model=model,
        numerics=numerics,
        sampling=AT_07,
        sampler_kl_max=1e6,
        learning_rate=0.05,
        **options,
    )


def disable_sync(trainer):
    start = weights_of(trainer.policy)
    sample_with(trainer, lambda policy: policy.load_state_dict(start))


def change_temperature(trainer):
    run_sequences = trainer.backend.run_sequences
    trainer.backend.run_sequences = lambda sequences, sampling: run_sequences(
        sequences, SamplingSettings(max_completion_tokens=sampling.max_completion_tokens)
    )


def use_old_adapter(trainer):
    """Sample with the adapter of the first update on the newest base."""
    trainer.step()
    start = {name: value for name, value in weights_of(trainer.policy).items() if ".lora_" in name}
    sample_with(trainer, lambda policy: policy.load_state_dict(start, strict=False))


def merge_adapter_twice(trainer):
    def double_adapter(policy):
        for name, value in policy.state_dict().items():
            if ".lora_B." in name:
                value *= 2

    sample_with(trainer, double_adapter)


def drop_output_head(trainer):
    sample_with(trainer, lambda policy: policy.get_output_embeddings().weight.zero_())


def merge_exactly(trainer):
    def zero_adapter(policy):
        for name, value in policy.state_dict().items():
            if ".lora_B." in name:
                value.zero_()

    sample_with(trainer, zero_adapter)


@pytest.mark.parametrize(
    ("inject", "lora"),
    [
        (disable_sync, False),
        (disable_sync, True),
        (change_temperature, False),
        (change_temperature, True),
        (use_old_adapter, True),
        (merge_adapter_twice, True),
        (drop_output_head, False),
        (merge_exactly, True),
    ],
)
def test_a_sampler_of_another_policy_is_refused_with_the_figure(tokenizer, inject, lora):
    trainer = build_trainer(tokenizer, lora=lora)
    inject(trainer)
    with pytest.raises(SamplerMismatch, match=REFUSED) as refused:
        for _ in range(4):
            trainer.step()
    figure = float(str(refused.value).split("up to ")[1].split()[0])
    assert figure > 2e-3
    print(f"{inject.__name__}, {'LoRA' if lora else 'full'}: {figure:.3g} nats")


@pytest.mark.parametrize("lora", [False, True])
def test_a_healthy_sampler_agrees_to_rounding(tokenizer, lora):
    trainer = build_trainer(tokenizer, lora=lora)
    actual = [trainer.step()["policy/numerics_difference"] for _ in range(4)]
    assert max(actual) < 1e-4 and max(actual) >= 0


@pytest.mark.parametrize(
    ("dtype", "autocast"), [(torch.float32, "bfloat16"), (torch.bfloat16, "none")]
)
def test_bfloat16_rollouts_agree_within_its_bound(tokenizer, dtype, autocast):
    """The recipe's sampler packs the weights in bfloat16 where the processor allows."""
    model = compiled_model(tokenizer).to(dtype)
    settings = PolicySettings(
        rewards={"task": 1.0},
        autocast=autocast,
        prompts_per_iteration=6,
        group_size=6,
        learning_rate=1e-2,
        warmup_steps=0,
        numerics=NumericsGateSettings(every=1),
        sampling=AT_07,
    )
    policy = Policy(model, tokenizer, ChatRenderer(tokenizer))
    trainer = build_policy_gradient_recipe(policy, None, Letters(), settings, 7).trainer
    assert trainer.backend._decoder._autocast == autocast
    if packed_gemm.load_bf16_products() is not None:
        assert decoding.check_fused_step(model, autocast=autocast).allowed
        assert trainer.backend._decoder.dtype == torch.float32
        assert decoding.packs_in_bfloat16(model, autocast)
    differences = [trainer.step()["policy/numerics_difference"] for _ in range(3)]
    # compiled products have the same bits in rollouts and training
    is_exact = gemm.load_bf16_gemm() is not None or (
        dtype == torch.bfloat16 and gemm.load_vectors() is not None
    )
    assert 0 <= max(differences) < (1e-4 if is_exact else 0.1)


def test_a_log_probability_that_is_no_number_is_refused(tokenizer):
    trainer = build_trainer(tokenizer)
    trainer.step()
    measure = trainer._numerics.measure_difference
    forward = trainer.policy.get_output_embeddings().forward
    trainer.policy.get_output_embeddings().forward = lambda hidden: forward(hidden) * float("nan")
    trainer.backend.run_sequences = lambda sequences, sampling: [
        sequence.take_action([1], [float("nan")], False) for sequence in sequences
    ]
    assert measure(AT_07) == float("inf")


def test_it_looks_after_the_first_update_and_every_so_many(tokenizer):
    trainer = build_trainer(tokenizer, every=3)
    looked = ["policy/numerics_difference" in trainer.step() for _ in range(7)]
    assert looked == [True, False, False, True, False, False, True]
    never = build_trainer(tokenizer, every=0, action="rollback")
    assert not any("policy/numerics_difference" in never.step() for _ in range(2))
    assert never.state_dict()["numerics"]["snapshots"] == {}


@pytest.mark.parametrize(
    "options", [{"importance": "token"}, {"sampler_kl_max": 1.0}, {"importance_mask": "token"}]
)
def test_other_samplers_on_purpose_are_not_compared_unless_a_bound_is_set(tokenizer, options):
    assert "policy/numerics_difference" not in make_trainer(tokenizer, **options).step()
    bounded = make_trainer(tokenizer, **options, numerics=NumericsGateSettings(bound=1e-3))
    assert bounded.step()["policy/numerics_difference"] < 1e-4


def test_the_numbers_of_training_are_those_without_it(tokenizer):
    with_gate, without = build_trainer(tokenizer), build_trainer(tokenizer, every=0)
    for _ in range(3):
        ours, theirs = with_gate.step(), without.step()
        del ours["policy/numerics_difference"]
        assert comparable(ours) == comparable(theirs)
    assert torch.equal(weights(with_gate), weights(without))


@pytest.mark.parametrize("action", ["refuse", "rollback"])
def test_a_resumed_run_has_the_same_bits(tokenizer, action):
    uninterrupted = build_trainer(tokenizer, every=2, action=action)
    rows = [comparable(uninterrupted.step()) for _ in range(3)]
    state = copy.deepcopy(
        (
            uninterrupted.state_dict(),
            weights_of(uninterrupted.policy),
            uninterrupted.optimizer_step.state_dict(),
        )
    )
    rows += [comparable(uninterrupted.step()) for _ in range(3)]
    resumed = build_trainer(tokenizer, every=2, action=action)
    resumed.policy.load_state_dict(state[1])
    resumed.optimizer_step.load_state_dict(state[2])
    resumed.load_state_dict(state[0])
    assert [comparable(resumed.step()) for _ in range(3)] == rows[3:]
    assert torch.equal(weights(resumed), weights(uninterrupted))


def test_a_gate_that_only_refuses_saves_nothing_and_may_begin_to_roll_back(tokenizer):
    trainer = build_trainer(tokenizer)
    trainer.step()
    state = trainer.state_dict()
    assert state["numerics"] == {}
    resumed = build_trainer(
        tokenizer, action="rollback"
    )  # other settings, allowed by --allow-drift
    resumed.load_state_dict(copy.deepcopy(state))
    assert resumed.step()["policy/numerics_rollbacks"] == 0


def test_a_rollback_goes_back_to_the_weights_of_the_last_agreement(tokenizer):
    trainer = build_trainer(tokenizer, action="rollback")
    trainer.step()
    good = weights(trainer).clone()
    moments = copy.deepcopy(trainer.optimizer_step.optimizer.state_dict()["state"])
    measure, played = trainer._numerics.measure_difference, []
    trainer._numerics.measure_difference = lambda sampling: (
        played.append(0) or (0.5 if len(played) == 1 else measure(sampling))
    )
    metrics = trainer.step()
    assert (metrics["policy/numerics_difference"], metrics["policy/numerics_rollbacks"]) == (0.5, 1)
    assert torch.equal(weights(trainer), good)
    state = trainer.optimizer_step.optimizer.state_dict()["state"]
    assert all(
        torch.equal(state[i][key], value) for i in state for key, value in moments[i].items()
    )
    assert trainer.iteration == trainer.optimizer_step.num_steps == 2  # counters continue
    assert trainer.step()["policy/numerics_rollbacks"] == 1 and not torch.equal(
        weights(trainer), good
    )


def test_a_sampler_that_does_not_follow_the_rollback_ends_the_run(tokenizer):
    trainer = build_trainer(tokenizer, action="rollback")
    change_temperature(trainer)
    with pytest.raises(
        SamplerMismatch, match=r"after the rollback it is 0\.\d+: the sampler does not follow"
    ):
        trainer.step()


def test_rollbacks_that_never_help_end_the_run(tokenizer):
    answers = iter([0.5, 0.0] * 3 + [0.5])

    def build_failing_trainer():
        trainer = build_trainer(tokenizer, action="rollback")
        trainer._numerics.measure_difference = lambda sampling: next(answers)
        return trainer

    trainer = build_failing_trainer()
    for _ in range(2):
        trainer.step()
    state = copy.deepcopy(trainer.state_dict())
    trainer = build_failing_trainer()  # as in a resumed run, which has to know the number in a row
    trainer.load_state_dict(state)
    trainer.step()
    with pytest.raises(
        SamplerMismatch, match=r"up to 0\.5 nats.*; 3 rollbacks before it did not help"
    ):
        trainer.step()


def test_a_refused_iteration_is_not_saved(tokenizer, tmp_path):
    trainer = build_trainer(tokenizer, checkpoint_every=1)
    trainer.step_ = trainer.step

    def step_and_drop():
        if trainer.iteration == 1:
            drop_output_head(trainer)
        return trainer.step_()

    trainer.step = step_and_drop
    with CheckpointStore(tmp_path) as store:
        with pytest.raises(SamplerMismatch, match=REFUSED):
            run_loop(trainer, trainer.settings, iterations=3, checkpoints=store)
        saved = store.load_latest()
    assert saved is not None and saved["loop"]["iteration"] == 1
