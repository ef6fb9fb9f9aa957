"""Bodies of sampling requests. P tokens of the prompt, K targets at one position."""

from __future__ import annotations

import numpy as np

from flows.service.wire.arrays import MOST_DENSE
from flows.service.wire.bodies import Prompt, SampleBody, SamplingBody, TensorBody
from flows.service.wire.json_body import read_body
from rl_core.errors import ServiceError
from rl_core.service.input_checks import NO_TARGET
from rl_core.service.requests import SampleParameters, SampleRequest, dense_rows

__all__ = ["decode_sample", "prompt_tokens"]

_INT32 = np.iinfo(np.int32)


def decode_sample(payload: bytes, seed: int, target: str) -> SampleRequest:
    """A sampling request. Raises: ServiceError (user).

    Args:
        seed: drawn at acceptance; one in the body takes its place. target: sampler.
    """
    body = read_body(SampleBody, payload)
    if body.prompt_alt_tokens_k:
        raise ServiceError("asample: prompt_alt_tokens_k is not supported", "user")
    if body.record_stability_info:
        raise ServiceError("asample: record_stability_info is not supported, as stable_reinforce is not", "user")
    prompt = prompt_tokens(body.prompt)
    last = body.prompt_logprobs_last_n
    if last is not None and not (body.prompt_logprobs and 1 <= last < len(prompt)):
        raise ServiceError(
            f"prompt_logprobs_last_n: {last}, expected 1 to {len(prompt) - 1}, with prompt_logprobs", "user"
        )
    chosen = body.sampling_params.seed
    return SampleRequest(
        sampler_id=target,
        prompt=prompt,
        seed=seed if chosen is None else chosen,
        num_samples=body.num_samples,
        parameters=_parameters(body.sampling_params),
        prompt_logprobs=bool(body.prompt_logprobs),
        topk_prompt_logprobs=body.topk_prompt_logprobs,
        topk_sample_logprobs=body.topk_sample_logprobs,
        target_prompt_logprobs=_targets(body.target_prompt_logprobs),
    )


def prompt_tokens(prompt: Prompt) -> np.ndarray:
    """Tokens of all parts, int32 [P]. Raises: ServiceError (user) for parts that are not text."""
    tokens: list[int] = []
    for index, chunk in enumerate(prompt.chunks):
        if chunk.type != "encoded_text":
            raise ServiceError(f"prompt.chunks[{index}]: {chunk.type} chunks are not supported, only text", "user")
        tokens += chunk.tokens
    return _integers(tokens, "prompt").astype(np.int32)


def _integers(values: list[int] | list[float], place: str) -> np.ndarray:
    try:
        found = np.array(values, np.int64)
    except (OverflowError, ValueError):
        raise ServiceError(f"{place}: numbers beyond 64 bits", "user") from None
    if len(found) and not _INT32.min <= int(found.min()) <= int(found.max()) <= _INT32.max:
        raise ServiceError(f"{place}: numbers beyond 32 bits", "user")
    return found


def _parameters(given: SamplingBody) -> SampleParameters:
    stop: tuple[str, ...] | tuple[int, ...] | None
    if given.stop is None:
        stop = None
    elif isinstance(given.stop, str):
        stop = (given.stop,)
    else:
        stop = tuple(given.stop)  # type: ignore[assignment]
    return SampleParameters(
        max_tokens=given.max_tokens, stop=stop, temperature=given.temperature, top_k=given.top_k, top_p=given.top_p
    )


def _targets(given: TensorBody | None) -> np.ndarray | None:
    """Tokens asked for at each position but the first, int64 [P - 1, K]; -1 = nothing."""
    if given is None:
        return None
    place = "target_prompt_logprobs"
    if given.dtype != "int64":
        raise ServiceError(f"{place}: dtype {given.dtype}, expected int64", "user")
    shape = tuple(given.shape or ())
    if len(shape) != 2 or min(shape) < 0 or shape[0] * shape[1] > MOST_DENSE:
        raise ServiceError(f"{place}: shape {shape}, expected (tokens of the prompt - 1, K)", "user")
    values = _integers(given.data, place)
    if given.sparse_crow_indices is None and given.sparse_col_indices is None:
        if len(values) != shape[0] * shape[1]:
            raise ServiceError(f"{place}: {len(values)} values do not fill shape {shape}", "user")
        return values.reshape(shape)
    starts = _integers(given.sparse_crow_indices or [], f"{place}.sparse_crow_indices")
    columns = _integers(given.sparse_col_indices or [], f"{place}.sparse_col_indices")
    return dense_rows(values, starts, columns, (shape[0], shape[1]), fill=NO_TARGET)
