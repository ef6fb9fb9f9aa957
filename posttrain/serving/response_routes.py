"""Responses API, /v1/responses: a chat whose earlier turns the server keeps in memory.

POST   /v1/responses                  plain or streamed; previous_response_id continues a response
GET    /v1/responses/ID               a stored response
GET    /v1/responses/ID/input_items
DELETE /v1/responses/ID
"""

from __future__ import annotations

import json
from collections import OrderedDict
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

from posttrain.serving.chat_responses import ChatStreamResponse
from posttrain.serving.chat_routes import (
    CheckedChatRequest,
    check_chat_request,
    count_response,
    parse_answers,
    read_full_body,
    record_answer_metrics,
    record_chat_answers,
    submit_requests,
    wait_for_answers,
)
from posttrain.serving.chat_server import ChatServer, find_chat_server
from posttrain.serving.errors import ServingHTTPError
from posttrain.serving.request_bodies import ChatBody, parse_json_object, validate_body
from posttrain.serving.response_items import (
    Message,
    ResponseBuilder,
    build_message_item,
    build_text_part,
    convert_items,
    convert_response_request,
    rename_parameter,
)
from rl_core.chat.prompts import ParsedAnswer
from rl_core.chat.responses import TextStream
from rl_core.inference.serving_requests import RequestProgress, ServedRequest

RESPONSE_PREFIX, CHAT_PREFIX = "resp_", "chatcmpl-"
MAX_STORED_CHARACTERS = 2**26  # of all stored responses; each counts with the turns before it
_MAX_REMEMBERED = 10_000  # ids of removed responses whose fate is known


@dataclass(frozen=True, slots=True)
class StoredResponse:
    """A response that later requests may continue."""

    response: dict[str, Any]
    items: list[dict[str, Any]]  # of its input
    messages: list[Message]  # of all turns up to its output
    size: int  # characters


class ResponseStore:
    """Responses in memory, the newest ones; used on the event loop alone."""

    def __init__(self, max_responses: int, max_characters: int = MAX_STORED_CHARACTERS) -> None:
        self._max_responses, self._max_characters = max_responses, max_characters
        self._stored: OrderedDict[str, StoredResponse] = OrderedDict()
        self._size = 0
        self._removed: OrderedDict[str, str] = OrderedDict()  # id -> what happened to it

    def __len__(self) -> int:
        return len(self._stored)

    def add_response(
        self, response: dict[str, Any], items: list[dict[str, Any]], messages: list[Message]
    ) -> None:
        """Store a response, and drop the oldest ones beyond the limits."""
        size = len(json.dumps([response, items, messages], ensure_ascii=False))
        if size > self._max_characters:  # it would drop all others
            self._remember(
                response["id"], f"has more than the {self._max_characters} characters that are held"
            )
            return
        self._stored[response["id"]] = StoredResponse(response, items, messages, size)
        self._size += size
        while self._stored and (
            len(self._stored) > self._max_responses or self._size > self._max_characters
        ):
            self._remove(
                next(iter(self._stored)),
                f"was dropped: the server holds the newest {self._max_responses} "
                f"(serving.stored_responses) of at most {self._max_characters} characters",
            )

    def note_unstored(self, response_id: str) -> None:
        """Remember that a response was not to be stored."""
        self._remember(response_id, "was not stored, as its request said (store: false)")

    def find_response(self, response_id: str, param: str | None = None) -> StoredResponse:
        """Return a stored response. Raises: ServingHTTPError (404) with the reason."""
        stored = self._stored.get(response_id)
        if stored is None:
            reason = self._removed.get(
                response_id,
                "is not in memory: this server gave no such response, dropped it long ago, or was restarted",
            )
            raise ServingHTTPError(
                404,
                f"response '{response_id[:100]}' {reason}; send the conversation as input instead",
                param=param,
                code="response_not_found",
            )
        return stored

    def delete_response(self, response_id: str) -> None:
        """Delete a stored response. Raises: ServingHTTPError (404)."""
        self.find_response(response_id)
        self._remove(response_id, "was deleted")

    def _remove(self, response_id: str, reason: str) -> None:
        self._size -= self._stored.pop(response_id).size
        self._remember(response_id, reason)

    def _remember(self, response_id: str, reason: str) -> None:
        self._removed[response_id] = reason
        while len(self._removed) > _MAX_REMEMBERED:
            self._removed.popitem(last=False)


async def _create_response(request: Request) -> Response:
    return await count_response(request, partial(_run_response, request))


async def _run_response(request: Request, server: ChatServer, began: float) -> Response:
    store = _find_store(request)
    parameters = parse_json_object(await read_full_body(server, request))
    asked = convert_response_request(parameters)
    history: list[Message] = []
    if asked.previous_id is not None:
        history = store.find_response(asked.previous_id, "previous_response_id").messages
    try:
        body = validate_body(ChatBody, asked.build_chat_parameters(history))
        server.check_model(body.model)
        engine, _ = server.require_ready()
        chat = await check_chat_request(server, body, began)
    except ServingHTTPError as error:
        raise rename_parameter(error) from None
    builder = ResponseBuilder(
        convert_to_response_id(chat.formatter.answer_id), asked, chat.formatter
    )

    def finish(served: ServedRequest, answer: ParsedAnswer) -> dict[str, Any]:
        """Build the response and store it."""
        output = builder.build_output(served, answer)
        response = builder.build_response(served, answer, output)
        if asked.is_stored:
            messages = [*history, *asked.messages, *convert_items(output)]
            store.add_response(response, asked.items, messages)
        else:
            store.note_unstored(builder.id)
        return response

    requests = await chat.build_requests(0, 1)
    if body.stream:
        pending = submit_requests(engine, requests, streams=True)
        events = ResponseEvents(builder, requests[0], finish)
        return _ResponseStream(
            server,
            chat.formatter,
            pending,
            began,
            False,
            partial(record_chat_answers, server, chat, requests),
            events,
        )
    await wait_for_answers(server, request, requests)
    return JSONResponse(_finish_response(server, chat, requests, finish))


def _finish_response(
    server: ChatServer,
    chat: CheckedChatRequest,
    requests: Sequence[ServedRequest],
    finish: Callable[[ServedRequest, ParsedAnswer], dict[str, Any]],
) -> dict[str, Any]:
    answers = parse_answers(chat.formatter, requests)
    record_chat_answers(server, chat, requests, answers)
    record_answer_metrics(server, chat, chat.formatter.count_usage(requests))
    return finish(requests[0], answers[0])


def convert_to_response_id(answer_id: str) -> str:
    """Return the id of a response from the id of its answer, under which it is recorded."""
    return RESPONSE_PREFIX + answer_id.removeprefix(CHAT_PREFIX)


def convert_to_answer_id(response_id: str) -> str:
    """Return the id under which an answer is recorded; ids of chats stay as they are."""
    if response_id.startswith(RESPONSE_PREFIX):
        return CHAT_PREFIX + response_id.removeprefix(RESPONSE_PREFIX)
    return response_id


class ResponseEvents:
    """Formatter of the events of one streamed response; the counterpart of `ChunkFormatter`."""

    def __init__(
        self,
        builder: ResponseBuilder,
        request: ServedRequest,
        finish: Callable[[ServedRequest, ParsedAnswer], dict[str, Any]],
    ) -> None:
        self._builder, self._request, self._finish = builder, request, finish
        formatter = builder.formatter
        self._is_text = formatter.tools is None and not formatter.hides_thought
        self._text: TextStream = formatter.create_text_stream()
        self._number = 0
        self._has_begun = self._has_message = False

    def find_index(self, request: ServedRequest) -> int:
        """Return the index of the only choice."""
        return 0

    def format_progress(self, event: RequestProgress) -> list[dict[str, Any]]:
        """Format new tokens: nothing if there may be a call, which is recognised at its end."""
        events = self._begin()
        if self._is_text and (text := self._text.add_tokens(event.tokens)):
            events += [*self._begin_message(0), self._format_delta(text, 0)]
        return events

    def format_end(self, request: ServedRequest, answer: ParsedAnswer) -> list[dict[str, Any]]:
        """Format the rest of the answer and the complete response."""
        events = self._begin()
        response = self._finish(request, answer)
        for index, item in enumerate(response["output"]):
            if item["type"] == "message":
                events += self._end_message(index, item)
            elif item["type"] == "function_call":
                events += self._format_call(index, item)
            else:
                events.append(
                    self._format("response.output_item.added", output_index=index, item=item)
                )
                events.append(
                    self._format("response.output_item.done", output_index=index, item=item)
                )
        kind = "completed" if response["status"] == "completed" else "incomplete"
        events.append(self._format(f"response.{kind}", response=response))
        return events

    def format_usage(self, requests: Sequence[ServedRequest]) -> dict[str, Any]:
        """Refuse: the usage is part of the last event."""
        raise NotImplementedError("a response has its usage in its last event")

    def _format(self, kind: str, **fields: Any) -> dict[str, Any]:
        self._number += 1
        return {"type": kind, "sequence_number": self._number - 1, **fields}

    def _begin(self) -> list[dict[str, Any]]:
        if self._has_begun:
            return []
        self._has_begun = True
        response = self._builder.build_response(self._request, None, [])
        return [
            self._format("response.created", response=response),
            self._format("response.in_progress", response=response),
        ]

    def _begin_message(self, index: int) -> list[dict[str, Any]]:
        if self._has_message:
            return []
        self._has_message = True
        item_id = self._builder.message_id
        item = build_message_item(item_id, "in_progress")
        place = {"item_id": item_id, "output_index": index, "content_index": 0}
        return [
            self._format("response.output_item.added", output_index=index, item=item),
            self._format("response.content_part.added", **place, part=build_text_part("")),
        ]

    def _format_delta(self, text: str, index: int) -> dict[str, Any]:
        return self._format(
            "response.output_text.delta",
            item_id=self._builder.message_id,
            output_index=index,
            content_index=0,
            delta=text,
            logprobs=[],
        )

    def _end_message(self, index: int, item: dict[str, Any]) -> list[dict[str, Any]]:
        events, part = self._begin_message(index), item["content"][0]
        rest = self._text.finish_text() if self._is_text else part["text"]
        if rest:
            events.append(self._format_delta(rest, index))
        place = {"item_id": item["id"], "output_index": index, "content_index": 0}
        logprobs = part["logprobs"]
        return [
            *events,
            self._format(
                "response.output_text.done", **place, text=part["text"], logprobs=logprobs
            ),
            self._format("response.content_part.done", **place, part=part),
            self._format("response.output_item.done", output_index=index, item=item),
        ]

    def _format_call(self, index: int, item: dict[str, Any]) -> list[dict[str, Any]]:
        place = {"item_id": item["id"], "output_index": index}
        begun = item | {"status": "in_progress", "arguments": ""}
        arguments = item["arguments"]
        done = {"name": item["name"], "arguments": arguments}
        return [
            self._format("response.output_item.added", output_index=index, item=begun),
            self._format("response.function_call_arguments.delta", **place, delta=arguments),
            self._format("response.function_call_arguments.done", **place, **done),
            self._format("response.output_item.done", output_index=index, item=item),
        ]


class _ResponseStream(ChatStreamResponse):
    """Events with names; the last one is response.completed, response.incomplete or error."""

    final_data = b""

    def _encode_event(self, body: dict[str, Any]) -> str:
        name = body.get("type", "error")
        return f"event: {name}\ndata: {json.dumps(body, ensure_ascii=False)}\n\n"


def _find_store(request: Request) -> ResponseStore:
    store: ResponseStore = request.app.state.response_store
    return store


def _authenticate(request: Request) -> tuple[ResponseStore, str]:
    find_chat_server(request).check_token(request)
    return _find_store(request), request.path_params["id"]


async def _retrieve_response(request: Request) -> Response:
    store, response_id = _authenticate(request)
    if request.query_params.get("stream", "false").lower() != "false":
        raise ServingHTTPError(
            422, "stream: a stored response is not streamed again", param="stream"
        )
    return JSONResponse(store.find_response(response_id).response)


async def _list_input_items(request: Request) -> Response:
    store, response_id = _authenticate(request)
    items = store.find_response(response_id).items
    ids = [item["id"] for item in items]
    return JSONResponse(
        {
            "object": "list",
            "data": items,
            "first_id": ids[0] if ids else None,
            "last_id": ids[-1] if ids else None,
            "has_more": False,
        }
    )


async def _delete_response(request: Request) -> Response:
    store, response_id = _authenticate(request)
    store.delete_response(response_id)
    return JSONResponse({"id": response_id, "object": "response", "deleted": True})


async def _refuse_embeddings(request: Request) -> Response:
    find_chat_server(request).check_token(request)
    raise ServingHTTPError(
        400,
        "/v1/embeddings is not supported: a generative model is served here; use a server of embeddings",
        code="unsupported_route",
    )


RESPONSE_ROUTES = [
    Route("/v1/responses", _create_response, methods=["POST"]),
    Route("/v1/responses/{id}", _retrieve_response, methods=["GET"]),
    Route("/v1/responses/{id}", _delete_response, methods=["DELETE"]),
    Route("/v1/responses/{id}/input_items", _list_input_items, methods=["GET"]),
    Route("/v1/embeddings", _refuse_embeddings, methods=["POST"]),
]
