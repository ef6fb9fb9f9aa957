"""Checks of requests before anything is computed. Every refusal names the datum, the input and what was expected.

T tokens, K targets at one position.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NoReturn

import numpy as np

from rl_core.errors import ServiceError, suggest_name
from rl_core.losses.policy import NOT_RECORDED
from rl_core.service.loss_function import LossFunction, LossInput
from rl_core.service.loss_registry import find_loss
from rl_core.service.requests import (
    AdamParameters,
    AdapterConfig,
    Datum,
    ForwardBackward,
    SampleParameters,
    SampleRequest,
)
from rl_core.settings import ServiceEngineSettings
from rl_core.settings.common import MIN_TEMPERATURE

MAX_STOP_SEQUENCES = 64
REFERENCE_OPTION = "reference"  # the only option whose value is a string
NO_TARGET = -1  # in `SampleRequest.target_prompt_logprobs`
MAX_EVALUATED_TOKENS = 1 << 18  # scored or sampled by one evaluation, because training waits for it
MAX_RESAMPLES = 100_000
MAX_RECORDED_LOGPROB = 1e-3  # of a recorded token; rounding may take log 1 above 0
MIN_EPS = 1e-30  # at 0, as which float32 reads 1e-300, a gradient of 0 is an update of 0 / 0


@dataclass(frozen=True, slots=True)
class ModelLimits:
    """Limits of a base model."""

    context: int
    vocab_size: int


@dataclass(frozen=True, slots=True)
class CheckedRequest:
    """Request whose arrays have the right types and shapes."""

    loss: LossFunction
    options: dict[str, float]
    tokens: list[np.ndarray]  # int64 [T]
    inputs: list[dict[str, np.ndarray]]  # float32 or int64; the same names for all datums
    reference: str = ""  # model that supplies `ref_logprobs`; "" = none


def refuse_request(message: str) -> NoReturn:
    """Raise ServiceError for an error in the request."""
    raise ServiceError(message, "user")


def check_forward_backward(
    request: ForwardBackward, limits: ModelLimits, settings: ServiceEngineSettings
) -> CheckedRequest:
    """Convert the request to arrays of fixed types. Raises: ServiceError (user) if it cannot be computed."""
    loss = find_loss(request.loss_fn)
    reference = _read_reference_option(loss, request.loss_fn_config)
    config = dict(request.loss_fn_config)
    config.pop(REFERENCE_OPTION, None)
    options = _check_loss_options(loss, config)
    if not request.data:
        refuse_request("data: a request needs at least one datum")
    if len(request.data) > settings.max_data:
        refuse_request(
            f"data: {len(request.data)} datums; at most {settings.max_data} in one request (max_data)"
        )
    tokens, inputs = [], []
    for index, datum in enumerate(request.data):
        field_path = f"data[{index}]"
        tokens.append(_check_token_ids(datum.tokens, f"{field_path}.model_input", limits))
        if len(tokens[-1]) > limits.context:
            refuse_request(
                f"{field_path}.model_input: {len(tokens[-1])} tokens, and the model's context is {limits.context}"
            )
        inputs.append(_check_loss_inputs(datum, loss, field_path, len(tokens[-1]), limits))
    _fill_missing_inputs(inputs, loss)
    names = set(inputs[0])
    for index, datum_inputs in enumerate(inputs):
        if set(datum_inputs) != names:
            name = min(set(datum_inputs) ^ names)
            refuse_request(
                f"data[{index}].loss_fn_inputs: '{name}' must be present in all datums or in none"
            )
    if loss.is_paired:
        _check_pairs(inputs)
    if loss.scored_tokens:
        _check_recorded_tokens(inputs)
    return CheckedRequest(loss, options, tokens, inputs, reference)


def _fill_missing_inputs(inputs: list[dict[str, np.ndarray]], loss: LossFunction) -> None:
    """Fill inputs that only some datums have, if the loss names a value for the others."""
    for name, declared in loss.inputs.items():
        if declared.fill is None or not any(name in arrays for arrays in inputs):
            continue
        for arrays in inputs:
            if name not in arrays:
                like = arrays["target_tokens"]
                arrays[name] = np.full(like.shape, declared.fill, dtype=np.float32)


def _read_reference_option(loss: LossFunction, config: Mapping[str, float | str]) -> str:
    if REFERENCE_OPTION not in config:
        return ""
    name = config[REFERENCE_OPTION]
    if "ref_logprobs" not in loss.inputs:
        refuse_request(
            f"loss_fn_config: {loss.name} takes no reference model; enhanced_ppo and conservative_ppo do"
        )
    if not isinstance(name, str) or not name:
        refuse_request(
            f"loss_fn_config: {REFERENCE_OPTION} is {name!r}, expected base or the name of a reference model"
        )
    return name


def _check_loss_options(loss: LossFunction, config: Mapping[str, float | str]) -> dict[str, float]:
    options = {name: option.default for name, option in loss.options.items()}
    for name, value in config.items():
        if name not in options:
            refuse_request(
                f"loss_fn_config: {loss.name} has no option '{name}'; {suggest_name(name, options)}"
            )
        option = loss.options[name]
        if (
            isinstance(value, bool | str)
            or not isinstance(value, int | float)
            or not math.isfinite(value)
        ):
            refuse_request(f"loss_fn_config: {name} is {value!r}, expected a finite number")
        if not option.low <= value <= option.high:
            refuse_request(
                f"loss_fn_config: {name} is {value}, expected {option.low:g} to {option.high:g}"
            )
        options[name] = float(value)
    if options.get("clip_high_threshold", 1.0) < options.get("clip_low_threshold", 0.0):
        refuse_request("loss_fn_config: clip_low_threshold must not be above clip_high_threshold")
    return options


def _check_token_ids(
    values: np.ndarray, field_path: str, limits: ModelLimits, *, min_token: int = 0
) -> np.ndarray:
    """Check that the values are integers [T] within the vocabulary; return them as int64."""
    if not isinstance(values, np.ndarray) or values.dtype.kind not in "iu":
        refuse_request(f"{field_path}: {_describe_type(values)}, expected an array of integers")
    if values.ndim != 1 or not values.size:
        refuse_request(
            f"{field_path}: shape {values.shape}, expected at least one token in one dimension"
        )
    _check_vocabulary(values, field_path, limits, min_token)
    return values.astype(np.int64)


def _check_vocabulary(
    values: np.ndarray, field_path: str, limits: ModelLimits, min_token: int = 0
) -> None:
    is_invalid = (values < min_token) | (values >= limits.vocab_size)
    if bool(is_invalid.any()):
        first_index = tuple(int(axis) for axis in np.argwhere(is_invalid)[0])
        position = first_index[0] if len(first_index) == 1 else first_index
        refuse_request(
            f"{field_path}: token {values[first_index]} at {position} is outside the vocabulary, "
            f"0..{limits.vocab_size - 1}"
        )


def _describe_type(values: object) -> str:
    return str(values.dtype) if isinstance(values, np.ndarray) else type(values).__name__


def _check_loss_inputs(
    datum: Datum, loss: LossFunction, field_path: str, length: int, limits: ModelLimits
) -> dict[str, np.ndarray]:
    field_path = f"{field_path}.loss_fn_inputs"
    for name in datum.inputs:
        if name not in loss.inputs:
            refuse_request(
                f"{field_path}: {loss.name} has no input '{name}'; {suggest_name(name, loss.inputs)}"
            )
    arrays: dict[str, np.ndarray] = {}
    for name, declared in loss.inputs.items():
        if name not in datum.inputs:
            if declared.required:
                refuse_request(f"{field_path}: {loss.name} needs '{name}' ({declared.doc})")
            continue
        targets = arrays.get("target_tokens")
        shape: tuple[int, ...] = (1,) if declared.shape == "one" else (length,)
        if declared.shape == "columns":
            shape = (length, _count_columns(datum.inputs[name]))
        if declared.shape == "targets" and targets is not None:
            shape = targets.shape
        arrays[name] = _check_input_array(
            datum.inputs[name], declared, f"{field_path}['{name}']", shape, name == "target_tokens"
        )
        if name in ("target_tokens", loss.scored_tokens):
            _check_vocabulary(arrays[name], f"{field_path}['{name}']", limits)
    if "weights" in loss.inputs and "weights" not in arrays and arrays["target_tokens"].ndim == 2:
        refuse_request(
            f"{field_path}: several targets per position need 'weights' of the same shape"
        )
    return arrays


def _check_input_array(
    values: np.ndarray,
    declared: LossInput,
    field_path: str,
    shape: tuple[int, ...],
    is_target: bool,
) -> np.ndarray:
    kinds, noun = ("iu", "integers") if declared.kind == "int" else ("fiu", "numbers")
    if not isinstance(values, np.ndarray) or values.dtype.kind not in kinds:
        refuse_request(f"{field_path}: {_describe_type(values)}, expected {noun}")
    allows_several = is_target and declared.shape == "targets"
    checked_shape = values.shape[:1] if allows_several and values.ndim == 2 else values.shape
    if checked_shape != shape or not values.size:
        expected = f"{shape} or ({shape[0]}, K)" if allows_several else f"{shape}"
        refuse_request(f"{field_path}: shape {values.shape}, expected {expected}")
    if declared.kind == "int":
        return values.astype(np.int64)
    with np.errstate(over="ignore"):  # values beyond float32 become infinite and are refused
        numbers = values.astype(np.float32)
    if not bool(np.isfinite(numbers).all()):
        first_index = np.argwhere(~np.isfinite(numbers))[0]
        value = values[tuple(first_index)]
        refuse_request(f"{field_path}: {value} at {first_index.tolist()}, expected finite numbers")
    return numbers


def _count_columns(values: object) -> int:
    """Return K of an array [T, K]; 1 for anything else, whose shape is then refused."""
    return values.shape[1] if isinstance(values, np.ndarray) and values.ndim == 2 else 1


def _check_recorded_tokens(inputs: list[dict[str, np.ndarray]]) -> None:
    """Check that all datums have equally many recorded tokens per position, and any where an advantage is not 0."""
    num_columns = inputs[0]["sampler_top_tokens"].shape[1]
    for index, datum_inputs in enumerate(inputs):
        tokens, logprobs = (
            datum_inputs["sampler_top_tokens"],
            datum_inputs["sampler_top_logprobs"],
        )
        field_path = f"data[{index}].loss_fn_inputs"
        if tokens.shape != logprobs.shape or tokens.shape[1] != num_columns:
            refuse_request(
                f"{field_path}: sampler_top_tokens {tokens.shape} and sampler_top_logprobs {logprobs.shape}, expected "
                f"({len(tokens)}, {num_columns}) as in the first datum"
            )
        if bool((logprobs > MAX_RECORDED_LOGPROB).any()):
            refuse_request(f"{field_path}['sampler_top_logprobs']: expected at most 0")
        is_recorded = (logprobs > NOT_RECORDED).any(axis=1)
        missing = np.flatnonzero((datum_inputs["advantages"] != 0) & ~is_recorded)
        if len(missing):
            refuse_request(
                f"{field_path}['advantages']: not 0 at position {missing[0]}, whose token was not sampled with "
                "record_stability_info"
            )


def _check_pairs(inputs: list[dict[str, np.ndarray]]) -> None:
    if len(inputs) % 2:
        refuse_request(
            f"data: {len(inputs)} datums, expected pairs: datums 2 i and 2 i + 1 belong together"
        )
    for index in range(0, len(inputs), 2):
        marks = sorted(bool(inputs[index + side]["preferred"][0]) for side in (0, 1))
        if marks != [False, True]:
            refuse_request(
                f"data[{index}] and data[{index + 1}]: one of a pair has preferred 1, the other 0"
            )


def check_adapter(config: AdapterConfig, settings: ServiceEngineSettings) -> None:
    """Refuse an adapter that cannot be created. Raises: ServiceError (user)."""
    if not 1 <= config.rank <= settings.max_rank:
        refuse_request(
            f"lora_config.rank: {config.rank}, expected 1 to {settings.max_rank} (max_rank)"
        )
    if not math.isfinite(config.alpha) or config.alpha <= 0:
        refuse_request(f"lora_config.alpha: {config.alpha} must be above 0")
    if not (config.train_attn or config.train_mlp or config.train_unembed):
        refuse_request(
            "lora_config: train_attn, train_mlp and train_unembed are all false, so nothing would be trained"
        )


def _is_number(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


def check_adam(adam: AdamParameters, muon_momentum: float) -> None:
    """Refuse parameters that the optimizer does not accept. Raises: ServiceError (user)."""
    limits = {
        "learning_rate": (adam.learning_rate, 0.0, 1e3),
        "beta1": (adam.beta1, 0.0, math.nextafter(1.0, 0.0)),
        "beta2": (adam.beta2, 0.0, math.nextafter(1.0, 0.0)),
        "eps": (adam.eps, MIN_EPS, 1.0),
        "weight_decay": (adam.weight_decay, 0.0, 1e6),
        "grad_clip_norm": (adam.grad_clip_norm, -1e12, 1e12),
        "muon_momentum": (muon_momentum, 0.0, math.nextafter(1.0, 0.0)),
    }
    for name, (value, low, high) in limits.items():
        if not (_is_number(value) and low <= value <= high):
            refuse_request(f"adam_params.{name}: {value!r}, expected {low:g} to {high:.17g}")


def check_sample(
    request: SampleRequest, limits: ModelLimits, settings: ServiceEngineSettings
) -> np.ndarray:
    """Return the prompt as int64. Raises: ServiceError (user) for a request that cannot be sampled."""
    prompt = _check_token_ids(request.prompt, "prompt", limits)
    if len(prompt) > limits.context:
        refuse_request(f"prompt: {len(prompt)} tokens, and the model's context is {limits.context}")
    if not 1 <= request.num_samples <= settings.max_samples:
        refuse_request(
            f"num_samples: {request.num_samples}, expected 1 to {settings.max_samples} (max_samples)"
        )
    if isinstance(request.seed, bool) or not isinstance(request.seed, int):
        refuse_request(f"seed: {request.seed!r}, expected an integer")
    max_top = min(settings.max_top, limits.vocab_size)
    for name in ("topk_prompt_logprobs", "topk_sample_logprobs"):
        count = getattr(request, name)
        if not 0 <= count <= max_top:
            refuse_request(f"{name}: {count}, expected 0 to {max_top}")
    if request.recorded_tokens < 0:
        refuse_request(f"recorded_tokens: {request.recorded_tokens}, expected 0 or more")
    targets = request.target_prompt_logprobs
    if targets is not None:
        if not isinstance(targets, np.ndarray) or targets.dtype.kind not in "iu":
            refuse_request(f"target_prompt_logprobs: {_describe_type(targets)}, expected integers")
        num_rows = len(prompt) - 1
        fits = targets.ndim == 2 and len(targets) == num_rows
        if not fits or not 1 <= targets.shape[1] <= settings.max_top:
            refuse_request(
                f"target_prompt_logprobs: shape {targets.shape}, expected ({num_rows}, 1 to {settings.max_top})"
            )
        _check_vocabulary(targets, "target_prompt_logprobs", limits, NO_TARGET)
    _check_sampling_parameters(request, limits)
    return prompt


def _check_sampling_parameters(request: SampleRequest, limits: ModelLimits) -> None:
    parameters = request.parameters
    if parameters.max_tokens is not None and parameters.max_tokens < 1:
        refuse_request(f"max_tokens: {parameters.max_tokens}, expected at least 1")
    temperature = parameters.temperature
    if not (_is_number(temperature) and (temperature == 0 or MIN_TEMPERATURE <= temperature <= 5)):
        refuse_request(f"temperature: {temperature!r}, expected 0 or {MIN_TEMPERATURE:g} to 5")
    if not (_is_number(parameters.top_p) and 0 < parameters.top_p <= 1):
        refuse_request(f"top_p: {parameters.top_p!r}, expected above 0 and at most 1")
    if parameters.top_k < -1:
        refuse_request(f"top_k: {parameters.top_k}, expected -1 (all tokens) or more")
    stops = parameters.stop or ()
    if len(stops) > MAX_STOP_SEQUENCES or len({type(stop) for stop in stops}) > 1 or "" in stops:
        refuse_request(
            f"stop: expected at most {MAX_STOP_SEQUENCES} non-empty texts, or as many token ids"
        )
    for stop in stops:
        if not isinstance(stop, str) and not 0 <= stop < limits.vocab_size:
            refuse_request(
                f"stop: token {stop} is outside the vocabulary, 0..{limits.vocab_size - 1}"
            )


@dataclass(frozen=True, slots=True, kw_only=True)
class EvaluateRequest:
    """Request for a model's scores on texts and of samples to prompts, optionally compared with another model."""

    model: str  # name of a base model or reference model, or a key of `folders`
    against: str | None = None
    texts: tuple[str | np.ndarray, ...] = ()  # texts, or integers [S]
    prompts: tuple[str | np.ndarray, ...] = ()
    num_samples: int = 8  # of each prompt
    parameters: SampleParameters = field(default_factory=lambda: SampleParameters(max_tokens=64))
    seed: int = 0  # of samples and intervals
    confidence: float = 0.95
    resamples: int = 2000
    folders: Mapping[str, str] = field(default_factory=dict)  # of saved weights, by model name

    def check_limits(self, settings: ServiceEngineSettings) -> None:
        """Refuse what can be refused without a model. Raises: ServiceError (user)."""
        if not self.texts and not self.prompts:
            refuse_request("evaluate: neither texts nor prompts in the request")
        for name, rows in (("texts", self.texts), ("prompts", self.prompts)):
            if len(rows) > settings.max_data:
                refuse_request(
                    f"{name}: {len(rows)}; at most {settings.max_data} in one request (max_data)"
                )
        if not 1 <= self.num_samples <= settings.max_samples:
            refuse_request(
                f"num_samples: {self.num_samples}, expected 1 to {settings.max_samples} (max_samples)"
            )
        if not (math.isfinite(self.confidence) and 0 < self.confidence < 1):
            refuse_request(f"confidence: {self.confidence}, expected a number between 0 and 1")
        if not 1 <= self.resamples <= MAX_RESAMPLES:
            refuse_request(f"resamples: {self.resamples}, expected 1 to {MAX_RESAMPLES}")
        sampled = len(self.prompts) * self.num_samples * (self.parameters.max_tokens or 0)
        if self.prompts and self.parameters.max_tokens is None:
            refuse_request("max_tokens: missing; samples of an evaluation need a limit")
        if sampled > MAX_EVALUATED_TOKENS:
            refuse_request(
                f"prompts: {len(self.prompts)} x {self.num_samples} samples of up to {self.parameters.max_tokens} "
                f"tokens; at most {MAX_EVALUATED_TOKENS} tokens in one evaluation"
            )


def encode_checked_rows(
    texts: Sequence[str | np.ndarray],
    field_name: str,
    tokenizer: Any,
    limits: ModelLimits,
    min_tokens: int,
) -> list[list[int]]:
    """Return the token rows of texts; a string is encoded with the tokenizer's defaults.

    Raises: ServiceError (user) with the index of the first row that is too short, too long or outside the vocabulary.
    """
    rows = []
    for index, text in enumerate(texts):
        field_path = f"{field_name}[{index}]"
        if isinstance(text, str):
            row = [int(token) for token in tokenizer(text)["input_ids"]]
        elif isinstance(text, np.ndarray) and text.dtype.kind in "iu" and text.ndim == 1:
            row = text.tolist()
        else:
            refuse_request(f"{field_path}: expected a text, or token ids in one dimension")
        if not min_tokens <= len(row) <= limits.context:
            expected = f"{min_tokens} to {limits.context} (the model's context)"
            refuse_request(f"{field_path}: {len(row)} tokens, expected {expected}")
        for token in row:
            if not 0 <= token < limits.vocab_size:
                vocabulary = f"the vocabulary, 0..{limits.vocab_size - 1}"
                refuse_request(f"{field_path}: token {token} is outside {vocabulary}")
        rows.append(row)
    total = sum(map(len, rows))
    if total > MAX_EVALUATED_TOKENS:
        refuse_request(
            f"{field_name}: {total} tokens; at most {MAX_EVALUATED_TOKENS} in one evaluation"
        )
    return rows
