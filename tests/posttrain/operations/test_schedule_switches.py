"""Schedules that are registered again stay switched as they were; new ones are as their file says."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace
from uuid import UUID

from posttrain.operations.registration import (
    PAGE_SIZE,
    read_schedule_switches,
    restore_schedule_switches,
)


class FakeClient:
    """The used part of Prefect's client, over the deployments by name."""

    def __init__(self, deployments):
        self.deployments = deployments

    async def read_deployments(self, limit, offset):
        return list(self.deployments.values())[offset : offset + limit]

    async def read_deployment_by_name(self, name):
        return self.deployments[name]

    async def update_deployment_schedule(self, deployment_id, schedule_id, active):
        by_id = {deployment.id: deployment for deployment in self.deployments.values()}
        for schedule in by_id[deployment_id].schedules:
            if schedule.id == schedule_id:
                schedule.active = active


def build_deployment(number, *switches, start=0):
    """Build a deployment with schedules `s0`, `s1`, ... whose ids begin at `start`."""
    schedules = [
        SimpleNamespace(id=UUID(int=start + index), slug=f"s{index}", active=active)
        for index, active in enumerate(switches)
    ]
    return SimpleNamespace(id=UUID(int=number), schedules=schedules)


def test_what_was_switched_stays_and_new_schedules_are_as_the_file_says():
    others = {
        f"other/{number}": build_deployment(1000 + number, True) for number in range(PAGE_SIZE)
    }
    client = FakeClient({**others, "retrain/nightly": build_deployment(1, True, False)})
    switches = asyncio.run(read_schedule_switches(client))
    client.deployments |= {  # `prefect deploy` replaces schedules
        "retrain/nightly": build_deployment(1, False, True, False, start=50),
        "evaluate/daily": build_deployment(2, False, True),
        "run/main": build_deployment(3),
    }
    names = ["retrain/nightly", "evaluate/daily", "run/main"]
    (note,) = asyncio.run(restore_schedule_switches(client, names, switches))
    states = [[schedule.active for schedule in client.deployments[n].schedules] for n in names]
    assert states == [[True, False, False], [False, True], []]
    assert note.startswith("schedules are off for retrain/nightly, evaluate/daily: switch one on")
    client.deployments = {"run/main": build_deployment(3, True)}
    assert asyncio.run(restore_schedule_switches(client, ["run/main"], {})) == []
