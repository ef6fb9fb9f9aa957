"""Weight control by a trainer: loads weights and adapters from folders, sleep and wake-up (`serving.rollouts`)."""

from __future__ import annotations

import asyncio
import copy
import dataclasses
import importlib.metadata
import inspect
import logging
import secrets
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open

from posttrain.serving.chat_server import ChatServer
from posttrain.serving.errors import ServingHTTPError
from posttrain.serving.served_model import EngineThread, ServedModel
from rl_core.errors import PosttrainError
from rl_core.models.causal_lm import load_pretrained
from rl_core.rollout_workers.inference_server import POSTTRAIN_ENGINE, PROCESSED_LOGPROBS
from rl_core.rollout_workers.server_weights import digest_weight_folder

log = logging.getLogger(__name__)

TAKEOVER_TIMEOUT_S = 120.0  # until new weights answer; requests in progress end first
MAX_ADAPTER_RANK = 2**16
_ASLEEP_MESSAGE = "the server sleeps; POST /wake_up"


class WeightController:
    """Controller of a server's weights; runs a trainer's commands one at a time."""

    def __init__(self, server: ChatServer) -> None:
        self._server = server
        self.instance = f"posttrain-{secrets.token_hex(8)}"  # id of this process
        self._lock = asyncio.Lock()
        self._start_model: ServedModel | None = None  # the model with which the server began
        self._weights_digest = ""  # of the weights that a command loaded
        self._adapter_name: str | None = None  # the adapter in use
        self.is_asleep = False  # True = the engine's memory is released
        self._methods: Mapping[str, Callable[..., dict[str, Any]]] = {
            "posttrain_describe": self.describe_model,
            "posttrain_state": self.describe_state,
            "posttrain_load_weights": self.load_weights,
            "posttrain_read_weights": self.read_weights,
        }

    def check_model_name(self, name: str) -> None:
        """Refuse a name other than that of the adapter in use or the model. Raises: ServingHTTPError (404)."""
        if name == self._adapter_name:
            return
        self._server.check_model(name)
        if self._adapter_name is not None:
            raise ServingHTTPError(
                404,
                f"'{name[:200]}' is not served now: the adapter '{self._adapter_name}' is",
                param="model",
                code="model_not_found",
            )

    async def run_command(
        self,
        method: str,
        positional: Sequence[str],
        keywords: Mapping[str, str],
        timeout_s: float | None,
    ) -> dict[str, Any]:
        """Run a command by method name and return its result.

        Raises: ServingHTTPError (404, 409, 422, 503; 504 after `timeout_s`, while the command continues).
        """
        self.check_commands_enabled()
        if method not in self._methods:
            raise ServingHTTPError(
                404, f"method: there is no '{method[:200]}'; known: {', '.join(self._methods)}"
            )
        try:
            inspect.signature(self._methods[method]).bind(*positional, **keywords)
        except TypeError as error:
            param = "args" if positional else "kwargs"
            raise ServingHTTPError(422, f"{param}: {error}", param=param) from None
        command = asyncio.ensure_future(
            self.run_exclusively(self._methods[method], *positional, **keywords)
        )
        try:
            result: dict[str, Any] = await asyncio.wait_for(asyncio.shield(command), timeout_s)
        except TimeoutError:
            command.add_done_callback(_log_command_failure)
            raise ServingHTTPError(
                504,
                f"timeout: '{method}' takes longer than {timeout_s:g} s; it continues",
                param="timeout",
            ) from None
        return result

    async def run_exclusively(
        self, command: Callable[..., Any], *arguments: Any, **options: Any
    ) -> Any:
        """Run a command on a thread while no other command runs. Raises: ServingHTTPError."""
        self.check_commands_enabled()

        def run() -> Any:
            try:
                return command(*arguments, **options)
            except PosttrainError as error:
                raise ServingHTTPError(422, str(error)) from None

        async with self._lock:
            return await self._server.run_blocking(run)

    def check_commands_enabled(self) -> None:
        """Refuse commands if they are disabled (404) or there is no model yet (503). Raises: ServingHTTPError."""
        server = self._server
        if not server.settings.rollouts:
            raise ServingHTTPError(
                404,
                "commands of a trainer are disabled here; start with --set serving.rollouts=true",
            )
        if server.model is None:
            raise ServingHTTPError(503, server.not_ready_reason, code="not_ready", retry_after=5)
        if server.engine is None and not self.is_asleep:
            raise ServingHTTPError(
                503, "the model is about to be served", code="not_ready", retry_after=1
            )

    def describe_state(self) -> dict[str, Any]:
        """Describe the process and its weights."""
        return {"instance": self.instance, "weights": self._weights_digest}

    def describe_model(self) -> dict[str, Any]:
        """Describe the model and what the server supports."""
        served = self._load_start_model()
        config = served.model.config.get_text_config()
        dimensions = ("vocab_size", "hidden_size", "num_hidden_layers")
        packages = ("posttrain", "torch", "transformers")
        return self.describe_state() | {
            "engine": POSTTRAIN_ENGINE,
            "architecture": type(served.model).__name__,
            "context": served.context,
            "shape": {name: int(getattr(config, name)) for name in dimensions},
            "dtype": str(served.model.dtype),
            "logprobs": PROCESSED_LOGPROBS,
            "lora_rank": MAX_ADAPTER_RANK,
            "sleeps": True,
            "versions": {name: importlib.metadata.version(name) for name in packages},
        }

    def read_weights(self, folder: str) -> dict[str, Any]:
        """Compute the digest of a folder's tensors as this process reads them. Raises: ServingHTTPError (422)."""
        return {"digest": digest_weight_folder(_check_weights_folder(folder))}

    def load_weights(self, folder: str) -> dict[str, Any]:
        """Serve the weights of a model folder from now on. Raises: ServingHTTPError (422, 503); ModelError."""
        from transformers import AutoModelForCausalLM

        path, start_model = _check_weights_folder(folder), self._load_start_model()
        settings = dataclasses.replace(start_model.renderer.settings, path=None, lora=None)
        model: Any = load_pretrained(AutoModelForCausalLM, path, settings)
        model.to(start_model.model.device).requires_grad_(False).eval()
        num_compared, differing = _compare_tensors(model, path)
        digest = digest_weight_folder(path)
        self._publish_model(model)
        self._weights_digest, self._adapter_name = digest, None
        return {"digest": digest, "compared": num_compared, "differing": differing}

    def load_adapter(self, name: str, folder: str) -> None:
        """Serve an adapter on the server's initial weights from now on. Raises: ServingHTTPError (400, 422, 503)."""
        from peft import PeftModel

        path, start_model = _check_weights_folder(folder), self._load_start_model()
        if name in (self._adapter_name, self._server.name):
            raise ServingHTTPError(400, f"lora_name: '{name}' is loaded already", param="lora_name")
        try:
            model: Any = PeftModel.from_pretrained(copy.deepcopy(start_model.model), str(path))
        except Exception as error:  # of peft: whatever is wrong with the files
            raise ServingHTTPError(
                422, f"lora_path: {type(error).__name__}: {str(error)[:300]}"
            ) from None
        self._publish_model(model.to(start_model.model.dtype).requires_grad_(False).eval())
        self._weights_digest, self._adapter_name = "", name

    def unload_adapter(self, name: str) -> None:
        """Unload the adapter in use and serve the initial weights again. Raises: ServingHTTPError (404)."""
        if name != self._adapter_name:
            raise ServingHTTPError(
                404, f"lora_name: '{name[:200]}' is not loaded", param="lora_name"
            )
        self._publish_model(self._load_start_model().model)
        self._weights_digest, self._adapter_name = "", None

    def release_engine(self) -> None:
        """Release the engine's memory; requests are refused until `restore_engine`."""
        if not self.is_asleep and self._server.engine is not None:
            self._load_start_model()
            self.is_asleep = True
            engine, self._server.engine = self._server.engine, None
            self._server.not_ready_reason = _ASLEEP_MESSAGE
            engine.close_loop()

    def restore_engine(self) -> None:
        """Start the engine again after `release_engine`."""
        if self.is_asleep:
            assert self._server.model is not None
            self._server.engine = EngineThread(self._server.model, self._server.settings)
            self.is_asleep = False

    def _load_start_model(self) -> ServedModel:
        """Return the model with which the server began."""
        if self._start_model is None:
            assert self._server.model is not None
            self._start_model = self._server.model
        return self._start_model

    def _publish_model(self, model: Any) -> None:
        """Serve a model. Raises: ServingHTTPError (503) if it does not answer within TAKEOVER_TIMEOUT_S."""
        start_model, current = self._load_start_model(), self._server.model
        assert current is not None
        served = ServedModel(
            model,
            start_model.renderer,
            current.version + 1,
            start_model.context,
            start_model.base_version,
        )
        engine = self._server.engine
        if engine is None:  # asleep
            self._server.model = served
            return
        if not self._server.publish_model(served):
            raise ServingHTTPError(
                422, "the weights are of a model with another tokenizer or chat template"
            )
        deadline = time.monotonic() + TAKEOVER_TIMEOUT_S
        while engine.loop.state.policy_version != served.version:
            if time.monotonic() > deadline or not engine.is_alive:
                raise ServingHTTPError(
                    503, "the server did not switch to the weights; its log says why"
                )
            time.sleep(0.002)


def _log_command_failure(command: asyncio.Future[Any]) -> None:
    """Log the failure of a command whose caller no longer waits."""
    if not command.cancelled() and (error := command.exception()) is not None:
        log.warning("a command failed after its caller timed out: %s", error)


def _check_weights_folder(folder: str) -> Path:
    """Return the path of a folder of safetensors files. Raises: ServingHTTPError (422)."""
    path = Path(folder)
    if not path.is_absolute() or not any(path.glob("*.safetensors")):
        raise ServingHTTPError(
            422, f"folder: {folder[:500]} is no folder of *.safetensors that this server can read"
        )
    return path


def _compare_tensors(model: Any, folder: Path) -> tuple[int, list[str]]:
    """Compare the tensors of a folder with those of the model.

    Returns: number of tensors that the model has by name and shape; names of those whose bits differ.
    """
    state, num_compared, differing = model.state_dict(), 0, []
    for file in sorted(folder.glob("*.safetensors")):
        with safe_open(file, framework="pt") as tensors:
            for name in tensors.keys():  # noqa: SIM118  # no mapping
                sent = tensors.get_tensor(name)
                if name not in state or state[name].shape != sent.shape:
                    continue
                num_compared += 1
                if not torch.equal(state[name].cpu(), sent.to(state[name].dtype)):
                    differing.append(name)
    return num_compared, differing
