"""Summary of a pipeline run: its result, the final table, metrics of the parent run, the description in MLflow.

Also the commands that answer a pending approval, as printed by a waiting run and by `posttrain promote --pending`.
"""

from __future__ import annotations

import io
import shlex
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rich.console import Console
from rich.table import Table

from flows.runtime.progress import wrap_to_terminal
from flows.runtime.terminal import UNLIMITED_COLUMNS, detect_terminal_columns
from tasks.command_hints import format_output_option, format_posttrain_command
from tasks.config import PipelineSettings
from tasks.lifecycle.approval import ApprovalRequest
from tasks.pipeline.stage_result import GAIN, StageResult, format_gain
from tasks.stage_registry import START_MODEL, list_training_stages
from tasks.tracking import MAX_RESULT_LENGTH, shorten_result
from tasks.tracking.run_ids import shorten_run_name

if TYPE_CHECKING:
    from tasks.pipeline.pipeline_run import PipelineRun

_ACCURACY_KEYS = {
    "accuracy": "",
    "low": "_low",
    "high": "_high",
}  # key of a row: suffix in the summary


def build_result_rows(pipeline_run: PipelineRun) -> list[dict[str, Any]]:
    """Build the rows by stage: {stage, success, low, high, reward, tokens_per_second, seconds, cached, link, note}.

    The figures of an evaluated model that no stage of the run trained are in the row of the evaluation, with its name
    as `model`; several such models have a row each. The model that training started from has a row before the first
    model trained.
    """
    evaluated: dict[str, Any] = {}
    if "evaluate" in pipeline_run.results:
        evaluated = pipeline_run.results["evaluate"].summary["models"]
    trained_models = [name for name in evaluated if name in pipeline_run.results]
    other_models = [name for name in evaluated if name not in pipeline_run.results]
    starts_from = START_MODEL if trained_models and START_MODEL in other_models else None
    if starts_from is not None:
        other_models.remove(starts_from)
    rows = []
    for name, result in pipeline_run.results.items():
        if starts_from is not None and name == trained_models[0]:
            link = pipeline_run.tracking.build_run_link(pipeline_run.results["evaluate"].run_id)
            note = f"the start model, {pipeline_run.settings.model.path}"
            start_row = {**_build_empty_row(starts_from, link, note), "is_model": True}
            figures = _extract_model_figures(evaluated[starts_from])
            rows.append({**start_row, "is_start": True, "metric": starts_from, **figures})
        row: dict[str, Any] = {
            "stage": name,
            "seconds": result.summary.get("seconds", result.seconds),
            "cached": result.cached,
            "link": pipeline_run.tracking.build_run_link(result.run_id),
            "note": result.summary.get("note", ""),
            "tokens_per_second": result.summary.get("tokens_per_second"),
        }
        if name in evaluated:
            row |= _extract_model_figures(evaluated[name])
        if name == "evaluate" and len(other_models) == 1:
            (model,) = other_models
            row |= _extract_model_figures(evaluated[model])
            row |= {"model": _format_model_name(pipeline_run, model), "metric": model}
        if name == "reward_model":
            row |= {
                key: result.summary.get(f"accuracy{suffix}")  # a regression has no interval
                for key, suffix in _ACCURACY_KEYS.items()
            }
        if name == "suites":
            row["suites"] = result.summary["models"]
        if name == "policy" and pipeline_run.settings.stages.policy is not None:
            row["uses_reward_model"] = pipeline_run.settings.uses_reward_model
        if name == "evaluate":
            rates = [figures["tokens_per_second"] for figures in evaluated.values()]
            row["tokens_per_second"] = sum(rates) / len(rates) if rates else None
        rows.append(row)
        if name == "evaluate" and len(other_models) > 1:
            rows += [
                {
                    **_build_empty_row(_format_model_name(pipeline_run, model), row["link"], ""),
                    "is_model": True,
                    "metric": model,
                    **_extract_model_figures(evaluated[model]),
                }
                for model in other_models
            ]
    if pipeline_run.postponed_reason:
        rows.append(_build_empty_row("promote", "", pipeline_run.postponed_reason))
    return rows


def _build_empty_row(stage: str, link: str, note: str) -> dict[str, Any]:
    return {"stage": stage, "seconds": 0.0, "cached": False, "link": link, "note": note}


def _extract_model_figures(evaluation: Mapping[str, Any]) -> dict[str, Any]:
    """Return reward, gain over the start model, and, if a verifier knows it, success with interval of a model."""
    figures = {"reward": evaluation["reward"]}
    for suffix in ("", "_low", "_high"):
        if f"{GAIN}{suffix}" in evaluation:
            figures[f"{GAIN}{suffix}"] = evaluation[f"{GAIN}{suffix}"]
    if GAIN in evaluation:
        figures["knows_success"] = evaluation.get("knows_success", True)
    if evaluation.get("knows_success", True):
        figures |= {
            "success": evaluation["success"],
            "low": evaluation["success_low"],
            "high": evaluation["success_high"],
        }
    return figures


def _format_model_name(pipeline_run: PipelineRun, name: str) -> str:
    """Format the name of an evaluated model, with the version of a registered one."""
    reference = pipeline_run.options.evaluated_models.get(name, "")
    version = pipeline_run.models.find_resolved_version(reference)
    return f"{name} (version {version})" if version and not name.endswith(f"-v{version}") else name


def _format_row_label(row: Mapping[str, Any]) -> str:
    stage = str(row["stage"])
    if not row.get("is_model"):
        stage = stage.replace("_", " ")
    return f"{stage} {row['model']}" if row.get("model") else stage


def _list_suite_rows(rows: Sequence[Mapping[str, Any]]) -> tuple[list[str], list[list[str]]]:
    """List the metrics of suites: names of the models, and a row for each metric with its value in every model."""
    from rl_core.evaluators.results import list_metric_rows  # imports numpy

    models: Mapping[str, Any] = next((row["suites"] for row in rows if row.get("suites")), {})
    return list_metric_rows(models) if models else ([], [])


def format_result_table(
    rows: Sequence[Mapping[str, Any]], run_url: str, facts: Mapping[str, Any], width: int | None
) -> str:
    """Format the result table with links."""
    table = Table(title=None, pad_edge=False)
    has_gains = any(row.get(GAIN) is not None for row in rows)
    for name, justify in (
        ("stage", "left"),
        ("success (95% interval)", "right"),
        *([(f"gain over {START_MODEL}", "right")] if has_gains else []),
        ("reward", "right"),
        ("tokens/s", "right"),
        ("seconds", "right"),
    ):
        table.add_column(name, justify=justify)  # type: ignore[arg-type]
    for row in rows:
        table.add_row(
            _format_row_label(row),
            _format_rate(row),
            *([format_gain(row)] if has_gains else []),
            "" if row.get("reward") is None else f"{row['reward']:.3f}",
            "" if not row.get("tokens_per_second") else f"{row['tokens_per_second']:,.0f}",
            _format_seconds(row),
        )
    columns = width or detect_terminal_columns() or UNLIMITED_COLUMNS
    console = Console(file=io.StringIO(), width=columns, force_terminal=False, markup=False)
    console.print(table)
    models, metrics = _list_suite_rows(rows)
    if metrics:
        suites = Table(title=None, pad_edge=False)
        suites.add_column("metric (95% interval)")
        for model in models:
            suites.add_column(model, justify="right")
        for cells in metrics:
            suites.add_row(*cells)
        console.print(suites)
    for row in rows:
        if row["note"]:
            note = f"{str(row['stage']).replace('_', ' ')}: {row['note']}"
            console.print(
                wrap_to_terminal(note) if width is None else note, soft_wrap=True, highlight=False
            )
    console.print()
    pages_answer = facts.get("pages_answer", True)
    if facts.get("id"):
        console.print(f"Run         {facts['id']}", soft_wrap=True, highlight=False)
    if run_url and pages_answer:
        console.print(f"MLflow run  {run_url}", soft_wrap=True)
    if facts.get("undelivered"):
        console.print(f"Waiting     {facts['undelivered']}", soft_wrap=True)
    if facts.get("runs_url") and pages_answer:
        console.print(f"All runs    {facts['runs_url']}", soft_wrap=True)
    console.print(f"Output      {facts.get('output', '')}", soft_wrap=True)
    if facts.get("logs"):
        console.print(f"Logs        {facts['logs']}", soft_wrap=True)
    if not pages_answer:
        pages = facts.get("pages", "posttrain ui")
        console.print(f"Web UI      {pages}    serves its pages", soft_wrap=True)
    assert isinstance(console.file, io.StringIO)
    return console.file.getvalue()


def _format_seconds(row: Mapping[str, Any]) -> str:
    return "" if row.get("is_model") else "cached" if row["cached"] else f"{row['seconds']:.1f}"


def _format_rate(row: Mapping[str, Any]) -> str:
    if row.get("success") is not None:
        return f"{row['success']:.1%} [{row['low']:.1%}, {row['high']:.1%}]"
    if row.get("accuracy") is not None:
        interval = "" if row["low"] is None else f" [{row['low']:.1%}, {row['high']:.1%}]"
        return f"ranks {row['accuracy']:.1%}{interval}"
    return ""


def collect_parent_metrics(pipeline_run: PipelineRun) -> dict[str, float]:
    """Collect the metrics of the parent run for comparison in the runs table."""
    cost = pipeline_run.tracking.cost
    metrics: dict[str, float] = {}  # results first: MLflow lists metrics as they were logged
    seconds: dict[str, float] = {}
    rows = build_result_rows(pipeline_run)
    for row in sorted(reversed(rows), key=lambda row: row.get("success") is None):
        name = row.get("metric") or row["stage"]
        if row.get("success") is not None:
            metrics[f"success_rate/{name}"] = row["success"]
            metrics[f"success_rate/{name}_low"] = row["low"]
            metrics[f"success_rate/{name}_high"] = row["high"]
        for suffix in ("", "_low", "_high"):
            if row.get(f"{GAIN}{suffix}") is not None:
                metrics[f"{GAIN}/{name}{suffix}"] = row[f"{GAIN}{suffix}"]
        if row.get("accuracy") is not None:
            metrics["reward_model/accuracy"] = row["accuracy"]
        if not row["cached"] and not row.get("is_model"):
            seconds[f"seconds/{row['stage']}"] = float(row["seconds"])
        if row.get("suites"):
            metrics |= pipeline_run.results["suites"].summary["metrics"]
    return (
        metrics
        | {"pipeline/seconds": pipeline_run.seconds}
        | seconds
        | {
            "pipeline/tracking_seconds": cost.foreground_seconds,
            "pipeline/tracking_background_seconds": cost.background_seconds,
        }
    )


def format_headline(rows: Sequence[Mapping[str, Any]]) -> str:
    """Return one line: success of the trained models, the newest first, and the gate's decision, which is cut last.

    Tables of runs show only its beginning.
    """
    evaluated_rows = [row for row in rows if row.get("success") is not None]
    if not any(
        row.get("model") or (row.get("is_model") and not row.get("is_start"))
        for row in evaluated_rows
    ):  # else in the order of the command
        evaluated_rows.reverse()
    parts = [f"{row.get('model') or row['stage']} {_format_rate(row)}" for row in evaluated_rows]
    if evaluated_rows and (gain := format_gain(evaluated_rows[0])):
        parts[0] += f", {gain} over {START_MODEL}"
    rates = "; ".join(parts)
    decision = "; ".join(str(row["note"]) for row in rows if row["stage"] == "promote")
    if rates and decision:
        length = max(MAX_RESULT_LENGTH // 3, MAX_RESULT_LENGTH - len(decision) - 2)
        rates = shorten_result(rates, length)
    last_note = "".join(str(row["note"]) for row in rows[-1:])
    return shorten_result("; ".join(filter(None, (rates, decision))) or last_note)


def describe_run(pipeline_run: PipelineRun, rows: Sequence[Mapping[str, Any]]) -> str:
    """Build the Markdown description of the parent run in MLflow: result, stages, relative links to outputs."""
    parts = [f"[{name}]({link})" for name, link in _list_run_links(pipeline_run)]
    flow_run = pipeline_run.options.flow_run
    if flow_run.url:
        parts.append(f"[Prefect flow run]({flow_run.url})")
    elif flow_run.id:  # of the run's own Prefect server, which nobody serves now
        parts.append(
            f"Prefect flow run: `{format_posttrain_command('ui', pipeline_run.output)}` shows it"
        )
    links = " · ".join(parts)
    # Headline and links come first: the page folds everything below a hundred pixels.
    lines = [f"**{format_headline(rows)}**", "", links, ""]
    has_gains = any(row.get(GAIN) is not None for row in rows)
    gain_head = f" gain over {START_MODEL} |" if has_gains else ""
    lines += [
        f"| stage | success (95% interval) |{gain_head} reward | seconds | result |",
        "|---|---|---|---|---|" + "---|" * has_gains,
    ]
    for row in rows:
        label = _format_row_label(row)
        if row["link"]:
            label = f"[{label}]({row['link']})"
        reward = "" if row.get("reward") is None else f"{row['reward']:.3f}"
        gain = f" {format_gain(row)} |" if has_gains else ""
        note = str(row["note"]).replace("|", "/")
        lines.append(
            f"| {label} | {_format_rate(row)} |{gain} {reward} | {_format_seconds(row)} | {note} |"
        )
    models, metrics = _list_suite_rows(rows)
    if metrics:
        head = " | ".join(["metric (95% interval)", *models])
        lines += ["", f"| {head} |", "|---|" + "---|" * len(models)]
        lines += [f"| {' | '.join(cells)} |" for cells in metrics]
    return "\n".join(lines)


def _list_run_links(pipeline_run: PipelineRun) -> list[tuple[str, str]]:
    """Return (name, link) of the report, the figures, the curves of the last training, and the settings."""
    run_id = pipeline_run.parent.run_id or ""
    results = pipeline_run.results

    def build_link(run: str, tab: str) -> str:
        return pipeline_run.tracking.build_run_link(run, tab=tab)

    links = [("Pipeline", build_link(run_id, "artifacts/figures/pipeline.png"))]
    if "analyze" in results:
        analysis = results["analyze"].run_id
        links.insert(0, ("Report", build_link(analysis, "artifacts/report.html")))
        links.append(
            ("Success by level", build_link(analysis, "artifacts/figures/success_by_level.png"))
        )
    trained = [name for name in list_training_stages() if name in results and results[name].run_id]
    links += [
        (f"Curves of {name.replace('_', ' ')}", pipeline_run.tracking.build_charts_link(name))
        for name in trained[-1:]
    ]
    if "evaluate" in results:
        links.append(("Episodes", build_link(results["evaluate"].run_id, "traces")))
    links.append(("Settings", build_link(run_id, "artifacts/config.json")))
    return [(name, link) for name, link in links if link]


@dataclass(frozen=True)
class PipelineResult:
    """Results of the stages, rows of the final table, and the pending approval, if any."""

    results: dict[str, StageResult]
    rows: list[dict[str, Any]]  # of the table
    run_url: str  # of the parent run in MLflow; "" while nobody serves its page
    seconds: float
    facts: dict[str, Any] = field(default_factory=dict)
    ok: bool = True
    waiting: ApprovalRequest | None = None  # manual approval, required before the champion changes
    page: str = ""  # the result in Markdown, for Prefect's pages
    artifact: str = ""  # id of the Prefect artifact that shows it; "" = none

    def format_table(self, width: int | None = None) -> str:
        """Format the final table: stage, success with its interval, reward, tokens/s, seconds, links."""
        return format_result_table(self.rows, self.run_url, self.facts, width)


def format_approval_instructions(settings: PipelineSettings, request: ApprovalRequest) -> str:
    """Format the text for the terminal of a waiting run: the evidence, and the commands for another terminal."""
    output = Path(settings.output)
    store_options = " CONFIG" if settings.tracking.uri else format_output_option(output)
    review = output.resolve() / settings.name / "stages" / "promote" / request.key / "review"
    return (
        f"evidence  {review / 'report.html'}\n"
        f"{_format_form_link(request)}{format_approval_commands(request, output, store_options)}\n"
        "Ctrl-C leaves it waiting; the same command continues from here."
    )


def _format_form_link(request: ApprovalRequest) -> str:
    """Format the line with the form's page; "" for the run's own server, which has no pages, or an unknown address."""
    api = request.prefect_api.rstrip("/")
    if not api.endswith("/api") or not request.flow_run_id:
        return ""
    return f"form      {api.removesuffix('/api')}/runs/flow-run/{request.flow_run_id}\n"


def format_approval_commands(request: ApprovalRequest, output: Path, store_options: str) -> str:
    """Format the two commands that decide.

    Args:
        store_options: configuration or options that select the folder or store.
    """
    run = shlex.quote(shorten_run_name(output, request.run))
    return (
        f"approve   posttrain promote{store_options} --approve {run} --note 'WHY'\n"
        f"reject    posttrain promote{store_options} --reject {run} --note 'WHY'"
    )
