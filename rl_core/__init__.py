"""Post-training of language-model policies: the Python API.

    import rl_core

    def reward(trajectories):
        return [float(t.turns[-1].action.strip() == t.row["answer"]) for t in trajectories]

    trainer = rl_core.grpo(model="path-or-hub-name", prompts="questions.jsonl", reward=reward, output="out")
    trainer.run()
    trainer.save("out/model")

Train with `grpo`, `ppo`, `policy_gradient`, `distill`, `sft`, `dpo` or `reward_model`; train networks on plain
observations with `network_ppo`. Then use `evaluate`, `generate`, `load_policy`. A task of several turns is an
`Environment`. Read files of a run as DataFrames with `read_metrics`, `read_rewards`, `read_trajectories`; draw its
curves with `plot_metrics`.

Names are imported on first use (PEP 562), so that `import rl_core` itself loads neither torch nor transformers.
"""

from __future__ import annotations

import importlib
import sys
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from rl_core.analysis.runner import AnalysisResult, analyze
    from rl_core.api.custom_functions import RewardSource
    from rl_core.api.evaluation import evaluate, generate
    from rl_core.api.networks import NetworkTraining, network_ppo
    from rl_core.api.on_policy import distill, grpo, policy_gradient, ppo
    from rl_core.api.policy import ModelSource, Policy, create_policy, load_policy
    from rl_core.api.supervised import dpo, reward_model, sft
    from rl_core.api.training import Training
    from rl_core.cpu.openmp_spin import free_processors
    from rl_core.data.records import RowSource
    from rl_core.environments import (
        Demonstration,
        Environment,
        Episode,
        Step,
        Tool,
        Toolset,
        make_environment,
    )
    from rl_core.environments.agent import Agent, AgentCall, AgentClient, AgentResult
    from rl_core.environments.mixture import MixtureEnvironment, MixturePart
    from rl_core.environments.prompts import Prompts
    from rl_core.environments.two_player import (
        GameOutcome,
        TwoPlayerEnvironment,
        TwoPlayerGame,
    )
    from rl_core.errors import (
        BackendError,
        CallbackError,
        CheckFailed,
        CheckpointError,
        CorruptError,
        DataError,
        EnvironmentFault,
        ExportMismatch,
        FolderBusy,
        ModelError,
        NonFiniteError,
        NonFiniteTensor,
        NothingLearned,
        OutOfMemory,
        PosttrainError,
        RecordsError,
        ResumeRefused,
        RewardError,
        SamplerMismatch,
        ServiceError,
        SettingsError,
        StageTimeout,
        Stopped,
        ToolMisuse,
        UnknownAnswer,
        WorkerFailed,
    )
    from rl_core.evaluation import Evaluation, compare
    from rl_core.networks.actor_critic import (
        ActionSpace,
        ActorCritic,
        NetworkShape,
        PolicyNetwork,
        ValueNetwork,
    )
    from rl_core.networks.network_files import load_network
    from rl_core.networks.step_buffer import NetworkBatch, StepBuffer
    from rl_core.readers import (
        iter_metrics,
        iter_rewards,
        plot_metrics,
        read_analysis,
        read_history,
        read_metrics,
        read_rewards,
        read_trajectories,
        trajectory_frame,
    )
    from rl_core.rewards.judges.calibration import JudgeCalibration, calibrate_judge
    from rl_core.rewards.orchestrator import RewardOrchestrator
    from rl_core.rewards.user_function import RewardFunction
    from rl_core.settings import (
        AnalysisSettings,
        CodeSettings,
        CoherenceSettings,
        CriticSettings,
        CuriositySettings,
        CurriculumStage,
        DataSettings,
        DistillationSettings,
        EnvironmentSettings,
        EvaluationSettings,
        ExactSettings,
        ExitCondition,
        ExportSettings,
        FormatSettings,
        GgufSettings,
        JudgeCriterion,
        JudgeSettings,
        KLBandSettings,
        LaunchSettings,
        LearningRateControlSettings,
        LengthSettings,
        LoopSettings,
        LoraSettings,
        MathSettings,
        MetricCondition,
        MixedEnvironmentSettings,
        ModelSettings,
        NetworkSettings,
        NumericSettings,
        NumericsGateSettings,
        OnlineAuditSettings,
        OnlineBufferSettings,
        OnlineDriftSettings,
        OnlineGateSettings,
        OnlineLabelSettings,
        OnlineRolloutSettings,
        OnlineServiceSettings,
        OnlineSettings,
        OnlineUpdateSettings,
        OptimizerSettings,
        PolicySettings,
        PreferenceSettings,
        ProcessRewardSettings,
        RatingSettings,
        ReferenceSettings,
        RegexSettings,
        ReplaySettings,
        RewardModelSettings,
        RewardSettings,
        RoleBaselineSettings,
        RollbackSettings,
        RolloutServerSettings,
        RolloutSettings,
        SamplingSettings,
        SelfPlaySettings,
        SelfTeacherSettings,
        ServiceEngineSettings,
        ServiceServerSettings,
        ServiceSettings,
        ServiceWorkerSettings,
        ServingSettings,
        Settings,
        SFTSettings,
        SuitesSettings,
        TeacherSettings,
        ThoughtsSettings,
        ToolUseSettings,
        TurnCreditSettings,
        VotingSettings,
    )
    from rl_core.trackers import (
        CsvTracker,
        JsonlTracker,
        TensorBoardTracker,
        TerminalTracker,
        TrackerSource,
    )
    from rl_core.tracking import MemoryTracker, Tracker
    from rl_core.training.callbacks import Callback, Trainer, TrainingEvent
    from rl_core.training.loop_state import LoopOutcome
    from rl_core.types import Message, Rollout, RolloutGroup, StopReason, ToolCall, Trajectory, Turn

__all__ = [
    "ActionSpace",
    "ActorCritic",
    "Agent",
    "AgentCall",
    "AgentClient",
    "AgentResult",
    "NetworkBatch",
    "NetworkSettings",
    "NetworkShape",
    "NetworkTraining",
    "StepBuffer",
    "PolicyNetwork",
    "ValueNetwork",
    "load_network",
    "network_ppo",
    "AnalysisResult",
    "AnalysisSettings",
    "BackendError",
    "Callback",
    "CallbackError",
    "CheckFailed",
    "CheckpointError",
    "CoherenceSettings",
    "CorruptError",
    "CriticSettings",
    "CsvTracker",
    "CuriositySettings",
    "CurriculumStage",
    "DataError",
    "DataSettings",
    "Demonstration",
    "DistillationSettings",
    "Environment",
    "EnvironmentFault",
    "EnvironmentSettings",
    "Episode",
    "Evaluation",
    "EvaluationSettings",
    "ExitCondition",
    "ExportMismatch",
    "ExportSettings",
    "FolderBusy",
    "FormatSettings",
    "GgufSettings",
    "JsonlTracker",
    "LaunchSettings",
    "LearningRateControlSettings",
    "LengthSettings",
    "LoopOutcome",
    "LoopSettings",
    "LoraSettings",
    "MemoryTracker",
    "Message",
    "ModelSettings",
    "ModelSource",
    "NonFiniteError",
    "NonFiniteTensor",
    "NothingLearned",
    "OptimizerSettings",
    "OutOfMemory",
    "Policy",
    "PolicySettings",
    "PosttrainError",
    "PreferenceSettings",
    "ProcessRewardSettings",
    "Prompts",
    "RecordsError",
    "RatingSettings",
    "ReferenceSettings",
    "ReplaySettings",
    "ModelError",
    "ResumeRefused",
    "RewardError",
    "SamplerMismatch",
    "RewardFunction",
    "RewardModelSettings",
    "RewardOrchestrator",
    "RewardSettings",
    "RewardSource",
    "RoleBaselineSettings",
    "RollbackSettings",
    "RolloutServerSettings",
    "RolloutSettings",
    "Rollout",
    "RolloutGroup",
    "RowSource",
    "SFTSettings",
    "SamplingSettings",
    "Settings",
    "ServiceEngineSettings",
    "ServiceError",
    "ServiceServerSettings",
    "ServiceSettings",
    "ServingSettings",
    "ServiceWorkerSettings",
    "SettingsError",
    "StageTimeout",
    "Step",
    "StopReason",
    "Stopped",
    "TensorBoardTracker",
    "TerminalTracker",
    "TeacherSettings",
    "SuitesSettings",
    "ThoughtsSettings",
    "Tool",
    "ToolCall",
    "ToolMisuse",
    "UnknownAnswer",
    "ToolUseSettings",
    "SelfPlaySettings",
    "SelfTeacherSettings",
    "GameOutcome",
    "TurnCreditSettings",
    "TwoPlayerEnvironment",
    "TwoPlayerGame",
    "VotingSettings",
    "Toolset",
    "Tracker",
    "TrackerSource",
    "Trainer",
    "Training",
    "TrainingEvent",
    "Trajectory",
    "Turn",
    "WorkerFailed",
    "analyze",
    "calibrate_judge",
    "compare",
    "create_policy",
    "distill",
    "dpo",
    "evaluate",
    "free_processors",
    "generate",
    "grpo",
    "iter_metrics",
    "iter_rewards",
    "load_policy",
    "make_environment",
    "plot_metrics",
    "policy_gradient",
    "ppo",
    "read_analysis",
    "read_history",
    "read_metrics",
    "read_rewards",
    "read_trajectories",
    "reward_model",
    "sft",
    "trajectory_frame",
    "CodeSettings",
    "ExactSettings",
    "JudgeCalibration",
    "JudgeCriterion",
    "JudgeSettings",
    "KLBandSettings",
    "MathSettings",
    "MetricCondition",
    "MixedEnvironmentSettings",
    "MixtureEnvironment",
    "MixturePart",
    "NumericSettings",
    "NumericsGateSettings",
    "OnlineAuditSettings",
    "OnlineBufferSettings",
    "OnlineDriftSettings",
    "OnlineGateSettings",
    "OnlineLabelSettings",
    "OnlineRolloutSettings",
    "OnlineServiceSettings",
    "OnlineSettings",
    "OnlineUpdateSettings",
    "RegexSettings",
]

# module -> its public names; name:alias if the public name differs
_PUBLIC_NAMES = {
    "rl_core.analysis.runner": "AnalysisResult analyze",
    "rl_core.api.on_policy": "distill grpo policy_gradient ppo",
    "rl_core.api.networks": "NetworkTraining network_ppo",
    "rl_core.api.supervised": "dpo reward_model sft",
    "rl_core.api.evaluation": "evaluate generate",
    "rl_core.api.policy": "ModelSource Policy create_policy load_policy",
    "rl_core.api.custom_functions": "RewardSource",
    "rl_core.api.training": "Training",
    "rl_core.cpu.openmp_spin": "free_processors",
    "rl_core.data.records": "RowSource",
    "rl_core.environments": "Demonstration Environment Episode Step Tool Toolset make_environment",
    "rl_core.environments.agent": "Agent AgentCall AgentClient AgentResult",
    "rl_core.environments.mixture": "MixtureEnvironment MixturePart",
    "rl_core.environments.prompts": "Prompts",
    "rl_core.environments.two_player": "GameOutcome TwoPlayerEnvironment TwoPlayerGame",
    "rl_core.errors": (
        "BackendError CallbackError CheckFailed CheckpointError CorruptError DataError EnvironmentFault ExportMismatch "
        "FolderBusy ModelError NonFiniteError NonFiniteTensor NothingLearned OutOfMemory PosttrainError RecordsError "
        "ResumeRefused RewardError SamplerMismatch ServiceError SettingsError StageTimeout Stopped ToolMisuse "
        "UnknownAnswer WorkerFailed"
    ),
    "rl_core.evaluation": "Evaluation compare",
    "rl_core.networks.actor_critic": "ActionSpace ActorCritic NetworkShape PolicyNetwork ValueNetwork",
    "rl_core.networks.network_files": "load_network",
    "rl_core.networks.step_buffer": "NetworkBatch StepBuffer",
    "rl_core.readers": (
        "iter_metrics iter_rewards plot_metrics read_analysis read_history read_metrics read_rewards "
        "read_trajectories trajectory_frame"
    ),
    "rl_core.rewards.judges.calibration": "JudgeCalibration calibrate_judge",
    "rl_core.rewards.orchestrator": "RewardFunction RewardOrchestrator",
    "rl_core.settings": (
        "AnalysisSettings CodeSettings CoherenceSettings CriticSettings CuriositySettings CurriculumStage DataSettings "
        "DistillationSettings EnvironmentSettings EvaluationSettings ExactSettings ExitCondition ExportSettings "
        "FormatSettings GgufSettings "
        "JudgeCriterion JudgeSettings KLBandSettings LaunchSettings LearningRateControlSettings "
        "LengthSettings LoopSettings LoraSettings MathSettings MetricCondition MixedEnvironmentSettings ModelSettings "
        "NetworkSettings NumericSettings "
        "NumericsGateSettings "
        "OptimizerSettings PolicySettings PreferenceSettings ProcessRewardSettings RegexSettings "
        "RatingSettings ReferenceSettings ReplaySettings RewardModelSettings RewardSettings RollbackSettings "
        "RolloutServerSettings RolloutSettings SFTSettings "
        "RoleBaselineSettings SamplingSettings SelfPlaySettings SelfTeacherSettings "
        "OnlineAuditSettings OnlineBufferSettings OnlineDriftSettings OnlineGateSettings OnlineLabelSettings "
        "OnlineRolloutSettings OnlineServiceSettings OnlineSettings OnlineUpdateSettings VotingSettings "
        "ServiceEngineSettings ServiceServerSettings ServiceSettings ServiceWorkerSettings ServingSettings Settings "
        "SuitesSettings TeacherSettings ThoughtsSettings ToolUseSettings TurnCreditSettings"
    ),
    "rl_core.trackers": "CsvTracker JsonlTracker TensorBoardTracker TerminalTracker TrackerSource",
    "rl_core.tracking": "MemoryTracker Tracker",
    "rl_core.training.callbacks": "Callback Trainer TrainingEvent",
    "rl_core.training.loop_state": "LoopOutcome",
    "rl_core.types": "Message Rollout RolloutGroup StopReason ToolCall Trajectory Turn",
}
_EXPORTS = {
    entry.partition(":")[2] or entry: (module, entry.partition(":")[0])
    for module, entries in _PUBLIC_NAMES.items()
    for entry in entries.split()
}


def __getattr__(name: str) -> Any:
    if name not in _EXPORTS:
        if not name.startswith("_"):
            from rl_core.api.trl_arguments import explain_trl_class
            from rl_core.errors import suggest_name

            advice = explain_trl_class(name) or suggest_name(name, __all__)
            raise AttributeError(f"module 'rl_core' has no attribute '{name}'; {advice}")
        raise AttributeError(f"module 'rl_core' has no attribute '{name}'")
    if "ipykernel" in sys.modules and "tqdm.auto" not in sys.modules:
        from rl_core.models.quiet_loading import ignore_missing_widgets

        ignore_missing_widgets()
    module, inner = _EXPORTS[name]
    value = getattr(importlib.import_module(module), inner)
    globals()[name] = value  # later lookups do not get here
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
