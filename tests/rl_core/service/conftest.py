"""Base model that the engine's tests share."""

import pytest
from helpers.service import make_base


@pytest.fixture(scope="session")
def base_folder(tmp_path_factory):
    """Create a small untied Llama with widths that compiled code supports."""
    return make_base(tmp_path_factory.mktemp("service") / "base", tie_word_embeddings=False)
