"""The inference server's dialect: vLLM's HTTP interface, which `posttrain serve` speaks as well.

Tokens go in and tokens with log-probabilities come out (`/v1/completions` with a prompt of ids and `return_token_ids`);
orders about weights go to the server's workers by `/collective_rpc`, to methods that are
deployments/vllm/posttrain_worker.py in vLLM and flows/serving/rollout_orders.py in
`posttrain serve`. Written from the source of vLLM 0.30.0.
"""

from __future__ import annotations

import contextlib
import math
import os
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rl_core.errors import SettingsError
from rl_core.rollout_workers.http_connections import JsonConnections, ServerAway, ServerRefusal
from rl_core.settings import RolloutSettings, SamplingSettings

__all__ = ["InferenceServer", "LoadedWeights", "ServedTokens", "ServerDescription", "ServerState"]

ASK_S, ORDER_S = 10.0, 600.0  # of a question; of an order about weights or sleep
FORGET_S = 60.0  # for requests that hold blocks of the prefix cache to end
IMPOSSIBLE = -9999.0  # the dialect's number for the log-probability of a token that cannot come
PROCESSED = "processed_logprobs"  # of the distribution that tokens are drawn from, temperature included
OWN, VLLM = "posttrain", "vllm"  # engines
_MOST_STOPS = 16  # stop texts of one request that `posttrain serve` takes; the trainer looks for all of them itself


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
    def words(self) -> str:
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
    compared: int  # tensors that are in its model under the name and shape of the file, and were looked at afterwards
    differing: Sequence[str]  # names of those that are not what the file holds


class InferenceServer:
    """Client of one server. Any thread. Raises: ServerAway, ServerRefusal in all methods that ask."""

    def __init__(self, settings: RolloutSettings) -> None:
        """Nothing is sent yet. Raises: SettingsError for a key that is not set."""
        self.settings = settings.server
        self.address = settings.address or ""
        self._connections = JsonConnections(settings.base_url, _key(self.settings.key_variable))

    def describe(self) -> ServerDescription:
        """Ask for everything. Raises: SettingsError for a server that speaks another dialect; ServerAway."""
        try:
            version = self._connections.get("/version", ASK_S)["version"]
            listed = self._connections.get("/v1/models", ASK_S)["data"]
            names = [str(card["id"]) for card in listed if not card.get("parent")]
        except (KeyError, TypeError) as error:
            raise SettingsError(
                f"rollouts.address: {self.address} answers, but not as vLLM does (/version and /v1/models: no {error})"
            ) from None
        except ServerRefusal as refusal:
            raise SettingsError(f"rollouts.address: {_advice(refusal)}") from refusal
        name = self.settings.model or (names[0] if names else "")
        if name not in names:
            raise SettingsError(
                f"rollouts.server.model: {self.address} serves no '{name}', but {', '.join(names) or 'no model'}"
            )
        told = self._order("describe", ASK_S)
        try:
            return ServerDescription(
                engine=str(told["engine"]), version=str(version), model=name, architecture=str(told["architecture"]),
                shape={key: int(told["shape"][key]) for key in ("vocab_size", "hidden_size", "num_hidden_layers")},
                context=int(told["context"]), dtype=str(told["dtype"]), logprobs=str(told["logprobs"]),
                lora_rank=int(told["lora_rank"]), sleeps=bool(told["sleeps"]),
                state=ServerState(str(told["instance"]), str(told["weights"])),
                versions={str(package): str(number) for package, number in told["versions"].items()},
            )  # fmt: skip
        except (KeyError, TypeError, ValueError, AttributeError) as error:
            raise SettingsError(
                f"rollouts.address: the worker extension of {self.address} is of another version of posttrain ("
                f"{type(error).__name__}: {error}); start the server with this checkout's deployments/vllm/start.py"
            ) from error

    def state(self) -> ServerState:
        """Ask for the process and its weights."""
        with _failures_as_losses():
            told = self._order("state", ASK_S)
        return ServerState(str(told["instance"]), str(told["weights"]))

    def tokenize(self, name: str, text: str) -> list[int]:
        """Ids of a text by the server's tokenizer, without special tokens."""
        body = {"model": name, "prompt": text, "add_special_tokens": False}
        return [int(token) for token in self._connections.post("/tokenize", body, ASK_S)["tokens"]]

    # Tokens

    def complete(
        self, name: str, prompt_ids: Sequence[int], most: int, sampling: SamplingSettings, seed: Mapping[str, int],
        eos_ids: Sequence[int],
    ) -> ServedTokens:  # fmt: skip
        """Sample after a prompt: up to `most` tokens, one of `eos_ids` (which is kept), or about a stop text.

        Args:
            name: of the model, or of an adapter.
            seed: `seed`, and for `posttrain serve` `drawn`.
        Raises: ServerAway; ServerRefusal for a request that will never be answered, or an answer that is none.
        """
        cuts, timeout_s = self._connections.cuts, self.settings.timeout_s
        body = {
            "model": name, "prompt": list(prompt_ids), "max_tokens": most, "n": 1, "stream": False, **seed,
            "temperature": sampling.temperature, "top_p": sampling.top_p, "top_k": sampling.top_k,
            "min_p": sampling.min_p, "repetition_penalty": sampling.repetition_penalty,
            "stop_token_ids": list(eos_ids), "ignore_eos": True, "stop": list(sampling.stop[:_MOST_STOPS]),
            "include_stop_str_in_output": True, "skip_special_tokens": False, "add_special_tokens": False,
            "logprobs": 0, "return_token_ids": True, "return_tokens_as_token_ids": True,
        }  # fmt: skip
        end = time.monotonic() + timeout_s
        while True:
            try:
                with _failures_as_losses():
                    return _tokens(self._connections.post("/v1/completions", body, timeout_s, cuts), prompt_ids)
            except ServerRefusal as refusal:
                if refusal.status != 429:
                    raise
                if time.monotonic() > end:
                    raise ServerAway(str(refusal)) from refusal
                time.sleep(min(max(refusal.retry_after, 0.05), 5.0))

    # Weights

    def load_weights(self, folder: Path) -> LoadedWeights:
        """Have the weights of a model folder loaded in place of the present ones; see `forget_prefixes`."""
        return _loaded(self._orders("load_weights", ORDER_S, folder=str(folder)))

    def forget_prefixes(self) -> None:
        """Have the prefix cache emptied, which vLLM does not do (`success: false`) while requests hold blocks of it.

        Those of a run that was stopped may still end. Raises: ServerRefusal where they do not within FORGET_S.
        """
        end = time.monotonic() + FORGET_S
        while True:
            told = self._connections.post("/reset_prefix_cache", {}, ORDER_S)
            if not isinstance(told, dict) or told.get("success", True):
                return
            if time.monotonic() > end:
                raise ServerRefusal(
                    f"{self.address} keeps what it computed with the weights before these: for {FORGET_S:g} s it has "
                    "answered requests of others; give each run a server of its own", 0
                )  # fmt: skip
            time.sleep(0.1)

    def load_adapter(self, name: str, folder: Path) -> LoadedWeights:
        """Have an adapter of peft's format loaded under a name of its own."""
        read = _loaded(self._orders("read_weights", ORDER_S, folder=str(folder)))
        self._connections.post("/v1/load_lora_adapter", {"lora_name": name, "lora_path": str(folder)}, ORDER_S)
        return read

    def unload_adapter(self, name: str, timeout_s: float = ORDER_S) -> None:
        """Have an adapter dropped; one that is not there is no error."""
        try:
            self._connections.post("/v1/unload_lora_adapter", {"lora_name": name}, timeout_s)
        except ServerRefusal as refusal:
            if refusal.status not in (400, 404):
                raise

    def sleep(self) -> None:
        """Have GPU memory given up; weights stay in the machine's memory."""
        with _failures_as_losses():
            self._connections.post("/sleep?level=1", {}, ORDER_S)

    def is_asleep(self) -> bool:
        """True = it has given up its memory, as at the order of an earlier run."""
        with _failures_as_losses():
            return bool(self._connections.get("/is_sleeping", ASK_S)["is_sleeping"])

    def wake(self) -> None:
        """Inverse of `sleep`."""
        with _failures_as_losses():
            self._connections.post("/wake_up", {}, ORDER_S)

    def close(self) -> None:
        """Cut all connections."""
        self._connections.close()

    def _order(self, method: str, timeout_s: float, **arguments: str) -> Mapping[str, Any]:
        """Answer of the first of the server's workers."""
        return self._orders(method, timeout_s, **arguments)[0]

    def _orders(self, method: str, timeout_s: float, **arguments: str) -> list[Mapping[str, Any]]:
        """Answers of all of the server's workers. Raises: SettingsError where they do not know our methods."""
        body = {"method": f"posttrain_{method}", "kwargs": arguments}
        try:
            results = self._connections.post("/collective_rpc", body, timeout_s)["results"]
            if results and all(isinstance(result, dict) for result in results):
                return list(results)
        except (KeyError, TypeError):
            pass
        except ServerRefusal as refusal:
            if method != "describe" and refusal.status not in (404, 405):
                raise
            raise SettingsError(f"rollouts.address: {_advice(refusal)}") from refusal
        raise SettingsError(f"rollouts.address: {self.address} does not take posttrain's orders; {_START}")


_START = (
    "start vLLM with deployments/vllm/start.py, whose workers do, or `posttrain serve` with --set serving.rollouts=true"
)


@contextlib.contextmanager
def _failures_as_losses() -> Iterator[None]:
    """Raise an error of the server itself (5xx) as ServerAway: an engine that has failed may be started again."""
    try:
        yield
    except ServerRefusal as refusal:
        if refusal.status < 500:
            raise
        raise ServerAway(str(refusal)) from refusal


def _advice(refusal: ServerRefusal) -> str:
    """An error of a server that was just met, with what to do."""
    if refusal.status in (401, 403):
        return f"{refusal}; set rollouts.server.key_variable to the environment variable that holds the server's key"
    return f"{refusal}; it does not take posttrain's orders: {_START}"


def _key(variable: str | None) -> dict[str, str]:
    if variable is None:
        return {}
    if not (key := os.environ.get(variable, "").strip()):
        raise SettingsError(f"rollouts.server.key_variable: the environment variable {variable} is not set")
    if not (key.isascii() and key.isprintable()):
        raise SettingsError(
            f"rollouts.server.key_variable: the environment variable {variable} holds characters that no key has"
        )
    return {"Authorization": f"Bearer {key}"}


def _tokens(answer: Any, prompt_ids: Sequence[int]) -> ServedTokens:
    """Tokens of an answer. Raises: ServerRefusal for one that is incomplete, or to another prompt."""
    try:
        choice = answer["choices"][0]
        tokens = [int(token) for token in choice["token_ids"]]
        told = [float(value) for value in choice["logprobs"]["token_logprobs"]]
        read, instance = list(choice["prompt_token_ids"]), str(answer["system_fingerprint"])
    except (KeyError, IndexError, TypeError, ValueError) as error:
        raise ServerRefusal(
            f"an answer of /v1/completions has no token_ids, prompt_token_ids or logprobs ({type(error).__name__}: "
            f"{error}); is it a version of vLLM that was not tested?", 0
        ) from error  # fmt: skip
    if len(tokens) != len(told):
        raise ServerRefusal(f"an answer of /v1/completions has {len(told)} log-probs for {len(tokens)} tokens", 0)
    if read != list(prompt_ids):
        raise ServerRefusal(
            f"the server read another prompt than it was sent: {len(read)} tokens in place of {len(prompt_ids)}", 0
        )
    return ServedTokens(tokens, [-math.inf if value <= IMPOSSIBLE else value for value in told], instance)


def _loaded(results: Sequence[Mapping[str, Any]]) -> LoadedWeights:
    """The reports of all workers as one: they have to have read the same."""
    found = {str(result["digest"]) for result in results}
    return LoadedWeights(
        digest=found.pop() if len(found) == 1 else f"{len(found)} different ones",
        compared=sum(int(result.get("compared", 0)) for result in results),
        differing=[str(name) for result in results for name in result.get("differing", ())],
    )
