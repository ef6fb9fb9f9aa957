"""A base model that the tests of the service share."""

import pytest
from helpers.service import make_base


@pytest.fixture(scope="session")
def base_folder(tmp_path_factory):
    """A small Llama, untied, whose widths compiled code takes."""
    return make_base(tmp_path_factory.mktemp("service") / "base", tie_word_embeddings=False)
