"""Every metric that the code logs: name, unit, meaning, and the values that call for action.

The metric reference of the documentation is generated from this table, and a test compares it with the names that
training really logs. A name may hold fields: `{level}` stands for a level of the environment, `{model}` for a model of
the run, `{component}` for a component of the reward (of an import path with `.` for `:`).
"""

from __future__ import annotations

from rl_core.analysis.evaluation_metrics import ANALYSIS, EVALUATION, EXPORT, PROMOTION
from rl_core.analysis.metric_rows import Metric, MetricGroup
from rl_core.analysis.policy_metrics import POLICY, THOUGHTS, VALUE
from rl_core.analysis.run_metrics import DATA, PERF, PIPELINE, RUN, SYSTEM
from rl_core.analysis.training_metrics import CURRICULUM, REWARD, TOOL, TRAINING

__all__ = ["GROUPS", "Metric", "MetricGroup"]

GROUPS: tuple[MetricGroup, ...] = (
    TRAINING,
    EVALUATION,
    REWARD,
    POLICY,
    VALUE,
    CURRICULUM,
    TOOL,
    THOUGHTS,
    PERF,
    SYSTEM,
    RUN,
    DATA,
    EXPORT,
    PROMOTION,
    ANALYSIS,
    PIPELINE,
)
