"""Typed settings: one frozen dataclass per algorithm and part.

Defaults follow the literature, with sources unless they are common knowledge; those that depend on the model are in
`defaults.py` and filled in by `resolve_defaults`. Ranges are declared once, in `setting(...)`; they are checked on
construction and used by the configuration loader for messages and forms.
"""

from rl_core.settings.base import (
    Settings,
    build_settings,
    iter_code_paths,
    resolve_defaults,
    setting,
)
from rl_core.settings.common import (
    AnalysisSettings,
    DataSettings,
    EnvironmentSettings,
    EvaluationSettings,
    ExportSettings,
    GgufSettings,
    LoraSettings,
    MixedEnvironmentSettings,
    ModelSettings,
    ReferenceSettings,
    SamplingSettings,
)
from rl_core.settings.credit import CriticSettings, TurnCreditSettings
from rl_core.settings.curriculum import CurriculumStage, ExitCondition, RollbackSettings
from rl_core.settings.distillation import (
    DistillationSettings,
    SelfTeacherSettings,
    TeacherSettings,
)
from rl_core.settings.network import NetworkSettings
from rl_core.settings.online import (
    OnlineAuditSettings,
    OnlineBufferSettings,
    OnlineDriftSettings,
    OnlineGateSettings,
    OnlineLabelSettings,
    OnlineRolloutSettings,
    OnlineServiceSettings,
    OnlineSettings,
    OnlineUpdateSettings,
    VotingSettings,
)
from rl_core.settings.policy import (
    GROUP_ALGORITHMS,
    Algorithm,
    KLBandSettings,
    PolicySettings,
)
from rl_core.settings.rewards import (
    CodeSettings,
    CoherenceSettings,
    CuriositySettings,
    ExactSettings,
    FormatSettings,
    JudgeCriterion,
    JudgeSettings,
    LengthSettings,
    MathSettings,
    NumericSettings,
    ProcessRewardSettings,
    RegexSettings,
    RewardSettings,
    ToolUseSettings,
)
from rl_core.settings.rollouts import (
    NumericsGateSettings,
    ReplaySettings,
    RolloutServerSettings,
    RolloutSettings,
)
from rl_core.settings.self_play import RoleBaselineSettings, SelfPlaySettings
from rl_core.settings.services import (
    RatingSettings,
    ServiceEngineSettings,
    ServiceServerSettings,
    ServiceSettings,
    ServiceWorkerSettings,
    ServingSettings,
)
from rl_core.settings.suites import MetricCondition, SuitesSettings
from rl_core.settings.thoughts import ThoughtsSettings
from rl_core.settings.training import (
    LaunchSettings,
    LearningRateControlSettings,
    LoopSettings,
    OptimizerSettings,
    PreferenceSettings,
    RewardModelSettings,
    SFTSettings,
)

__all__ = [
    "GROUP_ALGORITHMS",
    "Algorithm",
    "AnalysisSettings",
    "CodeSettings",
    "CoherenceSettings",
    "CriticSettings",
    "CuriositySettings",
    "CurriculumStage",
    "DataSettings",
    "DistillationSettings",
    "EnvironmentSettings",
    "EvaluationSettings",
    "ExactSettings",
    "ExitCondition",
    "ExportSettings",
    "GgufSettings",
    "FormatSettings",
    "LengthSettings",
    "JudgeCriterion",
    "JudgeSettings",
    "KLBandSettings",
    "LaunchSettings",
    "LearningRateControlSettings",
    "LoopSettings",
    "LoraSettings",
    "MathSettings",
    "MixedEnvironmentSettings",
    "MetricCondition",
    "ModelSettings",
    "NetworkSettings",
    "NumericsGateSettings",
    "NumericSettings",
    "OnlineAuditSettings",
    "OnlineBufferSettings",
    "OnlineDriftSettings",
    "OnlineGateSettings",
    "OnlineLabelSettings",
    "OnlineRolloutSettings",
    "OnlineServiceSettings",
    "OnlineSettings",
    "OnlineUpdateSettings",
    "OptimizerSettings",
    "PolicySettings",
    "ProcessRewardSettings",
    "PreferenceSettings",
    "RegexSettings",
    "RatingSettings",
    "ReferenceSettings",
    "ReplaySettings",
    "RewardModelSettings",
    "RoleBaselineSettings",
    "RollbackSettings",
    "RolloutServerSettings",
    "RolloutSettings",
    "RewardSettings",
    "SFTSettings",
    "SamplingSettings",
    "SelfPlaySettings",
    "SelfTeacherSettings",
    "ServiceEngineSettings",
    "ServiceServerSettings",
    "ServiceSettings",
    "ServiceWorkerSettings",
    "ServingSettings",
    "Settings",
    "SuitesSettings",
    "TeacherSettings",
    "ThoughtsSettings",
    "TurnCreditSettings",
    "ToolUseSettings",
    "VotingSettings",
    "iter_code_paths",
    "build_settings",
    "resolve_defaults",
    "setting",
]
