"""Summary of a run: result table, metrics of the parent run, description in MLflow.

Result of a pipeline run, as flows return it.

Commands that answer a pending approval, as printed by a waiting run and by `posttrain approve`.
"""

from __future__ import annotations

import io
import os
import shlex
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rich.console import Console
from rich.table import Table

from flows.runtime.progress import wrap_to_terminal
from tasks.command_hints import format_output_option
from tasks.config import PipelineSettings
from tasks.lifecycle.approval import ApprovalRequest
from tasks.pipeline.stage_result import StageResult
from tasks.stage_registry import list_training_stages
from tasks.tracking import MAX_RESULT_LENGTH, shorten_result

if TYPE_CHECKING:
    from tasks.pipeline.pipeline_run import PipelineRun


def build_result_rows(pipeline_run: PipelineRun) -> list[dict[str, Any]]:
    """Rows by stage: {stage, success, low, high, reward, tokens_per_second, seconds, cached, url, note}.

    A model that was evaluated and that no stage of the run made has its figures in the row of the evaluation, with its
    name as `model`; of several, each has a row of its own.
    """
    evaluated = (
        pipeline_run.results["evaluate"].summary["models"]
        if "evaluate" in pipeline_run.results
        else {}
    )
    others = [name for name in evaluated if name not in pipeline_run.results]
    rows = []
    for name, result in pipeline_run.results.items():
        row: dict[str, Any] = {
            "stage": name,
            "seconds": result.summary.get("seconds", result.seconds),
            "cached": result.cached,
            "url": pipeline_run.tracking.build_run_url(result.run_id) if result.run_id else "",
            "note": result.summary.get("note", ""),
            "tokens_per_second": result.summary.get("tokens_per_second"),
        }
        if name in evaluated:
            row |= _extract_model_figures(evaluated[name])
        if name == "evaluate" and len(others) == 1:
            row |= _extract_model_figures(evaluated[others[0]])
            row |= {"model": _format_model_name(pipeline_run, others[0]), "metric": others[0]}
        if name == "reward_model":
            row |= {
                key: result.summary[f"accuracy{suffix}"] for key, suffix in _ACCURACY_KEYS.items()
            }
        if name == "policy" and pipeline_run.settings.stages.policy is not None:
            row["uses_reward_model"] = "learned" in pipeline_run.settings.stages.policy.rewards
        if name == "evaluate":
            rates = [found["tokens_per_second"] for found in evaluated.values()]
            row["tokens_per_second"] = sum(rates) / len(rates) if rates else None
        rows.append(row)
        if name == "evaluate" and len(others) > 1:
            plain = {
                "seconds": 0.0,
                "cached": False,
                "url": row["url"],
                "note": "",
                "is_model": True,
            }
            rows += [
                {
                    **plain,
                    "stage": _format_model_name(pipeline_run, other),
                    "metric": other,
                    **_extract_model_figures(evaluated[other]),
                }
                for other in others
            ]
    if pipeline_run.postponed_reason:
        rows.append(
            {
                "stage": "promote",
                "seconds": 0.0,
                "cached": False,
                "url": "",
                "note": pipeline_run.postponed_reason,
            }
        )
    return rows


def _extract_model_figures(evaluation: Mapping[str, Any]) -> dict[str, Any]:
    """Success with interval, where a verifier knows it, and reward of an evaluated model."""
    knows = evaluation.get("knows_success", True)
    rate = (
        {
            "success": evaluation["success"],
            "low": evaluation["success_low"],
            "high": evaluation["success_high"],
        }
        if knows
        else {}
    )
    return {**rate, "reward": evaluation["reward"]}


def _format_model_name(pipeline_run: PipelineRun, name: str) -> str:
    """Name of a model that the run was given, with the version where it is a registered one."""
    given = pipeline_run.options.evaluated_models.get(name, "")
    version = pipeline_run.models.find_resolved_version(given)
    return f"{name} (version {version})" if version and not name.endswith(f"-v{version}") else name


def _format_row_label(row: Mapping[str, Any]) -> str:
    stage = str(row["stage"]).replace("_", " ") if not row.get("is_model") else str(row["stage"])
    return f"{stage} {row['model']}" if row.get("model") else stage


_ACCURACY_KEYS = {"accuracy": "", "low": "_low", "high": "_high"}


def format_result_table(
    rows: Sequence[Mapping[str, Any]], run_url: str, facts: Mapping[str, Any], width: int | None
) -> str:
    """Result table as text, with links."""
    table = Table(title=None, pad_edge=False)
    for name, justify in (
        ("stage", "left"),
        ("success (95% interval)", "right"),
        ("reward", "right"),
        ("tokens/s", "right"),
        ("seconds", "right"),
    ):
        table.add_column(name, justify=justify)  # type: ignore[arg-type]
    for row in rows:
        table.add_row(
            _format_row_label(row),
            _format_rate(row),
            "" if row.get("reward") is None else f"{row['reward']:.3f}",
            "" if not row.get("tokens_per_second") else f"{row['tokens_per_second']:,.0f}",
            _format_seconds(row),
        )
    console = Console(
        file=io.StringIO(), width=width or Console().width, force_terminal=False, markup=False
    )
    console.print(table)
    for row in rows:
        if row["note"]:
            note = f"{str(row['stage']).replace('_', ' ')}: {row['note']}"
            console.print(
                wrap_to_terminal(note) if width is None else note, soft_wrap=True, highlight=False
            )
    console.print()
    if run_url:
        console.print(f"MLflow run  {run_url}", soft_wrap=True)
    if facts.get("undelivered"):
        console.print(f"Waiting     {facts['undelivered']}", soft_wrap=True)
    if facts.get("runs_url"):
        console.print(f"All runs    {facts['runs_url']}", soft_wrap=True)
    console.print(f"Files       {facts.get('output', '')}", soft_wrap=True)
    if facts.get("logs"):
        console.print(f"Logs        {facts['logs']}", soft_wrap=True)
    if "127.0.0.1" in run_url and not os.environ.get("MLFLOW_TRACKING_URI", "").startswith("http"):
        pages = facts.get("pages", "posttrain ui")
        console.print(
            f"Pages       {pages}    starts the MLflow and Prefect pages behind these links",
            soft_wrap=True,
        )
    assert isinstance(console.file, io.StringIO)
    return console.file.getvalue()


def _format_seconds(row: Mapping[str, Any]) -> str:
    return "" if row.get("is_model") else "cached" if row["cached"] else f"{row['seconds']:.1f}"


def _format_rate(row: Mapping[str, Any]) -> str:
    if row.get("success") is not None:
        return f"{row['success']:.1%} [{row['low']:.1%}, {row['high']:.1%}]"
    if row.get("accuracy") is not None:
        return f"ranks {row['accuracy']:.1%} [{row['low']:.1%}, {row['high']:.1%}]"
    return ""


def collect_parent_metrics(pipeline_run: PipelineRun) -> dict[str, float]:
    """Metrics of the parent run for comparison in the runs table."""
    cost = pipeline_run.tracking.cost
    metrics: dict[str, float] = {
        "pipeline/seconds": pipeline_run.seconds,
        "pipeline/tracking_seconds": cost.foreground_seconds,
        "pipeline/tracking_background_seconds": cost.background_seconds,
    }
    for row in build_result_rows(pipeline_run):
        name = row.get("metric") or row["stage"]
        if row.get("success") is not None:
            metrics[f"success_rate/{name}"] = row["success"]
            metrics[f"success_rate/{name}_low"] = row["low"]
            metrics[f"success_rate/{name}_high"] = row["high"]
        if row.get("accuracy") is not None:
            metrics["reward_model/accuracy"] = row["accuracy"]
        if not row["cached"] and not row.get("is_model"):
            metrics[f"seconds/{row['stage']}"] = float(row["seconds"])
    return metrics


def format_headline(rows: Sequence[Mapping[str, Any]]) -> str:
    """One-line summary: success of the trained models, the newest first, and the gate's decision, which is cut last.

    Tables of runs show its beginning alone.
    """
    known = [row for row in rows if row.get("success") is not None]
    if not any(row.get("model") or row.get("is_model") for row in known):  # else in the order given
        known.reverse()
    rates = "; ".join(f"{row.get('model') or row['stage']} {_format_rate(row)}" for row in known)
    decision = "; ".join(str(row["note"]) for row in rows if row["stage"] == "promote")
    if rates and decision:
        rates = shorten_result(
            rates, max(MAX_RESULT_LENGTH // 3, MAX_RESULT_LENGTH - len(decision) - 2)
        )
    return shorten_result(
        "; ".join(filter(None, (rates, decision))) or "".join(str(row["note"]) for row in rows[-1:])
    )


def describe_run(pipeline_run: PipelineRun, rows: Sequence[Mapping[str, Any]]) -> str:
    """Markdown description of the parent run in MLflow: the result, its stages, and links to what the run left."""
    links = " · ".join(f"[{name}]({url})" for name, url in _list_run_links(pipeline_run))
    lines = [
        links,
        "",
        f"**{format_headline(rows)}**",
        "",
    ]  # the page folds what comes below a hundred pixels
    lines += [
        "| stage | success (95% interval) | reward | seconds | result |",
        "|---|---|---|---|---|",
    ]
    for row in rows:
        linked = (
            f"[{_format_row_label(row)}]({row['url']})" if row["url"] else _format_row_label(row)
        )
        reward = "" if row.get("reward") is None else f"{row['reward']:.3f}"
        note = str(row["note"]).replace("|", "/")
        lines.append(
            f"| {linked} | {_format_rate(row)} | {reward} | {_format_seconds(row)} | {note} |"
        )
    return "\n".join(lines)


def _list_run_links(pipeline_run: PipelineRun) -> list[tuple[str, str]]:
    """(name, address) of the report, the figures, the curves of the last training, settings, and the flow run."""
    run_id, results = pipeline_run.parent.run_id or "", pipeline_run.results

    def page(run: str, tab: str) -> str:
        return pipeline_run.tracking.build_run_url(run, tab=tab)

    links = [("Pipeline", page(run_id, "artifacts/figures/pipeline.png"))]
    if "analyze" in results:
        analysis = results["analyze"].run_id
        links.insert(0, ("Report", page(analysis, "artifacts/report.html")))
        links.append(("Success by level", page(analysis, "artifacts/figures/success_by_level.png")))
    trained = [name for name in list_training_stages() if name in results and results[name].run_id]
    links += [
        (f"Curves of {name.replace('_', ' ')}", pipeline_run.tracking.build_charts_url(name))
        for name in trained[-1:]
    ]
    if "evaluate" in results:
        links.append(("Episodes", page(results["evaluate"].run_id, "traces")))
    links.append(("Settings", page(run_id, "artifacts/config.json")))
    links.append(("Prefect flow run", pipeline_run.options.flow_run.url))
    return [(name, url) for name, url in links if url]


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

    def format_table(self, width: int | None = None) -> str:
        """Final table: stage, success with its interval, reward, tokens/s, seconds, links."""
        return format_result_table(self.rows, self.run_url, self.facts, width)


def format_approval_instructions(settings: PipelineSettings, request: ApprovalRequest) -> str:
    """Text for the terminal of a waiting run: location of the evidence, and the commands to type in another one."""
    where = (
        " --config CONFIG" if settings.tracking.uri else format_output_option(Path(settings.output))
    )
    evidence = (
        Path(settings.output).resolve()
        / settings.name
        / "stages"
        / "promote"
        / request.key
        / "review"
    )
    return (
        f"evidence  {evidence / 'report.html'}\n{_format_form_link(request)}{format_approval_commands(request, where)}\n"
        "Ctrl-C leaves it waiting; the same command continues from here."
    )


def _format_form_link(request: ApprovalRequest) -> str:
    """Line with the page of the form; "" for the run's own server, which has no pages, and addresses of other shape."""
    api = request.prefect_api.rstrip("/")
    if not api.endswith("/api") or not request.flow_run_id:
        return ""
    return f"form      {api.removesuffix('/api')}/runs/flow-run/{request.flow_run_id}\n"


def format_approval_commands(request: ApprovalRequest, store_options: str) -> str:
    """The two commands that decide; `where`: options that name the folder or store."""
    start = f"posttrain approve {shlex.quote(request.run)}"
    return f"approve   {start} --yes --note 'WHY'{store_options}\nreject    {start} --no --note 'WHY'{store_options}"
