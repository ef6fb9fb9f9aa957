"""Settings of policy optimisation: algorithms and their defaults, the critic, the KL controller, the stage itself."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import Any, Literal

from rl_core.errors import SettingsError, suggest_name
from rl_core.settings.base import Settings, setting
from rl_core.settings.common import Precision, SamplingSettings
from rl_core.settings.credit import CriticSettings, TurnCreditSettings
from rl_core.settings.curriculum import CurriculumStage, ExitCondition, RollbackSettings
from rl_core.settings.defaults import MODEL_DEFAULTS, ModelKind, is_unresolved
from rl_core.settings.policy_checks import (
    check_algorithm_settings,
    check_learning_rate_control,
    check_reward_credit,
    check_rollouts,
)
from rl_core.settings.rewards import RewardSettings
from rl_core.settings.rollouts import NumericsGateSettings, ReplaySettings, RolloutSettings
from rl_core.settings.self_play import (
    RoleBaselineSettings,
    SelfPlaySettings,
    check_self_play,
)
from rl_core.settings.training import (
    LearningRateControlSettings,
    LoopSettings,
    OptimizerSettings,
)

Algorithm = Literal[
    "ppo",
    "grpo",
    "dr_grpo",
    "dapo",
    "gspo",
    "cispo",
    "sapo",
    "dppo",
    "maxrl",
    "gdpo",
    "rloo",
    "reinforce",
]
# algorithms with group-relative advantages
GROUP_ALGORITHMS = (
    "grpo",
    "dr_grpo",
    "dapo",
    "gspo",
    "cispo",
    "sapo",
    "dppo",
    "maxrl",
    "gdpo",
    "rloo",
)

# Lower and upper clip of the ratio; (0.2, 0.2) for the others. Sources: arXiv:2507.18071; arXiv:2503.14476
CLIP_RANGES = {"gspo": (3e-4, 4e-4), "dapo": (0.2, 0.28)}
# dppo: limits of the divergence instead, the same at both sides (arXiv:2602.04879)
DIVERGENCE_LIMITS = {"tv": 0.15, "kl": 0.05}

Aggregation = Literal["token_mean", "sequence_mean", "constant"]
# token_mean for the others. Sources: arXiv:2503.20783; arXiv:2507.18071, eq. 5; arXiv:2511.20347
LOSS_AGGREGATIONS: dict[str, Aggregation] = {
    "dr_grpo": "constant",
    "gspo": "sequence_mean",
    "sapo": "sequence_mean",
}

MAX_ROLLOUTS = 2**20  # of one iteration, all in memory
IMPORTANCE_CHOICES = "token, sequence or geometric (with a critic also vtrace)"


@dataclass(frozen=True, kw_only=True)
class KLBandSettings(Settings):
    """Band around a target of the KL, factors outside it, and bounds of kl_coef (`losses.kl.banded_kl_coef`)."""

    width: float = setting(0.2, ge=0, doc="half-width of the band, as a share of the target")
    increase: float = setting(1.2, ge=1, doc="factor of kl_coef where the KL is above the band")
    decrease: float = setting(1.2, ge=1, doc="divisor of kl_coef where the KL is below the band")
    minimum: float = setting(1e-4, gt=0, doc="lower bound of kl_coef")
    maximum: float = setting(1.0, gt=0, doc="upper bound of kl_coef")

    def check(self) -> None:
        """Check that the bounds are in order."""
        if self.minimum > self.maximum:
            raise SettingsError(f"minimum: {self.minimum} is above maximum {self.maximum}")

    def check_start(self, kl_coef: float) -> None:
        """Raise SettingsError if the initial coefficient lies outside the bounds."""
        if not self.minimum <= kl_coef <= self.maximum:
            raise SettingsError(
                f"kl_coef: {kl_coef} must lie between kl_band.minimum {self.minimum} and kl_band.maximum {self.maximum}"
            )


@dataclass(frozen=True, kw_only=True)
class PolicySettings(OptimizerSettings, LoopSettings):
    """Policy optimisation."""

    learning_rate: float = setting(
        MODEL_DEFAULTS["PolicySettings.learning_rate"], gt=0, le=1, doc="peak learning rate"
    )
    weight_decay: float = setting(0.0, ge=0, doc="decoupled, on matrices only")
    algorithm: Algorithm = setting("grpo", doc="advantage estimator and loss")
    iterations: int = setting(200, ge=1, doc="maximum rollout + update iterations")
    prompts_per_iteration: int = setting(16, ge=1, le=1_048_576, doc="P, prompts of an iteration")
    group_size: int = setting(8, ge=1, le=65_536, doc="G, rollouts per prompt (arXiv:2402.03300)")
    epochs: int = setting(1, ge=1, doc="passes over each iteration's rollouts")
    minibatches: int = setting(1, ge=1, le=1_048_576, doc="optimizer steps per pass")
    clip_eps: float | None = setting(
        None,
        gt=0,
        lt=1,
        doc="lower clip of the ratio; default: 0.2 (arXiv:1707.06347), gspo 3e-4; dppo: limit of the divergence at "
        "A < 0, 0.15, or 0.05 for a KL",
    )
    clip_eps_high: float | None = setting(
        None,
        gt=0,
        doc="upper clip of the ratio; default: as clip_eps, dapo 0.28, gspo 4e-4; dppo: limit at A > 0",
    )
    dppo_divergence: Literal["binary_tv", "binary_kl", "topk_tv", "topk_kl"] = setting(
        "binary_tv",
        doc="dppo: divergence from the sampler that masks a token (arXiv:2602.04879). binary: of the sampled token, "
        "tv |p - q| or the KL of sampled or not; topk: of the dppo_topk likeliest tokens, with another pass over the "
        "rollouts in each optimizer step",
    )
    dppo_topk: int = setting(20, ge=1, le=65_536, doc="dppo: K of topk_tv and topk_kl")
    maxrl_order: int | None = setting(
        None,
        ge=1,
        doc="maxrl: order of the expansion of the log-likelihood, for rewards 0 and 1; 1 = rloo; default: "
        "group_size - 1, for which A = (r - mean) / mean (arXiv:2602.02710)",
    )
    dual_clip: float | None = setting(
        None, gt=1, doc="cap of the ratio at A < 0 (arXiv:1912.09729); default: none"
    )
    loss: str | None = setting(
        None,
        is_code=True,
        doc="custom policy loss instead of the algorithm's: import path or file (package.module:name, loss.py:name)",
    )
    loss_options: dict[str, Any] = setting({}, doc="keyword arguments of that loss")
    advantages: str | None = setting(
        None,
        is_code=True,
        doc="custom advantage estimator instead of the algorithm's comparison of rewards",
    )
    advantage_options: dict[str, Any] = setting({}, doc="keyword arguments of that estimator")
    sapo_tau_positive: float = setting(
        1.0, gt=0, doc="sapo: slope of the gate at A > 0 (arXiv:2511.20347)"
    )
    sapo_tau_negative: float = setting(
        1.05, gt=0, doc="sapo: slope of the gate at A <= 0; larger = less off-policy"
    )
    loss_aggregation: Aggregation | None = setting(
        None,
        doc="token_mean: mean over the loss tokens of the optimizer step; sequence_mean: mean over sequences of their "
        "token means; constant: divided by rollouts x max_completion_tokens. KL and entropy terms use the same; "
        "default: token_mean, dr_grpo constant, gspo and sapo sequence_mean",
    )
    gamma: float = setting(1.0, ge=0, le=1, doc="discount per token, used with a critic")
    gae_lambda: float = setting(0.95, ge=0, le=1, doc="lambda of GAE, used with a critic")
    whiten_advantages: bool | None = setting(
        None, doc="mean 0, variance 1 over the iteration's loss tokens; default: only with a critic"
    )
    critic: CriticSettings | None = setting(
        None, doc="value function; default: only for ppo; reinforce uses the batch mean"
    )
    turn_credit: TurnCreditSettings | None = setting(
        None,
        doc="an advantage for each turn of a rollout instead of one for all of its tokens (GiGPO, "
        "arXiv:2505.10978); default: none",
    )
    self_play: SelfPlaySettings | None = setting(
        None,
        doc="play a two-player game (kuhn_poker, textarena) against itself or its past versions, both seats equally "
        "often; default: none, an episode has one player",
    )
    role_baseline: RoleBaselineSettings | None = setting(
        None,
        doc="advantages relative to a running mean of each role's rewards (arXiv:2506.24119) instead of the group or "
        "batch; default: none",
    )
    learning_rate_control: LearningRateControlSettings | None = setting(
        None, doc="a learning rate that follows the KL of the updates; default: the schedule alone"
    )
    kl_coef: float = setting(0.0, ge=0, doc="weight of the KL to the stage's initial model")
    reference_precision: Precision = setting(
        "full",
        doc="weights of that model, if it is a copy (not with LoRA, which switches adapters off): int8 and int4 "
        "(package torchao) save memory and change the KL (docs/scaling.md)",
    )
    kl_in: Literal["loss", "reward"] = setting(
        "loss", doc="where the KL penalty is applied; in the reward it is k1 per token"
    )
    kl_estimator: Literal["k1", "k2", "k3"] = setting(
        "k3", doc="KL estimator in the loss (Schulman 2020)"
    )
    kl_controller: Literal["fixed", "adaptive", "banded"] = setting(
        "fixed",
        doc="adaptive: kl_coef follows kl_target (arXiv:1909.08593); banded: kl_coef changes only outside a band",
    )
    kl_target: float = setting(0.05, gt=0, doc="target of the controllers, nats per token")
    kl_band: KLBandSettings = setting(
        KLBandSettings(), doc="banded controller: band, factors, bounds"
    )
    kl_horizon: int = setting(
        10_000, ge=1, doc="rollouts over which the adaptive controller corrects fully"
    )
    sampler_kl_max: float | None = setting(
        None,
        gt=0,
        doc="hard limit of KL(sampler || trainer) on fresh rollouts, nats per token: above it "
        "the run stops without saving the iteration; default: 0.001 in float32, 0.1 in "
        "bfloat16 and float16, none with `dropout`, `importance` or `importance_mask`",
    )
    kl_max: float | None = setting(
        None,
        gt=0,
        doc="hard limit of KL(old || new), nats per token: a step above it is rolled back",
    )
    trust_region_coef: float = setting(0.0, ge=0, doc="weight of KL(old || new) in the loss")
    trust_region_kl: Literal["k3", "exact"] = setting(
        "k3",
        doc="k3: at the sampled tokens; exact: over the whole vocabulary, with a copy of the "
        "trainable weights and two more passes in every optimizer step except the first on "
        "the same rollouts",
    )
    entropy_coef: float = setting(0.0, ge=0, doc="weight of the entropy bonus")
    entropy_decay: float = setting(1.0, gt=0, le=1, doc="decay factor of entropy_coef per rollout")
    entropy_floor: float = setting(0.0, ge=0, doc="lower bound of entropy_coef")
    router_aux_loss_coef: float = setting(
        0.0,
        ge=0,
        doc="weight of the load-balancing loss of routers in mixture-of-experts models (arXiv:2101.03961)",
    )
    importance: Literal["none", "token", "sequence", "geometric", "vtrace"] = setting(
        "none",
        doc="importance weights (trainer / sampler probability) for stale or numerically different rollouts: per "
        "token, the product over the sequence, the geometric mean over its tokens, or V-trace (needs a critic; "
        "arXiv:1802.01561)",
    )
    importance_cap: float | None = setting(
        None,
        ge=1,
        doc="truncation of the importance weights, or of V-trace's rho; default: 2, vtrace 1",
    )
    vtrace_c: float = setting(
        1.0, gt=0, le=1, doc="truncation of V-trace's traces c; their lambda is gae_lambda"
    )
    importance_mask: Literal["none", "token", "sequence", "geometric"] = setting(
        "none",
        doc="drop from the policy loss tokens whose ratio, or sequences whose product or geometric mean of "
        "ratios, leaves [importance_low, importance_high]; denominators stay",
    )
    importance_low: float = setting(0.5, ge=0, lt=1, doc="lower limit of importance_mask")
    importance_high: float = setting(
        2.0, gt=1, doc="upper limit of importance_mask; a geometric mean needs tighter limits"
    )
    replay: ReplaySettings | None = setting(
        None, doc="also train on past rollouts; needs importance weights"
    )
    dynamic_sampling_tries: int | None = setting(
        None,
        ge=0,
        le=1_000,
        doc="resampling rounds for groups with equal rewards (arXiv:2503.14476); default: dapo 2, others 0",
    )
    overlong_buffer: int | None = setting(
        None,
        ge=0,
        doc="penalised tokens before the length limit; default: dapo a fifth of the limit, others 0",
    )
    mask_truncated: bool = setting(
        False,
        doc="true: rollouts cut by max_completion_tokens or the context carry no loss; their reward "
        "still counts in the group (overlong filtering, arXiv:2503.14476)",
    )
    filter_threshold: float = setting(
        0.0, ge=0, doc="samples with a smaller |advantage| are masked"
    )
    rewards: dict[str, float] = setting(
        {"task": 1.0}, is_code=True, doc="reward components and their weights"
    )
    reward_options: RewardSettings = setting(
        RewardSettings(), doc="options of the reward components and their combination"
    )
    sampling: SamplingSettings = setting(SamplingSettings(), doc="how rollouts are drawn")
    rollouts: RolloutSettings = setting(
        RolloutSettings(),
        doc="where rollouts are played; the stage's key includes only what changes numbers: independent, staleness, a "
        "server",
    )
    numerics: NumericsGateSettings = setting(
        NumericsGateSettings(),
        doc="comparison of trainer and sampler on fixed prompts; with `action: refuse` not part of the stage's key",
    )
    curriculum: tuple[CurriculumStage, ...] = setting((), doc="() = all levels, equally weighted")
    rollback: RollbackSettings | None = setting(
        None, doc="restore a stage's entry snapshot after a performance drop; default: never"
    )
    early_stop: ExitCondition | None = setting(
        None, doc="end the training when this holds in the last curriculum stage"
    )
    eval_episodes: int = setting(
        100,
        ge=2,
        le=10_000_000,
        doc="validation episodes per evaluation (eval_every), disjoint from training and reported episodes",
    )

    @property
    def clip(self) -> tuple[float, float]:
        """Lower and upper clip of the ratio (dppo: limits of the divergence), with the algorithm's defaults."""
        if self.algorithm == "dppo":
            low = self.clip_eps or DIVERGENCE_LIMITS[self.divergence_kind]
            return low, self.clip_eps_high or low
        low, high = CLIP_RANGES.get(self.algorithm, (0.2, 0.2))
        if self.clip_eps is not None:
            low, high = self.clip_eps, self.clip_eps if self.algorithm not in CLIP_RANGES else high
        return low, high if self.clip_eps_high is None else self.clip_eps_high

    @property
    def divergence_kind(self) -> Literal["tv", "kl"]:
        """Divergence that masks a token in `dppo`."""
        return "kl" if self.dppo_divergence.endswith("kl") else "tv"

    @property
    def uses_top_k(self) -> bool:
        """True if the divergence of `dppo` needs the likeliest tokens at each position."""
        is_dppo = self.algorithm == "dppo" and self.loss is None
        return is_dppo and self.dppo_divergence.startswith("topk")

    @property
    def anchors_sampler(self) -> bool:
        """True if the loss is relative to the policy that sampled: it has the importance weights in its ratio."""
        return self.algorithm == "dppo" and self.loss is None

    @property
    def compares_groups(self) -> bool:
        """True if advantages are relative to a group of rollouts of the same prompt."""
        return self.algorithm in GROUP_ALGORITHMS

    @property
    def uses_reward_model(self) -> bool:
        """True if a reward is that of a reward model, of whole completions or of their steps."""
        process = self.reward_options.process
        return "learned" in self.rewards or ("process" in self.rewards and process.function is None)

    @property
    def uses_step_credit(self) -> bool:
        """True if the reward `process` gives each step of a completion its advantage or reward."""
        is_step = self.reward_options.process.credit == "steps"
        return "process" in self.rewards and is_step and not self.is_taught

    @property
    def is_taught(self) -> bool:
        """True if a teacher provides the advantages (`DistilledPolicySettings`)."""
        return False

    @property
    def compares_distributions(self) -> bool:
        """True if a teacher's distributions replace advantages (`DistilledPolicySettings`)."""
        return False

    @property
    def aggregation(self) -> Aggregation:
        """Aggregation of the loss over tokens, with the algorithm's default."""
        return self.loss_aggregation or LOSS_AGGREGATIONS.get(self.algorithm, "token_mean")

    @property
    def weight_cap(self) -> float:
        """Truncation of the importance weights, with the default of their kind."""
        default = 1.0 if self.importance == "vtrace" else 2.0  # arXiv:1802.01561, table 3
        return default if self.importance_cap is None else self.importance_cap

    @property
    def corrects_sampler(self) -> bool:
        """True if importance weights, masks or the loss itself correct for rollouts of another sampler."""
        if self.anchors_sampler and (self.replay is not None or self.rollouts.max_staleness > 0):
            return True
        return self.importance != "none" or self.importance_mask != "none"

    @property
    def value_function(self) -> CriticSettings | None:
        """Settings of the critic; None for algorithms without one."""
        if self.critic is None and self.algorithm == "ppo":
            return CriticSettings()
        return self.critic

    @property
    def uses_whitening(self) -> bool:
        """True if advantages are whitened over the iteration; by default only with a critic."""
        if self.whiten_advantages is None:
            return self.value_function is not None
        return self.whiten_advantages

    @property
    def sampling_tries(self) -> int:
        """Resampling rounds for groups with equal rewards."""
        default = 2 if self.algorithm == "dapo" else 0
        return default if self.dynamic_sampling_tries is None else self.dynamic_sampling_tries

    @property
    def overlong_tokens(self) -> int:
        """Penalised tokens before the length limit; 0 = none."""
        if self.overlong_buffer is not None:
            return self.overlong_buffer
        return max(1, self.sampling.max_completion_tokens // 5) if self.algorithm == "dapo" else 0

    def for_stage(self, stage: CurriculumStage) -> PolicySettings:
        """Apply a curriculum stage's overrides; return `self` if there are none."""
        changes: dict[str, Any] = {}
        if stage.group_size is not None:
            changes["group_size"] = stage.group_size
        if stage.temperature is not None:
            changes["sampling"] = dataclasses.replace(self.sampling, temperature=stage.temperature)
        return dataclasses.replace(self, **changes, curriculum=()) if changes else self

    def check(self) -> None:
        """Refuse combinations that cannot learn or would be partly ignored."""
        self.sampling.check_trainable()
        has_baseline = self.advantages is not None or self.role_baseline is not None
        if self.group_size == 1 and self.compares_groups and not has_baseline:
            raise SettingsError(
                f"group_size: 1 leaves {self.algorithm} without a baseline (every advantage is 0); use at least 2"
            )
        rollouts = self.prompts_per_iteration * self.group_size
        if rollouts > MAX_ROLLOUTS:
            raise SettingsError(
                f"group_size: {self.prompts_per_iteration:,} prompts x {self.group_size:,} are {rollouts:,} rollouts "
                f"in one iteration, more than {MAX_ROLLOUTS:,}; lower this or prompts_per_iteration"
            )
        if self.minibatches > rollouts:
            raise SettingsError(
                f"minibatches: {self.minibatches} is more than the rollouts of one iteration"
            )
        if self.critic is not None and self.algorithm in GROUP_ALGORITHMS:
            raise SettingsError(
                f"critic: not used by {self.algorithm}, whose advantages are group-relative; remove it, or set "
                "algorithm to ppo"
            )
        if self.mask_truncated and self.value_function is not None:
            raise SettingsError(
                "mask_truncated: works only with advantages by comparison; with a critic, critic.bootstrap_limits sets "
                "what a limit means"
            )
        check_learning_rate_control(self)
        self._check_importance()
        if self.replay is not None and self.critic is not None and self.critic.kind == "shared":
            raise SettingsError("replay: needs a separate critic")
        if self.kl_coef == 0 and self.reference_precision != "full":
            raise SettingsError(
                "reference_precision: there is no reference model if kl_coef is 0; remove it"
            )
        self._check_kl()
        if self.entropy_floor > self.entropy_coef:
            raise SettingsError(
                f"entropy_floor: {self.entropy_floor} is above entropy_coef {self.entropy_coef}"
            )
        if self.sampling_tries and self.algorithm not in GROUP_ALGORITHMS:
            raise SettingsError(
                f"dynamic_sampling_tries: not used by {self.algorithm}, which has no group-relative advantages"
            )
        check_rollouts(self)
        check_algorithm_settings(self)
        self._check_custom_functions()
        check_reward_credit(self)
        check_self_play(self)
        self._check_rewards()
        for stage in self.curriculum:
            try:
                self.for_stage(stage)
            except SettingsError as error:
                raise SettingsError(f"curriculum: stage '{stage.name}': {error}") from error

    def _check_kl(self) -> None:
        """Check that KL terms have what they need and that every setting has an effect."""
        if self.kl_coef == 0 and self.kl_controller != "fixed":
            raise SettingsError("kl_controller: needs an initial kl_coef above 0")
        if self.kl_controller == "banded":
            self.kl_band.check_start(self.kl_coef)
            if self.kl_band.width >= 1:
                raise SettingsError(
                    f"kl_band.width: {self.kl_band.width} must be less than 1, otherwise no KL is below the band"
                )
        elif self.kl_band != KLBandSettings():
            raise SettingsError(
                f"kl_band: not used by kl_controller {self.kl_controller}; set banded, or remove it"
            )
        if self.trust_region_kl == "k3":
            return
        if self.trust_region_coef == 0:
            raise SettingsError(
                "trust_region_kl: has no effect if trust_region_coef is 0; remove it"
            )
        if self.epochs * self.minibatches == 1:
            raise SettingsError(
                "trust_region_kl: a single optimizer step on each rollout starts at the old policy, where KL(old || "
                "new) and its gradient are 0; set epochs or minibatches above 1, or remove it"
            )
        if self.launch.kind != "in_process":
            raise SettingsError(
                "trust_region_kl: exact swaps in the old weights for a pass, which needs a single trainer process; set "
                "k3, or leave launch.kind out"
            )

    def _check_importance(self) -> None:
        """Check that rollouts of a different policy than the updated one have suitable importance weights."""
        several = self.epochs * self.minibatches > 1
        if (
            self.algorithm == "reinforce"
            and self.loss is None
            and several
            and self.importance == "none"
        ):
            raise SettingsError(
                "importance: reinforce has no ratio, so further steps on the same rollouts need importance weights; "
                f"set {IMPORTANCE_CHOICES}, or epochs and minibatches to 1"
            )
        if self.replay is not None and self.importance == "none" and not self.anchors_sampler:
            raise SettingsError(
                f"importance: replay uses rollouts of older policies; set {IMPORTANCE_CHOICES}"
            )
        if self.importance == "vtrace":
            self._check_vtrace()

    def _check_vtrace(self) -> None:
        if self.value_function is None:
            raise SettingsError(
                f"importance: vtrace corrects a critic's targets, but {self.algorithm} has no critic here; use token, "
                "or algorithm ppo, or reinforce with `critic: {}`"
            )
        if (
            self.algorithm == "reinforce"
            and self.loss is None
            and self.epochs * self.minibatches > 1
        ):
            raise SettingsError(
                "importance: V-trace weights rollouts once, before the first step, but reinforce has no ratio for the "
                "steps after it; set epochs and minibatches to 1, or algorithm to ppo"
            )

    def _check_custom_functions(self) -> None:
        """Check that a custom loss or estimator does not make other settings void, and that options have a function."""
        clips = ("clip_eps", "clip_eps_high", "dual_clip")
        if self.loss is not None and (
            named := [name for name in clips if getattr(self, name) is not None]
        ):
            raise SettingsError(
                f"{named[0]}: not used by a custom loss; pass it to the loss with loss_options"
            )
        if self.advantages is not None and self.value_function is not None:
            raise SettingsError(
                f"advantages: replaces a comparison of rewards, but {self.algorithm} has a critic here, whose values "
                "define the advantages; remove critic, or set algorithm to grpo or reinforce"
            )
        for options, needed in (("loss_options", "loss"), ("advantage_options", "advantages")):
            if getattr(self, options) and getattr(self, needed) is None:
                raise SettingsError(
                    f"{options}: are passed to a custom function, and none is named; set {needed}"
                )

    def _resolve_nested_defaults(self, kind: ModelKind) -> dict[str, Any]:
        """Return a separate critic with its default rate, if neither its rate nor the policy's was set.

        ppo has a critic even if the settings name none.
        """
        critic = self.value_function
        if kind == "preset" or not is_unresolved(self.learning_rate):
            return {}
        if critic is None or critic.kind != "separate" or critic.learning_rate is not None:
            return {}
        rate = MODEL_DEFAULTS["CriticSettings.learning_rate"].select_value(kind)
        return {"critic": dataclasses.replace(critic, learning_rate=rate)}

    def _check_rewards(self) -> None:
        """Check that reward components named elsewhere exist, and that the length penalty fits."""
        for index, stage in enumerate(self.curriculum):
            for name in stage.rewards:
                if name not in self.rewards:
                    raise SettingsError(
                        f"curriculum.{index}.rewards.{name}: no such component in the policy's rewards; "
                        f"{suggest_name(name, self.rewards)} (list a component that only later stages use with weight "
                        "0)"
                    )
        self.reward_options.check_components(self.rewards)
        limit = self.sampling.max_completion_tokens
        if not is_unresolved(limit) and self.overlong_tokens > limit:
            raise SettingsError(
                f"overlong_buffer: {self.overlong_tokens} is more than max_completion_tokens "
                f"{self.sampling.max_completion_tokens}"
            )
