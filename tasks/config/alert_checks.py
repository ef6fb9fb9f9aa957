"""Check of `tracking.alerts`: a condition on a metric that nothing logs can never come true."""

from __future__ import annotations

import re
from collections.abc import Iterator

from rl_core.curriculum.watched_metrics import watched_range
from rl_core.errors import nearest
from tasks.config.problems import Problem
from tasks.config.settings import PipelineSettings

__all__ = ["unlogged_alerts"]


def unlogged_alerts(settings: PipelineSettings) -> Iterator[Problem]:
    """Alerts on names that are not in the metric reference, for warnings: stages of one's own may log any."""
    if not settings.tracking.alerts:
        return
    from rl_core.analysis.metric_reference import GROUPS  # imports pandas

    names = [metric.name for group in GROUPS for metric in group.metrics]
    patterns = [re.compile("[^/]+".join(map(re.escape, re.split(r"\{\w+\}", name)))) for name in names]
    plain = [name for name in names if "{" not in name]
    policy = settings.stages.policy
    for alert in settings.tracking.alerts:
        is_known = alert.startswith("online/") or any(pattern.fullmatch(alert) for pattern in patterns)
        if not is_known and (policy is None or watched_range(alert, policy) is None):
            yield Problem(
                ("tracking", "alerts", alert), f"no stage logs a metric of this name; {nearest(alert, plain)}"
            )
