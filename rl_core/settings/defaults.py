"""Defaults that depend on the model: values for a from-scratch preset ruin a pretrained model, and vice versa.

A setting named here gets its default by the kind of model (`resolve_defaults`); `render_defaults_table` writes this
table as docs/defaults.md. An explicit value always wins.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

ModelKind = Literal["preset", "full", "lora"]


@dataclass(frozen=True, slots=True)
class ModelDefault:
    """One row: the default for a preset, for full fine-tuning and for LoRA of a model with a path, and its source."""

    preset: float | None  # also used while the model is unknown; None (critic): as the policy
    full: float
    lora: float
    source: str
    share_of_half_context: float | None = None  # of tokens: at most this share of half the context

    def select_value(self, kind: ModelKind, context: int | None = None) -> float | None:
        """Return the default for a kind of model.

        Args:
            context: its longest sequence, in tokens; None = unknown.
        """
        value: float | None = getattr(self, kind)
        if kind == "preset" or context is None or value is None:
            return value
        if self.share_of_half_context is None:
            return value
        half = max(1, context // 2)
        if self.share_of_half_context == 1:
            return min(value, half)
        return min(value, round(half * self.share_of_half_context), half - 1)

    def build_unresolved_value(self) -> float:
        """Return the preset's value as a type that marks it as not set by the user."""
        assert self.preset is not None
        if isinstance(self.preset, int):
            return _UnresolvedInt(self.preset)
        return _UnresolvedFloat(self.preset)

    def describe_values(self) -> str:
        """Describe the values: '1e-6, with LoRA 1e-5, presets 3e-4'."""
        lora = "" if self.lora == self.full else f", with LoRA {_format_number(self.lora)}"
        return f"{_format_number(self.full)}{lora}, presets {_format_number(self.preset)}"


class _UnresolvedFloat(float):
    """A default that depends on a model which is not known yet."""


class _UnresolvedInt(int):
    """A default that depends on a model which is not known yet."""


def is_unresolved(value: object) -> bool:
    """Return whether the value was not set and its default depends on a model that is not known yet."""
    return isinstance(value, _UnresolvedFloat | _UnresolvedInt)


_TRL = "TRL, PEFT guide (huggingface.co/docs/trl/peft_integration)"
_VERL = "verl, ppo_trainer.yaml"

MODEL_DEFAULTS: dict[str, ModelDefault] = {
    "PolicySettings.learning_rate": ModelDefault(
        3e-4,
        1e-6,
        1e-5,
        f"{_TRL} and GRPOConfig; {_VERL} (actor.optim.lr); OpenRLHF (actor_learning_rate)",
    ),
    "CriticSettings.learning_rate": ModelDefault(
        None,
        1e-5,
        1e-4,
        f"{_VERL} (critic.optim.lr); OpenRLHF uses 9e-6; LoRA: ten times that, as for the policy. "
        "If the policy's rate is set, the critic uses it",
    ),
    "ThoughtsSettings.learning_rate": ModelDefault(
        3e-4, 1e-6, 1e-5, "a policy gradient: as PolicySettings"
    ),
    "SFTSettings.learning_rate": ModelDefault(1e-3, 2e-5, 2e-4, f"{_TRL} and SFTConfig"),
    "PreferenceSettings.learning_rate": ModelDefault(
        3e-4, 5e-7, 5e-6, f"{_TRL} and dpo.py; Zephyr 7B (arXiv:2310.16944) for the former"
    ),
    "RewardModelSettings.learning_rate": ModelDefault(
        1e-3, 1e-5, 1e-4, "TRL, examples/scripts/reward_modeling.py"
    ),
    "RewardModelSettings.epochs": ModelDefault(
        3.0,
        1.0,
        1.0,
        "TRL, examples/scripts/reward_modeling.py; more epochs overfit (InstructGPT, arXiv:2203.02155)",
    ),
    "SamplingSettings.max_completion_tokens": ModelDefault(
        64, 512, 512, f"{_VERL} (data.max_response_length)", share_of_half_context=1.0
    ),
    "ThoughtsSettings.max_thought_tokens": ModelDefault(
        64,
        256,
        256,
        "half of max_completion_tokens, so that an answer has room",
        share_of_half_context=1.0,
    ),
    "LengthSettings.free": ModelDefault(
        32,
        410,
        410,
        "penalises the last fifth of the tokens, as DAPO's overlong punishment (arXiv:2503.14476)",
        share_of_half_context=0.8,
    ),
    "LengthSettings.limit": ModelDefault(
        64, 512, 512, "max_completion_tokens", share_of_half_context=1.0
    ),
}


def _format_number(value: float | None) -> str:
    """Format a number as people write it: 1e-6, 512."""
    if value is None:
        return "the policy's"
    mantissa, _, exponent = f"{value:e}".partition("e")
    return f"{float(mantissa):g}e{int(exponent)}" if value < 0.01 else f"{value:g}"


_TABLE_HEAD = """\
# Defaults that depend on the model

With `model.path`, unset learning rates and lengths default to values commonly used for that kind of model; from-scratch
presets use values that suit models of a few million parameters. A value that you set always wins; `posttrain validate
CONFIG --show` prints the values in use. If the model's context is known, the default of a length marked * is at most
half of it (`LengthSettings.free`: 80% of that half). Commands that put another model into a config (`posttrain run
--only STAGE --model`, `posttrain retrain`) keep the config's values.

| setting | preset | full fine-tuning | LoRA | source |
|---|---|---|---|---|
"""
_TABLE_TAIL = """
Common values for every model: `micro_batch_tokens` 16384 (verl: ppo_max_token_len_per_gpu), `kl_coef` 0 and
`beta` 0.1 (TRL: GRPOConfig, DPOConfig), `clip_eps` 0.2, `group_size` 8 (TRL: num_generations), `epochs` 3 of SFT
(transformers: num_train_epochs), `temperature` 1.
"""


def render_defaults_table() -> str:
    """Render the table as docs/defaults.md."""
    rows = []
    for name, row in MODEL_DEFAULTS.items():
        cells = [_format_number(value) for value in (row.preset, row.full, row.lora)]
        mark = "" if row.share_of_half_context is None else " *"
        rows.append(f"| `{name}`{mark} | {' | '.join(cells)} | {row.source} |\n")
    return _TABLE_HEAD + "".join(rows) + _TABLE_TAIL
