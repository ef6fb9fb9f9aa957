"""A trainer's orders to the server: weights and adapters from folders, sleep. Taken where `serving.rollouts` is set."""

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

TAKEOVER_TIMEOUT_S = 120.0  # until new weights answer; requests that have begun end first
MAX_ADAPTER_RANK = 2**16
_ASLEEP_MESSAGE = "the server sleeps; POST /wake_up"


class WeightController:
    """Weights of a server as a trainer orders them, one order after the other."""

    def __init__(self, server: ChatServer) -> None:
        self._server = server
        self.instance = f"posttrain-{secrets.token_hex(8)}"  # of this process
        self._lock = asyncio.Lock()
        self._start_model: ServedModel | None = None  # as the server began
        self._weights_digest = ""  # digest of those that an order has loaded
        self._adapter_name: str | None = None  # name of the one that answers
        self.is_asleep = False  # True = memory of the engine is given up
        self._methods: Mapping[str, Callable[..., dict[str, Any]]] = {
            "posttrain_describe": self.describe_model,
            "posttrain_state": self.describe_state,
            "posttrain_load_weights": self.load_weights,
            "posttrain_read_weights": self.read_weights,
        }

    def check_model_name(self, name: str) -> None:
        """Raises: RefusedRequest (404) for what is neither the model nor the adapter that answers."""
        if name != self._adapter_name:
            self._server.check_model(name)
            if self._adapter_name is not None:
                raise ServingHTTPError(
                    404,
                    f"'{name[:200]}' answers no longer: the adapter '{self._adapter_name}' does",
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
        """Answer to an order. Raises: RefusedRequest (404, 409, 422, 503; 504 after `timeout_s`, while it goes on)."""
        self.check_commands_enabled()
        if method not in self._methods:
            raise ServingHTTPError(
                404, f"method: there is no '{method[:200]}'; known: {', '.join(self._methods)}"
            )
        try:
            inspect.signature(self._methods[method]).bind(*positional, **keywords)
        except TypeError as error:
            where = "args" if positional else "kwargs"
            raise ServingHTTPError(422, f"{where}: {error}", param=where) from None
        order = asyncio.ensure_future(
            self.run_exclusively(self._methods[method], *positional, **keywords)
        )
        try:
            found: dict[str, Any] = await asyncio.wait_for(asyncio.shield(order), timeout_s)
        except TimeoutError:
            order.add_done_callback(_log_command_failure)
            raise ServingHTTPError(
                504,
                f"timeout: '{method}' takes longer than {timeout_s:g} s; it goes on",
                param="timeout",
            ) from None
        return found

    async def run_exclusively(
        self, command: Callable[..., Any], *arguments: Any, **options: Any
    ) -> Any:
        """Result of an order, on a thread. Raises: RefusedRequest."""
        self.check_commands_enabled()

        def obey() -> Any:
            try:
                return command(*arguments, **options)
            except PosttrainError as error:
                raise ServingHTTPError(422, str(error)) from None

        async with self._lock:
            return await self._server.run_blocking(obey)

    def check_commands_enabled(self) -> None:
        """Raises: RefusedRequest (404) where orders are not taken, (503) before there is a model."""
        if not self._server.settings.rollouts:
            raise ServingHTTPError(
                404,
                "orders of a trainer are not taken here; start with --set serving.rollouts=true",
            )
        if self._server.model is None:
            raise ServingHTTPError(
                503, self._server.not_ready_reason, code="not_ready", retry_after=5
            )
        if self._server.engine is None and not self.is_asleep:
            raise ServingHTTPError(
                503, "the model begins to answer", code="not_ready", retry_after=1
            )

    # -- orders to the workers -----------------------------------------------------------------------------------------

    def describe_state(self) -> dict[str, Any]:
        """Process and weights."""
        return {"instance": self.instance, "weights": self._weights_digest}

    def describe_model(self) -> dict[str, Any]:
        """Model and abilities."""
        served = self._load_start_model()
        config = served.model.config.get_text_config()
        names = ("vocab_size", "hidden_size", "num_hidden_layers")
        return self.describe_state() | {
            "engine": POSTTRAIN_ENGINE,
            "architecture": type(served.model).__name__,
            "context": served.context,
            "shape": {name: int(getattr(config, name)) for name in names},
            "dtype": str(served.model.dtype),
            "logprobs": PROCESSED_LOGPROBS,
            "lora_rank": MAX_ADAPTER_RANK,
            "sleeps": True,
            "versions": {
                name: importlib.metadata.version(name)
                for name in ("posttrain", "torch", "transformers")
            },
        }

    def read_weights(self, folder: str) -> dict[str, Any]:
        """Digest of a folder's tensors as this process reads them. Raises: RefusedRequest (422)."""
        return {"digest": digest_weight_folder(_check_weights_folder(folder))}

    def load_weights(self, folder: str) -> dict[str, Any]:
        """Answer with the weights of a model folder from now on. Raises: RefusedRequest (422, 503); ModelError."""
        from transformers import AutoModelForCausalLM

        place, base = _check_weights_folder(folder), self._load_start_model()
        settings = dataclasses.replace(base.renderer.settings, path=None, lora=None)
        model: Any = load_pretrained(AutoModelForCausalLM, place, settings)
        model.to(base.model.device).requires_grad_(False).eval()
        compared, differing = _compare_tensors(model, place)
        digest = digest_weight_folder(place)
        self._publish_model(model)
        self._weights_digest, self._adapter_name = digest, None
        return {"digest": digest, "compared": compared, "differing": differing}

    # -- adapters ------------------------------------------------------------------------------------------------------

    def load_adapter(self, name: str, folder: str) -> None:
        """Answer with an adapter on the weights of the start from now on. Raises: RefusedRequest (400, 422, 503)."""
        from peft import PeftModel

        place, base = _check_weights_folder(folder), self._load_start_model()
        if name in (self._adapter_name, self._server.name):
            raise ServingHTTPError(400, f"lora_name: '{name}' is loaded already", param="lora_name")
        try:
            adapted: Any = PeftModel.from_pretrained(copy.deepcopy(base.model), str(place))
        except Exception as error:  # of peft: whatever is wrong with the files
            raise ServingHTTPError(
                422, f"lora_path: {type(error).__name__}: {str(error)[:300]}"
            ) from None
        self._publish_model(adapted.to(base.model.dtype).requires_grad_(False).eval())
        self._weights_digest, self._adapter_name = "", name

    def unload_adapter(self, name: str) -> None:
        """Forget an adapter; where it answers, the weights of the start do again. Raises: RefusedRequest (404)."""
        if name != self._adapter_name:
            raise ServingHTTPError(
                404, f"lora_name: '{name[:200]}' is not loaded", param="lora_name"
            )
        self._publish_model(self._load_start_model().model)
        self._weights_digest, self._adapter_name = "", None

    # -- sleep ---------------------------------------------------------------------------------------------------------

    def release_engine(self) -> None:
        """Give up the engine's memory; requests are refused until `wake`."""
        if not self.is_asleep and self._server.engine is not None:
            self._load_start_model()
            self.is_asleep = True
            answering, self._server.engine = self._server.engine, None
            self._server.not_ready_reason = _ASLEEP_MESSAGE
            answering.close_loop()

    def restore_engine(self) -> None:
        """Inverse of `sleep`."""
        if self.is_asleep:
            assert self._server.model is not None
            self._server.engine = EngineThread(self._server.model, self._server.settings)
            self.is_asleep = False

    def _load_start_model(self) -> ServedModel:
        """The model as the server began."""
        if self._start_model is None:
            assert self._server.model is not None
            self._start_model = self._server.model
        return self._start_model

    def _publish_model(self, model: Any) -> None:
        """Have a model answer. Raises: RefusedRequest (503) where it does not within TAKEOVER_S."""
        base, now = self._load_start_model(), self._server.model
        assert now is not None
        served = ServedModel(model, base.renderer, now.version + 1, base.context, base.base_version)
        answering = self._server.engine
        if answering is None:  # asleep
            self._server.model = served
            return
        if not self._server.publish_model(served):
            raise ServingHTTPError(
                422, "the weights are of a model that reads and writes other tokens"
            )
        end = time.monotonic() + TAKEOVER_TIMEOUT_S
        while answering.loop.state.policy_version != served.version:
            if time.monotonic() > end or not answering.is_alive:
                raise ServingHTTPError(
                    503, "the weights were not taken over; the server's log says why"
                )
            time.sleep(0.002)


def _log_command_failure(command: asyncio.Future[Any]) -> None:
    """Note how an order failed that nobody waits for any more."""
    if not command.cancelled() and (error := command.exception()) is not None:
        log.warning("an order whose caller has given up failed: %s", error)


def _check_weights_folder(folder: str) -> Path:
    """Folder of safetensors files. Raises: RefusedRequest (422)."""
    place = Path(folder)
    if not place.is_absolute() or not any(place.glob("*.safetensors")):
        raise ServingHTTPError(
            422, f"folder: {folder[:500]} is no folder of *.safetensors that this server can read"
        )
    return place


def _compare_tensors(model: Any, folder: Path) -> tuple[int, list[str]]:
    """Tensors of a folder that the model has by name and shape, and the names of those that it holds other bits of."""
    own, compared, differing = model.state_dict(), 0, []
    for file in sorted(folder.glob("*.safetensors")):
        with safe_open(file, framework="pt") as tensors:
            for name in tensors.keys():  # noqa: SIM118  # no mapping
                sent = tensors.get_tensor(name)
                if name in own and own[name].shape == sent.shape:
                    compared += 1
                    if not torch.equal(own[name].cpu(), sent.to(own[name].dtype)):
                        differing.append(name)
    return compared, differing
