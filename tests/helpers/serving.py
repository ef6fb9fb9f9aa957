"""A server of `posttrain serve` in this process on a real port, over a small model."""

from __future__ import annotations

import contextlib
import json
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import uvicorn

from helpers.waiting import free_ports, wait_for
from posttrain.serving.application import build_chat_app
from posttrain.serving.chat_server import ChatServer
from posttrain.serving.served_model import ModelSource, ServedModel, load_served_model
from posttrain.web.server_setup import limit_connections
from rl_core import create_policy
from rl_core.inference.engine import create_rollout_backend
from rl_core.inference.sampling import compute_sequence_seed
from rl_core.inference.serving_requests import AnswerSequence
from rl_core.settings import ModelSettings, SamplingSettings, ServingSettings

TOKEN = "a token of tests"
TEXTS = [
    "User:\ncolour at row 2 column 3?\n\nAssistant:\nzoom 2 3\n",
    "answer red 5 grüße 你好 😀 naïve\n",
] * 30


def make_folder_of_model(
    folder: Path, seed: int = 0, texts: list[str] = TEXTS, **settings: Any
) -> Path:
    """Make a model folder: byte-level tokenizer, random weights that are sharp enough for answers to differ."""
    model_settings = ModelSettings(
        **{"preset": "nano", "vocab_size": 400, "context": 256, "device": "cpu", **settings}
    )
    policy = create_policy(texts, model_settings, seed=seed)
    for parameter in policy.model.parameters():
        parameter.data.mul_(3.0 if parameter.ndim > 1 else 1.0)
    return policy.save(folder)


class RunningServer:
    """A server, a client with its token, and answers of the offline engine to compare with."""

    def __init__(
        self,
        folder: Path,
        model: Path,
        *,
        begins: bool = True,
        answers: Any = None,
        **settings: Any,
    ) -> None:
        (port,) = free_ports(1)
        self.settings = ServingSettings(
            **{"port": port, "slots": 4, "context": 200, "threads": 1, **settings}
        )
        self.place = ModelSource(str(model), folder)
        self.server = ChatServer(self.settings, "small", folder, TOKEN, answers=answers)
        if begins:
            self.server.start_serving(self.loaded(model))
        protocol: Any = limit_connections(self.settings.max_connections, self.settings.idle_seconds)
        config = uvicorn.Config(
            build_chat_app(self.server),
            http=protocol,
            host="127.0.0.1",
            port=port,
            log_level="error",
            timeout_graceful_shutdown=1,
            lifespan="on",
        )
        self.web = uvicorn.Server(config)
        self._thread = threading.Thread(target=self.web.run, daemon=True)
        self.url = f"http://127.0.0.1:{port}"
        self.client = httpx.Client(
            base_url=self.url, headers={"Authorization": f"Bearer {TOKEN}"}, timeout=60
        )

    def loaded(self, folder: Path, version: int = 0) -> ServedModel:
        model = load_served_model(
            ModelSource(str(folder), self.place.output), self.settings, ModelSettings(device="cpu")
        )
        return ServedModel(model.model, model.renderer, version, model.context)

    def start(self) -> None:
        self._thread.start()
        wait_for(lambda: self.web.started, "the server")

    def stop(self) -> None:
        self.client.close()
        self.web.should_exit = True
        self._thread.join(20)
        assert not self._thread.is_alive()

    def chat(self, content: str = "row 2", *, status: int = 200, **more: Any) -> Any:
        """Return the decoded answer to one question."""
        body = {"model": "small", "messages": [{"role": "user", "content": content}], **more}
        response = self.client.post("/v1/chat/completions", json=body)
        assert response.status_code == status, response.text
        return response.json()

    def stream(self, content: str = "row 2", **more: Any) -> list[Any]:
        """Return the parts of a stream."""
        body = {
            "model": "small",
            "messages": [{"role": "user", "content": content}],
            "stream": True,
            **more,
        }
        with self.client.stream("POST", "/v1/chat/completions", json=body) as response:
            assert (
                response.status_code == 200 and "event-stream" in response.headers["content-type"]
            )
            lines = [line.removeprefix("data: ") for line in response.iter_lines() if line]
        assert lines[-1] == "[DONE]"
        return [json.loads(line) for line in lines[:-1]]

    @property
    def state(self) -> Any:
        assert self.server.engine is not None
        return self.server.engine.loop.state


def offline_answer(
    model: ServedModel,
    content: str,
    *,
    seed: int = 0,
    tokens: int = 200,
    temperature: float = 1.0,
    choice: int = 0,
    **sampling: Any,
) -> AnswerSequence:
    """Return the answer of the offline engine to a question on the same weights."""
    renderer = model.renderer
    backend = create_rollout_backend(
        model.model, eos_ids=renderer.eos_ids, pad_id=renderer.pad_id, max_length=model.context
    )
    ids = renderer.prompt_ids([{"role": "user", "content": content}])
    sequence = AnswerSequence(ids, compute_sequence_seed("chat", seed, choice))
    backend.run_sequences(
        [sequence],
        SamplingSettings(max_completion_tokens=tokens, temperature=temperature, **sampling),
    )
    return sequence


@contextlib.contextmanager
def running_server(folder: Path, model: Path, **settings: Any) -> Iterator[RunningServer]:
    """Run a server until the block ends."""
    server = RunningServer(folder, model, **settings)
    server.start()
    try:
        yield server
    finally:
        server.stop()
