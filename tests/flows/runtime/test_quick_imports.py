"""Imports of a command without garbage collection, and what is left out of later ones: of commands alone, once."""

import gc
import subprocess
import sys

import pytest
from helpers import ROOT

from flows.runtime.import_setup import freeze_imported_objects, pause_garbage_collection


@pytest.mark.parametrize("collects", [True, False])
def test_collection_is_as_before_afterwards_also_after_an_error(collects):
    before = gc.isenabled()
    (gc.enable if collects else gc.disable)()
    try:
        with pytest.raises(ImportError), pause_garbage_collection():
            assert not gc.isenabled()
            raise ImportError
        assert gc.isenabled() == collects
    finally:
        (gc.enable if before else gc.disable)()


def test_what_a_command_imports_is_frozen_once_and_nothing_of_other_processes():
    script = """
import gc
from flows.runtime.import_setup import freeze_imported_objects, pause_garbage_collection
def frozen(of_command):
    with pause_garbage_collection(of_command=of_command):
        kept = [[number] for number in range(1000)]
        freeze_imported_objects()
    return gc.get_freeze_count()
own = frozen(False)
first = frozen(True)
print(own, first > 1000, frozen(True) <= first)
"""
    done = subprocess.run(
        [sys.executable, "-c", script], cwd=ROOT, capture_output=True, text=True, check=True
    )
    assert done.stdout.split() == ["0", "True", "True"]


def test_nothing_is_frozen_where_no_command_began():
    before = gc.get_freeze_count()
    with pause_garbage_collection():
        freeze_imported_objects()
    assert gc.get_freeze_count() == before
