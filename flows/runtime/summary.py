"""Summary of a run: result table, metrics of the parent run, description in MLflow."""

from __future__ import annotations

import io
import os
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from rich.console import Console
from rich.table import Table

from tasks.tracking import result_text

if TYPE_CHECKING:
    from tasks.pipeline.run import PipelineRun

__all__ = ["describe", "headline", "parent_metrics", "result_rows", "result_table"]


def result_rows(pipeline_run: PipelineRun) -> list[dict[str, Any]]:
    """Rows by stage: {stage, success, low, high, reward, tokens_per_second, seconds, cached, url, note}."""
    evaluated = pipeline_run.results["evaluate"].summary["models"] if "evaluate" in pipeline_run.results else {}
    rows = []
    for name, result in pipeline_run.results.items():
        row: dict[str, Any] = {
            "stage": name,
            "seconds": result.summary.get("seconds", result.seconds),
            "cached": result.cached,
            "url": pipeline_run.tracking.run_url(result.run_id) if result.run_id else "",
            "note": result.summary.get("note", ""),
            "tokens_per_second": result.summary.get("tokens_per_second"),
        }
        if name in evaluated:
            found = evaluated[name]
            if found.get("knows_success", True):
                row |= {"success": found["success"], "low": found["success_low"], "high": found["success_high"]}
            row["reward"] = found["reward"]
        if name == "reward_model":
            row |= {key: result.summary[f"accuracy{suffix}"] for key, suffix in _ACCURACY.items()}
        if name == "policy" and pipeline_run.settings.stages.policy is not None:
            row["uses_reward_model"] = "learned" in pipeline_run.settings.stages.policy.rewards
        if name == "evaluate":
            rates = [found["tokens_per_second"] for found in evaluated.values()]
            row["tokens_per_second"] = sum(rates) / len(rates) if rates else None
        rows.append(row)
    if pipeline_run.postponed:
        rows.append({"stage": "promote", "seconds": 0.0, "cached": False, "url": "", "note": pipeline_run.postponed})
    return rows


_ACCURACY = {"accuracy": "", "low": "_low", "high": "_high"}


def result_table(rows: Sequence[Mapping[str, Any]], run_url: str, facts: Mapping[str, Any], width: int | None) -> str:
    """Result table as text, with links."""
    table = Table(title=None, pad_edge=False)
    for name, justify in (
        ("stage", "left"), ("success (95% interval)", "right"), ("reward", "right"), ("tokens/s", "right"),
        ("seconds", "right"),
    ):  # fmt: skip
        table.add_column(name, justify=justify)  # type: ignore[arg-type]
    for row in rows:
        table.add_row(
            str(row["stage"]).replace("_", " "),
            _rate(row),
            "" if row.get("reward") is None else f"{row['reward']:.3f}",
            "" if not row.get("tokens_per_second") else f"{row['tokens_per_second']:,.0f}",
            "cached" if row["cached"] else f"{row['seconds']:.1f}",
        )
    console = Console(file=io.StringIO(), width=width or Console().width, force_terminal=False, markup=False)
    console.print(table)
    for row in rows:
        console.print(f"{str(row['stage']).replace('_', ' ')}: {row['note']}", soft_wrap=True, highlight=False)
    console.print()
    if run_url:
        console.print(f"MLflow run  {run_url}", soft_wrap=True)
    if facts.get("undelivered"):
        console.print(f"Waiting     {facts['undelivered']}", soft_wrap=True)
    if facts.get("runs_url"):
        console.print(f"All runs    {facts['runs_url']}", soft_wrap=True)
    console.print(f"Files       {facts.get('output', '')}", soft_wrap=True)
    if "127.0.0.1" in run_url and not os.environ.get("MLFLOW_TRACKING_URI", "").startswith("http"):
        console.print(
            "Pages       posttrain ui    starts the MLflow and Prefect pages behind these links", soft_wrap=True
        )
    assert isinstance(console.file, io.StringIO)
    return console.file.getvalue()


def _rate(row: Mapping[str, Any]) -> str:
    if row.get("success") is not None:
        return f"{row['success']:.1%} [{row['low']:.1%}, {row['high']:.1%}]"
    if row.get("accuracy") is not None:
        return f"ranks {row['accuracy']:.1%} [{row['low']:.1%}, {row['high']:.1%}]"
    return ""


def parent_metrics(pipeline_run: PipelineRun) -> dict[str, float]:
    """Metrics of the parent run for comparison in the runs table."""
    cost = pipeline_run.tracking.cost
    metrics: dict[str, float] = {
        "pipeline/seconds": pipeline_run.seconds,
        "pipeline/tracking_seconds": cost.foreground_seconds,
        "pipeline/tracking_background_seconds": cost.background_seconds,
    }
    for row in result_rows(pipeline_run):
        name = row["stage"]
        if row.get("success") is not None:
            metrics[f"success_rate/{name}"] = row["success"]
            metrics[f"success_rate/{name}_low"] = row["low"]
            metrics[f"success_rate/{name}_high"] = row["high"]
        if row.get("accuracy") is not None:
            metrics["reward_model/accuracy"] = row["accuracy"]
        if not row["cached"]:
            metrics[f"seconds/{name}"] = float(row["seconds"])
    return metrics


def headline(rows: Sequence[Mapping[str, Any]]) -> str:
    """One-line summary: success of the trained models, and the gate's decision."""
    parts = [f"{row['stage']} {_rate(row)}" for row in rows if row.get("success") is not None]
    parts += [str(row["note"]) for row in rows if row["stage"] == "promote"]
    return result_text("; ".join(parts or [str(row["note"]) for row in rows[-1:]]))


def describe(pipeline_run: PipelineRun, rows: Sequence[Mapping[str, Any]]) -> str:
    """Markdown description of the parent run in MLflow."""
    lines = ["| stage | success (95% interval) | reward | seconds | result |", "|---|---|---|---|---|"]
    for row in rows:
        stage = str(row["stage"]).replace("_", " ")
        linked = f"[{stage}]({row['url']})" if row["url"] else stage
        reward = "" if row.get("reward") is None else f"{row['reward']:.3f}"
        seconds = "cached" if row["cached"] else f"{row['seconds']:.1f}"
        note = str(row["note"]).replace("|", "/")
        lines.append(f"| {linked} | {_rate(row)} | {reward} | {seconds} | {note} |")
    lines.append("")
    if flow_run_url := pipeline_run.options.flow_run.url:
        lines.append(f"[Prefect flow run]({flow_run_url}) · ")
    lines.append("Report: artifact `report.html` · settings: artifact `config.json`")
    return "\n".join(lines)
