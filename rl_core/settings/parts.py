"""Settings of models, environments, sampling, data, evaluation and analysis."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

from rl_core.errors import SettingsError
from rl_core.settings.base import Settings, setting

__all__ = [
    "AnalysisSettings",
    "DataSettings",
    "EnvironmentSettings",
    "EvaluationSettings",
    "LoraSettings",
    "ModelSettings",
    "SamplingSettings",
]


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

    temperature: float = setting(1.0, ge=0, le=5, doc="divides the logits; 0 = greedy, for evaluation alone")
    max_completion_tokens: int = setting(64, ge=1, doc="tokens after the prompt, observations included")
    max_turns: int = setting(6, ge=1, doc="actions of one episode")
    slots: int = setting(128, ge=1, doc="episodes decoded at once")
    max_concurrent_steps: int = setting(
        32, ge=1, doc="concurrent environment steps; only for blocking environments (Environment.blocking)"
    )
    step_timeout_s: float = setting(
        600.0, gt=0, doc="seconds after which such a step is an error that names its episode; a tool has its own limit"
    )
    rejoin: Literal["together", "ready"] = setting(
        "together",
        doc="together: episodes whose steps waited go on once no other can be decoded, so numbers never depend on "
        "timing; ready: each at once, so a slow tool holds up nobody, but log-probabilities differ in their last bits",
    )

    def check_trainable(self) -> None:
        """SettingsError at temperature 0: greedy rollouts cannot be learned from."""
        if self.temperature == 0:
            raise SettingsError(
                "sampling.temperature: 0 is greedy: the rollouts of a prompt are all the same and teach nothing; "
                "use above 0, usually 1"
            )


@dataclass(frozen=True, kw_only=True)
class DataSettings(Settings):
    """What the data stage reads or makes, checks and splits."""

    demonstrations: str | None = setting(
        None, doc="JSONL/Parquet (or a folder of them): {messages} or {prompt, completion}; left out: the demonstrator"
    )
    num_demonstrations: int = setting(4000, ge=1, doc="how many the demonstrator writes")
    preferences: str | None = setting(None, doc="JSONL/Parquet, or a folder of them: {prompt, chosen, rejected}")
    levels: tuple[str, ...] = setting(
        (), doc="levels that the demonstrator shows in turn; twice = twice as often; () = all"
    )
    heldout_fraction: float = setting(0.1, gt=0, lt=1, doc="share of prompts kept out of training")
    max_rows: int | None = setting(None, ge=1, doc="read at most this many rows of each file")
    on_bad_row: Literal["stop", "skip"] = setting(
        "stop", doc="stop: refuse the file; skip: leave bad rows out, counted"
    )


@dataclass(frozen=True, kw_only=True)
class EvaluationSettings(Settings):
    """Held-out evaluation."""

    episodes: int = setting(500, ge=2, doc="held-out episodes, the same for every model")
    episodes_seed: int | None = setting(None, ge=0, doc="which ones are drawn; left out: by the pipeline's seed")
    levels: tuple[str, ...] = setting((), doc="levels in equal shares; () = all")
    samples: int = setting(1, ge=1, doc="rollouts of each episode; above 1 gives pass@k")
    greedy: bool = setting(True, doc="also report greedy decoding")
    sampling: SamplingSettings = setting(SamplingSettings(), doc="how episodes are played")


@dataclass(frozen=True, kw_only=True)
class AnalysisSettings(Settings):
    """Trajectory analysis."""

    bootstrap_samples: int = setting(2000, ge=100, doc="resamples of each interval")
    side_by_side: int = setting(5, ge=0, doc="episodes shown under each model in the report")
    probe_episodes: int = setting(
        100, ge=0, doc="sampled episodes that each model reads again: entropy, KL, coherence; 0 = none"
    )
    probe_scores: int = setting(
        400, ge=0, doc="sampled episodes of each model that the reward model scores: calibration; 0 = none"
    )
    probe_demonstrations: int = setting(200, ge=0, doc="held-out demonstrations whose perplexity is taken; 0 = none")
