"""A training service in this process: its application, a client, and the worker in a thread."""

from __future__ import annotations

import contextlib
import json
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
from starlette.testclient import TestClient

from helpers.service_clients import loss
from posttrain.settings_files import parse_service_settings
from posttrain.training_service.http.application import build_service_app
from posttrain.training_service.store import ServiceStore
from posttrain.training_service.worker.engine_process import EngineProcess

ADDRESS = "http://127.0.0.1:8123"


class Service:
    """A running service. `client`: HTTP client with a new API key of that name."""

    def __init__(
        self,
        folder: Path,
        base: Path,
        *,
        key: str = "me",
        models: dict[str, dict[str, str]] | None = None,
        **server: Any,
    ) -> None:
        self.settings = parse_service_settings(
            {
                "folder": str(folder),
                "mlflow_runs": False,
                "server": {"poll_seconds": 20.0, **server},
                "engine": {"bases": {"base": str(base)}, "device": "cpu"},
                **(models or {}),
            }
        )
        self.folder = folder
        self.store = ServiceStore(self.settings.store_url)
        self.key, secret = self.store.create_key(key)
        self.client = TestClient(
            build_service_app(self.settings, self.store),
            base_url=ADDRESS,
            headers={"X-API-Key": secret},
        )
        self._worker: EngineProcess | None = None
        self._thread: threading.Thread | None = None

    def start_worker(self) -> None:
        self._worker = EngineProcess(self.settings, self.store)
        self._thread = threading.Thread(target=self._worker.run_until_stopped, daemon=True)
        self._thread.start()

    def stop_worker(self) -> None:
        if self._worker is not None and self._thread is not None:
            self._worker.request_stop()
            self._thread.join(60)
            assert not self._thread.is_alive()
        self._worker = self._thread = None

    # -- calls ---------------------------------------------------------------------------------------------------------

    def post(self, path: str, body: Any = None, *, status: int = 200, **more: Any) -> Any:
        """Return the decoded answer to a JSON request."""
        return self.call("POST", path, status=status, json=body if body is not None else {}, **more)

    def call(self, method: str, path: str, *, status: int = 200, **more: Any) -> Any:
        response = self.client.request(method, f"/api/v1/{path}", **more)
        assert response.status_code == status, response.text
        is_json = "json" in response.headers.get("content-type", "")
        return response.json() if is_json else response.content

    def session(self) -> str:
        return str(self.post("create_session", {"tags": [], "sdk_version": "test"})["session_id"])

    def new_run(self, session: str, number: int = 0, **lora: Any) -> str:
        body = {
            "session_id": session,
            "model_seq_id": number,
            "base_model": "base",
            "lora_config": {"rank": 4, "seed": 1, **lora},
        }
        return str(self.result(self.post("create_model", body))["model_id"])

    def forward_backward(
        self, run: str, seq: int, data: Any, *, status: int = 200, **options: Any
    ) -> Any:
        payload = loss(run, seq, data, **options).payload
        return self.raw("forward_backward", payload, status=status)

    def raw(self, path: str, payload: bytes, *, status: int = 200, **headers: str) -> Any:
        """Return the answer to a protobuf body."""
        sent = {
            "content-type": "application/x-protobuf",
            **{name.replace("_", "-"): v for name, v in headers.items()},
        }
        return self.call("POST", path, status=status, content=payload, headers=sent)

    def result(self, promise: Any) -> Any:
        """Return the result of a promise: a decoded JSON object, or protobuf bytes."""
        for _ in range(20):
            response: httpx.Response = self.client.post(
                "/api/v1/retrieve_future", json={"request_id": promise["request_id"]}
            )
            if response.status_code != 408:
                assert response.status_code == 200, response.text
                return (
                    response.content
                    if "protobuf" in response.headers["content-type"]
                    else json.loads(response.text)
                )
        raise AssertionError(f"no result of {promise}")


@contextlib.contextmanager
def running_service(
    folder: Path, base: Path, *, worker: bool = True, **server: Any
) -> Iterator[Service]:
    """Run a service until the block ends."""
    service = Service(folder, base, **server)
    with contextlib.closing(service.store), service.client:
        if worker:
            service.start_worker()
        try:
            yield service
        finally:
            service.stop_worker()
