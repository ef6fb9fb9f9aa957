"""Tries and time limits of a stage."""

import time
from types import SimpleNamespace

import pytest

from rl_core.errors import BackendError, DataError, SettingsError, StageTimeout
from tasks.pipeline.stage_result import StageResult

RESULT = StageResult(
    "sft", "folder", "digest", "key", cached=False, seconds=1.0, run_id="", summary={}
)


def run_stage(*outcomes, **limits):
    """Run a flow of one stage whose tries raise an error or call a function.

    Returns: the number of tries, and the results by stage or the error.
    """
    from prefect import flow

    from tasks.config.settings import RunSettings
    from tasks.pipeline.prefect_stages import wrap_stage_task

    run = RunSettings(**{"retries": 1, "retry_delay_seconds": 0.0, **limits})
    results = {}
    pipeline_run = SimpleNamespace(
        settings=SimpleNamespace(name="tries", run=run),
        fraction=0.0,
        results=results,
        input_stages={},
        tracking=SimpleNamespace(format_run_reference=lambda run_id: ""),
        add_result=lambda name, result, inputs: results.update({name: result}),
    )
    tries = []

    def stage(pipeline_run):
        """Return or raise the next outcome."""
        outcome = outcomes[len(tries)]
        tries.append(outcome)
        if isinstance(outcome, Exception):
            raise outcome
        return outcome()

    @flow(name="tries")
    def flow_of_one_stage():
        wrap_stage_task("sft", stage, pipeline_run)()

    try:
        flow_of_one_stage()
    except Exception as error:
        return len(tries), error
    return len(tries), results


def succeed():
    return RESULT


@pytest.mark.parametrize("error", [BackendError("the store is away"), ConnectionError("refused")])
def test_temporary_errors_are_retried(prefect_api, error):
    assert run_stage(error, succeed) == (2, {"sft": RESULT})


def test_tries_end(prefect_api):
    last = BackendError("still away")
    assert run_stage(BackendError("away"), last, succeed) == (2, last)


@pytest.mark.parametrize("error", [SettingsError("wrong"), DataError("row 3 is bad")])
def test_errors_that_the_user_has_to_fix_are_not_retried(prefect_api, error):
    assert run_stage(error, succeed) == (1, error)


def test_a_stage_past_its_limit_ends_as_timed_out_and_is_not_retried(prefect_api, monkeypatch):
    # Publishing the page counts towards the limit.
    monkeypatch.setattr("tasks.pipeline.prefect_stages.publish_page", lambda *_, **__: "")

    def work():  # in short steps, because the limit takes effect between them
        for _ in range(2000):
            time.sleep(0.01)

    tries, error = run_stage(work, succeed, timeouts={"sft": 0.5}, timeout_seconds=50.0)
    assert tries == 1
    assert isinstance(error, StageTimeout)
    assert "stage 'sft' was stopped after 0.5 s, the limit set by run.timeouts.sft" in str(error)
    assert isinstance(error.__cause__, TimeoutError)
