"""A stand-in for vLLM 0.30.0 on loopback: its answers' shapes as its source gives them, over a transformers model.

Orders go through rl_core/rollout_workers/vllm/posttrain_worker.py, the very extension that vLLM's workers load: the
stand-in has the attributes of vLLM's worker that it uses. What the engine itself does (scheduling, kernels, sampling)
is not vLLM's.
"""

from __future__ import annotations

import copy
import importlib.util
import json
import threading
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from importlib.metadata import version
from types import SimpleNamespace
from typing import Any
from urllib.parse import parse_qs, urlsplit

import torch

from helpers import ROOT
from rl_core.inference.sampling import compute_sequence_seed, draw_tokens, draw_uniforms

INSTANCE = "vllm-0123456789abcdef"


def load_worker_extension(instance: str) -> Any:
    """Return the class that vLLM's workers use as a base."""
    spec = importlib.util.spec_from_file_location(
        "posttrain_worker", ROOT / "rl_core/rollout_workers/vllm/posttrain_worker.py"
    )
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    module.version = lambda name: (
        "0.30.0" if name == "vllm" else version(name)
    )  # it is not installed here
    module.os = SimpleNamespace(environ={"POSTTRAIN_INSTANCE": instance})  # as start.py sets it
    return module.PosttrainWorker


def make_worker(
    model: Any,
    *,
    context: int = 32,
    logprobs: str = "processed_logprobs",
    rank: int = 16,
    instance: str = INSTANCE,
) -> Any:
    """Make a worker with a model, as vLLM names its parts."""
    config = model.config
    config.architectures = [type(model).__name__]

    class Worker(load_worker_extension(instance)):
        def __init__(self) -> None:
            self.model_runner = SimpleNamespace(get_model=lambda: model)
            self.vllm_config = SimpleNamespace(
                lora_config=SimpleNamespace(max_lora_rank=rank) if rank else None
            )
            self.model_config = SimpleNamespace(
                hf_text_config=config,
                hf_config=config,
                get_vocab_size=lambda: config.vocab_size,
                max_model_len=context,
                dtype=next(model.parameters()).dtype,
                logprobs_mode=logprobs,
                enable_sleep_mode=True,
            )

        def reload_weights(self, weights_iterator: Any) -> None:
            parameters = model.state_dict()
            for name, tensor in weights_iterator:
                parameters[name].copy_(tensor)

    return Worker()


class VllmStandIn:
    """State of the server and its requests; `before` may answer first."""

    def __init__(self, model: Any, tokenizer: Any, **options: Any) -> None:
        self.model, self.tokenizer = model.eval(), tokenizer
        self.worker = make_worker(model, **options)
        self.context = options.get("context", 32)
        self.asked: list[tuple[str, Any]] = []
        self.lock = threading.Lock()
        self.version, self.is_asleep = "0.30.0", False
        self.instance = options.get("instance", INSTANCE)
        self.adapters: dict[str, str] = {}
        self.before = lambda path, body: None
        self.adapted: Any = None  # the model with the newest adapter

    def answer(self, method: str, path: str, body: Any) -> tuple[int, Any]:
        """Return status and body of the answer."""
        route = urlsplit(path).path
        with self.lock:
            self.asked.append((path, body))
            if (instead := self.before(route, body)) is not None:
                return instead
            table = {
                "/version": self._version,
                "/v1/models": self._models,
                "/tokenize": self._tokenize,
                "/collective_rpc": self._rpc,
                "/v1/completions": self._complete,
                "/v1/load_lora_adapter": self._load,
                "/v1/unload_lora_adapter": self._unload,
                "/sleep": self._sleep_until,
                "/wake_up": self._wake,
                "/health": lambda body: (200, ""),
                "/is_sleeping": lambda body: (200, {"is_sleeping": self.is_asleep}),
            }
            if route == "/reset_prefix_cache":
                return 200, {"success": True}
            if route not in table:
                return 404, {"detail": "Not Found"}
            return table[route](
                {**(body or {}), **{k: v[0] for k, v in parse_qs(urlsplit(path).query).items()}}
            )

    def _version(self, body: Any) -> tuple[int, Any]:
        return 200, {"version": self.version}

    def _models(self, body: Any) -> tuple[int, Any]:
        def card(name: str, parent: str | None, root: str) -> dict[str, Any]:
            return {
                "id": name,
                "object": "model",
                "created": 1764102000,
                "owned_by": "vllm",
                "root": root,
                "parent": parent,
                "max_model_len": None if parent else self.context,
                "permission": [],
            }

        adapters = [card(name, "policy", path) for name, path in self.adapters.items()]
        return 200, {"object": "list", "data": [card("policy", None, "/models/base"), *adapters]}

    def _tokenize(self, body: Any) -> tuple[int, Any]:
        ids = self.tokenizer.encode(body["prompt"], add_special_tokens=body["add_special_tokens"])
        return 200, {
            "count": len(ids),
            "max_model_len": self.context,
            "tokens": ids,
            "token_strs": None,
        }

    def _rpc(self, body: Any) -> tuple[int, Any]:
        if not hasattr(self.worker, body["method"]):
            return 500, {
                "error": {
                    "message": f"'Worker' object has no attribute '{body['method']}'",
                    "type": "InternalServerError",
                    "param": None,
                    "code": 500,
                }
            }
        try:
            result = getattr(self.worker, body["method"])(
                *body.get("args", []), **body.get("kwargs", {})
            )
        except Exception as error:
            return 500, {
                "error": {
                    "message": str(error),
                    "type": "InternalServerError",
                    "param": None,
                    "code": 500,
                }
            }
        return 200, {"results": [result]}

    def _load(self, body: Any) -> tuple[int, Any]:
        from peft import PeftModel

        if body["lora_name"] in self.adapters:
            return 400, {
                "error": {
                    "message": f"The lora adapter '{body['lora_name']}' has already been loaded.",
                    "type": "InvalidUserInput",
                    "param": None,
                    "code": 400,
                }
            }
        self.adapters[body["lora_name"]] = body["lora_path"]
        self.adapted = PeftModel.from_pretrained(
            copy.deepcopy(self.model), body["lora_path"]
        ).eval()
        return 200, f"Success: LoRA adapter '{body['lora_name']}' added successfully."

    def _unload(self, body: Any) -> tuple[int, Any]:
        if self.adapters.pop(body["lora_name"], None) is None:
            return 404, {
                "error": {
                    "message": f"The lora adapter '{body['lora_name']}' cannot be found.",
                    "type": "NotFoundError",
                    "param": None,
                    "code": 404,
                }
            }
        return 200, f"Success: LoRA adapter '{body['lora_name']}' removed successfully."

    def _sleep_until(self, body: Any) -> tuple[int, Any]:
        self.is_asleep = True
        return 200, ""

    def _wake(self, body: Any) -> tuple[int, Any]:
        self.is_asleep = False
        return 200, ""

    @torch.no_grad()
    def _complete(self, body: Any) -> tuple[int, Any]:
        assert not self.is_asleep and 0 <= body["seed"] < 2**63
        if body["model"] not in ("policy", *self.adapters):
            return 404, {
                "error": {
                    "message": f"The model `{body['model']}` does not exist.",
                    "type": "NotFoundError",
                    "param": "model",
                    "code": 404,
                }
            }
        if len(body["prompt"]) + body["max_tokens"] > self.context:
            return 400, {
                "error": {
                    "message": "This model's maximum context length is exceeded.",
                    "type": "BadRequestError",
                    "param": "input_tokens",
                    "code": 400,
                }
            }
        model = self.model if body["model"] == "policy" else self.adapted
        drawn = draw_uniforms(compute_sequence_seed("vllm", body["seed"]), body["max_tokens"])
        tokens: list[int] = []
        logprobs: list[float] = []
        while len(tokens) < body["max_tokens"] and not (
            tokens and tokens[-1] in body["stop_token_ids"]
        ):
            logits_1V = model(input_ids=torch.tensor([[*body["prompt"], *tokens]])).logits[:, -1]
            for token, bias in (body.get("logit_bias") or {}).items():
                logits_1V[0, int(token)] += bias
            token_1, logprob_1 = draw_tokens(
                logits_1V, torch.from_numpy(drawn[len(tokens) :][:1]), body["temperature"]
            )
            tokens.append(int(token_1))
            logprobs.append(float(logprob_1))
            if any(stop in self.tokenizer.decode(tokens) for stop in body["stop"]):
                break
        ended = tokens[-1] in body["stop_token_ids"]
        names = [f"token_id:{token}" for token in tokens]
        choice = {
            "index": 0,
            "text": self.tokenizer.decode(tokens),
            "finish_reason": "stop" if ended else "length",
            "logprobs": {
                "text_offset": [0] * len(tokens),
                "token_logprobs": logprobs,
                "tokens": names,
                "top_logprobs": [
                    {name: value} for name, value in zip(names, logprobs, strict=True)
                ],
            },
            "stop_reason": tokens[-1] if ended else None,
            "token_ids": tokens,
            "prompt_logprobs": None,
            "prompt_token_ids": body["prompt"],
            "routed_experts": None,
        }
        usage = {
            "prompt_tokens": len(body["prompt"]),
            "total_tokens": len(body["prompt"]) + len(tokens),
            "completion_tokens": len(tokens),
            "prompt_tokens_details": None,
        }
        return 200, {
            "id": "cmpl-0",
            "object": "text_completion",
            "created": 1764102000,
            "model": body["model"],
            "choices": [choice],
            "service_tier": None,
            "system_fingerprint": self.instance,
            "usage": usage,
            "kv_transfer_params": None,
            "ec_transfer_params": None,
            "metrics": None,
        }


@contextmanager
def vllm_stand_in(model: Any, tokenizer: Any, *, port: int = 0, **options: Any) -> Any:
    """Run the server until the block ends; `url` is its address."""
    server = VllmStandIn(model, tokenizer, **options)

    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def _reply(self, body: Any) -> None:
            status, answer = server.answer(self.command, self.path, body)
            data = answer.encode() if isinstance(answer, str) else json.dumps(answer).encode()
            self.send_response(status)
            self.send_header("Content-Length", str(len(data)))
            self.end_headers()
            self.wfile.write(data)

        def do_GET(self) -> None:
            self._reply(None)

        def do_POST(self) -> None:
            self._reply(json.loads(self.rfile.read(int(self.headers["Content-Length"]))))

        def log_message(self, *_: Any) -> None:
            pass

    class Web(ThreadingHTTPServer):
        request_queue_size = 256  # all clients of a collection may connect together

        def handle_error(self, *_: Any) -> None:
            """Ignore a client that has cut its connections."""

    web = Web(("127.0.0.1", port), Handler)
    web.daemon_threads = True
    thread = threading.Thread(target=web.serve_forever, daemon=True)
    thread.start()
    server.url = f"http://127.0.0.1:{web.server_port}"  # type: ignore[attr-defined]
    try:
        yield server
    finally:
        web.shutdown()
        web.server_close()
        thread.join()
