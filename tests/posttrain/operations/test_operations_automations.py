"""deployments/automations.yaml applied to a fake client: created once, updated by name, never duplicated."""

from __future__ import annotations

import asyncio
from uuid import UUID, uuid4

import pytest

from posttrain.operations.automations import apply_automations, read_automations
from rl_core.errors import DataError

DEPLOYMENT, BLOCK = UUID(int=7), UUID(int=9)
TEXT = """
automations:
  - name: retrain on regression
    trigger: {type: event, posture: Reactive, expect: [posttrain.champion.regressed], threshold: 1, within: 0}
    actions: [{type: run-deployment, source: selected, deployment_id: post-training/nightly}]
  - name: notify
    enabled: false
    trigger: {type: event, posture: Reactive, expect: [failed, crashed, a, b, c, d], threshold: 1, within: 0}
    actions: [{type: call-webhook, block_document_id: webhook/alerts, payload: "{}"}]
"""


class IdHolder:
    def __init__(self, id):
        self.id = id


class FakeClient:
    """The used part of Prefect's client, over a dictionary."""

    def __init__(self, blocks=("webhook/alerts",)):
        self.automations, self.blocks, self.calls = {}, blocks, []

    async def read_automations_by_name(self, name):
        return [automation for automation in self.automations.values() if automation.name == name]

    async def create_automation(self, automation):
        self.calls.append(("create", automation.name))
        self.store(uuid4(), automation)

    async def update_automation(self, id, automation):
        from prefect.server.events.schemas.automations import AutomationUpdate

        self.calls.append(("update", automation.name))
        # As the real client: unset fields are not sent; the server refuses unknown fields and fills in defaults.
        sent = automation.model_dump(mode="json", exclude_unset=True)
        AutomationUpdate.model_validate(sent)
        self.store(id, automation.model_validate(sent))

    async def delete_automation(self, id):
        self.calls.append(("delete", self.automations.pop(id).name))

    async def read_deployment_by_name(self, name):
        from prefect.exceptions import ObjectNotFound

        if name != "post-training/nightly":
            raise ObjectNotFound(Exception())
        return IdHolder(DEPLOYMENT)

    async def read_block_document_by_name(self, name, kind):
        from prefect.exceptions import ObjectNotFound

        if f"{kind}/{name}" not in self.blocks:
            raise ObjectNotFound(Exception())
        return IdHolder(BLOCK)

    def store(self, id, automation):
        from prefect.events.schemas.automations import Automation

        data = automation.model_dump(mode="json")
        data["trigger"]["expect"].reverse()  # a set has no stable order
        data["trigger"]["id"] = str(uuid4())  # the server assigns trigger ids
        self.automations[id] = Automation.model_validate({**data, "id": str(id)})


@pytest.fixture
def path(tmp_path):
    path = tmp_path / "automations.yaml"
    path.write_text(TEXT)
    return path


def apply_file(client, path):
    client.calls.clear()
    return [
        (outcome.name, outcome.what, outcome.note)
        for outcome in asyncio.run(apply_automations(client, path))
    ]


def test_automations_are_created_once_with_ids_for_names(path):
    client = FakeClient()
    assert apply_file(client, path) == [
        ("retrain on regression", "made", ""),
        ("notify", "made", ""),
    ]
    retrain, notify = client.automations.values()
    assert (
        retrain.actions[0].deployment_id == DEPLOYMENT
        and notify.actions[0].block_document_id == BLOCK
    )
    assert (retrain.enabled, notify.enabled) == (True, False)
    assert [what for _, what, _ in apply_file(client, path)] == [
        "unchanged",
        "unchanged",
    ] and client.calls == []


def test_change_updates_the_existing_automation(path):
    client = FakeClient()
    apply_file(client, path)
    ids_before = list(client.automations)
    path.write_text(
        TEXT.replace(
            "threshold: 1, within: 0}\n    actions: [{type: run",
            "threshold: 3, within: 60}\n    actions: [{type: run",
        )
    )
    assert [what for _, what, _ in apply_file(client, path)] == ["updated", "unchanged"]
    assert list(client.automations) == ids_before and client.calls == [
        ("update", "retrain on regression")
    ]
    assert client.automations[ids_before[0]].trigger.threshold == 3
    assert [what for _, what, _ in apply_file(client, path)] == ["unchanged", "unchanged"]


def test_disabled_in_the_ui_stays_disabled_unless_the_file_says_so(path):
    client = FakeClient()
    apply_file(client, path)
    for automation in client.automations.values():
        automation.enabled = not automation.enabled
    assert [what for _, what, _ in apply_file(client, path)] == ["unchanged", "updated"]
    assert [automation.enabled for automation in client.automations.values()] == [False, False]


def test_duplicates_are_removed(path):
    client = FakeClient()
    apply_file(client, path)
    first = next(iter(client.automations.values()))
    client.store(UUID(int=2**128 - 1), first)
    assert apply_file(client, path)[0] == (
        "retrain on regression",
        "unchanged",
        "1 of the same name removed",
    )
    assert len(client.automations) == 2 and client.calls == [("delete", "retrain on regression")]


def test_automation_without_its_block_or_deployment_is_skipped(path):
    client = FakeClient(blocks=())
    assert (
        apply_file(client, path)[1][:2] == ("notify", "skipped")
        and "no block 'webhook/alerts'" in apply_file(client, path)[1][2]
    )
    path.write_text(TEXT.replace("post-training/nightly", "post-training/never"))
    assert (
        apply_file(client, path)[0][2]
        == "there is no deployment 'post-training/never' (written FLOW/DEPLOYMENT)"
    )


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ("just words", "must hold a list"),
        ("- {trigger: {}}", "automation 1 has no `name`"),
        ("- {name: a}\n- {name: a}", "'a' appears twice"),
        ("- [a, b]", "must hold a list"),
        ("a: [", "cannot be read"),
    ],
)
def test_invalid_files(tmp_path, text, problem):
    path = tmp_path / "automations.yaml"
    path.write_text(text)
    with pytest.raises(DataError, match=problem):
        read_automations(path)


def test_single_automation_and_empty_file(tmp_path):
    path = tmp_path / "automations.yaml"
    path.write_text("")
    assert read_automations(path) == []
    path.write_text("name: a\ntrigger: {}\n")
    assert read_automations(path) == [{"name": "a", "trigger": {}}]


def test_invalid_automation_names_the_field(path):
    path.write_text(TEXT.replace("posture: Reactive", "posture: Sideways", 1))
    with pytest.raises(DataError, match="'retrain on regression' is not valid:\n  trigger"):
        apply_file(FakeClient(), path)
