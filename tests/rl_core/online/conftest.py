"""Traffic for the tests of the update worker."""

import pytest
from helpers.online_worker import write_traffic


@pytest.fixture(scope="module")
def traffic(tmp_path_factory):
    """Return a log of 13 requests, some of them with a single sample."""
    folder = tmp_path_factory.mktemp("traffic")
    write_traffic(folder / "log", range(13), singles=True)
    return folder / "log"
