"""The typed settings of a pipeline in addition to those of rl_core: tracking, promotion, stages, retries.

Ranges and meanings are declared once, in `setting(...)`, as in rl_core/settings.
"""

from __future__ import annotations

import dataclasses
import json
import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal
from urllib.parse import urlsplit

from rl_core.curriculum.watched_metrics import include_rewards
from rl_core.errors import SettingsError, suggest_name
from rl_core.settings import (
    AnalysisSettings,
    DataSettings,
    DistillationSettings,
    EnvironmentSettings,
    EvaluationSettings,
    ExportSettings,
    GgufSettings,
    MetricCondition,
    MixedEnvironmentSettings,
    ModelSettings,
    NetworkSettings,
    OnlineSettings,
    PolicySettings,
    PreferenceSettings,
    RatingSettings,
    RewardModelSettings,
    ServingSettings,
    Settings,
    SFTSettings,
    SuitesSettings,
    ThoughtsSettings,
    setting,
)
from rl_core.settings.common import MIXTURE_ENVIRONMENT, build_mixture_settings, check_mixture
from rl_core.settings.deprecated_keys import read_deprecated_value
from rl_core.settings.services import ALERTS_DOC, SINKS_DOC, check_alerts, check_sinks
from tasks import stage_registry
from tasks.mlflow_environment import STORE_SCHEMES

# In the order in which they run, without custom stages (`stage_registry.list_stage_names()`).
STAGES = stage_registry.list_stage_names()
if TYPE_CHECKING:
    StageName = str
else:
    StageName = Literal[STAGES]  # a choice in Prefect's form

# Folders of servers and logs in the output folder, next to those of pipelines.
_RESERVED_NAMES = ("logs", "mlflow", "operations", "prefect")
_PIPELINE_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,63}")


def _check_pipeline_name(field: str, name: str) -> None:
    if not _PIPELINE_NAME.fullmatch(name) or ".." in name:
        raise SettingsError(
            f"{field}: {name[:80]!r} must be 1 to 64 of letters, digits, '.', '_' and '-', starting with a letter or "
            "digit (it names folders and models, so no path separators and no '..')"
        )


@dataclass(frozen=True, kw_only=True)
class TrackingSettings(Settings):
    """Tracking store, experiment and registered model of a pipeline."""

    uri: str | None = setting(
        None,
        doc="MLflow server or database; unset: MLFLOW_TRACKING_URI, else sqlite in the output folder",
    )
    experiment: str | None = setting(None, doc="MLflow experiment; unset: the pipeline's name")
    registered_model: str | None = setting(
        None, doc="name in the model registry; unset: the pipeline's name"
    )
    traces: int = setting(
        20, ge=0, le=10_000, doc="evaluation episodes logged as MLflow traces, per evaluated model"
    )
    system_metrics_seconds: float = setting(
        5.0, ge=0, doc="seconds between samples of CPU, memory, GPU; 0 = off"
    )
    records_megabytes: float = setting(
        50.0,
        ge=0,
        le=1e6,
        doc="largest file (MB) of reward records, metric history or pairs from rollouts that is stored as an artifact "
        "of its stage's run; larger files are only recorded as data sets",
    )
    sinks: tuple[str, ...] = setting((), doc=SINKS_DOC)
    alerts: dict[str, str] = setting({}, doc=ALERTS_DOC)

    def check(self) -> None:
        """Check that MLflow accepts the store, that it contains no password, and that names are usable."""
        if self.registered_model is not None:
            _check_pipeline_name("registered_model", self.registered_model)
        if self.experiment is not None and not (
            self.experiment.strip() and self.experiment.isprintable()
        ):
            raise SettingsError(f"experiment: {self.experiment!r} must be printable text")
        check_sinks(self.sinks)
        check_alerts(self.alerts)
        if self.uri is None:
            return
        try:
            parts = urlsplit(self.uri)
        except ValueError as error:
            raise SettingsError(f"uri: {self.uri!r} is not an address: {error}") from error
        if parts.scheme.split("+")[0] not in STORE_SCHEMES:
            raise SettingsError(
                f"uri: {self.uri!r} is not a store that MLflow accepts; use http://host:port, "
                "sqlite:///absolute/path.db or postgresql://..., or leave it out for a sqlite file in the output folder"
            )
        if parts.password:
            raise SettingsError(
                f"uri: contains a password for {parts.hostname}; settings are stored with every run, so set the "
                "environment variable MLFLOW_TRACKING_URI instead and leave this key out"
            )


@dataclass(frozen=True, kw_only=True)
class PromotionSettings(Settings):
    """The promotion gate: conditions under which the alias `champion` moves to the new model."""

    min_gain: float = setting(
        0.0, ge=-1, le=1, doc="the lower bound of the interval of the gain must be above this"
    )
    min_success: float = setting(0.5, ge=0, le=1, doc="success rate that the first champion needs")
    metric: Literal["success", "reward"] = setting(
        "success", doc="outcome of an episode by which challenger and champion are compared"
    )
    alpha: float = setting(
        0.05,
        gt=0,
        lt=0.5,
        doc="probability of promoting a model without the gain, over all attempts on the same episodes",
    )
    repeated_attempts: Literal["spend", "fresh", "off"] = setting(
        "spend",
        doc="spend: attempt k on the same episodes is tested at alpha / (k (k + 1)); fresh: each attempt plays new "
        "held-out episodes as long as there are any, then spend; off: each attempt is tested as if it were the first",
    )
    min_episodes: int = setting(
        50, ge=1, doc="episodes that a promotion needs, including that of the first champion"
    )
    min_discordant: int = setting(
        10,
        ge=0,
        doc="episodes with different outcomes that a promotion needs (ignored if min_gain is below 0)",
    )
    bootstrap_samples: int = setting(
        2000, ge=100, le=1_000_000, doc="resamples of the paired difference"
    )
    confidence: float = setting(0.95, gt=0.5, lt=1, doc="confidence level of the interval")
    max_environment_loss: float | None = setting(
        None,
        ge=0,
        le=1,
        doc="for several environments: each must show, by interval and test, that it lost less than this (0.05 = 5 "
        "points); unset: only the total decides",
    )
    metrics: dict[str, MetricCondition] = setting(
        {},
        doc="further conditions, by the name of a metric of stages.suites: lm_eval/TASK/METRIC, "
        "inspect/TASK/SCORER.METRIC",
    )
    approve: Literal["auto", "manual"] = setting(
        "auto", doc="manual: a model that passes the gate waits for a person's approval"
    )
    approval_timeout_seconds: float = setting(
        86_400.0, gt=0, doc="after this time without an approval the model is rejected"
    )


@dataclass(frozen=True, kw_only=True)
class RetrainSettings(Settings):
    """Triggers and options of `posttrain retrain`, and the margin by which a champion counts as worse."""

    start: Literal["champion", "base"] = setting(
        "champion", doc="initial policy: the champion, or the model of the settings"
    )
    min_new_rows: int = setting(
        1, ge=1, doc="number of rows unseen by the champion that triggers a retraining"
    )
    repeat: Literal["new", "all"] = setting(
        "new",
        doc="new: sft and preference run only if their data file is new; all: always",
    )
    new_episodes: bool = setting(
        True,
        doc="each retraining generates new episodes with a new seed (never if data files are split)",
    )
    margin: float = setting(
        0.02,
        ge=0,
        lt=1,
        doc="a champion counts as worse if the upper 95% bound of its change in success is below minus this",
    )


@dataclass(frozen=True, kw_only=True)
class CustomStageSettings(Settings):
    """A user-defined stage: see "Stage" in docs/bring-your-own.md."""

    use: str | None = setting(
        None,
        is_code=True,
        doc="import path or file of its CustomStage (package.module:STAGE, polish.py:STAGE); unset: the installed "
        "stage of that name (entry points `posttrain.stages`)",
    )
    settings: dict[str, Any] = setting({}, doc="settings of the stage")


@dataclass(frozen=True, kw_only=True)
class StagesSettings(Settings):
    """The stages of the pipeline, in this order; a stage left out (or null) is skipped, `{}` means its defaults."""

    prepare_data: DataSettings | None = setting(
        None, doc="read or generate the data, check and split it"
    )
    sft: SFTSettings | None = setting(None, doc="supervised fine-tuning on the demonstrations")
    distill: DistillationSettings | None = setting(
        None, doc="on-policy distillation from a teacher"
    )
    preference: PreferenceSettings | None = setting(
        None, doc="preference optimisation (DPO and related losses) on pairs"
    )
    reward_model: RewardModelSettings | None = setting(
        None, doc="reward model from preference pairs"
    )
    policy: PolicySettings | None = setting(None, doc="policy optimisation from rewards")
    thoughts: ThoughtsSettings | None = setting(
        None, doc="thoughts before answers, rewarded by how much they help"
    )
    network: NetworkSettings | None = setting(
        None, doc="networks for plain observations, trained by PPO; independent of the other stages"
    )
    evaluate: EvaluationSettings | None = setting(
        None, doc="held-out episodes, for every model of the run"
    )
    suites: SuitesSettings | None = setting(
        None, doc="tasks of lm-eval and inspect-ai, for every model of the run"
    )
    analyze: AnalysisSettings | None = setting(None, doc="analysis of the evaluated trajectories")
    export: ExportSettings | None = setting(
        None,
        doc="compare the written models with the trained and evaluated ones; unset: its defaults if promote runs",
    )
    promote: PromotionSettings | None = setting(
        None, doc="comparison with the champion, and promotion"
    )
    gguf: GgufSettings | None = setting(
        None, doc="GGUF file of the new model, only once it is promoted if promote runs"
    )
    custom: dict[str, CustomStageSettings | None] = setting({}, doc="user-defined stages, by name")

    def check(self) -> None:
        """Add the stage `export` if there is a promotion, which needs a proof of export."""
        if self.promote is not None and self.export is None:
            object.__setattr__(self, "export", ExportSettings())

    def __getattr__(self, name: str) -> Any:
        """Return settings of a user-defined stage by name: typed once it is registered, else the block as written."""
        if name == "own":
            return read_deprecated_value(self, name)
        block = self.__dict__.get("custom", {}).get(name)
        if block is None and name not in stage_registry.list_stage_names():
            raise AttributeError(f"there is no stage '{name}'")
        is_registered = name in stage_registry.list_stage_names()
        custom = stage_registry.find_stage(name).custom if is_registered else None
        if block is None or custom is None:
            return block
        from tasks.config.schema import parse_settings

        typed, problems = parse_settings(custom.settings, block.settings)
        return block if problems else typed  # loading the config reported the problems

    def replace_stages(self, changes: Mapping[str, Any]) -> StagesSettings:
        """Replace the settings of some stages, by name; None removes the stage."""
        custom = dict(self.custom)
        for name in [name for name in changes if name in custom]:
            value, block = changes[name], custom[name]
            if value is None or block is None:
                del custom[name]
            else:
                values = json.loads(json.dumps(dataclasses.asdict(value)))
                custom[name] = dataclasses.replace(block, settings=values)
        fields = {field.name for field in dataclasses.fields(self)}
        return dataclasses.replace(
            self, **{name: changes[name] for name in changes if name in fields}, custom=custom
        )

    @property
    def active(self) -> tuple[StageName, ...]:
        """The stages that run, in order."""
        known = stage_registry.list_stage_names()
        registered = [name for name in known if getattr(self, name) is not None]
        unregistered = [
            name for name, block in self.custom.items() if block is not None and name not in known
        ]
        return (*registered, *unregistered)

    @property
    def preference_uses(self) -> tuple[str, ...]:
        """Uses of the preference rows: a loss, the reward model, or both (`rl_core.data.row_uses.explain_misfit`)."""
        losses = (self.preference.loss,) if self.preference is not None else ()
        return losses if self.reward_model is None else (*losses, self.reward_model.use)


@dataclass(frozen=True, kw_only=True)
class RunSettings(Settings):
    """Execution of the stages: retries, limits, waiting for locks; affects no result."""

    wait_seconds: float = setting(
        0.0, ge=0, doc="how long to wait while another run writes into the same folder; 0 = refuse"
    )
    retries: int = setting(
        2, ge=0, le=100, doc="retries after transient errors (never after errors in settings)"
    )
    retry_delay_seconds: float = setting(
        10.0, ge=0, doc="wait before the first retry; doubles with each retry"
    )
    timeout_seconds: float | None = setting(
        None, gt=0, doc="time limit of one stage; unset: no limit"
    )
    timeouts: dict[str, float] = setting(
        {}, doc="time limits in seconds by stage name, instead of timeout_seconds"
    )

    def find_timeout(self, stage: str) -> float | None:
        """Return the seconds that the stage may take; None = no limit."""
        return self.timeouts.get(stage, self.timeout_seconds)

    def check(self) -> None:
        """Check that timeouts are positive."""
        for stage, seconds in self.timeouts.items():
            if seconds <= 0:
                raise SettingsError(f"timeouts.{stage}: {seconds} must be greater than 0")


@dataclass(frozen=True, kw_only=True)
class PipelineSettings(Settings):
    """One pipeline, as `posttrain run` runs it."""

    name: str = setting(doc="name of the pipeline, its folder, experiment and model")
    seed: int = setting(0, ge=0, lt=2**31, doc="source of all randomness of the run")
    seeds: dict[str, int] = setting(
        {},
        doc="seeds of single training stages by name, instead of seed: repeats one stage on the same data",
    )
    output: str = setting("outputs", doc="folder of all output")
    threads: int | Literal["auto"] | None = setting(
        None,
        ge=1,
        le=1024,
        doc="CPU threads of torch; unset: torch decides; auto: as many as there are free processors at the run's start",
    )
    environment: EnvironmentSettings = setting(EnvironmentSettings(), doc="where the policy acts")
    environments: tuple[MixedEnvironmentSettings, ...] = setting(
        (), doc="several environments in which the policy learns together, instead of environment"
    )
    model: ModelSettings = setting(ModelSettings(), doc="the initial policy")
    tracking: TrackingSettings = setting(TrackingSettings(), doc="where results are tracked")
    run: RunSettings = setting(RunSettings(), doc="retries and timeouts")
    retrain: RetrainSettings = setting(RetrainSettings(), doc="retraining when there is new data")
    serving: ServingSettings | None = setting(
        None, doc="the server of `posttrain serve`; `{}` = its defaults"
    )
    stages: StagesSettings = setting(doc="the stages to run")
    prefer: RatingSettings | None = setting(
        None,
        doc="the page of `posttrain label`, where people compare answers; `{}` = its defaults",
    )
    online: OnlineSettings | None = setting(
        None, doc="learning from served answers, `posttrain serve --learn`; `{}` = its defaults"
    )

    def check(self) -> None:
        """Check that the name is one path component and that there is a stage to run; mix the environments."""
        _check_pipeline_name("name", self.name)
        if self.name.casefold() in _RESERVED_NAMES:
            raise SettingsError(
                f"name: {self.name!r} is reserved: that folder of the output contains other files (reserved are "
                f"{', '.join(_RESERVED_NAMES)}); choose another name"
            )
        if not self.output.strip() or "\0" in self.output:
            raise SettingsError(f"output: {self.output!r} must name a folder")
        self.mix_environments()
        stages = {*stage_registry.list_stage_names(), *self.stages.custom}
        for stage in self.run.timeouts:
            if stage not in stages:
                raise SettingsError(
                    f"run.timeouts.{stage}: no such stage; {suggest_name(stage, stages)}"
                )
        for stage, number in self.seeds.items():
            if stage not in (*stage_registry.list_training_stages(), *self.stages.custom):
                raise SettingsError(
                    f"seeds.{stage}: no such training stage; "
                    f"{suggest_name(stage, stage_registry.list_training_stages())}"
                )
            if not 0 <= number < 2**31:
                raise SettingsError(f"seeds.{stage}: {number} must be at least 0 and below 2^31")
        if not self.stages.active:
            raise SettingsError(
                f"stages: there is none; name at least one of {', '.join(stage_registry.list_stage_names())} "
                "(`sft: {}` = defaults)"
            )

    def mix_environments(self) -> None:
        """Set `environment` to the mixture of `environments`, if there are any. Raises: SettingsError."""
        if not self.environments:
            return
        if (
            self.environment.name != MIXTURE_ENVIRONMENT
            and self.environment != EnvironmentSettings()
        ):
            raise SettingsError("environments: environment is set, too; set one of the two")
        try:
            check_mixture(self.environments)
        except SettingsError as error:
            raise SettingsError(f"environments.{error}") from error
        object.__setattr__(self, "environment", build_mixture_settings(self.environments))

    def list_environment_blocks(
        self,
    ) -> list[tuple[tuple[str | int, ...], EnvironmentSettings]]:
        """List the environments, each with the key of its block."""
        if not self.environments:
            return [(("environment",), self.environment)]
        return [
            (("environments", index), EnvironmentSettings(name=entry.name, options=entry.options))
            for index, entry in enumerate(self.environments)
        ]

    def find_stage_seed(self, stage: str) -> int:
        """Return the seed of a stage: from `seeds`, else the pipeline's."""
        return self.seeds.get(stage, self.seed)

    @property
    def uses_reward_model(self) -> bool:
        """True if a reward of the policy, or of one of its environments, is that of a reward model."""
        policy = self.stages.policy
        if policy is None:
            return False
        names = [name for entry in self.environments for name in entry.rewards]
        return include_rewards(policy, names).uses_reward_model

    @property
    def experiment(self) -> str:
        """Name of the MLflow experiment."""
        return self.tracking.experiment or self.name

    @property
    def registered_model(self) -> str:
        """Name in the model registry."""
        return self.tracking.registered_model or self.name
