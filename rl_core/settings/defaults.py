"""Defaults that depend on the model: what suits a from-scratch preset ruins a pretrained model, and the reverse.

A setting named here takes its default by the kind of model (`resolve_defaults`); docs/defaults.md is this table, as
`markdown` writes it. An explicit value always wins.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

ModelKind = Literal["preset", "full", "lora"]


@dataclass(frozen=True, slots=True)
class ModelDefault:
    """One row: the default for a preset, for full fine-tuning and for LoRA of a model with a path, and its source."""

    preset: (
        float | None
    )  # what holds, too, while the model is not known; None (critic): the policy's
    full: float
    lora: float
    source: str
    is_length: bool = False  # tokens: at most half of the model's context

    def select_value(self, kind: ModelKind, context: int | None = None) -> float | None:
        """The default for a kind of model. `context`: its longest sequence, in tokens; None = not known."""
        value: float | None = getattr(self, kind)
        if kind != "preset" and self.is_length and context is not None and value is not None:
            return min(value, max(1, context // 2))
        return value

    def build_placeholder(self) -> float:
        """The preset's value, told apart from the same value when a user sets it."""
        assert self.preset is not None
        return (
            _UnresolvedInt(self.preset)
            if isinstance(self.preset, int)
            else _UnresolvedFloat(self.preset)
        )

    def describe_values(self) -> str:
        """'1e-6, with LoRA 1e-5, presets 3e-4'."""
        lora = "" if self.lora == self.full else f", with LoRA {_format_number(self.lora)}"
        return f"{_format_number(self.full)}{lora}, presets {_format_number(self.preset)}"


class _UnresolvedFloat(float):
    """A default that depends on the model, which is not known yet."""


class _UnresolvedInt(int):
    """A default that depends on the model, which is not known yet."""


def is_unresolved(value: object) -> bool:
    """True = nobody has set the value, and its default depends on a model that is not known yet."""
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
        f"{_VERL} (critic.optim.lr); OpenRLHF has 9e-6; LoRA: ten times that, as for the policy. "
        "Where the policy's rate is set, that one",
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
        64, 512, 512, f"{_VERL} (data.max_response_length)", is_length=True
    ),
    "ThoughtsSettings.max_thought_tokens": ModelDefault(
        64, 256, 256, "half of max_completion_tokens, so that an answer has room", is_length=True
    ),
    "LengthSettings.free": ModelDefault(
        32,
        410,
        410,
        "the last fifth of the tokens costs, as in DAPO's overlong punishment (arXiv:2503.14476)",
    ),
    "LengthSettings.limit": ModelDefault(64, 512, 512, "max_completion_tokens"),
}


def _format_number(value: float | None) -> str:
    """A number as people write it: 1e-6, 512."""
    if value is None:
        return "the policy's"
    mantissa, _, exponent = f"{value:e}".partition("e")
    return f"{float(mantissa):g}e{int(exponent)}" if value < 0.01 else f"{value:g}"


_TABLE_HEAD = """\
# Defaults that depend on the model

With `model.path`, the defaults below are those of the field; from-scratch presets keep rates and lengths that suit
models of a few million parameters. A value that you set always wins; `posttrain validate CONFIG --show` prints those
in force. Where the model's context is known, the default of a marked (*) length is at most half of it. Commands that
put another model into a config (`posttrain stage --model`, `posttrain retrain`) keep the values that the config had.

| setting | preset | full fine-tuning | LoRA | source |
|---|---|---|---|---|
"""
_TABLE_TAIL = """
Of the field's size for every model: `micro_batch_tokens` 16384 (verl: ppo_max_token_len_per_gpu), `kl_coef` 0 and
`beta` 0.1 (TRL: GRPOConfig, DPOConfig), `clip_eps` 0.2, `group_size` 8 (TRL: num_generations), `epochs` 3 of SFT
(transformers: num_train_epochs), `temperature` 1.
"""


def render_defaults_table() -> str:
    """The table as docs/defaults.md."""
    rows = []
    for name, row in MODEL_DEFAULTS.items():
        cells = [_format_number(value) for value in (row.preset, row.full, row.lora)]
        rows.append(
            f"| `{name}`{' *' if row.is_length else ''} | {' | '.join(cells)} | {row.source} |\n"
        )
    return _TABLE_HEAD + "".join(rows) + _TABLE_TAIL
