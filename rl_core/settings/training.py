"""Settings shared by all trainers (processes, optimizer, loop), and those of supervised and preference training."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Any, Literal, cast

from rl_core.errors import SettingsError
from rl_core.settings.base import Settings, setting
from rl_core.settings.common import SamplingSettings
from rl_core.settings.defaults import MODEL_DEFAULTS

_ENDPOINT = re.compile(r"[A-Za-z0-9.\-_\[\]:]+:\d{1,5}")

KEEP_EPOCHS_DOC = (
    "number of newest whole epochs whose models are kept as epochs/1, epochs/2, ... in the stage's folder (or the "
    "Python API's output); 0 = none"
)
TIES_DOC = (
    "model of pairs in which neither side is better (`tie: true`): rao_kupper (1967) or davidson (1970), as losses "
    "arXiv:2409.17431; without such pairs it has no effect"
)
TIE_PROBABILITY_DOC = (
    "probability of a tie between two answers of equal reward, the only parameter of either model"
)


@dataclass(frozen=True, kw_only=True)
class LaunchSettings(Settings):
    """Single-process or distributed training; results agree up to rounding."""

    kind: Literal["in_process", "torchrun"] = setting(
        "in_process",
        doc="torchrun: data parallel with the model sharded over processes (FSDP2 fully_shard)",
    )
    processes: int = setting(
        1,
        ge=1,
        le=1024,
        doc="processes per node; on GPUs (nccl) if there are at least as many, else on CPUs (gloo)",
    )
    nodes: int = setting(
        1, ge=1, le=1024, doc="machines; all must share the output folder, the data and this code"
    )
    rdzv_backend: Literal["c10d", "etcd-v2"] = setting("c10d", doc="rendezvous backend of torchrun")
    rdzv_endpoint: str | None = setting(
        None, doc="host:port of one node or of etcd; required with several nodes"
    )
    rdzv_id: str = setting("posttrain", doc="job id shared by the nodes")
    timeout_seconds: float = setting(
        3600.0, gt=0, doc="longest wait between processes before the stage fails"
    )

    def check(self) -> None:
        """Check the rendezvous endpoint, which several nodes need, and that a single process is not split."""
        if self.rdzv_endpoint is not None and not _ENDPOINT.fullmatch(self.rdzv_endpoint):
            raise SettingsError(
                f"rdzv_endpoint: {self.rdzv_endpoint!r} must be host:port, for example node-1:29400"
            )
        if self.nodes > 1 and self.rdzv_endpoint is None:
            raise SettingsError(
                f"rdzv_endpoint: {self.nodes} nodes need a rendezvous; set host:port of one node"
            )
        if self.kind == "in_process" and (self.processes > 1 or self.nodes > 1):
            raise SettingsError(
                f"kind: in_process is one process, but {self.processes} on {self.nodes} nodes are requested; "
                "use kind: torchrun"
            )


@dataclass(frozen=True, kw_only=True)
class OptimizerSettings(Settings):
    """Optimizer, learning-rate schedule, precision and memory."""

    optimizer: Literal["adamw", "muon"] = setting(
        "adamw",
        doc="muon: Muon for hidden matrices (arXiv:2502.16982) and adapters, AdamW for embeddings, heads, vectors",
    )
    learning_rate: float = setting(1e-3, gt=0, le=1, doc="peak learning rate")
    schedule: Literal["constant", "cosine", "linear"] = setting(
        "constant", doc="shape after the warm-up"
    )
    warmup_steps: int = setting(10, ge=0, doc="optimizer steps of linear warm-up from 0")
    min_lr_ratio: float = setting(0.1, ge=0, le=1, doc="final learning rate as a share of the peak")
    weight_decay: float = setting(0.01, ge=0, doc="decoupled, on matrices only (arXiv:1711.05101)")
    betas: tuple[float, float] = setting((0.9, 0.95), ge=0, lt=1, doc="AdamW moments")
    eps: float = setting(1e-8, gt=0, doc="AdamW epsilon")
    optimizer_state: Literal["device", "host"] = setting(
        "device",
        doc="host: AdamW's moments stay in host memory and pass through the GPU in each step, with the same bits: "
        "8 bytes a weight less there, for full training of large models",
    )
    muon_momentum: float = setting(0.95, ge=0, lt=1, doc="Muon's momentum (Nesterov)")
    max_grad_norm: float = setting(1.0, gt=0, doc="clip by global norm")
    grokfast_lambda: float = setting(
        0.0,
        ge=0,
        doc="weight of the averaged gradient added to each gradient; 0 = off, arXiv:2405.20233 uses 2",
    )
    grokfast_alpha: float = setting(
        0.98, ge=0, lt=1, doc="decay of that average (arXiv:2405.20233)"
    )
    ema_decay: float | None = setting(
        None,
        gt=0,
        lt=1,
        doc="evaluate and save a moving average of the weights, over about 1 / (1 - ema_decay) steps",
    )
    micro_batch_tokens: int = setting(
        16384,
        ge=1,
        le=1_073_741_824,
        doc="tokens per forward pass, padded (on a CPU, the distinct prefixes of rows that begin alike); larger "
        "batches accumulate gradients",
    )
    autocast: Literal["none", "bfloat16"] = setting(
        "none",
        doc="bfloat16: compute dtype of the model (faster, less memory); weights and losses keep their dtype",
    )
    activation_checkpointing: bool = setting(
        False, doc="recompute activations in backward: less memory, about a third slower"
    )
    dropout: bool = setting(
        False,
        doc="use the configured dropout of the model (and its adapter) in updates; false: none, so that "
        "log-probs of sampler, old policy and reference agree with the update's",
    )


@dataclass(frozen=True, kw_only=True)
class LearningRateControlSettings(Settings):
    """Learning rate of a policy that follows the KL of its updates."""

    desired_kl: float = setting(
        0.01,
        gt=0,
        doc="KL(old || new) of an iteration in nats per token, mean over its optimizer steps: the rate is divided by "
        "`factor` above twice this KL and multiplied below half of it (arXiv:2109.11978)",
    )
    factor: float = setting(1.5, gt=1, le=10, doc="factor of one adaptation")
    lowest: float = setting(0.1, gt=0, le=1, doc="lowest rate, as a multiple of the scheduled one")
    highest: float = setting(
        10.0, ge=1, le=1000, doc="highest rate, as a multiple of the scheduled one"
    )


@dataclass(frozen=True, kw_only=True)
class LoopSettings(Settings):
    """The training loop: evaluation, checkpoints, early stopping, guards."""

    eval_every: int = setting(0, ge=0, doc="iterations between evaluations; 0 = only at the end")
    checkpoint_every: int = setting(
        50,
        ge=0,
        doc="iterations between checkpoints, or a minute if iterations are long; 0 = only when stopped",
    )
    keep_checkpoints: int = setting(
        2, ge=1, doc="newest checkpoints kept; with 1 none is left if the disk damages it"
    )
    patience: int | None = setting(
        None, ge=1, doc="evaluations without improvement before stopping; none = never stop"
    )
    min_improvement: float = setting(0.0, ge=0, doc="smallest change that counts as an improvement")
    plateau_patience: int | None = setting(
        None,
        ge=1,
        doc="evaluations without improvement before the learning rate is multiplied by `plateau_factor`, down to "
        "`min_lr_ratio` of the scheduled rate; again after as many further ones; as with `patience`, the result has "
        "the best weights; default: never",
    )
    plateau_factor: float = setting(0.5, gt=0, lt=1, doc="factor of the learning rate at a plateau")
    max_nonfinite: int = setting(5, ge=1, doc="consecutive non-finite steps that stop the run")
    history_seconds: float = setting(
        5.0,
        ge=0,
        le=1e6,
        doc="minimum seconds between two lines appended to metrics_history.jsonl during training",
    )
    history_window: int = setting(
        10, ge=2, le=1000, doc="observations used for the means and slopes in that file"
    )
    launch: LaunchSettings = setting(
        LaunchSettings(), doc="process launch; not part of the stage's key"
    )

    @property
    def selects_best(self) -> bool:
        """True if evaluations decide when to stop or lower the learning rate; the best weights are then the result."""
        return self.patience is not None or self.plateau_patience is not None


@dataclass(frozen=True, kw_only=True)
class SFTSettings(OptimizerSettings, LoopSettings):
    """Supervised fine-tuning on completions."""

    learning_rate: float = setting(
        MODEL_DEFAULTS["SFTSettings.learning_rate"], gt=0, le=1, doc="peak learning rate"
    )
    epochs: float = setting(3.0, gt=0, doc="passes over the demonstrations")
    max_steps: int | None = setting(None, ge=1, doc="maximum optimizer steps")
    keep_epochs: int = setting(0, ge=0, le=1_000_000, doc=KEEP_EPOCHS_DOC)
    batch_size: int = setting(64, ge=1, le=1_048_576, doc="demonstrations per optimizer step")
    dropout: bool = setting(
        True, doc="use the configured dropout of the model (and its adapter) in updates"
    )
    router_aux_loss_coef: float = setting(
        0.0,
        ge=0,
        doc="weight of the load-balancing loss of routers in mixture-of-experts models (arXiv:2101.03961)",
    )
    loss_on: Literal["all", "last"] = setting(
        "all",
        doc="assistant turns that carry loss: all, or the last one; a message's weight 0 also excludes it",
    )
    # Off by default: on a CPU no faster than length-sorted micro-batches (docs/benchmarks/speed.md).
    packing: bool = setting(
        False, doc="pack several demonstrations into one row with separate attention; saves padding"
    )


@dataclass(frozen=True, kw_only=True)
class RewardModelSettings(OptimizerSettings, LoopSettings):
    """Reward model: Bradley-Terry on preference pairs, regression on scores, or cross-entropy on labels of steps."""

    loss: Literal["bradley_terry", "mse", "process"] = setting(
        "bradley_terry",
        doc="bradley_terry: on pairs; mse: regression on rows with a `score`, standardised over the "
        "training rows (arXiv:2406.08673); process: cross-entropy at the ends of steps (arXiv:2305.20050)",
    )
    head_layers: int = setting(
        1, ge=1, le=8, doc="layers of the head on the last token's state; 1 = linear"
    )
    head_width: int = setting(
        256, ge=1, le=65_536, doc="units of a hidden layer of the head, if it has several layers"
    )
    ties: Literal["rao_kupper", "davidson"] = setting("rao_kupper", doc=TIES_DOC)
    tie_probability: float = setting(0.5, gt=0, lt=1, doc=TIE_PROBABILITY_DOC)
    learning_rate: float = setting(
        MODEL_DEFAULTS["RewardModelSettings.learning_rate"], gt=0, le=1, doc="peak learning rate"
    )
    epochs: float = setting(
        MODEL_DEFAULTS["RewardModelSettings.epochs"], gt=0, doc="passes over the pairs"
    )
    max_steps: int | None = setting(None, ge=1, doc="maximum optimizer steps")
    keep_epochs: int = setting(0, ge=0, le=1_000_000, doc=KEEP_EPOCHS_DOC)
    batch_size: int = setting(64, ge=1, le=1_048_576, doc="pairs per optimizer step")
    center_coef: float = setting(
        0.01, ge=0, doc="weight of mean((r_chosen + r_rejected)^2) (arXiv:2312.09244)"
    )
    num_pairs: int = setting(
        2000,
        ge=10,
        le=10_000_000,
        doc="pairs built from scored rollouts, if there is no preference file",
    )
    group_size: int = setting(
        8, ge=2, le=65_536, doc="rollouts of one prompt from which pairs are built"
    )
    sampling: SamplingSettings = setting(SamplingSettings(), doc="how those rollouts are sampled")

    def check(self) -> None:
        """Check that rollouts for pairs can differ."""
        self.sampling.check_varied()

    @property
    def use(self) -> Literal["reward_model", "reward_regression", "process_reward"]:
        """Kind of its training rows, as named by `rl_core.data.row_uses.explain_misfit`."""
        uses = {"mse": "reward_regression", "process": "process_reward"}
        return cast(Any, uses.get(self.loss, "reward_model"))


@dataclass(frozen=True, kw_only=True)
class PreferenceSettings(OptimizerSettings, LoopSettings):
    """Preference optimisation on pairs, or labelled completions (kto); the reference is the stage's initial model."""

    # As for the policy stage: both start from an SFT model, and presets of 0.04M to 3M parameters need about a tenth of
    # SFT's learning rate.
    learning_rate: float = setting(
        MODEL_DEFAULTS["PreferenceSettings.learning_rate"], gt=0, le=1, doc="peak learning rate"
    )
    weight_decay: float = setting(0.0, ge=0, doc="decoupled, on matrices only")
    loss: Literal["dpo", "ipo", "simpo", "orpo", "kto"] = setting(
        "dpo",
        doc="dpo (arXiv:2305.18290), ipo (arXiv:2310.12036), simpo (arXiv:2405.14734) and orpo (arXiv:2403.07691) "
        "without a reference, or kto (arXiv:2402.01306) on labelled completions",
    )
    beta: float = setting(
        0.1,
        gt=0,
        doc="strength of the KL constraint to the reference; simpo: scale of the rewards (paper: 2 to 2.5); orpo: "
        "weight of the odds-ratio term",
    )
    simpo_gamma: float = setting(
        0.5, ge=0, doc="target margin of simpo's rewards (paper: about half of beta)"
    )
    desirable_weight: float = setting(1.0, ge=0, doc="kto: weight of completions labelled true")
    undesirable_weight: float = setting(1.0, ge=0, doc="kto: weight of completions labelled false")
    label_smoothing: float = setting(
        0.0, ge=0, lt=0.5, doc="assumed share of mislabelled pairs; above 0: conservative DPO"
    )
    ties: Literal["rao_kupper", "davidson"] = setting(
        "rao_kupper", doc=f"dpo: {TIES_DOC}; ipo: a tie's target is 0"
    )
    tie_probability: float = setting(0.5, gt=0, lt=1, doc=TIE_PROBABILITY_DOC)
    sft_coef: float = setting(
        0.0,
        ge=0,
        doc="weight of the chosen completions' cross-entropy per token (RPO, arXiv:2404.19733)",
    )
    epochs: float = setting(1.0, gt=0, doc="passes over the pairs; more than a few overfit")
    max_steps: int | None = setting(None, ge=1, doc="maximum optimizer steps")
    keep_epochs: int = setting(0, ge=0, le=1_000_000, doc=KEEP_EPOCHS_DOC)
    batch_size: int = setting(64, ge=1, le=1_048_576, doc="pairs per optimizer step")
    num_pairs: int = setting(
        2000,
        ge=10,
        le=10_000_000,
        doc="pairs built from scored rollouts, if there is no preference file",
    )
    group_size: int = setting(
        8, ge=2, le=65_536, doc="rollouts of one prompt from which pairs are built"
    )
    sampling: SamplingSettings = setting(SamplingSettings(), doc="how those rollouts are sampled")

    def check(self) -> None:
        """Check that settings fit the loss, and that rollouts for pairs can differ."""
        self.sampling.check_varied()
        if self.loss != "dpo" and self.label_smoothing > 0:
            reason = ", which bounds the margin by itself" if self.loss == "ipo" else ""
            raise SettingsError(
                f"label_smoothing: {self.label_smoothing} is not defined for {self.loss}{reason}; "
                "use loss dpo, or remove it"
            )
        if self.loss in ("orpo", "kto") and self.sft_coef > 0:
            reason = "has no chosen side"
            if self.loss == "orpo":
                reason = "already contains the chosen completions' cross-entropy"
            raise SettingsError(
                f"sft_coef: {self.sft_coef} cannot be used with {self.loss}, which {reason}; remove it"
            )
        if self.loss == "kto" and self.dropout:
            raise SettingsError(
                "dropout: the reference point of kto is measured without dropout; leave it off"
            )
        if self.loss == "kto" and self.batch_size < 2:
            raise SettingsError(
                "batch_size: kto estimates a divergence over the batch; use at least 2"
            )
        if self.loss == "kto" and self.desirable_weight == self.undesirable_weight == 0:
            raise SettingsError(
                "desirable_weight, undesirable_weight: both are 0, so nothing is learned"
            )

    @property
    def needs_reference(self) -> bool:
        """True for losses that compare with the initial model."""
        return self.loss not in ("simpo", "orpo")
