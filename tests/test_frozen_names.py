"""Names that are persisted or public stay: lists are built from the code, and compared with files.

    python tests/test_frozen_names.py --add    # takes new names into tests/frozen/, removes none

A name that is to go is removed from its file by hand, which the review then sees.
"""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

if __name__ == "__main__":
    sys.path[:0] = [str(Path(__file__).parents[1]), str(Path(__file__).parent)]
    import conftest  # noqa: F401 threads and network, as in the tests

import matplotlib.figure
import pytest
from helpers import ROOT
from helpers import frozen_declarations as declared
from helpers import frozen_literals as literals
from helpers import frozen_scenes as scenes
from helpers.frozen_literals import Names
from helpers.frozen_records import describe_folder, generalize_name, list_fields, query_names

FOLDER = ROOT / "tests" / "frozen"
ADD = "python tests/test_frozen_names.py --add"


# ---------------------------------------------------------------------------------------- live runs


class LiveRuns:
    """Names in all that small runs of everything have written and answered."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.answers: set[str] = set()
        self.routes: set[str] = set()
        self.files: set[str] = set()
        self.fields: set[str] = set()
        self.printed: set[str] = self._play("pipeline", scenes.play_pipeline)
        self.tracked = list_tracked_names(folder / "pipeline/work/outputs/mlflow/mlflow.db")
        self._play("states", scenes.save_states)
        self._play("online", scenes.learn_online)
        for label, scene in (
            ("service", scenes.train_by_service),
            ("serving", scenes.chat_with_server),
            ("ratings", scenes.rate_answers),
        ):
            answers, routes = self._play(label, scene)
            self.answers |= {f"{label}: {field}" for field in answers}
            self.routes |= {f"{label}: {route}" for route in routes}

    def _play(self, label: str, scene: Callable[[Path], Any]) -> Any:
        folder = self.folder / label
        folder.mkdir()
        names = scene(folder)
        files, fields = describe_folder(folder, label)
        self.files |= files
        self.fields |= fields
        return names


@cache
def play_all() -> LiveRuns:
    """Return what the small runs left, without pictures and without processes for proofs."""
    with pytest.MonkeyPatch.context() as patch, tempfile.TemporaryDirectory() as folder:
        patch.setattr(subprocess, "run", scenes.answer_proofs(subprocess.run))
        patch.setattr(
            matplotlib.figure.Figure, "savefig", lambda figure, file, **_: file.write(b"png")
        )
        return LiveRuns(Path(folder))


TRACKED = {
    "tags": "key",
    "params": "key",
    "experiment_tags": "key",
    "model_version_tags": "key",
    "trace_tags": "key",
    "registered_model_tags": "key",
    "registered_model_aliases": "alias",
    "trace_request_metadata": "key",
    "logged_model_tags": "tag_key",
    "logged_model_params": "param_key",
    "datasets": "name",
    "input_tags": "name",
    "spans": "name",
}


def list_tracked_names(database: Path) -> set[str]:
    """Return the names in each table of a tracking store, with `N` for digests and numbers."""
    tracked = set()
    for table, column in TRACKED.items():
        names = {
            str(name) for (name,) in query_names(database, f"select distinct {column} from {table}")
        }
        tracked |= {f"{table}: {generalize_name(name)}" for name in names}
    return tracked


def list_states() -> Names:
    """Return the keys in the checkpoints of every trainer, and the names of weights in any."""
    states = dict(scenes.collect_trainer_states())
    keys = {name: set(list_fields(state)) for name, state in states.items()}
    common = set.intersection(*keys.values())
    names = {f"every trainer: {path}" for path in common}
    names |= {f"{name}: {path}" for name, paths in keys.items() for path in paths - common}
    for state in states.values():
        names |= {f"weights: {path}" for path in list_fields(state, keep_names=True) if "." in path}
    # only where weights are packed in digits, on processors with AMX
    return dict.fromkeys(
        (name for name in names if not name.endswith("perf/float_weight_share")), ""
    )


def list_tracking_names() -> Names:
    """Return the names that a tracking store has seen, and those that the code writes there."""
    listed = {*declared.list_fault_points(), *literals.list_file_names(), *declared.list_settings()}
    peers = {name.partition(": ")[2] for name in declared.list_framework_names()}
    written = {f"in the code: {name}" for name in literals.list_dotted_names(listed, peers)}
    written |= {f"set_tag: {name}" for name in literals.scan_calls("set_tag")}
    return dict.fromkeys(play_all().tracked | written, "")


# ----------------------------------------------------------------------------------------- sections


Section = Callable[[], Names]
SECTIONS: dict[str, Section] = {
    "public_names": declared.list_public_names,
    "import_paths": lambda: declared.list_import_paths(read_frozen("import_paths")),
    "settings": declared.list_settings,
    "framework_names": declared.list_framework_names,
    "choices": declared.list_choices_by_name,
    "commands": declared.list_commands,
    "command_output": lambda: dict.fromkeys(play_all().printed, ""),
    "flows": declared.list_flows,
    "project": declared.list_project,
    "environment_variables": literals.list_environment_variables,
    "metrics": declared.list_metrics,
    "fault_points": declared.list_fault_points,
    "tables": declared.list_tables,
    "messages": declared.list_messages,
    "request_bodies": lambda: declared.list_request_bodies(read_frozen("request_bodies")),
    "routes": lambda: dict.fromkeys(play_all().routes, ""),
    "answers": lambda: dict.fromkeys(play_all().answers, ""),
    "states": list_states,
    "files": lambda: {**literals.list_file_names(), **dict.fromkeys(play_all().files, "")},
    "record_fields": lambda: dict.fromkeys(play_all().fields, ""),
    "tracking_names": list_tracking_names,
}


def read_frozen(section: str) -> Names:
    """Return the names that a section has to keep."""
    path = FOLDER / f"{section}.json"
    groups = json.loads(path.read_text()) if path.is_file() else {}
    return {
        f"{group}{name}": about for group, names in groups.items() for name, about in names.items()
    }


def write_frozen(section: str, names: Names) -> None:
    """Write the names of a section, those of one file, command or class together."""
    groups: dict[str, Names] = {}
    for name, about in sorted(names.items()):
        head, colon, rest = name.rpartition(": ")
        groups.setdefault(f"{head}{colon}", {})[rest] = about
    text = json.dumps(groups, indent=1, ensure_ascii=False)
    (FOLDER / f"{section}.json").write_text(text + "\n")


@pytest.mark.parametrize("section", SECTIONS)
def test_names_are_as_they_were(section: str) -> None:
    frozen, present = read_frozen(section), SECTIONS[section]()
    missing = [f"{name}  {about}".rstrip() for name, about in frozen.items() if name not in present]
    changed = [
        f"{name}: {about!r}, now {present[name]!r}"
        for name, about in frozen.items()
        if present.get(name, about) != about and not has_more_choices(present[name], about)
    ]
    new = sorted(present.keys() - frozen.keys())
    new += [
        f"{name}: {present[name]}"
        for name, about in frozen.items()
        if has_more_choices(present.get(name, ""), about)
    ]
    file = f"tests/frozen/{section}.json"
    problems = [
        describe_lines("gone, though users or files of earlier runs have them", missing),
        describe_lines("changed, though users or files of earlier runs rely on them", changed),
        describe_lines(f"new; `{ADD}` takes them into {file}", new),
    ]
    assert not missing and not changed and not new, f"{file}:\n" + "\n".join(filter(None, problems))


def has_more_choices(present: str, frozen: str) -> bool:
    """Return True if a setting kept its default and all its choices, and has further choices."""
    default, *choices = present.split(" | ")
    frozen_default, *frozen_choices = frozen.split(" | ")
    return default == frozen_default and set(choices) > set(frozen_choices) > set()


@pytest.mark.parametrize(
    ("present", "expected"),
    [
        ('"a" | a | b | c', True),
        ('"a" | a | b', False),
        ('"a" | a | c', False),
        ('"c" | a | b | c', False),
        ("", False),
    ],
)
def test_only_a_further_choice_is_an_addition(present: str, expected: bool) -> None:
    assert has_more_choices(present, '"a" | a | b') is expected
    assert not has_more_choices("2 | 3", "2"), "a default without choices is no choice"


def describe_lines(heading: str, names: list[str]) -> str:
    """Return a heading with names below it; "" without names."""
    shown = [f"  {name}" for name in names[:40]] + [f"  and {len(names) - 40} more"] * (
        len(names) > 40
    )
    return "\n".join([f"{heading}:", *shown]) if names else ""


def add_new_names() -> None:
    """Take the names that are new into the files; what is frozen stays as it is."""
    FOLDER.mkdir(exist_ok=True)
    for section, build in SECTIONS.items():
        frozen = read_frozen(section)
        present = build()
        wider = {
            name: about
            for name, about in present.items()
            if has_more_choices(about, frozen.get(name, ""))
        }
        write_frozen(section, {**present, **frozen, **wider})
        num_new = len(present.keys() - frozen.keys()) + len(wider)
        print(f"{section}: {num_new} new of {len(present)}")


if __name__ == "__main__":
    if sys.argv[1:] != ["--add"]:
        raise SystemExit(f"usage: {ADD}")
    add_new_names()
