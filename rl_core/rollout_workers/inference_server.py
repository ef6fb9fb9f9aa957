"""The inference server's dialect: vLLM's HTTP interface, which `posttrain serve` speaks as well.

Tokens go in and tokens with log-probabilities come out (`/v1/completions` with a prompt of ids and `return_token_ids`);
orders about weights go to the server's workers by `/collective_rpc`, to methods that are
deployments/vllm/posttrain_worker.py in vLLM and posttrain/serving/weight_control.py in
`posttrain serve`. Written from the source of vLLM 0.30.0.

Checks of an inference server before anything is sampled: model, vocabulary, version, abilities.
"""

from __future__ import annotations

import contextlib
import math
import os
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rl_core.errors import SettingsError
from rl_core.json_client import JsonConnections, ServerErrorResponse, ServerUnavailable
from rl_core.models.lora import is_lora, is_servable_adapter, unwrap_model
from rl_core.settings import RolloutSettings, SamplingSettings

if TYPE_CHECKING:
    from transformers import PreTrainedModel, PreTrainedTokenizerBase


# of a question; of an order about weights or sleep
QUERY_TIMEOUT_S, COMMAND_TIMEOUT_S = (
    10.0,
    600.0,
)
CACHE_RESET_TIMEOUT_S = 60.0  # for requests that hold blocks of the prefix cache to end
# the dialect's number for the log-probability of a token that cannot come
IMPOSSIBLE_LOGPROB = -9999.0
# of the distribution that tokens are drawn from, temperature included
PROCESSED_LOGPROBS = "processed_logprobs"
POSTTRAIN_ENGINE, VLLM_ENGINE = "posttrain", "vllm"  # engines
_MAX_STOP_TEXTS = 16  # stop texts of one request that `posttrain serve` takes; the trainer looks for all of them itself


@dataclass(frozen=True, slots=True)
class ServerState:
    """The process behind an address, and the weights in it."""

    instance: str  # drawn at the start of the process, and in every answer's `system_fingerprint`
    weights: str  # digest of those that were loaded last by an order; "" = those of its start


@dataclass(frozen=True, slots=True)
class ServerDescription:
    """A server that answers, and what it can do."""

    engine: str  # OWN or VLLM
    version: str
    model: str  # name that requests give
    architecture: str
    shape: Mapping[str, int]  # vocab_size, hidden_size, num_hidden_layers
    context: int  # longest prompt and completion together, in tokens
    dtype: str
    logprobs: str  # of which distribution, PROCESSED as it has to be
    lora_rank: int  # highest rank of an adapter; 0 = takes none
    sleeps: bool  # True = can give up its memory
    state: ServerState
    versions: Mapping[str, str]  # of the packages that compute, for the record

    @property
    def engine_label(self) -> str:
        """Engine and version, for people and records."""
        return f"{self.engine} {self.version}"


@dataclass(frozen=True, slots=True)
class ServedTokens:
    """Answer to one request for tokens."""

    tokens: list[int]
    logprobs: list[float]  # nats, at the temperature that was sampled at
    instance: str  # of the process that answered


@dataclass(frozen=True, slots=True)
class LoadedWeights:
    """Report of a server on a folder of weights that it has read."""

    digest: str  # of the tensors as it read them, see `weights.digest_of`
    num_compared: int  # tensors that are in its model under the name and shape of the file, and were looked at afterwards
    differing: Sequence[str]  # names of those that are not what the file holds


class InferenceServer:
    """Client of one server. Any thread. Raises: ServerAway, ServerRefusal in all methods that ask."""

    def __init__(self, settings: RolloutSettings) -> None:
        """Nothing is sent yet. Raises: SettingsError for a key that is not set."""
        self.settings = settings.server
        self.address = settings.address or ""
        self._connections = JsonConnections(
            settings.base_url, _build_auth_header(self.settings.key_variable)
        )

    def describe_server(self) -> ServerDescription:
        """Ask for everything. Raises: SettingsError for a server that speaks another dialect; ServerAway."""
        try:
            version = self._connections.get_json("/version", QUERY_TIMEOUT_S)["version"]
            listed = self._connections.get_json("/v1/models", QUERY_TIMEOUT_S)["data"]
            names = [str(card["id"]) for card in listed if not card.get("parent")]
        except (KeyError, TypeError) as error:
            raise SettingsError(
                f"rollouts.address: {self.address} answers, but not as vLLM does (/version and /v1/models: no {error})"
            ) from None
        except ServerErrorResponse as refusal:
            raise SettingsError(f"rollouts.address: {_describe_refusal(refusal)}") from refusal
        name = self.settings.model or (names[0] if names else "")
        if name not in names:
            raise SettingsError(
                f"rollouts.server.model: {self.address} serves no '{name}', but {', '.join(names) or 'no model'}"
            )
        told = self._call_first_worker("describe", QUERY_TIMEOUT_S)
        try:
            return ServerDescription(
                engine=str(told["engine"]),
                version=str(version),
                model=name,
                architecture=str(told["architecture"]),
                shape={
                    key: int(told["shape"][key])
                    for key in ("vocab_size", "hidden_size", "num_hidden_layers")
                },
                context=int(told["context"]),
                dtype=str(told["dtype"]),
                logprobs=str(told["logprobs"]),
                lora_rank=int(told["lora_rank"]),
                sleeps=bool(told["sleeps"]),
                state=ServerState(str(told["instance"]), str(told["weights"])),
                versions={
                    str(package): str(number) for package, number in told["versions"].items()
                },
            )
        except (KeyError, TypeError, ValueError, AttributeError) as error:
            raise SettingsError(
                f"rollouts.address: the worker extension of {self.address} is of another version of posttrain ("
                f"{type(error).__name__}: {error}); start the server with this checkout's deployments/vllm/start.py"
            ) from error

    def read_state(self) -> ServerState:
        """Ask for the process and its weights."""
        with _convert_server_failures():
            told = self._call_first_worker("state", QUERY_TIMEOUT_S)
        return ServerState(str(told["instance"]), str(told["weights"]))

    def tokenize_text(self, model_name: str, text: str) -> list[int]:
        """Ids of a text by the server's tokenizer, without special tokens."""
        body = {"model": model_name, "prompt": text, "add_special_tokens": False}
        return [
            int(token)
            for token in self._connections.post_json("/tokenize", body, QUERY_TIMEOUT_S)["tokens"]
        ]

    # Tokens

    def sample_completion(
        self,
        model_name: str,
        prompt_ids: Sequence[int],
        max_tokens: int,
        sampling: SamplingSettings,
        seed: Mapping[str, int],
        eos_ids: Sequence[int],
    ) -> ServedTokens:
        """Sample after a prompt: up to `most` tokens, one of `eos_ids` (which is kept), or about a stop text.

        Args:
            name: of the model, or of an adapter.
            seed: `seed`, and for `posttrain serve` `drawn`.
        Raises: ServerAway; ServerRefusal for a request that will never be answered, or an answer that is none.
        """
        cuts, timeout_s = self._connections.num_closes, self.settings.timeout_s
        body = {
            "model": model_name,
            "prompt": list(prompt_ids),
            "max_tokens": max_tokens,
            "n": 1,
            "stream": False,
            **seed,
            "temperature": sampling.temperature,
            "top_p": sampling.top_p,
            "top_k": sampling.top_k,
            "min_p": sampling.min_p,
            "repetition_penalty": sampling.repetition_penalty,
            "stop_token_ids": list(eos_ids),
            "ignore_eos": True,
            "stop": list(sampling.stop[:_MAX_STOP_TEXTS]),
            "include_stop_str_in_output": True,
            "skip_special_tokens": False,
            "add_special_tokens": False,
            "logprobs": 0,
            "return_token_ids": True,
            "return_tokens_as_token_ids": True,
        }
        end = time.monotonic() + timeout_s
        while True:
            try:
                with _convert_server_failures():
                    return _parse_completion(
                        self._connections.post_json("/v1/completions", body, timeout_s, cuts),
                        prompt_ids,
                    )
            except ServerErrorResponse as refusal:
                if refusal.status != 429:
                    raise
                if time.monotonic() > end:
                    raise ServerUnavailable(str(refusal)) from refusal
                time.sleep(min(max(refusal.retry_after, 0.05), 5.0))

    # Weights

    def load_weights(self, folder: Path) -> LoadedWeights:
        """Have the weights of a model folder loaded in place of the present ones; see `reset_prefix_cache`."""
        return _merge_load_reports(
            self._call_all_workers("load_weights", COMMAND_TIMEOUT_S, folder=str(folder))
        )

    def reset_prefix_cache(self) -> None:
        """Have the prefix cache emptied, which vLLM does not do (`success: false`) while requests hold blocks of it.

        Those of a run that was stopped may still end. Raises: ServerRefusal where they do not within FORGET_S.
        """
        end = time.monotonic() + CACHE_RESET_TIMEOUT_S
        while True:
            told = self._connections.post_json("/reset_prefix_cache", {}, COMMAND_TIMEOUT_S)
            if not isinstance(told, dict) or told.get("success", True):
                return
            if time.monotonic() > end:
                raise ServerErrorResponse(
                    f"{self.address} keeps what it computed with the weights before these: for {CACHE_RESET_TIMEOUT_S:g} s it has "
                    "answered requests of others; give each run a server of its own",
                    0,
                )
            time.sleep(0.1)

    def load_adapter(self, name: str, folder: Path) -> LoadedWeights:
        """Have an adapter of peft's format loaded under a name of its own."""
        read = _merge_load_reports(
            self._call_all_workers("read_weights", COMMAND_TIMEOUT_S, folder=str(folder))
        )
        self._connections.post_json(
            "/v1/load_lora_adapter",
            {"lora_name": name, "lora_path": str(folder)},
            COMMAND_TIMEOUT_S,
        )
        return read

    def unload_adapter(self, name: str, timeout_s: float = COMMAND_TIMEOUT_S) -> None:
        """Have an adapter dropped; one that is not there is no error."""
        try:
            self._connections.post_json("/v1/unload_lora_adapter", {"lora_name": name}, timeout_s)
        except ServerErrorResponse as refusal:
            if refusal.status not in (400, 404):
                raise

    def sleep_server(self) -> None:
        """Have GPU memory given up; weights stay in the machine's memory."""
        with _convert_server_failures():
            self._connections.post_json("/sleep?level=1", {}, COMMAND_TIMEOUT_S)

    def is_asleep(self) -> bool:
        """True = it has given up its memory, as at the order of an earlier run."""
        with _convert_server_failures():
            return bool(self._connections.get_json("/is_sleeping", QUERY_TIMEOUT_S)["is_sleeping"])

    def wake_server(self) -> None:
        """Inverse of `sleep`."""
        with _convert_server_failures():
            self._connections.post_json("/wake_up", {}, COMMAND_TIMEOUT_S)

    def close(self) -> None:
        """Cut all connections."""
        self._connections.close()

    def _call_first_worker(
        self, method: str, timeout_s: float, **arguments: str
    ) -> Mapping[str, Any]:
        """Answer of the first of the server's workers."""
        return self._call_all_workers(method, timeout_s, **arguments)[0]

    def _call_all_workers(
        self, method: str, timeout_s: float, **arguments: str
    ) -> list[Mapping[str, Any]]:
        """Answers of all of the server's workers. Raises: SettingsError where they do not know our methods."""
        body = {"method": f"posttrain_{method}", "kwargs": arguments}
        try:
            results = self._connections.post_json("/collective_rpc", body, timeout_s)["results"]
            if results and all(isinstance(result, dict) for result in results):
                return list(results)
        except (KeyError, TypeError):
            pass
        except ServerErrorResponse as refusal:
            if method != "describe" and refusal.status not in (404, 405):
                raise
            raise SettingsError(f"rollouts.address: {_describe_refusal(refusal)}") from refusal
        raise SettingsError(
            f"rollouts.address: {self.address} does not take posttrain's orders; {_START_HINT}"
        )


_START_HINT = "start vLLM with deployments/vllm/start.py, whose workers do, or `posttrain serve` with --set serving.rollouts=true"


@contextlib.contextmanager
def _convert_server_failures() -> Iterator[None]:
    """Raise an error of the server itself (5xx) as ServerAway: an engine that has failed may be started again."""
    try:
        yield
    except ServerErrorResponse as refusal:
        if refusal.status < 500:
            raise
        raise ServerUnavailable(str(refusal)) from refusal


def _describe_refusal(refusal: ServerErrorResponse) -> str:
    """An error of a server that was just met, with what to do."""
    if refusal.status in (401, 403):
        return f"{refusal}; set rollouts.server.key_variable to the environment variable that holds the server's key"
    return f"{refusal}; it does not take posttrain's orders: {_START_HINT}"


def _build_auth_header(variable: str | None) -> dict[str, str]:
    if variable is None:
        return {}
    if not (key := os.environ.get(variable, "").strip()):
        raise SettingsError(
            f"rollouts.server.key_variable: the environment variable {variable} is not set"
        )
    if not (key.isascii() and key.isprintable()):
        raise SettingsError(
            f"rollouts.server.key_variable: the environment variable {variable} holds characters that no key has"
        )
    return {"Authorization": f"Bearer {key}"}


def _parse_completion(answer: Any, prompt_ids: Sequence[int]) -> ServedTokens:
    """Tokens of an answer. Raises: ServerRefusal for one that is incomplete, or to another prompt."""
    try:
        choice = answer["choices"][0]
        tokens = [int(token) for token in choice["token_ids"]]
        told = [float(value) for value in choice["logprobs"]["token_logprobs"]]
        read, instance = list(choice["prompt_token_ids"]), str(answer["system_fingerprint"])
    except (KeyError, IndexError, TypeError, ValueError) as error:
        raise ServerErrorResponse(
            f"an answer of /v1/completions has no token_ids, prompt_token_ids or logprobs ({type(error).__name__}: "
            f"{error}); is it a version of vLLM that was not tested?",
            0,
        ) from error
    if len(tokens) != len(told):
        raise ServerErrorResponse(
            f"an answer of /v1/completions has {len(told)} log-probs for {len(tokens)} tokens", 0
        )
    if read != list(prompt_ids):
        raise ServerErrorResponse(
            f"the server read another prompt than it was sent: {len(read)} tokens in place of {len(prompt_ids)}",
            0,
        )
    return ServedTokens(
        tokens, [-math.inf if value <= IMPOSSIBLE_LOGPROB else value for value in told], instance
    )


def _merge_load_reports(results: Sequence[Mapping[str, Any]]) -> LoadedWeights:
    """The reports of all workers as one: they have to have read the same."""
    found = {str(result["digest"]) for result in results}
    return LoadedWeights(
        digest=found.pop() if len(found) == 1 else f"{len(found)} different ones",
        num_compared=sum(int(result.get("compared", 0)) for result in results),
        differing=[str(name) for result in results for name in result.get("differing", ())],
    )


_SHAPE_UNITS = {
    "vocab_size": "tokens",
    "hidden_size": "hidden units",
    "num_hidden_layers": "layers",
}
# of the vocabulary, spread over it, in the text that both tokenizers read
_NUM_COMPARED_TOKENS = 64


def check_server_at_start(
    settings: RolloutSettings, shape: Mapping[str, int] | None, lora_rank: int
) -> None:
    """Ask a server once, before a pipeline begins. Raises: SettingsError with what is wrong and what to do.

    Args:
        shape: of the model, as far as it is known (`check_model_shape`).
        lora_rank: of the adapter that will be sent; 0 = none.
    """
    server = InferenceServer(settings)
    try:
        description = server.describe_server()
    except ServerUnavailable as away:
        raise SettingsError(
            f"rollouts.address: no inference server answers ({away}); start one (docs/inference-servers.md), or set "
            "workers: in_process"
        ) from away
    finally:
        server.close()
    check_server_capabilities(description, settings, lora_rank)
    if shape is not None:
        check_model_shape(description, shape, settings.address or "")


def check_server_capabilities(
    description: ServerDescription, settings: RolloutSettings, lora_rank: int
) -> None:
    """Raises: SettingsError for another version of vLLM, or something that the server was not started for."""
    wanted = settings.server.version
    if description.engine == VLLM_ENGINE and description.version != wanted:
        raise SettingsError(
            f"rollouts.server.version: {settings.address} runs vLLM {description.version}, and {wanted} is accepted; "
            f"install deployments/vllm/requirements.txt there, or set version: {description.version} if you have "
            "compared both"
        )
    if description.logprobs != PROCESSED_LOGPROBS:
        raise SettingsError(
            f"rollouts.address: {settings.address} tells {description.logprobs}, which are not of the distribution "
            f"that it samples from; start it with --logprobs-mode {PROCESSED_LOGPROBS} (deployments/vllm/start.py does)"
        )
    if settings.server.sleeps and not description.sleeps:
        raise SettingsError(
            f"rollouts.server.sleeps: {settings.address} was not started with sleep mode; start it with --sleeps, or "
            "leave sleeps out"
        )
    if lora_rank > description.lora_rank:
        can = (
            f"adapters up to rank {description.lora_rank}"
            if description.lora_rank
            else "no adapters"
        )
        raise SettingsError(
            f"rollouts.address: {settings.address} takes {can}, and model.lora.rank is {lora_rank}; start it with "
            f"--lora-rank {lora_rank}"
        )


def check_model_shape(
    description: ServerDescription, shape: Mapping[str, int], address: str
) -> None:
    """Raises: SettingsError where the server's model has another vocabulary, width or depth than ours."""
    for name, words in _SHAPE_UNITS.items():
        if name in shape and shape[name] != description.shape[name]:
            raise SettingsError(
                f"rollouts.address: {address} serves another model ('{description.model}', {description.architecture}) "
                f"of {description.shape[name]:,} {words}, and the policy has {shape[name]:,}; start it with the "
                "policy's base model"
            )


def check_served_model(
    description: ServerDescription, model: PreTrainedModel, settings: RolloutSettings
) -> None:
    """As `check_server_capabilities` and `check_model_shape`, for a policy that is loaded."""
    config: Any = unwrap_model(model).config.get_text_config()
    rank = 0
    if is_lora(model) and is_servable_adapter(model):
        adapted: Any = model
        rank = max(part.r for part in adapted.peft_config.values())
    check_server_capabilities(description, settings, rank)
    known = {
        name: getattr(config, name)
        for name in _SHAPE_UNITS
        if isinstance(getattr(config, name, None), int)
    }
    check_model_shape(description, known, settings.address or "")


def check_server_tokenizer(
    server: InferenceServer, description: ServerDescription, tokenizer: PreTrainedTokenizerBase
) -> None:
    """Raises: SettingsError where the server reads a text as other tokens than the policy's tokenizer does."""
    size = len(tokenizer)
    spread = [place * size // _NUM_COMPARED_TOKENS for place in range(_NUM_COMPARED_TOKENS)]
    special = set(tokenizer.all_special_ids)
    text = str(tokenizer.decode([token for token in spread if token not in special]))
    ours = [int(token) for token in tokenizer.encode(text, add_special_tokens=False)]
    try:
        theirs = server.tokenize_text(description.model, text)
    except (ServerErrorResponse, KeyError, TypeError, ValueError) as error:
        raise SettingsError(
            f"rollouts.address: {server.address} does not tell its tokens ({error})"
        ) from error
    if ours != theirs:
        place = next(
            (i for i, (a, b) in enumerate(zip(ours, theirs, strict=False)) if a != b), len(ours)
        )
        raise SettingsError(
            f"rollouts.address: {server.address} has another tokenizer than the policy: of a text of {len(ours)} "
            f"tokens it reads {len(theirs)}, other ones from number {place + 1} on; start it with the policy's "
            "base model"
        )
