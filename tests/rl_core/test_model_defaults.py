"""Model-dependent defaults: presets, full fine-tuning, LoRA."""

import copy
import dataclasses
import pickle
from pathlib import Path

import pytest

import rl_core.settings
from rl_core.errors import SettingsError
from rl_core.settings import (
    CriticSettings,
    LengthSettings,
    LoraSettings,
    ModelSettings,
    PolicySettings,
    PreferenceSettings,
    RewardModelSettings,
    RewardSettings,
    SamplingSettings,
    SFTSettings,
    ThoughtsSettings,
    resolve_defaults,
)
from rl_core.settings.defaults import MODEL_DEFAULTS, is_unresolved, render_defaults_table

PRESET, FULL = ModelSettings(), ModelSettings(path="org/name")
LORA = ModelSettings(path="org/name", lora=LoraSettings())


@pytest.mark.parametrize(
    ("settings", "preset", "full", "lora"),
    [
        (PolicySettings(), 3e-4, 1e-6, 1e-5),
        (ThoughtsSettings(), 3e-4, 1e-6, 1e-5),
        (SFTSettings(), 1e-3, 2e-5, 2e-4),
        (PreferenceSettings(), 3e-4, 5e-7, 5e-6),
        (RewardModelSettings(), 1e-3, 1e-5, 1e-4),
    ],
)
def test_learning_rates(settings, preset, full, lora):
    learning_rates = [
        resolve_defaults(settings, model).learning_rate for model in (PRESET, FULL, LORA)
    ]
    assert learning_rates == [preset, full, lora]
    assert settings.learning_rate == preset  # the default while no model is known


def test_lengths_and_epochs():
    assert resolve_defaults(PolicySettings(), FULL).sampling.max_completion_tokens == 512
    assert resolve_defaults(ThoughtsSettings(), LORA).max_thought_tokens == 256
    assert resolve_defaults(RewardModelSettings(), FULL).epochs == 1.0
    length = resolve_defaults(RewardSettings(), FULL).length
    assert (length.free, length.limit) == (410, 512)
    assert resolve_defaults(RewardSettings(), PRESET) == RewardSettings()


@pytest.mark.parametrize(("context", "expected"), [(None, 512), (4096, 512), (600, 300), (1, 1)])
def test_a_default_length_leaves_room_in_a_short_context(context, expected):
    assert resolve_defaults(SamplingSettings(), FULL, context).max_completion_tokens == expected
    assert (
        resolve_defaults(
            SamplingSettings(max_completion_tokens=500), FULL, context
        ).max_completion_tokens
        == 500
    )
    assert resolve_defaults(SamplingSettings(), PRESET, context).max_completion_tokens == 64


@pytest.mark.parametrize(
    ("context", "free", "limit"),
    [
        (None, 410, 512),
        (4096, 410, 512),
        (1024, 410, 512),
        (600, 240, 300),
        (4, 1, 2),
        (3, 0, 1),
        (1, 0, 1),
    ],
)
def test_the_length_penalty_shrinks_with_the_longest_completion(context, free, limit):
    length = resolve_defaults(RewardSettings(), FULL, context).length
    assert (length.free, length.limit) == (free, limit)
    longest = resolve_defaults(SamplingSettings(), FULL, context).max_completion_tokens
    assert length.limit == longest  # the penalty is -1 at the end, whatever the context
    assert resolve_defaults(RewardSettings(), PRESET, context) == RewardSettings()


@pytest.mark.parametrize("model", [PRESET, FULL, LORA])
def test_an_explicit_value_wins_though_it_is_another_column_s(model):
    settings = PolicySettings(
        learning_rate=3e-4, sampling=SamplingSettings(max_completion_tokens=64)
    )
    resolved = resolve_defaults(settings, model)
    assert (resolved.learning_rate, resolved.sampling.max_completion_tokens) == (3e-4, 64)


def test_what_was_resolved_once_stays():
    settings = resolve_defaults(PolicySettings(algorithm="ppo", critic=CriticSettings()), PRESET)
    assert not is_unresolved(settings.learning_rate) and not is_unresolved(
        settings.sampling.max_completion_tokens
    )
    assert (
        resolve_defaults(settings, FULL) == settings
    )  # as in a retraining that starts from the champion


@pytest.mark.parametrize(
    "copied", [copy.deepcopy, dataclasses.replace, lambda value: pickle.loads(pickle.dumps(value))]
)
def test_a_copy_is_as_open_as_the_original(copied):
    assert resolve_defaults(copied(PolicySettings()), FULL).learning_rate == 1e-6
    assert resolve_defaults(copied(PolicySettings(learning_rate=3e-4)), FULL).learning_rate == 3e-4


def test_the_critic_has_a_separate_rate_unless_one_is_set():
    ppo = PolicySettings(algorithm="ppo")
    assert [
        resolve_defaults(ppo, model).value_function.learning_rate for model in (PRESET, FULL, LORA)
    ] == [
        None,
        1e-5,
        1e-4,
    ]
    with_policy_rate = PolicySettings(algorithm="ppo", learning_rate=2e-6)
    assert (
        resolve_defaults(with_policy_rate, FULL).value_function.learning_rate is None
    )  # the policy's
    with_critic_rate = PolicySettings(
        algorithm="ppo", critic=CriticSettings(learning_rate=3e-5, warmup_iterations=2)
    )
    assert resolve_defaults(with_critic_rate, FULL).critic == with_critic_rate.critic
    assert resolve_defaults(PolicySettings(), FULL).critic is None


def test_checks_wait_for_the_default_that_they_need():
    assert resolve_defaults(LengthSettings(free=100), FULL).limit == 512
    with pytest.raises(SettingsError, match="free: 100 must be below limit 64"):
        resolve_defaults(LengthSettings(free=100), PRESET)
    wide = PolicySettings(overlong_buffer=100)
    assert resolve_defaults(wide, FULL).overlong_tokens == 100
    with pytest.raises(
        SettingsError, match="overlong_buffer: 100 is more than max_completion_tokens 64"
    ):
        resolve_defaults(wide, PRESET)
    with pytest.raises(
        SettingsError, match=r"^reward_options\.length\.free: 600 must be below limit 512"
    ):
        resolve_defaults(
            PolicySettings(reward_options=RewardSettings(length=LengthSettings(free=600))), FULL
        )


def test_the_meaning_of_a_setting_tells_its_defaults():
    doc = {field.name: field.metadata["doc"] for field in dataclasses.fields(SamplingSettings)}
    assert doc["max_completion_tokens"].endswith("including observations; unset: 512, presets 64")


def test_every_row_is_a_setting_and_every_source_is_named():
    for name, row in MODEL_DEFAULTS.items():
        block, _, field = name.partition(".")
        setting = getattr(rl_core.settings, block).__dataclass_fields__[field]
        assert setting.default == row.preset and row.source, name


def test_the_document_is_the_table():
    document = Path(__file__).parents[2] / "docs" / "bring-your-own.md"
    assert f"\n{render_defaults_table()}\n" in document.read_text(encoding="utf-8")
    assert "| `PolicySettings.learning_rate` | 3e-4 | 1e-6 | 1e-5 | TRL" in render_defaults_table()
