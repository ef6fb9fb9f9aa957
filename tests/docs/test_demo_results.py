"""The quick start's results of a run (docs/tools/demo_results.py): the machine, the table, and their places."""

import importlib.util

import pytest
from documents import ROOT

from flows.runtime.run_summary import format_result_table

SPEC = importlib.util.spec_from_file_location("demo_results", ROOT / "docs/tools/demo_results.py")
tool = importlib.util.module_from_spec(SPEC)
SPEC.loader.exec_module(tool)

CPU = "processor\t: 0\nmodel name\t: Some(R) Chip(TM) 9 CPU @ 2.0GHz\nflags\t\t: fpu avx2 avx512f\nprocessor\t: 1\n"


def test_the_machine_is_named_by_what_it_has():
    assert tool.machine(CPU, 0) == "2 cores (Some Chip 9, AVX-512, no AMX), seed 0,"
    assert ", AMX)" in tool.machine(CPU + "flags: amx_tile", 0) and "no AVX2" in tool.machine("", 0)


@pytest.mark.parametrize(
    ("document", "places"),
    [
        (tool.QUICKSTART, {tool._TABLE: "    THE TABLE\n", tool._TOOK: "THE MACHINE:"}),
    ],
)
def test_a_document_has_one_place_for_each_and_nothing_else_changes(document, places):
    text = document.read_text(encoding="utf-8")
    document_text = tool.with_results(text, places)
    assert document_text.count("THE ") == 2
    before, after = text.splitlines(), document_text.splitlines()
    assert set(after) - set(before) == {line for line in after if "THE " in line}
    with pytest.raises(ValueError, match="found 0 places"):
        tool.with_results("# nothing", places)


def test_the_table_is_that_of_the_terminal():
    rows = [{"stage": "sft", "note": "x", "seconds": 1.5, "cached": False}]
    shown = tool.table_lines(f"before\n{format_result_table(rows, '', {}, 80)}\nafter")
    assert tool._TABLE.fullmatch(shown) and "│sft" in shown and "after" not in shown
