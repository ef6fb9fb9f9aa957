"""Reference of the KL term: the policy without its adapters if that is exact, else a shared or a separate copy."""

import pytest
import torch
from helpers.library import have_equal_tensors, length, settings, small_policy, weights

import rl_core
from rl_core.api import on_policy
from rl_core.errors import SettingsError
from rl_core.models.lora import is_fresh_adapter
from rl_core.references.quantized import QuantizedLinear


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return small_policy().save(tmp_path_factory.mktemp("base") / "model")


def with_adapters(folder, **options):
    lora = rl_core.LoraSettings(rank=2, **options)
    return rl_core.load_policy(rl_core.ModelSettings(path=str(folder), lora=lora, device="cpu"))


def train_policy(source, **options):
    return rl_core.grpo(
        source, prompts=["say e"], reward=length, settings=settings(kl_coef=0.1, **options)
    )


def get_reference(training):
    return training.trainer.actor_critic.reference


def test_new_adapters_of_a_loaded_policy_are_switched_off(folder, monkeypatch):
    """Compare bit for bit with a copy of the starting model."""
    policy = with_adapters(folder)
    training = train_policy(policy)
    assert get_reference(training) is policy.model
    training.run()
    monkeypatch.setattr(on_policy, "is_fresh_adapter", lambda model: False)
    other = train_policy(with_adapters(folder))
    assert get_reference(other) is not other.model
    other.run()
    assert have_equal_tensors(weights(training), weights(other))
    for name in ("policy/ref_kl", "reward/mean"):
        assert list(training.metrics()[name]) == list(other.metrics()[name])
    assert training.metrics()["policy/ref_kl"].iloc[-1] > 0


def test_trained_adapters_are_part_of_the_start(folder):
    policy = with_adapters(folder)
    train_policy(policy).run()
    assert not is_fresh_adapter(policy.model)
    continued = train_policy(policy)
    assert get_reference(continued) is not policy.model
    continued.run()
    assert continued.metrics()["policy/ref_kl"].iloc[0] == pytest.approx(
        0.0, abs=1e-6
    )  # the KL is to where this run began


def test_modules_trained_as_a_whole_count(folder):
    policy = with_adapters(folder, target_modules=("q_proj",), modules_to_save=("up_proj",))
    assert is_fresh_adapter(policy.model)
    with torch.no_grad():
        next(p for n, p in policy.model.named_parameters() if "modules_to_save" in n)[0, 0] += 1.0
    assert not is_fresh_adapter(policy.model) and not is_fresh_adapter(small_policy().model)


def test_trainings_from_one_folder_share_a_copy(folder):
    first, second = train_policy(folder), train_policy(rl_core.ModelSettings(path=str(folder)))
    assert get_reference(first) is get_reference(second)
    assert get_reference(first) is not first.model
    before = weights(first)
    first.run()
    assert have_equal_tensors([p.detach() for p in get_reference(second).parameters()], before)


def test_a_reference_in_few_bits(folder):
    pytest.importorskip("torchao")
    training = train_policy(folder, reference_precision="int8")
    assert any(isinstance(part, QuantizedLinear) for part in get_reference(training).modules())
    training.run()
    full = train_policy(folder)
    full.run()
    # the rewards of the first iteration are those of the same rollouts; its KL is only the reference's rounding
    assert training.metrics()["reward/mean"].iloc[0] == full.metrics()["reward/mean"].iloc[0]
    assert full.metrics()["policy/ref_kl"].iloc[0] == pytest.approx(0.0, abs=1e-9)
    assert 1e-9 < training.metrics()["policy/ref_kl"].iloc[0] < 1e-3


def test_few_bits_that_nothing_would_have_are_refused():
    with pytest.raises(SettingsError, match="no reference model if kl_coef is 0"):
        rl_core.PolicySettings(reference_precision="int8")
    with pytest.raises(SettingsError, match="already loaded is copied unchanged; pass its folder"):
        train_policy(small_policy(), reference_precision="int8")
