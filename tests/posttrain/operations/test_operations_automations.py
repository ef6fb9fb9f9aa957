"""deployments/automations.yaml against a client of the test's own: made once, updated by name, never doubled."""

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


class Named:
    def __init__(self, id):
        self.id = id


class Client:
    """Used part of Prefect's client, over a dictionary."""

    def __init__(self, blocks=("webhook/alerts",)):
        self.there, self.blocks, self.calls = {}, blocks, []

    async def read_automations_by_name(self, name):
        return [automation for automation in self.there.values() if automation.name == name]

    async def create_automation(self, wanted):
        self.calls.append(("create", wanted.name))
        self.put(uuid4(), wanted)

    async def update_automation(self, id, wanted):
        from prefect.server.events.schemas.automations import AutomationUpdate

        self.calls.append(("update", wanted.name))
        # As the real one: what is not set is not sent, the server refuses what it does not know, and fills in defaults.
        sent = wanted.model_dump(mode="json", exclude_unset=True)
        AutomationUpdate.model_validate(sent)
        self.put(id, wanted.model_validate(sent))

    async def delete_automation(self, id):
        self.calls.append(("delete", self.there.pop(id).name))

    async def read_deployment_by_name(self, name):
        from prefect.exceptions import ObjectNotFound

        if name != "post-training/nightly":
            raise ObjectNotFound(Exception())
        return Named(DEPLOYMENT)

    async def read_block_document_by_name(self, name, kind):
        from prefect.exceptions import ObjectNotFound

        if f"{kind}/{name}" not in self.blocks:
            raise ObjectNotFound(Exception())
        return Named(BLOCK)

    def put(self, id, wanted):
        from prefect.events.schemas.automations import Automation

        data = wanted.model_dump(mode="json")
        data["trigger"]["expect"].reverse()  # a set has no order that lasts
        data["trigger"]["id"] = str(uuid4())  # the server gives triggers ids
        self.there[id] = Automation.model_validate({**data, "id": str(id)})


@pytest.fixture
def path(tmp_path):
    path = tmp_path / "automations.yaml"
    path.write_text(TEXT)
    return path


def run(client, path):
    client.calls.clear()
    return [
        (done.name, done.what, done.note) for done in asyncio.run(apply_automations(client, path))
    ]


def test_made_once_with_ids_for_names(path):
    client = Client()
    assert run(client, path) == [("retrain on regression", "made", ""), ("notify", "made", "")]
    retrain, notify = client.there.values()
    assert (
        retrain.actions[0].deployment_id == DEPLOYMENT
        and notify.actions[0].block_document_id == BLOCK
    )
    assert (retrain.enabled, notify.enabled) == (True, False)
    assert [what for _, what, _ in run(client, path)] == [
        "unchanged",
        "unchanged",
    ] and client.calls == []


def test_a_change_updates_the_one_that_is_there(path):
    client = Client()
    run(client, path)
    before = list(client.there)
    path.write_text(
        TEXT.replace(
            "threshold: 1, within: 0}\n    actions: [{type: run",
            "threshold: 3, within: 60}\n    actions: [{type: run",
        )
    )
    assert [what for _, what, _ in run(client, path)] == ["updated", "unchanged"]
    assert list(client.there) == before and client.calls == [("update", "retrain on regression")]
    assert client.there[before[0]].trigger.threshold == 3
    assert [what for _, what, _ in run(client, path)] == ["unchanged", "unchanged"]


def test_what_was_switched_off_in_the_ui_stays_off_and_the_file_may_insist(path):
    client = Client()
    run(client, path)
    for automation in client.there.values():
        automation.enabled = not automation.enabled
    assert [what for _, what, _ in run(client, path)] == ["unchanged", "updated"]
    assert [automation.enabled for automation in client.there.values()] == [False, False]


def test_doubles_of_the_same_name_are_removed(path):
    client = Client()
    run(client, path)
    first = next(iter(client.there.values()))
    client.put(UUID(int=2**128 - 1), first)
    assert run(client, path)[0] == (
        "retrain on regression",
        "unchanged",
        "1 of the same name removed",
    )
    assert len(client.there) == 2 and client.calls == [("delete", "retrain on regression")]


def test_without_its_block_or_deployment_one_is_left_out(path):
    client = Client(blocks=())
    assert (
        run(client, path)[1][:2] == ("notify", "skipped")
        and "no block 'webhook/alerts'" in run(client, path)[1][2]
    )
    path.write_text(TEXT.replace("post-training/nightly", "post-training/never"))
    assert (
        run(client, path)[0][2]
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
def test_files_that_are_none(tmp_path, text, problem):
    path = tmp_path / "automations.yaml"
    path.write_text(text)
    with pytest.raises(DataError, match=problem):
        read_automations(path)


def test_one_automation_alone_and_none(tmp_path):
    path = tmp_path / "automations.yaml"
    path.write_text("")
    assert read_automations(path) == []
    path.write_text("name: a\ntrigger: {}\n")
    assert read_automations(path) == [{"name": "a", "trigger": {}}]


def test_an_automation_that_prefect_does_not_take_names_the_field(path):
    path.write_text(TEXT.replace("posture: Reactive", "posture: Sideways", 1))
    with pytest.raises(DataError, match="'retrain on regression' is not valid:\n  trigger"):
        run(Client(), path)
