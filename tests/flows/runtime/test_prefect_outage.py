"""A flow whose Prefect API became unreachable: its result or error is preserved."""

import socket

import pytest
from prefect.settings import PREFECT_API_URL, temporary_settings

from flows.runtime import prefect_outage
from rl_core.errors import DataError


@pytest.fixture(scope="module", autouse=True)
def set_up_logging():
    """Import the module that sets up Prefect's logging, which would remove the handler of `caplog` later."""
    import tasks.pipeline.prefect_stages  # noqa: F401


def run_as_flow(body, after=None):
    """Run a body as Prefect runs a flow, whose end is reported to an API that may be unreachable."""
    with prefect_outage.capture_outcome() as outcome:
        outcome.result = body()
    if after is not None:
        raise after
    return outcome.result


def fail():
    raise DataError("row 3")


def test_the_result_is_preserved_although_it_cannot_be_reported(caplog):
    assert prefect_outage.run_flow(lambda: run_as_flow(lambda: 5)) == 5 and caplog.text == ""
    assert prefect_outage.run_flow(lambda: run_as_flow(lambda: 5, ConnectionError("refused"))) == 5
    assert "Prefect's API is unreachable" in caplog.text and "refused" in caplog.text


def test_the_error_stays_as_well(caplog):
    with pytest.raises(DataError, match="row 3"):
        prefect_outage.run_flow(lambda: run_as_flow(fail))
    assert caplog.text == ""

    def reported():
        try:
            run_as_flow(fail)
        except DataError:
            raise ConnectionError("refused") from None

    with pytest.raises(DataError, match="row 3"):
        prefect_outage.run_flow(reported)
    assert "refused" in caplog.text


def test_what_fails_before_the_flow_begins_is_raised():
    def never():
        raise ConnectionError("no server")

    with pytest.raises(ConnectionError, match="no server"):
        prefect_outage.run_flow(never)
    with pytest.raises(KeyboardInterrupt):
        prefect_outage.run_flow(lambda: run_as_flow(lambda: 5, KeyboardInterrupt()))


def test_a_silent_api_is_named_before_prefect_waits_for_it(caplog):
    silent = socket.create_server(("127.0.0.1", 0))
    address = f"http://127.0.0.1:{silent.getsockname()[1]}/api"
    with silent, temporary_settings({PREFECT_API_URL: address}):
        assert run_as_flow(lambda: 5) == 5
    assert (
        "Prefect's API does not answer (it accepts connections, but did not answer" in caplog.text
    )
