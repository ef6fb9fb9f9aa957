"""Client of an inference server: vLLM's HTTP interface, which `posttrain serve` speaks too, and checks of the server.

Tokens go in, tokens with log-probabilities come out (`/v1/completions` with a prompt of ids and `return_token_ids`).
Commands about weights go to the server's workers by `/collective_rpc`, to methods that are implemented by
vllm/posttrain_worker.py in vLLM and by posttrain/serving/weight_control.py in `posttrain serve`. Written
from the source of vLLM 0.30.0.

Before anything is sampled, the server's model, vocabulary, version and capabilities are checked.
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
from rl_core.models.lora import select_served_rank, unwrap_model
from rl_core.settings import RolloutSettings, SamplingSettings
from rl_core.settings.rollouts import TRIED_VLLM_VERSIONS, VLLM_VERSION

if TYPE_CHECKING:
    from transformers import PreTrainedModel, PreTrainedTokenizerBase


QUERY_TIMEOUT_S = 10.0
COMMAND_TIMEOUT_S = 600.0  # for commands about weights or sleep
CACHE_RESET_TIMEOUT_S = 60.0  # for requests that hold blocks of the prefix cache to end
IMPOSSIBLE_LOGPROB = -9999.0  # vLLM's value for a token of probability 0
PROCESSED_LOGPROBS = (
    "processed_logprobs"  # log-probs of the sampling distribution, including temperature
)
POSTTRAIN_ENGINE, VLLM_ENGINE = "posttrain", "vllm"
_LEAST_BIAS = -100.0  # of a logit, vLLM's limit
_MAX_STOP_TEXTS = (
    16  # per request, the limit of `posttrain serve`; the trainer checks all stop texts itself
)
_START_HINT = "start vLLM with deployments/vllm/start.py, or `posttrain serve` with --set serving.rollouts=true"
_SHAPE_UNITS = {
    "vocab_size": "tokens",
    "hidden_size": "hidden units",
    "num_hidden_layers": "layers",
}
_NUM_COMPARED_TOKENS = 64  # spread over the vocabulary, in the text that both tokenizers read


@dataclass(frozen=True, slots=True)
class ServerState:
    """The process behind an address, and its weights."""

    instance: str  # random id of the process, also in every answer's `system_fingerprint`
    weights: str  # digest of the weights loaded last by a command; "" = the initial ones


@dataclass(frozen=True, slots=True)
class ServerDescription:
    """A server and its capabilities."""

    engine: str  # POSTTRAIN_ENGINE or VLLM_ENGINE
    version: str
    model: str  # its name in requests
    architecture: str
    shape: Mapping[str, int]  # vocab_size, hidden_size, num_hidden_layers
    context: int  # longest prompt and completion together, in tokens
    dtype: str
    logprobs: str  # kind of log-probs; must be PROCESSED_LOGPROBS
    lora_rank: int  # highest adapter rank; 0 = adapters unsupported
    sleeps: bool  # True = can release its memory
    state: ServerState
    versions: Mapping[str, str]  # of packages that affect numbers, for the record

    @property
    def engine_label(self) -> str:
        """Engine and version, for messages and records."""
        return f"{self.engine} {self.version}"


@dataclass(frozen=True, slots=True)
class ServedTokens:
    """The answer to one request for tokens."""

    tokens: list[int]
    logprobs: list[float]  # nats, at the sampling temperature
    instance: str  # process that answered


@dataclass(frozen=True, slots=True)
class LoadedWeights:
    """A server's report on a folder of weights that it has read."""

    digest: str  # of the tensors as read, see `weight_transfer.combine_digests`
    num_compared: int  # tensors with the same name and shape in its model, compared after loading
    differing: Sequence[str]  # names of those that differ from the file


class InferenceServer:
    """A client of one server, usable on any thread.

    All methods that send requests raise ServerUnavailable and ServerErrorResponse.
    """

    def __init__(self, settings: RolloutSettings) -> None:
        """Read the key; send nothing.

        Raises: SettingsError if the key is not set.
        """
        self.settings = settings.server
        self.address = settings.address or ""
        self.textless_ids: Sequence[int] = ()  # tokens that are not sampled
        self._connections = JsonConnections(
            settings.base_url, _build_auth_header(self.settings.key_variable)
        )

    def describe_server(self) -> ServerDescription:
        """Request the description of the server.

        Raises: SettingsError for a server with another interface; ServerUnavailable.
        """
        try:
            version = self._connections.get_json("/version", QUERY_TIMEOUT_S)["version"]
            listed = self._connections.get_json("/v1/models", QUERY_TIMEOUT_S)["data"]
            names = [str(card["id"]) for card in listed if not card.get("parent")]
        except (KeyError, TypeError) as error:
            raise SettingsError(
                f"rollouts.address: {self.address} answers, but not like vLLM (/version and /v1/models: no {error})"
            ) from None
        except ServerErrorResponse as refusal:
            raise SettingsError(f"rollouts.address: {_describe_refusal(refusal)}") from refusal
        name = self.settings.model or (names[0] if names else "")
        if name not in names:
            raise SettingsError(
                f"rollouts.server.model: {self.address} does not serve '{name}'; it serves "
                f"{', '.join(names) or 'no model'}"
            )
        description = self._call_first_worker("describe", QUERY_TIMEOUT_S)
        try:
            return ServerDescription(
                engine=str(description["engine"]),
                version=str(version),
                model=name,
                architecture=str(description["architecture"]),
                shape={
                    key: int(description["shape"][key])
                    for key in ("vocab_size", "hidden_size", "num_hidden_layers")
                },
                context=int(description["context"]),
                dtype=str(description["dtype"]),
                logprobs=str(description["logprobs"]),
                lora_rank=int(description["lora_rank"]),
                sleeps=bool(description["sleeps"]),
                state=ServerState(str(description["instance"]), str(description["weights"])),
                versions={
                    str(package): str(number) for package, number in description["versions"].items()
                },
            )
        except (KeyError, TypeError, ValueError, AttributeError) as error:
            raise SettingsError(
                f"rollouts.address: the worker extension of {self.address} belongs to another version of posttrain "
                f"({type(error).__name__}: {error}); start the server with this checkout's deployments/vllm/start.py"
            ) from error

    def read_state(self) -> ServerState:
        """Request the id of the process and its weights."""
        with _convert_server_failures():
            state = self._call_first_worker("state", QUERY_TIMEOUT_S)
        return ServerState(str(state["instance"]), str(state["weights"]))

    def tokenize_text(self, model_name: str, text: str) -> list[int]:
        """Tokenise a text with the server's tokenizer, without special tokens."""
        body = {"model": model_name, "prompt": text, "add_special_tokens": False}
        answer = self._connections.post_json("/tokenize", body, QUERY_TIMEOUT_S)
        return [int(token) for token in answer["tokens"]]

    def sample_completion(
        self,
        model_name: str,
        prompt_ids: Sequence[int],
        max_tokens: int,
        sampling: SamplingSettings,
        seed: Mapping[str, int],
        eos_ids: Sequence[int],
    ) -> ServedTokens:
        """Sample up to `max_tokens` tokens after a prompt, until one of `eos_ids` (included) or a stop text.

        Args:
            model_name: of the model or an adapter.
            seed: `seed`, and for `posttrain serve` also `drawn`.
        Raises: ServerUnavailable; ServerErrorResponse for a request that will never succeed, or an invalid answer.
        """
        num_closes, timeout_s = self._connections.num_closes, self.settings.timeout_s
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
        if self.textless_ids:
            body["logit_bias"] = {str(token): _LEAST_BIAS for token in self.textless_ids}
        end = time.monotonic() + timeout_s
        while True:
            try:
                with _convert_server_failures():
                    answer = self._connections.post_json(
                        "/v1/completions", body, timeout_s, num_closes
                    )
                    return _parse_completion(answer, prompt_ids)
            except ServerErrorResponse as refusal:
                if refusal.status != 429:
                    raise
                if time.monotonic() > end:
                    raise ServerUnavailable(str(refusal)) from refusal
                time.sleep(min(max(refusal.retry_after, 0.05), 5.0))

    def load_weights(self, folder: Path) -> LoadedWeights:
        """Load the weights of a model folder in place of the current ones; see `reset_prefix_cache`."""
        return _merge_load_reports(
            self._call_all_workers("load_weights", COMMAND_TIMEOUT_S, folder=str(folder))
        )

    def reset_prefix_cache(self) -> None:
        """Empty the prefix cache, which vLLM refuses (`success: false`) while requests hold blocks of it.

        Requests of a stopped run may still be ending.
        Raises: ServerErrorResponse if they do not end within CACHE_RESET_TIMEOUT_S.
        """
        end = time.monotonic() + CACHE_RESET_TIMEOUT_S
        while True:
            answer = self._connections.post_json("/reset_prefix_cache", {}, COMMAND_TIMEOUT_S)
            if not isinstance(answer, dict) or answer.get("success", True):
                return
            if time.monotonic() > end:
                raise ServerErrorResponse(
                    f"{self.address} could not empty its prefix cache of the previous weights: it has answered "
                    f"other clients' requests for {CACHE_RESET_TIMEOUT_S:g} s; use one server per run",
                    0,
                )
            time.sleep(0.1)

    def load_adapter(self, name: str, folder: Path) -> LoadedWeights:
        """Load an adapter in peft's format under its own name."""
        report = _merge_load_reports(
            self._call_all_workers("read_weights", COMMAND_TIMEOUT_S, folder=str(folder))
        )
        self._connections.post_json(
            "/v1/load_lora_adapter",
            {"lora_name": name, "lora_path": str(folder)},
            COMMAND_TIMEOUT_S,
        )
        return report

    def unload_adapter(self, name: str, timeout_s: float = COMMAND_TIMEOUT_S) -> None:
        """Unload an adapter; ignore a missing one."""
        try:
            self._connections.post_json("/v1/unload_lora_adapter", {"lora_name": name}, timeout_s)
        except ServerErrorResponse as refusal:
            if refusal.status not in (400, 404):
                raise

    def sleep_server(self) -> None:
        """Release the server's GPU memory; weights stay in the machine's memory."""
        with _convert_server_failures():
            self._connections.post_json("/sleep?level=1", {}, COMMAND_TIMEOUT_S)

    def is_asleep(self) -> bool:
        """Return whether the server has released its memory, for example on command of an earlier run."""
        with _convert_server_failures():
            return bool(self._connections.get_json("/is_sleeping", QUERY_TIMEOUT_S)["is_sleeping"])

    def wake_server(self) -> None:
        """Undo `sleep_server`."""
        with _convert_server_failures():
            self._connections.post_json("/wake_up", {}, COMMAND_TIMEOUT_S)

    def close(self) -> None:
        """Close all connections."""
        self._connections.close()

    def _call_first_worker(
        self, method: str, timeout_s: float, **arguments: str
    ) -> Mapping[str, Any]:
        """Call a method of the server's workers and return the first worker's answer."""
        return self._call_all_workers(method, timeout_s, **arguments)[0]

    def _call_all_workers(
        self, method: str, timeout_s: float, **arguments: str
    ) -> list[Mapping[str, Any]]:
        """Call a method of all workers of the server and return their answers.

        Raises: SettingsError if the workers do not have posttrain's methods.
        """
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
            f"rollouts.address: {self.address} does not support posttrain's commands; {_START_HINT}"
        )


@contextlib.contextmanager
def _convert_server_failures() -> Iterator[None]:
    """Convert internal server errors (5xx) to ServerUnavailable: a failed engine may be restarted."""
    try:
        yield
    except ServerErrorResponse as refusal:
        if refusal.status < 500:
            raise
        raise ServerUnavailable(str(refusal)) from refusal


def _describe_refusal(refusal: ServerErrorResponse) -> str:
    """Describe an error of a server during first contact, and what to do about it."""
    if refusal.status in (401, 403):
        return f"{refusal}; set rollouts.server.key_variable to the environment variable that holds the server's key"
    return f"{refusal}; it does not support posttrain's commands: {_START_HINT}"


def _build_auth_header(variable: str | None) -> dict[str, str]:
    if variable is None:
        return {}
    if not (key := os.environ.get(variable, "").strip()):
        raise SettingsError(
            f"rollouts.server.key_variable: the environment variable {variable} is not set"
        )
    if not (key.isascii() and key.isprintable()):
        raise SettingsError(
            f"rollouts.server.key_variable: the environment variable {variable} contains characters that are invalid "
            "in a key"
        )
    return {"Authorization": f"Bearer {key}"}


def _parse_completion(answer: Any, prompt_ids: Sequence[int]) -> ServedTokens:
    """Parse the tokens of an answer.

    Raises: ServerErrorResponse for an incomplete answer, or one to another prompt.
    """
    try:
        choice = answer["choices"][0]
        tokens = [int(token) for token in choice["token_ids"]]
        logprobs = [float(value) for value in choice["logprobs"]["token_logprobs"]]
        read_ids, instance = list(choice["prompt_token_ids"]), str(answer["system_fingerprint"])
    except (KeyError, IndexError, TypeError, ValueError) as error:
        raise ServerErrorResponse(
            f"an answer of /v1/completions has no token_ids, prompt_token_ids or logprobs ({type(error).__name__}: "
            f"{error}); this version of vLLM may be untested",
            0,
        ) from error
    if len(tokens) != len(logprobs):
        raise ServerErrorResponse(
            f"an answer of /v1/completions has {len(logprobs)} log-probs for {len(tokens)} tokens",
            0,
        )
    if read_ids != list(prompt_ids):
        raise ServerErrorResponse(
            f"the server read another prompt than it was sent: {len(read_ids)} tokens instead of {len(prompt_ids)}",
            0,
        )
    return ServedTokens(
        tokens,
        [-math.inf if value <= IMPOSSIBLE_LOGPROB else value for value in logprobs],
        instance,
    )


def _merge_load_reports(results: Sequence[Mapping[str, Any]]) -> LoadedWeights:
    """Merge the reports of all workers, which must have read the same weights."""
    digests = {str(result["digest"]) for result in results}
    return LoadedWeights(
        digest=digests.pop() if len(digests) == 1 else f"{len(digests)} different ones",
        num_compared=sum(int(result.get("compared", 0)) for result in results),
        differing=[str(name) for result in results for name in result.get("differing", ())],
    )


def check_server_at_start(
    settings: RolloutSettings, shape: Mapping[str, int] | None, lora_rank: int
) -> None:
    """Check a server once before a pipeline begins.

    Args:
        shape: of the model, as far as it is known (`check_model_shape`).
        lora_rank: of the adapter that will be sent; 0 = none.
    Raises: SettingsError with what is wrong and what to do.
    """
    server = InferenceServer(settings)
    try:
        description = server.describe_server()
    except ServerUnavailable as error:
        raise SettingsError(
            f"rollouts.address: no inference server answers ({error}); start one (docs/scaling.md), or set "
            "workers: in_process"
        ) from error
    finally:
        server.close()
    check_server_capabilities(description, settings, lora_rank)
    if shape is not None:
        check_model_shape(description, shape, settings.address or "")


def check_server_capabilities(
    description: ServerDescription, settings: RolloutSettings, lora_rank: int
) -> None:
    """Raise SettingsError for another version of vLLM, or a feature that the server was not started with."""
    required = settings.server.version
    accepted = TRIED_VLLM_VERSIONS if required == VLLM_VERSION else (required,)
    release = description.version.partition("+")[0]
    if description.engine == VLLM_ENGINE and not {description.version, release} & {*accepted}:
        raise SettingsError(
            f"rollouts.server.version: {settings.address} runs vLLM {description.version}, but "
            f"{' or '.join(accepted)} is required; "
            f"install deployments/vllm/requirements.txt there, or set version: {description.version} if you have "
            "tested it"
        )
    if description.logprobs != PROCESSED_LOGPROBS:
        raise SettingsError(
            f"rollouts.address: {settings.address} returns {description.logprobs}, which are not those of its sampling "
            f"distribution; start it with --logprobs-mode {PROCESSED_LOGPROBS} (deployments/vllm/start.py does)"
        )
    if settings.server.sleeps and not description.sleeps:
        raise SettingsError(
            f"rollouts.server.sleeps: {settings.address} was not started with sleep mode; start it with --sleeps, or "
            "remove sleeps"
        )
    if lora_rank > description.lora_rank:
        supported = (
            f"adapters up to rank {description.lora_rank}"
            if description.lora_rank
            else "no adapters"
        )
        raise SettingsError(
            f"rollouts.address: {settings.address} supports {supported}, but model.lora.rank is {lora_rank}; start it "
            f"with --lora-rank {lora_rank}"
        )


def check_model_shape(
    description: ServerDescription, shape: Mapping[str, int], address: str
) -> None:
    """Raise SettingsError if the server's model has another vocabulary, width or depth than the policy."""
    for name, unit in _SHAPE_UNITS.items():
        if name in shape and shape[name] != description.shape[name]:
            raise SettingsError(
                f"rollouts.address: {address} serves another model ('{description.model}', {description.architecture}) "
                f"of {description.shape[name]:,} {unit}, and the policy has {shape[name]:,}; start it with the "
                "policy's base model"
            )


def check_served_model(
    description: ServerDescription, model: PreTrainedModel, settings: RolloutSettings
) -> None:
    """Check capabilities and model shape (`check_server_capabilities`, `check_model_shape`) for a loaded policy."""
    config: Any = unwrap_model(model).config.get_text_config()
    check_server_capabilities(description, settings, select_served_rank(model))
    known = {
        name: getattr(config, name)
        for name in _SHAPE_UNITS
        if isinstance(getattr(config, name, None), int)
    }
    check_model_shape(description, known, settings.address or "")


def check_server_tokenizer(
    server: InferenceServer, description: ServerDescription, tokenizer: PreTrainedTokenizerBase
) -> None:
    """Raise SettingsError if the server tokenises a text differently from the policy's tokenizer."""
    size = len(tokenizer)
    sample_ids = [
        position * size // _NUM_COMPARED_TOKENS for position in range(_NUM_COMPARED_TOKENS)
    ]
    special = set(tokenizer.all_special_ids)
    text = str(tokenizer.decode([token for token in sample_ids if token not in special]))
    policy_ids = [int(token) for token in tokenizer.encode(text, add_special_tokens=False)]
    try:
        server_ids = server.tokenize_text(description.model, text)
    except (ServerErrorResponse, KeyError, TypeError, ValueError) as error:
        raise SettingsError(
            f"rollouts.address: {server.address} does not return token ids ({error})"
        ) from error
    if policy_ids != server_ids:
        position = next(
            (i for i, (a, b) in enumerate(zip(policy_ids, server_ids, strict=False)) if a != b),
            len(policy_ids),
        )
        raise SettingsError(
            f"rollouts.address: {server.address} has another tokenizer than the policy: it reads a text of "
            f"{len(policy_ids)} tokens as {len(server_ids)}, differing from token {position + 1} on; start it with "
            "the policy's base model"
        )
