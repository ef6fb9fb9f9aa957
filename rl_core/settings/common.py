"""Settings of models, environments, sampling, data, evaluation, analysis, proof of export and reference models."""

from __future__ import annotations

import dataclasses
import datetime
import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any, Literal

from rl_core.errors import SettingsError
from rl_core.settings.base import Settings, setting
from rl_core.settings.defaults import MODEL_DEFAULTS

# Llama shapes; parameter counts are for a vocabulary of 512 with tied embeddings.
PRESETS: dict[str, dict[str, Any]] = {
    "nano": dict(  # 0.04M, for tests
        hidden_size=32,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        intermediate_size=96,
    ),
    "tiny": dict(  # 0.85M, learns the demo's environment in minutes on a CPU
        hidden_size=128,
        num_hidden_layers=4,
        num_attention_heads=4,
        num_key_value_heads=2,
        intermediate_size=384,
    ),
    "small": dict(  # 3.0M
        hidden_size=256,
        num_hidden_layers=4,
        num_attention_heads=4,
        num_key_value_heads=2,
        intermediate_size=688,
    ),
    "nano_vision": dict(  # 0.06M, for tests: reads images
        hidden_size=32,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=1,
        intermediate_size=96,
    ),
    "tiny_vision": dict(  # 1.2M, reads images: learns to look at small pictures in minutes on a CPU
        hidden_size=128,
        num_hidden_layers=4,
        num_attention_heads=4,
        num_key_value_heads=2,
        intermediate_size=384,
    ),
}
# Image encoders of the presets of Qwen2-VL's shape: 2 x 2 patches are one token.
IMAGE_ENCODERS: dict[str, dict[str, Any]] = {
    "nano_vision": dict(depth=1, embed_dim=16, num_heads=2, mlp_ratio=2, patch_size=4),
    "tiny_vision": dict(depth=2, embed_dim=64, num_heads=4, mlp_ratio=2, patch_size=8),
}


MAX_STOP_TEXTS = 64
MIN_TEMPERATURE = 1e-6  # above 0; float32 logits divided by less overflow
# Arguments and functions of the rendering, which template variables may not replace.
_RENDERING_ARGUMENTS = frozenset(
    {
        "messages",
        "conversation",
        "tools",
        "documents",
        "chat_template",
        "tokenize",
        "tokenizer_kwargs",
        "padding",
        "add_generation_prompt",
        "continue_final_message",
        "return_dict",
        "return_tensors",
        "truncation",
        "max_length",
        "return_assistant_tokens_mask",
        "sanitize_control_tokens",
        "strftime_now",
        "raise_exception",
    }
)

Precision = Literal["full", "int8", "int4"]


@dataclass(frozen=True, kw_only=True)
class ReferenceSettings(Settings):
    """Precision of reference models, and how many of them stay in memory.

    A reference model is a frozen model that a policy is compared with, or a reward model.
    """

    precision: Literal["auto", "full", "int8", "int4"] = setting(
        "auto",
        doc="weights of linear layers: unchanged, 8 bits with a scale per row, or 4 bits with a scale per 32 inputs; "
        "auto: int8 if the package torchao is installed, else full",
    )
    max_models: int = setting(
        2, ge=1, le=1024, doc="models kept in memory; the least recently used one is dropped first"
    )
    memory_share: float = setting(
        0.5,
        gt=0,
        le=1,
        doc="share of the memory (of the GPU, if models are on one) that all of them may use together",
    )
    separate_process_gib: float = setting(
        8.0,
        ge=0,
        doc="a larger model runs in a separate process, which returns all its memory when it ends",
    )
    pass_tokens: int = setting(16_384, ge=1, le=1_073_741_824, doc="padded tokens per pass")


@dataclass(frozen=True, kw_only=True)
class ExportSettings(Settings):
    """Proof of export: in a fresh process, transformers loads the written model and must give the same log-probs."""

    bound: float | None = setting(
        None,
        gt=0,
        doc="largest difference of a token's log-probability, nats; default: 0.001 in float32, 0.5 in bfloat16 and "
        "float16",
    )
    mean_bound: float | None = setting(
        None,
        gt=0,
        doc="largest mean difference over the tokens, nats; default: a fifth of the bound",
    )
    timeout_seconds: float = setting(1800.0, gt=0, doc="time limit of the fresh process")


@dataclass(frozen=True, kw_only=True)
class GgufSettings(Settings):
    """GGUF file of the trained model, for llama.cpp and ollama, proven by reading it back."""

    type: Literal["f32", "bf16", "q8_0"] = setting(
        "q8_0", doc="type of the matrices; vectors stay in float32"
    )


@dataclass(frozen=True, kw_only=True)
class LoraSettings(Settings):
    """Low-rank adapters (arXiv:2106.09685), with peft."""

    rank: int = setting(16, ge=1, le=65_536, doc="rank of the update matrices")
    alpha: float = setting(32.0, gt=0, doc="scale: the update is alpha / rank * B A")
    dropout: float = setting(
        0.0, ge=0, lt=1, doc="dropout on the adapter's input, if the stage trains with `dropout`"
    )
    target_modules: tuple[str, ...] | Literal["all-linear"] = setting(
        ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"),
        doc="names of the linear layers and experts with an adapter; all-linear: all except the output head, also "
        "where a model lacks one of the default names",
    )
    rank_stabilized: bool = setting(
        False, doc="scale by alpha / sqrt(rank): rsLoRA (arXiv:2312.03732)"
    )
    dora: bool = setting(
        False, doc="also train the magnitudes of the weights: DoRA (arXiv:2402.09353)"
    )
    modules_to_save: tuple[str, ...] = setting(
        (), doc="names of modules that are trained completely and saved with the adapter"
    )
    quantize: Literal["none", "nf4", "int8"] = setting(
        "none",
        doc="frozen weights in 4 (QLoRA, arXiv:2305.14314) or 8 bits, with bitsandbytes on a CUDA device",
    )

    def check(self) -> None:
        """Refuse a module that has an adapter and is also trained completely."""
        if self.target_modules != "all-linear" and (
            both := set(self.target_modules) & set(self.modules_to_save)
        ):
            raise SettingsError(
                f"modules_to_save: {sorted(both)[0]} is also one of target_modules; remove it from one of them"
            )

    @property
    def served_rank(self) -> int:
        """Rank of the adapter that inference servers add to the base model; 0 = none, for DoRA and complete modules."""
        return 0 if self.dora or self.modules_to_save else self.rank


@dataclass(frozen=True, kw_only=True)
class ModelSettings(Settings):
    """The initial policy: a path, a hub name, a registered model, or a from-scratch preset."""

    path: str | None = setting(
        None,
        doc="model folder, hub name, models:/NAME@ALIAS, or the folder of an adapter (adapter_config.json), which "
        "`lora` continues; default: a preset",
    )
    preset: Literal["nano", "tiny", "small", "nano_vision", "tiny_vision"] = setting(
        "tiny",
        doc="shape of a from-scratch model, Llama or, to read images, Qwen2-VL (_vision); unused with path",
    )
    vocab_size: int = setting(
        512, ge=300, le=1_048_576, doc="size of the byte-level BPE vocabulary trained for a preset"
    )
    context: int = setting(256, ge=16, le=1_048_576, doc="longest sequence (tokens) of a preset")
    rope_context: int | None = setting(
        None,
        ge=1,
        le=16_777_216,
        doc="only for models whose rotary frequencies depend on the length (longrope, dynamic): longest sequence "
        "(tokens), whose frequencies are used for every row; default: sequences end where the frequencies would change",
    )
    dtype: Literal["float32", "bfloat16", "float16"] = setting(
        "float32", doc="dtype of the weights in memory"
    )
    device: Literal["auto", "cpu", "cuda"] = setting("auto", doc="auto: GPU if available")
    lora: LoraSettings | None = setting(None, doc="train adapters instead of all weights")
    trust_remote_code: bool = setting(False, doc="allow Python code shipped with a hub model")
    chat_template: str | None = setting(
        None,
        doc="Jinja file used instead of the model's chat template, and saved with the trained model",
    )
    chat_template_kwargs: dict[str, Any] = setting(
        {},
        doc="variables of the chat template, such as {enable_thinking: false} or {date_string: 26 Jul 2024}",
    )
    chat_template_date: str = setting(
        "2024-07-26",
        doc="YYYY-MM-DD, the date for templates that print today's date, so that prompts stay the same every day",
    )
    native_tools: bool = setting(
        False,
        doc="pass the environment's tools to the chat template, which describes them in the model's format",
    )
    history_thoughts: Literal["keep", "template"] = setting(
        "keep",
        doc="thoughts of earlier turns; keep: stay in the context as written; template: as the chat template "
        "renders the history, so a demonstration may become several training sequences, an episode several contexts",
    )

    @property
    def sees_images(self) -> bool:
        """True = the preset reads images."""
        return self.preset in IMAGE_ENCODERS

    def check(self) -> None:
        """Check the date, and that no template variable replaces an argument of the rendering."""
        try:
            datetime.date.fromisoformat(self.chat_template_date)
        except ValueError:
            raise SettingsError(
                f"chat_template_date: {self.chat_template_date!r} is not a date such as 2024-07-26"
            ) from None
        reserved = sorted(_RENDERING_ARGUMENTS & set(self.chat_template_kwargs))
        if reserved:
            hint = "the conversation determines it"
            if reserved[0] == "strftime_now":
                hint = "set the date with chat_template_date"
            raise SettingsError(f"chat_template_kwargs: {reserved[0]!r} cannot be set here; {hint}")


@dataclass(frozen=True, kw_only=True)
class EnvironmentSettings(Settings):
    """The environment and its options."""

    name: str = setting(
        "pixel_grid",
        doc="a shipped environment's name, or an import path or file (package.module:Class, world.py:World)",
    )
    options: dict[str, Any] = setting({}, doc="keyword arguments of the environment's class")


MIXTURE_ENVIRONMENT = "mixture"  # name of the environment that several environments make up
_LABEL = re.compile(r"[A-Za-z0-9][A-Za-z0-9_.-]{0,39}")


def check_environment_label(label: str) -> None:
    """Raise SettingsError for a label that metric names and level names cannot contain."""
    if not _LABEL.fullmatch(label):
        raise SettingsError(
            f"label: {label[:80]!r} must be 1 to 40 of letters, digits, '_', '.' and '-', starting with a letter or "
            "digit: levels and metrics contain it (sums/easy)"
        )


@dataclass(frozen=True, kw_only=True)
class MixedEnvironmentSettings(Settings):
    """One of several environments in which a policy learns."""

    name: str = setting(
        doc="a shipped environment's name, or an import path or file (package.module:Class, world.py:World)"
    )
    label: str | None = setting(
        None,
        doc="name in levels (`sums/easy`), metrics and reports; default: name, or the class of an import path",
    )
    options: dict[str, Any] = setting({}, doc="keyword arguments of the environment's class")
    weight: float = setting(
        1.0,
        ge=0,
        doc="share of the training episodes, relative to the other environments; 0: only evaluated",
    )
    levels: dict[str, float] = setting(
        {}, doc="levels used and their sampling weights within the environment; {} = all, equally"
    )
    rewards: dict[str, float] = setting(
        {},
        is_code=True,
        doc="reward components and weights of this environment; {} = those of the policy stage",
    )
    reward_options: dict[str, Any] = setting(
        {},
        doc="options that differ from the policy stage's reward_options, as {numeric: {find: boxed}}",
    )
    max_turns: int | None = setting(
        None, ge=1, doc="maximum actions per episode, at most the stage's sampling.max_turns"
    )

    def check(self) -> None:
        """Check the label, the weights of levels, and that some reward has a weight."""
        check_environment_label(self.resolved_label)
        for level, weight in self.levels.items():
            if weight <= 0:
                raise SettingsError(
                    f"levels.{level}: {weight:g} must be above 0; leave out a level that is not used"
                )
        if self.rewards and not any(self.rewards.values()):
            raise SettingsError(
                "rewards: no reward has a weight other than 0; write {task: 1.0}, or leave it out"
            )

    @property
    def resolved_label(self) -> str:
        """The label, or its default."""
        return self.label if self.label is not None else self.name.rpartition(":")[2]


def check_mixture(entries: Iterable[MixedEnvironmentSettings]) -> None:
    """Raise SettingsError for labels that two environments share, and if no environment is trained on."""
    entries = tuple(entries)
    known: set[str] = set()
    for index, entry in enumerate(entries):
        label = entry.resolved_label
        if label.casefold() in known:
            raise SettingsError(
                f"{index}.label: two environments are named '{label}' (ignoring case); give each a different label"
            )
        known.add(label.casefold())
    if not any(entry.weight for entry in entries):
        raise SettingsError("weight: every environment has weight 0, so there is nothing to learn")


def iter_mixed_environments(
    settings: EnvironmentSettings,
) -> Iterator[tuple[int, EnvironmentSettings]]:
    """Yield the index and the settings of each environment of a mixture; (-1, settings) for any other."""
    entries = settings.options.get("environments", ())
    if settings.name != MIXTURE_ENVIRONMENT or not isinstance(entries, list | tuple):
        yield -1, settings
        return
    for index, entry in enumerate(entries):
        if isinstance(entry, dict) and isinstance(entry.get("name"), str):
            options = dict(entry.get("options") or {})
            yield index, EnvironmentSettings(name=entry["name"], options=options)


def build_mixture_settings(entries: Iterable[MixedEnvironmentSettings]) -> EnvironmentSettings:
    """Build the settings of the environment that these make up."""
    plain = [dataclasses.asdict(entry) for entry in entries]
    return EnvironmentSettings(name=MIXTURE_ENVIRONMENT, options={"environments": plain})


@dataclass(frozen=True, kw_only=True)
class SamplingSettings(Settings):
    """Sampling of completions."""

    temperature: float = setting(
        1.0,
        ge=0,
        le=5,
        doc=f"divides the logits, from {MIN_TEMPERATURE:g}; 0 = greedy, evaluation only",
    )
    top_k: int = setting(
        0,
        ge=0,
        doc="draw from the k most likely tokens; 0 = all; refused for rollouts that train a policy",
    )
    top_p: float = setting(
        1.0,
        gt=0,
        le=1,
        doc="draw from the most likely tokens that together reach this probability; refused for rollouts that train a "
        "policy",
    )
    min_p: float = setting(
        0.0,
        ge=0,
        le=1,
        doc="draw from tokens of at least this share of the highest probability; refused for rollouts that train a "
        "policy",
    )
    repetition_penalty: float = setting(
        1.0,
        gt=0,
        doc="divides positive logits of tokens that occur in the sequence, and multiplies negative ones "
        "(arXiv:1909.05858); refused for rollouts that train a policy",
    )
    stop: tuple[str, ...] = setting(
        (),
        doc="texts that end an action like the end-of-turn token; their tokens and text are kept",
    )
    max_completion_tokens: int = setting(
        MODEL_DEFAULTS["SamplingSettings.max_completion_tokens"],
        ge=1,
        le=1_048_576,
        doc="tokens after the prompt, including observations",
    )
    max_turns: int = setting(6, ge=1, doc="maximum actions per episode")
    slots: int = setting(128, ge=1, le=65_536, doc="episodes decoded concurrently")
    max_concurrent_steps: int = setting(
        32,
        ge=1,
        le=4_096,
        doc="concurrent environment steps; only for blocking environments (Environment.blocking)",
    )
    step_timeout_s: float = setting(
        600.0,
        gt=0,
        doc="seconds after which such a step fails with an error naming its episode; tools have separate timeouts",
    )
    max_failed_share: float = setting(
        0.1,
        ge=0,
        le=1,
        doc="share of episodes whose environment may raise, hang or violate its protocol (over "
        "ten iterations and at least 50 episodes); they are left out. Above it the stage "
        "stops; 0: at the first, 1: only if all fail",
    )
    rejoin: Literal["together", "ready"] = setting(
        "together",
        doc="together: a finished step rejoins only when no other episode can be decoded, so results are bit-identical "
        "regardless of timing; ready: rejoins immediately, so no episode waits, but log-probs vary in the last bits",
    )

    @property
    def is_restricted(self) -> bool:
        """True = tokens are drawn from part of the vocabulary."""
        return self.top_k > 0 or self.top_p < 1 or self.min_p > 0

    def check(self) -> None:
        """Check temperature and stop texts. An empty one would end every action before its first token."""
        if 0 < self.temperature < MIN_TEMPERATURE:
            raise SettingsError(
                f"temperature: {self.temperature:g} is too small to divide logits by; use 0, which is greedy, or at "
                f"least {MIN_TEMPERATURE:g}"
            )
        if len(self.stop) > MAX_STOP_TEXTS:
            raise SettingsError(
                f"stop: {len(self.stop)} texts, each searched after every token; use at most {MAX_STOP_TEXTS}"
            )
        if "" in self.stop:
            raise SettingsError(
                "stop: contains an empty text, which would end every action; remove it"
            )

    def check_varied(self) -> None:
        """Raise SettingsError at temperature 0: greedy rollouts carry no learning signal."""
        if self.temperature == 0:
            raise SettingsError(
                "sampling.temperature: 0 is greedy: a prompt's rollouts are identical, without a learning signal; "
                "use above 0, usually 1"
            )

    def check_trainable(self) -> None:
        """Raise SettingsError if the distribution sampled from is not the one that a policy update works with.

        Log-probabilities of the update (current, old, reference) are those of softmax(logits / temperature) over the
        whole vocabulary. They would have to be renormalised over each token's set of allowed tokens, or computed with
        each token's penalties; neither is stored.
        """
        self.check_varied()
        for name, neutral in (
            ("top_k", 0),
            ("top_p", 1.0),
            ("min_p", 0.0),
            ("repetition_penalty", 1.0),
        ):
            value = getattr(self, name)
            if value != neutral:
                raise SettingsError(
                    f"sampling.{name}: {value} samples from a different distribution than the one that is trained, "
                    "softmax(logits / temperature) over the whole vocabulary, so ratios, KL and gradients would "
                    f"belong to another policy; leave it at {neutral} here (evaluation and generation support it)"
                )


@dataclass(frozen=True, kw_only=True)
class DataSettings(Settings):
    """Data stage: demonstrations and preferences, read or generated, validated and split."""

    demonstrations: str | None = setting(
        None, doc="JSONL/CSV/Parquet (or a folder of them): docs/data.md; default: the demonstrator"
    )
    min_reward: float | None = setting(
        None, doc="least reward of a recorded episode that is imitated (docs/agents.md)"
    )
    num_demonstrations: int = setting(
        4000, ge=1, le=100_000_000, doc="demonstrations generated by the demonstrator"
    )
    preferences: str | None = setting(
        None, doc="JSONL/CSV/Parquet, or a folder of them: docs/data.md"
    )
    levels: tuple[str, ...] = setting(
        (),
        doc="levels of generated demonstrations, in turn (listed twice = twice as often); () = all",
    )
    heldout_fraction: float = setting(
        0.1, gt=0, lt=1, doc="share of prompts held out from training"
    )
    max_rows: int | None = setting(None, ge=1, doc="read at most this many rows of each file")
    on_bad_row: Literal["stop", "skip"] = setting(
        "stop", doc="stop: refuse the file; skip: drop and count bad rows"
    )
    max_tokens: int | None = setting(
        None, ge=2, doc="longest row in tokens; default: the model's context"
    )
    long_rows: Literal["refuse", "drop", "cut"] = setting(
        "refuse",
        doc="rows longer than max_tokens or the context; refuse: bad rows (on_bad_row); drop: left out and counted; "
        "cut: truncated to the first tokens of each sequence",
    )
    deduplicate: Literal["off", "rows", "prompts"] = setting(
        "off",
        doc="rows: leave out exact copies of earlier rows; prompts: keep the first row of each prompt (ignoring case "
        "and white space)",
    )


@dataclass(frozen=True, kw_only=True)
class EvaluationSettings(Settings):
    """Held-out evaluation."""

    episodes: int = setting(
        500, ge=2, le=10_000_000, doc="number of held-out episodes, the same for every model"
    )
    episodes_seed: int | None = setting(
        None, ge=0, doc="seed of the episode draw; default: the pipeline's seed"
    )
    episodes_draw: int = setting(
        0,
        ge=0,
        doc="draw 0, 1, 2, ... of that seed; draws share no episode, even if few are held out",
    )
    levels: tuple[str, ...] = setting((), doc="levels in equal shares; () = all")
    samples: int = setting(1, ge=1, le=65_536, doc="rollouts per episode; above 1 reports pass@k")
    greedy: bool = setting(True, doc="also report greedy decoding")
    sampling: SamplingSettings = setting(SamplingSettings(), doc="how episodes are played")
    rewards: dict[str, float] = setting(
        {},
        is_code=True,
        doc="reward components and weights that score the episodes; {} = only the environment's reward",
    )


@dataclass(frozen=True, kw_only=True)
class AnalysisSettings(Settings):
    """Trajectory analysis."""

    bootstrap_samples: int = setting(
        2000, ge=100, le=1_000_000, doc="bootstrap resamples per interval"
    )
    side_by_side: int = setting(
        20,
        ge=0,
        le=10_000,
        doc="episodes shown side by side in the report, half of them lost by the last model",
    )
    probe_episodes: int = setting(
        100,
        ge=0,
        le=1_000_000,
        doc="episodes per model for teacher-forced entropy, KL and coherence; 0 = none",
    )
    probe_scores: int = setting(
        400,
        ge=0,
        le=1_000_000,
        doc="episodes per model scored by the reward model for calibration; 0 = none",
    )
    probe_demonstrations: int = setting(
        200, ge=0, le=1_000_000, doc="held-out demonstrations for perplexity; 0 = none"
    )
    measures: tuple[str, ...] = setting(
        (),
        is_code=True,
        doc="custom metrics: import paths or files of functions of one trajectory",
    )
