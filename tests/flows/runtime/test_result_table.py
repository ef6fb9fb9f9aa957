"""The table at the end of a run: names of the user's are text, not rich's markup."""

import pytest

from flows.runtime.summary import result_table


@pytest.mark.parametrize("name", ["/out[br]put", "/a[/b]", "/a[red]b", "/a\\[b"])
def test_names_are_printed_as_they_are(name):
    row = {"stage": "sft", "note": f"model of {name}", "cached": False, "seconds": 1.0}
    lines = [line.rstrip() for line in result_table([row], "", {"output": name}, 80).splitlines()]
    assert f"sft: model of {name}" in lines and f"Files       {name}" in lines
