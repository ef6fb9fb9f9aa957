"""Every metric of online learning is in the reference, and every one of the reference is logged somewhere."""

import csv
import re
from types import SimpleNamespace as Namespace

import numpy as np
from helpers import ROOT

from rl_core.analysis.metric_reference import METRIC_GROUPS
from rl_core.online.drift_detection import ALARM_DIRECTIONS
from rl_core.online.update_audit import build_contribution_record
from rl_core.online.update_step import UpdateReport

SOURCES = [
    *(ROOT / "rl_core/online").glob("*.py"),
    *(ROOT / "posttrain/serving").glob("*.py"),
    *(ROOT / "posttrain/online").glob("*.py"),
]
# Text in quotes that begins a metric's name; a name without a slash behind "online" is none.
LITERAL = re.compile(r'"(online/[a-z0-9_/{}.]+)"')


def list_documented():
    return {
        metric.name
        for group in METRIC_GROUPS
        for metric in group.metrics
        if metric.name.startswith("online/")
    }


def test_every_logged_name_is_documented_and_the_other_way_round():
    literals = {name for path in SOURCES for name in LITERAL.findall(path.read_text())}
    assert len(literals) > 40 and sum("{" in name for name in literals) >= 7
    literals |= {name.replace("process.name", "process") for name in literals}
    literals = {name for name in literals if "." not in name}
    documented = list_documented()
    matched = set()
    for literal in literals:
        pattern = re.compile("[a-z0-9_]+".join(map(re.escape, re.split(r"\{\w+\}", literal))))
        found = {name for name in documented if pattern.fullmatch(name)}
        assert found, f"{literal} is not in rl_core/analysis/metrics.json"
        matched |= found
    assert documented == matched


def test_the_reasons_and_signals_are_those_of_the_code():
    documented = list_documented()
    for signal in ALARM_DIRECTIONS:
        assert {
            f"online/drift/{signal}{suffix}" for suffix in ("", "_level", "_limit")
        } <= documented
    writer = (ROOT / "rl_core/online/experience_writer.py").read_text()
    buffer = (ROOT / "rl_core/online/experience_buffer.py").read_text()
    reader = (ROOT / "rl_core/online/experience_reader.py").read_text()
    update = (ROOT / "rl_core/online/update_step.py").read_text()
    cases = {
        "answers": {*re.findall(r'counts\["(\w+)"\]', writer), *_list_returned(writer)},
        "count": set(re.findall(r'counts\["(\w+)"\]', reader)),
        "evicted": {
            *re.findall(r'evicted\["(\w+)"\]', buffer),
            *re.findall(r'_evict_slot\(.*, "(\w+)"\)', buffer),
            *_list_returned(buffer),
        },
        "refused": set(
            re.findall(r'"(\w+)"', re.search(r"self\.refused = dict\.fromkeys\(\(.*", update)[0])
        ),
    }
    for group, names in cases.items():
        prefix = f"online/{group}/"
        listed = {name.removeprefix(prefix) for name in documented if name.startswith(prefix)}
        assert listed == names, group


def _list_returned(source):
    """List the texts that `_find_exclusion_reason` or `_find_eviction_reason` returns."""
    body = re.search(r"    def _find_e\w+_reason\(.*?(?=\n    def )", source, re.DOTALL)[0]
    return set(re.findall(r'return "(\w+)"', body))


def test_every_field_of_a_record_of_an_update_is_documented():
    item = Namespace(
        buffered=Namespace(
            experience=Namespace(
                request_id="r",
                policy_version=1,
                rollouts=[Namespace(trajectory=Namespace(environment="e", level="l", seed=1))],
            ),
            number=1,
        ),
        experience=None,
        weight=1.0,
        label=Namespace(source="consensus", kind="text", confidence=1.0),
        rewards=Namespace(to_json=lambda: {"components": [], "rollouts": []}),
        advantages_R=np.zeros(2),
        error=0.5,
    )
    record = build_contribution_record(UpdateReport(3), Namespace(items=[item]), 1.0)
    fields = [*record, *(f"experiences[].{name}" for name in record["experiences"][0])]
    with (ROOT / "docs/tools/update_log_fields.csv").open(newline="") as file:
        assert [row["field"] for row in csv.DictReader(file)] == fields
    page = (ROOT / "docs/configuration/online.md").read_text()
    assert all(f"|`{field}`|" in page for field in fields)
