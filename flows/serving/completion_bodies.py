"""Bodies of requests for tokens, and of a trainer's orders, in vLLM's form."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import BaseModel, ConfigDict, Field

__all__ = ["AdapterBody", "AdapterNameBody", "CompletionBody", "OrderBody", "TokenizeBody"]

Name = Annotated[str, Field(min_length=1, max_length=1000)]
Finite = Annotated[float, Field(allow_inf_nan=False)]
TokenId = Annotated[int, Field(ge=0, lt=2**31)]
StopText = Annotated[str, Field(min_length=1, max_length=1000)]


class _TokenBody(BaseModel):
    """A JSON object without unknown keys; numbers are numbers."""

    model_config = ConfigDict(extra="forbid", frozen=True, strict=True, protected_namespaces=())


class CompletionBody(_TokenBody):
    """A request for tokens after a prompt of token ids. Beyond vLLM: `drawn`, and seeds of 128 bits."""

    model: Name
    prompt: Annotated[list[TokenId], Field(min_length=1, max_length=2**20)]
    max_tokens: Annotated[int, Field(ge=1, le=2**31)] = 16
    n: Annotated[int, Field(ge=1)] = 1
    stream: Literal[False] = False
    temperature: Annotated[Finite, Field(ge=0, le=5)] = 1.0
    top_p: Annotated[Finite, Field(gt=0, le=1)] = 1.0
    top_k: Annotated[int, Field(ge=0, le=2**31)] = 0
    min_p: Annotated[Finite, Field(ge=0, le=1)] = 0.0
    repetition_penalty: Annotated[Finite, Field(ge=1, le=1)] = 1.0  # others are not supported
    seed: Annotated[int, Field(ge=0, lt=2**128)] | None = None
    drawn: Annotated[int, Field(ge=0, le=2**31)] = 0  # random numbers of the seed that earlier requests have used
    stop: Annotated[list[StopText], Field(max_length=16)] = []
    stop_token_ids: Annotated[list[TokenId], Field(max_length=2**18)] = []
    ignore_eos: bool = False
    logprobs: Annotated[int, Field(ge=0, le=20)] | None = None
    return_token_ids: bool = False
    return_tokens_as_token_ids: bool = False
    include_stop_str_in_output: bool = False
    skip_special_tokens: bool = True
    add_special_tokens: bool = True  # has no effect on a prompt of ids
    user: Annotated[str, Field(max_length=1000)] = ""


class TokenizeBody(_TokenBody):
    """A text whose token ids are asked for."""

    model: Name
    prompt: Annotated[str, Field(max_length=2**20)]
    add_special_tokens: bool = True


class OrderBody(_TokenBody):
    """An order to the workers: of ours, those of `RolloutOrders`."""

    method: Name
    kwargs: dict[str, str] = {}
    args: list[str] = []
    timeout: Annotated[Finite, Field(gt=0)] | None = None  # seconds


class AdapterBody(_TokenBody):
    """An adapter to load."""

    lora_name: Name
    lora_path: Name


class AdapterNameBody(_TokenBody):
    """An adapter to drop."""

    lora_name: Name
