"""Model folder and running server that the tests of the room share."""

import pytest
from helpers.serving import make_folder_of_model, running_server


@pytest.fixture(scope="session")
def model_folder(tmp_path_factory):
    return make_folder_of_model(tmp_path_factory.mktemp("serving") / "model")


@pytest.fixture(scope="session")
def compiled_folder(tmp_path_factory):
    """Model that compiled code decodes: there a row's bits do not depend on other rows."""
    folder = tmp_path_factory.mktemp("compiled") / "model"
    return make_folder_of_model(folder, preset="tiny", context=512)


@pytest.fixture(scope="module")
def compiled(tmp_path_factory, compiled_folder):
    with running_server(
        tmp_path_factory.mktemp("compiled"), compiled_folder, context=500
    ) as server:
        assert server.server.engine.loop._weights[-1].slots.is_batch_independent
        yield server


@pytest.fixture(scope="module")
def served(tmp_path_factory, model_folder):
    with running_server(tmp_path_factory.mktemp("running"), model_folder) as server:
        yield server
