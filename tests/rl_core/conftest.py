"""What the tests of rl_core share; tiny.py, beside this file, holds the model makers."""

import pytest

from rl_core import faults


@pytest.fixture(autouse=True)
def no_faults():
    """A fault point that one test set never fires in the next one."""
    yield
    faults.configure(None)
