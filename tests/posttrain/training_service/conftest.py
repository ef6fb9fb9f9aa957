"""A base model and a running service that tests share."""

import pytest
from helpers.service import make_base
from helpers.service_http import running_service


@pytest.fixture(scope="session")
def base_folder(tmp_path_factory):
    """A small Llama, untied, whose widths compiled code takes."""
    return make_base(tmp_path_factory.mktemp("service") / "base", tie_word_embeddings=False)


@pytest.fixture(scope="module")
def service(tmp_path_factory, base_folder):
    with running_service(tmp_path_factory.mktemp("running") / "service", base_folder) as running:
        yield running


@pytest.fixture
def idle(tmp_path, base_folder):
    """A service whose worker does not run; requests for results are held for a moment alone."""
    with running_service(
        tmp_path / "service", base_folder, worker=False, poll_seconds=0.2
    ) as running:
        yield running
