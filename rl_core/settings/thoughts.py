"""Settings of learned thoughts."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import Literal

from rl_core.errors import SettingsError
from rl_core.settings.base import setting
from rl_core.settings.common import SamplingSettings
from rl_core.settings.defaults import MODEL_DEFAULTS
from rl_core.settings.training import LoopSettings, OptimizerSettings


@dataclass(frozen=True, kw_only=True)
class ThoughtsSettings(OptimizerSettings, LoopSettings):
    """Thoughts before answers, trained by REINFORCE on their likelihood gain (similar to arXiv:2403.09629)."""

    learning_rate: float = setting(
        MODEL_DEFAULTS["ThoughtsSettings.learning_rate"], gt=0, le=1, doc="peak learning rate"
    )
    schedule: Literal["constant", "cosine", "linear"] = setting(
        "cosine", doc="shape after the warm-up"
    )
    weight_decay: float = setting(0.0, ge=0, doc="decoupled, on matrices only")
    eval_every: int = setting(20, ge=0, doc="iterations between validations; 0 = only at the end")
    patience: int | None = setting(
        5, ge=1, doc="validations without improvement before stopping; none = never stop"
    )
    iterations: int = setting(200, ge=1, doc="maximum rollout + update iterations")
    episodes_per_iteration: int = setting(32, ge=1, le=1_048_576, doc="episodes of one round")
    levels: tuple[str, ...] = setting((), doc="levels of the episodes, equally weighted; () = all")
    reward: Literal["logprob_gain", "correctness_gain"] = setting(
        "logprob_gain",
        doc="gain of a thought in the right answer's log-probability (nats) or probability, compared with no thought",
    )
    gain_clip: float = setting(
        3.0, gt=0, doc="gains are clipped to +-this; a turn without an answer gets minus this"
    )
    max_thought_tokens: int = setting(
        MODEL_DEFAULTS["ThoughtsSettings.max_thought_tokens"],
        ge=1,
        le=1_048_576,
        doc="a longer thought counts as a turn without an answer",
    )
    gamma: float = setting(
        0.99, ge=0, le=1, doc="discount from one question of an episode to the next"
    )
    gae_lambda: float = setting(
        0.95, ge=0, le=1, doc="lambda of GAE over an episode's questions (arXiv:1506.02438)"
    )
    advantages: Literal["gae", "returns"] = setting(
        "gae",
        doc="gae: over an episode's questions; returns: the discounted return minus the baseline, without GAE",
    )
    baseline_layers: int = setting(
        1, ge=1, le=8, doc="layers of the baseline's value head; 1 = linear, 2 = an MLP"
    )
    baseline_width: int = setting(
        256, ge=1, le=65_536, doc="units of its hidden layers, if it has any"
    )
    baseline_coef: float = setting(
        1.0,
        gt=0,
        doc="weight of the value head's loss; has no effect on AdamW except through its epsilon",
    )
    baseline_optimizer: Literal["adamw", "sgd"] = setting(
        "adamw", doc="optimizer of the value head; sgd: without momentum"
    )
    baseline_learning_rate: float = setting(
        0.05, gt=0, le=1, doc="constant learning rate of the value head"
    )
    kl_coef: float = setting(
        0.0, ge=0, doc="weight of the KL of thought tokens to the stage's initial model"
    )
    kl_estimator: Literal["k1", "k2", "k3"] = setting(
        "k3", doc="KL estimator in the loss (Schulman 2020)"
    )
    warmup_episodes: int | None = setting(
        None,
        ge=0,
        doc="learning-rate warm-up in episodes, instead of warmup_steps (rounded up to iterations)",
    )
    entropy_coef: float = setting(
        0.01, ge=0, doc="initial weight of the entropy bonus on thought tokens"
    )
    entropy_decay: float = setting(
        0.9995, gt=0, le=1, doc="decay factor of entropy_coef per episode"
    )
    entropy_floor: float = setting(0.001, ge=0, doc="lower bound of entropy_coef")
    answer_coef: float = setting(
        1.0,
        ge=0,
        doc="weight of the right answers' negative log-likelihood, with and without the thought",
    )
    validation_episodes: int = setting(
        100, ge=2, le=10_000_000, doc="held-out episodes per validation"
    )
    select_by: Literal["success_rate", "thought_gain"] = setting(
        "success_rate", doc="validation metric for model selection and patience"
    )
    check_episodes: int = setting(
        200, ge=2, le=10_000_000, doc="held-out episodes of the test for genuine thoughts"
    )
    check_every_episodes: int = setting(
        0,
        ge=0,
        doc="episodes between such tests during training, on the validation episodes; 0 = only at the end",
    )
    stop_when_genuine: bool = setting(
        False, doc="end the training as soon as one of these tests finds thoughts genuine"
    )
    min_dependence: float = setting(
        0.5,
        ge=0,
        le=1,
        doc="share of the gain that must vanish if thoughts are shuffled or replaced by filler",
    )
    bootstrap_samples: int = setting(
        2000, ge=100, le=1_000_000, doc="bootstrap resamples of the test's intervals"
    )
    require_genuine: bool = setting(
        True, doc="fail the stage if the test finds thoughts not genuine"
    )
    sampling: SamplingSettings = setting(SamplingSettings(), doc="how episodes are played")

    def check(self) -> None:
        """Check sampling, that entropy_floor is at most entropy_coef, and that every setting has an effect."""
        self.sampling.check_trainable()
        if self.sampling.stop:
            raise SettingsError("sampling.stop: a thought ends by the end-of-turn token; remove it")
        if self.advantages == "returns" and self.gae_lambda != ThoughtsSettings.gae_lambda:
            raise SettingsError(
                f"gae_lambda: {self.gae_lambda} has no effect if advantages are returns; remove it"
            )
        if self.stop_when_genuine and not self.check_every_episodes:
            raise SettingsError(
                "stop_when_genuine: needs check_every_episodes, which sets when to test"
            )
        if self.entropy_floor > self.entropy_coef:
            raise SettingsError(
                f"entropy_floor: {self.entropy_floor} is above entropy_coef {self.entropy_coef}"
            )

    @property
    def with_warmup(self) -> ThoughtsSettings:
        """These settings with the warm-up in optimizer steps, one per iteration."""
        if self.warmup_episodes is None:
            return self
        return dataclasses.replace(
            self, warmup_steps=-(-self.warmup_episodes // self.episodes_per_iteration)
        )
