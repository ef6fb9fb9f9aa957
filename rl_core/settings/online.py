"""Settings of online learning: voting, labels, experience buffer, updates, gate, drift alarms, audit."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from rl_core.errors import SettingsError
from rl_core.settings.base import Settings, setting
from rl_core.settings.common import EnvironmentSettings, ModelSettings, SamplingSettings
from rl_core.settings.policy import KLBandSettings
from rl_core.settings.rewards import RewardSettings
from rl_core.settings.training import OptimizerSettings


@dataclass(frozen=True, kw_only=True)
class VotingSettings(Settings):
    """Voting over several sampled answers."""

    max_samples: int = setting(5, ge=1, le=1024, doc="maximum answers sampled for one request")
    min_samples: int = setting(1, ge=1, le=1024, doc="answers sampled before a vote can be decided")
    weights: Literal["equal", "logprob", "mean_logprob", "check"] = setting(
        "equal",
        doc="weight of a vote; logprob: probability of its sequence; mean_logprob: geometric mean of its tokens' "
        "probabilities; check: 1, or 0 if the environment's check refuses the answer",
    )
    ties: Literal["first", "logprob", "abstain"] = setting(
        "first",
        doc="answer on a tie; first: the one sampled first; logprob: of the most probable sequence; abstain: none",
    )
    confidence_level: float = setting(
        0.95, gt=0, lt=1, doc="coverage of the Wilson interval of the winner's share"
    )

    def check(self) -> None:
        """Check that the bounds are in order."""
        if self.min_samples > self.max_samples:
            raise SettingsError(
                f"min_samples: {self.min_samples} must be at most max_samples {self.max_samples}"
            )


@dataclass(frozen=True, kw_only=True)
class OnlineLabelSettings(Settings):
    """Labels used as the truth in the reward: consensus, feedback, the environment's judgement."""

    min_confidence: float = setting(
        0.8, gt=0, le=1, doc="minimum confidence of a consensus that becomes a pseudo-label"
    )
    min_votes: int = setting(3, ge=1, le=1024, doc="minimum number of votes for a pseudo-label")
    confidence: Literal["share", "wilson"] = setting(
        "share",
        doc="measure of confidence; share: share of the votes; wilson: lower bound of that share",
    )
    min_precision: float = setting(
        0.5,
        ge=0,
        le=1,
        doc="share of pseudo-labels that feedback confirms; while its 95% interval is below, they are only measured; "
        "0: they are always used for training",
    )
    use_consensus: bool = setting(True, doc="train on pseudo-labels; false: they are only measured")
    trust_environment: bool = setting(
        False,
        doc="without another label, use the reward that the environment gave when the episode was played",
    )


@dataclass(frozen=True, kw_only=True)
class OnlineBufferSettings(Settings):
    """The experience buffer: segments on disk, prioritised sampling, eviction."""

    capacity: int = setting(4096, ge=1, le=1_048_576, doc="maximum experiences in the buffer")
    max_bytes: int = setting(
        1_073_741_824,
        ge=4096,
        le=2**50,
        doc="maximum bytes of all segments; above it new experiences are refused and counted",
    )
    segment_bytes: int = setting(
        16_777_216, ge=1024, le=2**40, doc="size at which a segment is closed"
    )
    max_tokens: int = setting(
        65_536, ge=1, le=16_777_216, doc="maximum tokens of one experience, including prompts"
    )
    max_caller_share: float = setting(
        0.25, gt=0, le=1, doc="share of the capacity that one caller may use"
    )
    waiting_share: float = setting(
        0.25,
        ge=0,
        le=1,
        doc="share of the capacity reserved for experiences without a label, which may arrive later",
    )
    max_age_s: float = setting(
        604_800.0,
        gt=0,
        le=1e10,
        doc="experiences are evicted when they are this much older than the newest ones",
    )
    max_staleness: int = setting(
        1000,
        ge=0,
        le=2**40,
        doc="experiences are evicted when their policy is more than this many updates behind the live one",
    )
    priority_exponent: float = setting(
        0.6, ge=0, le=1, doc="alpha: 0 = uniform sampling (arXiv:1511.05952)"
    )
    priority_floor: float = setting(
        1e-3, gt=0, le=1, doc="added to every error, so that every experience can still be drawn"
    )
    beta_start: float = setting(
        0.4, ge=0, le=1, doc="exponent of the importance weights at the first update"
    )
    beta_updates: int = setting(
        1000, ge=1, le=2**40, doc="updates over which that exponent rises linearly to 1"
    )
    keep_segments: bool = setting(
        True,
        doc="keep segments whose experiences were all evicted: `posttrain online replay` needs the full record",
    )

    def check(self) -> None:
        """Check that a log whose segments are removed has room for several."""
        if not self.keep_segments and self.segment_bytes > self.max_bytes // 4:
            raise SettingsError(
                f"segment_bytes: {self.segment_bytes} must be at most a quarter of max_bytes {self.max_bytes}; "
                "otherwise the log is full before a segment of it can be removed (keep_segments: false)"
            )


@dataclass(frozen=True, kw_only=True)
class OnlineUpdateSettings(OptimizerSettings):
    """One update of the policy, and its three guardrails: KL, gradient norm, average of the weights."""

    learning_rate: float = setting(
        1e-5, gt=0, le=1, doc="learning rate at an error of `reference_error`"
    )
    min_learning_rate: float = setting(1e-6, gt=0, le=1, doc="lower bound of the learning rate")
    max_learning_rate: float = setting(5e-5, gt=0, le=1, doc="upper bound of the learning rate")
    reference_error: float = setting(
        0.5,
        gt=0,
        doc="error (root mean square of reward minus baseline) at which the learning rate is `learning_rate`",
    )
    warmup_steps: int = setting(0, ge=0, doc="updates of linear warm-up from 0")
    weight_decay: float = setting(0.0, ge=0, doc="decoupled, on matrices only")
    ema_decay: float = setting(
        0.999,
        gt=0,
        lt=1,
        doc="decay of the average of the weights, with bias correction; only the average is served",
    )
    micro_batch_tokens: int = setting(
        4096,
        ge=1,
        le=1_073_741_824,
        doc="padded tokens per forward pass, whose logits over the vocabulary are in memory",
    )
    batch_size: int = setting(8, ge=1, le=65_536, doc="experiences per update, drawn by priority")
    first_update: int = setting(
        32, ge=1, le=2**40, doc="records (answers, labels) before the first update"
    )
    update_every: int = setting(8, ge=1, le=2**40, doc="records between two updates")
    algorithm: Literal["grpo", "dr_grpo", "rloo"] = setting(
        "grpo",
        doc="how answers to one request are compared; a single answer is compared with a running mean",
    )
    baseline_decay: float = setting(
        0.95, gt=0, lt=1, doc="decay of the running mean of rewards by environment and level"
    )
    clip_eps: float = setting(
        0.2, gt=0, lt=1, doc="clip of the ratio to the sampling policy (arXiv:1707.06347)"
    )
    kl_control: Literal["adaptive", "fixed"] = setting(
        "adaptive",
        doc="adaptive: kl_coef is multiplied or divided to hold update_kl_target (kl_band); fixed: it stays as set. "
        "kl_max holds in both",
    )
    kl_coef: float = setting(
        0.01,
        ge=0,
        le=1,
        doc="coefficient of KL(old || new); adaptive: the initial one, at least 1e-4",
    )
    update_kl_target: float = setting(
        0.05, gt=0, doc="target of the mean KL after an update, nats per loss token"
    )
    kl_band: KLBandSettings = setting(
        KLBandSettings(), doc="band around update_kl_target, factors and bounds of kl_coef"
    )
    kl_lookahead: float = setting(
        4.0,
        ge=0,
        le=1000,
        doc="updates by which the KL is extrapolated, from its last change, before it is compared with the target",
    )
    kl_max: float = setting(
        0.2,
        gt=0,
        doc="hard limit of the mean KL(old || new): an update above it is refused and rolled back",
    )
    max_refused: int = setting(
        50, ge=1, doc="consecutive refused updates after which learning pauses"
    )
    snapshot_every: int = setting(
        10, ge=1, le=2**40, doc="updates between two snapshots of the average"
    )
    keep_snapshots: int = setting(
        5, ge=1, le=65_536, doc="newest snapshots kept, in addition to those in use"
    )
    checkpoint_every: int = setting(
        10, ge=1, le=2**40, doc="updates between two checkpoints of the worker"
    )

    def check(self) -> None:
        """Check that bounds are in order."""
        if not self.min_learning_rate <= self.learning_rate <= self.max_learning_rate:
            raise SettingsError(
                f"learning_rate: {self.learning_rate} must lie between min_learning_rate {self.min_learning_rate} and "
                f"max_learning_rate {self.max_learning_rate}"
            )
        if self.kl_control == "fixed":
            return
        self.kl_band.check_start(self.kl_coef)
        for name in ("increase", "decrease"):
            if getattr(self.kl_band, name) <= 1:
                raise SettingsError(
                    f"kl_band.{name}: {getattr(self.kl_band, name)} must be greater than 1"
                )
        band_end = self.update_kl_target + self.kl_band.width * self.update_kl_target
        if self.kl_max <= band_end:
            raise SettingsError(
                f"kl_max: {self.kl_max} must be above the band around update_kl_target, which ends at {band_end:g}, "
                "otherwise the coefficient is never adapted"
            )


@dataclass(frozen=True, kw_only=True)
class OnlineRolloutSettings(Settings):
    """Fresh rollouts: the policy answers drawn requests again if feedback named their right answer."""

    samples: int = setting(
        8,
        ge=0,
        le=1024,
        doc="fresh answers to such a request at each update; 0: train on the recorded answers",
    )
    sampling: SamplingSettings = setting(
        SamplingSettings(max_completion_tokens=4096),
        doc="limits of fresh answers, which also have at most twice the tokens of the longest recorded one in the "
        "buffer; their temperature is that of the recorded ones",
    )

    def check(self) -> None:
        """Check that there are several samples to compare, drawn from the distribution that is trained."""
        if self.samples == 1:
            raise SettingsError(
                "samples: a single one cannot be compared; use at least 2, or 0 for none"
            )
        self.sampling.check_trainable()


@dataclass(frozen=True, kw_only=True)
class OnlineGateSettings(Settings):
    """The sequential gate of snapshots: paired canary episodes, with error control over the life of the service."""

    margin: float = setting(
        0.02, gt=0, lt=1, doc="loss of success relative to the live model that counts as worse"
    )
    alpha: float = setting(
        0.05,
        gt=0,
        lt=1,
        doc="probability, over the life of the service, that any worse snapshot goes live",
    )
    max_episodes: int = setting(
        2000, ge=1, le=10_000_000, doc="maximum canary episodes of one snapshot"
    )
    episodes_per_look: int = setting(
        50, ge=1, le=1_000_000, doc="canary episodes between two interim tests"
    )
    levels: tuple[str, ...] = setting(
        (), doc="levels of the canary episodes, in equal shares; () = all"
    )
    sampling: SamplingSettings = setting(
        SamplingSettings(temperature=0.0),
        doc="how canary episodes are played, with the same random numbers for every model",
    )


@dataclass(frozen=True, kw_only=True)
class OnlineDriftSettings(Settings):
    """Drift alarms on the traffic."""

    watched: tuple[str, ...] = setting(
        ("confidence", "success", "length", "refusals", "kl", "champion_kl", "components"),
        doc="signals; confidence: of the vote; success: from feedback; length: of answers; "
        "refusals: turns that the environment could not parse; kl: mean KL to the sampling "
        "policy; champion_kl: KL of the answers to the starting model; components: share of "
        "pairs of a right and a wrong answer that the reward components other than `task` "
        "rank the wrong way; () = none",
    )
    reference: int = setting(
        200,
        ge=2,
        le=1_000_000,
        doc="first observations of a signal, which define its reference mean",
    )
    run_length: float = setting(
        10_000.0,
        ge=10,
        le=1e12,
        doc="minimum mean number of observations between two false alarms, over all signals",
    )
    slack: float = setting(
        0.02,
        ge=0,
        lt=1,
        doc="tolerated change of a signal's mean (signals run from 0 to 1), beyond the "
        "uncertainty of the reference: with 200 observations of mean 0.8, a fall of less "
        "than 0.14 (`online/drift/NAME_limit`)",
    )
    reference_error: float = setting(
        0.001,
        gt=0,
        lt=1,
        doc="probability that a signal's reference mean lies outside its bound, which voids the guarantee",
    )
    max_length: int = setting(
        4096, ge=1, le=16_777_216, doc="sampled tokens at which the signal length is 1"
    )
    max_kl: float = setting(1.0, gt=0, doc="nats per token at which the signal kl is 1")
    max_champion_kl: float = setting(
        10.0, gt=0, doc="nats per token at which the signal champion_kl is 1"
    )

    def check(self) -> None:
        """Check that all signals are known."""
        known = ("confidence", "success", "length", "refusals", "kl", "champion_kl", "components")
        for name in self.watched:
            if name not in known:
                raise SettingsError(f"watched: '{name}' is not a signal; known: {', '.join(known)}")


@dataclass(frozen=True, kw_only=True)
class OnlineAuditSettings(Settings):
    """Rotation of update_audit.log and update_contribution.jsonl."""

    max_bytes: int = setting(16_777_216, ge=1024, le=2**40, doc="size at which a file is rotated")
    keep: int = setting(5, ge=1, le=1000, doc="rotated files kept of each")
    queue: int = setting(
        1024,
        ge=1,
        le=1_048_576,
        doc="maximum records waiting for the disk; further ones are dropped and counted",
    )


@dataclass(frozen=True, kw_only=True)
class OnlineServiceSettings(Settings):
    """The processes of a learning server: update worker and gate."""

    record_top: int = setting(
        16,
        ge=0,
        le=1024,
        doc="most likely tokens recorded at each sampled one, for the KL if a snapshot no longer exists",
    )
    update_seconds: float = setting(
        600.0,
        gt=0,
        le=1e6,
        doc="time limit of one update or one test of the gate; a process that takes longer is restarted",
    )
    nice: int = setting(
        10,
        ge=0,
        le=19,
        doc="niceness of worker and gate relative to the server; 0 = the same priority",
    )
    standby: bool = setting(
        True,
        doc="keep a spare process with everything loaded, so that a restart is fast; uses additional memory",
    )
    run_gate: bool = setting(
        True, doc="play canary episodes; false: snapshots go live only by command"
    )
    metrics_seconds: float = setting(
        10.0, gt=0, le=1e6, doc="seconds between two entries of the service's MLflow run"
    )


@dataclass(frozen=True, kw_only=True)
class OnlineSettings(Settings):
    """Online learning: one file for the worker and for replays."""

    folder: str = setting(
        "outputs/online", doc="folder of the buffer, checkpoints, snapshots and audit"
    )
    model: ModelSettings = setting(
        ModelSettings(), doc="the model that the service started from; `path` names it"
    )
    environment: EnvironmentSettings | None = setting(
        None,
        doc="environment whose episodes are served; unset, or name `chat`: conversations; an answer is right if it "
        "equals the label",
    )
    rewards: dict[str, float] | None = setting(
        None,
        is_code=True,
        doc="reward components and their weights; unset: those of the policy stage with its reward_options, without a "
        "pipeline {task: 1.0}",
    )
    reward_options: RewardSettings = setting(RewardSettings(), doc="options of components")
    reward_model: str | None = setting(
        None, doc="folder of the reward model for the component learned"
    )
    seed: int = setting(0, ge=0, doc="seed of sampling from the buffer and of reward components")
    voting: VotingSettings = setting(VotingSettings(), doc="voting over the answers to one request")
    labels: OnlineLabelSettings = setting(OnlineLabelSettings(), doc="labels used as the truth")
    buffer: OnlineBufferSettings = setting(OnlineBufferSettings(), doc="experience buffer")
    update: OnlineUpdateSettings = setting(
        OnlineUpdateSettings(), doc="updates and their guardrails"
    )
    rollouts: OnlineRolloutSettings = setting(
        OnlineRolloutSettings(), doc="fresh answers to requests with feedback"
    )
    gate: OnlineGateSettings = setting(OnlineGateSettings(), doc="gate of snapshots")
    drift: OnlineDriftSettings = setting(OnlineDriftSettings(), doc="drift alarms")
    audit: OnlineAuditSettings = setting(OnlineAuditSettings(), doc="logs of updates")
    service: OnlineServiceSettings = setting(
        OnlineServiceSettings(), doc="worker and gate of a learning server"
    )
