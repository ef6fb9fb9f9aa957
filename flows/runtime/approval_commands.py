"""Commands that answer a pending approval, as printed by a waiting run and by `posttrain approve`."""

from __future__ import annotations

import shlex
from pathlib import Path

from tasks.config import PipelineSettings
from tasks.lifecycle.approval import ApprovalRequest
from tasks.own_commands import output_option

__all__ = ["answer_commands", "how_to_answer"]


def how_to_answer(settings: PipelineSettings, request: ApprovalRequest) -> str:
    """Text for the terminal of a waiting run: location of the evidence, and the commands to type in another one."""
    where = " --config CONFIG" if settings.tracking.uri else output_option(Path(settings.output))
    evidence = Path(settings.output).resolve() / settings.name / "stages" / "promote" / request.key / "review"
    return (
        f"evidence  {evidence / 'report.html'}\n{_form(request)}{answer_commands(request, where)}\n"
        "Ctrl-C leaves it waiting; the same command continues from here."
    )


def _form(request: ApprovalRequest) -> str:
    """Line with the page of the form; "" for the run's own server, which has no pages, and addresses of other shape."""
    api = request.prefect_api.rstrip("/")
    if not api.endswith("/api") or not request.flow_run_id:
        return ""
    return f"form      {api.removesuffix('/api')}/runs/flow-run/{request.flow_run_id}\n"


def answer_commands(request: ApprovalRequest, where: str) -> str:
    """The two commands that decide; `where`: options that name the folder or store."""
    start = f"posttrain approve {shlex.quote(request.run)}"
    return f"approve   {start} --yes --note 'WHY'{where}\nreject    {start} --no --note 'WHY'{where}"
