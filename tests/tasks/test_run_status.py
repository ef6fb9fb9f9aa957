"""Words for the state of a run."""

import pytest

from tasks.run_status import describe_run_status


@pytest.mark.parametrize(
    ("status", "tags", "word"),
    [
        ("RUNNING", {}, "running"),
        ("FINISHED", {}, "finished"),
        ("FINISHED", {"approval": "waiting"}, "waiting"),
        ("FINISHED", {"approval": "approved", "interrupted": "long ago"}, "finished"),
        ("FINISHED", {"postponed": "the store did not answer"}, "postponed"),
        ("RUNNING", {"postponed": "the store did not answer"}, "running"),
        ("FAILED", {"error": "x"}, "failed"),
        ("KILLED", {}, "stopped"),
        ("KILLED", {"interrupted": "process 3 no longer exists"}, "killed"),
        ("KILLED", {"interrupted": ""}, "stopped"),
        ("odd", {}, "failed"),
    ],
)
def test_words(status, tags, word):
    assert describe_run_status(status, tags) == word
