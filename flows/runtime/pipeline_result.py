"""Result of a pipeline run, as flows return it."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from flows.runtime.summary import result_table
from tasks.lifecycle.approval import ApprovalRequest
from tasks.pipeline.result import StageResult

__all__ = ["PipelineResult"]


@dataclass(frozen=True)
class PipelineResult:
    """Results of the stages, rows of the final table, and the pending approval, if any."""

    results: dict[str, StageResult]
    rows: list[dict[str, Any]]  # of the table
    run_url: str  # the parent run in MLflow
    seconds: float
    facts: dict[str, Any] = field(default_factory=dict)
    ok: bool = True
    waiting: ApprovalRequest | None = None  # manual approval asked for before the champion moves
    page: str = ""  # the result in Markdown, for Prefect's pages
    artifact: str = ""  # id of the Prefect artifact that shows it; "" = there is none

    def table(self, width: int | None = None) -> str:
        """Final table: stage, success with its interval, reward, tokens/s, seconds, links."""
        return result_table(self.rows, self.run_url, self.facts, width)
