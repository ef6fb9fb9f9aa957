"""Policy that knows the format of thoughts; no test changes it."""

import pytest
from helpers.thinkers import renderer_of_texts, teach


@pytest.fixture(scope="session")
def renderer():
    return renderer_of_texts()


@pytest.fixture(scope="session")
def taught(renderer):
    return teach(renderer)
