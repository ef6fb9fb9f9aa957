"""Settings of on-policy distillation: the teacher, and the policy settings that apply to its rollouts."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import Any, Literal
from urllib.parse import urlsplit

from rl_core.errors import SettingsError
from rl_core.settings.base import Settings, setting
from rl_core.settings.common import SamplingSettings
from rl_core.settings.curriculum import CurriculumStage
from rl_core.settings.policy import Aggregation, PolicySettings
from rl_core.settings.rollouts import NumericsGateSettings, ReplaySettings
from rl_core.settings.training import LoopSettings, OptimizerSettings


@dataclass(frozen=True, kw_only=True)
class TeacherSettings(Settings):
    """The teacher of a distillation: a model that is loaded here, or one behind an OpenAI-compatible server."""

    model: str | None = setting(
        None,
        doc="model folder, hub name, or models:/NAME@ALIAS; with url: the server's name for it",
    )
    url: str | None = setting(
        None,
        doc="base URL of a server with completions, such as http://127.0.0.1:8000; /v1 is added to one without a path; "
        "default: loaded here",
    )
    tokenizer: str | None = setting(
        None,
        doc="with url: folder or hub name of the teacher's tokenizer; default: model",
    )
    api: Literal["prompt_logprobs", "echo"] = setting(
        "prompt_logprobs",
        doc="request format: prompt_logprobs (vLLM), or echo with logprobs (OpenAI)",
    )
    retries: int = setting(
        5, ge=0, le=20, doc="with url: retries of a request that was not answered"
    )
    retry_delay_s: float = setting(
        1.0, ge=0, doc="with url: wait before the first retry; doubles with each retry"
    )
    timeout_s: float = setting(120.0, gt=0, doc="with url: time limit of one request")
    concurrency: int = setting(8, ge=1, le=256, doc="with url: concurrent requests")

    def check(self) -> None:
        """Check that the URL is an http address without a password."""
        if self.url is None:
            if self.tokenizer is not None:
                raise SettingsError(
                    "tokenizer: a teacher that is loaded here has its own; remove it, or set url"
                )
            return
        parts = urlsplit(self.url)
        if parts.scheme not in ("http", "https") or not parts.hostname:
            raise SettingsError(f"url: {self.url!r} is not an http address; write http://host:port")
        if parts.password or parts.username:
            raise SettingsError(
                f"url: contains a password for {parts.hostname}; settings are stored with every run"
            )


@dataclass(frozen=True, kw_only=True)
class SelfTeacherSettings(Settings):
    """The policy as its own teacher, with a prompt that tells it more than the policy knows."""

    prompt: str = setting(
        "{prompt}\n\nThe right answer is: {target}",
        doc="the teacher's question instead of the episode's last user message. {prompt}, {target}, {solution} "
        "(another rollout of the prompt that succeeded), {feedback} (`Step.info['feedback']`, else the last "
        "observation) and the row's columns are replaced; a rollout that lacks one carries no loss",
    )
    weights: Literal["current", "ema", "initial"] = setting(
        "ema",
        doc="the teacher's weights: the policy's before each update (SDPO, arXiv:2601.20802), an exponential moving "
        "average of them (SDFT, arXiv:2601.19897), or those of the stage's start (OPSD, arXiv:2601.18734)",
    )
    ema_decay: float = setting(0.95, ge=0, lt=1, doc="of the moving average, per iteration")

    def check(self) -> None:
        """Check that the decay has an effect."""
        if self.weights != "ema" and self.ema_decay != 0.95:
            raise SettingsError(f"ema_decay: not used by weights {self.weights}; remove it")


@dataclass(frozen=True, kw_only=True)
class DistilledPolicySettings(PolicySettings):
    """Policy settings of a distillation: a teacher gives each token its advantage, and no rewards are compared.

    `divergence`, `beta` and `shared_weight` as in `DistillationSettings`.
    """

    divergence: Literal["sampled", "uld", "gold"] = setting("sampled", doc="loss of a token")
    beta: float | None = setting(None, ge=0, le=1, doc="gold: mixture of the divergence")
    shared_weight: float | None = setting(None, ge=0, le=1, doc="gold: weight of shared tokens")

    @property
    def compares_groups(self) -> bool:
        """False: a group may have one rollout."""
        return False

    @property
    def is_taught(self) -> bool:
        """True: the trainer needs a teacher."""
        return True

    @property
    def compares_distributions(self) -> bool:
        """True if the loss is a divergence between whole distributions."""
        return self.divergence != "sampled"


def _copy_policy_field(name: str) -> Any:
    """Copy a field of `PolicySettings` with its default, range and meaning."""
    field = PolicySettings.__dataclass_fields__[name]
    return dataclasses.field(default=field.default, metadata=field.metadata, kw_only=True)


@dataclass(frozen=True, kw_only=True)
class DistillationSettings(OptimizerSettings, LoopSettings):
    """On-policy distillation: reverse KL to a teacher per token of the policy's own rollouts (arXiv:2306.13649)."""

    teacher: TeacherSettings = setting(TeacherSettings(), doc="the model to imitate")
    self_teacher: SelfTeacherSettings | None = setting(
        None,
        doc="the policy imitates itself with a privileged prompt, without another model; default: `teacher`",
    )
    gamma: float = setting(
        0.0,
        ge=0,
        le=1,
        doc="discount of later tokens' rewards in a token's advantage; 0: a token is credited "
        "only for itself; 1: for the whole sequence's KL (arXiv:2306.08543)",
    )
    divergence: Literal["sampled", "uld", "gold"] = setting(
        "sampled",
        doc="sampled: policy gradient of the reverse KL from the sampled tokens alone; uld: L1 distance of the sorted "
        "distributions (arXiv:2402.12030); gold: divergence on the tokens of both vocabularies, uld on the others. "
        "uld and gold need a teacher that is loaded here",
    )
    beta: float | None = setting(
        None,
        ge=0,
        le=1,
        doc="gold: 0 KL(teacher || policy), 1 KL(policy || teacher), between them the generalised Jensen-Shannon "
        "divergence (arXiv:2306.13649); default: 0.5",
    )
    shared_weight: float | None = setting(
        None,
        ge=0,
        le=1,
        doc="gold: weight of the tokens of both vocabularies, the others have the rest; default: the share of the "
        "teacher's tokens that the policy has too",
    )
    learning_rate: float = _copy_policy_field("learning_rate")
    weight_decay: float = _copy_policy_field("weight_decay")
    iterations: int = _copy_policy_field("iterations")
    prompts_per_iteration: int = _copy_policy_field("prompts_per_iteration")
    group_size: int = setting(1, ge=1, le=65_536, doc="G, rollouts per prompt")
    epochs: int = _copy_policy_field("epochs")
    minibatches: int = _copy_policy_field("minibatches")
    clip_eps: float | None = _copy_policy_field("clip_eps")
    clip_eps_high: float | None = _copy_policy_field("clip_eps_high")
    loss_aggregation: Aggregation | None = _copy_policy_field("loss_aggregation")
    kl_max: float | None = _copy_policy_field("kl_max")
    importance: Literal["none", "token", "sequence", "geometric"] = setting(
        "none", doc="importance weights, as in the policy's settings"
    )
    importance_cap: float | None = setting(
        None, ge=1, doc="truncation of the importance weights; default: 2"
    )
    importance_mask: Literal["none", "token", "sequence", "geometric"] = _copy_policy_field(
        "importance_mask"
    )
    importance_low: float = _copy_policy_field("importance_low")
    importance_high: float = _copy_policy_field("importance_high")
    replay: ReplaySettings | None = _copy_policy_field("replay")
    levels: tuple[str, ...] = setting((), doc="levels of the episodes, equally weighted; () = all")
    sampling: SamplingSettings = setting(SamplingSettings(), doc="how rollouts are drawn")
    numerics: NumericsGateSettings = _copy_policy_field("numerics")
    eval_episodes: int = _copy_policy_field("eval_episodes")

    def check(self) -> None:
        """Check the settings of the policy's update, and that a served teacher is used at temperature 1."""
        self.policy()
        self._check_divergence()
        if self.self_teacher is not None:
            self._check_self_teacher()
        if self.teacher.url is not None and self.sampling.temperature != 1:
            raise SettingsError(
                f"sampling.temperature: {self.sampling.temperature} with a served teacher, whose log-probs are "
                "at temperature 1; set 1, or use a teacher that is loaded here"
            )

    def _check_divergence(self) -> None:
        """Refuse what a divergence between distributions does not use."""
        for name in ("beta", "shared_weight"):
            if self.divergence != "gold" and getattr(self, name) is not None:
                raise SettingsError(
                    f"{name}: not used by divergence {self.divergence}; remove it, or set divergence: gold"
                )
        if self.divergence == "sampled":
            return
        if self.teacher.url is not None:
            raise SettingsError(
                f"divergence: {self.divergence} compares distributions over the whole vocabulary, which a server does "
                "not return; set sampled, or use a teacher that is loaded here"
            )
        if self.self_teacher is not None:
            raise SettingsError(
                f"divergence: {self.divergence} with self_teacher, which scores the sampled tokens; remove one of them"
            )
        defaults = {field.name: field.default for field in dataclasses.fields(self)}
        unused = ("gamma", "clip_eps", "clip_eps_high", "importance", "importance_mask", "replay")
        for name in unused:
            if getattr(self, name) != defaults[name]:
                raise SettingsError(
                    f"{name}: not used by divergence {self.divergence}, whose gradient is that of each position's "
                    "divergence and no policy gradient; remove it, or set divergence: sampled"
                )

    def _check_self_teacher(self) -> None:
        """Refuse a second teacher, and what the policy as its own teacher cannot work with."""
        assert self.self_teacher is not None
        if self.teacher.model is not None or self.teacher.url is not None:
            raise SettingsError(
                "self_teacher: the policy teaches itself, but teacher names a model; remove one of the two"
            )
        if self.replay is not None:
            raise SettingsError(
                "replay: rollouts of earlier iterations have no prompt of self_teacher; remove it"
            )
        if self.launch.kind != "in_process" and self.self_teacher.weights != "current":
            raise SettingsError(
                f"self_teacher.weights: {self.self_teacher.weights} swaps in other weights for a pass, which needs a "
                "single trainer process; set current, or leave launch.kind out"
            )

    def policy(self) -> DistilledPolicySettings:
        """Build the settings of the policy-gradient trainer that distils."""
        policy_names = {field.name for field in dataclasses.fields(PolicySettings)} - {"gamma"}
        shared = {
            field.name: getattr(self, field.name)
            for field in dataclasses.fields(self)
            if field.name in policy_names
        }
        curriculum: tuple[CurriculumStage, ...] = ()
        if self.levels:
            curriculum = (CurriculumStage(name="all", levels=dict.fromkeys(self.levels, 1.0)),)
        return DistilledPolicySettings(
            **shared,
            gamma=self.gamma,
            curriculum=curriculum,
            divergence=self.divergence,
            beta=self.beta,
            shared_weight=self.shared_weight,
        )
