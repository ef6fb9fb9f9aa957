"""One Prefect server for all files of a worker, because starting it takes many seconds."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from rl_core.storage import faults


@pytest.fixture(scope="session", autouse=True)
def _verify_exports_in_this_process() -> Iterator[None]:
    """Verify exports in this process: a fresh one takes seconds. The crash test and `test_export_proof.py` use one."""
    from helpers.exports import in_this_process

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("rl_core.models.export_verification.score_in_fresh_process", in_this_process)
        yield


@pytest.fixture
def reached(tmp_path: Path) -> Iterator[Callable[[], set[str]]]:
    """Yield a function that returns the names of the fault points reached so far."""
    log = tmp_path / "reached"
    faults.log_reached_points(log)
    yield lambda: {line.split()[2] for line in log.read_text().splitlines()}
    faults.log_reached_points(None)
