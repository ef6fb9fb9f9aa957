"""A mixed load of several clients on a service's store, and its answers and final weights for comparison."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from pathlib import Path

from helpers.service import bits
from helpers.service_clients import Line
from posttrain.training_service.store import ServiceStore, StoredRequest
from rl_core.service.saved_weights import read_state

AHEAD = 6  # requests of a client that are accepted before their answers are there


class Clients:
    """Clients that go through their scripts; a new object begins every script again, as clients that retry do."""

    def __init__(self, store: ServiceStore, scripts: Sequence[Sequence[Line]]) -> None:
        self.store, self.scripts = store, scripts
        self.ids: list[list[str]] = [[] for _ in scripts]
        self._open: list[list[int]] = [
            [] for _ in scripts
        ]  # places of accepted requests without an answer

    def step(self) -> bool:
        """Send all that may be sent now. Returns False when every script has all its answers."""
        going = False
        for script, ids, open_places in zip(self.scripts, self.ids, self._open, strict=True):
            open_places[:] = [place for place in open_places if not self._is_final(ids[place])]
            while len(ids) < len(script) and len(open_places) < AHEAD:
                line = script[len(ids)]
                if any(place <= line.after for place in open_places):
                    break
                request = line.request
                if callable(request):
                    request = request(self.store.find_request(ids[line.after]))
                stored = self.store.accept_request(request)
                open_places.append(len(ids))
                ids.append(stored.request_id)
            going |= len(ids) < len(script) or bool(open_places)
        return going

    def _is_final(self, request_id: str) -> bool:
        result = self.store.find_result(request_id)
        assert result is not None, f"{request_id} is lost"
        return result.is_final


def answers(
    store: ServiceStore, scripts: Sequence[Sequence[Line]]
) -> dict[tuple[str, str, int], tuple]:
    """Return (kind, target, seq) -> state, answer, error of every request."""
    results = {}
    for script in scripts:
        requests: list[StoredRequest] = []
        for line in script:
            request = line.request
            if callable(request):
                request = request(requests[line.after])
            request = store.accept_request(request)  # the same request again: its answer
            requests.append(request)
            assert request.is_final, f"{request.kind} {request.target} {request.seq} has no answer"
            results[request.kind, request.target, request.seq] = (
                request.state,
                request.answer,
                request.error,
                request.category,
            )
    return results


def weights(store: ServiceStore, folder: Path) -> dict[str, object]:
    """Return everything that was saved with its optimizer: path -> bits."""
    states = {}
    for record in store.list_checkpoints(limit=10_000).items:
        state = read_state(folder / record.folder)
        states[record.path] = (
            record.steps,
            bits({key: value for key, value in state.items() if key != "note"}),
        )
    return states


def settings_of(folder: Path, base: Path, **worker):
    """Return the settings of a service in a folder; few tokens a pass, so that batches are cut."""
    from rl_core.settings import ServiceEngineSettings, ServiceSettings, ServiceWorkerSettings

    engine = ServiceEngineSettings(
        bases={"base": str(base)}, device="cpu", micro_batch_tokens=48, pass_tokens=128, slots=16
    )
    settings = ServiceSettings(folder=str(folder), engine=engine, mlflow_runs=False)
    return dataclasses.replace(settings, worker=ServiceWorkerSettings(**worker))
