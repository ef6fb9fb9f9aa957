"""Model folder and running server that the tests of the room share."""

import pytest
from helpers.serving import make_folder_of_model, running_server


@pytest.fixture(scope="session")
def model_folder(tmp_path_factory):
    return make_folder_of_model(tmp_path_factory.mktemp("serving") / "model")


@pytest.fixture(scope="module")
def served(tmp_path_factory, model_folder):
    with running_server(tmp_path_factory.mktemp("running"), model_folder) as server:
        yield server
