"""Imports of a command without garbage collection, frozen once and only for commands."""

import gc
import subprocess
import sys

import pytest
from helpers import ROOT

from flows.runtime.import_setup import freeze_imported_objects, pause_garbage_collection


@pytest.mark.parametrize("collects", [True, False])
def test_collection_is_restored_even_after_an_error(collects):
    before = gc.isenabled()
    (gc.enable if collects else gc.disable)()
    try:
        with pytest.raises(ImportError), pause_garbage_collection():
            assert not gc.isenabled()
            raise ImportError
        assert gc.isenabled() == collects
    finally:
        (gc.enable if before else gc.disable)()


def test_imports_of_a_command_are_frozen_once_and_those_of_other_processes_never():
    script = """
import gc
from flows.runtime.import_setup import freeze_imported_objects, pause_garbage_collection
def count_frozen(is_command):
    with pause_garbage_collection(is_command=is_command):
        objects = [[number] for number in range(1000)]
        freeze_imported_objects()
    return gc.get_freeze_count()
library = count_frozen(False)
first = count_frozen(True)
print(library, first > 1000, count_frozen(True) <= first)
"""
    done = subprocess.run(
        [sys.executable, "-c", script], cwd=ROOT, capture_output=True, text=True, check=True
    )
    assert done.stdout.split() == ["0", "True", "True"]


def test_nothing_is_frozen_without_a_command():
    before = gc.get_freeze_count()
    with pause_garbage_collection():
        freeze_imported_objects()
    assert gc.get_freeze_count() == before
