"""Settings of policy and value networks for plain observations."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

from rl_core.errors import SettingsError
from rl_core.settings.base import setting
from rl_core.settings.training import LoopSettings, OptimizerSettings

MAX_BUFFER_STEPS = 2**24  # steps of one rollout buffer, all in memory


@dataclass(frozen=True, kw_only=True)
class NetworkSettings(OptimizerSettings, LoopSettings):
    """PPO (arXiv:1707.06347) of policy and value networks on a Gymnasium environment; in one process, on the CPU."""

    environment: str = setting(
        "CartPole-v1", doc="id of a Gymnasium environment; unused with environment_class"
    )
    environment_class: str | None = setting(
        None,
        is_code=True,
        doc="a custom gymnasium.Env: import path or file (package.module:Class, world.py:World)",
    )
    environment_options: dict[str, Any] = setting({}, doc="keyword arguments of the environment")
    num_environments: int = setting(8, ge=1, le=4096, doc="environments stepped in parallel")
    vectorization: Literal["sync", "async"] = setting(
        "sync",
        doc="sync: stepped one after the other; async: in one process each, for slow environments",
    )
    environment_steps: int = setting(
        100_000,
        ge=1,
        le=10**12,
        doc="maximum steps of all environments together, rounded down to whole iterations",
    )
    rollout_steps: int = setting(
        32, ge=1, le=1_048_576, doc="steps of each environment per iteration"
    )
    hidden: tuple[int, ...] = setting(
        (64, 64), ge=1, le=65_536, doc="widths of the hidden layers of both networks"
    )
    activation: Literal["tanh", "relu"] = setting("tanh", doc="activation between the layers")
    initial_log_std: float = setting(
        0.0, ge=-20, le=2, doc="continuous actions: initial log of the standard deviation"
    )
    learning_rate: float = setting(1e-3, gt=0, le=1, doc="peak learning rate")
    warmup_steps: int = setting(0, ge=0, doc="optimizer steps of linear warm-up from 0")
    min_lr_ratio: float = setting(0.0, ge=0, le=1, doc="final learning rate as a share of the peak")
    weight_decay: float = setting(0.0, ge=0, doc="decoupled, on matrices only")
    betas: tuple[float, float] = setting((0.9, 0.999), ge=0, lt=1, doc="AdamW moments")
    eps: float = setting(1e-5, ge=1e-30, doc="AdamW epsilon (arXiv:2005.12729)")
    max_grad_norm: float = setting(0.5, gt=0, doc="clip by global norm")
    micro_batch_tokens: int = setting(
        16384,
        ge=1,
        le=1_073_741_824,
        doc="observations per forward pass; larger batches accumulate gradients",
    )
    epochs: int = setting(20, ge=1, le=10_000, doc="passes over each iteration's steps")
    minibatches: int = setting(1, ge=1, le=1_048_576, doc="optimizer steps per pass")
    gamma: float = setting(0.98, ge=0, le=1, doc="discount per step")
    gae_lambda: float = setting(
        0.8, ge=0, le=1, doc="lambda of GAE (arXiv:1506.02438), and of V-trace"
    )
    clip_eps: float = setting(0.2, gt=0, lt=1, doc="clip of the probability ratio")
    clip_schedule: Literal["constant", "linear"] = setting(
        "constant",
        doc="clip range over the run; linear: from clip_eps towards min_clip_ratio * clip_eps, iteration by iteration",
    )
    min_clip_ratio: float = setting(
        0.0, ge=0, le=1, doc="final clip range as a share of clip_eps, for clip_schedule: linear"
    )
    value_coef: float = setting(
        1.0,
        gt=0,
        doc="weight of the value loss, half the squared error (1 here is `vf_coef` 0.5 of stable-baselines3)",
    )
    value_clip_eps: float | None = setting(
        None, gt=0, doc="value clipping around the old values; default: none"
    )
    entropy_coef: float = setting(0.0, ge=0, doc="weight of the entropy bonus")
    normalise_observations: bool = setting(
        False, doc="normalise by running mean and variance, which are saved with the network"
    )
    normalise_advantages: Literal["none", "minibatch", "iteration"] = setting(
        "minibatch",
        doc="mean 0, variance 1 over the rows of an optimizer step, or over those of an iteration",
    )
    reward_scale: float = setting(
        1.0, gt=0, doc="factor of the rewards for learning; reported rewards are not scaled"
    )
    normalise_rewards: bool = setting(
        False,
        doc="divide rewards by the running deviation of their discounted sum, clipped to +-10, for learning; reported "
        "rewards stay as they are",
    )
    noise_correlation: float = setting(
        0.0,
        ge=0,
        lt=1,
        doc="continuous actions: correlation of a step's exploration noise with that of the step before; 0: "
        "independent draws",
    )
    desired_kl: float | None = setting(
        None,
        gt=0,
        doc="adapt the learning rate to KL(old || new) per iteration: divided by learning_rate_factor above "
        "twice this KL, multiplied below half of it (arXiv:2109.11978); default: off",
    )
    learning_rate_factor: float = setting(1.5, gt=1, le=10, doc="factor of that adaptation")
    learning_rate_low: float = setting(
        1e-5, gt=0, le=1, doc="lower limit of the adapted learning rate"
    )
    learning_rate_high: float = setting(
        1e-2, gt=0, le=1, doc="upper limit of the adapted learning rate"
    )
    advantages: Literal["gae", "vtrace"] = setting(
        "gae",
        doc="vtrace (arXiv:1802.01561): corrects for steps of older policies, as used by `replay`",
    )
    vtrace_rho: float = setting(1.0, gt=0, doc="V-trace: truncation of the importance weights")
    vtrace_c: float = setting(
        1.0, gt=0, le=1, doc="V-trace: truncation of the traces, at most vtrace_rho"
    )
    replay: int = setting(
        0, ge=0, le=1000, doc="earlier iterations whose steps are trained on again; needs vtrace"
    )
    eval_episodes: int = setting(
        100, ge=1, le=1_000_000, doc="episodes per validation, and of the test at the end"
    )
    eval_greedy: bool = setting(
        True, doc="play them with the most likely action; false: with sampled actions"
    )

    @property
    def steps_per_iteration(self) -> int:
        """Steps of all environments in one iteration."""
        return self.num_environments * self.rollout_steps

    @property
    def iterations(self) -> int:
        """Whole iterations within `environment_steps`."""
        return self.environment_steps // self.steps_per_iteration

    @property
    def updates_per_iteration(self) -> int:
        """Optimizer steps of one iteration."""
        return self.epochs * self.minibatches

    def check(self) -> None:
        """Refuse combinations that cannot learn or would be partly ignored."""
        if ":" in self.environment:
            raise SettingsError(
                f"environment: {self.environment!r} names code; use environment_class for an import path"
            )
        if self.steps_per_iteration > MAX_BUFFER_STEPS:
            raise SettingsError(
                f"rollout_steps: {self.num_environments:,} environments x {self.rollout_steps:,} are "
                f"{self.steps_per_iteration:,} steps in one iteration, more than {MAX_BUFFER_STEPS:,}; lower "
                "either"
            )
        if self.environment_steps < self.steps_per_iteration:
            raise SettingsError(
                f"environment_steps: {self.environment_steps} is less than one iteration, {self.num_environments} "
                f"environments x {self.rollout_steps} steps; raise it, or lower rollout_steps"
            )
        if self.minibatches > self.steps_per_iteration:
            raise SettingsError(
                f"minibatches: {self.minibatches} is more than the steps of one iteration"
            )
        if (
            self.normalise_advantages == "minibatch"
            and self.steps_per_iteration // self.minibatches < 2
        ):
            raise SettingsError(
                "normalise_advantages: a minibatch of one step has no variance; lower minibatches, or use iteration"
            )
        if self.steps_per_iteration < 2 and self.normalise_advantages == "iteration":
            raise SettingsError(
                "normalise_advantages: a single step has no variance; raise rollout_steps, or use none"
            )
        for name, other in (
            ("autocast", "none"),
            ("activation_checkpointing", False),
            ("dropout", False),
        ):
            if getattr(self, name) != other:
                raise SettingsError(
                    f"{name}: applies only to language models; leave it {str(other).lower()} for these networks"
                )
        if self.launch.kind != "in_process":
            raise SettingsError(
                "launch.kind: these networks train in one process; leave it in_process"
            )
        self._check_learning_rate()
        if self.min_clip_ratio and self.clip_schedule == "constant":
            raise SettingsError(
                "min_clip_ratio: ends a falling clip range; set clip_schedule to linear"
            )
        if self.replay and self.advantages != "vtrace":
            raise SettingsError(
                "replay: steps of older policies need a correction; set advantages to vtrace"
            )
        if self.vtrace_c > self.vtrace_rho:
            raise SettingsError(
                f"vtrace_c: {self.vtrace_c} is above vtrace_rho {self.vtrace_rho}; lower it"
            )

    def _check_learning_rate(self) -> None:
        if self.desired_kl is None:
            return
        if self.schedule != "constant" or self.warmup_steps:
            raise SettingsError(
                "desired_kl: adapts the learning rate; leave schedule constant and warmup_steps 0"
            )
        if self.updates_per_iteration == 1:
            raise SettingsError(
                "desired_kl: the KL is measured before each optimizer step, so it is 0 with a single one; raise epochs"
            )
        if not self.learning_rate_low <= self.learning_rate <= self.learning_rate_high:
            raise SettingsError(
                f"learning_rate: {self.learning_rate} must lie between learning_rate_low {self.learning_rate_low} and "
                f"learning_rate_high {self.learning_rate_high}"
            )
