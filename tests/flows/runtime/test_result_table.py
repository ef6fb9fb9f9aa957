"""The table at the end of a run: names of the user's are text, not rich's markup."""

from types import SimpleNamespace

import pytest

from flows.runtime.summary import headline, result_rows, result_table


@pytest.mark.parametrize("name", ["/out[br]put", "/a[/b]", "/a[red]b", "/a\\[b"])
def test_names_are_printed_as_they_are(name):
    row = {"stage": "sft", "note": f"model of {name}", "cached": False, "seconds": 1.0}
    lines = [line.rstrip() for line in result_table([row], "", {"output": name}, 80).splitlines()]
    assert f"sft: model of {name}" in lines and f"Files       {name}" in lines


@pytest.mark.parametrize(("knows", "rate"), [(True, "25.0% [10.0%, 50.0%]"), (False, "")])
def test_a_success_that_nobody_knows_is_not_shown(knows, rate):
    found = {"success": 0.25, "success_low": 0.1, "success_high": 0.5, "reward": 0.75, "knows_success": knows,
             "tokens_per_second": 9.0}  # fmt: skip
    stages = {
        name: SimpleNamespace(summary={"note": name}, seconds=1.0, cached=False, run_id="")
        for name in ("sft", "evaluate")
    }
    stages["evaluate"].summary["models"] = {"sft": found}
    run = SimpleNamespace(results=stages, postponed="", settings=SimpleNamespace(stages=SimpleNamespace(policy=None)))
    rows = result_rows(run)
    assert rows[0]["reward"] == 0.75 and ("success" in rows[0]) == knows
    (line,) = [line for line in result_table(rows, "", {}, 90).splitlines() if line.startswith("│sft")]
    assert "0.750" in line and (rate in line) and ("%" in line) == knows
    assert headline(rows) == (f"sft {rate}" if knows else "evaluate")
