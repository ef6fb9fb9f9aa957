"""Settings of policy optimisation: algorithms, critic, replay; and of learning to think."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import Any, Literal

from rl_core.errors import SettingsError, nearest
from rl_core.settings.base import Settings, setting
from rl_core.settings.curriculum import CurriculumStage, ExitCondition, RollbackSettings
from rl_core.settings.defaults import DEFAULTS, is_open
from rl_core.settings.parts import SamplingSettings
from rl_core.settings.rewards import RewardSettings
from rl_core.settings.training import LoopSettings, OptimizerSettings

__all__ = [
    "GROUP_ALGORITHMS",
    "Algorithm",
    "CriticSettings",
    "PolicySettings",
    "ReplaySettings",
    "ThoughtsSettings",
]


@dataclass(frozen=True, kw_only=True)
class CriticSettings(Settings):
    """The value function of PPO, and of REINFORCE with a learned baseline."""

    kind: Literal["separate", "shared"] = setting(
        "separate", doc="separate: a copy of the starting model; shared: a head on the policy's own hidden states"
    )
    learning_rate: float | None = setting(
        None,
        gt=0,
        le=1,
        doc="of a separate critic; left out: the policy's where that is set, else "
        + DEFAULTS["CriticSettings.learning_rate"].words(),
    )
    value_coef: float = setting(0.5, gt=0, doc="weight of a shared head's loss in the policy's (arXiv:1707.06347)")
    value_clip_eps: float | None = setting(None, gt=0, doc="clip of the value around its old one; left out: none")
    warmup_iterations: int = setting(0, ge=0, doc="iterations at the start in which the critic alone learns")
    bootstrap_limits: bool = setting(
        False,
        doc="a rollout cut by the limits of `sampling` is worth the critic's value from there on, as one that its "
        "environment truncates is; false: it ends there. True lets a policy earn by running into the limit",
    )

    def check(self) -> None:
        """A shared head learns with the policy or not at all."""
        if self.kind == "shared" and self.warmup_iterations:
            raise SettingsError("warmup_iterations: needs a separate critic; a shared head learns with the policy")


@dataclass(frozen=True, kw_only=True)
class ReplaySettings(Settings):
    """Rollouts of past iterations, used again with importance weights."""

    iterations: int = setting(4, ge=1, doc="how many past iterations are kept")
    share: float = setting(0.5, gt=0, le=4, doc="replayed groups for each fresh one")


Algorithm = Literal["ppo", "grpo", "dr_grpo", "dapo", "gspo", "cispo", "rloo", "reinforce"]
GROUP_ALGORITHMS = ("grpo", "dr_grpo", "dapo", "gspo", "cispo", "rloo")  # those that compare within a group
_CLIPS = {"gspo": (3e-4, 4e-4), "dapo": (0.2, 0.28)}  # arXiv:2507.18071; arXiv:2503.14476


@dataclass(frozen=True, kw_only=True)
class PolicySettings(OptimizerSettings, LoopSettings):
    """Policy optimisation from rewards."""

    learning_rate: float = setting(DEFAULTS["PolicySettings.learning_rate"], gt=0, le=1, doc="peak learning rate")
    weight_decay: float = setting(0.0, ge=0, doc="decoupled, on matrices only")
    algorithm: Algorithm = setting("grpo", doc="how credit is assigned and the loss is formed")
    iterations: int = setting(200, ge=1, doc="rollout + update rounds at most")
    prompts_per_iteration: int = setting(16, ge=1, doc="P")
    group_size: int = setting(8, ge=1, doc="G, rollouts of one prompt (arXiv:2402.03300)")
    epochs: int = setting(1, ge=1, doc="passes over each iteration's rollouts")
    minibatches: int = setting(1, ge=1, doc="optimizer steps of one pass")
    clip_eps: float | None = setting(
        None, gt=0, lt=1, doc="lower clip of the ratio; left out: 0.2 (arXiv:1707.06347), gspo 3e-4"
    )
    clip_eps_high: float | None = setting(
        None, gt=0, doc="upper clip of the ratio; left out: as clip_eps, dapo 0.28, gspo 4e-4"
    )
    dual_clip: float | None = setting(None, gt=1, doc="cap of the ratio at A < 0 (arXiv:1912.09729); left out: none")
    gamma: float = setting(1.0, ge=0, le=1, doc="discount per token, with a critic")
    gae_lambda: float = setting(0.95, ge=0, le=1, doc="of generalised advantage estimation, with a critic")
    whiten_advantages: bool | None = setting(
        None, doc="mean 0, variance 1 over the iteration's loss tokens; left out: with a critic alone"
    )
    critic: CriticSettings | None = setting(
        None, doc="value function; left out: ppo has one, reinforce takes the batch's mean instead"
    )
    kl_coef: float = setting(0.0, ge=0, doc="weight of the KL to the stage's starting model")
    kl_in: Literal["loss", "reward"] = setting("loss", doc="where it is added; in the reward it is k1, per token")
    kl_estimator: Literal["k1", "k2", "k3"] = setting("k3", doc="of the KL in the loss (Schulman 2020)")
    kl_controller: Literal["fixed", "adaptive", "banded"] = setting(
        "fixed", doc="adaptive: kl_coef follows kl_target (arXiv:1909.08593); banded: steps in and out of a band"
    )
    kl_target: float = setting(0.05, gt=0, doc="nats per token that the controller aims at; the band is +-20% of it")
    kl_horizon: int = setting(10_000, ge=1, doc="rollouts in which the adaptive controller corrects in full")
    kl_max: float | None = setting(
        None, gt=0, doc="hard limit of KL(old || new), nats per token: a step beyond it is taken back"
    )
    trust_region_coef: float = setting(0.0, ge=0, doc="weight of KL(old || new) in the loss")
    entropy_coef: float = setting(0.0, ge=0, doc="weight of the entropy bonus")
    entropy_decay: float = setting(1.0, gt=0, le=1, doc="factor of entropy_coef after each rollout")
    entropy_floor: float = setting(0.0, ge=0, doc="below which entropy_coef does not fall")
    importance: Literal["none", "token", "sequence"] = setting(
        "none", doc="weigh by trainer over sampler probability, which corrects stale or rounded rollouts"
    )
    importance_cap: float = setting(2.0, ge=1, doc="truncation of these weights")
    replay: ReplaySettings | None = setting(None, doc="learn again from past rollouts; needs importance weights")
    dynamic_sampling_tries: int | None = setting(
        None, ge=0, doc="refills of groups whose rewards are all equal (arXiv:2503.14476); left out: dapo 2, others 0"
    )
    overlong_buffer: int | None = setting(
        None, ge=0, doc="last tokens before the limit that are punished; left out: dapo a fifth of it, others 0"
    )
    filter_threshold: float = setting(0.0, ge=0, doc="samples with a smaller |advantage| carry no loss")
    rewards: dict[str, float] = setting({"task": 1.0}, doc="reward components and their weights")
    reward_options: RewardSettings = setting(RewardSettings(), doc="how the components work and are combined")
    sampling: SamplingSettings = setting(SamplingSettings(), doc="how rollouts are drawn")
    curriculum: tuple[CurriculumStage, ...] = setting((), doc="() = all levels at once, equally")
    rollback: RollbackSettings | None = setting(
        None, doc="go back to how a curriculum stage was entered when it loses what it could do; left out: never"
    )
    early_stop: ExitCondition | None = setting(None, doc="end the stage when this holds in the last curriculum stage")
    eval_episodes: int = setting(
        100, ge=2, doc="validation episodes of one evaluation (eval_every), neither trained nor reported on"
    )

    @property
    def clip(self) -> tuple[float, float]:
        """Lower and upper clip of the ratio: what is set, else the algorithm's own."""
        low, high = _CLIPS.get(self.algorithm, (0.2, 0.2))
        if self.clip_eps is not None:
            low, high = self.clip_eps, self.clip_eps if self.algorithm not in _CLIPS else high
        return low, high if self.clip_eps_high is None else self.clip_eps_high

    @property
    def value_function(self) -> CriticSettings | None:
        """The critic's settings; None for algorithms that have none."""
        return self.critic if self.critic is not None or self.algorithm != "ppo" else CriticSettings()

    @property
    def uses_whitening(self) -> bool:
        """True = advantages are whitened over the iteration: as set, else with a critic alone."""
        return self.value_function is not None if self.whiten_advantages is None else self.whiten_advantages

    @property
    def sampling_tries(self) -> int:
        """How often groups without a difference are refilled."""
        own = 2 if self.algorithm == "dapo" else 0
        return own if self.dynamic_sampling_tries is None else self.dynamic_sampling_tries

    @property
    def overlong_tokens(self) -> int:
        """Tokens before the limit that cost reward; 0 = none."""
        own = max(1, self.sampling.max_completion_tokens // 5) if self.algorithm == "dapo" else 0
        return own if self.overlong_buffer is None else self.overlong_buffer

    def for_stage(self, stage: CurriculumStage) -> PolicySettings:
        """These settings with what a curriculum stage overrides; the very same object where it overrides nothing."""
        changes: dict[str, Any] = {}
        if stage.group_size is not None:
            changes["group_size"] = stage.group_size
        if stage.temperature is not None:
            changes["sampling"] = dataclasses.replace(self.sampling, temperature=stage.temperature)
        return dataclasses.replace(self, **changes, curriculum=()) if changes else self

    def check(self) -> None:
        """Combinations that cannot learn, or of which one part would be ignored."""
        self.sampling.check_trainable()
        if self.group_size == 1 and self.algorithm in GROUP_ALGORITHMS:
            raise SettingsError(
                f"group_size: 1 leaves {self.algorithm} without a baseline (every advantage is 0); use at least 2"
            )
        if self.minibatches > self.prompts_per_iteration * self.group_size:
            raise SettingsError(f"minibatches: {self.minibatches} is more than the rollouts of one iteration")
        if self.critic is not None and self.algorithm in GROUP_ALGORITHMS:
            raise SettingsError(f"critic: {self.algorithm} has no use for one; it compares within groups")
        if self.algorithm == "reinforce" and self.epochs * self.minibatches > 1 and self.importance == "none":
            raise SettingsError(
                "importance: reinforce has no ratio, so its 2nd and later steps on the same rollouts need weights; "
                "set token or sequence, or epochs and minibatches to 1"
            )
        if self.replay is not None and self.importance == "none":
            raise SettingsError("importance: replay learns from rollouts of older policies; set token or sequence")
        if self.replay is not None and self.critic is not None and self.critic.kind == "shared":
            raise SettingsError("replay: needs a separate critic")
        if self.kl_coef == 0 and self.kl_controller != "fixed":
            raise SettingsError("kl_controller: needs kl_coef above 0 to start from")
        if self.entropy_floor > self.entropy_coef:
            raise SettingsError(f"entropy_floor: {self.entropy_floor} is above entropy_coef {self.entropy_coef}")
        if self.sampling_tries and self.algorithm not in GROUP_ALGORITHMS:
            raise SettingsError(f"dynamic_sampling_tries: {self.algorithm} does not compare within groups")
        for index, stage in enumerate(self.curriculum):
            for name in stage.rewards:
                if name not in self.rewards:
                    raise SettingsError(
                        f"curriculum.{index}.rewards.{name}: the policy's rewards have no such component; "
                        f"{nearest(name, self.rewards)} (one that only later stages use stands there with weight 0)"
                    )
        for name in self.reward_options.normalise:
            if name not in self.rewards:
                raise SettingsError(f"reward_options.normalise: '{name}' is no component of rewards")
        limit = self.sampling.max_completion_tokens
        if not is_open(limit) and self.overlong_tokens > limit:
            raise SettingsError(
                f"overlong_buffer: {self.overlong_tokens} is more than max_completion_tokens "
                f"{self.sampling.max_completion_tokens}"
            )
        for stage in self.curriculum:
            try:
                self.for_stage(stage)
            except SettingsError as error:
                raise SettingsError(f"curriculum: stage '{stage.name}': {error}") from error


@dataclass(frozen=True, kw_only=True)
class ThoughtsSettings(OptimizerSettings, LoopSettings):
    """Thoughts before answers, learned by REINFORCE from what they add (in the manner of arXiv:2403.09629)."""

    learning_rate: float = setting(DEFAULTS["ThoughtsSettings.learning_rate"], gt=0, le=1, doc="peak learning rate")
    schedule: Literal["constant", "cosine", "linear"] = setting("cosine", doc="shape after the warm-up")
    weight_decay: float = setting(0.0, ge=0, doc="decoupled, on matrices only")
    eval_every: int = setting(20, ge=0, doc="iterations between validations; 0 = only at the end")
    patience: int | None = setting(5, ge=1, doc="validations without improvement before stopping; none = never stop")
    iterations: int = setting(200, ge=1, doc="rounds of playing and updating at most")
    episodes_per_iteration: int = setting(32, ge=1, doc="episodes of one round")
    levels: tuple[str, ...] = setting((), doc="levels of the episodes, drawn equally often; () = all")
    reward: Literal["logprob_gain", "correctness_gain"] = setting(
        "logprob_gain",
        doc="what a thought adds to the right answer's log-probability (nats), or to its probability, over no thought",
    )
    gain_clip: float = setting(3.0, gt=0, doc="a gain lies within +-this; a turn without an answer earns minus this")
    max_thought_tokens: int = setting(
        DEFAULTS["ThoughtsSettings.max_thought_tokens"], ge=1, doc="a longer thought counts as a turn without an answer"
    )
    gamma: float = setting(0.99, ge=0, le=1, doc="discount from one question of an episode to the next")
    gae_lambda: float = setting(
        0.95, ge=0, le=1, doc="of the advantages over an episode's questions (arXiv:1506.02438)"
    )
    baseline_learning_rate: float = setting(0.05, gt=0, le=1, doc="AdamW of the value head; constant")
    entropy_coef: float = setting(0.01, ge=0, doc="weight of the entropy bonus on thought tokens, at the start")
    entropy_decay: float = setting(0.9995, gt=0, le=1, doc="factor of that weight with every episode played")
    entropy_floor: float = setting(0.001, ge=0, doc="what that weight never falls below")
    answer_coef: float = setting(
        1.0, ge=0, doc="weight of the right answers' negative log-likelihood, with and without the thought"
    )
    validation_episodes: int = setting(100, ge=2, doc="held-out episodes of one validation")
    select_by: Literal["success_rate", "thought_gain"] = setting(
        "success_rate", doc="validation metric that picks the best model and counts for patience"
    )
    check_episodes: int = setting(200, ge=2, doc="held-out episodes on which thoughts are tested for being genuine")
    min_dependence: float = setting(
        0.5, ge=0, le=1, doc="share of the gain that has to go when thoughts are shuffled or replaced by filler"
    )
    bootstrap_samples: int = setting(2000, ge=100, doc="resamples of the test's intervals")
    require_genuine: bool = setting(True, doc="fail the stage when the test says that thoughts are not genuine")
    sampling: SamplingSettings = setting(SamplingSettings(), doc="how episodes are played")

    def check(self) -> None:
        """The entropy weight falls towards its floor; rollouts are drawn, not greedy."""
        self.sampling.check_trainable()
        if self.entropy_floor > self.entropy_coef:
            raise SettingsError(f"entropy_floor: {self.entropy_floor} is above entropy_coef {self.entropy_coef}")
