"""Settings of online learning: voting, labels, experience buffer, updates, gate, drift alarms, audit."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from rl_core.errors import SettingsError
from rl_core.settings.base import Settings, setting
from rl_core.settings.common import EnvironmentSettings, ModelSettings, SamplingSettings
from rl_core.settings.rewards import RewardSettings
from rl_core.settings.training import OptimizerSettings


@dataclass(frozen=True, kw_only=True)
class VotingSettings(Settings):
    """Voting over several sampled answers."""

    max_samples: int = setting(5, ge=1, le=1024, doc="answers sampled for one request, at most")
    min_samples: int = setting(1, ge=1, le=1024, doc="answers sampled before a vote may be settled")
    weights: Literal["equal", "logprob", "mean_logprob", "check"] = setting(
        "equal",
        doc="weight of a vote; logprob: probability of its whole sequence; mean_logprob: geometric mean of its tokens' "
        "probabilities; check: 1, or 0 where the environment's own check refuses the answer",
    )
    ties: Literal["first", "logprob", "abstain"] = setting(
        "first",
        doc="answer of a tie; first: the one sampled first; logprob: of the most probable sequence; abstain: none",
    )
    confidence_level: float = setting(
        0.95, gt=0, lt=1, doc="coverage of the Wilson interval of the winner's share"
    )

    def check(self) -> None:
        """The bounds must be in order."""
        if self.min_samples > self.max_samples:
            raise SettingsError(
                f"min_samples: {self.min_samples} must be at most max_samples {self.max_samples}"
            )


@dataclass(frozen=True, kw_only=True)
class OnlineLabelSettings(Settings):
    """Labels that stand for the truth in the reward: consensus, feedback, the environment's own judgement."""

    min_confidence: float = setting(
        0.8, gt=0, le=1, doc="least confidence of a consensus that becomes a pseudo-label"
    )
    min_votes: int = setting(3, ge=1, le=1024, doc="least number of votes behind a pseudo-label")
    confidence: Literal["share", "wilson"] = setting(
        "share",
        doc="confidence that is compared; share: of the votes; wilson: lower bound of that share",
    )
    min_precision: float = setting(
        0.5,
        ge=0,
        le=1,
        doc="share of pseudo-labels that feedback confirms; while its 95% interval lies below, they are measured "
        "alone; 0: they are always learned from",
    )
    use_consensus: bool = setting(
        True, doc="learn from pseudo-labels; false: they are measured alone"
    )
    trust_environment: bool = setting(
        False,
        doc="without another label, the reward that the environment gave when the episode was played counts",
    )


@dataclass(frozen=True, kw_only=True)
class OnlineBufferSettings(Settings):
    """The experience buffer: segments on the disk, prioritised sampling, eviction."""

    capacity: int = setting(4096, ge=1, le=1_048_576, doc="experiences in the buffer, at most")
    max_bytes: int = setting(
        1_073_741_824,
        ge=4096,
        le=2**50,
        doc="bytes of all segments; beyond it new experiences are refused and counted",
    )
    segment_bytes: int = setting(
        16_777_216, ge=1024, le=2**40, doc="size at which a segment is closed"
    )
    max_tokens: int = setting(
        65_536, ge=1, le=16_777_216, doc="tokens of one experience, prompts included, at most"
    )
    max_caller_share: float = setting(
        0.25, gt=0, le=1, doc="share of the capacity that one caller may hold"
    )
    waiting_share: float = setting(
        0.25,
        ge=0,
        le=1,
        doc="share of the room that is left to experiences without a label, which may come later",
    )
    max_age_s: float = setting(
        604_800.0,
        gt=0,
        le=1e10,
        doc="experiences older than this against the newest ones are evicted",
    )
    max_staleness: int = setting(
        1000,
        ge=0,
        le=2**40,
        doc="updates between an experience's policy and the live one, beyond which it is evicted",
    )
    priority_exponent: float = setting(
        0.6, ge=0, le=1, doc="alpha: 0 = uniform sampling (arXiv:1511.05952)"
    )
    priority_floor: float = setting(
        1e-3, gt=0, le=1, doc="added to every error, so that nothing is never drawn again"
    )
    beta_start: float = setting(
        0.4, ge=0, le=1, doc="exponent of the importance weights at the first update"
    )
    beta_updates: int = setting(
        1000, ge=1, le=2**40, doc="updates over which that exponent rises to 1, linearly"
    )
    keep_segments: bool = setting(
        True,
        doc="keep segments whose experiences were all evicted: `posttrain online replay` needs the whole record",
    )

    def check(self) -> None:
        """A log whose segments are removed must hold several."""
        if not self.keep_segments and self.segment_bytes > self.max_bytes // 4:
            raise SettingsError(
                f"segment_bytes: {self.segment_bytes} must be at most a quarter of max_bytes {self.max_bytes}, or the "
                "log is full before a segment of it can be removed (keep_segments: false)"
            )


@dataclass(frozen=True, kw_only=True)
class OnlineUpdateSettings(OptimizerSettings):
    """One update of the policy, and its three guardrails: KL, gradient norm, average of the weights."""

    learning_rate: float = setting(
        1e-5, gt=0, le=1, doc="learning rate at an error of `reference_error`"
    )
    min_learning_rate: float = setting(1e-6, gt=0, le=1, doc="least learning rate of an update")
    max_learning_rate: float = setting(5e-5, gt=0, le=1, doc="largest learning rate of an update")
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
        doc="decay of the average of the weights, its start corrected; it alone is served",
    )
    micro_batch_tokens: int = setting(
        4096,
        ge=1,
        le=1_073_741_824,
        doc="padded tokens per forward pass; its logits are held over the vocabulary",
    )
    batch_size: int = setting(
        8, ge=1, le=65_536, doc="experiences of one update, drawn by priority"
    )
    first_update: int = setting(
        32, ge=1, le=2**40, doc="records (answers, labels) before the first update"
    )
    update_every: int = setting(8, ge=1, le=2**40, doc="records between two updates")
    algorithm: Literal["grpo", "dr_grpo", "rloo"] = setting(
        "grpo",
        doc="comparison of the answers to one request; a single answer is compared with a running mean",
    )
    baseline_decay: float = setting(
        0.95, gt=0, lt=1, doc="decay of the running mean of rewards by environment and level"
    )
    clip_eps: float = setting(
        0.2, gt=0, lt=1, doc="clip of the ratio to the policy that sampled (arXiv:1707.06347)"
    )
    kl_coef: float = setting(0.01, ge=1e-4, le=1, doc="initial coefficient of KL(old || new)")
    kl_target: float = setting(
        0.05, gt=0, doc="target of the mean KL after an update, nats per loss token"
    )
    kl_tolerance: float = setting(0.01, ge=0, doc="half-width of the band around the target")
    kl_factor: float = setting(
        1.2, gt=1, doc="factor by which the coefficient moves outside the band"
    )
    kl_lookahead: float = setting(
        4.0,
        ge=0,
        le=1000,
        doc="updates by which the KL is extrapolated, at its last change, before it is compared",
    )
    kl_coef_min: float = setting(1e-4, gt=0, doc="least coefficient")
    kl_coef_max: float = setting(1.0, gt=0, doc="largest coefficient")
    kl_limit: float = setting(
        0.2, gt=0, doc="mean KL beyond which an update is refused and taken back"
    )
    max_refused: int = setting(50, ge=1, doc="refused updates in a row after which learning pauses")
    snapshot_every: int = setting(
        10, ge=1, le=2**40, doc="updates between two snapshots of the average"
    )
    keep_snapshots: int = setting(
        5, ge=1, le=65_536, doc="newest snapshots kept, beside those still referred to"
    )
    checkpoint_every: int = setting(
        10, ge=1, le=2**40, doc="updates between two checkpoints of the worker"
    )

    def check(self) -> None:
        """Bounds must be in order."""
        if not self.min_learning_rate <= self.learning_rate <= self.max_learning_rate:
            raise SettingsError(
                f"learning_rate: {self.learning_rate} must lie between min_learning_rate {self.min_learning_rate} and "
                f"max_learning_rate {self.max_learning_rate}"
            )
        if not self.kl_coef_min <= self.kl_coef <= self.kl_coef_max:
            raise SettingsError(
                f"kl_coef: {self.kl_coef} must lie between kl_coef_min {self.kl_coef_min} and "
                f"kl_coef_max {self.kl_coef_max}"
            )
        if self.kl_limit <= self.kl_target + self.kl_tolerance:
            raise SettingsError(
                f"kl_limit: {self.kl_limit} must be above kl_target + kl_tolerance, "
                f"{self.kl_target + self.kl_tolerance:g}, or the coefficient is never steered"
            )


@dataclass(frozen=True, kw_only=True)
class OnlineRolloutSettings(Settings):
    """Fresh rollouts: drawn requests whose right answer feedback named are answered anew by the policy that learns."""

    samples: int = setting(
        8,
        ge=0,
        le=1024,
        doc="fresh answers of such a request at each update; 0: the recorded answers are learned from",
    )
    sampling: SamplingSettings = setting(
        SamplingSettings(max_completion_tokens=4096),
        doc="limits of fresh answers, which take at most twice the tokens of the longest recorded one in the buffer as "
        "well; their temperature is that of the recorded ones",
    )

    def check(self) -> None:
        """One sample cannot be compared, and what is drawn is what is learned from."""
        if self.samples == 1:
            raise SettingsError(
                "samples: 1 cannot be compared with another; at least 2, or 0 for none"
            )
        self.sampling.check_trainable()


@dataclass(frozen=True, kw_only=True)
class OnlineGateSettings(Settings):
    """The sequential gate of snapshots: paired canary episodes, error controlled over the life of the service."""

    margin: float = setting(
        0.02, gt=0, lt=1, doc="loss of success against the live model that counts as worse"
    )
    alpha: float = setting(
        0.05,
        gt=0,
        lt=1,
        doc="chance, over the whole life of the service, that any worse snapshot goes live",
    )
    max_episodes: int = setting(
        2000, ge=1, le=10_000_000, doc="canary episodes of one snapshot, at most"
    )
    episodes_per_look: int = setting(
        50, ge=1, le=1_000_000, doc="canary episodes between two looks"
    )
    levels: tuple[str, ...] = setting(
        (), doc="levels of the canary episodes, in equal shares; () = all"
    )
    sampling: SamplingSettings = setting(
        SamplingSettings(temperature=0.0),
        doc="how canary episodes are played; the same random numbers for every model",
    )


@dataclass(frozen=True, kw_only=True)
class OnlineDriftSettings(Settings):
    """Alarms on the traffic."""

    watched: tuple[str, ...] = setting(
        ("confidence", "success", "length", "refusals", "kl", "champion_kl", "components"),
        doc="signals; confidence: of the vote; success: by feedback; length: of answers; refusals: turns that the "
        "environment could not read; kl: mean KL to the policy that sampled; champion_kl: of the answers, to the model "
        "that the service began with; components: share of pairs of a right and a wrong answer of which the reward "
        "components other than `task` rank the wrong one higher; () = none",
    )
    reference: int = setting(
        200, ge=2, le=1_000_000, doc="first observations of a signal, which set its usual mean"
    )
    run_length: float = setting(
        10_000.0,
        ge=10,
        le=1e12,
        doc="observations between two false alarms, on average at least, all signals together",
    )
    slack: float = setting(
        0.02,
        ge=0,
        lt=1,
        doc="change of a signal's mean (signals run from 0 to 1) that is tolerated",
    )
    reference_error: float = setting(
        0.001,
        gt=0,
        lt=1,
        doc="chance that the usual mean of a signal lies beyond its bound, so that nothing is promised",
    )
    max_length: int = setting(
        4096, ge=1, le=16_777_216, doc="sampled tokens at which the signal length is 1"
    )
    max_kl: float = setting(1.0, gt=0, doc="nats per token at which the signal kl is 1")
    max_champion_kl: float = setting(
        10.0, gt=0, doc="nats per token at which the signal champion_kl is 1"
    )

    def check(self) -> None:
        """Signals are known ones."""
        known = ("confidence", "success", "length", "refusals", "kl", "champion_kl", "components")
        for name in self.watched:
            if name not in known:
                raise SettingsError(f"watched: '{name}' is no signal; known: {', '.join(known)}")


@dataclass(frozen=True, kw_only=True)
class OnlineAuditSettings(Settings):
    """update_audit.log and update_contribution.jsonl."""

    max_bytes: int = setting(16_777_216, ge=1024, le=2**40, doc="size at which a file is rotated")
    keep: int = setting(5, ge=1, le=1000, doc="rotated files kept of each")
    queue: int = setting(
        1024,
        ge=1,
        le=1_048_576,
        doc="records that wait for the disk; beyond it they are dropped, counted",
    )


@dataclass(frozen=True, kw_only=True)
class OnlineServiceSettings(Settings):
    """The processes beside a server that learns: update worker and gate."""

    record_top: int = setting(
        16,
        ge=0,
        le=1024,
        doc="most likely tokens recorded at each sampled one, for the KL where a snapshot is gone",
    )
    update_seconds: float = setting(
        600.0,
        gt=0,
        le=1e6,
        doc="time of one update or one look of the gate; a process that takes longer is restarted",
    )
    nice: int = setting(
        10,
        ge=0,
        le=19,
        doc="priority of worker and gate behind the server, as in `nice`; 0 = the same",
    )
    standby: bool = setting(
        True,
        doc="keep a spare process that has loaded everything, so that a restart takes a moment; costs its memory",
    )
    run_gate: bool = setting(
        True, doc="play canary episodes; false: snapshots go live by orders alone"
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
        ModelSettings(), doc="the model that the service began with; `path` names it"
    )
    environment: EnvironmentSettings | None = setting(
        None,
        doc="environment whose episodes are served; left out, or name `chat`: conversations, an answer is right if it "
        "equals the label",
    )
    rewards: dict[str, float] = setting(
        {"task": 1.0},
        is_code=True,
        doc="reward components and their weights, as in the policy stage",
    )
    reward_options: RewardSettings = setting(RewardSettings(), doc="options of components")
    reward_model: str | None = setting(
        None, doc="folder of the reward model behind the component learned"
    )
    seed: int = setting(0, ge=0, doc="of sampling from the buffer and of reward components")
    voting: VotingSettings = setting(VotingSettings(), doc="answers of one request")
    labels: OnlineLabelSettings = setting(OnlineLabelSettings(), doc="what stands for the truth")
    buffer: OnlineBufferSettings = setting(OnlineBufferSettings(), doc="experience buffer")
    update: OnlineUpdateSettings = setting(
        OnlineUpdateSettings(), doc="updates and their guardrails"
    )
    rollouts: OnlineRolloutSettings = setting(
        OnlineRolloutSettings(), doc="fresh answers to requests with feedback"
    )
    gate: OnlineGateSettings = setting(OnlineGateSettings(), doc="gate of snapshots")
    drift: OnlineDriftSettings = setting(OnlineDriftSettings(), doc="alarms")
    audit: OnlineAuditSettings = setting(OnlineAuditSettings(), doc="logs of updates")
    service: OnlineServiceSettings = setting(
        OnlineServiceSettings(), doc="worker and gate beside a server"
    )
