"""Routes of sampling: sampling sessions, samples."""

from __future__ import annotations

import secrets

from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

from flows.service.http.callers import called
from flows.service.http.promises import accept, called_with, new_seed, promise
from flows.service.http.refusals import Refused
from flows.service.http.training_routes import readable_checkpoint, sampler_name
from flows.service.wire.bodies import CreateSamplingSession, JoinSamplingSession, SampleBody

__all__ = ["CLONE_SEQS", "SAMPLING_ROUTES"]

CLONE_SEQS = 1_000_000_000  # numbers of samples of one copy of a client


async def _create_session(request: Request) -> Response:
    server, caller, body, payload = await called_with(request, CreateSamplingSession)
    await server.own_session(caller, body.session_id)
    if body.model_path is not None:
        found = await readable_checkpoint(server, caller, body.model_path)
        if found.kind == "external_weights":
            raise Refused(422, f"{body.model_path} is for other programs; sample from weights or sampler_weights")
        base = found.base
        if body.base_model is not None and body.base_model != base:
            raise Refused(422, f"base_model: {body.model_path} is of '{base}', not '{body.base_model[:200]}'")
    elif body.base_model is None:
        raise Refused(422, "create_sampling_session: give model_path or base_model")
    else:
        base = body.base_model
    server.known_base(base)
    target = sampler_name(body.session_id, body.sampling_session_seq_id)
    facts = {"base": base, "path": body.model_path}
    await accept(server, request, caller, "create_sampler", target, 0, payload, facts)
    await server.note(caller, "sampler_create", target, body.model_path or base)
    return JSONResponse({"type": "create_sampling_session", "sampling_session_id": target})


async def _sampler(request: Request) -> Response:
    server, caller = await called(request)
    sampler_id = request.path_params["sampler_id"]
    await server.own_target(caller, sampler_id)
    found = await server.ask(server.store.sampler, sampler_id)
    if found is not None and found.base:
        base, path = found.base, found.path
    else:  # not made yet
        made = await server.ask(server.store.creation_of_sampler, sampler_id)
        if made is None:
            raise Refused(404, f"there is no sampler '{sampler_id[:200]}'")
        base, path = made.facts["base"], made.facts["path"]
    return JSONResponse({"sampler_id": sampler_id, "base_model": base, "model_path": path})


async def _join(request: Request) -> Response:
    server, caller, body, _ = await called_with(request, JoinSamplingSession)
    await server.own_target(caller, body.sampling_session_id)
    number = await server.ask(server.store.next_clone, body.sampling_session_id)
    return JSONResponse({"client_counter": number})


async def _sample(request: Request) -> Response:
    server, caller, body, payload = await called_with(request, SampleBody)
    await server.own_target(caller, body.sampling_session_id)
    mark = secrets.token_hex(8)
    facts = {"seed": new_seed(), "sample_sequence_ids": [f"{mark}-{index}" for index in range(body.num_samples)]}
    target = body.sampling_session_id
    taken = await accept(server, request, caller, "sample", target, body.seq_id, payload, facts)
    return promise(taken, sample_sequence_ids=taken.facts["sample_sequence_ids"])


SAMPLING_ROUTES = [
    Route("/create_sampling_session", _create_session, methods=["POST"]),
    Route("/join_sampling_session", _join, methods=["POST"]),
    Route("/samplers/{sampler_id}", _sampler, methods=["GET"]),
    Route("/asample", _sample, methods=["POST"]),
]
