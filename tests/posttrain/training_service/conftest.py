"""Base model and running service shared by the tests."""

import pytest
from helpers.service import make_base
from helpers.service_http import running_service


@pytest.fixture(scope="session")
def base_folder(tmp_path_factory):
    """Create a small untied Llama whose widths suit compiled code."""
    return make_base(tmp_path_factory.mktemp("service") / "base", tie_word_embeddings=False)


@pytest.fixture(scope="module")
def service(tmp_path_factory, base_folder):
    with running_service(tmp_path_factory.mktemp("running") / "service", base_folder) as running:
        yield running


@pytest.fixture
def idle(tmp_path, base_folder):
    """Run a service without a worker that holds result requests only briefly."""
    with running_service(
        tmp_path / "service", base_folder, worker=False, poll_seconds=0.2
    ) as running:
        yield running
