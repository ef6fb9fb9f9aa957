"""Typed settings: one frozen dataclass per algorithm and part.

Defaults follow the literature, with sources where they are not common knowledge; those that depend on the model are in
`defaults.py` and filled in by `resolve_defaults`. Ranges are declared once, in `setting(...)`; they are checked on
construction and used by the configuration loader for messages and forms.
"""

from rl_core.settings.algorithms import GROUP_ALGORITHMS, Algorithm
from rl_core.settings.base import Settings, setting
from rl_core.settings.code_paths import code_paths
from rl_core.settings.critic import CriticSettings
from rl_core.settings.curriculum import CurriculumStage, ExitCondition, RollbackSettings
from rl_core.settings.distillation import DistillationSettings, TeacherSettings
from rl_core.settings.export import ExportSettings
from rl_core.settings.kl_band import KLBandSettings
from rl_core.settings.launch import LaunchSettings
from rl_core.settings.network import NetworkSettings
from rl_core.settings.numerics import NumericsGateSettings
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
from rl_core.settings.parts import (
    AnalysisSettings,
    DataSettings,
    EnvironmentSettings,
    EvaluationSettings,
    LoraSettings,
    ModelSettings,
    SamplingSettings,
)
from rl_core.settings.policy import PolicySettings
from rl_core.settings.rating import RatingSettings
from rl_core.settings.references import ReferenceSettings
from rl_core.settings.resolution import resolve_defaults
from rl_core.settings.rewards import (
    CoherenceSettings,
    CuriositySettings,
    FormatSettings,
    LengthSettings,
    RewardSettings,
    ToolUseSettings,
)
from rl_core.settings.rollouts import ReplaySettings, RolloutServerSettings, RolloutSettings
from rl_core.settings.service import (
    ServiceEngineSettings,
    ServiceServerSettings,
    ServiceSettings,
    ServiceWorkerSettings,
)
from rl_core.settings.serving import ServingSettings
from rl_core.settings.thoughts import ThoughtsSettings
from rl_core.settings.training import (
    LoopSettings,
    OptimizerSettings,
    PreferenceSettings,
    RewardModelSettings,
    SFTSettings,
)
from rl_core.settings.verifiers import (
    CodeSettings,
    ExactSettings,
    JudgeSettings,
    MathSettings,
    NumericSettings,
    RegexSettings,
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
    "FormatSettings",
    "LengthSettings",
    "JudgeSettings",
    "KLBandSettings",
    "LaunchSettings",
    "LoopSettings",
    "LoraSettings",
    "MathSettings",
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
    "PreferenceSettings",
    "RegexSettings",
    "RatingSettings",
    "ReferenceSettings",
    "ReplaySettings",
    "RewardModelSettings",
    "RollbackSettings",
    "RolloutServerSettings",
    "RolloutSettings",
    "RewardSettings",
    "SFTSettings",
    "SamplingSettings",
    "ServiceEngineSettings",
    "ServiceServerSettings",
    "ServiceSettings",
    "ServiceWorkerSettings",
    "ServingSettings",
    "Settings",
    "TeacherSettings",
    "ThoughtsSettings",
    "ToolUseSettings",
    "VotingSettings",
    "code_paths",
    "resolve_defaults",
    "setting",
]
