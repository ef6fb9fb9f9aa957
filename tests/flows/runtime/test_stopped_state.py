"""Prefect's state of a stopped run in all flows; a failed run stays failed."""

import pytest
from prefect import flow
from prefect.client.orchestration import get_client

from flows.runtime.flow_run_states import mark_flow_run_stopped
from rl_core.errors import DataError, Stopped

pytestmark = pytest.mark.usefixtures("prefect_api")


def run_and_read_state(error: BaseException):
    seen = []

    @flow(
        name="stops",
        on_failure=[mark_flow_run_stopped],
        on_crashed=[mark_flow_run_stopped],
        persist_result=False,
    )
    def stops():
        from prefect.runtime import flow_run

        seen.append(flow_run.id)
        raise error

    with pytest.raises(type(error)):
        stops()
    with get_client(sync_client=True) as client:
        return client.read_flow_run(seen[0]).state


@pytest.mark.parametrize("error", [Stopped("stopped by SIGTERM", 15), KeyboardInterrupt()])
def test_a_stop_is_stored_as_stopped(error):
    state = run_and_read_state(error)
    assert (state.name, state.type.value) == ("Stopped", "CANCELLED")
    assert "stopped" in state.message


def test_a_failure_is_stored_as_failed():
    assert run_and_read_state(DataError("row 3")).name == "Failed"


def test_every_flow_has_the_hooks():
    from flows.evaluate_champion import evaluate_champion
    from flows.post_training import post_training
    from flows.retrain import retrain
    from flows.single_stage import compare_models, single_stage
    from flows.sweep.sweep_flow import sweep

    for any_flow in (
        post_training,
        retrain,
        evaluate_champion,
        single_stage,
        compare_models,
        sweep,
    ):
        assert any_flow.on_failure_hooks == [mark_flow_run_stopped] == any_flow.on_crashed_hooks
