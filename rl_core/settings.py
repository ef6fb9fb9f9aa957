"""Typed settings: one frozen dataclass per algorithm and part.

Every default is the field's, with its source beside it where it is not common knowledge. Ranges are declared once, in
`setting(...)`; they are checked here on construction and read by the configuration loader for its messages and forms.
"""

from __future__ import annotations

import dataclasses
import math
from dataclasses import dataclass
from typing import Any, Literal

from rl_core.errors import SettingsError

__all__ = [
    "GROUP_ALGORITHMS",
    "Algorithm",
    "AnalysisSettings",
    "CriticSettings",
    "CurriculumStage",
    "DataSettings",
    "EnvironmentSettings",
    "EvaluationSettings",
    "ExitCondition",
    "LoopSettings",
    "LoraSettings",
    "ModelSettings",
    "OptimizerSettings",
    "PolicySettings",
    "PreferenceSettings",
    "ReplaySettings",
    "RewardModelSettings",
    "SFTSettings",
    "SamplingSettings",
    "Settings",
    "ThoughtsSettings",
    "setting",
]


def setting(
    default: Any = dataclasses.MISSING,
    *,
    doc: str,
    gt: float | None = None,
    ge: float | None = None,
    lt: float | None = None,
    le: float | None = None,
) -> Any:
    """A dataclass field with its meaning and its range."""
    limits = {"gt": gt, "ge": ge, "lt": lt, "le": le}
    metadata = {"doc": doc, **{name: limit for name, limit in limits.items() if limit is not None}}
    if isinstance(default, dict):
        return dataclasses.field(default_factory=lambda: dict(default), metadata=metadata, kw_only=True)
    return dataclasses.field(default=default, metadata=metadata, kw_only=True)


_CHECKS = {
    "gt": (lambda value, limit: value > limit, "greater than"),
    "ge": (lambda value, limit: value >= limit, "at least"),
    "lt": (lambda value, limit: value < limit, "less than"),
    "le": (lambda value, limit: value <= limit, "at most"),
}


@dataclass(frozen=True, kw_only=True)
class Settings:
    """Base of every settings class: checks each field's declared range."""

    def __post_init__(self) -> None:
        for field in dataclasses.fields(self):
            value = getattr(self, field.name)
            for number in value if isinstance(value, tuple) else (value,):
                if isinstance(number, bool) or not isinstance(number, int | float):
                    continue
                if not math.isfinite(number):
                    raise SettingsError(f"{field.name}: {number} is not a finite number")
                for name, limit in field.metadata.items():
                    if name in _CHECKS and not _CHECKS[name][0](number, limit):
                        raise SettingsError(f"{field.name}: {number} must be {_CHECKS[name][1]} {limit}")
        self.check()

    def check(self) -> None:
        """Raise SettingsError for combinations of settings that cannot work; overridden where there are any."""


@dataclass(frozen=True, kw_only=True)
class LoraSettings(Settings):
    """Low-rank adapters (arXiv:2106.09685), through peft."""

    rank: int = setting(16, ge=1, doc="rank of the update matrices")
    alpha: float = setting(32.0, gt=0, doc="scale; the update is alpha / rank * B A")
    dropout: float = setting(0.0, ge=0, lt=1, doc="dropout on the adapter's input")
    target_modules: tuple[str, ...] = setting(
        ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"),
        doc="names of the linear layers that get an adapter",
    )


@dataclass(frozen=True, kw_only=True)
class ModelSettings(Settings):
    """Where the starting policy comes from: a path, a hub name, a registered model, or a preset made from scratch."""

    path: str | None = setting(
        None, doc="model folder, hub name, or models:/NAME@ALIAS; leave out to start from a preset"
    )
    preset: Literal["nano", "tiny", "small"] = setting("tiny", doc="size of a from-scratch model; used without a path")
    vocab_size: int = setting(512, ge=300, doc="size of the byte-level BPE vocabulary trained for a preset")
    context: int = setting(256, ge=16, doc="longest sequence (tokens) of a preset")
    dtype: Literal["float32", "bfloat16", "float16"] = setting("float32", doc="type of the weights in memory")
    device: Literal["auto", "cpu", "cuda"] = setting("auto", doc="auto: a GPU where there is one")
    lora: LoraSettings | None = setting(None, doc="train adapters instead of all weights")
    trust_remote_code: bool = setting(False, doc="run Python code that comes with a hub model")


@dataclass(frozen=True, kw_only=True)
class EnvironmentSettings(Settings):
    """Which environment the policy acts in."""

    name: str = setting("pixel_grid", doc="a shipped environment's name, or an import path 'package.module:Class'")
    options: dict[str, Any] = setting({}, doc="keyword arguments of the environment's class")


@dataclass(frozen=True, kw_only=True)
class SamplingSettings(Settings):
    """How completions are drawn."""

    temperature: float = setting(1.0, ge=0, le=5, doc="0 = greedy")
    max_completion_tokens: int = setting(64, ge=1, doc="tokens after the prompt, observations included")
    max_turns: int = setting(6, ge=1, doc="actions of one episode")
    slots: int = setting(128, ge=1, doc="episodes decoded at once")


@dataclass(frozen=True, kw_only=True)
class DataSettings(Settings):
    """What the data stage reads or makes, checks and splits."""

    demonstrations: str | None = setting(
        None, doc="JSONL/Parquet of {messages} or {prompt, completion}; left out: the environment's demonstrator"
    )
    num_demonstrations: int = setting(4000, ge=1, doc="how many the demonstrator writes")
    preferences: str | None = setting(None, doc="JSONL/Parquet of {prompt, chosen, rejected}")
    levels: tuple[str, ...] = setting(
        (), doc="levels that the demonstrator shows in turn; twice = twice as often; () = all"
    )
    heldout_fraction: float = setting(0.1, gt=0, lt=1, doc="share of prompts kept out of training")
    max_rows: int | None = setting(None, ge=1, doc="read at most this many rows of each file")
    on_bad_row: Literal["stop", "skip"] = setting(
        "stop", doc="stop: refuse the file; skip: leave bad rows out, counted"
    )


@dataclass(frozen=True, kw_only=True)
class OptimizerSettings(Settings):
    """The optimizer, its schedule, and in which precision and memory the model computes."""

    optimizer: Literal["adamw", "muon"] = setting(
        "adamw", doc="muon: for hidden matrices (arXiv:2502.16982) and adapters; AdamW for embeddings, heads, vectors"
    )
    learning_rate: float = setting(1e-3, gt=0, le=1, doc="peak learning rate")
    schedule: Literal["constant", "cosine", "linear"] = setting("constant", doc="shape after the warm-up")
    warmup_steps: int = setting(10, ge=0, doc="optimizer steps of linear warm-up from 0")
    min_lr_ratio: float = setting(0.1, ge=0, le=1, doc="floor of the schedule, as a share of the peak")
    weight_decay: float = setting(0.01, ge=0, doc="decoupled, on matrices only (arXiv:1711.05101)")
    betas: tuple[float, float] = setting((0.9, 0.95), ge=0, lt=1, doc="AdamW moments")
    eps: float = setting(1e-8, gt=0, doc="AdamW epsilon")
    muon_momentum: float = setting(0.95, ge=0, lt=1, doc="Muon's momentum (Nesterov)")
    max_grad_norm: float = setting(1.0, gt=0, doc="clip by global norm")
    grokfast_lambda: float = setting(
        0.0, ge=0, doc="weight of the average gradient that is added to each gradient; 0 = off, arXiv:2405.20233 uses 2"
    )
    grokfast_alpha: float = setting(0.98, ge=0, lt=1, doc="decay of that average (arXiv:2405.20233)")
    ema_decay: float | None = setting(
        None, gt=0, lt=1, doc="evaluate and keep a moving average of the weights, of about 1 / (1 - ema_decay) steps"
    )
    micro_batch_tokens: int = setting(16384, ge=1, doc="padded tokens of one forward pass; larger batches accumulate")
    autocast: Literal["none", "bfloat16"] = setting(
        "none", doc="bfloat16: the model computes in it (faster, less memory); weights and losses stay as they are"
    )
    activation_checkpointing: bool = setting(
        False, doc="compute activations again in backward: less memory, about a third slower"
    )


@dataclass(frozen=True, kw_only=True)
class LoopSettings(Settings):
    """The training loop: evaluation, checkpoints, early stopping, guards."""

    eval_every: int = setting(0, ge=0, doc="iterations between evaluations; 0 = only at the end")
    checkpoint_every: int = setting(50, ge=0, doc="iterations between checkpoints; 0 = only when stopped")
    keep_checkpoints: int = setting(2, ge=2, doc="newest checkpoints kept")
    patience: int | None = setting(None, ge=1, doc="evaluations without improvement before stopping; none = never stop")
    min_improvement: float = setting(0.0, ge=0, doc="what counts as an improvement")
    max_nonfinite: int = setting(5, ge=1, doc="non-finite steps in a row that stop the run")


@dataclass(frozen=True, kw_only=True)
class SFTSettings(OptimizerSettings, LoopSettings):
    """Supervised fine-tuning on completions."""

    epochs: float = setting(3.0, gt=0, doc="passes over the demonstrations")
    max_steps: int | None = setting(None, ge=1, doc="optimizer steps at most")
    batch_size: int = setting(64, ge=1, doc="demonstrations of one optimizer step")
    # On a CPU no faster than length-sorted micro-batches (tests/benchmarks/RESULTS.md), hence off.
    packing: bool = setting(
        False, doc="several demonstrations in one row, each attending to itself alone; saves padding of unequal lengths"
    )


@dataclass(frozen=True, kw_only=True)
class RewardModelSettings(OptimizerSettings, LoopSettings):
    """Bradley-Terry reward model on preference pairs."""

    epochs: float = setting(3.0, gt=0, doc="passes over the pairs")
    max_steps: int | None = setting(None, ge=1, doc="optimizer steps at most")
    batch_size: int = setting(64, ge=1, doc="pairs of one optimizer step")
    center_coef: float = setting(0.01, ge=0, doc="weight of mean((r_chosen + r_rejected)^2) (arXiv:2312.09244)")
    num_pairs: int = setting(2000, ge=10, doc="pairs made from scored rollouts, when no preference file is given")
    group_size: int = setting(8, ge=2, doc="rollouts of one prompt from which pairs are made")
    sampling: SamplingSettings = setting(SamplingSettings(), doc="how those rollouts are drawn")


@dataclass(frozen=True, kw_only=True)
class PreferenceSettings(OptimizerSettings, LoopSettings):
    """Direct preference optimisation on pairs; the reference is the stage's starting model."""

    # As in the policy stage: both move a model that SFT has made, and presets of 0.04M to 3M parameters take about a
    # tenth of SFT's rate. Pretrained models need far less: 5e-7 at 7B (arXiv:2310.16944), about 5e-6 below 1B.
    learning_rate: float = setting(3e-4, gt=0, le=1, doc="peak learning rate; 5e-6 to 5e-7 for pretrained models")
    weight_decay: float = setting(0.0, ge=0, doc="decoupled, on matrices only")
    loss: Literal["dpo", "ipo"] = setting("dpo", doc="dpo (arXiv:2305.18290), or ipo (arXiv:2310.12036)")
    beta: float = setting(0.1, gt=0, doc="how much leaving the reference costs (arXiv:2305.18290)")
    label_smoothing: float = setting(
        0.0, ge=0, lt=0.5, doc="share of pairs taken to be the wrong way round; above 0 is conservative DPO"
    )
    sft_coef: float = setting(
        0.0, ge=0, doc="weight of the chosen completions' cross-entropy per token (RPO, arXiv:2404.19733)"
    )
    epochs: float = setting(1.0, gt=0, doc="passes over the pairs; more than a few only fit the pairs themselves")
    max_steps: int | None = setting(None, ge=1, doc="optimizer steps at most")
    batch_size: int = setting(64, ge=1, doc="pairs of one optimizer step")
    num_pairs: int = setting(2000, ge=10, doc="pairs made from scored rollouts, when no preference file is given")
    group_size: int = setting(8, ge=2, doc="rollouts of one prompt from which pairs are made")
    sampling: SamplingSettings = setting(SamplingSettings(), doc="how those rollouts are drawn")

    def check(self) -> None:
        """Smoothing belongs to the sigmoid loss."""
        if self.loss == "ipo" and self.label_smoothing > 0:
            raise SettingsError(
                f"label_smoothing: {self.label_smoothing} has no place in ipo, which bounds the margin itself; "
                "use loss dpo, or remove it"
            )


@dataclass(frozen=True, kw_only=True)
class ExitCondition(Settings):
    """One test on a moving average; it can only hold when its window is full."""

    metric: str = setting("success_rate", doc="name of a metric of the policy stage")
    window: int = setting(10, ge=1, doc="iterations averaged")
    comparison: Literal[">=", ">", "<=", "<"] = setting(">=", doc="average on the left, threshold on the right")
    threshold: float = setting(0.8, doc="what the average is compared with")


@dataclass(frozen=True, kw_only=True)
class CurriculumStage(Settings):
    """One stage of the curriculum."""

    name: str = setting(doc="shown in logs and metrics")
    levels: dict[str, float] = setting(doc="environment levels and their weights in the mix")
    exit_conditions: tuple[ExitCondition, ...] = setting((), doc="() = stay until the iterations end")
    require: Literal["all", "any"] = setting("all", doc="how many exit conditions must hold")
    min_iterations: int = setting(1, ge=1, doc="stay at least this long")
    max_iterations: int | None = setting(None, ge=1, doc="leave after this many, whatever the metrics say")

    def check(self) -> None:
        """Levels need positive weights; limits must not cross."""
        if not self.levels or any(weight <= 0 for weight in self.levels.values()):
            raise SettingsError(f"levels: {self.levels} must name at least one level, each with a weight above 0")
        if self.max_iterations is not None and self.max_iterations < self.min_iterations:
            raise SettingsError(f"max_iterations: {self.max_iterations} is below min_iterations {self.min_iterations}")


@dataclass(frozen=True, kw_only=True)
class CriticSettings(Settings):
    """The value function of PPO, and of REINFORCE with a learned baseline."""

    kind: Literal["separate", "shared"] = setting(
        "separate", doc="separate: a copy of the starting model; shared: a head on the policy's own hidden states"
    )
    learning_rate: float | None = setting(None, gt=0, le=1, doc="of a separate critic; left out: the policy's")
    value_coef: float = setting(0.5, gt=0, doc="weight of a shared head's loss in the policy's (arXiv:1707.06347)")
    value_clip_eps: float | None = setting(None, gt=0, doc="clip of the value around its old one; left out: none")
    warmup_iterations: int = setting(0, ge=0, doc="iterations at the start in which the critic alone learns")

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

    learning_rate: float = setting(3e-4, gt=0, le=1, doc="peak learning rate")
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
    sampling: SamplingSettings = setting(SamplingSettings(), doc="how rollouts are drawn")
    curriculum: tuple[CurriculumStage, ...] = setting((), doc="() = all levels at once, equally")
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
    def whitens(self) -> bool:
        """Whether advantages are whitened over the iteration."""
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

    def check(self) -> None:
        """Combinations that cannot learn, or of which one part would be ignored."""
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
        if self.overlong_tokens > self.sampling.max_completion_tokens:
            raise SettingsError(
                f"overlong_buffer: {self.overlong_tokens} is more than max_completion_tokens "
                f"{self.sampling.max_completion_tokens}"
            )


@dataclass(frozen=True, kw_only=True)
class ThoughtsSettings(OptimizerSettings, LoopSettings):
    """Thoughts before answers, learned by REINFORCE from what they add (in the manner of arXiv:2403.09629)."""

    learning_rate: float = setting(3e-4, gt=0, le=1, doc="peak learning rate")
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
    max_thought_tokens: int = setting(64, ge=1, doc="a longer thought counts as a turn without an answer")
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
        """The entropy weight falls towards its floor."""
        if self.entropy_floor > self.entropy_coef:
            raise SettingsError(f"entropy_floor: {self.entropy_floor} is above entropy_coef {self.entropy_coef}")


@dataclass(frozen=True, kw_only=True)
class EvaluationSettings(Settings):
    """Held-out evaluation."""

    episodes: int = setting(500, ge=2, doc="held-out episodes, the same for every model")
    levels: tuple[str, ...] = setting((), doc="levels in equal shares; () = all")
    samples: int = setting(1, ge=1, doc="rollouts of each episode; above 1 gives pass@k")
    greedy: bool = setting(True, doc="also report greedy decoding")
    sampling: SamplingSettings = setting(SamplingSettings(), doc="how episodes are played")


@dataclass(frozen=True, kw_only=True)
class AnalysisSettings(Settings):
    """Trajectory analysis."""

    bootstrap_samples: int = setting(2000, ge=100, doc="resamples of each interval")
    side_by_side: int = setting(5, ge=0, doc="episodes shown under each model in the report")
